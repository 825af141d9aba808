"""The draft tree: best-first build from a drafter's marginals, visibility, paths, and the check of a stored tree.

Algorithm: Ringel and Romano, "Accelerating Speculative Decoding with Block Diffusion Draft Trees" (arXiv 2604.12989)
and its public code, github.com/liranringel/ddtree, ddtree.py; docs/numerics.md rule 18. Node 0 is the root, the token
that the target chose last and has not been run on; it stands outside the budget. Nodes are numbered in the order in
which they are popped, so a parent always has a smaller number than its child, and depths are not sorted.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from kdtr_cli.errors import InputError

__all__ = ["MAX_BUDGET", "MAX_HORIZON", "Tree", "build_tree", "check_logps", "check_tree", "paths", "visibility"]

MAX_BUDGET = 1024  #: nodes of one tree, the root not counted
MAX_HORIZON = 32  #: depths of one tree; a drafter's block has one row more


@dataclass(frozen=True)
class Tree:
    """A draft tree of n nodes under a root: arrays of n + 1 elements, element 0 the root (parent -1, depth 0, score 0).

    tokens, parents, depths int32; scores float64: the sum of the log-probabilities on the way from the root.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    scores: np.ndarray

    @property
    def n(self) -> int:
        """Nodes without the root."""
        return len(self.tokens) - 1


def build_tree(
    root: int, ids: np.ndarray, logps: np.ndarray, counts: np.ndarray, budget: int, max_depth: int | None = None
) -> Tree:
    """The ``budget`` most probable prefixes of the product of the marginals, in the order in which they are popped.

    ids int32 [L, K], logps float32 [L, K], best first; counts int32 [L]: rank r of depth d + 1 exists iff
    r < counts[d], and a depth without candidates ends the horizon, as ``max_depth`` does. Scores are float64, by the
    reference's formula: a sibling's is (score - logp) + next logp, a first child's score + logp. The largest is popped;
    on a tie the smaller tuple of ranks, a prefix before its extension. The tree is smaller than the budget when no
    candidate is left. InputError for a candidate whose log-probability is NaN or infinite, at any depth.
    """
    check_logps(logps, counts)
    empty = np.flatnonzero(counts <= 0)
    horizon = int(empty[0]) if len(empty) else len(counts)
    if max_depth is not None:
        horizon = min(horizon, max_depth)
    tokens, parents, depths, scores = [root], [-1], [0], [0.0]
    frontier: list[tuple[float, tuple[int, ...], int, float]] = []  # (-score, ranks, parent, score)
    if horizon > 0 and budget > 0:
        first = float(logps[0, 0])
        frontier.append((-first, (0,), 0, first))
    while frontier and len(tokens) <= budget:
        _, ranks, parent, score = heapq.heappop(frontier)
        node, depth, rank = len(tokens), len(ranks), ranks[-1]
        tokens.append(int(ids[depth - 1, rank]))
        parents.append(parent)
        depths.append(depth)
        scores.append(score)
        if rank + 1 < counts[depth - 1]:
            sibling = score - float(logps[depth - 1, rank]) + float(logps[depth - 1, rank + 1])
            heapq.heappush(frontier, (-sibling, (*ranks[:-1], rank + 1), parent, sibling))
        if depth < horizon:
            child = score + float(logps[depth, 0])
            heapq.heappush(frontier, (-child, (*ranks, 0), node, child))
    return Tree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(depths, np.int32), np.array(scores))


def check_logps(logps: np.ndarray, counts: np.ndarray) -> None:
    """InputError naming depth and rank of the first candidate whose log-probability is not a finite number."""
    exists = np.arange(logps.shape[1]) < np.asarray(counts)[:, None]
    wrong = np.argwhere(exists & ~np.isfinite(logps))
    if len(wrong):
        depth, rank = (int(i) for i in wrong[0])
        raise InputError(
            f"the drafter's log-probability at depth {depth + 1}, rank {rank} is {logps[depth, rank]}: "
            "no tree can be built from it; check the drafter's checkpoint"
        )


def visibility(tree: Tree) -> np.ndarray:
    """bool [n + 1, n + 1]: row i sees the root, its ancestors and itself."""
    see = np.zeros((tree.n + 1, tree.n + 1), bool)
    see[0, 0] = True
    for i in range(1, tree.n + 1):
        see[i, :i] = see[tree.parents[i], :i]
        see[i, i] = True
    return see


def paths(tree: Tree) -> list[np.ndarray]:
    """For each node the node numbers int32 [depth + 1] from the root to it, both included."""
    out = [np.zeros(1, np.int32)]
    for i in range(1, tree.n + 1):
        out.append(np.append(out[tree.parents[i]], np.int32(i)))
    return out


def check_tree(
    tokens: np.ndarray,
    parents: np.ndarray,
    depths: np.ndarray,
    budget: int,
    *,
    horizon: int | None = None,
    vocab_size: int | None = None,
) -> list[str]:
    """Every way in which arrays [n + 1] (node 0 the root) are no draft tree, as 'invariant: what, where'; [] if none.

    Works on anything, in bounded time: a cycle is found, not followed. ``horizon`` bounds depths, ``vocab_size`` ids.
    """
    size = len(tokens)
    if not size or len(parents) != size or len(depths) != size:
        return [f"shapes: {size} tokens, {len(parents)} parents and {len(depths)} depths; needed: as many, at least 1"]
    found = []
    if parents[0] != -1 or depths[0] != 0:
        found.append(f"root: node 0 has parent {parents[0]} and depth {depths[0]}; needed: -1 and 0")
    if size - 1 > budget:
        # the rest would be quadratic in a size that only a stranger's file can have
        return [*found, f"budget: {size - 1} nodes; the budget is {budget}"]
    siblings: dict[tuple[int, int], int] = {}
    for i in range(1, size):
        parent, token, depth = int(parents[i]), int(tokens[i]), int(depths[i])
        if not 0 <= parent < size:
            found.append(f"parent: node {i} has parent {parent}; needed: 0 to {size - 1}")
            continue
        if _reaches_itself(parents, i):
            found.append(f"no cycle: node {i} is its own ancestor")
        elif parent > i:
            found.append(f"parent < child: node {i} stands before its parent {parent}")
        if depth != int(depths[parent]) + 1:
            found.append(
                f"position = start + depth: node {i} has depth {depth}, its parent {parent} depth {depths[parent]}"
            )
        twin = siblings.setdefault((parent, token), i)
        if twin != i:
            found.append(f"no duplicate siblings: nodes {twin} and {i} under {parent} both have token {token}")
    if horizon is not None and size > 1 and max(depths[1:]) > horizon:
        found.append(f"horizon: a node at depth {max(depths[1:])}; the drafter sees {horizon} ahead")
    if vocab_size is not None:
        outside = [i for i in range(size) if not 0 <= tokens[i] < vocab_size]
        if outside:
            i = outside[0]
            found.append(f"token: node {i} has token {tokens[i]}; the vocabulary is 0 to {vocab_size - 1}")
    return found


def _reaches_itself(parents: np.ndarray, node: int) -> bool:
    """Whether the way up from a node comes back to it; at most as many steps as there are nodes."""
    at = int(parents[node])
    for _ in range(len(parents)):
        if at == node:
            return True
        if not 0 < at < len(parents):
            return False
        at = int(parents[at])
    return False  # caught in a cycle above it: the nodes of that cycle say so

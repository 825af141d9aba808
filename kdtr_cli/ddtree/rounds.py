"""What one DDTree or chain round is, how rounds lie in a bundle, what must hold of them, and their statistics.

A round starts at position ``start``, that of its root: the token that the target chose last and has not been fed. The
target's rows of the round are the root and the tree's nodes; node i has position start + depth and is written to cache
row start + i (docs/numerics.md rules 19 and 20). Arrays of a bundle: docs/bundle.md, rounds/.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kdtr_cli.ddtree.accept import check_walk
from kdtr_cli.ddtree.tree import MAX_BUDGET, MAX_HORIZON, Tree, build_tree, check_tree, paths, visibility
from kdtr_cli.errors import InputError

__all__ = [
    "MODES",
    "DraftSettings",
    "Round",
    "check_marginals",
    "check_rounds",
    "pack_rounds",
    "rows_digest",
    "statistics",
    "unpack_rounds",
]

MODES = ("ddtree", "chain")


@dataclass(frozen=True)
class DraftSettings:
    """How rounds are drafted. ``drafter`` is an identity: 'dflash:<sha256>', 'ngram', 'synthetic:0.7' or 'replay'.

    InputError when the budget is not 1 to 1024 or the block size not 2 to 33.
    """

    mode: str
    drafter: str
    budget: int
    block_size: int

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"mode {self.mode!r}: allowed are {' and '.join(MODES)}")
        if not 1 <= self.budget <= MAX_BUDGET:
            raise InputError(f"--budget {self.budget}: 1 to {MAX_BUDGET} nodes")
        if not 2 <= self.block_size <= MAX_HORIZON + 1:
            raise InputError(f"--block-size {self.block_size}: 2 to {MAX_HORIZON + 1}, the root and what is drafted")

    @property
    def horizon(self) -> int:
        """L: depths that the drafter sees ahead."""
        return self.block_size - 1

    @property
    def nodes(self) -> int:
        """N: the most nodes of a tree; a round's rows are 1 + N. A chain can't be longer than the horizon."""
        return min(self.horizon, self.budget) if self.mode == "chain" else self.budget

    def width(self, vocab_size: int) -> int:
        """K: ids kept at each depth. No best prefix needs a rank of the budget or above; a chain needs the best."""
        return 1 if self.mode == "chain" else min(self.budget, vocab_size)


@dataclass(frozen=True, eq=False)
class Round:
    """One round. n nodes, a accepted (the root counts), L depths, K ids a depth.

    accepted int32 [a] are node indices, the first 0; posterior int32 [n + 1] is the target's choice after each row;
    draft_ids int32, draft_logps float32 [L, K] with draft_counts int32 [L] of them in use; cache_digest is
    ``rows_digest`` of the rows that the round committed (start … start + a - 1), or None when not taken.
    """

    start: int
    root: int
    bonus: int
    tree: Tree
    accepted: np.ndarray
    posterior: np.ndarray
    draft_ids: np.ndarray
    draft_logps: np.ndarray
    draft_counts: np.ndarray
    cache_digest: bytes | None = None

    @property
    def n_accepted(self) -> int:
        """Rows committed: the root and the nodes that the target confirmed."""
        return len(self.accepted)

    @property
    def emitted(self) -> np.ndarray:
        """Tokens int32 [a] that the round adds to the output: those of the accepted nodes, then the bonus."""
        return np.append(self.tree.tokens[self.accepted[1:]], np.int32(self.bonus))


def rows_digest(layers: Iterable[np.ndarray]) -> bytes:
    """SHA-256 over cache rows [n, width] of every layer, one after the other, as little-endian float32."""
    digest = hashlib.sha256()
    for rows in layers:
        digest.update(np.ascontiguousarray(rows, "<f4").data)
    return digest.digest()


# ---------------------------------------------------------------------------------------------------- in a bundle


def pack_rounds(
    rounds: Sequence[Round], horizon: int, width: int, final_cache_digest: bytes | None = None
) -> dict[str, np.ndarray]:
    """A sequence's rounds as arrays by path in the bundle ('rounds/start', …); horizon = L, width = K.

    A draft's entries beyond its counts are stored as id 0, log-probability 0, whatever the arrays held. A digest is
    stored where every round has one.
    """
    count = len(rounds)
    ids, logps = np.zeros((count, horizon, width), np.int32), np.zeros((count, horizon, width), np.float32)
    counts = np.zeros((count, horizon), np.int32)
    for r, one in enumerate(rounds):
        exists = np.arange(width) < one.draft_counts[:, None]
        ids[r][exists], logps[r][exists] = one.draft_ids[exists], one.draft_logps[exists]
        counts[r] = one.draft_counts
    out = {
        "start": _ints(r.start for r in rounds),
        "root": _ints(r.root for r in rounds),
        "bonus": _ints(r.bonus for r in rounds),
        "n_nodes": _ints(r.tree.n for r in rounds),
        "n_accepted": _ints(r.n_accepted for r in rounds),
        "tokens": _joined([r.tree.tokens[1:] for r in rounds], np.int32),
        "parents": _joined([r.tree.parents[1:] for r in rounds], np.int32),
        "depths": _joined([r.tree.depths[1:] for r in rounds], np.int32),
        "scores": _joined([r.tree.scores[1:] for r in rounds], np.float64),
        "accepted": _joined([r.accepted for r in rounds], np.int32),
        "posterior": _joined([r.posterior for r in rounds], np.int32),
        "draft_top_ids": ids,
        "draft_top_logps": logps,
        "draft_counts": counts,
    }
    digests = [r.cache_digest for r in rounds]
    if None not in digests:
        out["cache_digest"] = np.frombuffer(b"".join(digests), np.uint8).reshape(count, 32)
    if final_cache_digest is not None:
        out["final_cache_digest"] = np.frombuffer(final_cache_digest, np.uint8)
    return {f"rounds/{name}": array for name, array in out.items()}


_NEEDED = (
    "start", "root", "bonus", "n_nodes", "n_accepted", "tokens", "parents", "depths", "scores", "accepted",
    "posterior", "draft_top_ids", "draft_top_logps", "draft_counts",
)  # fmt: skip


def _ints(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int32)


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def unpack_rounds(arrays: Mapping[str, np.ndarray]) -> list[Round]:
    """The rounds of a sequence from its arrays by path; trees are taken as they are (``check_rounds`` judges them).

    InputError where counts and lengths do not fit each other, so that the arrays cannot be cut into rounds.
    """
    part = {path.removeprefix("rounds/"): array for path, array in arrays.items() if path.startswith("rounds/")}
    missing = [name for name in _NEEDED if name not in part]
    if missing:
        raise InputError(f"rounds/{missing[0]} is missing; rounds are stored whole or not at all")
    count = len(part["start"])
    nodes, accepted = part["n_nodes"].astype(np.int64), part["n_accepted"].astype(np.int64)
    for name, sizes, array in (("n_nodes", nodes, "tokens"), ("n_accepted", accepted, "accepted")):
        if count and sizes.min() < 0:
            raise InputError(f"rounds/{name} holds {sizes.min()}; needed: 0 or more")
        if sizes.sum() != len(part[array]):
            raise InputError(f"rounds/{name} adds up to {sizes.sum()}, but rounds/{array} has {len(part[array])}")
    if len(part["posterior"]) != nodes.sum() + count:
        raise InputError(f"rounds/posterior has {len(part['posterior'])} rows; {nodes.sum() + count} are due")
    out, node, taken = [], 0, 0
    for r in range(count):
        n, a = int(nodes[r]), int(accepted[r])
        here, root = slice(node, node + n), int(part["root"][r])
        tree = Tree(
            np.append(np.int32(root), part["tokens"][here]),
            np.append(np.int32(-1), part["parents"][here]),
            np.append(np.int32(0), part["depths"][here]),
            np.append(0.0, part["scores"][here]),
        )
        out.append(
            Round(
                start=int(part["start"][r]),
                root=root,
                bonus=int(part["bonus"][r]),
                tree=tree,
                accepted=part["accepted"][taken : taken + a],
                posterior=part["posterior"][node + r : node + r + n + 1],
                draft_ids=part["draft_top_ids"][r],
                draft_logps=part["draft_top_logps"][r],
                draft_counts=part["draft_counts"][r],
                cache_digest=part["cache_digest"][r].tobytes() if "cache_digest" in part else None,
            )
        )
        node, taken = node + n, taken + a
    return out


# ---------------------------------------------------------------------------------------------------- invariants


def check_rounds(
    rounds: Sequence[Round],
    settings: DraftSettings,
    prompt_length: int,
    tokens: np.ndarray,
    *,
    steps: int,
    stop_ids: Iterable[int],
    vocab_size: int,
    max_positions: int,
) -> list[str]:
    """Every invariant that the rounds of one sequence break, as 'round 3: invariant: what, where'; [] if none.

    tokens int32 [T] is the sequence's output, steps its limit, stop_ids what ends it (none with ignore_eos),
    max_positions the target's max_position_embeddings. Works on anything, in bounded time.
    """
    found = []
    stops = set(stop_ids)
    output = [int(t) for t in tokens[:1]]
    start = prompt_length
    if len(tokens) > steps:
        found.append(f"emitted <= limit: {len(tokens)} tokens; the limit is {steps}")
    early = [t for t in range(len(tokens) - 1) if int(tokens[t]) in stops]
    if early:
        found.append(f"nothing after a stop token: token {early[0]} of {len(tokens)} is the stop id {tokens[early[0]]}")
    for number, one in enumerate(rounds):
        problems = []
        if len(output) >= steps:
            problems.append(f"emitted <= limit: the round starts although {len(output)} of {steps} tokens are out")
        if stops & set(output):
            problems.append("nothing after a stop token: the round starts although a stop id is out")
        if one.start != start:
            problems.append(f"position = start + depth: the round starts at {one.start}; {start} is due")
        if output and one.root != output[-1]:
            problems.append(f"root: {one.root}; the token chosen last is {output[-1]}")
        problems += _check_round(one, settings, vocab_size, max_positions)
        found += [f"round {number}: {problem}" for problem in problems]
        if problems:
            return found  # what follows would only repeat it
        output += [int(t) for t in one.emitted]
        start += one.n_accepted
    cut = _cut(output, steps, stops)
    if not found and cut != [int(t) for t in tokens]:
        at = next((i for i, (a, b) in enumerate(zip(cut, tokens, strict=False)) if a != b), min(len(cut), len(tokens)))
        found.append(f"output = rounds: the rounds give {len(cut)} tokens, the output has {len(tokens)}; part at {at}")
    return found


def _check_round(one: Round, settings: DraftSettings, vocab_size: int, max_positions: int) -> list[str]:
    tree, horizon = one.tree, min(settings.horizon, max_positions - 1 - one.start)
    problems = check_tree(
        tree.tokens, tree.parents, tree.depths, settings.nodes, horizon=max(horizon, 0), vocab_size=vocab_size
    )
    shape = (settings.horizon, settings.width(vocab_size))
    if one.draft_ids.shape != shape or one.draft_logps.shape != shape or one.draft_counts.shape != shape[:1]:
        problems.append(f"marginals: shapes {one.draft_ids.shape} and {one.draft_logps.shape}; needed {shape}")
    else:
        problems += check_marginals(one.draft_ids, one.draft_logps, one.draft_counts, vocab_size)
    if problems:
        return problems
    right = build_tree(one.root, one.draft_ids, one.draft_logps, one.draft_counts, settings.nodes, horizon)
    for name in ("tokens", "parents", "depths", "scores"):
        if not np.array_equal(getattr(right, name), getattr(tree, name)):
            return [f"best-first: the tree's {name} are not those that its marginals give"]
    see = visibility(tree)
    for i, path in enumerate(paths(tree)):
        if not np.array_equal(np.flatnonzero(see[i]), path):
            return [f"visibility = ancestors: node {i} sees {np.flatnonzero(see[i]).tolist()}, its path is {path}"]
    outside = one.posterior[(one.posterior < 0) | (one.posterior >= vocab_size)]
    if len(outside):
        return [f"token: posterior holds {outside[0]}; the vocabulary is 0 to {vocab_size - 1}"]
    problems = check_walk(tree, one.posterior, one.accepted, one.bonus)
    chain = 1 + _chain_length(one)
    if not problems and one.n_accepted < chain:
        problems.append(
            f"accepted(tree) >= accepted(chain): {one.n_accepted} accepted, the chain inside the tree gives {chain}"
        )
    return problems


def check_marginals(ids: np.ndarray, logps: np.ndarray, counts: np.ndarray, vocab_size: int) -> list[str]:
    """The first way in which ids, logps [L, K] and counts [L] are no marginals, as 'marginals: what'; [] if none."""
    width = ids.shape[1]
    for depth, count in enumerate(counts):
        if not 0 <= count <= width:
            return [f"marginals: depth {depth + 1} counts {count} candidates; 0 to {width} are possible"]
        own = ids[depth, :count]
        if len(set(own.tolist())) < count or (count and not 0 <= own.min() <= own.max() < vocab_size):
            return [f"marginals: the ids of depth {depth + 1} are not different tokens of the vocabulary"]
        if not np.isfinite(logps[depth, :count]).all():
            return [f"marginals: depth {depth + 1} holds a log-probability that is not finite"]
    return []


def _chain_length(one: Round) -> int:
    """Leading tokens of the drafter's argmax chain that are in the tree and that the target confirms."""
    tree, node = one.tree, 0
    for depth in range(len(one.draft_counts)):
        token = one.draft_ids[depth, 0] if one.draft_counts[depth] else -1
        child = np.flatnonzero((tree.parents[1:] == node) & (tree.tokens[1:] == token)) + 1
        if not len(child) or one.posterior[node] != token:
            return depth
        node = int(child[0])
    return len(one.draft_counts)


def _cut(output: list[int], steps: int, stops: set[int]) -> list[int]:
    """Output as it leaves: cut at the limit, then after the first stop id."""
    output = output[:steps]
    first = next((i for i, token in enumerate(output) if token in stops), len(output) - 1)
    return output[: first + 1]


# ---------------------------------------------------------------------------------------------------- statistics


def statistics(rounds: Sequence[Round], sequences: int = 1) -> dict[str, object]:
    """Figures of the rounds of one or more sequences.

    tau: mean of n_accepted, the root counted, as published (0.0 without rounds); histogram: n_accepted → rounds, in
    ascending order; rounds; forward_passes of the target: one a round and one a sequence for its prompt; nodes drafted.
    """
    lengths = [one.n_accepted for one in rounds]
    return {
        "tau": sum(lengths) / len(lengths) if lengths else 0.0,
        "histogram": {length: lengths.count(length) for length in sorted(set(lengths))},
        "rounds": len(lengths),
        "forward_passes": len(lengths) + sequences,
        "nodes": sum(one.tree.n for one in rounds),
    }

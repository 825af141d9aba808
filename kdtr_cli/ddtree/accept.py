"""The walk: which nodes of a draft tree the target's own choices confirm (docs/numerics.md rule 20)."""

from itertools import pairwise

import numpy as np

from kdtr_cli.ddtree.tree import Tree

__all__ = ["check_walk", "walk"]


def walk(tree: Tree, posterior: np.ndarray) -> tuple[np.ndarray, int]:
    """(accepted int32 [a], bonus) from posterior int32 [n + 1], the target's choice after each node.

    From the root on: while a child of the node has the token that the target chose there, go to it. accepted are the
    nodes on the way, the root first (so a >= 1); bonus is the target's choice after the last of them. No probability
    enters: every token that comes out is the target's own choice after its own context, at any temperature.
    """
    children = {(int(tree.parents[i]), int(tree.tokens[i])): i for i in range(tree.n, 0, -1)}
    accepted = [0]
    while (child := children.get((accepted[-1], int(posterior[accepted[-1]])))) is not None:
        accepted.append(child)
    return np.array(accepted, np.int32), int(posterior[accepted[-1]])


def check_walk(tree: Tree, posterior: np.ndarray, accepted: np.ndarray, bonus: int) -> list[str]:
    """Every way in which accepted and bonus are not the walk of a sound tree, as 'invariant: what'; [] if none."""
    if len(posterior) != tree.n + 1:
        return [f"shapes: {len(posterior)} choices for {tree.n + 1} rows"]
    if not len(accepted) or accepted[0] != 0:
        return [f"accepted path rooted: it starts with {accepted[:1].tolist()}, not with the root, node 0"]
    if accepted.min() < 0 or accepted.max() > tree.n:
        return [f"accepted path rooted: it leaves the tree of {tree.n + 1} rows: {accepted.tolist()}"]
    for before, after in pairwise(accepted):
        if tree.parents[after] != before:
            return [f"accepted path rooted: node {after} follows {before} but has parent {tree.parents[after]}"]
    right, choice = walk(tree, posterior)
    if not np.array_equal(right, accepted):
        return [f"accepted = walk: {accepted.tolist()} is stored, the target's choices give {right.tolist()}"]
    if choice != bonus:
        return [f"bonus: {bonus} is stored, the target chose {choice} after node {right[-1]}"]
    return []

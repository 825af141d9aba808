"""The walk over a tree, and the compaction of the rows that it accepted."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr_cli.ddtree.accept import check_walk, walk
from kdtr_cli.ddtree.compact import compact
from kdtr_cli.ddtree.tree import Tree

pytestmark = pytest.mark.quick


def tree(tokens, parents) -> Tree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return Tree(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.array(depths, np.int32), np.zeros(len(tokens))
    )


#: 9 ─ 4 ─ 4 ─ 6, 9 ─ 5 ─ 4, 9 ─ 4 ─ 7 (nodes 1, 3, 5 / 2, 4 / 1, 6)
WIDE = tree([9, 4, 5, 4, 4, 6, 7], [-1, 0, 0, 1, 2, 3, 1])


class TestWalk:
    @pytest.mark.parametrize(
        ("posterior", "accepted", "bonus"),
        [
            ([0, 4, 4, 4, 4, 4, 4], [0], 0),  # no child has it
            ([5, 4, 8, 4, 4, 4, 4], [0, 2], 8),
            ([5, 4, 4, 4, 3, 4, 4], [0, 2, 4], 3),
            ([4, 4, 4, 6, 4, 4, 4], [0, 1, 3, 5], 4),  # to a leaf; its choice is the bonus
            ([4, 7, 4, 6, 4, 4, 9], [0, 1, 6], 9),
            ([4, 6, 4, 6, 4, 4, 9], [0, 1], 6),  # 6 is in the tree, but not below node 1
        ],
    )
    def test_follows_the_targets_choices(self, posterior, accepted, bonus):
        got = walk(WIDE, np.array(posterior))
        assert (got[0].tolist(), got[1]) == (accepted, bonus)
        assert check_walk(WIDE, np.array(posterior), np.array(accepted), bonus) == []

    def test_a_root_alone(self):
        accepted, bonus = walk(tree([3], [-1]), np.array([3]))
        assert (accepted.tolist(), accepted.dtype, bonus) == ([0], np.int32, 3)

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 12), st.integers(0, 3)), min_size=1, max_size=12))
    def test_ends_on_anything(self, rows):
        """Cycles, the root as a child, duplicate siblings: a bundle may hold them, and the walk still ends."""
        tokens, parents, posterior = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        accepted, bonus = walk(Tree(tokens, parents, parents, np.zeros(len(tokens))), posterior)
        assert accepted[0] == 0
        assert len(set(accepted.tolist())) == len(accepted)
        assert bonus == posterior[accepted[-1]]
        for before, after in pairwise(accepted):
            assert parents[after] == before
            assert tokens[after] == posterior[before]

    @pytest.mark.parametrize(
        ("accepted", "bonus", "reason"),
        [
            ([1, 3], 4, "accepted path rooted: it starts with"),
            ([], 4, "accepted path rooted: it starts with"),
            ([0, 3], 6, "accepted path rooted: node 3 follows 0 but has parent 1"),
            ([0, 7], 6, "accepted path rooted: it leaves the tree of 7 rows"),
            ([0, -1], 6, "accepted path rooted: it leaves"),
            ([0, 1], 4, "accepted = walk"),  # stops too early
            ([0, 2, 4], 4, "accepted = walk"),  # another branch
            ([0, 1, 3, 5], 5, "bonus: 5 is stored, the target chose 4"),
        ],
    )
    def test_a_wrong_walk_has_a_name(self, accepted, bonus, reason):
        posterior = np.array([4, 4, 4, 6, 4, 4, 4])
        found = check_walk(WIDE, posterior, np.array(accepted, np.int32), bonus)
        assert len(found) == 1
        assert found[0].startswith(reason)

    def test_too_few_choices(self):
        assert check_walk(WIDE, np.array([4]), np.array([0]), 4) == ["shapes: 1 choices for 7 rows"]


class TestCompact:
    @given(st.integers(0, 2**32 - 1))
    def test_accepted_rows_come_to_the_front(self, seed):
        rng = np.random.default_rng(seed)
        n, start, width = int(rng.integers(0, 30)), int(rng.integers(0, 5)), 3
        rows = rng.normal(size=(start + n + 1 + 4, width)).astype(np.float32)
        accepted = np.append(0, np.sort(rng.choice(np.arange(1, n + 1), int(rng.integers(0, n + 1)), replace=False)))
        before = rows.copy()
        compact(rows, start, accepted.astype(np.int32))
        end = start + len(accepted)
        assert rows[:start].tobytes() == before[:start].tobytes()
        assert rows[start:end].tobytes() == before[start + accepted].tobytes()
        assert rows[end:].tobytes() == before[end:].tobytes()

    def test_scattered_rows(self):
        """Row 2 is a source and a target: whoever writes before everything is read loses it."""
        rows = np.arange(8, dtype=np.float32)[:, None].copy()
        compact(rows, 1, np.array([0, 1, 3, 4, 6]))
        assert rows[:, 0].tolist() == [0, 1, 2, 4, 5, 7, 6, 7]

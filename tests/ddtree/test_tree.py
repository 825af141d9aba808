"""The draft tree: against the definition (the most probable prefixes), the reference's tie rule, and broken trees."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr_cli.ddtree.tree import Tree, build_tree, check_tree, paths, visibility
from kdtr_cli.errors import InputError

pytestmark = pytest.mark.quick


def random_marginals(rng, horizon: int, width: int, grid: float | None = None):
    """Sorted log-probabilities float32 [L, K], ids different in each depth; on a grid there are many equal scores."""
    logits = rng.normal(size=(horizon, width)) * 2
    if grid:
        logits = np.round(logits / grid) * grid
    logps = -np.sort(-(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))).astype(np.float32)
    if grid:
        logps = np.round(logps / grid).astype(np.float32) * np.float32(grid)
    ids = np.stack([rng.permutation(width * 3)[:width] for _ in range(horizon)]).astype(np.int32)
    return ids, logps, np.full(horizon, width, np.int32)


def prefix_score(logps, ranks) -> float:
    """The reference's score of a prefix of ranks: down by first children, sideways by (score - logp) + next logp."""
    score = 0.0
    for depth, rank in enumerate(ranks):
        score = score + float(logps[depth, 0])
        for r in range(rank):
            score = score - float(logps[depth, r]) + float(logps[depth, r + 1])
    return score


def ranks_of(tree: Tree, ids) -> list[tuple[int, ...]]:
    """Each node's tuple of ranks, the root's empty."""
    out = [()]
    for i in range(1, tree.n + 1):
        row = ids[tree.depths[i] - 1].tolist()
        out.append((*out[tree.parents[i]], row.index(tree.tokens[i])))
    return out


def selection(logps, counts, budget: int, horizon: int) -> list[tuple[int, ...]]:
    """Best-first without a heap: of all prefixes whose parent and elder sibling are taken the best, each time."""
    every = [
        ranks for d in range(1, horizon + 1) for ranks in product(*(range(c) for c in counts[:d])) if all(counts[:d])
    ]
    score = {ranks: prefix_score(logps, ranks) for ranks in every}
    taken: list[tuple[int, ...]] = [()]
    while len(taken) <= budget:
        ready = [
            r for r in every if r not in taken and r[:-1] in taken and (r[-1] == 0 or (*r[:-1], r[-1] - 1) in taken)
        ]
        if not ready:
            break
        taken.append(min(ready, key=lambda r: (-score[r], r)))
    return taken


class TestBuild:
    @pytest.mark.parametrize("seed", range(60))
    def test_the_tree_is_the_most_probable_prefixes_in_order(self, seed):
        """Proposition 2 of the paper, by brute force: no prefix outside is better than one inside."""
        rng = np.random.default_rng(seed)
        horizon, width, budget = int(rng.integers(1, 5)), int(rng.integers(2, 5)), int(rng.integers(1, 12))
        ids, logps, counts = random_marginals(rng, horizon, width)
        tree = build_tree(7, ids, logps, counts, budget)
        every = [r for d in range(1, horizon + 1) for r in product(range(width), repeat=d)]
        best = sorted(every, key=lambda r: -sum(float(logps[d, rank]) for d, rank in enumerate(r)))[:budget]
        assert ranks_of(tree, ids)[1:] == best
        assert tree.n == min(budget, len(every))
        exact = [sum(float(logps[d, rank]) for d, rank in enumerate(r)) for r in best]
        np.testing.assert_allclose(tree.scores[1:], exact, rtol=1e-12)
        assert tree.scores[1:].tolist() == [prefix_score(logps, r) for r in best]  # the reference's steps, to the bit

    @pytest.mark.parametrize("seed", range(60))
    def test_equal_scores_go_by_the_tuple_of_ranks(self, seed):
        """On a coarse grid most scores are equal: order and bits are still those of plain selection."""
        rng = np.random.default_rng(seed)
        horizon, width, budget = int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.integers(1, 20))
        ids, logps, _ = random_marginals(rng, horizon, width, grid=0.5)
        counts = rng.integers(0, width + 1, horizon).astype(np.int32)
        tree = build_tree(7, ids, logps, counts, budget)
        alive = list(counts).index(0) if 0 in counts else horizon
        want = selection(logps, counts.tolist(), budget, alive)
        assert ranks_of(tree, ids) == want
        assert tree.scores.tolist() == [prefix_score(logps, r) for r in want]

    def test_on_a_tie_an_extension_comes_before_the_next_sibling(self):
        """(0, 0) and (1,) have the same score: the reference pops (0, 0) first, though (1,) was pushed first."""
        logps = np.array([[-0.5, -0.5], [0.0, -1.0]], np.float32)
        ids = np.array([[10, 11], [20, 21]], np.int32)
        tree = build_tree(1, ids, logps, np.array([2, 2], np.int32), 6)
        assert ranks_of(tree, ids) == [(), (0,), (0, 0), (1,), (1, 0), (0, 1), (1, 1)]
        assert tree.scores.tolist() == [0, -0.5, -0.5, -0.5, -0.5, -1.5, -1.5]

    def test_all_equal_marginals_are_taken_in_order(self):
        logps = np.full((3, 4), -np.log(np.float32(4)), np.float32)
        ids = np.tile(np.arange(4, dtype=np.int32), (3, 1))
        tree = build_tree(0, ids, logps, np.full(3, 4, np.int32), 9)
        assert tree.tokens.tolist() == [0, 0, 1, 2, 3, 0, 1, 2, 3, 0]
        assert tree.parents.tolist() == [-1, 0, 0, 0, 0, 1, 1, 1, 1, 2]

    def test_a_budget_as_large_as_the_horizon_is_no_chain(self):
        logps = np.log(np.array([[0.5, 0.45, 0.05], [0.1, 0.09, 0.08], [0.1, 0.09, 0.08]], np.float32))
        ids = np.arange(9, dtype=np.int32).reshape(3, 3)
        tree = build_tree(99, ids, logps, np.full(3, 3, np.int32), 3)
        assert ranks_of(tree, ids) == [(), (0,), (1,), (0, 0)]

    def test_one_candidate_a_depth_is_the_chain(self):
        ids, logps, _ = random_marginals(np.random.default_rng(0), 7, 5)
        tree = build_tree(3, ids[:, :1], logps[:, :1], np.ones(7, np.int32), 64)
        assert tree.tokens.tolist() == [3, *ids[:, 0].tolist()]
        assert tree.parents.tolist() == list(range(-1, 7))
        assert tree.depths.tolist() == list(range(8))

    def test_scores_are_sums_in_float64_of_float32_terms(self):
        """float32 sums would give other bits: the pop order of near ties hangs on them."""
        rng = np.random.default_rng(5)
        ids, logps, counts = random_marginals(rng, 6, 8)
        tree = build_tree(0, ids, logps, counts, 60)
        assert tree.scores.dtype == np.float64
        assert any(score != np.float64(np.float32(score)) for score in tree.scores)

    def test_scores_have_the_bits_of_the_references_steps(self):
        """(score - logp) + next, not score + (next - logp): they part where magnitudes do."""
        rng = np.random.default_rng(0)
        parted = 0
        for _ in range(40):
            ids, logps, counts = random_marginals(rng, 3, 4)
            logps = -np.sort(10 ** rng.uniform(-13, 2, logps.shape)).astype(np.float32)
            tree = build_tree(0, ids, logps, counts, 100)
            for ranks, score in zip(ranks_of(tree, ids), tree.scores, strict=True):
                assert score == prefix_score(logps, ranks)
                other = 0.0
                for depth, rank in enumerate(ranks):
                    other = other + float(logps[depth, 0])
                    for r in range(rank):
                        other = other + (float(logps[depth, r + 1]) - float(logps[depth, r]))
                parted += other != score
        assert parted

    @pytest.mark.parametrize(
        ("counts", "budget", "max_depth", "n"),
        [
            ([3, 3], 100, None, 12),  # runs dry: 3 + 9
            ([3, 0], 100, None, 3),  # a depth without candidates ends the horizon
            ([0, 3], 100, None, 0),
            ([3, 3], 100, 1, 3),
            ([3, 3], 100, 0, 0),
            ([3, 3], 100, -1, 0),
            ([1, 2], 100, None, 3),
            ([3, 3], 1, None, 1),
            ([3, 3], 0, None, 0),
        ],
    )
    def test_what_ends_a_tree(self, counts, budget, max_depth, n):
        ids, logps, _ = random_marginals(np.random.default_rng(1), 2, 3)
        tree = build_tree(5, ids, logps, np.array(counts, np.int32), budget, max_depth)
        assert tree.n == n
        assert (tree.tokens[0], tree.parents[0], tree.depths[0], tree.scores[0]) == (5, -1, 0, 0.0)

    def test_horizon_of_one_and_token_zero(self):
        tree = build_tree(0, np.array([[0, 4]], np.int32), np.array([[-0.1, -3]], np.float32), np.array([2]), 8)
        assert tree.tokens.tolist() == [0, 0, 4]
        assert tree.depths.tolist() == [0, 1, 1]

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize(("depth", "rank"), [(0, 0), (0, 2), (1, 1)])
    def test_a_log_probability_that_is_no_number_is_an_error(self, value, depth, rank):
        ids, logps, counts = random_marginals(np.random.default_rng(2), 2, 3)
        logps[depth, rank] = value
        with pytest.raises(InputError, match=rf"depth {depth + 1}, rank {rank} is -?(nan|inf)"):
            build_tree(0, ids, logps, counts, 1)
        counts[depth] = rank  # beyond the counts nothing is looked at
        build_tree(0, ids, logps, counts, 8)

    def test_dtypes(self):
        ids, logps, counts = random_marginals(np.random.default_rng(2), 2, 3)
        tree = build_tree(0, ids, logps, counts, 4)
        assert [a.dtype for a in (tree.tokens, tree.parents, tree.depths, tree.scores)] == [np.int32] * 3 + [np.float64]


class TestSight:
    @given(st.integers(0, 2**32 - 1), st.integers(0, 40))
    def test_a_node_sees_its_ancestors_and_itself(self, seed, budget):
        rng = np.random.default_rng(seed)
        tree = build_tree(1, *random_marginals(rng, int(rng.integers(1, 6)), int(rng.integers(1, 6))), budget)
        see = visibility(tree)
        for i, path in enumerate(paths(tree)):
            up, at = [], i
            while at != -1:
                up.append(at)
                at = int(tree.parents[at])
            assert path.tolist() == up[::-1]
            assert np.flatnonzero(see[i]).tolist() == sorted(up)
            assert len(path) == tree.depths[i] + 1
        assert not np.triu(see, 1).any()  # ancestors have smaller numbers


def sound():
    """root - 1 - 3, root - 2."""
    return np.array([9, 4, 5, 4]), np.array([-1, 0, 0, 1]), np.array([0, 1, 1, 2])


BROKEN = {
    "no cycle: node 1 is its own ancestor": {"parents": [-1, 1, 0, 1]},
    "no cycle: node 2 is its own ancestor": {"parents": [-1, 0, 3, 2], "depths": [0, 1, 1, 2]},
    "parent < child: node 2 stands before its parent 3": {"parents": [-1, 0, 3, 1], "depths": [0, 1, 3, 2]},
    "no duplicate siblings: nodes 1 and 2 under 0 both have token 4": {"tokens": [9, 4, 4, 4]},
    "budget: 3 nodes; the budget is 2": {"budget": 2},
    "position = start + depth: node 3 has depth 3, its parent 1 depth 1": {"depths": [0, 1, 1, 3]},
    "parent: node 3 has parent 4; needed: 0 to 3": {"parents": [-1, 0, 0, 4]},
    "parent: node 3 has parent -1; needed: 0 to 3": {"parents": [-1, 0, 0, -1]},
    "root: node 0 has parent 2 and depth 0; needed: -1 and 0": {"parents": [2, 0, 0, 1]},
    "root: node 0 has parent -1 and depth 1; needed: -1 and 0": {"depths": [1, 1, 1, 2]},
    "horizon: a node at depth 2; the drafter sees 1 ahead": {"horizon": 1},
    "token: node 2 has token 5; the vocabulary is 0 to 4": {"tokens": [3, 4, 5, 4], "vocab_size": 5},
    "token: node 1 has token -4; the vocabulary is 0 to 9": {"tokens": [9, -4, 5, 4], "vocab_size": 10},
    "shapes: 4 tokens, 3 parents and 4 depths; needed: as many, at least 1": {"parents": [-1, 0, 0]},
    "shapes: 0 tokens, 0 parents and 0 depths; needed: as many, at least 1": {
        "tokens": [],
        "parents": [],
        "depths": [],
    },
}


class TestCheck:
    def test_a_sound_tree_has_no_problem(self):
        assert check_tree(*sound(), 3, horizon=2, vocab_size=10) == []

    @pytest.mark.parametrize("reason", BROKEN)
    def test_each_kind_of_broken_tree_has_its_name(self, reason):
        change = dict(BROKEN[reason])
        tokens, parents, depths = sound()
        arrays = {"tokens": tokens, "parents": parents, "depths": depths}
        for name in arrays:
            arrays[name] = np.array(change.pop(name, arrays[name]), np.int32)
        assert reason in check_tree(**arrays, **{"budget": 3, **change})

    @given(
        st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 8), st.integers(-1, 5)), min_size=1, max_size=12),
        st.integers(0, 12),
    )
    def test_anything_is_judged_and_only_trees_pass(self, rows, budget):
        """Ends for any arrays; what passes has every property, checked here in another way."""
        tokens, parents, depths = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        if check_tree(tokens, parents, depths, budget):
            return
        assert parents[0] == -1
        assert len(tokens) - 1 <= budget
        for i in range(1, len(tokens)):
            assert 0 <= parents[i] < i
            assert depths[i] == depths[parents[i]] + 1
        assert len({(p, t) for p, t in zip(parents, tokens, strict=True)}) == len(tokens)

    @given(st.integers(0, 2**32 - 1))
    def test_what_is_built_passes(self, seed):
        rng = np.random.default_rng(seed)
        horizon, width, budget = int(rng.integers(1, 6)), int(rng.integers(1, 6)), int(rng.integers(0, 40))
        tree = build_tree(0, *random_marginals(rng, horizon, width, grid=0.5), budget)
        assert check_tree(tree.tokens, tree.parents, tree.depths, budget, horizon=horizon, vocab_size=3 * width) == []

    def test_a_long_cycle_ends(self):
        n = 1024
        parents = np.append(np.int32(-1), np.roll(np.arange(1, n + 1), 1)).astype(np.int32)
        found = check_tree(np.arange(n + 1), parents, np.zeros(n + 1, np.int32), n)
        assert sum(problem.startswith("no cycle") for problem in found) == n


def test_a_tree_of_any_size_is_judged_in_bounded_time_and_without_overflow():
    huge = 1 << 20
    tokens, depths = np.arange(huge, dtype=np.int32), np.ones(huge, np.int32)
    parents = np.arange(1, huge + 1, dtype=np.int32)  # a chain upwards: every walk would be long
    found = check_tree(tokens, parents, depths, 16)
    assert any(line.startswith("budget:") for line in found)
    last = np.iinfo(np.int32).max
    found = check_tree(np.array([5, 6, 7]), np.array([-1, 0, 1]), np.array([0, last, 1], np.int32), 4)
    assert any("node 2 has depth 1, its parent 1 depth 2147483647" in line for line in found)

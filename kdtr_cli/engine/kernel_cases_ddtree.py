"""Cases of the kernels of a DDTree round: trees that tie, run dry or are cut; walks, compactions, bookkeeping."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kdtr_cli.engine.kernel_case import Case, Maker, normal, poison
from kdtr_cli.engine.kernel_cases_drafts import DRAFT_CASES

__all__ = ["DDTREE_CASES"]

f32, i32 = np.float32, np.int32


# ---------------------------------------------------------------------------------------------------- trees


def _logps(rng: np.random.Generator, batch: int, horizon: int, k: int, spread: float = 2.0) -> np.ndarray:
    """float32 [batch, horizon, k], descending, about what log-probabilities look like."""
    x = np.sort(rng.standard_normal((batch, horizon, k)) * spread, -1)[..., ::-1]
    return (x - np.log(np.exp(x).sum(-1, keepdims=True)) - 0.1).astype(f32)


def _ids(rng: np.random.Generator, shape: tuple[int, ...], vocab: int) -> np.ndarray:
    """Different ids in every row, 0 among them where they are all of the vocabulary."""
    return np.argsort(rng.random((*shape[:-1], vocab)), -1)[..., : shape[-1]].astype(i32)


def _tree_case(rng: np.random.Generator, label: str, logps: np.ndarray, budget: int, **more: Any) -> Case:
    batch, horizon, k = logps.shape
    nodes, words = budget + 1, (budget + 32) // 32
    values: dict[str, Any] = {"ids": _ids(rng, logps.shape, max(k, 2)), "logps": logps, "counts": None}
    values |= {"starts": np.arange(batch, dtype=i32) * 37 + 5, "roots": np.arange(batch, dtype=i32)}
    values |= {name: poison(batch, nodes, dtype=i32) for name in ("tokens", "parents", "depths", "positions")}
    values |= {name: poison(batch, nodes, dtype=i32) for name in ("places", "slots", "tree_starts")}
    values |= {"scores": poison(batch, nodes, dtype=np.float64), "n_nodes": poison(batch, dtype=i32)}
    values |= {"paths": poison(batch, nodes, horizon + 1, dtype=i32)}
    values |= {"visible": poison(batch, nodes, words, dtype=np.uint32), "bad": np.zeros(batch, i32)}
    values |= {"batch": batch, "horizon": horizon, "k": k, "budget": budget, "last_position": 1 << 20}
    return Case(label, {**values, **more})


def _tree_inputs(rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray, int, dict[str, Any]]]:
    """(label, logps, budget, other arguments) of trees whose order or end is not plain."""
    yield "one depth", _logps(rng, 3, 1, 16), 16, {}
    yield "one depth runs dry", _logps(rng, 2, 1, 5), 16, {}
    yield "32 depths", _logps(rng, 2, 32, 64, 8.0), 64, {}
    yield "32 depths, deep and narrow", _logps(rng, 1, 32, 40, 40.0), 90, {}
    yield "a chain", _logps(rng, 3, 7, 1), 7, {}
    yield "a chain shorter than the horizon", _logps(rng, 1, 15, 1), 4, {}
    yield "two ids, a full tree of 14", _logps(rng, 2, 3, 2), 64, {}
    yield "as many requests as nodes", _logps(rng, 8, 7, 8), 8, {}
    yield "17 requests", _logps(rng, 17, 4, 5), 9, {}
    # ties: equal everywhere, equal inside a depth, a coarse grid, all zero
    yield "all marginals equal", np.full((2, 5, 8), f32(-2.0794415)), 64, {}
    yield "all marginals equal, 32 depths", np.full((1, 32, 2), f32(-0.6931472)), 90, {}
    yield "all log-probabilities zero", np.zeros((1, 32, 3), f32), 80, {}
    zeros = np.zeros((1, 6, 4), f32)
    zeros[0, ::2, 1::2] = -0.0
    yield "zeros of both signs", -zeros, 40, {}
    grid = np.sort(-rng.integers(1, 5, (3, 6, 12)).astype(f32) * f32(0.5), -1)[..., ::-1].copy()
    yield "a grid of halves", grid, 60, {}
    coarse = _logps(rng, 2, 7, 32).view(np.uint32) & np.uint32(0xFFFF0000)
    yield "bf16 log-probabilities", coarse.view(f32), 90, {}
    yield "every value twice", np.repeat(_logps(rng, 2, 7, 8), 2, -1), 50, {}
    # as many candidates as a list in order holds, and more: equal ones on both sides of its end
    for steps in (2, 16, 128, 1024):
        rounded = np.round(_logps(rng, 24, 7, 64, 2.0) * f32(steps)) / f32(steps)
        yield f"a grid of 1/{steps}, 24 requests", rounded.astype(f32), 64, {}
    # float64 scores that differ in their lower halves only
    fine = -(f32(1) + np.arange(16, dtype=f32) * f32(2.0**-23)).astype(f32)
    yield "neighbouring numbers", np.broadcast_to(fine, (1, 4, 16)).copy(), 70, {}
    # float64 rounds: (score - logp) + next is neither score + (next - logp) nor a fresh sum
    scale = np.array([1, 1e-11, 1, 3e-12, 1e-10, 1], f32)[:, None]
    yield "depths of different magnitude", _logps(rng, 3, 6, 8) * scale, 80, {}
    tens = f32(10) ** rng.integers(-30, 30, (6, 1)).astype(f32)
    yield "huge and tiny together", _logps(rng, 1, 6, 8) * tens, 60, {}
    yield "not sorted", normal(rng, 2, 6, 9), 80, {}
    yield "the largest numbers", np.full((1, 32, 4), f32(-3.4e38)), 70, {}
    # candidates and horizons
    counts = np.array([[8, 8, 0, 8, 8], [8, 0, 8, 8, 8], [0, 8, 8, 8, 8], [1, 2, 3, 0, 0], [3, 1, 8, 2, 1]], i32)
    yield "counts, 0 in the middle", _logps(rng, 5, 5, 8), 32, {"counts": counts}
    yield "no candidate at all", _logps(rng, 2, 5, 8), 32, {"counts": np.zeros((2, 5), i32)}
    yield "counts out of range", _logps(rng, 2, 2, 4), 12, {"counts": np.array([[9, 4], [2, -1]], i32)}
    starts = np.array([10, 16, 18, 19, 20, 25], i32)
    yield "the last position cuts", _logps(rng, 6, 7, 8), 24, {"starts": starts, "last_position": 19}
    tail = _logps(rng, 2, 4, 8)
    tail[:, :, 5:] = -np.inf
    yield "-inf behind the counts", tail, 40, {"counts": np.full((2, 4), 5, i32)}
    # faults: that request's tree is empty, the others' are not
    wrong = _logps(rng, 5, 6, 8)
    wrong[0, 0, 0], wrong[1, 5, 7], wrong[3, 2, 3], wrong[4, 3, 0] = np.nan, -np.inf, np.inf, np.nan
    yield "NaN and infinite log-probabilities", wrong, 30, {}
    flags = {"last_position": 7, "bad": np.full(5, 2, i32)}
    yield "a bad number behind the last position", wrong, 30, flags


def _build_tree(rng: np.random.Generator) -> Iterator[Case]:
    for budget in (1, 2, 7, 8, 16, 31, 32, 64, 95, 96, 256, 1024):
        yield _tree_case(rng, f"budget {budget}", _logps(rng, 2, 7, min(budget, 300)), budget)
    yield _tree_case(rng, "a full tree of 1022", _logps(rng, 1, 9, 2), 1024)
    for label, logps, budget, more in _tree_inputs(rng):
        # below 96 nodes the kernel goes another way
        for nodes in sorted({min(budget, 64), budget, budget + 96}):
            yield _tree_case(rng, f"{label}, budget {nodes}", logps, nodes, **more)


# ---------------------------------------------------------------------------------------------------- acceptance


def _random_tree(rng: np.random.Generator, n: int, horizon: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """parents, tokens int32 [n + 1] of a tree no deeper than the horizon, siblings with different tokens."""
    parents, tokens, depths = [-1], [3], [0]
    taken: set[tuple[int, int]] = set()
    while len(parents) <= n:
        parent, token = int(rng.integers(0, len(parents))), int(rng.integers(0, vocab))
        if depths[parent] < horizon and (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            tokens.append(token)
            depths.append(depths[parent] + 1)
    return np.array(parents, i32), np.array(tokens, i32)


def _accept(rng: np.random.Generator) -> Iterator[Case]:
    def case(label: str, trees: list[tuple], posteriors: list[np.ndarray], budget: int, horizon: int) -> Case:
        batch = len(trees)
        values = {"n_nodes": np.array([len(t[0]) - 1 for t in trees], i32)}
        # rows past a tree hold what would be confirmed if they were looked at
        values |= {"parents": np.zeros((batch, budget + 1), i32), "tokens": poison(batch, budget + 1, dtype=i32)}
        values |= {"posterior": np.zeros((batch, budget + 1), i32)}
        for b, ((parents, tokens), posterior) in enumerate(zip(trees, posteriors, strict=True)):
            n = len(parents)
            values["parents"][b, :n], values["tokens"][b, :n], values["posterior"][b, :n] = parents, tokens, posterior
            values["tokens"][b, n:] = posterior[0]
        values |= {"accepted": poison(batch, horizon + 1, dtype=i32), "n_accepted": poison(batch, dtype=i32)}
        values |= {"bonus": poison(batch, dtype=i32), "batch": batch, "budget": budget, "horizon": horizon}
        return Case(label, values)

    def leading_to(tree: tuple, node: int) -> np.ndarray:
        """Choices that lead to a node and end there."""
        parents, tokens = tree
        posterior = np.full(len(parents), 10**6, i32)
        while node > 0:
            posterior[parents[node]] = tokens[node]
            node = int(parents[node])
        return posterior

    nodes = [_random_tree(rng, n, 7, 50) for n in (64, 64, 64, 1, 20)]
    wrong = [np.full(len(t[0]), 77, i32) for t in nodes]
    yield case("nothing is right", nodes, wrong, 64, 7)
    yield case("the last node", nodes, [leading_to(t, len(t[0]) - 1) for t in nodes], 64, 7)
    for budget, horizon, vocab in ((1, 1, 2), (2, 3, 5), (8, 7, 3), (256, 15, 40), (1024, 32, 900)):
        trees = [_random_tree(rng, budget, horizon, vocab) for _ in range(4)]
        posteriors = [leading_to(t, int(rng.integers(0, len(t[0])))) for t in trees]
        yield case(f"walks in trees of {budget}", trees, posteriors, budget, horizon)
        posteriors = [rng.integers(0, vocab, len(t[0])).astype(i32) for t in trees]
        yield case(f"random choices in trees of {budget}", trees, posteriors, budget, horizon)
    chain = (np.arange(-1, 32, dtype=i32), np.arange(33, dtype=i32) * 0)
    yield case("id 0 all the way down", [chain], [np.zeros(33, i32)], 32, 32)
    second = (np.array([-1, 0, 0, 1, 2], i32), np.array([9, 4, 0, 0, 4], i32))
    yield case("right in the second child only", [second], [np.array([0, 4, 4, 4, 5], i32)], 4, 3)
    cousins = (np.array([-1, 0, 0, 1, 2], i32), np.array([9, 4, 5, 6, 6], i32))
    yield case("the same token under a cousin", [cousins], [np.array([5, 6, 6, 6, 1], i32)], 4, 2)
    twins = (np.array([-1, 0, 0, 1, 2], i32), np.array([9, 4, 4, 6, 7], i32))
    yield case("equal siblings: the first", [twins], [np.array([4, 6, 7, 1, 2], i32)], 4, 2)
    root = (np.array([-1], i32), np.array([4], i32))
    yield case("roots alone", [root] * 3, [np.array([t], i32) for t in (4, 0, 9)], 5, 4)


def _compact_cache(rng: np.random.Generator) -> Iterator[Case]:
    for label, layers, width, horizon, ways in (
        ("the root alone", 2, 5, 7, [[0]]),
        ("nothing moves", 1, 40, 7, [[0, 1, 2, 3]]),
        ("two requests, gaps", 3, 36, 7, [[0, 2, 3, 9, 16], [0, 1, 4]]),
        ("all from the end", 1, 1, 4, [[0, 60, 61, 62, 63]]),
        ("17 rows, one more than a batch of registers", 2, 130, 16, [[0, *range(2, 18)], [0, *range(1, 34, 2)][:17]]),
        ("33 rows, each next to its place", 2, 7, 32, [[0, *range(2, 34)]]),
        ("as the cache of a small model", 4, 48, 7, [[0, 3, 5, 8], [0], [0, 1, 2, 3, 4, 5, 6, 7], [0, 64]]),
        ("61 layers of 576", 61, 576, 7, [[0, 2, 5, 9]]),
    ):
        batch = len(ways)
        starts = np.array([3 + 5 * b for b in range(batch)], i32)
        capacity = max(int(s) + w[-1] + 1 for s, w in zip(starts, ways, strict=True))
        accepted, counts = np.empty((batch, horizon + 1), i32), np.array([len(w) for w in ways], i32)
        for b, way in enumerate(ways):
            accepted[b] = way[-1]
            accepted[b, : len(way)] = way
        values = {"cache": normal(rng, layers, batch + 1, capacity, width), "starts": starts, "accepted": accepted}
        values |= {"n_accepted": counts, "layers": layers, "sequences": batch + 1, "capacity": capacity}
        yield Case(label, {**values, "width": width, "batch": batch, "horizon": horizon})


def _advance_round(rng: np.random.Generator) -> Iterator[Case]:
    def case(label: str, batch: int, budget: int, horizon: int, **more: Any) -> Case:
        counts = rng.integers(1, horizon + 2, batch).astype(i32)
        accepted = np.sort(rng.integers(1, budget + 1, (batch, horizon + 1)), -1).astype(i32)
        accepted[:, 0] = 0
        values = {"starts": rng.integers(0, 30, batch).astype(i32), "roots": rng.integers(0, 99, batch).astype(i32)}
        values |= {"bonus": rng.integers(0, 99, batch).astype(i32), "n_accepted": counts, "accepted": accepted}
        values |= {"tokens": rng.integers(0, 99, (batch, budget + 1)).astype(i32)}
        values |= {"history": poison(batch, 30 + horizon + 2, dtype=i32), "active": None}
        values |= {"batch": batch, "budget": budget, "horizon": horizon, **more}
        values["history_row"] = 0 if values["history"] is None else values["history"].shape[1]
        return Case(label, values)

    yield case("one request", 1, 8, 7)
    yield case("some rest", 6, 64, 15, active=np.array([1, 0, 1, 1, 0, 1], i32))
    yield case("all rest", 3, 8, 7, active=np.zeros(3, i32))
    yield case("33 tokens", 4, 64, 32, n_accepted=np.array([33, 32, 1, 31], i32))
    yield case("no history", 3, 8, 7, history=None)
    yield case("a history that is full", 3, 8, 7, starts=np.array([28, 24, 29], i32), history=poison(3, 30, dtype=i32))


def _tap_rows(rng: np.random.Generator) -> Iterator[Case]:
    for rows, n, taps, tap in ((1, 1, 1, 0), (5, 75, 3, 1), (2, 192, 3, 2), (3, 300, 6, 0)):
        values = {"hidden": normal(rng, rows, n), "taps": poison(rows, taps * n), "rows": rows, "n": n}
        yield Case(f"tap {tap} of {taps} of {rows}x{n}", {**values, "column": tap * n, "taps_row": taps * n})


def _gather_rows(rng: np.random.Generator) -> Iterator[Case]:
    for batch, rows_in, rows_out, n in ((1, 1, 1, 1), (3, 9, 8, 75), (2, 17, 8, 576), (4, 8, 7, 192), (2, 2, 33, 130)):
        values = {"src": normal(rng, batch, rows_in, n), "out": poison(batch, rows_out, n)}
        index = np.sort(rng.integers(0, rows_in, (batch, rows_out)), -1).astype(i32)
        index[:, -1] = rows_in - 1
        values |= {"index": index, "batch": batch, "rows_in": rows_in, "rows_out": rows_out, "n": n}
        yield Case(f"{batch} times {rows_out} of {rows_in} rows of {n}", values)


#: kernel → maker of its cases
DDTREE_CASES: dict[str, Maker] = {
    "tap_rows": _tap_rows,
    "gather_rows": _gather_rows,
    "build_tree": _build_tree,
    "accept": _accept,
    "compact_cache": _compact_cache,
    "advance_round": _advance_round,
    **DRAFT_CASES,
}

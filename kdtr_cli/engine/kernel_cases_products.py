"""Cases of the matrix products: sizes around every tile, strides, biases, expert lists, values that break sums."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kdtr_cli.engine.kernel_case import Case, normal, poison
from kdtr_cli.engine.kernels import most_tiles

__all__ = ["expert_matmul", "group_experts", "matmul"]

f32, i32 = np.float32, np.int32


def matmul(rng: np.random.Generator) -> Iterator[Case]:
    shapes = [(rows, 9, 52) for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33)]
    shapes += [(1, 1, 1), (2, 3, 2), (3, 5, 3), (1, 17, 45), (5, 33, 75), (2, 31, 129), (1, 5, 511), (2, 7, 513)]
    shapes += [(4, 6, 8192), (2, 3, 8193), (1, 5, 18432), (3, 130, 128)]
    for i, (rows, n, k) in enumerate(shapes):
        bias = normal(rng, n) if i % 2 else None
        residual = normal(rng, rows, n) if i % 3 == 0 else None
        yield Case(
            f"{rows}x{k} @ {k}x{n}{' bias' if bias is not None else ''}{' residual' if residual is not None else ''}",
            _product(normal(rng, rows, k), normal(rng, 1, n, k), bias, residual, rows, n, k),
        )
    rows, heads, n, k, gap = 3, 4, 20, 12, 8
    x, y = normal(rng, rows, heads * (k + gap)), poison(rows, heads * (n + gap))
    values = _product(x, normal(rng, heads, n, k), None, None, rows, n, k)
    values |= {"y": y, "heads": heads, "x_row": x.shape[1], "y_row": y.shape[1], "x_head": k + gap, "y_head": n + gap}
    yield Case("heads side by side, gaps between", {**values, "w_head": n * k})
    rows, heads, n, k = 2, 3, 7, 11
    x, y = normal(rng, rows, heads * k), poison(rows, heads * n)
    values = _product(x, normal(rng, heads, n, k), None, None, rows, n, k)
    values |= {
        "y": y,
        "heads": heads,
        "x_row": heads * k,
        "y_row": heads * n,
        "x_head": k,
        "y_head": n,
        "w_head": n * k,
    }
    yield Case("heads of odd width", values)
    x, w = normal(rng, 2, 64), normal(rng, 1, 6, 64)
    x[0, 5], w[0, 2, 9], w[0, 3, 1] = np.nan, np.inf, np.float32(1e-42)
    yield Case("NaN, infinity and a subnormal", _product(x, w, None, None, 2, 6, 64))
    x, w = np.full((2, 40), f32(1e-30)), np.full((1, 3, 40), f32(1e-12))
    x[1] = -0.0
    yield Case("subnormal products, signed zeros", _product(x, w, None, None, 2, 3, 40))


def _product(x, w, bias, residual, rows: int, n: int, k: int) -> dict[str, Any]:
    values = {"x": x, "w": w, "bias": bias, "residual": residual, "y": poison(rows, n), "rows": rows, "n": n, "k": k}
    return {**values, "heads": 1, "x_row": k, "y_row": n, "x_head": 0, "w_head": 0, "y_head": 0}


def expert_matmul(rng: np.random.Generator, tile: int) -> Iterator[Case]:
    for tokens, slots, experts, n, k, a_row in (
        (1, 4, 16, 24, 32, 4),
        (1, 3, 7, 37, 75, 1),
        (5, 2, 8, 12, 40, 2),
        (6, 3, 7, 9, 37, 1),
        (9, 4, 4, 16, 512, 4),
    ):
        ids = np.stack([rng.permutation(experts)[:slots] for _ in range(tokens)]).astype(i32).reshape(-1)
        yield Case(
            f"{tokens} tokens on {slots} of {experts}, {k} to {n}", _expert_values(rng, ids, experts, n, k, a_row, tile)
        )
    yield Case("all items on the last expert", _expert_values(rng, np.full(11, 4, i32), 5, 8, 16, 1, tile))


def _expert_values(rng, ids: np.ndarray, experts: int, n: int, k: int, a_row: int, tile: int) -> dict[str, Any]:
    items = len(ids)
    places = most_tiles(items, experts, tile)
    order = np.argsort(ids, kind="stable").astype(i32)
    tiles, made, first = poison(places, 3, dtype=i32), 0, 0
    for expert, count in enumerate(np.bincount(ids, minlength=experts)):
        for i in range(0, count, tile):
            tiles[made] = expert, first + i, min(tile, count - i)
            made += 1
        first += count
    return {
        "x": normal(rng, items // a_row, k),
        "w": normal(rng, experts, n, k),
        "items": order,
        "tiles": tiles,
        "tile_count": np.array([made], i32),
        "y": poison(items, n),
        "n": n,
        "k": k,
        "items_a_row": a_row,
        "item_count": items,
        "tile_places": places,
        "touched": len(set(ids.tolist())),
    }


def group_experts(rng: np.random.Generator) -> Iterator[Case]:
    for items, experts, tile in (
        (1, 1, 1),
        (4, 16, 1),
        (8, 384, 1),
        (24, 7, 4),
        (130, 33, 4),
        (9, 2048, 4),
        (64, 2, 4),
    ):
        ids = rng.integers(0, experts, items).astype(i32)
        places = most_tiles(items, experts, tile)
        values = {"ids": ids, "items": poison(items, dtype=i32), "tiles": poison(places, 3, dtype=i32)}
        values |= {"tile_count": poison(1, dtype=i32), "item_count": items, "experts": experts, "tile": tile}
        yield Case(f"{items} items on {experts} experts, tiles of {tile}", {**values, "tile_places": places})

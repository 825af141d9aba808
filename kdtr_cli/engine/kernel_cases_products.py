"""Cases of what reads weights: sizes around every tile, strides, biases, expert lists, values that break sums."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kdtr_cli.engine.kernel_case import Case, Maker, normal, poison
from kdtr_cli.engine.kernel_cases_weights import EVERY_VALUE, every_16_bits, stored_weights
from kdtr_cli.engine.kernels import FORMS, PLAIN, most_tiles

__all__ = ["PRODUCT_CASES", "expert_matmul", "expert_values"]

f32, i32 = np.float32, np.int32


def _embed(rng: np.random.Generator, form: str) -> Iterator[Case]:
    for rows, vocab, n in ((1, 5, 1), (3, 257, 75), (9, 64, 128), (2, 7, 300)):
        ids = rng.integers(0, vocab, rows).astype(i32)
        ids[0], ids[-1] = vocab - 1, 0
        values = {"ids": ids, "table": stored_weights(rng, form, (), vocab, n)["w"], "x": poison(rows, n)}
        yield Case(f"{rows}x{n} of {vocab}", {**values, "rows": rows, "n": n})
    if form != "f32":
        table = every_16_bits(form).reshape(64, -1)
        values = {"ids": np.arange(64, dtype=i32), "table": table, "x": poison(64, 1024), "rows": 64, "n": 1024}
        yield Case(f"every {form}", values)


def _matmul(rng: np.random.Generator, form: str) -> Iterator[Case]:
    shapes = [(rows, 9, 52) for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33)]
    shapes += [(1, 1, 1), (2, 3, 2), (3, 5, 3), (1, 17, 45), (5, 33, 75), (2, 31, 129), (1, 5, 511), (2, 7, 513)]
    shapes += [(4, 6, 8192), (2, 3, 8193), (1, 5, 18432), (3, 130, 128)]
    heads = (1,) if form in PLAIN else ()
    for i, (rows, n, k) in enumerate(shapes):
        bias = normal(rng, n) if i % 2 else None
        residual = normal(rng, rows, n) if i % 3 == 0 else None
        x, weights = normal(rng, rows, k), stored_weights(rng, form, heads, n, k, i)
        yield Case(
            f"{rows}x{k} @ {k}x{n}{' bias' if bias is not None else ''}{' residual' if residual is not None else ''}",
            _product(x, weights, bias, residual, rows, n, k),
        )
    yield from _heads(rng, form) if form in PLAIN else _packed(rng, form)
    for label, make in EVERY_VALUE.get(form, ()):
        weights, n, k = make()
        if form in PLAIN:
            weights["w"] = weights["w"][None]
        yield Case(label, _product(np.eye(k, dtype=f32), weights, None, None, k, n, k))
    if form == "f32":
        x, w = normal(rng, 2, 64), normal(rng, 1, 6, 64)
        x[0, 5], w[0, 2, 9], w[0, 3, 1] = np.nan, np.inf, np.float32(1e-42)
        yield Case("NaN, infinity and a subnormal", _product(x, {"w": w}, None, None, 2, 6, 64))
        x, w = np.full((2, 40), f32(1e-30)), np.full((1, 3, 40), f32(1e-12))
        x[1] = -0.0
        yield Case("subnormal products, signed zeros", _product(x, {"w": w}, None, None, 2, 3, 40))


def _heads(rng: np.random.Generator, form: str) -> Iterator[Case]:
    """Several matrices in one launch."""
    rows, heads, n, k, gap = 3, 4, 20, 12, 8
    x, y = normal(rng, rows, heads * (k + gap)), poison(rows, heads * (n + gap))
    values = _product(x, stored_weights(rng, form, (heads,), n, k), None, None, rows, n, k)
    values |= {"y": y, "heads": heads, "x_row": x.shape[1], "y_row": y.shape[1], "x_head": k + gap, "y_head": n + gap}
    yield Case("heads side by side, gaps between", {**values, "w_head": n * k})
    rows, heads, n, k = 2, 3, 7, 11
    x, y = normal(rng, rows, heads * k), poison(rows, heads * n)
    values = _product(x, stored_weights(rng, form, (heads,), n, k), None, None, rows, n, k)
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


def _packed(rng: np.random.Generator, form: str) -> Iterator[Case]:
    """Strides of x and y, and every size of groups and blocks by quads and not; at the sizes of the real models."""
    for turn in range(9):
        for k in (96, 90):
            rows, n, gap = 3, 11, 4
            x, y = normal(rng, rows, k + gap), poison(rows, n + gap)
            values = _product(x, stored_weights(rng, form, (), n, k, turn), None, None, rows, n, k)
            values |= {"y": y, "x_row": k + gap, "y_row": n + gap}
            yield Case(f"{k} inputs, gaps between rows, sizes {turn}", values)
    yield Case(
        "300x2048", _product(normal(rng, 2, 2048), stored_weights(rng, form, (), 300, 2048), None, None, 2, 300, 2048)
    )
    x = normal(rng, 2, 64)
    x[0, 5], x[1, 9] = np.nan, -np.inf
    yield Case("NaN and infinity", _product(x, stored_weights(rng, form, (), 6, 64), None, None, 2, 6, 64))


def _product(x, weights: dict[str, Any], bias, residual, rows: int, n: int, k: int) -> dict[str, Any]:
    values = {"x": x, **weights, "bias": bias, "residual": residual, "y": poison(rows, n), "rows": rows, "n": n, "k": k}
    if weights["w"].ndim == 3:
        values |= {"x_head": 0, "w_head": 0, "y_head": 0}
    return {**values, "heads": 1, "x_row": k, "y_row": n}


def expert_matmul(rng: np.random.Generator, form: str, tile: int) -> Iterator[Case]:
    """Cases for a kernel of this form whose tiles have up to ``tile`` rows."""
    sizes = [
        (1, 4, 16, 24, 32, 4),
        (1, 3, 7, 37, 75, 1),
        (5, 2, 8, 12, 40, 2),
        (6, 3, 7, 9, 37, 1),
        (9, 4, 4, 16, 512, 4),
    ]
    if form not in PLAIN:  # several blocks of rows, whole and cut; the next expert begins on a block of its own
        sizes += [(3, 2, 5, 160, 288, 2), (2, 4, 6, 40, 68, 1), (2, 3, 4, 33, 50, 3)]
    for turn, (tokens, slots, experts, n, k, a_row) in enumerate(sizes):
        ids = np.stack([rng.permutation(experts)[:slots] for _ in range(tokens)]).astype(i32).reshape(-1)
        weights = stored_weights(rng, form, (experts,), n, k, turn)
        yield Case(
            f"{tokens} tokens on {slots} of {experts}, {k} to {n}", expert_values(rng, ids, weights, n, k, a_row, tile)
        )
    weights = stored_weights(rng, form, (5,), 8, 16)
    yield Case("all items on the last expert", expert_values(rng, np.full(11, 4, i32), weights, 8, 16, 1, tile))


def expert_values(
    rng, ids: np.ndarray, weights: dict[str, Any], n: int, k: int, a_row: int, tile: int
) -> dict[str, Any]:
    """The arguments of an expert product over the items ``ids`` int32 [items], in tiles of at most ``tile`` rows."""
    items, experts = len(ids), len(weights["w"])
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
        **weights,
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


def _group_experts(rng: np.random.Generator) -> Iterator[Case]:
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


def _of(make: Any, form: str) -> Maker:
    return lambda rng: make(rng, form)


#: twin of a kernel → maker of its cases; those of routed experts depend on the kernel's tile
PRODUCT_CASES: dict[str, Maker] = {"group_experts": _group_experts}
for _form in FORMS:
    _end = "" if _form == "f32" else f"_{_form}"
    PRODUCT_CASES[f"matmul{_end}"] = _of(_matmul, _form)
    if _form in PLAIN:
        PRODUCT_CASES[f"embed{_end}"] = _of(_embed, _form)

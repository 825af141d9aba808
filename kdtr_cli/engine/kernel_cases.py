"""Inputs for every kernel of the table: ordinary and adversarial shapes and values, from a seed.

A case holds the kernel's named arguments as NumPy arrays and numbers, outputs poisoned. The same cases are run on every
device and by the NumPy twin; bits must agree over whole buffers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdtr_cli.engine.kernels import CHUNK, KERNELS, SEGMENT, SPAN, most_tiles

__all__ = ["Case", "cases"]

f32, i32 = np.float32, np.int32


@dataclass(frozen=True)
class Case:
    """One call of a kernel: what it is for, and its arguments by name (arrays, numbers, None)."""

    label: str
    values: dict[str, Any]


def _poison(*shape: int, dtype: type = f32) -> np.ndarray:
    """An array whose bytes are all 0xFF: NaN, or -1."""
    out = np.empty(shape, dtype)
    out.view(np.uint8)[...] = 0xFF
    return out


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, f32)


def _embed(rng: np.random.Generator) -> Iterator[Case]:
    for rows, vocab, n in ((1, 5, 1), (3, 257, 75), (9, 64, 128), (2, 7, 300)):
        ids = rng.integers(0, vocab, rows).astype(i32)
        ids[0], ids[-1] = vocab - 1, 0
        values = {"ids": ids, "table": _normal(rng, vocab, n), "x": _poison(rows, n), "rows": rows, "n": n}
        yield Case(f"{rows}x{n} of {vocab}", values)


def _rmsnorm(rng: np.random.Generator) -> Iterator[Case]:
    for rows, n, pad, scale in (
        (1, 1, 0, 1.0),
        (3, 5, 3, 1.0),
        (2, 75, 1, 1.0),
        (4, 128, 0, 1.0),
        (1, 511, 2, 1e-20),
        (1, 513, 0, 1e18),
        (2, 7168, 0, 1.0),
        (1, 8193, 0, 1.0),
    ):
        x = _normal(rng, rows, n + pad) * f32(scale)
        values = {"x": x, "weight": _normal(rng, n), "y": _poison(rows, n), "rows": rows, "n": n}
        yield Case(f"{rows}x{n} scale {scale:g}", {**values, "eps": 1e-6, "x_row": n + pad, "y_row": n})
    x = np.zeros((2, 16), f32)
    x[1] = -0.0
    values = {"x": x, "weight": _normal(rng, 16), "y": _poison(2, 16), "rows": 2, "n": 16, "eps": 1e-5}
    yield Case("zeros keep their sign", {**values, "x_row": 16, "y_row": 16})
    x = _normal(rng, 2, 20)
    x[0, 7], x[1, 3] = np.nan, np.inf
    values = {"x": x, "weight": _normal(rng, 20), "y": _poison(2, 20), "rows": 2, "n": 20, "eps": 1e-5}
    yield Case("NaN and infinity spread", {**values, "x_row": 20, "y_row": 20})


def _matmul(rng: np.random.Generator) -> Iterator[Case]:
    shapes = [(rows, 9, 52) for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33)]
    shapes += [(1, 1, 1), (2, 3, 2), (3, 5, 3), (1, 17, 45), (5, 33, 75), (2, 31, 129), (1, 5, 511), (2, 7, 513)]
    shapes += [(4, 6, 8192), (2, 3, 8193), (1, 5, 18432), (3, 130, 128)]
    for i, (rows, n, k) in enumerate(shapes):
        bias = _normal(rng, n) if i % 2 else None
        residual = _normal(rng, rows, n) if i % 3 == 0 else None
        yield Case(
            f"{rows}x{k} @ {k}x{n}{' bias' if bias is not None else ''}{' residual' if residual is not None else ''}",
            _product(_normal(rng, rows, k), _normal(rng, 1, n, k), bias, residual, rows, n, k),
        )
    rows, heads, n, k, gap = 3, 4, 20, 12, 8
    x, y = _normal(rng, rows, heads * (k + gap)), _poison(rows, heads * (n + gap))
    values = _product(x, _normal(rng, heads, n, k), None, None, rows, n, k)
    values |= {"y": y, "heads": heads, "x_row": x.shape[1], "y_row": y.shape[1], "x_head": k + gap, "y_head": n + gap}
    yield Case("heads side by side, gaps between", {**values, "w_head": n * k})
    rows, heads, n, k = 2, 3, 7, 11
    x, y = _normal(rng, rows, heads * k), _poison(rows, heads * n)
    values = _product(x, _normal(rng, heads, n, k), None, None, rows, n, k)
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
    x, w = _normal(rng, 2, 64), _normal(rng, 1, 6, 64)
    x[0, 5], w[0, 2, 9], w[0, 3, 1] = np.nan, np.inf, np.float32(1e-42)
    yield Case("NaN, infinity and a subnormal", _product(x, w, None, None, 2, 6, 64))
    x, w = np.full((2, 40), f32(1e-30)), np.full((1, 3, 40), f32(1e-12))
    x[1] = -0.0
    yield Case("subnormal products, signed zeros", _product(x, w, None, None, 2, 3, 40))


def _product(x, w, bias, residual, rows: int, n: int, k: int) -> dict[str, Any]:
    values = {"x": x, "w": w, "bias": bias, "residual": residual, "y": _poison(rows, n), "rows": rows, "n": n, "k": k}
    return {**values, "heads": 1, "x_row": k, "y_row": n, "x_head": 0, "w_head": 0, "y_head": 0}


def _expert_matmul(rng: np.random.Generator, tile: int) -> Iterator[Case]:
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
    tiles, made, first = _poison(places, 3, dtype=i32), 0, 0
    for expert, count in enumerate(np.bincount(ids, minlength=experts)):
        for i in range(0, count, tile):
            tiles[made] = expert, first + i, min(tile, count - i)
            made += 1
        first += count
    return {
        "x": _normal(rng, items // a_row, k),
        "w": _normal(rng, experts, n, k),
        "items": order,
        "tiles": tiles,
        "tile_count": np.array([made], i32),
        "y": _poison(items, n),
        "n": n,
        "k": k,
        "items_a_row": a_row,
        "item_count": items,
        "tile_places": places,
        "touched": len(set(ids.tolist())),
    }


def _angles(rng: np.random.Generator, positions: int, half: int) -> dict[str, np.ndarray]:
    angle = rng.uniform(0, 6.3, (positions, half))
    return {"cos": np.cos(angle).astype(f32), "sin": np.sin(angle).astype(f32)}


def _rope_query(rng: np.random.Generator) -> Iterator[Case]:
    for rows, heads, nope, half, latent, interleaved in (
        (1, 1, 1, 1, 1, 1),
        (3, 4, 16, 4, 32, 1),
        (2, 3, 11, 3, 27, 0),
        (4, 64, 128, 32, 512, 1),
    ):
        q_row = heads * (nope + 2 * half) + 5
        values = {
            "q": _normal(rng, rows, q_row),
            "positions": rng.integers(0, 50, rows).astype(i32),
            **_angles(rng, 50, half),
        }
        values |= {
            "query": _poison(rows, heads, latent + 2 * half),
            "rows": rows,
            "heads": heads,
            "nope": nope,
            "half": half,
        }
        yield Case(
            f"{rows} rows, {heads} heads of {2 * half}",
            {**values, "latent": latent, "interleaved": interleaved, "q_row": q_row},
        )


def _kv_append(rng: np.random.Generator) -> Iterator[Case]:
    for rows, latent, half, interleaved in ((1, 1, 1, 1), (3, 32, 4, 1), (4, 27, 3, 0), (2, 512, 32, 1)):
        capacity, sequences = 9, rows
        values = {"kv": _normal(rng, rows, latent + 2 * half + 3), "weight": _normal(rng, latent)}
        values |= {"positions": rng.integers(0, 50, rows).astype(i32), **_angles(rng, 50, half)}
        values |= {
            "slots": rng.permutation(sequences).astype(i32),
            "places": rng.integers(0, capacity, rows).astype(i32),
        }
        values |= {
            "cache": _poison(sequences, capacity, latent + 2 * half),
            "rows": rows,
            "latent": latent,
            "half": half,
        }
        values |= {"interleaved": interleaved, "capacity": capacity, "eps": 1e-6, "kv_row": latent + 2 * half + 3}
        yield Case(f"{rows} rows of {latent} + {2 * half}", values)


def _attention_inputs(rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
    shapes = [(1, 4, 32, 8, (0,)), (3, 3, 27, 6, (0, 1, 5)), (2, 5, 20, 4, (30, 31)), (2, 4, 32, 8, (126, 127))]
    shapes += [
        (2, 2, 16, 4, (254, 255)),
        (3, 4, 36, 8, (256, 257, 511)),
        (2, 1, 512, 64, (12, 300)),
        (1, 9, 700, 2, (600,)),
    ]
    for rows, heads, latent, rope, positions in shapes:
        width, capacity = latent + rope, max(positions) + 1
        chunks = -(-capacity // CHUNK)
        cache = _poison(rows, capacity, width)
        for row, position in enumerate(positions):
            cache[row, : position + 1] = _normal(rng, position + 1, width)
        values = {"cache": cache, "positions": np.array(positions, i32), "slots": np.arange(rows, dtype=i32)}
        values |= {
            "rows": rows,
            "heads": heads,
            "width": width,
            "latent": latent,
            "capacity": capacity,
            "chunks": chunks,
        }
        yield f"{heads} heads of {latent} + {rope}, positions {positions}", values


def _mla_scores(rng: np.random.Generator) -> Iterator[Case]:
    for label, v in _attention_inputs(rng):
        rows, heads, chunks = v["rows"], v["heads"], v["chunks"]
        v |= {"query": _normal(rng, rows, heads, v["width"]), "scale": 0.14467963}
        v |= {"scores": _poison(rows, heads, chunks * CHUNK), "peaks": _poison(rows, heads, chunks * CHUNK // SEGMENT)}
        yield Case(label, v)
    v["cache"][0, 3, 1] = np.nan
    yield Case("a NaN key makes its chunk's maximum NaN", v)


def _scores(rng: np.random.Generator, v: dict[str, Any]) -> None:
    """Scores and peaks as mla_scores leaves them."""
    rows, heads, chunks = v["rows"], v["heads"], v["chunks"]
    v |= {"scores": _poison(rows, heads, chunks * CHUNK), "peaks": _poison(rows, heads, chunks * CHUNK // SEGMENT)}
    for row, position in enumerate(v["positions"]):
        v["scores"][row, :, : position + 1] = _normal(rng, heads, position + 1) * f32(5)
        for i in range(position // SEGMENT + 1):
            v["peaks"][row, :, i] = v["scores"][row, :, i * SEGMENT : min((i + 1) * SEGMENT, position + 1)].max(-1)


def _mla_chunks(rng: np.random.Generator) -> Iterator[Case]:
    for label, v in _attention_inputs(rng):
        _scores(rng, v)
        v |= {"sums": _poison(v["rows"], v["heads"], v["chunks"])}
        yield Case(label, {**v, "vectors": _poison(v["rows"], v["heads"], v["chunks"], v["latent"])})
    v = next(iter(_attention_inputs(rng)))[1]
    _scores(rng, v)
    v["scores"][:] = f32(-np.inf)
    v["peaks"][:] = f32(0)
    v |= {"sums": _poison(1, 4, 1), "vectors": _poison(1, 4, 1, 32)}
    yield Case("scores of -inf weigh exp(-87)", v)


def _mla_combine(rng: np.random.Generator) -> Iterator[Case]:
    for label, v in _attention_inputs(rng):
        rows, heads, chunks, latent = (v[k] for k in ("rows", "heads", "chunks", "latent"))
        v |= {
            "sums": np.abs(_normal(rng, rows, heads, chunks)) + f32(1),
            "vectors": _normal(rng, rows, heads, chunks, latent),
        }
        yield Case(label, {**v, "o": _poison(rows, heads, latent)})


def _swiglu(rng: np.random.Generator) -> Iterator[Case]:
    for rows, n in ((1, 1), (3, 75), (2, 128), (5, 300)):
        values = {"gate_up": _normal(rng, rows, 2 * n) * f32(30), "h": _poison(rows, n), "rows": rows, "n": n}
        yield Case(f"{rows}x{n}", {**values, "two_n": 2 * n})
    edge = np.array([[0, -0.0, 87, -87, 88, -88, 100, -100, np.inf, -np.inf, np.nan, 1e-42]], f32)
    values = {"gate_up": np.concatenate([edge, np.ones_like(edge)], 1), "h": _poison(1, 12), "rows": 1, "n": 12}
    yield Case("edges of exp", {**values, "two_n": 24})


def _router(rng: np.random.Generator) -> Iterator[Case]:
    def case(label: str, logits: np.ndarray, bias, slots: int, **more: Any) -> Case:
        rows, experts = logits.shape
        values = {
            "logits": logits,
            "bias": bias,
            "ids": _poison(rows, slots, dtype=i32),
            "weights": _poison(rows, slots),
        }
        values |= {"rows": rows, "experts": experts, "slots": slots, "groups": 1, "kept_groups": 1, "softmax": 0}
        return Case(label, {**values, "best_two": 1, "normalise": 1, "factor": 2.827, **more})

    yield case("one expert", _normal(rng, 1, 1), None, 1)
    yield case("16 experts, negative bias", _normal(rng, 5, 16), -np.abs(_normal(rng, 16)), 4)
    yield case("384 experts", _normal(rng, 3, 384), _normal(rng, 384) * f32(0.1), 8)
    yield case("2048 experts, every lane full", _normal(rng, 1, 2048), None, 128)
    yield case("7 experts, all chosen", _normal(rng, 2, 7), _normal(rng, 7), 7, normalise=0)
    groups = {"groups": 4, "kept_groups": 2}
    yield case("groups, all choices negative", _normal(rng, 6, 16), f32(-3) - np.abs(_normal(rng, 16)), 4, **groups)
    yield case("8 groups of 32", _normal(rng, 3, 256), _normal(rng, 256), 8, groups=8, kept_groups=4)
    yield case("softmax, no groups", _normal(rng, 4, 64), None, 6, softmax=1, best_two=0, normalise=0, factor=1.0)
    yield case(
        "softmax, groups by maximum",
        _normal(rng, 4, 64),
        None,
        6,
        softmax=1,
        best_two=0,
        normalise=0,
        groups=8,
        kept_groups=3,
    )
    yield case("ties go to the smaller index", np.zeros((2, 20), f32), None, 5)
    yield case("ties of groups", np.zeros((2, 16), f32), np.zeros(16, f32), 4, **groups)
    yield case("logits that saturate", np.array([[100, -100, 0, 90, -90, 88]], f32), None, 3)
    yield case("tiny scores", np.full((1, 8), -87, f32), None, 4)
    nan = _normal(rng, 2, 12)
    nan[0, 7], nan[1, 2], nan[1, 9] = np.nan, np.inf, -np.inf
    yield case("NaN is chosen first", nan, None, 4)
    yield case("NaN under softmax", nan, None, 4, softmax=1, best_two=0, normalise=0)


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
        values = {"ids": ids, "items": _poison(items, dtype=i32), "tiles": _poison(places, 3, dtype=i32)}
        values |= {"tile_count": _poison(1, dtype=i32), "item_count": items, "experts": experts, "tile": tile}
        yield Case(f"{items} items on {experts} experts, tiles of {tile}", {**values, "tile_places": places})


def _combine(rng: np.random.Generator) -> Iterator[Case]:
    for rows, slots, n, shared in ((1, 1, 1, False), (3, 4, 75, True), (2, 8, 300, True), (4, 6, 128, False)):
        values = {
            "expert": _normal(rng, rows, slots, n),
            "weights": _normal(rng, rows, slots),
            "residual": _normal(rng, rows, n),
        }
        values |= {"shared": _normal(rng, rows, n) if shared else None, "y": _poison(rows, n)}
        yield Case(
            f"{rows}x{n}, {slots} slots{', shared' if shared else ''}", {**values, "rows": rows, "slots": slots, "n": n}
        )


def _sample_parts(rng: np.random.Generator) -> Iterator[Case]:
    def case(label: str, logits: np.ndarray, temperature: float = 0.0, seed: int = 0) -> Case:
        rows, vocab = logits.shape
        parts = -(-vocab // SPAN)
        values = {
            "logits": logits,
            "positions": np.arange(rows, dtype=i32) * 7,
            "streams": np.arange(rows, dtype=i32)[::-1].copy(),
        }
        values |= {
            "values": _poison(rows, parts),
            "indices": _poison(rows, parts, dtype=i32),
            "bad": np.zeros(rows, i32),
        }
        values |= {"vocab": vocab, "temperature": temperature, "seed_low": seed & 0xFFFFFFFF, "seed_high": seed >> 32}
        return Case(label, {**values, "rows": rows, "parts": parts})

    for vocab in (1, 31, 257, 2047, 2048, 2049, 5000):
        yield case(f"vocabulary {vocab}", _normal(rng, 3, vocab))
        yield case(f"vocabulary {vocab}, sampled", _normal(rng, 3, vocab), 0.8, 0x123456789ABCDEF0)
    yield case("all equal: the first", np.zeros((2, 4097), f32))
    signed = np.zeros((1, 300), f32)
    signed[0, :200] = -0.0
    yield case("-0 and +0 are equal", signed)
    yield case("all -inf", np.full((1, 300), -np.inf, f32))
    last = np.zeros((1, 4097), f32)
    last[0, 4096] = 1
    yield case("the last id", last)
    nan = _normal(rng, 2, 3000)
    nan[0, 2500] = np.nan
    yield case("NaN is seen and flagged", nan)


def _sample_final(rng: np.random.Generator) -> Iterator[Case]:
    for rows, parts, advance in ((1, 1, False), (3, 2, True), (2, 80, True), (4, 33, False)):
        indices = (np.arange(parts, dtype=i32) * SPAN + rng.integers(0, SPAN, (rows, parts))).astype(i32)
        scores = rng.integers(-2, 3, (rows, parts)).astype(f32)
        values = {
            "values": scores,
            "indices": indices,
            "chosen": _poison(rows, dtype=i32),
            "rows": rows,
            "parts": parts,
        }
        on = {
            "tokens": np.arange(rows, dtype=i32),
            "positions": np.arange(rows, dtype=i32),
            "active": np.arange(rows, dtype=i32) % 2,
        }
        values |= on if advance else dict.fromkeys(on)
        yield Case(f"{rows} rows of {parts} parts{', advancing' if advance else ''}", values)


def _nonfinite(rng: np.random.Generator) -> Iterator[Case]:
    for n, at in ((1, 0), (1000, None), (5000, 4999), (200000, 131072)):
        x = _normal(rng, n)
        if at is not None:
            x[at:] = np.nan
            x[at] = -np.inf
        yield Case(f"{n} elements, first at {at}", {"x": x, "first": np.array([2**64 - 1], np.uint64), "n": n})


_MAKERS: dict[str, Callable[[np.random.Generator], Iterator[Case]]] = {
    "embed": _embed,
    "rmsnorm": _rmsnorm,
    "matmul": _matmul,
    "rope_query": _rope_query,
    "kv_append": _kv_append,
    "mla_scores": _mla_scores,
    "mla_chunks": _mla_chunks,
    "mla_combine": _mla_combine,
    "swiglu": _swiglu,
    "router": _router,
    "group_experts": _group_experts,
    "combine": _combine,
    "sample_parts": _sample_parts,
    "sample_final": _sample_final,
    "nonfinite": _nonfinite,
}


def cases(name: str, seed: int = 0) -> Iterator[Case]:
    """The test cases of a kernel; the same for the same seed."""
    rng = np.random.default_rng(seed)
    if name.startswith("expert_matmul"):
        return _expert_matmul(rng, 1 if "_m1_" in name else 4)
    return _MAKERS[KERNELS[name].twin](rng)

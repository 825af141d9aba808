"""Cases of attention: MLA and grouped heads, contexts around every tile, keys in order or scattered by a draft tree."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kdtr_cli.engine.kernel_case import Case, normal, poison
from kdtr_cli.engine.kernels import CHUNK, SEGMENT

__all__ = ["BUSHY", "attn_chunks", "attn_combine", "attn_scores", "in_order", "in_trees", "mla", "mla_inputs"]

f32, i32 = np.float32, np.int32

#: parents of the nodes after the root: siblings, cousins and a chain that leaves the numbering's order
BUSHY = (0, 0, 1, 2, 0, 3, 6, 4)
_SPINE = (0, 1, 2, 3, 4, 5, 6)


def _size(heads: int, kv_heads: int, width: int, n: int, key_row: int, key_head: int) -> dict[str, int]:
    names = ("heads", "kv_heads", "width", "n", "key_row", "key_head")
    return dict(zip(names, (heads, kv_heads, width, n, key_row, key_head), strict=True))


def mla(heads: int, latent: int, rope: int) -> dict[str, int]:
    """Sizes of absorbed attention."""
    return _size(heads, 1, latent + rope, latent, latent + rope, 0)


def _grouped(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return _size(heads, kv_heads, head_dim, head_dim, 2 * kv_heads * head_dim, head_dim)


def in_order(rng: np.random.Generator, size: dict[str, int], positions: tuple[int, ...]) -> dict[str, Any]:
    """A row a sequence; what a row must not see is NaN."""
    rows, capacity = len(positions), max(positions) + 1
    cache = poison(rows, capacity, size["key_row"])
    for row, position in enumerate(positions):
        cache[row, : position + 1] = normal(rng, position + 1, size["key_row"])
    values = {"cache": cache, "positions": np.array(positions, i32), "slots": np.arange(rows, dtype=i32)}
    values |= {"tree_starts": None, "paths": None, "path_row": 0, "capacity": capacity}
    return {**values, **size, "rows": rows, "chunks": -(-capacity // CHUNK)}


def in_trees(
    rng: np.random.Generator, size: dict[str, int], starts: tuple[int, ...], parents: tuple[int, ...], gap: int = 0
) -> dict[str, Any]:
    """The rows of a tree a sequence: node i in cache row start + gap + i, at position start + its depth."""
    nodes, horizon = len(parents) + 1, len(parents) + 2
    ways = [[0]]
    for i, parent in enumerate(parents, 1):
        ways.append([*ways[parent], i])
    capacity = max(starts) + gap + nodes
    cache = poison(len(starts), capacity, size["key_row"])
    paths = np.empty((len(starts), nodes, horizon), i32)
    for b, start in enumerate(starts):
        cache[b, :start] = normal(rng, start, size["key_row"])
        cache[b, start + gap : start + gap + nodes] = normal(rng, nodes, size["key_row"])
        for i, way in enumerate(ways):
            paths[b, i] = start + gap + i
            paths[b, i, : len(way)] = start + gap + np.array(way)
    depths = np.array([len(way) - 1 for way in ways], i32)
    first = np.array(starts, i32)
    positions = (first[:, None] + depths).reshape(-1)
    values = {"cache": cache, "positions": positions, "slots": np.repeat(np.arange(len(starts), dtype=i32), nodes)}
    values |= {"tree_starts": np.repeat(first, nodes), "paths": paths.reshape(-1, horizon), "path_row": horizon}
    chunks = -(-(int(positions.max()) + 1) // CHUNK)
    return {**values, **size, "rows": len(positions), "capacity": capacity, "chunks": chunks}


def _inputs(rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
    for heads, latent, rope, positions in (
        (4, 32, 8, (0,)),
        (3, 27, 6, (0, 1, 5)),
        (5, 20, 4, (30, 31)),
        (4, 32, 8, (126, 127)),
        (2, 16, 4, (254, 255)),
        (4, 36, 8, (256, 257, 511)),
        (1, 512, 64, (12, 300)),
        (9, 700, 2, (600,)),
    ):
        yield (
            f"{heads} heads of {latent} + {rope}, positions {positions}",
            in_order(rng, mla(heads, latent, rope), positions),
        )
    for heads, kv_heads, head_dim, positions in (
        (4, 2, 48, (0, 33)),
        (16, 2, 128, (7, 40)),
        (18, 2, 20, (255, 32)),
        (3, 3, 6, (256, 31)),
        (40, 4, 16, (21,)),
    ):
        yield (
            f"{heads} heads of {head_dim} over {kv_heads}, positions {positions}",
            in_order(rng, _grouped(heads, kv_heads, head_dim), positions),
        )
    yield "rows of whole quads, one float more between them", in_order(rng, _size(2, 1, 8, 8, 9, 0), (3, 40))
    for size, starts, parents, gap in (
        (mla(4, 32, 8), (1, 3), BUSHY, 0),
        (mla(3, 27, 6), (31, 32, 33), BUSHY, 0),
        (mla(2, 16, 4), (255, 256, 257), BUSHY, 0),
        (mla(2, 16, 4), (252, 511), _SPINE, 0),
        (mla(9, 20, 4), (30,), _SPINE, 0),
        (mla(4, 32, 8), (64,), (0,) * 33, 0),
        (mla(2, 12, 4), (20, 33), BUSHY, 5),
        (_grouped(6, 2, 8), (0, 250), BUSHY, 0),
    ):
        label = f"{size['heads']} heads of {size['width']}, trees of {len(parents)} at {', '.join(map(str, starts))}"
        yield f"{label}{f' + {gap}' if gap else ''}", in_trees(rng, size, starts, parents, gap)


def mla_inputs(rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, arguments) of those cases whose heads share one latent key."""
    for label, values in _inputs(rng):
        if values["kv_heads"] == 1 and values["key_row"] == values["width"] > values["n"]:
            yield label, values


def attn_scores(rng: np.random.Generator) -> Iterator[Case]:
    for label, v in _inputs(rng):
        rows, heads, chunks = v["rows"], v["heads"], v["chunks"]
        v |= {"query": normal(rng, rows, heads, v["width"]), "scale": 0.14467963}
        v |= {"scores": poison(rows, heads, chunks * CHUNK), "peaks": poison(rows, heads, chunks * CHUNK // SEGMENT)}
        yield Case(label, v)
    v["cache"][0, 3, 1] = np.nan
    yield Case("a NaN key makes its chunk's maximum NaN", v)


def _scores(rng: np.random.Generator, v: dict[str, Any]) -> None:
    """Scores and peaks as attn_scores leaves them."""
    rows, heads, chunks = v["rows"], v["heads"], v["chunks"]
    v |= {"scores": poison(rows, heads, chunks * CHUNK), "peaks": poison(rows, heads, chunks * CHUNK // SEGMENT)}
    for row, position in enumerate(v["positions"]):
        v["scores"][row, :, : position + 1] = normal(rng, heads, position + 1) * f32(5)
        for i in range(position // SEGMENT + 1):
            v["peaks"][row, :, i] = v["scores"][row, :, i * SEGMENT : min((i + 1) * SEGMENT, position + 1)].max(-1)


def attn_chunks(rng: np.random.Generator) -> Iterator[Case]:
    for label, v in _inputs(rng):
        _scores(rng, v)
        v |= {"sums": poison(v["rows"], v["heads"], v["chunks"])}
        yield Case(label, {**v, "vectors": poison(v["rows"], v["heads"], v["chunks"], v["n"])})
    v = next(iter(_inputs(rng)))[1]
    _scores(rng, v)
    v["scores"][:] = f32(-np.inf)
    v["peaks"][:] = f32(0)
    v |= {"sums": poison(1, 4, 1), "vectors": poison(1, 4, 1, 32)}
    yield Case("scores of -inf weigh exp(-87)", v)


def attn_combine(rng: np.random.Generator) -> Iterator[Case]:
    for label, v in _inputs(rng):
        rows, heads, chunks, n = (v[k] for k in ("rows", "heads", "chunks", "n"))
        v |= {"sums": np.abs(normal(rng, rows, heads, chunks)) + f32(1), "vectors": normal(rng, rows, heads, chunks, n)}
        yield Case(label, {**v, "o": poison(rows, heads, n)})

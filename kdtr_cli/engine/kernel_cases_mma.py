"""Cases of the kernels of tier bf16: rows around every tile, k around every unit, strides, lists, trees, NaN."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kdtr_cli.engine.fragments import pack_fragments, pack_pairs
from kdtr_cli.engine.kernel_case import Case, angles, normal, poison
from kdtr_cli.engine.kernel_cases_attention import BUSHY, in_order, in_trees, mla, mla_inputs
from kdtr_cli.engine.kernel_cases_products import expert_values
from kdtr_cli.engine.kernel_cases_weights import bits_of
from kdtr_cli.engine.kernels_mma import MLA_LATENT, MLA_WIDTH, RANGE, fixed_k, mla_ranges

__all__ = ["MMA_CASES"]

f32, i32, u16 = np.float32, np.int32, np.uint16

#: rows, outputs, k: around tiles of 8 and 16 rows, tiles of 16 outputs, units of 64
_SIZES = ((1, 16, 64), (2, 1, 8), (3, 40, 192), (7, 33, 72), (8, 17, 1536), (9, 20, 136), (16, 48, 512), (33, 5, 1096))


def _sizes(fixed: int | None) -> list[tuple[int, int, int]]:
    """Of a kernel that takes one k only its own: the rest is the other variants' to show."""
    return [(1, 16, fixed), (9, 3, fixed), (33, 18, fixed)] if fixed else list(_SIZES)


def _mma_matmul(rng: np.random.Generator, kernel: str) -> Iterator[Case]:
    fixed = fixed_k(kernel)
    for turn, (rows, n, k) in enumerate(_sizes(fixed)):
        bias = normal(rng, n) if turn % 2 else None
        residual = normal(rng, rows, n) if turn % 3 == 1 else None
        outputs = ("y32", "y16") if turn % 4 == 0 else ("y16",) if turn % 2 else ("y32",)
        what = "".join(f" {name}" for name, value in (("bias", bias), ("residual", residual)) if value is not None)
        values = _product(_rows(rng, rows, k), _weights(rng, 1, n, k), outputs, rows, n, k)
        yield Case(f"{rows}x{k} @ {k}x{n}{what} -> {' '.join(outputs)}", {**values, "bias": bias, "residual": residual})
    rows, heads, n, k, gap = 3, 2 if fixed else 4, 18, fixed or 40, 8
    values = _product(_rows(rng, rows, heads * (k + gap)), _weights(rng, heads, n, k), ("y16",), rows, n, k)
    values["y16"] = poison(rows, heads * (n + gap), dtype=u16)
    strides = {"x_row": heads * (k + gap), "y_row": heads * (n + gap), "x_head": k + gap, "y_head": n + gap}
    yield Case("heads side by side, gaps between", {**values, "heads": heads, **strides})
    if fixed:
        return
    x = normal(rng, 3, 128)
    x[0, 5], x[2, 127] = np.nan, np.inf
    values = _product(bits_of(x, "bf16"), _weights(rng, 1, 18, 128), ("y32", "y16"), 3, 18, 128)
    yield Case("NaN and infinity keep to their rows", values)
    x = np.full((2, 80), np.nan, f32)
    x[:, :72] = normal(rng, 2, 72)
    values = _product(bits_of(x, "bf16"), _weights(rng, 1, 18, 72), ("y32",), 2, 18, 72)
    yield Case("NaN behind the end of a row", {**values, "x_row": 80})


def _product(x: np.ndarray, w: np.ndarray, outputs: tuple[str, ...], rows: int, n: int, k: int) -> dict[str, Any]:
    values = {"x": x, "w": w, "bias": None, "residual": None, "rows": rows, "n": n, "k": k, "heads": 1}
    values |= {"y32": poison(rows, n) if "y32" in outputs else None}
    values |= {"y16": poison(rows, n, dtype=u16) if "y16" in outputs else None}
    return {**values, "x_row": x.shape[1], "y_row": n, "x_head": 0, "y_head": 0}


def _rows(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    return bits_of(normal(rng, rows, width), "bf16")


def _weights(rng: np.random.Generator, of: int, n: int, k: int) -> np.ndarray:
    return pack_fragments(bits_of(normal(rng, of, n, k) / f32(np.sqrt(k)), "bf16"))


def _pairs(rng: np.random.Generator, *shape: int) -> np.ndarray:
    gate, up = (bits_of(normal(rng, *shape) / f32(np.sqrt(shape[-1])), "bf16") for _ in range(2))
    return pack_pairs(gate, up)


def _mma_gate_up(rng: np.random.Generator, kernel: str) -> Iterator[Case]:
    for rows, n, k in _sizes(fixed_k(kernel)):
        values = {"x": _rows(rng, rows, k + 8), "w": _pairs(rng, n, k), "h": poison(rows, n, dtype=u16)}
        yield Case(f"{rows}x{k} @ {k}x{n}", {**values, "rows": rows, "n": n, "k": k, "x_row": k + 8})


#: tokens, slots, experts, n, k
_LISTS = ((1, 4, 16, 24, 64), (1, 3, 7, 37, 72), (5, 2, 8, 16, 40), (40, 2, 3, 20, 512))


def _mma_expert(rng: np.random.Generator, kernel: str) -> Iterator[Case]:
    fixed, down = fixed_k(kernel), "down" in kernel
    for tokens, slots, experts, n, k in _LISTS:
        k = fixed or k
        ids = np.stack([rng.permutation(experts)[:slots] for _ in range(tokens)]).astype(i32).reshape(-1)
        yield Case(
            f"{tokens} tokens on {slots} of {experts}, {k} to {n}",
            _experts(rng, ids, experts, n, k, 1 if down else slots, down),
        )
    ids = np.full(19, 4, i32)
    yield Case("all items on the last expert", _experts(rng, ids, 5, 16, fixed or 64, 1, down))


def _experts(rng, ids: np.ndarray, experts: int, n: int, k: int, a_row: int, down: bool) -> dict[str, Any]:
    if down:
        w, out = _weights(rng, experts, n, k), {"y": poison(len(ids), n)}
    else:
        pairs = _pairs(rng, experts, n, k)
        w, out = pairs.reshape(experts, -1, *pairs.shape[-2:]), {"h": poison(len(ids), n, dtype=u16)}
    values = expert_values(rng, ids, {"w": w}, n, k, a_row, 8)
    del values["y"]
    return {**values, "x": bits_of(values["x"], "bf16"), **out}


def _norm16(rng: np.random.Generator, kernel: str) -> Iterator[Case]:
    for rows, n, pad, scale in (
        (1, 8, 0, 1.0),
        (3, 75, 1, 1.0),
        (2, 511, 1, 1e-15),
        (24, 1027, 1, 1.0),
        (4, 7168, 4, 1.0),
    ):
        x = normal(rng, rows, n + pad) * f32(scale)
        values = {"x": x, "weight": normal(rng, n), "y16": poison(rows, n, dtype=u16), "rows": rows, "n": n}
        values |= {
            "y32": poison(rows, n) if rows > 2 else None,
            "eps": (0.05 if n == 75 else 1e-6) * scale**2,
            "x_row": n + pad,
        }
        yield Case(f"{rows}x{n} scale {scale:g}", values)


def _round16(rng: np.random.Generator, kernel: str) -> Iterator[Case]:
    for n in (1, 129, 5000):
        yield Case(f"{n} elements", {"x": normal(rng, n), "y": poison(n, dtype=u16), "n": n})
    # halves between two bf16 go to the even one; the largest goes to infinity; NaN stays one, whatever its bits
    edge = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFFC00001, 0x7F800001, 0x80000001], np.uint32)
    yield Case("halves, the largest, NaN", {"x": edge.view(f32), "y": poison(len(edge), dtype=u16), "n": len(edge)})


def _kv_append16(rng: np.random.Generator, kernel: str) -> Iterator[Case]:
    for rows, latent, half, interleaved in ((1, 1, 1, 1), (3, 32, 4, 1), (4, 27, 3, 0), (12, 512, 32, 1)):
        width, capacity = latent + 2 * half, 9
        values = {"kv": normal(rng, rows, width + 3), "weight": normal(rng, latent), **angles(rng, 50, half)}
        values |= {"positions": rng.integers(0, 50, rows).astype(i32), "slots": rng.permutation(rows).astype(i32)}
        values |= {
            "places": rng.integers(0, capacity, rows).astype(i32),
            "cache": poison(rows, capacity, width, dtype=u16),
        }
        sizes = {"rows": rows, "latent": latent, "half": half, "capacity": capacity, "kv_row": width + 3}
        yield Case(
            f"{rows} rows of {latent} + {2 * half}", {**values, **sizes, "interleaved": interleaved, "eps": 1e-6}
        )


def _rope_query16(rng: np.random.Generator, kernel: str) -> Iterator[Case]:
    for rows, heads, nope, half, latent, interleaved in (
        (1, 1, 1, 1, 1, 1),
        (3, 4, 16, 4, 32, 1),
        (2, 3, 11, 3, 27, 0),
    ):
        q_row = heads * (nope + 2 * half) + 5
        values = {
            "q": _rows(rng, rows, q_row),
            "positions": rng.integers(0, 50, rows).astype(i32),
            **angles(rng, 50, half),
        }
        values |= {"query": poison(rows, heads, latent + 2 * half, dtype=u16), "rows": rows, "heads": heads}
        values |= {"nope": nope, "half": half, "latent": latent, "interleaved": interleaved, "q_row": q_row}
        yield Case(f"{rows} rows, {heads} heads of {2 * half}", values)


def _attn16(rng: np.random.Generator, kernel: str) -> Iterator[Case]:
    for label, v in mla_inputs(rng):
        rows, heads, n, ranges = v["rows"], v["heads"], v["n"], -(-(int(v["positions"].max()) + 1) // RANGE)
        v |= {
            "query": _rows(rng, rows, heads * v["width"]).reshape(rows, heads, -1),
            "cache": bits_of(v["cache"], "bf16"),
        }
        v |= {"states": poison(rows, heads, ranges, 2), "vectors": poison(rows, heads, ranges, n)}
        yield Case(label, {**v, "ranges": ranges, "scale": 0.14467963})


def _attn16_combine(rng: np.random.Generator, kernel: str) -> Iterator[Case]:
    for heads, n, positions in ((1, 1, (0,)), (3, 75, (255, 256)), (2, 130, (5, 700, 1023)), (64, 512, (2000,))):
        rows, ranges = len(positions), max(positions) // RANGE + 1
        states, vectors = poison(rows, heads, ranges, 2), poison(rows, heads, ranges, n)
        for row, position in enumerate(positions):
            used = slice(position // RANGE + 1)
            states[row, :, used] = normal(rng, *states[row, :, used].shape) * f32(3)
            states[row, :, used, 1] = 1 + np.abs(states[row, :, used, 1])
            vectors[row, :, used] = normal(rng, *vectors[row, :, used].shape)
        values = {"states": states, "vectors": vectors, "positions": np.array(positions, i32)}
        values |= {"o": poison(rows, heads, n, dtype=u16), "rows": rows, "heads": heads, "n": n, "ranges": ranges}
        yield Case(f"{heads} heads of {n}, positions {positions}", values)


#: positions of the rows: around a tile, a range, and where ranges grow
_MLA = ((0,), (31, 32, 63), (64, 127, 500), (2047, 2048), (2300, 7))


def _mla_decode(rng: np.random.Generator, kernel: str) -> Iterator[Case]:
    heads = 32
    sizes = mla(heads, MLA_LATENT, MLA_WIDTH - MLA_LATENT)
    inputs = [(f"positions {p}", in_order(rng, sizes, p)) for p in _MLA]
    for starts, gap in (((0, 5), 0), ((126,), 3)):
        inputs.append((f"trees at {starts}", in_trees(rng, sizes, starts, BUSHY, gap)))
    for label, v in inputs:
        rows, ranges = v["rows"], mla_ranges(v["capacity"])
        v |= {
            "query": _rows(rng, rows, heads * MLA_WIDTH).reshape(rows, heads, -1),
            "cache": bits_of(v["cache"], "bf16"),
        }
        v |= {"states": poison(rows, heads, ranges, 2), "vectors": poison(rows, heads, ranges, MLA_LATENT)}
        yield Case(label, {**v, "ranges": ranges, "scale": 0.2})


def _mla_combine(rng: np.random.Generator, kernel: str) -> Iterator[Case]:
    for heads, positions in ((16, (0,)), (16, (127, 128)), (64, (2047, 2048, 16384))):
        ranges = mla_ranges(max(positions) + 1)
        rows = len(positions)
        states = normal(rng, rows, heads, ranges, 2) * f32(3)
        states[..., 1] = 1 + np.abs(states[..., 1])
        values = {"states": states, "vectors": normal(rng, rows, heads, ranges, MLA_LATENT)}
        values |= {"positions": np.array(positions, i32), "o": poison(rows, heads, MLA_LATENT, dtype=u16)}
        yield Case(f"{heads} heads, positions {positions}", {**values, "rows": rows, "heads": heads, "ranges": ranges})


#: twin → maker of its kernels' cases, by the kernel's name
MMA_CASES: dict[str, Callable[[np.random.Generator, str], Iterator[Case]]] = {
    "mma_matmul": _mma_matmul,
    "mma_gate_up": _mma_gate_up,
    "mma_expert_gate_up": _mma_expert,
    "mma_expert_down": _mma_expert,
    "norm16": _norm16,
    "round16": _round16,
    "kv_append16": _kv_append16,
    "rope_query16": _rope_query16,
    "attn16": _attn16,
    "attn16_combine": _attn16_combine,
    "mla_decode": _mla_decode,
    "mla_combine": _mla_combine,
}

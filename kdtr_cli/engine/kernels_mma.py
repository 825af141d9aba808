"""The kernels of tier bf16: products of bf16 rows and weights on matrix units, and what stands between them.

Weights lie in the order in which the instruction wants them (``engine/fragments.py``; kernels_cu/mma_matmul.cuh has the
contract). A variant wW_mM_tT has W warps that share a row's k, M tiles of 8 rows and T tiles of 16 outputs a block;
with _kK its k is known to the compiler. W and k decide the bits, nothing else does: ``warps`` gives a matrix its W.
"""

import re
from collections.abc import Callable

from kdtr_cli.engine.kernel_table import SHARED_LIMIT, Dims, Kernel, args, up

__all__ = [
    "MLA_LATENT",
    "MLA_WIDTH",
    "MMA",
    "RANGE",
    "fixed_k",
    "has_mla",
    "mla_decode",
    "mla_ranges",
    "mma_expert",
    "mma_gate_up",
]
__all__ += ["mma_matmul", "warps"]

RANGE = 256  # positions of one range of the attention (attention16.cu)

#: W → up to this many rows: tiles of 8 rows M and of 16 outputs T of a block, as measured on an H200 (docs/log.md); the
#: last takes more rows too, reading the weights once for every 8 M
_TILES = {
    1: ((8, 1, 1), (16, 2, 1), (32, 4, 1)),
    4: ((8, 1, 1), (16, 2, 1), (32, 4, 2)),
    8: ((8, 1, 1), (16, 2, 2), (24, 3, 2), (32, 4, 2)),
    16: ((8, 1, 1), (16, 2, 1), (32, 4, 1), (64, 4, 2)),
}
_PAIRED_TILES = ((8, 1), (16, 2), (32, 4))  # of gate and up: rows, M
#: W → the values of k that the compiler knows
_MATMUL_K = {1: (), 4: (1536, 2048), 8: (7168, 8192), 16: (7168,)}
_GATE_UP_K = {1: (), 4: (), 8: (7168,)}
_EXPERT_GATE_UP_K = {1: (), 4: (), 8: (7168,)}
_EXPERT_DOWN_K = {1: (), 4: (2048,), 8: ()}

#: of the largest value of a row: float32 sums of up to 18432 products in any order; with exponentials that may round to
#: the other bf16
_SUMS, _SOFTMAX = 2.0**-18, 2.0**-8

#: what mla_decode.cu is made for: latent and rotary width, and heads of a block
MLA_LATENT, MLA_WIDTH, _MLA_HEADS = 512, 576, 16
_RANGE_SIZES = ((2048, 64), (16384, 128), (65536, 256))  # up to this length, positions of a range


_RESERVED = 1024  # bytes of a block's shared memory that the compiler keeps for itself from sm_90 on


def _mla_shared(heads: int) -> int:
    return 2 * 32 * 1168 + heads * (1152 + 64 + 28) + 16


def warps(n: int, k: int) -> int:
    """How many warps share the k of a matrix [n, k]: part of the numerics of tier bf16, the same on every device.

    Measured on an H200 (docs/log.md): a matrix of few outputs needs many warps a tile to fill the chip, a short k has
    too few units of 64 for many.
    """
    units = up(k, 64)
    return 1 if units < 8 else 4 if units < 64 else 16 if n <= 2560 else 8


def _paired_warps(k: int) -> int:
    """The same where a block has gate and up: twice the weights of a tile, so never 16 warps."""
    return min(8, warps(1 << 20, k))


def mma_matmul(rows: int, n: int, k: int) -> str:
    """The kernel for a product of this many rows with a matrix [n, k]."""
    w = warps(n, k)
    m, t = next(((m, t) for most, m, t in _TILES[w] if rows <= most), _TILES[w][-1][1:])
    return _named("mma_matmul", f"w{w}_m{m}_t{t}", k, _MATMUL_K[w])


def mma_gate_up(rows: int, k: int) -> str:
    """The kernel for gate and up projection of rows of k elements."""
    w = _paired_warps(k)
    m = next((m for most, m in _PAIRED_TILES if rows <= most), _PAIRED_TILES[-1][1])
    return _named("mma_gate_up", f"w{w}_m{m}", k, _GATE_UP_K[w])


def mma_expert(part: str, k: int) -> str:
    """The kernel for a part ("gate_up" or "down") of the routed experts, rows of k elements."""
    w = _paired_warps(k)
    return _named(f"mma_expert_{part}", f"w{w}", k, (_EXPERT_GATE_UP_K if part == "gate_up" else _EXPERT_DOWN_K)[w])


def has_mla(kind: str, heads: int, latent: int, rope: int) -> bool:
    """Whether mla_decode.cu serves a model's attention on a device of this kind; part of the numerics there."""
    return kind == "gpu" and heads % _MLA_HEADS == 0 and (latent, latent + rope) == (MLA_LATENT, MLA_WIDTH)


def mla_decode(rows: int, positions: int, heads: int, shared: int) -> str:
    """The kernel for this many rows and heads that see up to this many positions, on a device that gives a block this
    much shared memory; the bits are the same."""
    wide = heads % 32 == 0 and (rows > 1 or positions > 16384) and shared >= _mla_shared(32) + _RESERVED
    return f"mla_decode_h{32 if wide else 16}"


def _range_size(length: int) -> int:
    """Positions of a range for a row that sees this many: range_size in mla_decode.cu, measured there at one row."""
    return next((size for most, size in _RANGE_SIZES if length <= most), 1024)


def mla_ranges(positions: int) -> int:
    """The most ranges that rows which see up to this many positions have."""
    lengths = [*(most for most, _ in _RANGE_SIZES if most < positions), positions]
    return max(up(length, _range_size(length)) for length in lengths)


def _named(kernel: str, variant: str, k: int, fixed: tuple[int, ...]) -> str:
    return f"{kernel}_{variant}_k{k}" if k in fixed else f"{kernel}_{variant}"


def fixed_k(kernel: str) -> int | None:
    """The k that a kernel is made for, None for any."""
    found = re.search(r"_k(\d+)$", kernel)
    return int(found[1]) if found else None


def _bf16(name: str, file: str, text: str, grid: Callable[[Dims], tuple], twin: str = "", **more) -> Kernel:
    return Kernel(
        name, file, args(text), grid, twin or name, tier="bf16", overlaps=True, **{"tolerance": _SUMS, **more}
    )


def _matmul_kernel(w: int, m: int, t: int, k: int) -> Kernel:
    return _bf16(
        _named("mma_matmul", f"w{w}_m{m}_t{t}", k, (k,) if k else ()),
        "mma_matmul.cu",
        """
        in bf16 x[rows, x_row]
        in bf16 w[heads, tiles, units, 1024]
        in f32 bias?[n]
        in f32 residual?[rows, y_row]
        out f32 y32?[rows, y_row]
        out bf16 y16?[rows, y_row]
        i32 rows
        i32 n
        i32 k
        i64 x_row
        i64 y_row
        i64 x_head
        i64 y_head
        """,
        lambda d: (up(up(d["n"], 16), t), up(d["rows"], 8 * m), d["heads"]),
        "mma_matmul",
        block=(32 * w, 1, 1),
        shared=lambda d: 512 * w * m * t,
        bytes=lambda d: d["heads"] * (2 * d["n"] * d["k"] + d["rows"] * (2 * d["k"] + 4 * d["n"])),
        flops=lambda d: 2 * d["heads"] * d["rows"] * d["n"] * d["k"],
    )


def _gate_up_kernel(w: int, m: int, k: int) -> Kernel:
    return _bf16(
        _named("mma_gate_up", f"w{w}_m{m}", k, (k,) if k else ()),
        "mma_gate_up.cu",
        """
        in bf16 x[rows, x_row]
        in bf16 w[tile_pairs, 2, units, 1024]
        out bf16 h[rows, n]
        i32 rows
        i32 n
        i32 k
        i64 x_row
        """,
        lambda d: (up(d["n"], 16), up(d["rows"], 8 * m), 1),
        "mma_gate_up",
        block=(32 * w, 1, 1),
        shared=lambda d: 1024 * w * m,
        bytes=lambda d: 4 * d["n"] * d["k"] + d["rows"] * (2 * d["k"] + 2 * d["n"]),
        flops=lambda d: 4 * d["rows"] * d["n"] * d["k"],
    )


def _expert_kernel(part: str, w: int, k: int) -> Kernel:
    t, out, written = (2, "bf16 h", 2) if part == "gate_up" else (1, "f32 y", 4)
    return _bf16(
        _named(f"mma_expert_{part}", f"w{w}", k, (k,) if k else ()),
        "mma_expert.cu",
        f"""
        in bf16 x[x_rows, k]
        in bf16 w[experts, tiles_n, units, 1024]
        in i32 items[item_count]
        in i32 tiles[tile_places, 3]
        in i32 tile_count[1]
        out {out}[item_count, n]
        i32 n
        i32 k
        i32 items_a_row
        """,
        lambda d: (up(d["n"], 16), d["tile_places"], 1),
        f"mma_expert_{part}",
        block=(32 * w, 1, 1),
        shared=lambda d: 512 * w * t,
        bytes=lambda d: d["touched"] * t * 2 * d["n"] * d["k"] + d["item_count"] * (2 * d["k"] + written * d["n"]),
        flops=lambda d: 2 * t * d["item_count"] * d["n"] * d["k"],
    )


def _mla_kernel(heads: int) -> Kernel:
    """The attention with blocks of 16 or 32 heads; the larger does not fit into the shared memory of sm_120."""
    return _bf16(
        f"mla_decode_h{heads}",
        "mla_decode.cu",
        f"""
        in bf16 query[rows, heads, {MLA_WIDTH}]
        in bf16 cache[sequences, capacity, {MLA_WIDTH}]
        in i32 positions[rows]
        in i32 slots[rows]
        in i32 tree_starts?[rows]
        in i32 paths?[rows, path_row]
        inout f32 states[rows, heads, ranges, 2]
        inout f32 vectors[rows, heads, ranges, {MLA_LATENT}]
        i32 heads
        i32 capacity
        i32 ranges
        i32 path_row
        f32 scale
        """,
        lambda d: (d["heads"] // heads, d["ranges"], d["rows"]),
        "mla_decode",
        shared=lambda d: _mla_shared(heads),
        tolerance=_SOFTMAX,
        gpu_only=True,
        shared_limit=_mla_shared(heads) + _RESERVED if heads > 16 else SHARED_LIMIT,
        bytes=lambda d: (
            2 * d["rows"] * d["capacity"] * MLA_WIDTH + 8 * d["rows"] * d["heads"] * d["ranges"] * MLA_LATENT
        ),
        flops=lambda d: 2 * d["rows"] * d["heads"] * d["capacity"] * (MLA_WIDTH + MLA_LATENT),
    )


#: The rows of the table.
MMA = (
    *(_matmul_kernel(w, m, t, k) for w, known in _MATMUL_K.items() for k in (0, *known) for _, m, t in _TILES[w]),
    *(_gate_up_kernel(w, m, k) for w, known in _GATE_UP_K.items() for k in (0, *known) for _, m in _PAIRED_TILES),
    *(_expert_kernel("gate_up", w, k) for w, known in _EXPERT_GATE_UP_K.items() for k in (0, *known)),
    *(_expert_kernel("down", w, k) for w, known in _EXPERT_DOWN_K.items() for k in (0, *known)),
    _bf16(
        "norm16",
        "norm16.cu",
        """
        in f32 x[rows, x_row]
        in f32 weight[n]
        out bf16 y16[rows, n]
        out f32 y32?[rows, n]
        i32 n
        f32 eps
        i64 x_row
        """,
        lambda d: (d["rows"], 1, 1),
        block=(1024, 1, 1),
        bytes=lambda d: d["n"] * (6 * d["rows"] + 4),
        flops=lambda d: 4 * d["rows"] * d["n"],
    ),
    _bf16(
        "round16",
        "round16.cu",
        """
        in f32 x[n]
        out bf16 y[n]
        i64 n
        """,
        lambda d: (up(d["n"], 128), 1, 1),
        bytes=lambda d: 6 * d["n"],
    ),
    _bf16(
        "kv_append16",
        "kv_append16.cu",
        """
        in f32 kv[rows, kv_row]
        in f32 weight[latent]
        in i32 positions[rows]
        in i32 slots[rows]
        in i32 places[rows]
        in f32 cos[max_positions, half]
        in f32 sin[max_positions, half]
        inout bf16 cache[sequences, capacity, width]
        i32 latent
        i32 half
        i32 interleaved
        i32 capacity
        f32 eps
        i64 kv_row
        """,
        lambda d: (d["rows"], 1, 1),
        bytes=lambda d: d["rows"] * (6 * (d["latent"] + 2 * d["half"]) + 8 * d["half"]) + 4 * d["latent"],
        flops=lambda d: d["rows"] * (4 * d["latent"] + 6 * d["half"]),
    ),
    _bf16(
        "rope_query16",
        "rope_query16.cu",
        """
        in bf16 q[rows, q_row]
        in i32 positions[rows]
        in f32 cos[max_positions, half]
        in f32 sin[max_positions, half]
        inout bf16 query[rows, heads, width]
        i32 heads
        i32 nope
        i32 half
        i32 latent
        i32 interleaved
        i64 q_row
        """,
        lambda d: (up(d["heads"] * d["half"], 128), d["rows"], 1),
        bytes=lambda d: 8 * d["rows"] * d["half"] * (d["heads"] + 1),
        flops=lambda d: 6 * d["rows"] * d["half"] * d["heads"],
    ),
    _bf16(
        "attn16",
        "attention16.cu",
        """
        in bf16 query[rows, heads, width]
        in bf16 cache[sequences, capacity, width]
        in i32 positions[rows]
        in i32 slots[rows]
        in i32 tree_starts?[rows]
        in i32 paths?[rows, path_row]
        inout f32 states[rows, heads, ranges, 2]
        inout f32 vectors[rows, heads, ranges, n]
        i32 heads
        i32 width
        i32 n
        i32 capacity
        i32 ranges
        i32 path_row
        f32 scale
        """,
        lambda d: (d["ranges"], d["heads"], d["rows"]),
        tolerance=_SOFTMAX,
        bytes=lambda d: (
            d["rows"] * d["ranges"] * RANGE * 2 * d["width"]
            + 2 * d["rows"] * d["heads"] * (d["width"] + 2 * d["ranges"] * (d["n"] + 2))
        ),
        flops=lambda d: 2 * d["rows"] * d["heads"] * d["ranges"] * RANGE * (d["width"] + d["n"]),
    ),
    _bf16(
        "attn16_combine",
        "attention16.cu",
        """
        in f32 states[rows, heads, ranges, 2]
        in f32 vectors[rows, heads, ranges, n]
        in i32 positions[rows]
        out bf16 o[rows, heads, n]
        i32 heads
        i32 n
        i32 ranges
        """,
        lambda d: (up(d["n"], 128), d["heads"], d["rows"]),
        bytes=lambda d: d["rows"] * d["heads"] * (4 * d["ranges"] * (d["n"] + 2) + 2 * d["n"]),
        flops=lambda d: 2 * d["rows"] * d["heads"] * d["n"] * (d["ranges"] + 1),
    ),
    *(_mla_kernel(heads) for heads in (16, 32)),
    _bf16(
        "mla_combine",
        "mla_combine.cu",
        f"""
        in f32 states[rows, heads, ranges, 2]
        in f32 vectors[rows, heads, ranges, {MLA_LATENT}]
        in i32 positions[rows]
        out bf16 o[rows, heads, {MLA_LATENT}]
        i32 heads
        i32 ranges
        """,
        lambda d: (d["heads"], d["rows"], MLA_LATENT // 128),
        tolerance=2.0**-10,
        gpu_only=True,
        bytes=lambda d: d["rows"] * d["heads"] * (4 * d["ranges"] * (MLA_LATENT + 2) + 2 * MLA_LATENT),
        flops=lambda d: 2 * d["rows"] * d["heads"] * MLA_LATENT * d["ranges"],
    ),
)

"""The kernel table: every kernel of the engine, described once.

The engine launches by it, ``kdtr kernels list|compile|test`` and the tests read it, and the NumPy twin of a kernel is
the function of the same ``twin`` name in ``kdtr_cli.reference.twins``. An array argument names its shape by the scalar
arguments (and by extra dimensions that only the launch needs, such as rows).
"""

from typing import Any

from kdtr_cli.engine.kernel_table import DTYPES, Arg, Dims, Kernel, args, up
from kdtr_cli.engine.kernels_ddtree import DDTREE
from kdtr_cli.engine.kernels_mma import MMA
from kdtr_cli.engine.kernels_products import FORMS, PLAIN, PRODUCTS, embed, expert_matmul, matmul, matmuls

__all__ = [
    "CHUNK",
    "DTYPES",
    "FORMS",
    "KERNELS",
    "PLAIN",
    "SEGMENT",
    "SPAN",
    "Arg",
    "Kernel",
    "embed",
    "expert_matmul",
    "expert_tile",
    "matmul",
    "matmuls",
    "most_tiles",
    "sources",
]

CHUNK = 256  # positions of an attention chunk (rule 10; attention.cuh)
SEGMENT = 32  # positions whose scores one block makes (attention.cuh)
SPAN = 2048  # logits of one part of the token choice (sample.cu)
_HEADS = 8  # heads of a block that share a key (attention.cuh)


def _elements(name: str, file: str, text: str, size: str, **more: Any) -> Kernel:
    """A kernel with one thread an element of rows of `size` elements."""
    return Kernel(name, file, args(text), lambda d: (up(d[size], 128), d["rows"], 1), name, **more)


def _head_blocks(d: Dims) -> int:
    """Blocks of at most eight heads that share a kv head."""
    return d["kv_heads"] * up(d["heads"] // d["kv_heads"], _HEADS)


_TABLE = (
    Kernel(
        "rmsnorm",
        "rmsnorm.cu",
        args("""
        in f32 x[rows, x_row]
        in f32 weight[n]
        out f32 y[rows, y_row]
        i32 n
        f32 eps
        i64 x_row
        i64 y_row
        """),
        lambda d: (d["rows"], 1, 1),
        "rmsnorm",
        bytes=lambda d: 4 * d["n"] * (2 * d["rows"] + 1),
        flops=lambda d: 4 * d["rows"] * d["n"],
    ),
    Kernel(
        "rope_query",
        "rope_query.cu",
        args("""
        in f32 q[rows, q_row]
        in i32 positions[rows]
        in f32 cos[max_positions, half]
        in f32 sin[max_positions, half]
        inout f32 query[rows, heads, width]
        i32 heads
        i32 nope
        i32 half
        i32 latent
        i32 interleaved
        i64 q_row
        """),
        lambda d: (up(d["heads"] * d["half"], 128), d["rows"], 1),
        "rope_query",
        bytes=lambda d: 8 * d["rows"] * d["half"] * (2 * d["heads"] + 1),
        flops=lambda d: 6 * d["rows"] * d["half"] * d["heads"],
    ),
    Kernel(
        "kv_append",
        "kv_append.cu",
        args("""
        in f32 kv[rows, kv_row]
        in f32 weight[latent]
        in i32 positions[rows]
        in i32 slots[rows]
        in i32 places[rows]
        in f32 cos[max_positions, half]
        in f32 sin[max_positions, half]
        inout f32 cache[sequences, capacity, width]
        i32 latent
        i32 half
        i32 interleaved
        i32 capacity
        f32 eps
        i64 kv_row
        """),
        lambda d: (d["rows"], 1, 1),
        "kv_append",
        bytes=lambda d: 8 * d["rows"] * (d["latent"] + 3 * d["half"]) + 4 * d["latent"],
        flops=lambda d: d["rows"] * (4 * d["latent"] + 6 * d["half"]),
    ),
    Kernel(
        "attn_scores",
        "attention_scores.cu",
        args("""
        in f32 query[rows, heads, width]
        in f32 cache[sequences, capacity, key_row]
        in i32 positions[rows]
        in i32 slots[rows]
        in i32 tree_starts?[rows]
        in i32 paths?[rows, path_row]
        inout f32 scores[rows, heads, span]
        inout f32 peaks[rows, heads, segments]
        i32 heads
        i32 kv_heads
        i32 width
        i32 capacity
        i32 chunks
        i32 path_row
        i64 key_row
        i64 key_head
        f32 scale
        """),
        lambda d: (d["chunks"] * (CHUNK // SEGMENT), _head_blocks(d), d["rows"]),
        "attn_scores",
        bytes=lambda d: (
            4 * d["rows"] * (d["chunks"] * CHUNK * d["width"] * d["kv_heads"])
            + 4 * d["rows"] * d["heads"] * (d["width"] + d["chunks"] * CHUNK)
        ),
        flops=lambda d: 2 * d["rows"] * d["heads"] * d["chunks"] * CHUNK * d["width"],
    ),
    Kernel(
        "attn_chunks",
        "attention_chunks.cu",
        args("""
        in f32 scores[rows, heads, span]
        in f32 peaks[rows, heads, segments]
        in f32 cache[sequences, capacity, key_row]
        in i32 positions[rows]
        in i32 slots[rows]
        in i32 tree_starts?[rows]
        in i32 paths?[rows, path_row]
        inout f32 sums[rows, heads, chunks]
        inout f32 vectors[rows, heads, chunks, n]
        i32 heads
        i32 kv_heads
        i32 n
        i32 capacity
        i32 chunks
        i32 path_row
        i64 key_row
        i64 key_head
        """),
        lambda d: (d["chunks"], _head_blocks(d), d["rows"] * up(d["n"], 128)),
        "attn_chunks",
        bytes=lambda d: (
            4 * d["rows"] * d["chunks"] * (CHUNK * d["n"] * d["kv_heads"] + d["heads"] * (CHUNK + d["n"] + 1))
        ),
        flops=lambda d: 2 * d["rows"] * d["heads"] * d["chunks"] * CHUNK * d["n"],
    ),
    Kernel(
        "attn_combine",
        "attention_combine.cu",
        args("""
        in f32 sums[rows, heads, chunks]
        in f32 vectors[rows, heads, chunks, n]
        in i32 positions[rows]
        out f32 o[rows, heads, n]
        i32 heads
        i32 n
        i32 chunks
        """),
        lambda d: (up(d["n"], 128), d["heads"], d["rows"]),
        "attn_combine",
        bytes=lambda d: 4 * d["rows"] * d["heads"] * (d["chunks"] * (d["n"] + 1) + d["n"]),
        flops=lambda d: d["rows"] * d["heads"] * d["n"] * (d["chunks"] + 1),
    ),
    _elements(
        "swiglu",
        "swiglu.cu",
        """
        in f32 gate_up[rows, two_n]
        out f32 h[rows, n]
        i32 n
        """,
        "n",
        bytes=lambda d: 12 * d["rows"] * d["n"],
        flops=lambda d: 25 * d["rows"] * d["n"],
    ),
    Kernel(
        "router",
        "router.cu",
        args("""
        in f32 logits[rows, experts]
        in f32 bias?[experts]
        out i32 ids[rows, slots]
        out f32 weights[rows, slots]
        i32 experts
        i32 slots
        i32 groups
        i32 kept_groups
        i32 softmax
        i32 best_two
        i32 normalise
        f32 factor
        """),
        lambda d: (d["rows"], 1, 1),
        "router",
        block=(256, 1, 1),
        shared=lambda d: 16 * d["experts"] + 12 * d["groups"],
        bytes=lambda d: 4 * d["rows"] * (d["experts"] + 2 * d["slots"]),
        flops=lambda d: 25 * d["rows"] * d["experts"],
    ),
    Kernel(
        "group_experts",
        "group_experts.cu",
        args("""
        in i32 ids[item_count]
        out i32 items[item_count]
        inout i32 tiles[tile_places, 3]
        out i32 tile_count[1]
        i32 item_count
        i32 experts
        i32 tile
        """),
        lambda d: (1, 1, 1),
        "group_experts",
        shared=lambda d: 12 * d["experts"],
        bytes=lambda d: 8 * d["item_count"],
    ),
    _elements(
        "combine",
        "combine.cu",
        """
        in f32 expert[rows, slots, n]
        in f32 weights[rows, slots]
        in f32 shared?[rows, n]
        in f32 residual[rows, n]
        out f32 y[rows, n]
        i32 slots
        i32 n
        """,
        "n",
        bytes=lambda d: 4 * d["rows"] * d["n"] * (d["slots"] + 3),
        flops=lambda d: 2 * d["rows"] * d["n"] * (d["slots"] + 1),
    ),
    Kernel(
        "sample_parts",
        "sample.cu",
        args("""
        in f32 logits[rows, vocab]
        in i32 positions[rows]
        in i32 streams[rows]
        out f32 values[rows, parts]
        out i32 indices[rows, parts]
        inout i32 bad[rows]
        i32 vocab
        f32 temperature
        u32 seed_low
        u32 seed_high
        """),
        lambda d: (d["parts"], d["rows"], 1),
        "sample_parts",
        bytes=lambda d: 4 * d["rows"] * d["vocab"],
    ),
    Kernel(
        "sample_final",
        "sample.cu",
        args("""
        in f32 values[rows, parts]
        in i32 indices[rows, parts]
        out i32 chosen[rows]
        inout i32 tokens?[rows]
        inout i32 positions?[rows]
        in i32 active?[rows]
        i32 parts
        """),
        lambda d: (d["rows"], 1, 1),
        "sample_final",
        block=(32, 1, 1),
        bytes=lambda d: 8 * d["rows"] * d["parts"],
    ),
    Kernel(
        "nonfinite",
        "nonfinite.cu",
        args("""
        in f32 x[n]
        inout u64 first[1]
        i64 n
        """),
        lambda d: (min(up(d["n"], 128), 1024), 1, 1),
        "nonfinite",
        bytes=lambda d: 4 * d["n"],
    ),
)

#: name → kernel
KERNELS: dict[str, Kernel] = {k.name: k for k in (*_TABLE, *PRODUCTS, *DDTREE, *MMA)}


def sources(kind: str = "gpu") -> tuple[str, ...]:
    """Every .cu file of the table that devices of this kind can compile, once, in table order."""
    return tuple(dict.fromkeys(k.file for k in KERNELS.values() if kind == "gpu" or not k.gpu_only))


def expert_tile(rows: int) -> int:
    """Items of an expert that its kernels take together in a pass of so many rows."""
    return 1 if rows == 1 else 4


def most_tiles(items: int, experts: int, tile: int) -> int:
    """Upper bound of the tiles that group_experts can make: one partial tile an expert beside the full ones."""
    return min(experts, items) + items // tile

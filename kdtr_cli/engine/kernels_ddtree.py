"""The kernels of a DDTree round: drafting, marginals, the tree, acceptance, compaction. Rows of the kernel table."""

from kdtr_cli.engine.kernel_table import Dims, Kernel, args, up

__all__ = ["DDTREE", "PART"]

PART = 8192  # logits of one part of the marginals: a block of rule 3 (topk.cuh)

_MARGINALS = """
out i32 ids[batch, horizon, k]
out f32 logps[batch, horizon, k]
out i32 counts[batch, horizon]
"""


def _tree_shared(d: Dims) -> int:
    """Dynamic shared memory of build_tree: slot and node of each of budget + 1 rows, and the table of small budgets."""
    return 44 * (d["budget"] + 1) + (8 * 34 * 65 if d["budget"] <= 64 else 0)


DDTREE = (
    Kernel(
        "tap_rows",
        "tap_rows.cu",
        args("""
        in f32 hidden[rows, n]
        inout f32 taps[rows, taps_row]
        i32 n
        i64 column
        i64 taps_row
        """),
        lambda d: (up(d["n"], 128), d["rows"], 1),
        "tap_rows",
        bytes=lambda d: 8 * d["rows"] * d["n"],
    ),
    Kernel(
        "gather_rows",
        "gather_rows.cu",
        args("""
        in f32 src[batch, rows_in, n]
        in i32 index[batch, rows_out]
        out f32 out[batch, rows_out, n]
        i32 rows_in
        i32 rows_out
        i32 n
        """),
        lambda d: (up(d["n"], 128), d["batch"] * d["rows_out"], 1),
        "gather_rows",
        bytes=lambda d: 8 * d["batch"] * d["rows_out"] * d["n"],
    ),
    Kernel(
        "draft_rows",
        "draft_rows.cu",
        args("""
        in i32 starts[batch]
        in i32 roots[batch]
        out i32 tokens[batch, block]
        out i32 positions[batch, block]
        out i32 slots[batch, block]
        out i32 last[batch, block]
        i32 batch
        i32 block
        i32 mask_id
        """),
        lambda d: (up(d["batch"] * d["block"], 128), 1, 1),
        "draft_rows",
        bytes=lambda d: 16 * d["batch"] * d["block"],
    ),
    Kernel(
        "draft_qkv",
        "draft_qkv.cu",
        args("""
        in f32 qkv[rows, qkv_row]
        in f32 q_weight?[head_dim]
        in f32 k_weight[head_dim]
        in i32 positions[rows]
        in i32 slots[rows]
        in i32 places[rows]
        in f32 cos[max_positions, half]
        in f32 sin[max_positions, half]
        inout f32 query?[rows, heads, head_dim]
        inout f32 cache[sequences, capacity, cache_row]
        i32 heads
        i32 kv_heads
        i32 head_dim
        i32 capacity
        f32 eps
        i64 qkv_row
        """),
        lambda d: (up(d["heads"] + 2 * d["kv_heads"], 4), d["rows"], 1),
        "draft_qkv",
        bytes=lambda d: 4 * d["rows"] * d["head_dim"] * (2 * d["heads"] + 4 * d["kv_heads"] + 1),
        flops=lambda d: 7 * d["rows"] * d["head_dim"] * (d["heads"] + d["kv_heads"]),
    ),
    Kernel(
        "topk_parts",
        "topk_parts.cu",
        args("""
        in f32 logits[rows, vocab]
        out u64 keys[rows, parts, k]
        inout i32 bad[rows]
        i32 vocab
        i32 k
        """),
        lambda d: (up(d["vocab"], PART), d["rows"], 1),
        "topk_parts",
        block=(256, 1, 1),
        bytes=lambda d: 4 * d["rows"] * d["vocab"] + 8 * d["rows"] * up(d["vocab"], PART) * d["k"],
    ),
    Kernel(
        "topk_final",
        "topk_final.cu",
        args("""
        in f32 logits[rows, vocab]
        in u64 keys[rows, parts, k]
        out f32 sums[rows, parts]
        inout i32 arrived[rows]
        out i32 ids[rows, k]
        out f32 logps[rows, k]
        i32 vocab
        i32 k
        """),
        lambda d: (up(d["vocab"], PART) + 1, d["rows"], 1),
        "topk_final",
        bytes=lambda d: 4 * d["rows"] * d["vocab"] + 8 * d["rows"] * d["k"] * (up(d["vocab"], PART) + 1),
        flops=lambda d: 25 * d["rows"] * d["vocab"],
    ),
    Kernel(
        "draft_ngram",
        "draft_ngram.cu",
        args(f"""
        in i32 history[batch, history_row]
        in i32 starts[batch]
        {_MARGINALS.strip()}
        i32 horizon
        i32 k
        i32 history_row
        """),
        lambda d: (d["batch"], 1, 1),
        "draft_ngram",
        bytes=lambda d: 4 * d["batch"] * (d["history_row"] + d["horizon"] * (2 * d["k"] + 1)),
    ),
    Kernel(
        "draft_synthetic",
        "draft_synthetic.cu",
        args(f"""
        in i32 known[batch, known_row]
        in i32 known_from[batch]
        in i32 known_count[batch]
        in i32 streams[batch]
        in i32 starts[batch]
        {_MARGINALS.strip()}
        i32 horizon
        i32 k
        i32 vocab
        i32 known_row
        u32 seed_low
        u32 seed_high
        f64 rate
        """),
        lambda d: (d["horizon"], d["batch"], 1),
        "draft_synthetic",
        bytes=lambda d: 4 * d["batch"] * d["horizon"] * (2 * d["k"] + 1),
    ),
    Kernel(
        "draft_replay",
        "draft_replay.cu",
        args(f"""
        in i32 top_ids[batch, positions, horizon, kept]
        in f32 top_logps[batch, positions, horizon, kept]
        in i32 top_counts[batch, positions, horizon]
        in i32 prompt_lengths[batch]
        in i32 limits[batch]
        in i32 starts[batch]
        {_MARGINALS.strip()}
        i32 horizon
        i32 k
        i32 positions
        i32 kept
        """),
        lambda d: (d["horizon"], d["batch"], 1),
        "draft_replay",
        bytes=lambda d: 8 * d["batch"] * d["horizon"] * (2 * d["k"] + 1),
    ),
    Kernel(
        "build_tree",
        "build_tree.cu",
        args("""
        in i32 ids[batch, horizon, k]
        in f32 logps[batch, horizon, k]
        in i32 counts?[batch, horizon]
        in i32 starts[batch]
        in i32 roots[batch]
        out i32 tokens[batch, nodes]
        out i32 parents[batch, nodes]
        out i32 depths[batch, nodes]
        out f64 scores[batch, nodes]
        out i32 n_nodes[batch]
        out i32 positions[batch, nodes]
        out i32 places[batch, nodes]
        out i32 slots[batch, nodes]
        out i32 tree_starts[batch, nodes]
        out i32 paths[batch, nodes, block]
        out u32 visible[batch, nodes, words]
        inout i32 bad[batch]
        i32 horizon
        i32 k
        i32 budget
        i32 last_position
        """),
        lambda d: (d["batch"], 1, 1),
        "build_tree",
        shared=_tree_shared,
        bytes=lambda d: (
            4 * d["batch"] * (2 * d["horizon"] * d["k"] + (d["budget"] + 1) * (d["horizon"] + 10 + d["budget"] // 32))
        ),
    ),
    Kernel(
        "accept",
        "accept.cu",
        args("""
        in i32 tokens[batch, nodes]
        in i32 parents[batch, nodes]
        in i32 n_nodes[batch]
        in i32 posterior[batch, nodes]
        out i32 accepted[batch, block]
        out i32 n_accepted[batch]
        out i32 bonus[batch]
        i32 budget
        i32 horizon
        """),
        lambda d: (d["batch"], 1, 1),
        "accept",
        shared=lambda d: 4 * (d["budget"] + 1),
        bytes=lambda d: 12 * d["batch"] * (d["budget"] + 1),
    ),
    Kernel(
        "compact_cache",
        "compact_cache.cu",
        args("""
        inout f32 cache[layers, sequences, capacity, width]
        in i32 starts[batch]
        in i32 accepted[batch, block]
        in i32 n_accepted[batch]
        i32 layers
        i32 sequences
        i32 capacity
        i32 width
        i32 horizon
        """),
        lambda d: (up(d["layers"] * d["width"], 128), d["batch"], 1),
        "compact_cache",
        bytes=lambda d: 8 * d["batch"] * d["layers"] * d["width"] * d["horizon"],
    ),
    Kernel(
        "advance_round",
        "advance_round.cu",
        args("""
        inout i32 starts[batch]
        inout i32 roots[batch]
        in i32 bonus[batch]
        in i32 n_accepted[batch]
        in i32 accepted[batch, block]
        in i32 tokens[batch, nodes]
        inout i32 history?[batch, history_row]
        in i32 active?[batch]
        i32 budget
        i32 horizon
        i32 history_row
        """),
        lambda d: (d["batch"], 1, 1),
        "advance_round",
        block=(32, 1, 1),
        bytes=lambda d: 8 * d["batch"] * (d["horizon"] + 4),
    ),
)

"""NumPy twins of the DDTree kernels, by the kernels' names; see ``kdtr_cli.reference.twins``.

They stand on the NumPy drafters and on ``kdtr_cli.ddtree`` (the heap, the walk), whose methods are not the kernels'.
"""

import numpy as np

from kdtr_cli.ddtree.accept import walk
from kdtr_cli.ddtree.compact import compact
from kdtr_cli.ddtree.tree import Tree, visibility
from kdtr_cli.ddtree.tree import build_tree as best_first
from kdtr_cli.ddtree.tree import paths as ancestors
from kdtr_cli.errors import InputError
from kdtr_cli.reference import arith
from kdtr_cli.reference.attention import rotate
from kdtr_cli.reference.drafters.ngram import ngram_marginals
from kdtr_cli.reference.drafters.replay import replay_marginals
from kdtr_cli.reference.drafters.synthetic import synthetic_marginals

__all__ = ["DDTREE_TWINS"]

f32 = np.float32
PART = arith.BLOCK  # logits of one part (topk.cuh)


def tap_rows(hidden, taps, n, column, **_):
    taps[:, column : column + n] = hidden


def gather_rows(src, index, out, **_):
    out[:] = np.take_along_axis(src, index[:, :, None], 1)


def draft_rows(starts, roots, tokens, positions, slots, last, batch, block, mask_id, **_):
    tokens[:], tokens[:, 0] = mask_id, roots
    positions[:] = starts[:, None] + np.arange(block)
    slots[:] = np.arange(batch)[:, None]
    last[:] = positions[:, -1:]


def draft_qkv(
    qkv, q_weight, k_weight, positions, slots, places, cos, sin, query, cache, heads, kv_heads, head_dim, eps, **_
):
    rows = len(positions)
    parts = qkv[:, : (heads + 2 * kv_heads) * head_dim].reshape(rows, -1, head_dim)
    angles = cos[positions][:, None], sin[positions][:, None]
    if heads:
        query[:] = rotate(arith.rms_norm(parts[:, :heads], q_weight, eps), *angles, False)
    keys = rotate(arith.rms_norm(parts[:, heads : heads + kv_heads], k_weight, eps), *angles, False)
    cache[slots, places] = np.concatenate([keys, parts[:, heads + kv_heads :]], 1).reshape(rows, -1)


# ---------------------------------------------------------------------------------------------------- marginals


def _value_key(x):
    """uint32 that grows with x: NaN above all, -0 = +0 (rule 6)."""
    bits = (x + f32(0)).view(np.uint32)
    key = np.where(bits >> 31 != 0, ~bits, bits | np.uint32(0x80000000))
    return np.where(np.isnan(x), np.uint32(0xFFFFFFFF), key)


def topk_parts(logits, keys, bad, vocab, k, **_):
    keys[:] = 0
    for part, first in enumerate(range(0, vocab, PART)):
        x = logits[:, first : first + PART]
        ids = arith.order(x, min(k, x.shape[1]))
        values = _value_key(np.take_along_axis(x, ids, -1)).astype(np.uint64)
        keys[:, part, : ids.shape[1]] = values << np.uint64(32) | (~(ids + first).astype(np.uint32)).astype(np.uint64)
    bad |= (~np.isfinite(logits)).any(-1)


def topk_final(logits, sums, arrived, ids, logps, vocab, k, **_):
    p = arith.exp(logits - arith.maximum(logits)[:, None])
    total = np.zeros(len(logits), f32)
    for part, first in enumerate(range(0, vocab, PART)):
        sums[:, part] = arith.sum128(p[:, first : first + PART])
        total = total + sums[:, part]
    ids[:] = arith.order(logits, k)
    log_z = arith.maximum(logits) + arith.log(total)
    logps[:] = np.take_along_axis(logits, ids, -1) - log_z[:, None]
    arrived[:] = 0


def _store(marginals, b, ids, logps, counts):
    """Marginals of one request; what stands past a count is 0."""
    found, values, counts[b] = marginals
    there = np.arange(found.shape[1]) < counts[b][:, None]
    ids[b], logps[b] = 0, 0
    ids[b, :, : found.shape[1]] = np.where(there, found, 0)
    logps[b, :, : found.shape[1]] = np.where(there, values, f32(0))


def draft_ngram(history, starts, ids, logps, counts, horizon, k, **_):
    for b, start in enumerate(starts):
        _store(ngram_marginals(history[b, : start + 1], horizon, k), b, ids, logps, counts)


def draft_synthetic(
    known,
    known_from,
    known_count,
    streams,
    starts,
    ids,
    logps,
    counts,
    horizon,
    k,
    vocab,
    seed_low,
    seed_high,
    rate,
    **_,
):
    seed = int(seed_high) << 32 | int(seed_low)
    more = {"rate": rate, "seed": seed, "horizon": horizon, "vocab": vocab, "k": k}
    for b, start in enumerate(starts):
        tokens = known[b, : known_count[b]]
        marginals = synthetic_marginals(tokens, int(known_from[b]), int(start), int(streams[b]), **more)
        _store(marginals, b, ids, logps, counts)


def draft_replay(top_ids, top_logps, top_counts, prompt_lengths, limits, starts, ids, logps, counts, k, **_):
    for b, start in enumerate(starts):
        stored = top_ids[b, : limits[b]], top_logps[b, : limits[b]], top_counts[b, : limits[b]]
        kept = np.clip(stored[2], 0, top_ids.shape[-1])
        _store(replay_marginals(*stored[:2], kept, int(start - prompt_lengths[b]), k), b, ids, logps, counts)


# ---------------------------------------------------------------------------------------------------- tree and round


def build_tree(
    ids,
    logps,
    counts,
    starts,
    roots,
    tokens,
    parents,
    depths,
    scores,
    n_nodes,
    positions,
    places,
    slots,
    tree_starts,
    paths,
    visible,
    bad,
    horizon,
    k,
    budget,
    last_position,
    **_,
):
    rows = np.arange(budget + 1)
    for b, start in enumerate(starts):
        count = np.full(horizon, k) if counts is None else np.clip(counts[b], 0, k)
        try:
            tree = best_first(roots[b], ids[b], logps[b], count, budget, max(0, last_position - start))
        except InputError:
            bad[b] = 1
            tree = best_first(roots[b], ids[b], logps[b], count * 0, budget)
        made = slice(0, tree.n + 1)
        n_nodes[b] = tree.n
        tokens[b], parents[b], depths[b], scores[b] = roots[b], -1, 0, 0.0
        tokens[b, made], parents[b, made] = tree.tokens, tree.parents
        depths[b, made], scores[b, made] = tree.depths, tree.scores
        positions[b], places[b] = start + depths[b], start + rows
        slots[b], tree_starts[b] = b, start
        paths[b] = places[b][:, None]
        for i, way in enumerate(ancestors(tree)):
            paths[b, i, : len(way)] = start + way
        see = np.eye(budget + 1, dtype=bool)
        see[made, made] = visibility(tree)
        visible[b] = _bits(see, visible.shape[-1])


def _bits(see, words):
    """bool [n, m] as uint32 [n, words]: column j is bit j % 32 of word j // 32."""
    padded = np.zeros((len(see), words * 32), np.uint32)
    padded[:, : see.shape[1]] = see
    return (padded.reshape(len(see), words, 32) << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32)


def accept(tokens, parents, n_nodes, posterior, accepted, n_accepted, bonus, **_):
    for b, n in enumerate(n_nodes):
        made = slice(0, n + 1)
        tree = Tree(tokens[b, made], parents[b, made], np.zeros(n + 1, np.int32), np.zeros(n + 1))
        way, bonus[b] = walk(tree, posterior[b, made])
        accepted[b], n_accepted[b] = way[-1], len(way)
        accepted[b, : len(way)] = way


def compact_cache(cache, starts, accepted, n_accepted, **_):
    for layer in cache:
        for b, start in enumerate(starts):
            compact(layer[b], start, accepted[b, : n_accepted[b]])


def advance_round(starts, roots, bonus, n_accepted, accepted, tokens, history, active, **_):
    for b, n in enumerate(n_accepted):
        if active is not None and not active[b]:
            continue
        if history is not None:
            emitted = np.append(tokens[b, accepted[b, 1:n]], bonus[b])
            room = history.shape[1] - 1 - starts[b]
            history[b, starts[b] + 1 : starts[b] + 1 + n] = emitted[:room]
        starts[b] += n
        roots[b] = bonus[b]


#: twin name → function, as the kernel table names them
DDTREE_TWINS = {
    f.__name__: f
    for f in (
        tap_rows,
        gather_rows,
        draft_rows,
        draft_qkv,
        topk_parts,
        topk_final,
        draft_ngram,
        draft_synthetic,
        draft_replay,
        build_tree,
        accept,
        compact_cache,
        advance_round,
    )
}

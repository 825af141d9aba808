"""NumPy twins of the kernels, by the kernels' names: what each must leave in its output arrays, bit for bit.

A twin takes the kernel's named arguments and writes its outputs in place, so that whole buffers can be compared: what a
kernel does not own must stay as it was. Shapes and dtypes stand in the kernel table.
"""

import numpy as np

from kdtr_cli.reference import arith, exact
from kdtr_cli.reference.arith import sum128
from kdtr_cli.reference.attention import CHUNK, rotate
from kdtr_cli.reference.sampling import gumbel
from kdtr_cli.reference.transformer import route
from kdtr_cli.reference.twins_ddtree import DDTREE_TWINS
from kdtr_cli.reference.twins_mma import MMA_TWINS
from kdtr_cli.reference.twins_products import PRODUCT_TWINS

__all__ = ["TWINS"]

f32 = np.float32
SEGMENT = 32  # positions of one maximum (attention.cuh)


def rmsnorm(x, weight, y, n, eps, **_):
    y[:, :n] = arith.rms_norm(x[:, :n], weight, eps)


def rope_query(q, positions, cos, sin, query, heads, nope, half, latent, interleaved, **_):
    rows = len(positions)
    tail = q[:, : heads * (nope + 2 * half)].reshape(rows, heads, nope + 2 * half)[..., nope:]
    query[..., latent:] = rotate(tail, cos[positions][:, None], sin[positions][:, None], bool(interleaved))


def kv_append(kv, weight, positions, slots, places, cos, sin, cache, latent, half, interleaved, eps, **_):
    normed = arith.rms_norm(kv[:, :latent], weight, eps)
    rotated = rotate(kv[:, latent : latent + 2 * half], cos[positions], sin[positions], bool(interleaved))
    cache[slots, places] = np.concatenate([normed, rotated], -1)


def _key_rows(row, position, tree_starts, paths):
    """Cache rows of the keys at positions 0..position that a row sees (rules 11 and 19)."""
    at = np.arange(position + 1)
    if tree_starts is not None:
        start = tree_starts[row]
        at[start:] = paths[row, : position + 1 - start]
    return at


def _kv_heads(heads, kv_heads, n, key_head):
    """(query heads, columns) of each kv head."""
    group = heads // kv_heads
    for g in range(kv_heads):
        yield slice(g * group, (g + 1) * group), slice(g * key_head, g * key_head + n)


def attn_scores(
    query, cache, positions, slots, tree_starts, paths, scores, peaks, heads, kv_heads, width, key_head, scale, **_
):
    for row, position in enumerate(positions):
        keys = cache[slots[row], _key_rows(row, position, tree_starts, paths)]
        for group, columns in _kv_heads(heads, kv_heads, width, key_head):
            scores[row, group, : position + 1] = arith.linear(query[row, group], keys[:, columns]) * f32(scale)
        for i in range(position // SEGMENT + 1):
            peaks[row, :, i] = arith.maximum(scores[row, :, i * SEGMENT : min((i + 1) * SEGMENT, position + 1)])


def attn_chunks(
    scores, peaks, cache, positions, slots, tree_starts, paths, sums, vectors, heads, kv_heads, n, key_head, **_
):
    for row, position in enumerate(positions):
        peak = arith.maximum(peaks[row, :, : position // SEGMENT + 1])
        values = cache[slots[row], _key_rows(row, position, tree_starts, paths)]
        for c in range(position // CHUNK + 1):
            seen = slice(c * CHUNK, min((c + 1) * CHUNK, position + 1))
            p = arith.exp(scores[row, :, seen] - peak[:, None])
            sums[row, :, c] = sum128(p)
            for group, columns in _kv_heads(heads, kv_heads, n, key_head):
                vector = np.zeros((heads // kv_heads, n), f32)
                for i, value in enumerate(values[seen, columns]):
                    vector = vector + p[group, i, None] * value
                vectors[row, group, c] = vector


def attn_combine(sums, vectors, positions, o, heads, **_):
    for row, position in enumerate(positions):
        total, vector = np.zeros(heads, f32), np.zeros(o.shape[1:], f32)
        for c in range(position // CHUNK + 1):
            total = total + sums[row, :, c]
            vector = vector + vectors[row, :, c]
        o[row] = vector / total[:, None]


def swiglu(gate_up, h, n, **_):
    h[:] = arith.swiglu(gate_up[:, :n], gate_up[:, n:])


def router(logits, bias, ids, weights, slots, groups, kept_groups, softmax, best_two, normalise, factor, **_):
    ids[:], weights[:] = route(
        exact,
        logits,
        bias,
        slots=slots,
        groups=groups,
        kept_groups=kept_groups,
        softmax=bool(softmax),
        best_two=bool(best_two),
        normalise=bool(normalise),
        factor=factor,
    )


def group_experts(ids, items, tiles, tile_count, experts, tile, **_):
    items[:] = np.argsort(ids, kind="stable")
    made, first = [], 0
    for expert, count in enumerate(np.bincount(ids, minlength=experts)):
        made += [(expert, first + i, min(tile, count - i)) for i in range(0, count, tile)]
        first += count
    tiles[: len(made)] = made
    tile_count[0] = len(made)


def combine(expert, weights, shared, residual, y, slots, **_):
    total = np.zeros_like(residual)
    for j in range(slots):
        total = total + weights[:, j, None] * expert[:, j]
    if shared is not None:
        total = total + shared
    y[:] = residual + total


def sample_parts(logits, positions, streams, values, indices, bad, vocab, temperature, seed_low, seed_high, **_):
    noisy = logits.copy()
    if temperature > 0:
        seed = int(seed_high) << 32 | int(seed_low)
        for row, position in enumerate(positions):
            noisy[row] = logits[row] / f32(temperature) + gumbel(vocab, int(position) + 1, int(streams[row]), seed)
    for part in range(values.shape[1]):
        span = noisy[:, part * 2048 : (part + 1) * 2048]
        best = arith.argmax(span)
        indices[:, part] = best + part * 2048
        values[:, part] = np.take_along_axis(span, best[:, None], -1)[:, 0]
    bad |= (~np.isfinite(logits)).any(-1)


def sample_final(values, indices, chosen, tokens, positions, active, **_):
    best = arith.argmax(values)
    chosen[:] = np.take_along_axis(indices, best[:, None], -1)[:, 0]
    if tokens is not None:
        on = active != 0
        tokens[on] = chosen[on]
        positions[on] += 1


def nonfinite(x, first, n, **_):
    wrong = np.flatnonzero(~np.isfinite(x))
    if len(wrong):
        first[0] = min(int(first[0]), int(wrong[0]))


#: twin name → function, as the kernel table names them
TWINS = {
    f.__name__: f
    for f in (
        rmsnorm,
        rope_query,
        kv_append,
        attn_scores,
        attn_chunks,
        attn_combine,
        swiglu,
        router,
        group_experts,
        combine,
        sample_parts,
        sample_final,
        nonfinite,
    )
} | {**PRODUCT_TWINS, **DDTREE_TWINS, **MMA_TWINS}

"""Twins of the kernels of tier bf16: float64 of the bf16 values, rounded where the kernels round.

The kernels add in an order of their own, so they need not have these bits; the table says how close they must come.
"""

import ml_dtypes
import numpy as np

__all__ = ["MMA_TWINS"]

BF16 = np.dtype(ml_dtypes.bfloat16)
RANGE = 256  # positions of one range (attention16.cu)


def mma_matmul(x, w, bias, residual, y32, y16, rows, n, k, x_row, y_row, x_head, y_head, heads, **_):
    wide = _values(w)
    for h in range(heads):
        sums = _strided(x, h * x_head, rows, x_row, k) @ wide[h][:n, :k].T
        for r in range(rows):
            at = slice(h * y_head + r * y_row, h * y_head + r * y_row + n)
            total = sums[r] if bias is None else sums[r] + bias
            if residual is not None:
                total = residual.reshape(-1)[at] + total
            if y32 is not None:
                y32.reshape(-1)[at] = total
            if y16 is not None:
                y16.reshape(-1)[at] = _bits(total)


def mma_gate_up(x, w, h, rows, n, k, x_row, **_):
    wide = np.stack([_values(w[:, part][None])[0] for part in (0, 1)])
    h[:] = _swiglu(_strided(x, 0, rows, x_row, k), wide[:, :n, :k])


def mma_expert_gate_up(x, w, items, tiles, tile_count, h, n, k, items_a_row, **_):
    for expert, rows in _listed(items, tiles, tile_count):
        wide = np.stack([_values(w[expert, part::2][None])[0] for part in (0, 1)])
        h[rows] = _swiglu(_float64(x[rows // items_a_row]), wide[:, :n, :k])


def mma_expert_down(x, w, items, tiles, tile_count, y, n, k, items_a_row, **_):
    for expert, rows in _listed(items, tiles, tile_count):
        y[rows] = _float64(x[rows // items_a_row]) @ _values(w[expert][None])[0][:n, :k].T


def norm16(x, weight, y16, y32, n, eps, **_):
    y = _normed(x[:, :n], weight, eps)
    y16[:] = _bits(y)
    if y32 is not None:
        y32[:] = y


def round16(x, y, **_):
    y[:] = _bits(x)


def kv_append16(kv, weight, positions, slots, places, cos, sin, cache, latent, half, interleaved, eps, **_):
    rotated = _rotated(
        kv[:, latent : latent + 2 * half].astype(np.float64), cos[positions], sin[positions], interleaved
    )
    cache[slots, places] = _bits(np.concatenate([_normed(kv[:, :latent], weight, eps), rotated], -1))


def rope_query16(q, positions, cos, sin, query, heads, nope, half, latent, interleaved, **_):
    rows = len(positions)
    tail = q[:, : heads * (nope + 2 * half)].reshape(rows, heads, -1)[..., nope:]
    query[..., latent:] = _bits(_rotated(_float64(tail), cos[positions][:, None], sin[positions][:, None], interleaved))


def attn16(query, cache, positions, slots, tree_starts, paths, states, vectors, n, scale, **_):
    for row, position in enumerate(positions):
        keys = _float64(cache[slots[row], _seen(row, position, tree_starts, paths)])
        scores = _float64(query[row]) @ keys.T * np.float64(np.float32(scale))
        for i in range(position // RANGE + 1):
            part = slice(i * RANGE, (i + 1) * RANGE)
            top = scores[:, part].max(-1)
            p = _float64(_bits(np.exp(scores[:, part] - top[:, None])))
            states[row, :, i] = np.stack([top, p.sum(-1)], -1)
            vectors[row, :, i] = p @ keys[part, :n]


def attn16_combine(states, vectors, positions, o, **_):
    for row, position in enumerate(positions):
        used = slice(position // RANGE + 1)
        tops, sums = np.moveaxis(states[row, :, used].astype(np.float64), -1, 0)
        w = np.exp(tops - tops.max(-1, keepdims=True))
        total = np.einsum("hr,hrn->hn", w, vectors[row, :, used].astype(np.float64))
        o[row] = _bits(total / (w * sums).sum(-1)[:, None])


def _range_size(length):
    return 64 if length <= 2048 else 128 if length <= 16384 else 256 if length <= 65536 else 1024


def mla_decode(query, cache, positions, slots, tree_starts, paths, states, vectors, scale, **_):
    for row, position in enumerate(positions):
        at, size = _seen(row, position, tree_starts, paths), _range_size(position + 1)
        keys = _float64(cache[slots[row], at])
        scores = _float64(query[row]) @ keys.T * np.float64(np.float32(scale))
        for i in range(position // size + 1):
            part = slice(i * size, (i + 1) * size)
            top = scores[:, part].max(-1)
            p = np.exp2(scores[:, part] - top[:, None])
            states[row, :, i] = np.stack([top, p.sum(-1)], -1)
            vectors[row, :, i] = p @ keys[part, :512]


def mla_combine(states, vectors, positions, o, **_):
    for row, position in enumerate(positions):
        used = slice(position // _range_size(position + 1) + 1)
        tops, sums = np.moveaxis(states[row, :, used].astype(np.float64), -1, 0)
        w = np.exp2(tops - tops.max(-1, keepdims=True))
        total = np.einsum("hr,hrn->hn", w, vectors[row, :, used].astype(np.float64))
        o[row] = _bits(total / (w * sums).sum(-1)[:, None])


def _seen(row, position, tree_starts, paths):
    """Cache rows of the keys at positions 0..position that a row sees."""
    at = np.arange(position + 1)
    if tree_starts is not None:
        at[tree_starts[row] :] = paths[row, : position + 1 - tree_starts[row]]
    return at


def _float64(bits):
    return bits.view(BF16).astype(np.float64)


def _bits(values):
    return np.asarray(values).astype(np.float32).astype(BF16).view(np.uint16)


def _strided(x, first, rows, stride, k):
    return np.stack([_float64(x.reshape(-1)[first + r * stride :][:k]) for r in range(rows)])


def _values(w):
    """Fragments [of, tiles, units, 1024] -> float64 [of, 16 tiles, 64 units], by element as mma_matmul.cuh has it."""
    of, tiles, units, _ = w.shape
    at = np.arange(1024)
    quarter, lane, element = at // 256, at // 8 % 32, at % 8
    output, k = 8 * (quarter % 2) + lane // 4, 32 * (quarter // 2) + 8 * (lane % 4) + element
    wide = np.empty((of, tiles, 16, units, 64))
    wide[:, :, output, :, k] = np.moveaxis(_float64(w), -1, 0)
    return wide.reshape(of, tiles * 16, units * 64)


def _listed(items, tiles, tile_count):
    """(expert, item numbers) of every tile."""
    for expert, first, count in tiles[: tile_count[0]]:
        yield expert, items[first : first + count]


def _swiglu(x, gate_and_up):
    gate, up = (x @ w.T for w in gate_and_up)
    return _bits(gate / (1 + np.exp(-gate)) * up)


def _normed(x, weight, eps):
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def _rotated(x, cos, sin, interleaved):
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


#: twin name → function, as the kernel table names them
MMA_TWINS = {
    f.__name__: f
    for f in (
        mma_matmul,
        mma_gate_up,
        mma_expert_gate_up,
        mma_expert_down,
        norm16,
        round16,
        kv_append16,
        rope_query16,
        attn16,
        attn16_combine,
        mla_decode,
        mla_combine,
    )
}

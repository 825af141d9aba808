"""MLA attention in the absorbed form, tier `exact` (rules 10 and 11)."""

import numpy as np

from kdtr_cli.reference.arith import exp, linear, maximum, sum128

__all__ = ["CHUNK", "attend", "rotate"]

CHUNK = 256  #: positions of one chunk, counted from position 0
_ROWS_BYTES = 1 << 23  # bounds the vectors of one tile of rows

f32 = np.float32


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotary embedding of x [..., 2 half] by cos and sin [..., half]: (a, b) -> (a c - b s, b c + a s) (rule 9).

    Pair i is (2i, 2i + 1) if interleaved, else (i, i + half); the result is always de-interleaved: (i, i + half).
    """
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attend(query: np.ndarray, keys: np.ndarray, visible: np.ndarray, scale: float, latent: int) -> np.ndarray:
    """Absorbed attention of query [M, H, D] over keys [S, D] in order of position, D = latent + rope -> [M, H, latent].

    Row m sees keys 0..visible[m]-1. A key that a row does not see gets the weight +0, and adding +0 * latent to a sum
    that started from +0 changes no bit: so rows of different lengths may share one pass.
    """
    m, heads, width = query.shape
    size = keys.shape[0]
    chunks = -(-size // CHUNK)
    out = np.empty((m, heads, latent), f32)
    padded = np.zeros((chunks * CHUNK, width), f32)
    padded[:size] = keys
    by_chunk = padded.reshape(chunks, CHUNK, width)
    tile = max(1, _ROWS_BYTES // (heads * (chunks * (latent + CHUNK) * 4)))
    for first in range(0, m, tile):
        rows = slice(first, min(first + tile, m))
        out[rows] = _attend(query[rows], keys, by_chunk, visible[rows], f32(scale), latent)
    return out


def _attend(
    query: np.ndarray, keys: np.ndarray, by_chunk: np.ndarray, visible: np.ndarray, scale: np.float32, latent: int
) -> np.ndarray:
    m, heads, width = query.shape
    size, chunks = keys.shape[0], by_chunk.shape[0]
    scores = linear(query.reshape(m * heads, width), keys).reshape(m, heads, size) * scale
    seen = (np.arange(size) < visible[:, None])[:, None]
    peak = maximum(np.where(seen, scores, f32(-np.inf)))
    p = np.zeros((m, heads, chunks * CHUNK), f32)
    p[..., :size] = np.where(seen, exp(scores - peak[..., None]), f32(0))
    p = p.reshape(m, heads, chunks, CHUNK)
    sums = sum128(p)
    vectors = np.zeros((m, heads, chunks, latent), f32)
    product = np.empty_like(vectors)
    for i in range(min(CHUNK, size)):
        np.multiply(p[..., i, None], by_chunk[:, i, :latent], out=product)
        np.add(vectors, product, out=vectors)
    total, vector = np.zeros((m, heads), f32), np.zeros((m, heads, latent), f32)
    for c in range(chunks):
        total = total + sums[..., c]
        vector = vector + vectors[..., c, :]
    return vector / total[..., None]

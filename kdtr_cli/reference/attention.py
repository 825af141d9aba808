"""Attention, tier `exact` (rules 10 and 11): MLA in the absorbed form, and the part that any attention shares.

A query sees keys by position, wherever they lie. Rows of a draft tree share the keys of the committed positions and
differ in the few after them: the shared part is one product for all rows, the rest is gathered row by row. Both are
the same dots and the same sums in the same order as for a row alone, so no bit depends on which way a key came.
"""

from dataclasses import dataclass

import numpy as np

from kdtr_cli.reference.arith import exp, linear, maximum, sum128

__all__ = ["CHUNK", "Branches", "attend", "rotate", "weigh"]

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


@dataclass(frozen=True)
class Branches:
    """Where rows of a draft tree find their keys: position p < start in row p, position start + d in row rows[m, d].

    rows int [M, D] holds a written row everywhere, also past the last position that a row sees.
    """

    start: int
    rows: np.ndarray


def attend(
    query: np.ndarray,
    keys: np.ndarray,
    visible: np.ndarray,
    scale: float,
    latent: int,
    branches: Branches | None = None,
) -> np.ndarray:
    """Absorbed attention of query [M, H, D] over keys [S, D], D = latent + rope -> [M, H, latent].

    Row m sees positions 0..visible[m]-1. Position p is keys[p], or what ``branches`` says.
    """
    return weigh(query, keys, keys[:, :latent], visible, scale, branches)


def weigh(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    visible: np.ndarray,
    scale: float,
    branches: Branches | None = None,
) -> np.ndarray:
    """Softmax-weighted values [S, W] of query [M, H, D] over keys [S, D] -> [M, H, W]; visible, branches as above.

    A key that a row does not see gets the weight +0, and adding +0 * value to a sum that started from +0 changes no
    bit: so rows of different lengths may share one pass.
    """
    m, heads, _ = query.shape
    width = values.shape[1]
    size = branches.start if branches else keys.shape[0]
    chunks = -(-(size + (branches.rows.shape[1] if branches else 0)) // CHUNK)
    out = np.empty((m, heads, width), f32)
    padded = np.zeros((chunks * CHUNK, width), f32)
    padded[:size] = values[:size]
    by_chunk = padded.reshape(chunks, CHUNK, width)
    tile = max(1, _ROWS_BYTES // (heads * (chunks * (width + CHUNK) * 4)))
    for first in range(0, m, tile):
        rows = slice(first, min(first + tile, m))
        own = None
        if branches:
            at = branches.rows[rows]
            own = keys[at], values[at]
        out[rows] = _weigh(query[rows], keys[:size], by_chunk, own, visible[rows], f32(scale))
    return out


def _weigh(
    query: np.ndarray,
    keys: np.ndarray,
    by_chunk: np.ndarray,
    own: tuple[np.ndarray, np.ndarray] | None,
    visible: np.ndarray,
    scale: np.float32,
) -> np.ndarray:
    """keys [S, D] and by_chunk [chunks, 256, W]: what all rows share; own: keys and values [M, D', .] of each row."""
    m, heads, dim = query.shape
    shared, (chunks, _, width) = keys.shape[0], by_chunk.shape
    scores = np.empty((m, heads, 0), f32)
    if shared:
        scores = linear(query.reshape(m * heads, dim), keys).reshape(m, heads, shared)
    if own is not None:
        scores = np.concatenate([scores, sum128(query[:, :, None] * own[0][:, None])], -1)
    scores = scores * scale
    size = scores.shape[-1]
    seen = (np.arange(size) < visible[:, None])[:, None]
    peak = maximum(np.where(seen, scores, f32(-np.inf)))
    p = np.zeros((m, heads, chunks * CHUNK), f32)
    p[..., :size] = np.where(seen, exp(scores - peak[..., None]), f32(0))
    p = p.reshape(m, heads, chunks, CHUNK)
    sums = sum128(p)
    vectors = np.zeros((m, heads, chunks, width), f32)
    product = np.empty_like(vectors)
    for i in range(min(CHUNK, shared)):
        np.multiply(p[..., i, None], by_chunk[:, i], out=product)
        np.add(vectors, product, out=vectors)
    for position in range(shared, size):  # after the shared ones of its chunk: ascending in every chunk
        chunk, i = divmod(position, CHUNK)
        vectors[:, :, chunk] += p[:, :, chunk, i, None] * own[1][:, None, position - shared]
    total, vector = np.zeros((m, heads), f32), np.zeros((m, heads, width), f32)
    for c in range(chunks):
        total = total + sums[..., c]
        vector = vector + vectors[..., c, :]
    return vector / total[..., None]

"""The arithmetic of tier `exact`, in NumPy: float32, every operation rounded by itself, one order for every sum.

Each function here is the definition that the kernels of ``kernels_cu`` repeat bit for bit (docs/numerics.md gives the
rules by number). Nothing uses ``np.sum``, ``@``, ``np.exp`` or any other routine whose order or polynomial NumPy is
free to choose: only element-wise +, -, x, / and square root, which IEEE 754 fixes.
"""

from dataclasses import dataclass

import numpy as np

__all__ = [
    "BLOCK",
    "CONTRACT_VERSION",
    "LANES",
    "Packed",
    "argmax",
    "exp",
    "linear",
    "log",
    "log64",
    "log_softmax",
    "maximum",
    "order",
    "pack",
    "rms_norm",
    "sigmoid",
    "silu",
    "softmax",
    "sum128",
    "swiglu",
]

CONTRACT_VERSION = 1  #: raised whenever a rule of docs/numerics.md changes bits; every bundle records it
LANES = 128  #: lanes of a sum; element k belongs to lane (k // 4) mod 128 (rule 3)
BLOCK = 8192  #: a longer sum is cut into blocks of this many elements, added in ascending order (rule 3)

_STEP = 4 * LANES  # elements that all lanes take in one iteration
_STEPS_PER_BLOCK = BLOCK // _STEP
_CHUNK = 256  # output rows of a packed chunk: lanes x rows x 4 bytes stays inside a core's L2 cache
_TILE_BYTES = 1 << 18  # accumulators of one tile

f32 = np.float32


# ---------------------------------------------------------------------------------------------------- sums and products


def _fold(lanes: np.ndarray) -> np.ndarray:
    """Fold lanes [..., L, n] to [..., n]: xor tree 16, 8, 4, 2, 1 in each group of 32, then (g0 + g1) + (g2 + g3).

    L is a multiple of 32, at most 128; missing groups are +0. A lane starts from +0, so no lane and no partial sum is
    ever -0 and adding a missing group changes nothing. The xor tree is symmetric: halving gives the bits of lane 0.
    """
    groups = lanes.shape[-2] // 32
    part = lanes.reshape(*lanes.shape[:-2], groups, 32, lanes.shape[-1])
    for width in (16, 8, 4, 2, 1):
        part = part[..., :width, :] + part[..., width : 2 * width, :]
    part = part[..., 0, :]
    if groups == 1:
        return part[..., 0, :]
    low = part[..., 0, :] + part[..., 1, :]
    if groups == 2:
        return low
    return low + (part[..., 2, :] + part[..., 3, :] if groups == 4 else part[..., 2, :])


def _lane_view(x: np.ndarray) -> np.ndarray:
    """x [..., K] as [..., steps, lanes, 4], zero padded; lanes: a multiple of 32 that holds K, at most 128."""
    k = x.shape[-1]
    lanes = min(LANES, -(-k // 128) * 32) if k else 32
    pad = -k % (4 * lanes)
    if pad or not k:
        x = np.concatenate([x, np.zeros((*x.shape[:-1], pad or 4 * lanes), x.dtype)], -1)
    return x.reshape(*x.shape[:-1], -1, lanes, 4)


def sum128(x: np.ndarray) -> np.ndarray:
    """Sum of x [..., K] float32 over its last axis in the order of rule 3; an empty sum is +0."""
    v = _lane_view(np.asarray(x, f32))
    total = np.zeros(v.shape[:-3], f32)
    for first in range(0, v.shape[-3], _STEPS_PER_BLOCK):
        lanes = np.zeros((*v.shape[:-3], v.shape[-2]), f32)
        for step in range(first, min(first + _STEPS_PER_BLOCK, v.shape[-3])):
            for j in range(4):
                lanes = lanes + v[..., step, :, j]
        total = total + _fold(lanes[..., None])[..., 0]
    return total


@dataclass(frozen=True)
class Packed:
    """A matrix [N, K] laid out for :func:`linear`: chunks [steps, 4, lanes, n] of n <= 256 output rows each."""

    shape: tuple[int, int]
    chunks: tuple[np.ndarray, ...]


def pack(w: np.ndarray) -> Packed:
    """Lay out w [N, K] float32 so that every step of the lane order is one contiguous operation."""
    n, k = w.shape
    chunks = []
    for first in range(0, n, _CHUNK):
        v = _lane_view(np.asarray(w[first : first + _CHUNK], f32))  # [n, steps, lanes, 4]
        chunks.append(np.ascontiguousarray(v.transpose(1, 3, 2, 0)))
    return Packed((n, k), tuple(chunks))


def linear(x: np.ndarray, w: Packed | np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x [M, K] times w [N, K] transposed -> [M, N]: each element is sum128 of the rounded products (rule 4).

    A bias [N] is added after the dot. The bits of a row do not depend on the other rows.
    """
    w = w if isinstance(w, Packed) else pack(w)
    n, k = w.shape
    m = x.shape[0]
    if x.shape[1] != k:
        raise ValueError(f"linear: x has {x.shape[1]} columns, the matrix {k}")
    y = np.empty((m, n), f32)
    v = _lane_view(np.asarray(x, f32))  # [M, steps, lanes, 4]
    for c, chunk in enumerate(w.chunks):
        steps, _, lanes, width = chunk.shape
        rows = max(1, _TILE_BYTES // (lanes * width * 4))
        for first in range(0, m, rows):
            tile = v[first : first + rows]
            product = np.empty((tile.shape[0], lanes, width), f32)
            total = np.zeros((tile.shape[0], width), f32)
            for block in range(0, steps, _STEPS_PER_BLOCK):
                lane = np.zeros((tile.shape[0], lanes, width), f32)
                for step in range(block, min(block + _STEPS_PER_BLOCK, steps)):
                    for j in range(4):
                        np.multiply(chunk[step, j], tile[:, step, :, j, None], out=product)
                        np.add(lane, product, out=lane)
                total = total + _fold(lane)
            y[first : first + rows, c * _CHUNK : c * _CHUNK + width] = total
    return y if bias is None else y + bias


# ---------------------------------------------------------------------------------------------------- functions


def exp(x: np.ndarray) -> np.ndarray:
    """e**x, float32 (rule 5): Cephes-style polynomial, arguments clamped to [-87, 88]; NaN in, NaN out."""
    x = np.asarray(x, f32)
    nan = np.isnan(x)
    x = np.where(nan, f32(0), x)
    x = np.where(x < f32(-87), f32(-87), x)
    x = np.where(x > f32(88), f32(88), x)
    n = np.rint(x * f32(1.44269504088896341))
    r = x - n * f32(0.693359375)
    r = r - n * f32(-2.12194440e-4)
    p = np.full_like(x, f32(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + f32(c)
    p = ((p * r) * r + r) + f32(1)
    # 2**n as two factors, so that neither exponent field can overflow
    e = n.astype(np.int32)
    a = e >> 1
    scaled = (p * ((a + 127) << 23).view(f32)) * ((e - a + 127) << 23).view(f32)
    return np.where(nan, f32(np.nan), scaled)


_LN2_HI = 6.93147180369123816490e-01  # ln 2 with its low 32 bits cleared: e * LN2_HI is exact
_LN2_LO = 1.90821492927058770002e-10
_LOG_TERMS = tuple(2.0 / (2 * i + 1) for i in range(11, 0, -1))


def log64(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of x float64 by +, -, x, / only (rule 5); 0 -> -inf, negative -> NaN, inf -> inf, NaN -> NaN.

    x = 2**e * m with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh(s), s = (m - 1) / (m + 1), |s| <= 0.1716, so that the
    first term left out of the series is below 2**-56 of the result. Subnormal arguments are scaled by 2**54 first.
    """
    x = np.asarray(x, np.float64)
    special = ~((x > 0) & (x < np.inf))
    v = np.where(special, 1.0, x)
    tiny = v < 2.2250738585072014e-308
    v = np.where(tiny, v, 1.0) * np.where(tiny, 18014398509481984.0, 1.0) * np.where(tiny, 1.0, v)
    bits = v.view(np.int64)
    e = (bits >> 52) - 1023 - np.where(tiny, 54, 0)
    m = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).view(np.float64)
    high = m > 1.4142135623730951
    m = np.where(high, m * 0.5, m)
    e = (e + high).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = np.full_like(z, _LOG_TERMS[0])
    for c in _LOG_TERMS[1:]:
        p = p * z + c
    y = e * _LN2_HI + (2.0 * s + (s * (p * z) + e * _LN2_LO))
    y = np.where(x == 0, -np.inf, y)
    y = np.where((x < 0) | np.isnan(x), np.nan, y)
    return np.where(x == np.inf, np.inf, y)


def log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of x float32: :func:`log64`, rounded once to float32 (rule 5)."""
    return log64(np.asarray(x, f32).astype(np.float64)).astype(f32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) (rule 5)."""
    return f32(1) / (f32(1) + exp(-np.asarray(x, f32)))


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x) (rule 5)."""
    return x * sigmoid(x)


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SiLU(gate) * up (rule 12)."""
    return silu(gate) * up


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """(x * r) * weight with r = 1 / sqrt(sum128(x * x) / n + eps), over the last axis of x [..., n] (rule 8)."""
    r = f32(1) / np.sqrt(sum128(x * x) / f32(x.shape[-1]) + f32(eps))
    return (x * r[..., None]) * weight


def maximum(x: np.ndarray) -> np.ndarray:
    """Maximum over the last axis; NaN if any element is (rule 2). The maximum of nothing is -inf."""
    if not x.shape[-1]:
        return np.full(x.shape[:-1], -np.inf, f32)
    return np.max(x, -1)


def softmax(x: np.ndarray) -> np.ndarray:
    """exp(x - max) / sum128(exp(x - max)) over the last axis, one division an element (rule 13)."""
    p = exp(x - maximum(x)[..., None])
    return p / sum128(p)[..., None]


def log_softmax(x: np.ndarray) -> np.ndarray:
    """x - (m + float32(log S)), m = max, S = sum128(exp(x - m)), over the last axis (rule 14)."""
    m = maximum(x)
    return x - (m + log(sum128(exp(x - m[..., None]))))[..., None]


# ---------------------------------------------------------------------------------------------------- choices


def order(values: np.ndarray, k: int) -> np.ndarray:
    """Indices int32 [..., k] of the k first elements in the contract's order (rule 6).

    Larger value first, then smaller index; -0 and +0 are equal; NaN stands before every number, so that it is chosen
    and seen rather than hidden.
    """
    nan = np.isnan(values)
    key = np.where(nan, 0, -values)
    index = np.broadcast_to(np.arange(values.shape[-1]), values.shape)
    return np.lexsort((index, key, ~nan), axis=-1)[..., :k].astype(np.int32)


def argmax(values: np.ndarray) -> np.ndarray:
    """Index int32 [...] of the largest element of values [..., V], the smallest index among equals (rule 6)."""
    # np.argmax takes the first of equal elements, and the first NaN before any number
    return np.argmax(values, -1).astype(np.int32)

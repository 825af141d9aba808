"""Rotary tables: cos and sin per position and rotary pair, with the same bits on every machine (numerics.md rule 9).

Row p, column j belongs to position p and the pair that the checkpoint stores at (2j, 2j + 1) (or, with rope_interleave
false, at (j, j + d/2)); d = qk_rope_head_dim. Both halves are multiplied by YaRN's amplitude. Powers and logarithms are
taken in decimal and rounded once; sine and cosine are ours, made of + − × ÷ only: NumPy's own differ in the last bit
from one SIMD width to another, and a bundle holds the tables' SHA-256.

Formulas: YaRN as in transformers 5.24, modeling_rope_utils._compute_yarn_parameters.
"""

import hashlib
import math
from decimal import Context, Decimal

import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.yarn import yarn_ramp

__all__ = ["MAX_POSITIONS", "inv_freq", "rope_table", "rope_table64", "rope_table_sha256"]

# π/2 in three parts: the first two have 33 significant bits, so that n times each is exact for n < 2^20
_PIO2 = (float.fromhex("0x1.921fb544p+0"), float.fromhex("0x1.0b4611a6p-34"), float.fromhex("0x1.3198a2e037073p-69"))
MAX_POSITIONS = 800_000  #: the angles for which sine and cosine are good; no pair turns faster than 1 a position
_EXACT = Context(prec=40)
_BLOCK = 1 << 16  # angles worked on at a time: the temporaries stay in cache


def _powers(config: ModelConfig, exponents: list[Decimal]) -> list[Decimal]:
    """rope_theta to these powers, to 40 digits."""
    return [_EXACT.power(Decimal(config.rope_theta), exponent) for exponent in exponents]


def inv_freq(config: ModelConfig) -> np.ndarray:
    """Radians per position of each rotary pair, float64 [rope/2]: f = θ^(−2j/d), or YaRN's blend of f and f/factor."""
    dim = Decimal(config.qk_rope_head_dim)
    exponents = [_EXACT.divide(Decimal(2 * j), dim) for j in range(config.qk_rope_head_dim // 2)]
    plain = np.array([float(_EXACT.divide(Decimal(1), power)) for power in _powers(config, exponents)])
    yarn = config.rope_scaling
    if yarn is None:
        return plain
    ramp = _ramp(config, np.float64)
    return plain / yarn.factor * ramp + plain * (1.0 - ramp)


def _ramp(config: ModelConfig, dtype: type) -> np.ndarray:
    low, high = yarn_ramp(config.rope_scaling, config.rope_theta, config.qk_rope_head_dim)
    if low == high:
        high += 0.001  # as transformers
    pairs = np.arange(config.qk_rope_head_dim // 2, dtype=dtype)
    return np.clip((pairs - dtype(low)) / dtype(high - low), dtype(0), dtype(1))


def _inv_freq32(config: ModelConfig) -> np.ndarray:
    """inv_freq in float32 steps, in transformers' order (torch's pow may be an ulp from ours, which is exact)."""
    f32 = np.float32
    exponents = np.arange(0, config.qk_rope_head_dim, 2).astype(f32) / f32(config.qk_rope_head_dim)
    powers = np.array([float(p) for p in _powers(config, [Decimal(float(e)) for e in exponents])]).astype(f32)
    plain = f32(1) / powers
    yarn = config.rope_scaling
    if yarn is None:
        return plain
    stretched = f32(1) / (f32(yarn.factor) * powers)
    keep = f32(1) - _ramp(config, f32)
    return stretched * (f32(1) - keep) + plain * keep


def rope_table(config: ModelConfig, n_positions: int, angles: str = "f64") -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), float32 [n_positions, rope/2], times the amplitude.

    angles 'f64': float64 angles, one rounding at the end (the contract). 'f32': float32 frequencies and angles, float32
    cosines, then the float32 amplitude, as transformers does. InputError for another word, or for more positions than
    the model has.
    """
    if angles not in ("f64", "f32"):
        raise InputError(f"rope angles {angles!r}: allowed are f64 and f32")
    if angles == "f64":
        cos, sin = rope_table64(config, n_positions)
        return cos.astype(np.float32), sin.astype(np.float32)
    _check_positions(config, n_positions)
    turn = np.arange(n_positions, dtype=np.float32)[:, None] * _inv_freq32(config)[None, :]
    cos, sin = _cos_sin(turn.astype(np.float64))
    amplitude = np.float32(_amplitude(config))
    return cos.astype(np.float32) * amplitude, sin.astype(np.float32) * amplitude


def rope_table64(config: ModelConfig, n_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), float64 [n_positions, rope/2], times the amplitude; within 2 ulp of the true values of the angles."""
    _check_positions(config, n_positions)
    cos, sin = _cos_sin(np.arange(n_positions, dtype=np.float64)[:, None] * inv_freq(config)[None, :])
    amplitude = _amplitude(config)
    return cos * amplitude, sin * amplitude


def rope_table_sha256(cos: np.ndarray, sin: np.ndarray) -> str:
    """SHA-256 over shape, then cos, then sin, as little-endian float32."""
    digest = hashlib.sha256(repr(tuple(int(n) for n in cos.shape)).encode())
    for table in (cos, sin):
        digest.update(np.ascontiguousarray(table, dtype="<f4").data)
    return digest.hexdigest()


def _amplitude(config: ModelConfig) -> float:
    return 1.0 if config.rope_scaling is None else config.rope_scaling.amplitude()


def _check_positions(config: ModelConfig, n: int) -> None:
    if not 0 < n <= config.max_position_embeddings:
        raise InputError(
            f"{n} positions: the model has 1 to {config.max_position_embeddings} (max_position_embeddings)"
        )
    if n > MAX_POSITIONS:
        raise InputError(f"{n} positions: kdtr's rotary tables reach {MAX_POSITIONS}")


def _cos_sin(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of float64 angles 0 ≤ x ≤ 8e5, each NumPy operation exactly rounded, hence portable."""
    cos, sin = np.empty_like(x), np.empty_like(x)
    flat, c, s = x.reshape(-1), cos.reshape(-1), sin.reshape(-1)
    for at in range(0, flat.size, _BLOCK):
        part = slice(at, at + _BLOCK)
        c[part], s[part] = _cos_sin_block(flat[part])
    return cos, sin


def _cos_sin_block(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # Cody and Waite: x = n·π/2 + r + t with |r| ≤ π/4 (plus a little) and t the part of r that float64 cannot hold.
    n = np.rint(x * (2.0 / math.pi))
    first = x - n * _PIO2[0]
    second = n * _PIO2[1]
    r = first - second
    t = ((first - r) - second) - n * _PIO2[2]
    total = r + t
    r, t = total, (r - total) + t
    # Taylor series about 0: the first term left out is below 1e-19 for |r| ≤ 0.79.
    z = r * r
    odd = np.full_like(r, 1.0 / math.factorial(17))
    for k in (15, 13, 11, 9, 7, 5, 3):
        odd = 1.0 / math.factorial(k) - z * odd
    even = np.full_like(r, 1.0 / math.factorial(18))
    for k in (16, 14, 12, 10, 8, 6, 4):
        even = 1.0 / math.factorial(k) - z * even
    half = 0.5 * z
    big = 1.0 - half
    sine = r - (r * (z * odd) - t * big)
    cosine = big + (((1.0 - big) - half) + (z * z * even - r * t))
    quarter = n.astype(np.int64) & 3
    swap, minus_s, minus_c = (quarter & 1) == 1, quarter >= 2, (quarter == 1) | (quarter == 2)
    sin, cos = np.where(swap, cosine, sine), np.where(swap, sine, cosine)
    return np.where(minus_c, -cos, cos), np.where(minus_s, -sin, sin)

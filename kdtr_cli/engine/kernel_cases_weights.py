"""Weights for kernel cases in every form: random ones, and every value that a stored weight may have."""

from typing import Any

import ml_dtypes
import numpy as np

from kdtr_cli.engine.kernel_case import normal

__all__ = ["EVERY_VALUE", "every_16_bits", "stored_weights"]

f32, u8, u16, u32 = np.float32, np.uint8, np.uint16, np.uint32
_NAN = 0x7F  # of e4m3, with either sign

# sizes that cycle through a kernel's cases: published, a power of two, and what can't be read by quads
_GROUPS = (32, 8, 4, 128, 12, 5, 64, 1, 2)
_BLOCKS = ((128, 128), (4, 8), (1, 4), (3, 32), (2, 12), (5, 3), (1, 1), (128, 16), (7, 2))


def stored_weights(rng: np.random.Generator, form: str, of: tuple[int, ...], n: int, k: int, turn: int = 0) -> dict:
    """Random weights [*of, n, k] as a kernel of this form takes them: its arguments by name.

    ``turn`` chooses the size of groups and blocks and the dtype of scales. What lies behind the last weight of a packed
    row is random too.
    """
    if form == "f32":
        return {"w": normal(rng, *of, n, k)}
    if form in ("bf16", "f16"):
        return {"w": bits_of(normal(rng, *of, n, k), form)}
    if form == "int4":
        group = _GROUPS[turn % len(_GROUPS)]
        w = rng.integers(0, 1 << 16, (*of, n, -(-k // 8) * 2)).astype(u16)
        return {"w": w, **_int4_scales(_scales(rng, *of, n, -(-k // group)), turn % 3 < 2), "group": group}
    rows, columns = _BLOCKS[turn % len(_BLOCKS)]
    w = rng.integers(0, 256, (*of, n, k)).astype(u8)
    w[w & _NAN == _NAN] = 0
    scale = _scales(rng, *of, -(-n // rows), -(-k // columns))
    return {"w": w, "scale": scale, "block_rows": rows, "block_columns": columns}


def bits_of(values: np.ndarray, form: str) -> np.ndarray:
    """float32 → the bits of bf16 or f16 values, uint16."""
    return values.astype(ml_dtypes.bfloat16 if form == "bf16" else np.float16).view(u16)


def _scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Positive float32 of very different size, each with its own digits."""
    return (rng.uniform(0.5, 1, shape) * 2.0 ** rng.integers(-12, 4, shape)).astype(f32)


def _int4_scales(scale: np.ndarray, narrow: bool) -> dict[str, Any]:
    return {"scale16": bits_of(scale, "bf16") if narrow else None, "scale32": None if narrow else scale}


def _every_int4(scales: list[float], narrow: bool) -> tuple[dict[str, Any], int, int]:
    """Every nibble at every place of a quad, times each of these scales: its group of eight."""
    nibbles = (np.arange(64)[:, None] + np.arange(8)) % 16
    words = sum(nibbles[:, i::4].astype(u16) << 4 * i for i in range(4))  # [64, 2]
    w = np.tile(words, (1, len(scales)))
    scale = np.tile(np.array(scales, f32), (64, 1))
    return {"w": w.astype(u16), **_int4_scales(scale, narrow), "group": 8}, 64, 8 * len(scales)


def _every_fp8(scales: list[float]) -> tuple[dict[str, Any], int, int]:
    """Every finite code at every place of a quad, times each of these scales."""
    w = ((np.arange(256)[:, None] + np.arange(4)) % 256).astype(u8)
    w[w & _NAN == _NAN] = 0x80
    scale = np.tile(np.array(scales, f32), (256 // 32, 1))
    values = {"w": np.tile(w, (1, len(scales))), "scale": scale, "block_rows": 32, "block_columns": 4}
    return values, 256, 4 * len(scales)


def every_16_bits(form: str, step: int = 1) -> np.ndarray:
    """The bits of every finite value of 16 bits, -0 and subnormals among them; or of one in ``step`` values."""
    at = np.arange((1 << 16) // step, dtype=u32)
    bits = (at * step + at % step).astype(u16)
    exponent = 0x7F80 if form == "bf16" else 0x7C00
    bits[bits & exponent == exponent] = 0x8000
    return bits


def _many_16_bits(form: str) -> tuple[dict[str, Any], int, int]:
    bits = every_16_bits(form, 8)
    return {"w": bits.reshape(-1, 64)}, len(bits) // 64, 64


_SUBNORMAL, _SMALLEST, _HUGE = 1e-40, 2.0**-149, 2.0**124
_SCALES = [1.0, 0.7109375, _SUBNORMAL, 2.0**-133, _HUGE, 3.0e-39]

#: form → what it is, and its weights with n and k: products with one-hot rows of x show each value by itself
EVERY_VALUE = {
    "bf16": [("bf16 of every size", lambda: _many_16_bits("bf16"))],
    "f16": [("f16 of every size", lambda: _many_16_bits("f16"))],
    "int4": [
        ("every nibble, bf16 scales", lambda: _every_int4(_SCALES, True)),
        ("every nibble, float32 scales", lambda: _every_int4([*_SCALES, _SMALLEST, 0.1, 4.2e37], False)),
    ],
    "fp8": [("every e4m3", lambda: _every_fp8([*_SCALES[:-2], _SMALLEST, 0.1, 7.5e35]))],
}

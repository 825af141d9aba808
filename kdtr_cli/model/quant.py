"""Quantised weights to float32 and back: packed 4-bit integers by group, e4m3 by block (numerics.md rule 7).

Packing: eight integers in an int32 along the inputs, element i in bits 4·(i mod 8), stored as q + 8
(compressed-tensors, pack_quantized/helpers.py). Nothing here knows a file; names come from the caller for messages.
"""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.model.quantisation import Quantisation

__all__ = [
    "dequantise",
    "dequantise_fp8",
    "dequantise_int4",
    "pack_int4",
    "part_names",
    "quantise_fp8",
    "quantise_int4",
    "unpack_int4",
]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
_E4M3_MAX = np.float32(448.0)
_ZERO_GROUP = np.float32(2.0**-23)  # compressed-tensors' scale of a group of zeros: float32's eps


def part_names(method: str, name: str) -> tuple[str, ...]:
    """The stored tensors of one quantised weight, the values first: ('X.weight_packed', …) for 'X.weight'."""
    if method == "int4":
        return f"{name}_packed", f"{name}_scale", f"{name}_shape"
    return name, f"{name}_scale_inv"


def pack_int4(q: np.ndarray) -> np.ndarray:
    """int8 [out, in] with values −8 … 7 → int32 [out, ⌈in/8⌉]; the bits after the last element are 0."""
    rows, columns = q.shape
    nibbles = np.zeros((rows, -(-columns // 8) * 8), np.uint8)
    nibbles[:, :columns] = q + 8
    return np.ascontiguousarray(nibbles[:, ::2] | (nibbles[:, 1::2] << 4)).view("<i4")


def unpack_int4(packed: np.ndarray, columns: int) -> np.ndarray:
    """int32 [out, ⌈in/8⌉] → int8 [out, in] with values −8 … 7; the bits after the last element are not looked at."""
    data = np.ascontiguousarray(packed, "<i4").view(np.uint8)
    q = np.empty((*data.shape, 2), np.int8)
    np.subtract(data & 15, 8, out=q[..., 0], dtype=np.int8, casting="unsafe")
    np.subtract(data >> 4, 8, out=q[..., 1], dtype=np.int8, casting="unsafe")
    return q.reshape(len(data), -1)[:, :columns]


def dequantise_int4(packed: np.ndarray, scale: np.ndarray, columns: int, group: int) -> np.ndarray:
    """float32 [out, in] = float32(q) · float32(scale of its group of inputs), scale [out, ⌈in/group⌉].

    Exact for bfloat16 and float16 scales (4 bits by at most 11), else rounded once.
    """
    return _by_group(unpack_int4(packed, columns).astype(np.float32), scale.astype(np.float32), group, np.multiply)


def quantise_int4(w: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 [out, in] → (int32 packed [out, ⌈in/8⌉], bfloat16 scale [out, ⌈in/group⌉]).

    As compressed-tensors' symmetric minmax observer: scale = max|w| / 7.5 in float32, rounded to bfloat16 (2⁻²³ where
    it is 0); q = w / scale in float32, rounded to even, clamped to −8 … 7.
    """
    highest = np.maximum.reduceat(np.abs(w), np.arange(0, w.shape[1], group), axis=1)
    scale = (highest / np.float32(7.5)).astype(BF16)
    wide = scale.astype(np.float32)
    wide[wide == 0] = _ZERO_GROUP
    with np.errstate(over="ignore"):  # a subnormal bfloat16 scale; clamped below
        q = _by_group(w.copy(), wide, group, np.divide)
    return pack_int4(np.clip(np.rint(q), -8, 7).astype(np.int8)), wide.astype(BF16)


def _by_group(values: np.ndarray, scale: np.ndarray, group: int, operate: np.ufunc) -> np.ndarray:
    """values [out, in] (changed in place) multiplied or divided by the scale of each group of columns."""
    whole = values.shape[1] // group
    with np.errstate(over="ignore"):
        for first, count, width in ((0, whole, group), (whole, 1, values.shape[1] - whole * group)):
            if count and width:
                part = values[:, first * group : first * group + count * width].reshape(len(values), count, width)
                operate(part, scale[:, first : first + count, None], out=part)
                values[:, first * group : first * group + count * width] = part.reshape(len(values), count * width)
    return values


def dequantise_fp8(w8: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """float32 [out, in] = float32(e4m3) · float32(scale of its block), rounded once.

    scale [⌈out/rows⌉, ⌈in/columns⌉] for a block of rows and columns; those at the edge may be cut.
    """
    return _by_block(w8.astype(np.float32), scale.astype(np.float32), block, np.multiply)


def quantise_fp8(w: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """float32 [out, in] → (float8_e4m3fn [out, in], float32 scale [⌈out/rows⌉, ⌈in/columns⌉]).

    scale = max|w| of the block / 448 (1 for a block of zeros), w8 = w / scale; each rounded once, to even.
    """
    rows, columns = block
    highest = np.maximum.reduceat(np.abs(w), np.arange(0, w.shape[0], rows), axis=0)
    highest = np.maximum.reduceat(highest, np.arange(0, w.shape[1], columns), axis=1)
    scale = highest / _E4M3_MAX
    scale[scale == 0] = 1.0
    return np.clip(_by_block(w.copy(), scale, block, np.divide), -_E4M3_MAX, _E4M3_MAX).astype(E4M3), scale


def _by_block(values: np.ndarray, scale: np.ndarray, block: tuple[int, int], operate: np.ufunc) -> np.ndarray:
    """values [out, in] (changed in place) multiplied or divided by the scale of each block."""
    columns = values.shape[1]
    wide = np.repeat(scale, [min(block[1], columns - at) for at in range(0, columns, block[1])], axis=1)
    with np.errstate(over="ignore"):
        for index, row in enumerate(wide):
            part = values[index * block[0] : (index + 1) * block[0]]
            operate(part, row, out=part)
    return values


def dequantise(
    how: Quantisation, name: str, shape: tuple[int, ...], parts: Mapping[str, np.ndarray], first: int = 0
) -> np.ndarray:
    """The float32 values of the weight ``name`` of ``shape`` [out, in] from its stored parts (see part_names).

    The parts are those of all rows or of some from row ``first`` on (of fp8 the scales of all blocks that these touch).
    InputError names the tensor: a scale that is not finite and above 0, a weight_shape that is not ``shape``.
    """
    names = part_names(how.method, name)
    per_scale = how.block[0] if how.method == "fp8" else 1
    _check_scale(names[1], parts[names[1]], first // per_scale)
    if how.method == "fp8":
        inside = first % how.block[0]
        w8 = parts[names[0]]
        if inside:  # the first block has lost rows: they come back as zeros, and go again
            w8 = np.concatenate([np.zeros((inside, w8.shape[1]), w8.dtype), w8])
        return dequantise_fp8(w8, parts[names[1]], how.block)[inside:]
    if tuple(parts[names[2]].tolist()) != shape:
        raise InputError(f"tensor {names[2]} holds {parts[names[2]].tolist()}; the config needs {list(shape)}")
    return dequantise_int4(parts[names[0]], parts[names[1]], shape[1], how.group_size)


def _check_scale(name: str, scale: np.ndarray, first_row: int) -> None:
    wide = scale.astype(np.float32)
    good = np.isfinite(wide) & (wide > 0)
    if not good.all():
        first = int(np.argmin(good))
        at_row, *rest = np.unravel_index(first, wide.shape)
        where = ", ".join(str(int(i)) for i in (at_row + first_row, *rest))
        raise InputError(
            f"tensor {name}[{where}] is {wide.reshape(-1)[first]}: a scale must be finite and above 0; the checkpoint "
            "is broken"
        )

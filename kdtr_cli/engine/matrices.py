"""Matrices on a device in the form in which the checkpoint stores them; the kernels widen and scale them in registers.

Packed 4-bit weights, e4m3 bytes and 16-bit floats are copied as they are, one stored tensor in host memory at a time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from kdtr_cli.engine.devices import Device, DeviceArray
from kdtr_cli.engine.kernels import DTYPES, PLAIN
from kdtr_cli.errors import DeviceError
from kdtr_cli.model.checkpoint import to_float32
from kdtr_cli.model.weights import Weights

__all__ = ["Matrix", "upload_matrix"]

_BF16 = np.dtype(ml_dtypes.bfloat16)
_PLAIN_FORMS = {"F32": "f32", "BF16": "bf16", "F16": "f16"}
_LARGEST = 1 << 30  # of a group or block: one that holds all inputs, and a power of two


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix [n, k], or several [count, n, k], on a device.

    form: of kernels.FORMS. arguments: what the kernels of this form call the weights, by name: arrays, None for one
    that is not used, and numbers.
    """

    form: str
    shape: tuple[int, ...]
    arguments: Mapping[str, DeviceArray | int | None]

    @classmethod
    def plain(cls, form: str, array: DeviceArray) -> "Matrix":
        """A matrix that is one array of values of this form."""
        return cls(form, array.shape, {"w": array})

    @property
    def w(self) -> DeviceArray:
        """The array of values, without scales."""
        return self.arguments["w"]

    @property
    def nbytes(self) -> int:
        """Bytes on the device, scales included."""
        return sum(a.nbytes for a in self.arguments.values() if isinstance(a, DeviceArray))

    def rows(self, first: int, count: int) -> "Matrix":
        """Rows first .. first + count - 1 of a matrix [n, k] that is not packed, in the same memory."""
        if self.form not in PLAIN:
            raise DeviceError(f"{self.w.name} is packed: its rows can't be taken apart")
        k = self.shape[1]
        return Matrix.plain(self.form, self.w.view(first * k, (count, k)))


def upload_matrix(
    device: Device,
    name: str,
    shape: tuple[int, ...],
    weights: Weights,
    tensors: tuple[str, ...],
    cut: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Matrix:
    """Upload weights of a model, stacked in order, as one matrix [n, k] or several [count, n, k].

    The form is that of the stored tensors; float32 where they are not all stored alike. ``cut`` makes of a tensor what
    is to be uploaded; a packed one is dequantised for it. InputError for a tensor that is not finite.
    """
    forms = {_form_of(weights, tensor) for tensor in tensors}
    form = forms.pop() if len(forms) == 1 else "f32"
    if form in PLAIN or cut is not None:
        return _upload_plain(device, name, shape, weights, tensors, form if form in PLAIN else "f32", cut)
    if form == "int4":
        return _upload_int4(device, name, shape, weights, tensors)
    return _upload_fp8(device, name, shape, weights, tensors)


def _form_of(weights: Weights, tensor: str) -> str:
    parts = weights.parts(tensor)
    return _PLAIN_FORMS[weights.stored_dtype(parts[0])] if len(parts) == 1 else weights.config.quantisation.method


class _Filling:
    """A new device array that is written piece by piece."""

    def __init__(self, device: Device, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.device, self.array, self.filled = device, device.alloc(name, shape, dtype), 0

    def add(self, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values).reshape(-1).view(self.array.dtype)
        self.device.write(self.array.view(self.filled, values.shape), values)
        self.filled += values.size

    def full(self) -> DeviceArray:
        if self.filled != self.array.size:
            raise ValueError(f"{self.array.name}: {self.filled} elements for {self.array.size}")
        return self.array


def _upload_plain(device, name, shape, weights, tensors, form, cut) -> Matrix:
    filling = _Filling(device, name, shape, DTYPES[form])
    for tensor in tensors:
        values = weights[tensor] if form == "f32" else weights.checked(tensor)[weights.parts(tensor)[0]]
        filling.add(values if cut is None else cut(values))
    return Matrix.plain(form, filling.full())


def _upload_int4(device, name, shape, weights, tensors) -> Matrix:
    *rows, k = shape
    group = min(weights.config.quantisation.group_size, _LARGEST)
    narrow = all(weights.stored_dtype(weights.parts(tensor)[1]) == "BF16" for tensor in tensors)
    w = _Filling(device, name, (*rows, 2 * -(-k // 8)), np.dtype(np.uint16))
    scale = _Filling(device, f"{name}.scale", (*rows, -(-k // group)), DTYPES["bf16" if narrow else "f32"])
    for tensor in tensors:
        packed, scales, _ = weights.checked(tensor).values()
        w.add(packed)
        scale.add(scales if narrow else to_float32(scales))
    scales = {"scale16": scale.full() if narrow else None, "scale32": None if narrow else scale.full()}
    return Matrix("int4", shape, {"w": w.full(), **scales, "group": group})


def _upload_fp8(device, name, shape, weights, tensors) -> Matrix:
    *of, n, k = shape
    rows, columns = (min(size, _LARGEST) for size in weights.config.quantisation.block)
    # blocks begin anew with each tensor: where one ends within a block, every row gets scales of its own
    each = len(tensors) // (of[0] if of else 1)
    whole = all(weights.shapes[tensor][0] % rows == 0 for i, tensor in enumerate(tensors) if (i + 1) % each)
    w = _Filling(device, name, shape, np.dtype(np.uint8))
    blocks = -(-n // rows) if whole else n
    scale = _Filling(device, f"{name}.scale", (*of, blocks, -(-k // columns)), np.dtype(np.float32))
    for tensor in tensors:
        values, scales = weights.checked(tensor).values()
        w.add(values)
        scales = to_float32(scales)
        scale.add(scales if whole else scales[np.arange(len(values)) // rows])
    numbers = {"block_rows": rows if whole else 1, "block_columns": columns}
    return Matrix("fp8", shape, {"w": w.full(), "scale": scale.full(), **numbers})

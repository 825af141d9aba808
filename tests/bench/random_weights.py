"""Random weights made on a GPU, in every form in which the engine holds them, and the float32 values that they mean.

For the benchmarks beside this file. Made of one random block, repeated from ever other places: quick at any size.
"""

from collections.abc import Callable

import cupy as cp
import ml_dtypes
import numpy as np

from kdtr_cli.engine.devices import DeviceArray
from kdtr_cli.engine.matrices import Matrix

GROUP, BLOCK = 32, 128  # of the published checkpoints
_WORDS = 1 << 26
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def as_cupy(array: DeviceArray):
    """A CuPy view of a device array."""
    memory = cp.cuda.UnownedMemory(array.ptr, array.nbytes, array)
    return cp.ndarray(array.shape, array.dtype, cp.cuda.MemoryPointer(memory, 0))


def randomise(device, array: DeviceArray, scale: float = 1.0) -> None:
    """Fill a float32 array with normal numbers; its poison must have landed before CuPy's stream writes."""
    device.synchronize()
    as_cupy(array)[:] = cp.random.standard_normal(array.shape, dtype=cp.float32) * cp.float32(scale)
    cp.cuda.runtime.deviceSynchronize()


class RandomWeights:
    """Random matrices on a device, and a model's weights of them (weights.Placing); ``form_of`` a matrix's name."""

    def __init__(self, device, form_of: Callable[[str], str] = lambda name: "f32") -> None:
        self.device, self.form_of = device, form_of
        self.normal = cp.random.standard_normal(_WORDS, dtype=cp.float32) * cp.float32(0.02)
        self.bytes = cp.random.randint(0, 256, 4 * _WORDS, dtype=cp.uint8)
        self.bytes[self.bytes & 0x7F == 0x7F] = 0  # no NaN of e4m3
        # scales with digits of their own, so that a wrong one shows
        self.scales = (cp.random.random(_WORDS >> 4, dtype=cp.float32) + cp.float32(0.5)) * cp.float32(2**-8)

    def _filled(self, name: str, shape: tuple[int, ...], block) -> DeviceArray:
        array = self.device.alloc(name, shape, block.dtype)
        self.device.synchronize()
        flat = as_cupy(array).reshape(-1)
        for i in range(0, flat.size, block.size):
            part = flat[i : i + block.size]
            part[:] = cp.roll(block, 1 + i // 4099 % 1000003)[: part.size]
        cp.cuda.runtime.deviceSynchronize()
        return array

    def random(self, name: str, shape: tuple[int, ...], form: str) -> Matrix:
        """A matrix [n, k] or several [count, n, k] in a form; k a multiple of 32."""
        *of, n, k = shape
        if form == "f32":
            return Matrix.plain(form, self._filled(name, shape, self.normal))
        if form == "bf16":
            return Matrix.plain(form, self._filled(name, shape, _bf16_bits(self.normal)))
        if form == "f16":
            return Matrix.plain(form, self._filled(name, shape, self.normal.astype(cp.float16).view(cp.uint16)))
        if form == "int4":
            w = self._filled(name, (*of, n, k // 4), self.bytes.view(cp.uint16))
            scale = self._filled(f"{name}.scale", (*of, n, k // GROUP), _bf16_bits(self.scales))
            return Matrix(form, shape, {"w": w, "scale16": scale, "scale32": None, "group": GROUP})
        blocks = (*of, -(-n // BLOCK), -(-k // BLOCK))
        arrays = {
            "w": self._filled(name, shape, self.bytes),
            "scale": self._filled(f"{name}.scale", blocks, self.scales),
        }
        return Matrix(form, shape, {**arrays, "block_rows": BLOCK, "block_columns": BLOCK})

    def vector(self, name: str, size: int, values: Callable) -> DeviceArray:
        array = self._filled(name, (size,), self.normal)
        if name.endswith("norm"):
            as_cupy(array)[:] += 1
            cp.cuda.runtime.deviceSynchronize()
        return array

    def matrix(self, name: str, shape: tuple[int, ...], *tensors: str, cut: Callable | None = None) -> Matrix:
        form = self.form_of(name)
        return self.random(name, shape, "f32" if cut is not None and form in ("int4", "fp8") else form)


def _bf16_bits(values):
    return (values.view(cp.uint32) >> cp.uint32(16)).astype(cp.uint16)


def float32_values(matrix: Matrix, item: int | None = None):
    """The float32 values [n, k] of a matrix, or of one of several, as CuPy has them: independent of the kernels."""
    *_, n, k = matrix.shape

    def part(name: str):
        whole = as_cupy(matrix.arguments[name])
        return whole if item is None else whole[item]

    w = part("w")
    if matrix.form == "f32":
        return w
    if matrix.form == "bf16":
        return (w.astype(cp.uint32) << cp.uint32(16)).view(cp.float32)
    if matrix.form == "f16":
        return w.view(cp.float16).astype(cp.float32)
    if matrix.form == "int4":
        nibbles = cp.stack([w >> cp.uint16(4 * i) & cp.uint16(15) for i in range(4)], axis=-1).reshape(n, k)
        scale = (part("scale16").astype(cp.uint32) << cp.uint32(16)).view(cp.float32)
        return (nibbles.astype(cp.float32) - cp.float32(8)) * cp.repeat(scale, GROUP, axis=1)[:, :k]
    scale = cp.repeat(cp.repeat(part("scale"), BLOCK, axis=0)[:n], BLOCK, axis=1)[:, :k]
    return cp.take(cp.asarray(_E4M3), w.astype(cp.int32)) * scale

"""What both devices share: arrays with guard zones, the checks of every call, capture and replay.

A device takes memory, moves arrays, launches kernels. ``gpu`` and ``cpu`` differ in how raw bytes are taken, moved and
worked on; everything that can be checked without looking at the bytes is checked here, once, for both.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from kdtr_cli.engine.compile import KERNELS_AS_THEY_ARE
from kdtr_cli.errors import DeviceError

__all__ = ["GUARD_BYTES", "Arg", "Device", "DeviceArray", "Graph", "Kernel"]

#: Bytes before and after every buffer whose content is known and checked after a run.
GUARD_BYTES = 256
#: Little endian 0xFFF5C3D2: NaN as float32 and as float64, so that what is read across the edge shows too.
_GUARD = np.frombuffer(bytes((0xD2, 0xC3, 0xF5, 0xFF)) * (GUARD_BYTES // 4), np.uint8)
_ALIGNMENT = 256


@dataclass(eq=False)
class _Buffer:
    """One allocation: ``memory`` keeps the raw bytes alive, ``start`` is the address of the leading guard zone."""

    name: str
    start: int
    nbytes: int
    memory: Any
    device: "Device"
    live: bool = True


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """A C-contiguous array in a device's memory, or a part of one.

    name: as given to alloc. shape, dtype: as NumPy's. ptr: the address of its first element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    ptr: int
    buffer: _Buffer = field(repr=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def view(self, offset: int, shape: int | Sequence[int]) -> "DeviceArray":
        """The array of ``shape`` that begins ``offset`` elements after this one's first, in the same memory.

        DeviceError if it does not lie inside this array.
        """
        shape, offset = _shape(shape), int(offset)
        size = math.prod(shape)
        if offset < 0 or offset + size > self.size:
            raise DeviceError(
                f"a view of {size} elements from element {offset} does not lie inside {self.name}, of {self.size}"
            )
        return DeviceArray(self.name, shape, self.dtype, self.ptr + offset * self.dtype.itemsize, self.buffer)

    def as_dtype(self, dtype: np.typing.DTypeLike) -> "DeviceArray":
        """The same bytes as another dtype, the last axis as many times shorter as its elements are wider.

        DeviceError if a row does not hold whole elements.
        """
        dtype = np.dtype(dtype)
        nbytes = self.shape[-1] * self.dtype.itemsize
        if nbytes % dtype.itemsize:
            raise DeviceError(f"{self.name} has rows of {nbytes} bytes: they are not whole {dtype} elements")
        shape = (*self.shape[:-1], nbytes // dtype.itemsize)
        return DeviceArray(self.name, shape, dtype, self.ptr, self.buffer)


#: A kernel argument: an array of the device, a NumPy scalar of the parameter's exact width, or None for a null pointer.
Arg = DeviceArray | np.generic | None


@dataclass(eq=False)
class Kernel:
    """A compiled kernel of one device. file, entry: as asked for; handle: the device's own."""

    file: str
    entry: str
    device: "Device" = field(repr=False)
    handle: Any = field(repr=False)

    def attributes(self) -> dict[str, int]:
        """On a GPU: registers, shared_bytes, local_bytes, max_threads, constant_bytes. On the CPU device: empty."""
        return self.device._attributes(self)


@dataclass(eq=False)
class Graph:
    """Captured launches, their arguments frozen: the same addresses and numbers; arrays hold what they hold by then."""

    device: "Device" = field(repr=False)
    launches: int
    handle: Any = field(repr=False)
    buffers: frozenset[_Buffer] = field(repr=False)

    def replay(self) -> None:
        """Runs the captured launches in order, on the device's stream."""
        device = self.device
        device._outside_capture("replay a graph")
        if dead := next((b for b in self.buffers if not b.live), None):
            raise DeviceError(f"a captured graph uses {dead.name}, which has been freed")
        if self.launches:
            device._replay(self.handle)


class Device(ABC):
    """The common half of the two devices; ``open_device`` gives one. Not safe for use by several threads at once."""

    kind: str
    shared_bytes: int = 48 << 10  #: the most shared memory of a block, dynamic and static together
    notes: tuple[str, ...] = ()  #: lines that the user should see, such as a cache that is kept for this run only

    def __init__(self, replaced: Mapping[str, str] = KERNELS_AS_THEY_ARE) -> None:
        self.replaced = replaced  #: see ``open_device``
        self._buffers: list[_Buffer] = []
        self._capturing: list | None = None
        self._used: set[_Buffer] = set()

    # ---- memory -----------------------------------------------------------------------------------------------------

    def alloc(self, name: str, shape: int | Sequence[int], dtype: np.typing.DTypeLike) -> DeviceArray:
        """An array filled with 0xFF bytes (NaN in every float type), 256-byte aligned, between guard zones."""
        return self._alloc(name, _shape(shape), np.dtype(dtype), poison=True)

    def upload(self, name: str, array: np.ndarray) -> DeviceArray:
        """A new array that holds a copy of ``array``."""
        array = np.asarray(array)
        out = self._alloc(name, array.shape, array.dtype, poison=False)
        self.write(out, array)
        return out

    def write(self, dst: DeviceArray, array: np.ndarray) -> None:
        """Copies ``array`` into ``dst`` in the order of the device's stream. dtype and number of elements must match.

        The source may be changed as soon as this returns.
        """
        self._outside_capture(f"write {dst.name}")
        self._own(dst)
        array = np.asarray(array)
        if array.dtype != dst.dtype or array.size != dst.size:
            raise DeviceError(
                f"{dst.name} is {_text(dst.dtype, dst.shape)}: {_text(array.dtype, array.shape)} can't be written to it"
            )
        if array.size:
            self._to_device(dst.ptr, np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def read(self, src: DeviceArray) -> np.ndarray:
        """A copy of ``src`` on the host, after everything launched before it has ended."""
        self._outside_capture(f"read {src.name}")
        self._own(src)
        out = np.empty(src.shape, src.dtype)
        if out.size:
            self._from_device(out.reshape(-1).view(np.uint8), src.ptr)
        return out

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all live arrays, guard zones not counted."""
        return sum(b.nbytes for b in self._buffers)

    def check_guards(self) -> None:
        """DeviceError naming the first array beside which something was written, and on which side of it."""
        self._outside_capture("check guard zones")
        self.synchronize()
        for b in self._buffers:
            for side, at in (("before", b.start), ("after", b.start + GUARD_BYTES + b.nbytes)):
                zone = np.empty(GUARD_BYTES, np.uint8)
                self._from_device(zone, at)
                wrong = np.flatnonzero(zone != _GUARD)
                if wrong.size:
                    far = GUARD_BYTES - int(wrong[-1]) if side == "before" else int(wrong[0]) + 1
                    raise DeviceError(
                        f"a kernel wrote outside {b.name} ({b.nbytes} bytes): "
                        f"{wrong.size} bytes {side} it, the nearest {far} bytes {side} its {_EDGE[side]}"
                    )

    def free_all(self) -> None:
        """Gives back all memory. Arrays and graphs made before can't be used any more."""
        self._outside_capture("free memory")
        self.synchronize()
        for b in self._buffers:
            b.live, b.memory = False, None
        self._buffers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self.free_all()
            return
        # the error that brought us here is the one to report, not what a broken device says now
        for b in self._buffers:
            b.live, b.memory = False, None
        self._buffers.clear()

    def _alloc(self, name: str, shape: tuple[int, ...], dtype: np.dtype, *, poison: bool) -> DeviceArray:
        self._outside_capture(f"allocate {name}")
        if dtype.hasobject:
            raise TypeError(f"{name}: a device array can't hold Python objects")
        nbytes = math.prod(shape) * dtype.itemsize
        # room to align the first element, whatever the address that the system gives
        start, memory = self._take(name, nbytes + 2 * GUARD_BYTES + _ALIGNMENT)
        start += -start % _ALIGNMENT
        buffer = _Buffer(name, start, nbytes, memory, self)
        first = start + GUARD_BYTES
        self._to_device(start, _GUARD)
        self._to_device(first + nbytes, _GUARD)
        if poison and nbytes:
            self._fill(first, 0xFF, nbytes)
        self._buffers.append(buffer)
        return DeviceArray(name, shape, dtype, first, buffer)

    # ---- kernels ----------------------------------------------------------------------------------------------------

    def kernel(self, file: str | Path, entry: str) -> Kernel:
        """The kernel ``entry`` of a file in kernels_cu (or of the file at a Path), compiled and loaded on first use.

        CompileError (a DeviceError) says the first error's file and line; DeviceError names the kernels that there are.
        """
        self._outside_capture(f"load kernel {entry}")
        return self._kernel(file, entry)

    @abstractmethod
    def compile(self, files: Iterable[str | Path]) -> None:
        """Compiles several files, as many at a time as there are processors; kernel() then finds them ready."""

    def launch(
        self,
        kernel: Kernel,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Arg],
        shared: int = 0,
        overlap: bool = False,
    ) -> None:
        """Runs ``kernel`` over grid × block threads; ``shared``: bytes of dynamic shared memory.

        overlap: the kernel itself waits for what the one before wrote (mma.cuh), so it may begin while that one ends,
        where the device can do so.

        A grid with a zero dimension launches nothing. TypeError for an argument that is not an Arg (a bare Python
        number has no width) or does not fit its parameter (on the CPU device: count, kind, width, what a pointer points
        to; on a GPU: count and width, where the driver tells). DeviceError for a fault in the launch.
        """
        if kernel.device is not self:
            raise DeviceError(f"kernel {kernel.entry} belongs to another device")
        for i, a in enumerate(args):
            if isinstance(a, DeviceArray):
                self._own(a)
            elif a is not None and not isinstance(a, np.generic):
                raise TypeError(
                    f"kernel {kernel.entry}: argument {i} is a {type(a).__name__}, which has no fixed width: "
                    "give an array of the device, np.int32(…), np.float32(…) or None"
                )
        grid, block = _dimensions(grid, kernel.entry), _dimensions(block, kernel.entry)
        self._check(kernel, args)
        if 0 in grid:
            return
        if self._capturing is not None:
            self._used.update(a.buffer for a in args if isinstance(a, DeviceArray))
        self._launch(kernel, grid, block, args, int(shared), overlap)

    def capture(self, fn: Callable[[], object]) -> Graph:
        """Records the launches that ``fn`` makes, without running them, as a Graph.

        Inside it only launches are allowed: taking or moving memory, loading a kernel and another capture are
        DeviceErrors.
        """
        self._outside_capture("capture")
        self._capturing, self._used = [], set()
        try:
            handle = self._record(fn)
            return Graph(self, len(self._capturing), handle, frozenset(self._used))
        finally:
            self._capturing, self._used = None, set()

    def _outside_capture(self, what: str) -> None:
        if self._capturing is not None:
            raise DeviceError(f"can't {what} inside a capture: only launches may be captured")

    def _own(self, array: DeviceArray) -> None:
        if array.buffer.device is not self:
            raise DeviceError(f"{array.name} lies in another device's memory")
        if not array.buffer.live:
            raise DeviceError(f"{array.name} has been freed")

    # ---- what a device brings ----------------------------------------------------------------------------------------

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """device, driver and compiler, for a bundle's manifest: no path, no clock, no number of jobs."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until everything launched has ended; a fault of a kernel shows here at the latest."""

    @abstractmethod
    def _take(self, name: str, nbytes: int) -> tuple[int, Any]: ...

    @abstractmethod
    def _fill(self, ptr: int, byte: int, nbytes: int) -> None: ...

    @abstractmethod
    def _to_device(self, ptr: int, data: np.ndarray) -> None: ...

    @abstractmethod
    def _from_device(self, out: np.ndarray, ptr: int) -> None: ...

    @abstractmethod
    def _kernel(self, file: str | Path, entry: str) -> Kernel: ...

    @abstractmethod
    def _attributes(self, kernel: Kernel) -> dict[str, int]: ...

    @abstractmethod
    def _check(self, kernel: Kernel, args: Sequence[Arg]) -> None: ...

    @abstractmethod
    def _launch(self, kernel: Kernel, grid: tuple, block: tuple, args: Sequence[Arg], shared: int) -> None: ...

    @abstractmethod
    def _record(self, fn: Callable[[], object]) -> Any: ...

    @abstractmethod
    def _replay(self, handle: Any) -> None: ...


_EDGE = {"before": "first element", "after": "last element"}


def _shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
    if any(n < 0 for n in shape):
        raise DeviceError(f"a device array can't have the shape {shape}")
    return shape


def _dimensions(value: int | Sequence[int], entry: str) -> tuple[int, int, int]:
    given = (int(value),) if isinstance(value, (int, np.integer)) else tuple(int(n) for n in value)
    if not 1 <= len(given) <= 3 or any(n < 0 or n > 0xFFFFFFFF for n in given):
        raise DeviceError(f"kernel {entry}: {given} is not a grid or block of one to three dimensions")
    return (*given, 1, 1)[:3]


def _text(dtype: np.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype.name}[{', '.join(map(str, shape))}]"

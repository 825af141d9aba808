"""The GPU device: kernels compiled by NVRTC, memory, streams and graphs through CuPy.

CuPy is imported when a device is opened, not before: everything else of kdtr works without it. Memory is plain device
memory, never managed. All work goes to one non-blocking stream, so that it can be captured as a CUDA graph.
"""

import contextlib
import ctypes
import functools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.engine.compile import (
    KERNELS_AS_THEY_ARE,
    NVRTC_OPTIONS,
    compile_cubin,
    compile_ptx,
    nvrtc_architectures,
    nvrtc_version,
    source_text,
)
from kdtr_cli.engine.compile_cache import cache_key, open_cache
from kdtr_cli.engine.devices.device import Arg, Device, DeviceArray, Kernel
from kdtr_cli.errors import DeviceError

__all__ = ["NO_DRIVER", "GpuDevice", "gpu_missing"]

#: What gpu_missing says of a machine without an NVIDIA driver: nothing that a user could have forgotten.
NO_DRIVER = "there is no NVIDIA driver here (libcuda.so.1)"

_STAGING_BYTES = 1 << 20  # pinned memory for small copies, handed out in a ring
_STAGED_AT_MOST = 1 << 16
_PLAIN_SHARED = 48 << 10  # more shared memory than this in all must be asked for, kernel by kernel


def gpu_missing() -> str | None:
    """None if this process can use a GPU, else one clause that says what is missing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return NO_DRIVER
    try:
        import cupy
    except ImportError as e:
        return f"CuPy can't be imported ({_first_line(e)}): pip install 'kdtr[cuda13]' (or 'kdtr[cuda12]')"
    try:
        if cupy.cuda.runtime.getDeviceCount() > 0:
            nvrtc_version()
            return None
    except DeviceError as e:
        return str(e)
    except Exception as e:  # CuPy raises its own kinds for a driver that is too old, or has no device
        return f"the NVIDIA driver gives none ({_first_line(e)})"
    return "the NVIDIA driver lists no device (is CUDA_VISIBLE_DEVICES empty?)"


@dataclass(eq=False)
class _Entry:
    """function: CuPy's; widths: bytes of each parameter, None where the driver can't say; shared: the most allowed."""

    function: Any
    widths: tuple[int, ...] | None
    shared: int


class GpuDevice(Device):
    """The current CUDA device. See ``open_device``; CUDA_VISIBLE_DEVICES chooses among several."""

    kind = "gpu"

    def __init__(self, replaced: Mapping[str, str] = KERNELS_AS_THEY_ARE) -> None:
        super().__init__(replaced)
        import cupy

        self._cuda = cupy.cuda
        self._errors = (
            cupy.cuda.runtime.CUDARuntimeError,
            cupy.cuda.driver.CUDADriverError,
            cupy.cuda.memory.OutOfMemoryError,
        )
        self._recent: deque[str] = deque(maxlen=4)
        self.cache = open_cache()
        self.notes = (self.cache.note,) if self.cache.note else ()
        with self._guarded("opening the GPU"):
            self._properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
            self.shared_bytes = int(self._properties.get("sharedMemPerBlockOptin", _PLAIN_SHARED))
            self.arch = f"sm_{cupy.cuda.Device().compute_capability}"
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._staging = cupy.cuda.alloc_pinned_memory(_STAGING_BYTES)
            self._landing = cupy.cuda.alloc_pinned_memory(_STAGED_AT_MOST)
        self._overlaps = _can_overlap(self.arch)
        self._staged = 0
        self._modules: dict[str | Path, Any] = {}
        self._kernels: dict[tuple[str | Path, str], Kernel] = {}

    def describe(self) -> dict[str, str]:
        version = self._cuda.runtime.driverGetVersion()
        cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
        return {
            "device": f"{self._properties['name'].decode()} ({self.arch})",
            "driver": f"NVIDIA {kernel}, {cuda}" if (kernel := _kernel_driver()) else cuda,
            "compiler": f"NVRTC {nvrtc_version()}, {' '.join(NVRTC_OPTIONS)}, {self.arch}",
        }

    def synchronize(self) -> None:
        with self._guarded("waiting for the GPU"):
            self._stream.synchronize()
        self._recent.clear()
        self._staged = 0

    def compile(self, files: Iterable[str | Path]) -> None:
        self._outside_capture("compile")
        missing = [f for f in dict.fromkeys(files) if f not in self._modules]
        with ThreadPoolExecutor(4) as pool:
            built = [(file, pool.submit(self._image, file)) for file in missing]
            for file, image in built:
                self._modules[file] = self._load(file, image.result())

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _take(self, name: str, nbytes: int) -> tuple[int, Any]:
        with self._guarded(f"taking {nbytes} bytes of GPU memory for {name}"):
            memory = self._cuda.memory.Memory(nbytes)
        return memory.ptr, memory

    def _fill(self, ptr: int, byte: int, nbytes: int) -> None:
        with self._guarded("filling GPU memory"):
            self._cuda.runtime.memsetAsync(ptr, byte, nbytes, self._stream.ptr)

    def _to_device(self, ptr: int, data: np.ndarray) -> None:
        to_device = self._cuda.runtime.memcpyHostToDevice
        with self._guarded("copying to the GPU"):
            if data.nbytes > _STAGED_AT_MOST:
                self._cuda.runtime.memcpyAsync(ptr, data.ctypes.data, data.nbytes, to_device, self._stream.ptr)
                self._stream.synchronize()  # the source is the caller's again when we return
                return
            if self._staged + data.nbytes > _STAGING_BYTES:
                self._stream.synchronize()  # every copy out of the ring has ended: begin at its start again
                self._staged = 0
            at = self._staging.ptr + self._staged
            ctypes.memmove(at, data.ctypes.data, data.nbytes)
            self._staged += data.nbytes
            self._cuda.runtime.memcpyAsync(ptr, at, data.nbytes, to_device, self._stream.ptr)

    def _from_device(self, out: np.ndarray, ptr: int) -> None:
        staged = out.nbytes <= _STAGED_AT_MOST
        landing = self._landing.ptr if staged else out.ctypes.data
        with self._guarded("copying from the GPU"):
            to_host = self._cuda.runtime.memcpyDeviceToHost
            self._cuda.runtime.memcpyAsync(landing, ptr, out.nbytes, to_host, self._stream.ptr)
        self.synchronize()
        if staged:
            ctypes.memmove(out.ctypes.data, landing, out.nbytes)

    # ---- kernels ----------------------------------------------------------------------------------------------------

    def _image(self, file: str | Path) -> bytes:
        """What the driver loads: machine code, or PTX for a GPU that is newer than this NVRTC."""
        text = source_text(file, self.replaced)
        known = nvrtc_architectures()
        number = int(self.arch.removeprefix("sm_"))
        if number in known:
            arch, form = self.arch, ".cubin"
        else:
            arch, form = f"compute_{max((a for a in known if a < number), default=known[0])}", ".ptx"
        key = cache_key("gpu kernels", text, arch, nvrtc_version(), *NVRTC_OPTIONS)

        def make() -> bytes:
            return compile_cubin(text, arch) if form == ".cubin" else compile_ptx(text, arch).encode() + b"\0"

        self.cache.build(key, form, make)
        image = self.cache.payload(key, form)
        return make() if image is None else image

    def _load(self, file: str | Path, image: bytes) -> Any:
        module = self._cuda.function.Module()
        with self._guarded(f"loading {file}"):
            module.load(image)
        return module

    def _kernel(self, file: str | Path, entry: str) -> Kernel:
        if found := self._kernels.get((file, entry)):
            return found
        if file not in self._modules:
            self._modules[file] = self._load(file, self._image(file))
        name = file.name if isinstance(file, Path) else file
        with self._guarded(f"finding kernel {entry} in {name}"):
            function = self._modules[file].get_function(entry)
            # modules load lazily: asking for an attribute loads the kernel now, since it can't be inside a capture
            self._attribute(function, "NUM_REGS")
            static = self._attribute(function, "SHARED_SIZE_BYTES")
        handle = _Entry(function, _parameter_widths(function.ptr), max(0, _PLAIN_SHARED - static))
        kernel = Kernel(name, entry, self, handle)
        self._kernels[file, entry] = kernel
        return kernel

    def _attribute(self, function: Any, which: str) -> int:
        driver = self._cuda.driver
        return driver.funcGetAttribute(getattr(driver, f"CU_FUNC_ATTRIBUTE_{which}"), function.ptr)

    def _attributes(self, kernel: Kernel) -> dict[str, int]:
        names = {
            "registers": "NUM_REGS",
            "shared_bytes": "SHARED_SIZE_BYTES",
            "local_bytes": "LOCAL_SIZE_BYTES",
            "constant_bytes": "CONST_SIZE_BYTES",
            "max_threads": "MAX_THREADS_PER_BLOCK",
        }
        with self._guarded(f"reading the attributes of kernel {kernel.entry}"):
            return {ours: self._attribute(kernel.handle.function, theirs) for ours, theirs in names.items()}

    # ---- launches ---------------------------------------------------------------------------------------------------

    def _check(self, kernel: Kernel, args: Sequence[Arg]) -> None:
        widths = kernel.handle.widths
        if widths is None:
            return
        if len(args) != len(widths):
            raise TypeError(f"kernel {kernel.entry} takes {len(widths)} arguments, {len(args)} given")
        for i, (arg, width) in enumerate(zip(args, widths, strict=True)):
            given = arg.dtype.itemsize if isinstance(arg, np.generic) else 8
            if given != width:
                raise TypeError(f"kernel {kernel.entry}: argument {i} has {given} bytes, {width} are wanted")

    def _launch(
        self, kernel: Kernel, grid: tuple, block: tuple, args: Sequence[Arg], shared: int, overlap: bool
    ) -> None:
        entry: _Entry = kernel.handle
        with self._guarded(f"kernel {kernel.entry}: launch of {grid} blocks of {block} threads, {shared} shared bytes"):
            if shared > entry.shared:
                most = self._cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._cuda.driver.funcSetAttribute(entry.function.ptr, most, shared)
                entry.shared = shared
            values = tuple(_value(a) for a in args)
            if overlap and self._overlaps:
                _launch_overlapping(entry.function.ptr, grid, block, values, shared, self._stream.ptr)
            else:
                entry.function(grid, block, values, shared, self._stream)
        if self._capturing is not None:
            self._capturing.append(kernel.entry)
        else:
            self._recent.append(kernel.entry)

    def _record(self, fn: Callable[[], object]) -> Any:
        with self._guarded("beginning a capture"):
            self._stream.begin_capture()
        try:
            fn()
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                self._stream.end_capture()
            raise
        with self._guarded("capturing a graph"):
            graph = self._stream.end_capture()
            graph.upload(self._stream)
        return graph, tuple(self._capturing)

    def _replay(self, handle: Any) -> None:
        graph, names = handle
        with self._guarded("replaying a graph"):
            graph.launch(self._stream)
        self._recent.append(f"graph of {', '.join(dict.fromkeys(names))}")

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """CUDA's errors as DeviceError. A kernel's fault shows later than its launch: what ran lately is named too."""
        try:
            yield
        except self._errors as e:
            after = f" (after {'; '.join(self._recent)})" if self._recent else ""
            raise DeviceError(f"{what} failed: {_first_line(e)}{after}") from e


def _value(arg: Arg) -> np.generic:
    # CuPy passes NumPy scalars by value in their own width; an address is one of 8 bytes
    if isinstance(arg, DeviceArray):
        return np.uint64(arg.ptr)
    return np.uint64(0) if arg is None else arg


def _can_overlap(arch: str) -> bool:
    """Whether kernels may begin while the one before ends: programmatic dependent launch, sm_90 up."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return False
    return int(arch.removeprefix("sm_")) >= 90 and hasattr(driver, "cuLaunchKernelEx")


def _launch_overlapping(function: int, grid: tuple, block: tuple, values: tuple, shared: int, stream: int) -> None:
    """cuLaunchKernelEx with programmatic stream serialisation, which CuPy's launch has no way to ask for."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes, config.hStream = shared, driver.CUstream(stream)
    config.attrs, config.numAttrs = [attribute], 1
    held = [np.array(value) for value in values]  # the driver copies them before it returns
    pointers = np.array([value.ctypes.data for value in held], np.uint64)
    (status,) = driver.cuLaunchKernelEx(config, driver.CUfunction(function), pointers.ctypes.data, 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{driver.cuGetErrorString(status)[1].decode()}")


def _parameter_widths(function: int) -> tuple[int, ...] | None:
    """Bytes of each kernel parameter, by cuFuncGetParamInfo (CUDA 12.4); None where the driver has no such call."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    handle, widths = driver.CUfunction(function), []
    try:
        while True:
            status, *info = driver.cuFuncGetParamInfo(handle, len(widths))
            if status == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
                return tuple(widths)  # past the last parameter
            if status != driver.CUresult.CUDA_SUCCESS:
                return None
            widths.append(int(info[-1]))
    except Exception:  # an older driver: cuda-bindings finds no such function
        return None


@functools.cache
def _kernel_driver() -> str | None:
    """The NVIDIA kernel module's version, such as "580.65.06"."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else None


def _first_line(e: Exception) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0]

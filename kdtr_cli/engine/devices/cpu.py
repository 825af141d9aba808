"""The CPU device: kernels compiled by this machine's C++ compiler, each block run as fibres (kernels_cu/cpu).

Launches are synchronous. A missing barrier, a divergent one or a lane outside its mask is a DeviceError that names the
kernel, the block, the thread, the file and the line; a read of unwritten shared memory gives NaN.
"""

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.engine.compile import KERNELS_AS_THEY_ARE, source_text
from kdtr_cli.engine.compile_cache import CompileCache, cache_key, open_cache
from kdtr_cli.engine.devices.device import Arg, Device, DeviceArray, Kernel
from kdtr_cli.engine.host_compiler import (
    HostCompiler,
    builder_text,
    compile_kernels,
    compile_runtime,
    find_compiler,
    kernel_text,
)
from kdtr_cli.errors import DeviceError, InputError

__all__ = ["CpuDevice"]

_MOST_THREADS = 32
_ERROR_BYTES = 1024


class _Launch(ctypes.Structure):
    """struct Launch of kernels_cu/cpu/runtime.cpp."""

    _fields_ = (
        ("call", ctypes.c_void_p),
        ("shared_memory", ctypes.c_void_p),
        ("shared_offset", ctypes.c_long),
        ("shared_size", ctypes.c_size_t),
        ("args", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("pad", ctypes.c_uint),
    )


class _Parameter(ctypes.Structure):
    """struct Arg of kernels_cu/cpu/fibres.h. kind: p pointer, f float, i int, u unsigned, b bool, s anything."""

    _fields_ = (
        ("kind", ctypes.c_char),
        ("to_kind", ctypes.c_char),
        ("size", ctypes.c_ushort),
        ("to_align", ctypes.c_ushort),
        ("to_size", ctypes.c_uint),
    )


@dataclass(frozen=True)
class _Module:
    """A loaded kernel library. shared_offset, shared_size: where its static shared memory lies (see cc_find_shared)."""

    library: ctypes.CDLL
    entries: tuple[str, ...]
    shared_memory: int
    shared_offset: int
    shared_size: int


@dataclass(frozen=True)
class _Entry:
    call: int
    name: bytes
    module: _Module
    parameters: tuple[_Parameter, ...]


class CpuDevice(Device):
    """See ``open_device``. defines: extra macros for the runtime, such as "-DKDTR_UCONTEXT" (portable switching)."""

    kind = "cpu"

    def __init__(
        self,
        *,
        threads: int | None = None,
        schedule: int = 0,
        defines: tuple[str, ...] = (),
        replaced: Mapping[str, str] = KERNELS_AS_THEY_ARE,
    ) -> None:
        super().__init__(replaced)
        if threads is not None and threads < 1:
            raise InputError(f"the CPU device can't run on {threads} threads; give 1 or more")
        if not 0 <= schedule < 2**32:
            raise InputError(f"there is no lane schedule {schedule}; give 0, 1, or a seed from 2 on")
        self.threads = threads or min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        self.schedule = schedule
        self.compiler: HostCompiler = find_compiler()
        self.cache: CompileCache = open_cache()
        self.notes = (self.cache.note,) if self.cache.note else ()
        self._modules: dict[str | Path, _Module] = {}
        self._kernels: dict[tuple[str | Path, str], Kernel] = {}
        self._compiler_key = (*self.compiler.command, self.compiler.version, *self.compiler.options)
        self._runtime, self._runtime_name = self._load_runtime(defines)

    def describe(self) -> dict[str, str]:
        return {
            "device": f"cpu ({self.compiler.target})",
            "driver": "kdtr cuda-on-cpu",
            "compiler": self.compiler.description,
        }

    def synchronize(self) -> None:
        """Nothing to wait for: launches are synchronous."""

    def compile(self, files: Iterable[str | Path]) -> None:
        missing = [f for f in dict.fromkeys(files) if f not in self._modules]
        self._outside_capture("compile")
        with ThreadPoolExecutor(max(1, min(len(missing), len(os.sched_getaffinity(0))))) as pool:
            built = [(file, pool.submit(self._build, file)) for file in missing]
            for file, path in built:
                self._modules[file] = self._load(path.result(), str(file))

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _take(self, name: str, nbytes: int) -> tuple[int, Any]:
        try:
            memory = np.empty(nbytes, np.uint8)
        except MemoryError as e:
            raise DeviceError(f"no memory for {name}: {nbytes} bytes") from e
        return memory.ctypes.data, memory

    def _fill(self, ptr: int, byte: int, nbytes: int) -> None:
        ctypes.memset(ptr, byte, nbytes)

    def _to_device(self, ptr: int, data: np.ndarray) -> None:
        ctypes.memmove(ptr, data.ctypes.data, data.nbytes)

    def _from_device(self, out: np.ndarray, ptr: int) -> None:
        ctypes.memmove(out.ctypes.data, ptr, out.nbytes)

    # ---- libraries --------------------------------------------------------------------------------------------------

    def _load_runtime(self, defines: tuple[str, ...]) -> tuple[ctypes.CDLL, str]:
        text = source_text("cpu/runtime.cpp")
        key = cache_key("cpu runtime", text, *self._compiler_key, *defines)
        name = f"runtime_{key[:16]}"
        path = self.cache.build(key, ".so", lambda: compile_runtime(self.compiler, text, name, defines))
        # global, so that kernel libraries find it; its names carry its digest, so that several can live side by side
        library = _dlopen(path, ctypes.RTLD_GLOBAL)
        library.cc_run.argtypes = [
            ctypes.POINTER(_Launch), ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.c_char_p, ctypes.c_int,
        ]  # fmt: skip
        library.cc_bad_float_mode.restype = ctypes.c_char_p
        library.cc_find_shared.argtypes = [
            ctypes.c_void_p, ctypes.POINTER(ctypes.c_long), ctypes.POINTER(ctypes.c_size_t),
        ]  # fmt: skip
        if bad := library.cc_bad_float_mode():
            raise DeviceError(f"the CPU device can't compute exactly: {bad.decode()}")
        return library, name

    def _build(self, file: str | Path) -> Path:
        text = kernel_text(file, self.replaced)
        key = cache_key("cpu kernels", text, builder_text(), self._runtime_name, *self._compiler_key)
        return self.cache.build(key, ".so", lambda: compile_kernels(self.compiler, text, self._runtime_name))

    def _load(self, path: Path, file: str) -> _Module:
        library = _dlopen(path, ctypes.RTLD_LOCAL)
        if library.cc_contracts():
            raise DeviceError(
                f"{self.compiler.version} fuses a * b + c in spite of -ffp-contract=off: set CXX to another compiler"
            )
        offset, size = ctypes.c_long(), ctypes.c_size_t()
        shared_memory = _address(library.cc_shared_memory)
        if not self._runtime.cc_find_shared(shared_memory, ctypes.byref(offset), ctypes.byref(size)):
            raise DeviceError(f"{file}: its static shared memory can't be found; is this Linux with glibc or musl?")
        entries = tuple(ctypes.c_char_p(_address(library.cc_kernels)).value.decode().split())
        return _Module(library, entries, shared_memory, offset.value, size.value)

    def _kernel(self, file: str | Path, entry: str) -> Kernel:
        if found := self._kernels.get((file, entry)):
            return found
        if file not in self._modules:
            self._modules[file] = self._load(self._build(file), str(file))
        module = self._modules[file]
        name = file.name if isinstance(file, Path) else file
        if entry not in module.entries:
            raise DeviceError(f"{name} has no kernel {entry!r}; it has {', '.join(module.entries)}")
        parameters = (_Parameter * 64)()
        count = module.library[f"cc_args_{entry}"](parameters)
        handle = _Entry(_address(module.library[f"cc_call_{entry}"]), entry.encode(), module, tuple(parameters[:count]))
        kernel = self._kernels[file, entry] = Kernel(name, entry, self, handle)
        return kernel

    def _attributes(self, kernel: Kernel) -> dict[str, int]:
        return {}

    # ---- launches ---------------------------------------------------------------------------------------------------

    def _check(self, kernel: Kernel, args: Sequence[Arg]) -> None:
        parameters = kernel.handle.parameters
        if len(args) != len(parameters):
            raise TypeError(f"kernel {kernel.entry} takes {len(parameters)} arguments, {len(args)} given")
        for i, (arg, p) in enumerate(zip(args, parameters, strict=True)):
            if wrong := _mismatch(arg, p):
                raise TypeError(f"kernel {kernel.entry}: argument {i} is {wrong}")

    def _launch(
        self, kernel: Kernel, grid: tuple, block: tuple, args: Sequence[Arg], shared: int, overlap: bool
    ) -> None:
        entry: _Entry = kernel.handle
        slots = (ctypes.c_uint64 * len(args))(*[_slot(a) for a in args])
        base = ctypes.addressof(slots)
        pointers = (ctypes.c_void_p * len(args))(*range(base, base + 8 * len(args), 8))
        m = entry.module
        launch = _Launch(
            entry.call, m.shared_memory, m.shared_offset, m.shared_size, ctypes.addressof(pointers), entry.name,
            grid, block, shared,
        )  # fmt: skip
        if self._capturing is not None:
            self._capturing.append((launch, slots, pointers))
        else:
            self._run(launch, 1)

    def _run(self, launches: Any, count: int) -> None:
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        if self._runtime.cc_run(launches, count, self.threads, self.schedule, error, _ERROR_BYTES):
            raise DeviceError(error.value.decode(errors="replace"))

    def _record(self, fn: Callable[[], object]) -> Any:
        fn()
        launches = (_Launch * len(self._capturing))(*[launch for launch, _, _ in self._capturing])
        return launches, self._capturing  # the second keeps the frozen arguments alive

    def _replay(self, handle: Any) -> None:
        launches, _ = handle
        self._run(launches, len(launches))


def _dlopen(path: Path, mode: int) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=mode)
    except OSError as e:
        if "undefined symbol" in str(e):
            raise DeviceError(f"a kernel uses a function that is declared but not written: {e}") from e
        raise DeviceError(
            f"a compiled kernel can't be loaded: {e}; set KDTR_CACHE_DIR to a folder from which programs may run"
        ) from e


def _address(symbol: Any) -> int:
    return ctypes.cast(symbol, ctypes.c_void_p).value


def _slot(arg: Arg) -> int:
    if isinstance(arg, DeviceArray):
        return arg.ptr
    return 0 if arg is None else int.from_bytes(arg.tobytes(), "little")


_KINDS = {b"p": "a pointer", b"f": "a float", b"i": "an int", b"u": "an unsigned int", b"b": "a bool"}


def _mismatch(arg: Arg, p: _Parameter) -> str | None:
    """None, or what is wrong with the argument: kind, width, alignment, or the elements that it points to."""
    if arg is None:
        return None if p.kind == b"p" else f"None, where {_KINDS[p.kind]} of {p.size} bytes is wanted"
    if isinstance(arg, DeviceArray):
        if p.kind != b"p":
            return f"the array {arg.name}, where {_KINDS[p.kind]} of {p.size} bytes is wanted"
        if arg.ptr % p.to_align:
            return f"{arg.name} at an address that is not a multiple of {p.to_align}, as what it points to needs"
        if p.to_kind != b"s":
            floats = arg.dtype.kind == "f"
            if arg.dtype.itemsize != p.to_size or (arg.dtype.kind in "fiu" and floats != (p.to_kind == b"f")):
                wanted = f"a pointer to {_KINDS[p.to_kind]} of {p.to_size} bytes"
                return f"{arg.name} of {arg.dtype.name}, where {wanted} is wanted"
        return None
    if p.kind == b"p":
        return f"the number {arg!r}, where a pointer is wanted"
    kind = arg.dtype.kind.encode()
    if arg.dtype.itemsize != p.size or (kind == b"f") != (p.kind == b"f"):
        return f"{arg.dtype.name}, where {_KINDS[p.kind]} of {p.size} bytes is wanted"
    return None

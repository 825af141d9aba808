"""What `kdtr doctor` finds out about the installation and the machine: everything that a bug report needs.

The engine's side (compiler, devices, cache) stands in `doctor_engine`.
"""

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import kdtr_cli
from kdtr_cli.workflows import doctor_engine
from kdtr_cli.workflows.diagnosis import Diagnosis, Item, Probe, gather

__all__ = ["examine"]

#: Instruction sets that change which code numpy and the C++ compiler make or choose.
_FLAGS = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "asimd", "sve")

_OPTIONAL = {
    "ziglang": "a C++ compiler for the CPU device where there is no g++ or clang++",
    "cuda-bindings": "compiles kernels for GPUs without CuPy",
    "nvidia-cuda-nvrtc": "compiles kernels for GPUs (CUDA 13)",
    "nvidia-cuda-nvrtc-cu12": "compiles kernels for GPUs (CUDA 12)",
    "tiktoken": "reads Kimi's tiktoken.model",
    "jinja2": "chat templates, --chat",
}

#: Environment variables that change what kdtr, numpy, HDF5 or CUDA do; those that begin with KDTR_ or CUPY_ are added.
_VARIABLES = (
    *("CXX", "CUDA_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE", "MKL_NUM_THREADS", "HDF5_USE_FILE_LOCKING"),
    *("NO_COLOR", "FORCE_COLOR", "TERM", "LANG", "LC_ALL", "PYTHONPATH", "CI"),
)


def examine(more: Sequence[Probe] = ()) -> Diagnosis:
    """Look at everything. `more`: probes of the caller's, put before the environment's. Never raises."""
    devices = {"cpu": False, "gpu": False}
    probes = (
        Probe("kdtr", _kdtr),
        Probe("machine", _machine),
        Probe("numpy", _numpy),
        Probe("libraries", _libraries),
        Probe("C++ compiler", doctor_engine.compiler),
        Probe("CPU device", lambda: doctor_engine.cpu_device(devices)),
        Probe("GPU device", lambda: doctor_engine.gpu_device(devices)),
        Probe("kernel compiler (NVRTC)", doctor_engine.nvrtc),
        Probe("compile cache", doctor_engine.cache),
        *more,
        Probe("environment", _environment),
    )
    return Diagnosis(gather(probes), devices)


def _kdtr() -> Iterator[Item]:
    yield Item("version", "note", kdtr_cli.__version__)
    try:
        installed = importlib.metadata.version("kdtr")
    except importlib.metadata.PackageNotFoundError:
        yield Item("installed", "note", "no: runs from its source folder")
    else:
        same = installed == kdtr_cli.__version__
        remedy = "" if same else "two versions are mixed: install kdtr again"
        yield Item("installed", "ok" if same else "failed", installed, remedy)
    yield Item("folder", "note", str(Path(kdtr_cli.__file__).parent))
    yield Item("python", "note", f"{platform.python_version()} ({platform.python_implementation()}) {sys.executable}")
    kernels = sorted((Path(kdtr_cli.__file__).parents[1] / "kernels_cu").glob("*.cu"))
    remedy = "" if kernels else "the installation is incomplete: install kdtr again"
    yield Item("kernels", "ok" if kernels else "failed", f"{len(kernels)} .cu files", remedy)


def _machine() -> Iterator[Item]:
    yield Item("platform", "note", platform.platform())
    model, flags = _cpu()
    yield Item("CPU", "note", f"{model or platform.processor() or 'unknown'} ({platform.machine()})")
    yield Item("instruction sets", "note", " ".join(f for f in _FLAGS if f in flags) or "unknown")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Item("cores", "note", f"{usable} usable of {os.cpu_count()}")
    yield Item("memory", "note", _memory())


def _cpu() -> tuple[str, frozenset[str]]:
    """Model name and instruction sets as Linux tells them ('flags' on x86-64, 'Features' on aarch64)."""
    model, flags = "", frozenset[str]()
    for line in _lines("/proc/cpuinfo"):
        key, _, value = (part.strip() for part in line.partition(":"))
        if key in ("model name", "Model") and not model:
            model = value
        elif key in ("flags", "Features") and not flags:
            flags = frozenset(value.split())
    return model, flags


def _memory() -> str:
    """Total and available memory, and the limit of the control group where there is one."""
    fields = {}
    for line in _lines("/proc/meminfo"):
        key, _, value = line.partition(":")
        if value.strip().endswith(" kB"):
            fields[key] = int(value.split()[0]) * 1024
    text = "unknown"
    if "MemTotal" in fields:
        text = f"{_gib(fields['MemTotal'])}, {_gib(fields.get('MemAvailable', 0))} available"
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = next(iter(_lines(path)), "").strip()
        if limit.isdigit() and int(limit) < fields.get("MemTotal", 1 << 62):
            text += f", limited to {_gib(int(limit))} by the control group"
    return text


def _numpy() -> Iterator[Item]:
    import numpy as np

    yield Item("version", "note", np.__version__)
    built = np.show_config(mode="dicts")
    blas = built.get("Build Dependencies", {}).get("blas", {})
    yield Item("BLAS", "note", f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip())
    simd = built.get("SIMD Extensions", {})
    yield Item("SIMD", "note", " ".join([*simd.get("baseline", []), *simd.get("found", [])]) or "unknown")
    # Rules 1 of the numerics contract: subnormals are kept, and rounding is to nearest even.
    kept = np.float32(2.0**-126) / np.float32(2) != 0  # false where results are flushed, or operands taken for zero
    remedy = "some library has switched flush-to-zero on for this process: find it and load it without -ffast-math"
    yield Item("subnormals", "ok" if kept else "failed", "kept" if kept else "flushed to zero", "" if kept else remedy)
    half_ulp = np.array([2.0**-24, 3 * 2.0**-24], np.float32)
    nearest = ((np.float32(1) + half_ulp) == np.array([1, 1 + 2.0**-22], np.float32)).all()
    remedy = "" if nearest else "the process runs in another rounding mode: find the library that changed it"
    yield Item("rounding", "ok" if nearest else "failed", "nearest even" if nearest else "other", remedy)


def _libraries() -> Iterator[Item]:
    for name in _required():
        try:
            yield Item(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Item(name, "missing", "not installed", f"pip install {name}")
    try:
        import h5py

        yield Item("HDF5", "note", h5py.version.hdf5_version)
    except ImportError as error:
        yield Item("HDF5", "failed", str(error), "pip install --force-reinstall h5py")
    for name, purpose in _OPTIONAL.items():
        try:
            yield Item(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Item(name, "note", f"not installed (optional: {purpose})")


def _required() -> list[str]:
    """The names of kdtr's own requirements; those known here where it runs from its source folder."""
    try:
        lines = importlib.metadata.requires("kdtr") or []
    except importlib.metadata.PackageNotFoundError:
        lines = ["click", "h5py", "ml-dtypes", "numpy", "rich", "safetensors", "tokenizers"]
    found = [re.match(r"[\w.-]+", line) for line in lines if "extra ==" not in line]
    return sorted(name[0] for name in found if name)


def _environment() -> Iterator[Item]:
    named = [n for n in os.environ if n.startswith(("KDTR_", "CUPY_"))]
    values = [(n, os.environ[n]) for n in (*_VARIABLES, *sorted(named)) if n in os.environ]
    for name, value in values:
        yield Item(name, "note", value if value else "(set, but empty)")
    if not values:
        yield Item("variables", "note", "none that matter are set")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux, or not readable here
        return []


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

"""The engine's side of `kdtr doctor`: compilers, devices and the compile cache.

A device counts as working when a kernel of the engine, compiled here and run there, gives the bits of NumPy. The
engine is imported by each probe, so that one module that can't be imported is one line of the page.
"""

import importlib.metadata
import shutil
import subprocess
from collections.abc import Iterator

from kdtr_cli.errors import KdtrError
from kdtr_cli.workflows.diagnosis import Item

__all__ = ["cache", "compiler", "cpu_device", "gpu_device", "nvrtc"]

_QUERY = "name,compute_cap,memory.total,memory.free,driver_version,compute_mode"


def compiler() -> Iterator[Item]:
    """The C++ compiler of the CPU device."""
    from kdtr_cli.engine.host_compiler import find_compiler

    try:
        found = find_compiler()
    except KdtrError as error:
        yield Item("C++ compiler", "missing", "none that works", str(error))
        return
    yield Item("C++ compiler", "ok", found.version)
    yield Item("command", "note", " ".join(found.command))
    yield Item("options", "note", " ".join(found.options))


def cpu_device(devices: dict[str, bool]) -> Iterator[Item]:
    """Sets devices["cpu"]: whether a kernel compiled here gives NumPy's bits."""
    yield from _check("cpu", devices)


def gpu_device(devices: dict[str, bool]) -> Iterator[Item]:
    """Sets devices["gpu"]. What `nvidia-smi` says stands beside, for it works without CuPy too."""
    packages = [d for d in ("cupy", "cupy-cuda12x", "cupy-cuda13x") if _version(d)]
    for name in packages:
        yield Item(name, "note", _version(name) or "")
    if len(packages) > 1:
        remedy = f"they overwrite each other: pip uninstall -y {' '.join(packages)}, then install one"
        yield Item("CuPy", "failed", f"{len(packages)} packages of it are installed", remedy)
    elif not packages:
        yield Item("CuPy", "note", "not installed (optional: runs the engine on a GPU)")
    yield from _nvidia_smi()
    from kdtr_cli.engine.devices.gpu import gpu_missing

    lacking = gpu_missing()
    if lacking:
        yield Item("self-check", "missing", lacking, "the CPU device runs everything, only slower")
        return
    yield from _check("gpu", devices)


def nvrtc() -> Iterator[Item]:
    """The compiler for GPUs, which needs none to work."""
    from kdtr_cli.engine import compile as gpu_compiler

    try:
        yield Item("version", "ok", gpu_compiler.nvrtc_version())
    except KdtrError as error:
        yield Item("version", "missing", "none", str(error))
        return
    known = gpu_compiler.nvrtc_architectures()
    yield Item("architectures", "note", " ".join(f"sm_{number}" for number in known))
    arch = "sm_90" if 90 in known else f"sm_{known[-1]}"
    try:
        size = len(gpu_compiler.compile_cubin(gpu_compiler.source_text("rmsnorm.cu"), arch))
    except KdtrError as error:
        yield Item("self-check", "failed", str(error), "install the NVRTC wheel of your CUDA version again")
    else:
        yield Item("self-check", "ok", f"rmsnorm.cu compiles for {arch} ({size} bytes)")


def cache() -> Iterator[Item]:
    """Where compiled kernels are kept, how much there is, and whether the folder is safe to use."""
    from kdtr_cli.engine.compile_cache import cache_folder, open_cache

    folder = cache_folder()
    try:
        opened = open_cache()
    except KdtrError as error:
        yield Item("folder", "failed", str(folder), str(error))
        return
    if opened.note:
        yield Item("folder", "missing", str(folder), opened.note)
    else:
        mode = opened.folder.stat().st_mode & 0o777
        yield Item("folder", "ok", f"{opened.folder} (mode {mode:04o}, yours, nobody else may write)")
    stats = opened.stats()
    yield Item("entries", "note", f"{stats.entries} ({stats.bytes} bytes)")


def _check(kind: str, devices: dict[str, bool]) -> Iterator[Item]:
    from kdtr_cli.engine.devices import open_device

    try:
        with open_device(kind) as device:
            for name, value in device.describe().items():
                yield Item(name, "note", value)
            for note in device.notes:
                yield Item("note", "note", note)
            different = _different_bits(device)
    except KdtrError as error:
        yield Item("self-check", "failed", "does not run", str(error))
        return
    devices[kind] = not different
    if different:
        remedy = "please report this page; results of this device can't be trusted"
        yield Item("self-check", "failed", f"rmsnorm differs from NumPy in {different} elements", remedy)
    else:
        yield Item("self-check", "ok", "rmsnorm gives NumPy's bits")


def _different_bits(device) -> int:
    """Elements of a kernel's result that are not NumPy's to the bit. The rows: ordinary values, values of very
    different size, and subnormals, which a device that flushes them to zero would get wrong."""
    import numpy as np

    from kdtr_cli.engine.launch import Launcher
    from kdtr_cli.reference import arith

    n, eps = 300, np.float32(1e-6)
    k = np.arange(n, dtype=np.float64)
    rows = [np.sin(k), (-1.0) ** k * 2.0 ** (k % 40 - 20), np.full(n, 2.0**-140) * (k + 1)]
    x = np.array(rows, np.float32)
    weight = np.array(1 + np.cos(k) / 3, np.float32)
    arrays = {"x": device.upload("x", x), "weight": device.upload("weight", weight)}
    y = device.alloc("y", x.shape, np.float32)
    Launcher(device)("rmsnorm", rows=len(rows), n=n, eps=eps, x_row=n, y_row=n, y=y, **arrays)
    result = device.read(y)
    device.check_guards()
    wanted = arith.rms_norm(x, weight, eps)
    return int((result.view(np.uint32) != wanted.view(np.uint32)).sum())


def _nvidia_smi() -> Iterator[Item]:
    if not shutil.which("nvidia-smi"):
        yield Item("nvidia-smi", "note", "not found")
        return
    try:
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Item(
            "nvidia-smi", "failed", str(error), "the NVIDIA driver does not answer: restart the machine or its driver"
        )
        return
    if done.returncode:
        said = (done.stdout + done.stderr).strip() or f"exit code {done.returncode}"
        yield Item(
            "nvidia-smi", "failed", said, "the NVIDIA driver does not work: install it again or restart the machine"
        )
        return
    for number, line in enumerate(done.stdout.strip().splitlines()):
        values = zip(_QUERY.split(","), (part.strip() for part in line.split(",")), strict=False)
        yield Item(f"GPU {number}", "note", ", ".join(f"{name} {value}" for name, value in values))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

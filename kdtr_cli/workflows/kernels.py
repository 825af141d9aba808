"""`kdtr kernels`: every kernel of the table compiled for every architecture, and tested against its NumPy twin.

Tier exact must have the twin's bits; a kernel of another tier rounds in its own order and must come as close as the
table says.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from kdtr_cli.engine.compile import PtxViolation, check_ptx, compile_both, nvrtc_architectures, source_text
from kdtr_cli.engine.devices import Device
from kdtr_cli.engine.kernel_cases import Case, cases
from kdtr_cli.engine.kernels import KERNELS, Arg, Kernel, sources
from kdtr_cli.engine.launch import Launcher
from kdtr_cli.errors import InputError
from kdtr_cli.reference.twins import TWINS

__all__ = ["ARCHITECTURES", "CaseResult", "Compiled", "check_kernels", "compile_kernels", "select_kernels"]

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")  #: what must compile; sm_90 is measured


@dataclass(frozen=True)
class CaseResult:
    """One case of one kernel: how many elements of its arrays differ from the twin's, of how many."""

    kernel: str
    label: str
    differing: int
    compared: int
    first: str | None  #: name[index]: got, wanted


@dataclass(frozen=True)
class Compiled:
    """One source file for one architecture: the size of its code, and what breaks the numerics contract in its PTX."""

    file: str
    arch: str
    cubin_bytes: int
    violations: tuple[PtxViolation, ...]


def select_kernels(names: tuple[str, ...]) -> list[Kernel]:
    """Kernels by name, all for none; InputError for a name that is not in the table."""
    for name in names:
        if name not in KERNELS:
            raise InputError(f"no kernel named {name!r}; 'kdtr kernels list' shows all")
    return [KERNELS[n] for n in names] if names else list(KERNELS.values())


def compile_kernels(archs: tuple[str, ...] = ARCHITECTURES) -> Iterator[Compiled]:
    """Compile every file of the table for each architecture with NVRTC (no GPU needed) and check its PTX (rule 1)."""
    known = [f"sm_{n}" for n in nvrtc_architectures()]
    for arch in archs:
        if arch not in known:
            raise InputError(f"--arch {arch}: this NVRTC compiles for {', '.join(known)}")
    for file in sources():
        text = source_text(file)
        tiers = {k.tier for k in KERNELS.values() if k.file == file}
        for arch in archs:
            cubin, ptx = compile_both(text, arch)
            yield Compiled(file, arch, len(cubin), tuple(check_ptx(ptx)) if tiers <= {"exact"} else ())


def check_kernels(device: Device, kernels: list[Kernel], seed: int = 0) -> Iterator[CaseResult]:
    """Run every case of these kernels on a device and compare whole buffers with the NumPy twins.

    Bit for bit in tier exact, else as close as the table says. Kernels for a GPU alone are left out elsewhere.
    """
    kernels = [k for k in kernels if device.kind == "gpu" or not k.gpu_only]
    launch = Launcher(device)
    launch.load([k.name for k in kernels])
    for kernel in kernels:
        for case in cases(kernel.name, seed):
            yield _run_case(device, launch, kernel, case)
            device.check_guards()
            device.free_all()


def _run_case(device: Device, launch: Launcher, kernel: Kernel, case: Case) -> CaseResult:
    wanted = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in case.values.items()}
    with np.errstate(all="ignore"):
        TWINS[kernel.twin](**wanted)
    values: dict[str, Any] = dict(case.values)
    placed = [a for a in kernel.arrays() if values[a.name] is not None]
    for arg in placed:
        values[arg.name] = device.upload(arg.name, case.values[arg.name])
    launch(kernel.name, **values)
    differing, compared, first = 0, 0, None
    for arg in placed:
        # inputs are compared too: a kernel must not write to them
        got = device.read(values[arg.name])
        wrong = _differing(got, wanted[arg.name])
        if kernel.tolerance and arg.role != "in" and arg.dtype in _ROUNDED:
            wrong &= ~_close(arg, got, wanted[arg.name], kernel.tolerance)
        compared += got.size
        differing += int(wrong.sum())
        if first is None and wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            first = f"{arg.name}{list(at)}: {got[at]!r}, wanted {wanted[arg.name][at]!r}"
    return CaseResult(kernel.name, case.label, differing, compared, first)


def _differing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays differ in bits; NaN equals NaN, as sign and payload are outside the contract (rule 2)."""
    bits = f"u{a.itemsize}"
    wrong = a.view(bits) != b.view(bits)
    if a.dtype.kind == "f":
        wrong &= ~(np.isnan(a) & np.isnan(b))
    return wrong


#: dtypes that a tolerance is for → NumPy's, and one step of it
_ROUNDED = {"f32": (np.dtype(np.float32), 0.0), "bf16": (np.dtype(ml_dtypes.bfloat16), 2.0**-7)}


def _close(arg: Arg, got: np.ndarray, wanted: np.ndarray, tolerance: float) -> np.ndarray:
    """Where a value that was written is as near to the one wanted as the table asks: `tolerance` times its largest
    finite one. Of a narrow dtype one value in eight may also be a step away, where its sum lay between two."""
    dtype, step = _ROUNDED[arg.dtype]
    a, b = (v.view(dtype).astype(np.float64) for v in (got, wanted))
    written = (got.view(np.uint8).reshape(*got.shape, -1) != 0xFF).any(-1)
    with np.errstate(invalid="ignore"):
        largest = np.max(np.abs(b), axis=-1, keepdims=True, initial=0.0, where=np.isfinite(b))
        near = np.abs(a - b) <= tolerance * largest
        stepped = (np.abs(a - b) <= tolerance * largest + step * np.abs(b)) & (got != wanted)
    if step and stepped.sum() <= max(2, got.size // 8):
        near |= stepped
    return written & (near | (np.isnan(a) & np.isnan(b)))

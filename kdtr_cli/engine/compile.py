"""Kernel sources and the GPU compiler: expanding includes, NVRTC, and the check of its PTX against the contract.

NVRTC (``cuda.bindings``) needs no GPU and no driver, so every kernel is compiled for every architecture in CI. The CPU
device's compiler stands in ``host_compiler``.
"""

import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType

from kdtr_cli.errors import DeviceError

__all__ = [
    "KERNELS_AS_THEY_ARE",
    "NVRTC_OPTIONS",
    "CompileError",
    "PtxViolation",
    "check_ptx",
    "compile_both",
    "compile_cubin",
    "compile_ptx",
    "first_error",
    "nvrtc_architectures",
    "nvrtc_version",
    "source_text",
]

#: Numerics rule 1: every operation rounded by itself, subnormals kept, division and square root exact.
NVRTC_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

#: No kernel file is replaced: what a device compiles unless it is told otherwise.
KERNELS_AS_THEY_ARE: Mapping[str, str] = MappingProxyType({})

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$')
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b[^\n]*$")
_HOST_ERROR = re.compile(r"^([^\s:][^:\n]*):(\d+)(?::\d+)?: (?:fatal )?error: (.+)$", re.M)
_NVRTC_ERROR = re.compile(r"^([^\n(]+)\((\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (.+)$", re.M)


class CompileError(DeviceError):
    """A kernel does not compile. The message is the first error's line; ``log`` is all that the compiler said."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class PtxViolation:
    """An instruction that the contract forbids: ``line`` counts from 1 in the PTX text."""

    line: int
    instruction: str
    reason: str

    def __str__(self) -> str:
        return f"PTX line {self.line}: {self.instruction}: {self.reason}"


# ---- sources ---------------------------------------------------------------------------------------------------------


def source_text(file: str | Path, replaced: Mapping[str, str] = KERNELS_AS_THEY_ARE) -> str:
    """The text of a kernel file, every ``#include "…"`` expanded once, with ``#line`` so that errors name their file.

    file: a name inside ``kernels_cu`` ("rmsnorm.cu", "cpu/cuda_on_cpu.h"), or a Path to a file elsewhere. Included
    files are looked for beside the including one, then in ``kernels_cu``. ``#include <…>`` is left alone. DeviceError
    names a file that is missing and the line that wanted it.

    replaced: expanded texts that are given for the files of ``kernels_cu`` of these names, in place of their own.
    """
    if isinstance(file, str) and file in replaced:
        return replaced[file]
    kernels = importlib.resources.files("kernels_cu")
    if isinstance(file, Path):
        return _expand(file.name, file, [file.parent, kernels], set(), None)
    return _expand(file, kernels.joinpath(file), [kernels], set(), None)


def _expand(name: str, file: Traversable, roots: list[Traversable], seen: set[str], wanted_by: str | None) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        where = f" (included by {wanted_by})" if wanted_by else ""
        raise DeviceError(f"kernel source {name}{where} can't be read: {getattr(e, 'strerror', None) or e}") from e
    seen.add(name)
    folder = name.rpartition("/")[0]
    out = [f'#line 1 "{name}"']
    for number, line in enumerate(text.split("\n"), 1):
        if _ONCE.match(line):
            out.append("")  # every file is expanded once anyway
        elif found := _INCLUDE.match(line):
            wanted = found[1]
            beside = f"{folder}/{wanted}" if folder else wanted
            candidates = [(n, root.joinpath(n)) for root in roots for n in dict.fromkeys((beside, wanted))]
            inner, path = next(((n, p) for n, p in candidates if p.is_file()), candidates[-1])
            if inner not in seen:
                out.append(_expand(inner, path, roots, seen, f"{name}:{number}").removesuffix("\n"))
            out.append(f'#line {number + 1} "{name}"')
        else:
            out.append(line)
    return "\n".join(out)


def first_error(log: str) -> tuple[str, str] | None:
    """(file:line, message) of the first error in a compiler's log (g++, clang++ or NVRTC); None if there is none."""
    m = _HOST_ERROR.search(log) or _NVRTC_ERROR.search(log)
    return (f"{m[1]}:{m[2]}", " ".join(m[3].split())) if m else None


# ---- NVRTC -----------------------------------------------------------------------------------------------------------


def compile_cubin(text: str, arch: str) -> bytes:
    """Machine code of expanded source ``text`` for one architecture ("sm_90"). CompileError: a fault in the source."""
    return _compile(text, arch, "CUBIN")[0]


def compile_ptx(text: str, arch: str) -> str:
    """PTX of expanded source ``text`` for one architecture ("sm_90" or "compute_90")."""
    return _compile(text, arch.replace("sm_", "compute_"), "PTX")[0].rstrip(b"\0").decode()


def compile_both(text: str, arch: str) -> tuple[bytes, str]:
    """Machine code and the PTX it was made of, by one compilation for one architecture ("sm_90")."""
    cubin, ptx = _compile(text, arch, "CUBIN", "PTX")
    return cubin, ptx.rstrip(b"\0").decode()


def nvrtc_version() -> str:
    """The version of the NVRTC library, such as "13.0"; DeviceError if there is none."""
    nvrtc = _nvrtc()
    return ".".join(str(v) for v in _call(nvrtc, nvrtc.nvrtcVersion()))


def nvrtc_architectures() -> tuple[int, ...]:
    """The architectures that this NVRTC can compile for, ascending, such as (75, 80, …, 120)."""
    nvrtc = _nvrtc()
    return tuple(sorted(_call(nvrtc, nvrtc.nvrtcGetSupportedArchs())[-1]))


def _nvrtc():
    try:
        from cuda.bindings import nvrtc
    except ImportError as e:
        raise DeviceError(
            "compiling for a GPU needs cuda-bindings: pip install 'kdtr[cuda13]' (or 'kdtr[cuda12]')"
        ) from e
    try:
        nvrtc.nvrtcVersion()
    except Exception as e:  # cuda-bindings raises various kinds when the shared library is not to be found
        raise DeviceError(
            "compiling for a GPU needs the NVRTC library: pip install 'kdtr[cuda13]' (or 'kdtr[cuda12]')"
        ) from e
    return nvrtc


def _call(nvrtc, result: tuple) -> tuple:
    if int(result[0]) != 0:
        raise DeviceError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(result[0])[1].decode()}")
    return result[1:]


def _compile(text: str, arch: str, *forms: str) -> list[bytes]:
    nvrtc = _nvrtc()
    (program,) = _call(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], []))
    try:
        options = [o.encode() for o in (*NVRTC_OPTIONS, f"-arch={arch}")]
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status[0]) != 0:
            (size,) = _call(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
            log = b" " * size
            _call(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            raise _error(
                log.rstrip(b"\0 ").decode(errors="replace"), arch, str(nvrtc.nvrtcGetErrorString(status[0])[1], "ascii")
            )
        made = []
        for form in forms:
            (size,) = _call(nvrtc, getattr(nvrtc, f"nvrtcGet{form}Size")(program))
            made.append(b" " * size)
            _call(nvrtc, getattr(nvrtc, f"nvrtcGet{form}")(program, made[-1]))
        return made
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _error(log: str, arch: str, status: str) -> CompileError:
    if found := first_error(log):
        return CompileError(f"{found[0]}: {found[1]} (NVRTC, {arch})", log)
    first = next((line for line in log.splitlines() if line.strip()), status)
    return CompileError(f"NVRTC can't compile for {arch}: {first}", log)


# ---- the contract's check --------------------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_:]+)*)(?=[\s;])")
_TYPE = re.compile(r"[busf]\d+(x\d)?|bf16(x2)?|tf32")
_FLOAT = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64", "tf32"))
_ROUNDED = frozenset(("add", "sub", "mul", "div", "sqrt", "rcp"))
_REASONS = {
    "ftz": "flushes subnormals to zero",
    "approx": "is an approximation",
    "full": "is a division of limited accuracy",
    "sat": "clamps, and takes NaN to 0",
}


def check_ptx(ptx: str) -> list[PtxViolation]:
    """Every instruction of the PTX that numerics rules 1 and 2 forbid.

    add, sub, mul, div, sqrt and rcp on floats must round to nearest even (``.rn``); fused multiply-adds, ``.ftz``,
    ``.approx``, ``.full``, ``.sat`` and float atomics are refused; so are min and max on floats, which lose NaN.
    """
    found = []
    for number, line in enumerate(ptx.splitlines(), 1):
        text = line.partition("//")[0]
        match = _INSTRUCTION.match(text)
        if not match:
            continue
        name, *modifiers = match[1].split(".")
        is_float = not _FLOAT.isdisjoint(modifiers)
        reason = None
        if is_float and name in ("fma", "mad"):
            reason = "is fused: one rounding for a product and a sum (rule 1)"
        elif is_float and name in ("atom", "red") and not {"exch", "cas"}.intersection(modifiers):
            reason = "is a float atomic: its order of additions is not fixed (rule 1)"
        elif is_float and name in ("min", "max"):
            reason = "drops NaN: write x < c ? c : x (rule 2)"
        elif bad := next((m for m in modifiers if m in _REASONS), None):
            # .sat on integers is exact; a conversion is one to floats if the first of its types is
            types = [m for m in modifiers if _TYPE.fullmatch(m)]
            if bad != "sat" or (types and types[0] in _FLOAT):
                reason = f"{_REASONS[bad]} (rule 1)"
        elif is_float and name in _ROUNDED and "rn" not in modifiers:
            reason = "does not say .rn (rule 1)"
        if reason:
            found.append(PtxViolation(number, match[1], reason))
    return found

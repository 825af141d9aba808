"""The C++ compiler of this machine, and how it makes a library of a kernel file for the CPU device.

A kernel file goes through the preprocessor first, together with ``kernels_cu/cpu/cuda_on_cpu.h``. In what comes out
every kernel, whatever macro made it, carries a mark; one registration a kernel is added and the text is compiled
against the declarations of the runtime, whose own library is built once. No header of the system and none of NVIDIA's
is read, so a file takes little more than the time of its own code.
"""

import functools
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kdtr_cli.engine.compile import KERNELS_AS_THEY_ARE, CompileError, first_error, source_text
from kdtr_cli.errors import DeviceError

__all__ = [
    "HostCompiler",
    "builder_text",
    "compile_kernels",
    "compile_runtime",
    "cpu_target",
    "find_compiler",
    "kernel_text",
]

#: Numerics rule 1: no fusing of a product and a sum, no fast-math. -fno-math-errno and -fno-trapping-math change no
#: value: they say that nobody reads errno or the floating-point exception flags, so that sqrtf is one instruction and
#: x < c ? c : x one blend.
_EXACT = ("-O2", "-std=gnu++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
#: GNU only: vectorise the dot products' accumulators too (1.3 to 1.7 times as fast; clang does it unasked). Each lane's
#: own order of operations stays.
_GNU = ("-fvect-cost-model=dynamic",)
_LIBRARY = ("-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
_NO_CXX_LIBRARY = ("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics")
#: A fibre's stack is 64 KiB: a larger frame is refused at compile time instead of overrunning it.
_FRAME_GNU = ("-Werror=frame-larger-than=49152",)
_FRAME_CLANG = ("-Wframe-larger-than=49152", "-Werror=frame-larger-than")

_DYNAMIC_SHARED = re.compile(
    r"extern\s+(?:alignas\s*\(\s*\d+\s*\)\s*)?__shared__\s+(?:(?:__align__|alignas)\s*\(\s*\d+\s*\)\s*)?"
    r"([\w:\s]+?)\s+(\w+)\s*\[\s*\]\s*;"
)
_LINE_MARK = r"(?:\s|^[ \t]*#[^\n]*$)"
_KERNEL = re.compile(
    rf'extern{_LINE_MARK}+"C"{_LINE_MARK}+__attribute__\(\(__used__\)\){_LINE_MARK}+void{_LINE_MARK}+(\w+){_LINE_MARK}*\(',
    re.M,
)
#: What an x86-64-v3 processor has beyond the baseline, as /proc/cpuinfo spells it.
_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler that answered.

    command: how to call it. version: the first line of its --version. gnu: it is of the GNU collection. target: -march.
    """

    command: tuple[str, ...]
    version: str
    gnu: bool
    target: str

    @property
    def options(self) -> tuple[str, ...]:
        """Everything but the file names: part of the cache key."""
        march = () if self.target == "default" else (f"-march={self.target}",)
        own = (*_GNU, *_FRAME_GNU) if self.gnu else _FRAME_CLANG
        return (*_EXACT, *march, *_LIBRARY, *_NO_CXX_LIBRARY, *own)

    @property
    def description(self) -> str:
        """Compiler and target in one line, without a path: for the bundle's manifest."""
        return f"{self.version}, {' '.join(_EXACT)}, {self.target}"


def cpu_target() -> str:
    """What to compile for: x86-64-v3 where the processor has it, else x86-64; "default" on aarch64; or DeviceError."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        raise DeviceError(
            f"the CPU device runs on Linux x86-64 and aarch64, not on {sys.platform} {machine}; "
            "use such a machine, or --device gpu"
        )
    if machine == "aarch64":
        return "default"
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "x86-64"
    found = re.search(r"^flags\s*:(.*)$", text, re.M)
    return "x86-64-v3" if found and _V3.issubset(found[1].split()) else "x86-64"


def find_compiler() -> HostCompiler:
    """$CXX, else g++, else clang++, else the compiler in the PyPI package ziglang. DeviceError says what to install.

    A CXX that does not work is an error, not a reason to take another.
    """
    return _find(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.lru_cache
def _find(cxx: str, path: str) -> HostCompiler:
    target = cpu_target()
    if cxx.strip():
        try:
            command = tuple(shlex.split(cxx))
        except ValueError:
            command = (cxx,)
        if found := _ask(command, target):
            return found
        raise DeviceError(f"CXX={cxx} does not run as a C++ compiler; unset CXX or name one, such as CXX=g++")
    for name in ("g++", "clang++"):
        if shutil.which(name, path=path) and (found := _ask((name,), target)):
            return found
    # as a C compiler that is told its input is C++: so it does not build a C++ library first, which takes a minute
    if importlib.util.find_spec("ziglang") and (found := _ask((sys.executable, "-m", "ziglang", "cc"), target)):
        return replace(found, version=f"zig {found.version}")
    raise DeviceError(
        "the CPU device needs a C++ compiler and found none: install g++ (apt install g++), "
        "or set CXX, or run: pip install ziglang"
    )


def _ask(command: tuple[str, ...], target: str) -> HostCompiler | None:
    """The compiler behind a command, by its --version; None if it does not answer."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return None
    if any(os.path.basename(word) in ("zig", "ziglang") for word in command):
        target = target.replace("-", "_")  # zig spells processors with underscores
    return HostCompiler(command, lines[0].strip(), "Free Software Foundation" in done.stdout, target)


# ---- building --------------------------------------------------------------------------------------------------------


def kernel_text(file: str | Path, replaced: Mapping[str, str] = KERNELS_AS_THEY_ARE) -> str:
    """A kernel file as the C++ compiler gets it: the CUDA names, then the file with its includes expanded.

    ``extern __shared__ T name[];`` becomes a pointer to the block's dynamic shared memory; lines keep their numbers.
    replaced: see source_text.
    """

    def pointer(m: re.Match) -> str:
        return f"CC_DYNAMIC_SHARED({m[1]}, {m[2]});" + "\n" * m[0].count("\n")

    return source_text("cpu/cuda_on_cpu.h") + "\n" + _DYNAMIC_SHARED.sub(pointer, source_text(file, replaced))


@functools.cache
def builder_text() -> str:
    """This module's own text: what it adds to a kernel is part of the result, and so of the cache key."""
    return Path(__file__).read_text(encoding="utf-8")


def compile_runtime(compiler: HostCompiler, text: str, name: str, defines: tuple[str, ...] = ()) -> bytes:
    """The runtime library (``kernels_cu/cpu/runtime.cpp``, expanded); its C++ names live in the namespace ``name``."""
    return _library(compiler, text, (f"-DCC_RUNTIME={name}", *defines))


def compile_kernels(compiler: HostCompiler, text: str, name: str) -> bytes:
    """A library of every kernel in ``text`` (see kernel_text), bound to the runtime called ``name``.

    CompileError names the first error's file and line, and a file without kernels.
    """
    defines = (f"-DCC_RUNTIME={name}",)
    plain = _run(compiler, (*defines, "-E", "-x", "c++", "-"), text)
    entries = list(dict.fromkeys(_KERNEL.findall(plain)))
    if not entries:
        raise CompileError(f'{_main_file(text)}: no kernel in it (extern "C" __global__ void name(...))', "")
    export = '__attribute__((visibility("default")))'
    registered = "".join(
        f"{export} void cc_call_{e}(void** a) {{ cc::call({e}, a); }}\n"
        f"{export} int cc_args_{e}(cc::Arg* out) {{ return cc::signature({e}, out); }}\n"
        for e in entries
    )
    names = f'{export} extern const char cc_kernels[] = "{" ".join(entries)}";\n'
    tail = '\n# 1 "registration"\nextern "C" {\n' + names + registered + "}\n"
    return _library(compiler, plain + tail, ())


def _main_file(text: str) -> str:
    names = re.findall(r'^#line 1 "([^"]+)"', text, re.M)
    return next((n for n in names if not n.startswith("cpu/")), "kernel source")


def _library(compiler: HostCompiler, text: str, defines: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="kdtr-build-") as folder:
        out = Path(folder) / "library.so"
        _run(compiler, (*defines, "-x", "c++", "-", "-o", str(out)), text)
        return out.read_bytes()


def _run(compiler: HostCompiler, arguments: tuple[str, ...], text: str) -> str:
    """Standard output of one call of the compiler; LC_ALL=C so that its errors can be read."""
    command = [*compiler.command, *compiler.options, *arguments]
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, encoding="utf-8", errors="replace",
            env={**os.environ, "LC_ALL": "C"}, check=False,
        )  # fmt: skip
    except OSError as e:
        raise DeviceError(f"the C++ compiler {compiler.command[0]} can't be run: {e.strerror}") from e
    if done.returncode == 0:
        return done.stdout
    log = done.stderr
    if found := first_error(log):
        raise CompileError(f"{found[0]}: {_plainly(found[1])}", log)
    first = next((line for line in log.splitlines() if line.strip()), f"exit status {done.returncode}")
    raise CompileError(f"{_main_file(text)}: the C++ compiler failed: {first.strip()}", log)


def _plainly(message: str) -> str:
    """A compiler's words for a call that the contract forbids, with the reason."""
    if "deleted function" not in message:
        return message
    name = re.search(r"(\w+)\(", message) or re.search(r"function '(\w+)'", message)
    called = name[1] if name else "this function"
    if "float_atomics_are_refused" in message or "atomic" in called:
        return f"{called} on floats is refused: the order of additions would not be fixed (numerics rule 1)"
    if called == "__activemask":
        return "__activemask is refused: its answer depends on the scheduler"
    instead = _INSTEAD.get(called.strip("_"), "write it in + - * / and sqrtf")
    return f"{called} is banned in tier exact (numerics rules 1 and 2): {instead}"


_INSTEAD = {
    **dict.fromkeys(("fminf", "fmaxf", "fmin", "fmax", "min", "max"), "it drops NaN, write x < c ? c : x"),
    **dict.fromkeys(("rsqrtf", "rsqrt", "frsqrt_rn"), "write 1.0f / sqrtf(x)"),
    **dict.fromkeys(("fmaf", "fma", "fmaf_rn", "fma_rn"), "write a * b + c, two rounded operations"),
    **dict.fromkeys(("expf", "exp", "logf", "log"), "take the contract's own from common.cuh"),
}

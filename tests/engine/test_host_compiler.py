"""Finding a C++ compiler and building kernels with it: which one, what it may not do, and how its errors are told."""

import os
import re
import shutil
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from kdtr_cli.engine import host_compiler
from kdtr_cli.engine.compile import CompileError
from kdtr_cli.engine.devices.cpu import CpuDevice
from kdtr_cli.engine.host_compiler import cpu_target, find_compiler, kernel_text
from kdtr_cli.errors import DeviceError

CU = Path(__file__).parent / "cu"
f32 = np.float32


@pytest.fixture(scope="module")
def device():
    with CpuDevice(threads=1) as d:
        yield d


@pytest.fixture
def build(device, tmp_path):
    """Compiles a text as my.cu and gives back a kernel of it."""

    def make(text, entry="k"):
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}" / "my.cu"
        file.parent.mkdir()
        file.write_text(text)
        return device.kernel(file, entry)

    return make


# ---- errors in kernels -----------------------------------------------------------------------------------------------


def test_a_compile_error_is_one_line_with_the_kernels_file_and_line_and_keeps_the_whole_log(build):
    text = (
        'extern "C" __global__ void k(float* x) {\n  extern __shared__\n    float s[];\n'
        "  x[0] = s[0] + nowhere;\n  also;\n}\n"
    )
    with pytest.raises(CompileError) as e:
        build(text)
    assert re.fullmatch(r"my\.cu:4: .*nowhere.*", str(e.value))
    assert e.value.exit_code == 3
    assert "also" in e.value.log
    assert "\n" in e.value.log


def test_an_error_in_an_included_file_names_that_file(build, tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "mine.cuh").write_text("\n\n__device__ int f() { return wrong; }\n")
    (tmp_path / "1" / "my.cu").write_text('#include "mine.cuh"\nextern "C" __global__ void k(int* x) { x[0] = f(); }\n')
    with CpuDevice(threads=1) as d, pytest.raises(CompileError, match=r"^mine\.cuh:3: .*wrong"):
        d.kernel(tmp_path / "1" / "my.cu", "k")


BANNED = {
    "expf(x[0])": "expf", "__expf(x[0])": "__expf", "logf(x[0])": "logf", "rsqrtf(x[0])": "rsqrtf",
    "fmaf(x[0], x[1], x[2])": "fmaf", "__fmaf_rn(x[0], x[1], x[2])": "__fmaf_rn", "fminf(x[0], x[1])": "fminf",
    "fmaxf(x[0], x[1])": "fmaxf", "max(x[0], x[1])": "max", "__fdividef(x[0], x[1])": "__fdividef",
    "sinf(x[0])": "sinf", "powf(x[0], x[1])": "powf", "tanhf(x[0])": "tanhf", "(float)exp((double)x[0])": "exp",
    "(float)fma((double)x[0], 1.0, 2.0)": "fma", "atomicAdd(x, x[1])": "atomicAdd",
    "(float)__activemask()": "__activemask",
}  # fmt: skip


@pytest.mark.parametrize("call", BANNED)
def test_what_the_contract_forbids_does_not_compile_and_is_named(build, call):
    with pytest.raises(CompileError) as e:
        build(f'extern "C" __global__ void k(float* x) {{\n  x[3] = {call};\n}}\n')
    message = str(e.value)
    assert message.startswith(f"my.cu:2: {BANNED[call]} ")
    assert re.search("banned in tier exact|is refused", message)


def test_the_remedy_for_a_banned_name_is_told(build):
    with pytest.raises(
        CompileError, match=r"rsqrtf is banned in tier exact \(numerics rules 1 and 2\): write 1\.0f / sqrtf"
    ):
        build('extern "C" __global__ void k(float* x) { x[0] = rsqrtf(x[1]); }\n')


def test_dynamic_shared_memory_outside_a_kernel_does_not_compile(build):
    with pytest.raises(CompileError, match=r"^my\.cu:1: "):
        build('extern __shared__ float s[];\nextern "C" __global__ void k(float* x) { x[0] = s[0]; }\n')


def test_a_frame_that_would_not_fit_a_fibres_stack_is_refused(build):
    text = (
        'extern "C" __global__ void k(float* x, int n) {{\n  float a[{}];\n'
        "  for (int i = 0; i < n; ++i) a[x[i] > 0] = x[i];\n  x[n] = a[n];\n}}\n"
    )
    build(text.format(8000))
    with pytest.raises(CompileError, match=r"^my\.cu:\d+: .*frame"):
        build(text.format(14000))


def test_inline_ptx_and_headers_of_cuda_do_not_compile(build):
    with pytest.raises(CompileError, match=r"my\.cu:1|stdin|Assembler|asm"):
        build('extern "C" __global__ void k(int* x) { asm("mov.u32 %0, %%laneid;" : "=r"(x[0])); }\n')
    with pytest.raises(CompileError, match=r"my\.cu:1: .*cuda_fp16"):
        build('#include <cuda_fp16.h>\nextern "C" __global__ void k(int* x) { }\n')


def test_a_function_that_is_nowhere_written_is_told_when_the_kernel_is_loaded(build):
    with pytest.raises(DeviceError, match=r"^a kernel uses a function that is declared but not written: .*elsewhere"):
        build('__device__ int elsewhere(int);\nextern "C" __global__ void k(int* x) { x[0] = elsewhere(x[1]); }\n')


def test_a_kernel_may_not_take_a_struct(build):
    with pytest.raises(CompileError, match="pointers and plain numbers"):
        build('struct P { int n; };\nextern "C" __global__ void k(int* x, P p) { x[0] = p.n; }\n')


def test_a_file_without_kernels_and_an_unknown_kernel_are_named(build):
    with pytest.raises(CompileError, match=r"^my\.cu: no kernel in it"):
        build("__device__ int f() { return 1; }\n")
    with pytest.raises(DeviceError, match=r"my\.cu has no kernel 'k'; it has one, two"):
        build('extern "C" __global__ void one(int* x) { }\nextern "C" __global__ void two(int* x) { }\n')


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_kernels_are_found_whatever_writes_them(build, device):
    text = """
    #define TWICE(N) extern "C" __global__ void __launch_bounds__(N) twice_##N(float* x)  \\
      { x[threadIdx.x] = x[threadIdx.x] * 2.0f; }
    extern "C" __global__ void later(float* x);
    // extern "C" __global__ void in_a_comment(float* x) { }
    #if 0
    extern "C" __global__ void switched_off(float* x) { }
    #endif
    template <int N> __device__ void plus(float* x) { x[threadIdx.x] = x[threadIdx.x] + N; }
    TWICE(32) TWICE(64)
    extern "C"
    __global__

    void
    #line 1 "other.cu"
    __launch_bounds__(64, 2) later(float* x) { plus<3>(x); }
    """
    kernel = build(text, "later")
    assert kernel.handle.module.entries == ("later", "twice_32", "twice_64")
    x = device.upload("x", np.arange(32, dtype=f32))
    device.launch(build(text, "twice_32"), 1, 32, [x])
    device.launch(kernel, 1, 32, [x])
    assert np.array_equal(device.read(x), 2 * np.arange(32) + 3)


def test_dynamic_shared_memory_may_be_declared_in_any_way_and_keeps_the_lines(build, device):
    for declaration in (
        "extern __shared__ float s[];",
        "extern __shared__ __align__(16) float s[];",
        "extern __shared__ alignas(16) float s[ ] ;",
        "extern alignas(16) __shared__ float s[];",
        "extern __shared__ unsigned char raw[];\n  float* s = (float*)raw;",
    ):
        kernel = build(
            f'extern "C" __global__ void k(float* x) {{\n  {declaration}\n'
            "  s[threadIdx.x] = 1.0f;\n  __syncthreads();\n"
            "  x[threadIdx.x] = s[31 - threadIdx.x] + __LINE__;\n}\n"
        )
        x = device.alloc("x", 32, f32)
        device.launch(kernel, 1, 32, [x], shared=128)
        assert (device.read(x) == 1 + 5 + declaration.count("\n")).all()


def test_static_shared_memory_may_be_aligned(build, device):
    kernel = build(
        'extern "C" __global__ void k(int* x) {\n  __shared__ char pad;\n  __shared__ __align__(16) float s[8];\n'
        "  alignas(16) __shared__ float t[8];\n  pad = 1;\n  x[0] = (int)(((size_t)s | (size_t)t) & 15);\n}\n"
    )
    x = device.alloc("x", 1, np.int32)
    device.launch(kernel, 1, 1, [x])
    assert device.read(x)[0] == 0


def test_the_text_for_the_compiler_holds_no_path_of_this_machine():
    text = kernel_text(CU / "reduction.cu")
    assert '#line 1 "reduction.cu"' in text
    assert '#line 1 "fold.cuh"' in text
    assert '#line 1 "cpu/fibres.h"' in text
    assert str(CU) not in text
    assert not re.search(r'^# *include *"', text, re.M)


def test_several_files_are_compiled_ahead_and_found_ready(monkeypatch):
    files = [CU / n for n in ("divergence.cu", "reduction.cu", "shared_memory.cu")]
    with CpuDevice(threads=1) as d:
        d.compile(files)
        monkeypatch.setattr(d, "_build", lambda file: pytest.fail("compiled again"))
        assert d.kernel(files[1], "best").file == "reduction.cu"
        assert d.kernel(files[2], "store_at").entry == "store_at"
        d.compile(files)


# ---- the contract, checked against the compiler ----------------------------------------------------------------------


@pytest.mark.skipif(cpu_target() != "x86-64-v3", reason="only a processor with fused instructions can fuse")
def test_a_compiler_that_fuses_is_found_out(monkeypatch, tmp_path):
    monkeypatch.setenv("KDTR_CACHE_DIR", str(tmp_path))
    fusing = tuple(o.replace("-ffp-contract=off", "-ffp-contract=fast") for o in host_compiler._EXACT)
    monkeypatch.setattr(host_compiler, "_EXACT", fusing)
    with CpuDevice(threads=1) as d, pytest.raises(DeviceError, match="fuses a \\* b \\+ c"):
        d.kernel(CU / "intrinsics.cu", "fill")


def test_the_options_never_allow_fast_arithmetic():
    options = find_compiler().options
    assert "-ffp-contract=off" in options
    assert not [o for o in options if "fast" in o or o in ("-Ofast", "-funsafe-math-optimizations", "-march=native")]


# ---- which compiler --------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No CXX, an empty PATH, no ziglang; ``fresh(name)`` puts a compiler that only answers --version on the PATH."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host_compiler.importlib.util, "find_spec", lambda name: None)
    host_compiler._find.cache_clear()

    def put(name, says="some compiler 1.0", code=0):
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        host_compiler._find.cache_clear()
        return str(file)

    yield put
    host_compiler._find.cache_clear()


def test_without_a_compiler_one_line_says_what_to_install(fresh):
    with pytest.raises(DeviceError) as e:
        find_compiler()
    assert str(e.value) == (
        "the CPU device needs a C++ compiler and found none: install g++ (apt install g++), "
        "or set CXX, or run: pip install ziglang"
    )


def test_gpp_goes_before_clang_and_cxx_before_both(fresh, monkeypatch):
    fresh("clang++", "clang version 99")
    assert find_compiler().version == "clang version 99"
    fresh("g++", "g++ (Some) 98.1")
    assert find_compiler().version == "g++ (Some) 98.1"
    other = fresh("other", "other 1")
    monkeypatch.setenv("CXX", f"{other} --flag")
    assert find_compiler().command == (other, "--flag")


def test_a_cxx_that_does_not_work_is_an_error_not_a_reason_to_take_another(fresh, monkeypatch):
    fresh("g++")
    broken = fresh("broken", code=1)
    for name in (broken, "/nowhere/c++", "unbalanced 'quote"):
        monkeypatch.setenv("CXX", name)
        with pytest.raises(DeviceError, match=r"CXX=.* does not run as a C\+\+ compiler"):
            find_compiler()


def test_ziglang_is_the_last_resort(fresh, monkeypatch):
    monkeypatch.setattr(host_compiler.importlib.util, "find_spec", lambda name: object() if name == "ziglang" else None)
    asked = []

    def ask(command, target):
        asked.append(command)
        return host_compiler.HostCompiler(command, "clang version 1", False, target)

    monkeypatch.setattr(host_compiler, "_ask", ask)
    found = find_compiler()
    assert asked == [(sys.executable, "-m", "ziglang", "cc")]
    assert found.version == "zig clang version 1"


def test_only_gnu_compilers_get_gnu_options(fresh):
    fresh("clang++", "clang version 14")
    assert not any(o.startswith("-fvect") for o in find_compiler().options)
    fresh("g++", "g++ 12\nCopyright (C) 2022 Free Software Foundation, Inc.")
    assert any(o.startswith("-fvect") for o in find_compiler().options)


def test_another_system_than_linux_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(host_compiler.sys, "platform", "darwin")
    monkeypatch.setattr(host_compiler.platform, "machine", lambda: "arm64")
    with pytest.raises(DeviceError, match=r"runs on Linux x86-64 and aarch64, not on darwin arm64; use"):
        cpu_target()


def test_a_processor_without_the_newer_instructions_gets_the_baseline(monkeypatch):
    monkeypatch.setattr(host_compiler.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(Path, "read_text", lambda self: "flags\t\t: fpu sse2 avx avx2 bmi1 fma\n")
    assert cpu_target() == "x86-64"


def test_a_device_on_the_baseline_has_the_same_bits(monkeypatch, tmp_path):
    x = np.random.default_rng(0).standard_normal((3, 1000)).astype(f32)
    got = []
    for target in (cpu_target(), "x86-64" if cpu_target() != "default" else "default"):
        monkeypatch.setattr(host_compiler, "cpu_target", lambda t=target: t)
        host_compiler._find.cache_clear()
        with CpuDevice(threads=1) as d:
            assert d.compiler.target.replace("_", "-") == target
            y = d.alloc("y", 3, f32)
            d.launch(d.kernel(CU / "reduction.cu", "block_sum"), 3, 128, [d.upload("x", x), y, np.int32(1000)])
            got.append(d.read(y).tobytes())
    host_compiler._find.cache_clear()
    assert got[0] == got[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clang++", f"{sys.executable} -m ziglang cc"])
def test_other_compilers_give_the_same_bits(name, monkeypatch, tmp_path):
    if not shutil.which(name) and not (name.endswith("cc") and host_compiler.importlib.util.find_spec("ziglang")):
        pytest.skip(f"{name} is not here")
    x = np.random.default_rng(0).standard_normal((3, 1000)).astype(f32)
    got = []
    for cxx in (os.environ.get("CXX", ""), name):
        monkeypatch.setenv("CXX", cxx)
        with CpuDevice(threads=1) as d:
            y = d.alloc("y", 3, f32)
            d.launch(d.kernel(CU / "reduction.cu", "block_sum"), 3, 128, [d.upload("x", x), y, np.int32(1000)])
            got.append(d.read(y).tobytes())
    assert got[0] == got[1]

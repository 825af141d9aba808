"""Kernel sources, NVRTC without a GPU, and the check of its PTX against the contract."""

import builtins
import re

import pytest

from kdtr_cli.engine import compile as kernels
from kdtr_cli.engine.compile import (
    NVRTC_OPTIONS,
    CompileError,
    check_ptx,
    compile_cubin,
    compile_ptx,
    first_error,
    nvrtc_architectures,
    nvrtc_version,
    source_text,
)
from kdtr_cli.errors import DeviceError

GOOD = """
extern "C" __global__ void good(const float* x, const double* d, float* y, int* n) {
  int i = threadIdx.x;
  float v = x[i] * x[i + 1] + x[i + 2];
  v = v / x[i + 3] + sqrtf(v) - 1.0f / x[i];
  v = v < -87.0f ? -87.0f : v;
  double e = d[i] * d[i + 1] + d[i] / d[i + 2] - sqrt(d[i]);
  atomicAdd(n, i);
  y[i] = v + (float)e + rintf(v) + fabsf(v) + (float)i;
}
"""


# ---- sources ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    def make(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def places(text):
    """Where each line that is no directive says it comes from."""
    out, file, number = {}, None, 0
    for line in text.split("\n"):
        if m := re.fullmatch(r'#line (\d+) "(.*)"', line):
            file, number = m[2], int(m[1])
        else:
            if line.strip():
                out[line] = f"{file}:{number}"
            number += 1
    return out


def test_includes_are_expanded_once_and_every_line_keeps_its_place(tree):
    folder = tree(
        main_cu='first\n#include "a.cuh"\nafter a\n  #  include "sub/b.cuh" // why\n#include "a.cuh"\nlast\n',
        a_cuh='#pragma once\nin a\n#include "sub/b.cuh"\nend of a\n',
        sub__b_cuh='in b\n#include "c.cuh"\n#include <cstdint>\nend of b',
        sub__c_cuh="in c\n",
    )
    text = source_text(folder / "main.cu")
    assert places(text) == {
        "first": "main.cu:1",
        "in a": "a.cuh:2",
        "in b": "sub/b.cuh:1",
        "in c": "sub/c.cuh:1",
        "#include <cstdint>": "sub/b.cuh:3",
        "end of b": "sub/b.cuh:4",
        "end of a": "a.cuh:4",
        "after a": "main.cu:3",
        "last": "main.cu:6",
    }
    assert text.count("in a") == text.count("in b") == text.count("in c") == 1
    assert str(folder) not in text


def test_files_that_include_each_other_end(tree):
    folder = tree(a_cu='#include "b.cuh"\na\n', b_cuh='#include "a.cu"\nb\n')
    assert list(places(source_text(folder / "a.cu"))) == ["b", "a"]


def test_a_file_of_ones_own_may_include_the_packages_headers(tree):
    folder = tree(mine_cu='#include "cpu/cuda_types.h"\nmine\n')
    got = places(source_text(folder / "mine.cu"))
    assert got["mine"] == "mine.cu:2"
    assert "cpu/cuda_types.h:1" in got.values()


def test_a_missing_file_is_named_with_the_line_that_wants_it(tree):
    folder = tree(main_cu='\n#include "gone.cuh"\n')
    with pytest.raises(
        DeviceError, match=r"^kernel source gone\.cuh \(included by main\.cu:2\) can't be read: No such file"
    ):
        source_text(folder / "main.cu")
    with pytest.raises(DeviceError, match=r"^kernel source nowhere\.cu can't be read"):
        source_text("nowhere.cu")
    (folder / "binary.cu").write_bytes(b"\xff\xfe")
    with pytest.raises(DeviceError, match=r"binary\.cu can't be read"):
        source_text(folder / "binary.cu")


@pytest.mark.parametrize(
    ("log", "place", "message"),
    [
        (
            "a.cu: In function 'void k()':\na.cu:3:5: error: 'z' was not declared\nb.h:1:1: error: x",
            "a.cu:3",
            "'z' was not declared",
        ),
        (
            "a.cu:9:1: warning: w\nfold.cuh:12:3: fatal error: gone.h: No such file\n",
            "fold.cuh:12",
            "gone.h: No such file",
        ),
        ("<stdin>:1:2: error: odd", "<stdin>:1", "odd"),
        ('r.cu(41): error: identifier "q" is undefined\n1 error detected', "r.cu:41", 'identifier "q" is undefined'),
        ("r.cu(4): warning #177-D: v\nr.cu(5): error #29: expected an\n  expression", "r.cu:5", "expected an"),
        ("r.cu(7): catastrophic error: cannot open source file", "r.cu:7", "cannot open source file"),
    ],
)
def test_the_first_error_is_found_in_any_compilers_log(log, place, message):
    assert first_error(log) == (place, message)


def test_a_log_without_an_error_has_no_first_error():
    assert first_error("a.cu:1:2: warning: w\nnote: error in nothing\n") is None


# ---- NVRTC -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_nvrtc_makes_machine_code_and_clean_ptx_without_a_gpu(arch):
    assert compile_cubin(GOOD, arch)[:4] == b"\x7fELF"
    ptx = compile_ptx(GOOD, arch)
    assert f".target {arch}" in ptx
    for instruction in ("mul.rn.f32", "add.rn.f32", "div.rn.f32", "sqrt.rn.f32", "div.rn.f64", "sqrt.rn.f64"):
        assert instruction in ptx
    assert check_ptx(ptx) == []


def test_the_same_source_gives_the_same_machine_code():
    assert compile_cubin(GOOD, "sm_90") == compile_cubin(GOOD, "sm_90")


def test_a_gpu_compile_error_is_one_line_with_file_and_line(tree):
    folder = tree(
        main_cu='#include "a.cuh"\n__device__ int f() { return g(); }\n',
        a_cuh="\n\n__device__ int g() { return wrong; }\n",
    )
    with pytest.raises(CompileError) as e:
        compile_cubin(source_text(folder / "main.cu"), "sm_90")
    assert re.fullmatch(r'a\.cuh:3: identifier "wrong" is undefined \(NVRTC, sm_90\)', str(e.value))
    assert "1 error detected" in e.value.log


def test_an_unknown_architecture_is_told_in_one_line():
    with pytest.raises(CompileError, match=r"^NVRTC can't compile for sm_1: [^\n]+$"):
        compile_cubin(GOOD, "sm_1")


def test_version_and_architectures():
    assert re.fullmatch(r"\d+\.\d+", nvrtc_version())
    assert {80, 90, 100, 120} <= set(nvrtc_architectures())


def test_without_cuda_bindings_one_line_names_the_extra(monkeypatch):
    real = builtins.__import__

    def no_cuda(name, *args, **kwargs):
        if name.startswith("cuda"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_cuda)
    with pytest.raises(DeviceError, match=r"^compiling for a GPU needs cuda-bindings: pip install 'kdtr\[cuda13\]'"):
        compile_cubin(GOOD, "sm_90")


def test_without_the_nvrtc_library_one_line_names_the_extra(monkeypatch):
    from cuda.bindings import nvrtc

    def missing():
        raise RuntimeError("libnvrtc.so.13 not found\nin many places")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    with pytest.raises(
        DeviceError, match=r"^compiling for a GPU needs the NVRTC library: pip install 'kdtr\[cuda13\]'[^\n]*$"
    ):
        nvrtc_version()


# ---- the check of PTX ------------------------------------------------------------------------------------------------

BAD = {
    "fma.rn.f32 %f1, %f2, %f3, %f4;": "fused",
    "fma.rn.f64 %fd1, %fd2, %fd3, %fd4;": "fused",
    "fma.rn.ftz.bf16x2 %r1, %r2, %r3, %r4;": "fused",
    "mad.rn.f32 %f1, %f2, %f3, %f4;": "fused",
    "add.f32 %f1, %f2, %f3;": "does not say .rn",
    "sub.f64 %fd1, %fd2, %fd3;": "does not say .rn",
    "mul.f32 %f1, %f2, 0f3F800000;": "does not say .rn",
    "add.rz.f32 %f1, %f2, %f3;": "does not say .rn",
    "sqrt.rm.f32 %f1, %f2;": "does not say .rn",
    "add.rn.ftz.f32 %f1, %f2, %f3;": "flushes subnormals",
    "add.rn.sat.f32 %f1, %f2, %f3;": "clamps",
    "div.approx.f32 %f1, %f2, %f3;": "approximation",
    "div.full.f32 %f1, %f2, %f3;": "limited accuracy",
    "rcp.approx.ftz.f64 %fd1, %fd2;": "approximation",
    "sqrt.approx.f32 %f1, %f2;": "approximation",
    "rsqrt.approx.f32 %f1, %f2;": "approximation",
    "ex2.approx.ftz.f32 %f1, %f2;": "approximation",
    "lg2.approx.f32 %f1, %f2;": "approximation",
    "sin.approx.f32 %f1, %f2;": "approximation",
    "tanh.approx.f32 %f1, %f2;": "approximation",
    "cvt.rn.sat.f16.f32 %rs1, %f1;": "clamps",
    "setp.lt.ftz.f32 %p1, %f1, %f2;": "flushes subnormals",
    "cvt.ftz.f32.f16 %f1, %rs1;": "flushes subnormals",
    "atom.global.add.f32 %f1, [%rd1], %f2;": "float atomic",
    "atom.add.f64 %fd1, [%rd1], %fd2;": "float atomic",
    "red.global.add.f32 [%rd1], %f2;": "float atomic",
    "red.relaxed.gpu.global.add.noftz.bf16x2 [%rd1], %r1;": "float atomic",
    "min.f32 %f1, %f2, %f3;": "drops NaN",
    "max.f64 %fd1, %fd2, %fd3;": "drops NaN",
    "@%p1 add.f32 %f1, %f2, %f3;": "does not say .rn",
    "@!%p1 fma.rn.f32 %f1, %f2, %f3, %f4;": "fused",
}
FINE = [
    "add.rn.f32 %f1, %f2, %f3;", "sub.rn.f64 %fd1, %fd2, %fd3;", "mul.rn.f32 %f1, %f2, %f3;",
    "div.rn.f64 %fd1, %fd2, %fd3;", "sqrt.rn.f32 %f1, %f2;", "rcp.rn.f64 %fd1, %fd2;",
    "add.rn.f32x2 %rd1, %rd2, %rd3;", "add.s32 %r1, %r2, %r3;", "mul.wide.u32 %rd1, %r1, 4;",
    "mad.lo.s32 %r1, %r2, %r3, %r4;", "mul.hi.u32 %r1, %r2, %r3;", "div.s32 %r1, %r2, %r3;",
    "sub.s64 %rd1, %rd2, %rd3;", "min.s32 %r1, %r2, %r3;", "max.u32 %r1, %r2, %r3;", "neg.f32 %f1, %f2;",
    "abs.f64 %fd1, %fd2;", "cvt.rni.f32.f32 %f1, %f2;", "cvt.rn.f32.f64 %f1, %fd1;", "cvt.rzi.s32.f32 %r1, %f1;",
    "cvt.sat.u8.s32 %r1, %r2;", "cvt.rzi.sat.s32.f32 %r1, %f1;", "add.sat.s32 %r1, %r2, %r3;",
    "setp.lt.f32 %p1, %f1, %f2;", "selp.f32 %f1, %f2, %f3, %p1;", "atom.global.add.u32 %r1, [%rd1], 1;",
    "red.global.add.u64 [%rd1], %rd2;", "atom.global.cas.b32 %r1, [%rd1], %r2, %r3;",
    "shfl.sync.bfly.b32 %r1|%p1, %r2, 16, 31, -1;", "bar.sync 0;",
    "ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];", "copysign.f32 %f1, %f2, %f3;",
    "// fma.rn.f32 in a comment", "add.rn.f32 %f1, %f2, %f3; // was fma.rn.f32", ".param .f32 fma_param_0",
    "$L__BB0_2:", "mov.f32 %f1, 0f00000000;",
]  # fmt: skip


@pytest.mark.parametrize("line", BAD)
def test_a_forbidden_instruction_is_found_with_its_line_and_reason(line):
    found = check_ptx(f"// one\n\tadd.rn.f32 %f1, %f2, %f3;\n\t{line}\n\tret;\n")
    assert [v.line for v in found] == [3]
    assert BAD[line] in found[0].reason
    assert found[0].instruction in line
    assert str(found[0]).startswith(f"PTX line 3: {found[0].instruction}: ")


@pytest.mark.parametrize("line", FINE)
def test_an_allowed_instruction_is_not_found(line):
    assert check_ptx(f"\t{line}\n") == []


SOURCES = {
    "rsqrtf(x[0])": "rsqrt.approx",
    "__expf(x[0])": "ex2.approx",
    "expf(x[0])": "fma.rn",
    "fmaf(x[0], x[1], x[2])": "fma.rn",
    "__fdividef(x[0], x[1])": "div.approx",
    "fminf(x[0], x[1])": "min.f32",
    "fmaxf(x[0], x[1])": "max.f32",
    "atomicAdd(x, x[1])": "add.f32",
    "__saturatef(x[0])": "cvt.sat.f32.f32",
    "(float)exp((double)x[0])": "fma.rn",
    "__fadd_rz(x[0], x[1])": "add.rz",
}


@pytest.mark.parametrize("call", SOURCES)
def test_what_nvrtc_makes_of_a_forbidden_call_is_found(call):
    ptx = compile_ptx(f'extern "C" __global__ void k(float* x) {{ x[3] = {call}; }}', "sm_90")
    found = check_ptx(ptx)
    assert any(SOURCES[call] in v.instruction for v in found), [str(v) for v in found]
    lines = ptx.splitlines()
    assert all(v.instruction in lines[v.line - 1] for v in found)


@pytest.mark.parametrize(
    ("option", "instead", "instruction"),
    [
        ("--fmad=false", "--fmad=true", "fma.rn"),
        ("--ftz=false", "--ftz=true", "ftz"),
        ("--prec-div=true", "--prec-div=false", "div.full"),
        ("--prec-sqrt=true", "--prec-sqrt=false", "sqrt.approx"),
    ],
)
def test_each_option_matters_and_its_absence_is_found(monkeypatch, option, instead, instruction):
    assert option in NVRTC_OPTIONS
    monkeypatch.setattr(kernels, "NVRTC_OPTIONS", tuple(instead if o == option else o for o in NVRTC_OPTIONS))
    assert any(instruction in v.instruction for v in check_ptx(compile_ptx(GOOD, "sm_90")))

"""Every kernel file compiles for every architecture, keeps the contract in its PTX, and fits the shared memory."""

import struct
from dataclasses import dataclass

import pytest

pytest.importorskip("cuda.bindings", reason="NVRTC comes with the extra 'test'")

from kdtr_cli.engine.kernels import KERNELS, sources
from kdtr_cli.workflows import kernels as workflow
from kdtr_cli.workflows.kernels import ARCHITECTURES, Compiled, compile_kernels

#: Dynamic shared memory at the largest sizes that the engine takes; static shared memory is read from the machine code.
LARGEST = {"experts": 2048, "groups": 1024, "budget": 1024}
SM_120_SHARED = 99 << 10


@dataclass
class Built:
    """What compiling for one architecture gave: results in table order, machine code of each file."""

    results: list[Compiled]
    cubins: list[bytes]


def static_shared(cubin: bytes) -> dict[str, int]:
    """kernel → bytes of its static shared memory: the sections .nv.shared.NAME of an ELF64 file."""
    assert cubin[:5] == b"\x7fELF\x02"
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    out = {}
    for name, *_, length in headers:
        start = headers[names][4] + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        if text.startswith(".text."):
            out.setdefault(text.removeprefix(".text."), 0)
        if text.startswith(".nv.shared.") and not text.startswith(".nv.shared.reserved"):
            out[text.removeprefix(".nv.shared.")] = length
    return out


@pytest.fixture(scope="module", params=ARCHITECTURES)
def built(request):
    cubins = []
    compile_both = workflow.compile_both

    def keep(*args):
        cubin, ptx = compile_both(*args)
        cubins.append(cubin)
        return cubin, ptx

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workflow, "compile_both", keep)
        return Built(list(compile_kernels((request.param,))), cubins)


def test_the_four_architectures():
    assert ARCHITECTURES == ("sm_80", "sm_90", "sm_100", "sm_120")


@pytest.mark.slow
def test_every_file_compiles_and_keeps_the_contract(built):
    assert [result.file for result in built.results] == list(sources())
    for result, cubin in zip(built.results, built.cubins, strict=True):
        assert result.violations == (), f"{result.file} for {result.arch}: {result.violations[0]}"
        assert result.cubin_bytes == len(cubin) > 1000
        assert result.arch in ARCHITECTURES


@pytest.mark.slow
def test_shared_memory_is_within_what_sm_120_has(built):
    found = {}
    for cubin in built.cubins:
        found |= static_shared(cubin)
    assert set(found) == set(KERNELS)
    assert found["router"] >= 4 * 129  # the reading itself: what router.cu declares
    for name, static in found.items():
        # one that asks for more is not chosen where there is less (kernels_mma.mla_decode)
        assert static + KERNELS[name].shared(LARGEST) <= max(SM_120_SHARED, KERNELS[name].shared_limit)


@pytest.mark.quick
def test_a_kernel_that_breaks_the_contract_is_reported(monkeypatch):
    text = (
        'extern "C" __global__ void bad(float* x) { x[0] = __fmaf_rn(x[1], x[2], x[3]) + fminf(x[4], __expf(x[5])); }'
    )
    monkeypatch.setattr(workflow, "sources", lambda: ("bad.cu",))
    monkeypatch.setattr(workflow, "source_text", lambda file: text)
    (result,) = compile_kernels(("sm_90",))
    reasons = " ".join(str(v) for v in result.violations)
    for word in ("fma", "min", "ex2.approx"):
        assert word in reasons

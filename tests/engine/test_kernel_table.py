"""The kernel table: it says what the sources say, its cases are fit to test with, and every kernel equals its twin."""

import math
import re

import numpy as np
import pytest
from planted import FOLDER, plant

from kdtr_cli.engine import kernels as table
from kdtr_cli.engine.compile import source_text
from kdtr_cli.engine.compile_cache import CompileCache
from kdtr_cli.engine.devices import open_device
from kdtr_cli.engine.kernel_cases import cases
from kdtr_cli.engine.kernel_table import SHARED_LIMIT
from kdtr_cli.engine.kernels import DTYPES, FORMS, KERNELS, expert_matmul, matmul, matmuls, most_tiles, sources
from kdtr_cli.engine.launch import Launcher
from kdtr_cli.errors import InputError
from kdtr_cli.reference.attention import CHUNK
from kdtr_cli.reference.twins import SEGMENT, TWINS
from kdtr_cli.workflows.kernels import check_kernels, select_kernels

C_TYPES = {"f32": "float", "f64": "double", "i32": "int"}  # the others are called the same

_KERNEL = r'extern "C" __global__ void __launch_bounds__\(([^)]*)\)\s+(\w+)\(([^)]*)\)'
_VARIANT = r"_w(\d)_m(\d+)_r(\d+)(?:_g(\d))?$"


def signatures(file: str) -> dict[str, tuple[int, list[tuple[str, str]]]]:
    """name → (threads of a block, [(C type, argument)]) of every kernel of a file, those made by macros included."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", source_text(file).replace("\\\n", " "), flags=re.S)
    for name, number in re.findall(r"^\s*#define (\w+)\s+(\d+)\s*$", text, re.M):
        text = re.sub(rf"(?<!#define )\b{name}\b", number, text)
    found = {}
    for macro, parameters, body in re.findall(r"^\s*#define (\w+)\(([^)]*)\)(.*)$", text, re.M):
        if made := re.search(_KERNEL, body):
            for given in re.findall(rf"^{macro}\((.*)\)", text, re.M):
                values = dict(zip(_words(parameters), _words(given), strict=False))
                threads, name, taken = (re.sub(r"\w+", lambda m, v=values: v.get(m[0], m[0]), g) for g in made.groups())
                found[name] = (_product(threads), _parameters(taken))
    plain = re.sub(r"^\s*#[^\n]*$", "", text, flags=re.M)
    for threads, name, parameters in re.findall(_KERNEL, plain):
        found[name] = (_product(threads), _parameters(parameters))
    return found


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _product(text: str) -> int:
    """The first of a kernel's launch bounds: threads; the second, blocks side by side, is the compiler's to know."""
    return math.prod(int(factor) for factor in text.split(",")[0].split("*"))


def _parameters(text: str) -> list[tuple[str, str]]:
    out = []
    for parameter in text.split(","):
        kind, name = re.fullmatch(r"\s*(.*?[\s*])(\w+)\s*", parameter, re.S).groups()
        out.append((" ".join(kind.split()).replace(" *", "*"), name))
    return out


def documented(file: str) -> str:
    """The comment that a file opens with."""
    lines = (FOLDER / file).read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("//"))])


#: Kimi-K2's sizes, 64 rows of a prefill pass at position 131071, 8 trees of 64 nodes; and the limits of the kernels.
KIMI = {"rows": 64, "heads": 64, "kv_heads": 1, "latent": 512, "width": 576, "half": 32, "head_dim": 128}
KIMI |= {"n": 18432, "k": 7168, "vocab": 163840, "parts": 80, "chunks": 512, "layers": 61}
KIMI |= {"experts": 384, "groups": 1, "slots": 8, "item_count": 512, "tile_places": 512, "tile": 4}
KIMI |= {"group": 32, "block_rows": 128, "block_columns": 128}
KIMI |= {"ranges": 512}
KIMI |= {"batch": 8, "budget": 64, "nodes": 65, "block": 16, "horizon": 15, "rows_out": 65}
LIMITS = {**KIMI, "experts": 2048, "groups": 1024, "slots": 128, "budget": 1024}


def form_of(kernel: str, form: str) -> str:
    return kernel if form == "f32" else f"{kernel}_{form}"


@pytest.mark.quick
class TestTable:
    @pytest.mark.parametrize("name", KERNELS)
    def test_agrees_with_the_source(self, name):
        kernel = KERNELS[name]
        threads, parameters = signatures(kernel.file)[name]
        assert threads == math.prod(kernel.block)
        wanted = []
        for arg in kernel.args:
            pointer = "" if arg.shape is None else "*"
            const = "const " if arg.role == "in" and pointer else ""
            wanted.append((f"{const}{C_TYPES.get(arg.dtype, arg.dtype)}{pointer}", arg.name))
        assert parameters == wanted

    def test_holds_every_kernel_of_every_file(self):
        assert set(sources()) == {path.name for path in FOLDER.glob("*.cu")}
        assert {name for file in sources() for name in signatures(file)} == set(KERNELS)
        assert len(sources()) == len(set(sources()))

    def test_every_kernel_has_a_twin_and_every_twin_a_kernel(self):
        assert {k.twin for k in KERNELS.values()} == set(TWINS)
        for kernel in KERNELS.values():
            code = TWINS[kernel.twin].__code__
            known = {a.name for a in kernel.args} | {d for a in kernel.arrays() for d in a.shape}
            assert set(code.co_varnames[: code.co_argcount]) <= known

    @pytest.mark.parametrize("file", sources())
    def test_a_file_opens_with_its_documentation(self, file):
        text = documented(file)
        assert re.match(rf"// {re.escape(file)}: \S.{{10}}", text)
        for word in ("launch", "order", "bytes"):
            assert re.search(rf"^//(.*\s)?{word}\s", text, re.M), word
        # what it takes and gives is said there, or in the header that holds the contract of several files
        if header := re.search(r"(\w+\.cuh) has the contract", text):
            text = documented(header[1])
        for name in {a.name for k in KERNELS.values() if k.file == file for a in k.arrays()}:
            assert re.search(rf"\b{name}\b", text), name

    def test_constants_are_those_of_the_sources_and_the_reference(self):
        attention, sample = (FOLDER / "attention.cuh").read_text(), (FOLDER / "sample.cu").read_text()
        assert re.search(r"#define CHUNK (\d+)", attention)[1] == str(table.CHUNK) == str(CHUNK)
        assert re.search(r"#define SEGMENT (\d+)", attention)[1] == str(table.SEGMENT) == str(SEGMENT)
        assert re.search(r"#define HEADS (\d+)", attention)[1] == str(table._HEADS)
        assert re.search(r"constexpr int SPAN = (\d+)", sample)[1] == str(table.SPAN)

    @pytest.mark.parametrize("name", [n for n in KERNELS if re.search(_VARIANT, n)])
    def test_a_name_says_how_the_work_is_split(self, name):
        warps, rows, outputs, teams = (int(g or 1) for g in re.search(_VARIANT, name).groups())
        body = f"one_warp<{rows}, {outputs}, VEC>" if warps == 1 else f"four_warps<{rows}, {outputs}, VEC, {teams}>"
        made = re.search(rf"^\w+\({name}, (.*)\)$", (FOLDER / KERNELS[name].file).read_text(), re.M)[1]
        assert made.endswith(f"{rows}, {body}")
        assert KERNELS[name].block == (128, teams, 1)
        each = outputs * (4 // warps) * teams
        for n in (1, each - 1, each, each + 1, 100):
            grid = KERNELS[name].grid({"n": n, "rows": 33, "heads": 3, "tile_places": 7})
            assert grid == (-(-n // each), *((-(-33 // rows), 3) if name.startswith("matmul") else (7, 1)))

    @pytest.mark.parametrize("kind", ["cpu", "gpu"])
    def test_the_choice_of_a_matrix_kernel(self, kind):
        chosen = [matmul(kind, m, n, k) for m in (1, 2, 5, 9, 64) for n in (1, 7168, 18432) for k in (1, 128, 7168)]
        assert set(chosen) <= set(KERNELS)
        for form in FORMS:
            assert matmuls(kind, 64, form) >= {matmul(kind, 1, 1, 1, form), matmul(kind, 64, 18432, 7168, form)}
            assert {KERNELS[name].twin for name in matmuls(kind, 64, form)} == {form_of("matmul", form)}
            for tile, k in ((1, 2048), (1, 7168), (4, 2048), (4, 7168)):
                # a kernel of fewer rows than a tile has would leave the others out
                name = expert_matmul(kind, tile, k, form)
                assert int(re.search(_VARIANT, name)[2]) >= tile
                assert KERNELS[name].twin == form_of("expert_matmul", form)

    @pytest.mark.parametrize(("experts", "slots"), [(16, 4), (384, 8), (2048, 128), (1, 1)])
    def test_tiles_have_room(self, experts, slots):
        rng = np.random.default_rng(0)
        for tokens in (1, 2, 64):
            spread = np.stack([rng.permutation(experts)[:slots] for _ in range(tokens)])
            for tile in (1, 4):
                for ids in (spread, spread[:1].repeat(tokens, 0), spread * 0):
                    made = sum(-(-n // tile) for n in np.bincount(ids.reshape(-1)).tolist())
                    assert made <= most_tiles(ids.size, experts, tile)

    @pytest.mark.parametrize("sizes", [KIMI, LIMITS], ids=["kimi", "limits"])
    @pytest.mark.parametrize("name", KERNELS)
    def test_launches_fit_every_gpu(self, name, sizes):
        kernel = KERNELS[name]
        assert kernel.shared(sizes) <= kernel.shared_limit  # with static shared memory: test_nvrtc.py
        assert kernel.shared_limit == SHARED_LIMIT or kernel.gpu_only
        x, y, z = kernel.grid(sizes)
        assert 1 <= x < 1 << 31
        assert 1 <= y <= 65535
        assert 1 <= z <= 65535
        assert math.prod(kernel.block) <= 1024

    def test_an_unknown_kernel(self):
        with pytest.raises(InputError, match="no kernel named 'sort'"):
            select_kernels(("embed", "sort"))
        assert [k.name for k in select_kernels(("router", "embed"))] == ["router", "embed"]
        assert select_kernels(()) == list(KERNELS.values())


@pytest.mark.quick
class TestCases:
    @pytest.mark.parametrize("name", KERNELS)
    def test_fit_the_table(self, name):
        kernel, labels, written = KERNELS[name], [], set()
        for case in cases(name):
            labels.append(case.label)
            sizes = {k: v for k, v in case.values.items() if isinstance(v, int)}
            for arg in kernel.args:
                value = case.values[arg.name]
                if arg.shape is None:
                    assert np.isfinite(DTYPES[arg.dtype].type(value))
                elif value is None:
                    assert arg.nullable
                else:
                    assert value.dtype == DTYPES[arg.dtype]
                    # a dimension has one size in all arrays and numbers of a case
                    for dim, size in zip(arg.shape, value.shape, strict=True):
                        wanted = int(dim) if dim.isdigit() else sizes.setdefault(dim, size)
                        assert size == wanted, (case.label, arg.name, dim)
                    if arg.role == "out":
                        assert (value.view(np.uint8) == 0xFF).all()
            assert kernel.shared(case.values) <= kernel.shared_limit
            assert min(kernel.grid(case.values)) >= 1
            assert kernel.bytes(case.values) > 0
            assert kernel.flops(case.values) >= 0
            written |= outputs_of_the_twin(kernel, case)
        assert len(labels) == len(set(labels)) >= 2
        restored = {"arrived"}  # a counter that ends as it began
        assert written == {a.name for a in kernel.arrays() if a.role != "in"} - restored

    @pytest.mark.parametrize("name", ["rmsnorm", "router", "sample_parts"])
    def test_come_from_their_seed(self, name):
        def content(seed):
            return [
                (c.label, [v.tobytes() if isinstance(v, np.ndarray) else v for v in c.values.values()])
                for c in cases(name, seed)
            ]

        assert content(1) == content(1)
        assert content(1) != content(2)


def outputs_of_the_twin(kernel, case) -> set[str]:
    """Names of the arrays that the twin changes; none of them is an input."""
    values = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in case.values.items()}
    with np.errstate(all="ignore"):
        TWINS[kernel.twin](**values)
    arrays = [a for a in kernel.arrays() if values[a.name] is not None]
    changed = {a.name for a in arrays if values[a.name].tobytes() != case.values[a.name].tobytes()}
    assert not changed & {a.name for a in arrays if a.role == "in"}
    return changed


# ---- on the CPU device -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu():
    with open_device("cpu") as device:
        device.compile(sources("cpu"))
        yield device


@pytest.mark.parametrize("schedule", [0, 1, 7, 12345])
def test_every_kernel_equals_its_twin_in_any_order_of_lanes(cpu, schedule, monkeypatch):
    monkeypatch.setattr(cpu, "schedule", schedule)
    seen = set()
    for result in check_kernels(cpu, list(KERNELS.values()), seed=schedule % 3):
        assert result.differing == 0, f"{result.kernel} ({result.label}): {result.first}"
        assert result.first is None
        assert result.compared > 0
        seen.add(result.kernel)
    assert seen == {name for name, kernel in KERNELS.items() if not kernel.gpu_only}


def test_one_thread_gives_the_same(cpu, monkeypatch):
    monkeypatch.setattr(cpu, "threads", 1)
    names = ("matmul_w1_m4_r2", "attn_chunks", "router", "sample_parts")
    assert all(result.differing == 0 for result in check_kernels(cpu, [KERNELS[n] for n in names]))


def test_one_bit_is_seen(cpu, monkeypatch):
    exact = TWINS["swiglu"]

    def off(gate_up, h, n, **_):
        exact(gate_up, h, n)
        h.view(np.uint32)[0, 0] ^= 1

    monkeypatch.setitem(TWINS, "swiglu", off)
    results = list(check_kernels(cpu, [KERNELS["swiglu"]]))
    assert [r.differing for r in results] == [1] * len(results)
    assert all(re.match(r"h\[0, 0\]: .*, wanted ", r.first) for r in results)


def test_whole_buffers_are_compared(cpu, monkeypatch):
    """What a kernel must not touch counts too: inputs, and outputs between its rows."""
    exact = TWINS["swiglu"]

    def careless(gate_up, h, n, **_):
        exact(gate_up, h, n)
        gate_up[:] = 7

    monkeypatch.setitem(TWINS, "swiglu", careless)
    assert all(r.differing >= r.compared // 2 for r in check_kernels(cpu, [KERNELS["swiglu"]]))


def test_a_kernel_that_does_nothing_finds_no_old_answer(cpu, monkeypatch):
    """What a kernel is to write lies poisoned before, so that none can be right by what memory still holds; but for the
    cases where the right answer is to leave everything as it is."""
    monkeypatch.setattr(Launcher, "__call__", lambda self, name, **values: None)
    results = list(check_kernels(cpu, list(KERNELS.values())))
    assert {r.kernel for r in results} == {name for name, kernel in KERNELS.items() if not kernel.gpu_only}
    assert {(r.kernel, r.label) for r in results if r.differing == 0} == {
        ("nonfinite", "1000 elements, first at None"),
        ("compact_cache", "the root alone"),
        ("compact_cache", "nothing moves"),
        ("advance_round", "all rest"),
    }


def test_a_kernel_that_changes_its_input_is_seen(cpu, monkeypatch):
    launch = Launcher.__call__

    def careless(self, name, **values):
        launch(self, name, **values)
        first = next(a.name for a in KERNELS[name].arrays() if a.role == "in" and values[a.name] is not None)
        array = self.device.read(values[first])
        array.reshape(-1).view(np.uint8)[-1] ^= 1
        self.device.write(values[first], array)

    monkeypatch.setattr(Launcher, "__call__", careless)
    names = ("swiglu", "matmul_w1_m4_r2", "attn_chunks", "router", "sample_parts")
    results = list(check_kernels(cpu, [KERNELS[n] for n in names]))
    assert {r.kernel for r in results} == set(names)
    assert [r.differing for r in results] == [1] * len(results)


class TestLauncher:
    def test_refuses_what_does_not_fit(self, cpu):
        launch = Launcher(cpu)
        x = cpu.upload("x", np.ones((1, 8), np.float32))
        y = cpu.alloc("y", (1, 4), np.float32)
        launch("swiglu", gate_up=x, h=y, n=4, rows=1)
        assert cpu.read(y)[0, 0] == pytest.approx(0.731, abs=1e-3)
        for wrong in (np.ones((1, 8), np.float32), cpu.upload("i", np.ones(8, np.int32)), 3):
            with pytest.raises(TypeError, match="swiglu: gate_up must be a f32 array on the device"):
                launch("swiglu", gate_up=wrong, h=y, n=4, rows=1)
        with pytest.raises(ValueError, match="swiglu: h may not be null"):
            launch("swiglu", gate_up=x, h=None, n=4, rows=1)
        with pytest.raises(KeyError, match="'n'"):
            launch("swiglu", gate_up=x, h=y, rows=1)


# ---- planted faults --------------------------------------------------------------------------------------------------

#: Mistakes that somebody could make: kernel, file, what stands there, what stands there instead.
FAULTS = {
    "groups are added in a row": (
        "rmsnorm",
        "rmsnorm.cuh",
        "(part[0] + part[1]) + (part[2] + part[3])",
        "((part[0] + part[1]) + part[2]) + part[3]",
    ),
    "groups of the softmax are added in a row": (
        "router",
        "router.cu",
        "(a[0] + a[1]) + (a[2] + a[3])",
        "((a[0] + a[1]) + a[2]) + a[3]",
    ),
    "blocks of 4096": ("rmsnorm", "common.cuh", "#define BLOCK_QUADS 2048", "#define BLOCK_QUADS 1024"),
    "the weight is multiplied first": ("rmsnorm", "rmsnorm.cuh", "(x[k] * r) * weight[k]", "x[k] * (r * weight[k])"),
    "eps outside the root": ("rmsnorm", "rmsnorm.cuh", "sqrtf(sum / (float)n + eps)", "(sqrtf(sum / (float)n) + eps)"),
    "two products are added before the lane": (
        "matmul_w1_m1_r4",
        "dot.cuh",
        "s = s + a.z * b.z;\n  return s + a.w * b.w;",
        "return s + (a.z * b.z + a.w * b.w);",
    ),
    "the stride of x is forgotten": (
        "matmul_w1_m1_r4",
        "matmul.cuh",
        "min(m0 + m, rows - 1) * x_row",
        "min(m0 + m, rows - 1) * k",
    ),
    "all rows of a tile take the first item": (
        "expert_matmul_w1_m4_r2",
        "expert_matmul.cuh",
        "items[first + min(m, count - 1)]",
        "items[first]",
    ),
    "the rotation turns back": ("kv_append", "rope.cuh", "b * c + a * s", "b * c - a * s"),
    "the angle of the row, not of its position": ("rope_query", "rope_query.cu", "positions[row] * half", "row * half"),
    "the maximum drops NaN": (
        "attn_scores",
        "common.cuh",
        "is_nan(a) ? a : (is_nan(b) ? b : (a < b ? b : a))",
        "a < b ? b : a",
    ),
    "divided instead of multiplied": (
        "attn_scores",
        "attention_scores.cu",
        "s[r] = s[r] * scale;",
        "s[r] = s[r] / (1 / scale);",
    ),
    "the last position of a chunk is not seen": (
        "attn_combine",
        "attention.cuh",
        "return position / CHUNK + 1;",
        "return (position + CHUNK - 1) / CHUNK;",
    ),
    "a digit of exp": ("swiglu", "common.cuh", "8.3334519073e-3f", "8.3335519073e-3f"),
    "exp ends at -88": ("attn_chunks", "common.cuh", "y < -87.0f ? -87.0f : y", "y < -88.0f ? -88.0f : y"),
    "keys in descending position": (
        "attn_chunks",
        "attention_chunks.cu",
        "int i = 0; i < plain; ++i",
        "int i = plain - 1; i >= 0; --i",
    ),
    "ties go to the larger index": ("router", "common.cuh", "(u32)~i", "(u32)i"),
    "another summand against zero": ("router", "router.cu", "+ 1e-20f", "+ 1e-19f"),
    "V3 masks with 0": ("router", "router.cu", "best_two ? -infinity() : 0.f", "0.f"),
    "a tile too long": ("group_experts", "group_experts.cu", "min(tile, count[e] - first)", "tile"),
    "slots in descending order": (
        "combine",
        "combine.cu",
        "int j = 0; j < slots; ++j",
        "int j = slots - 1; j >= 0; --j",
    ),
    "noise of the token fed, not of the one drawn": (
        "sample_parts",
        "sample.cu",
        "positions[row] + 1,",
        "positions[row],",
    ),
    "nine rounds": ("sample_parts", "philox.cuh", "round < 10", "round < 9"),
    "infinite logits pass": ("sample_parts", "sample.cu", "broken |= !is_finite(v)", "broken |= is_nan(v)"),
    "equal logits give the larger id": ("sample_parts", "common.cuh", "return i < j;", "return i > j;"),
    "rows that have ended go on": ("sample_final", "sample.cu", "tokens && active[row]", "tokens"),
    "the row, not its token": ("embed", "embed.cu", "(i64)ids[blockIdx.y] * n", "(i64)blockIdx.y * n"),
    "infinity is finite": ("nonfinite", "nonfinite.cu", "!is_finite(x[i])", "is_nan(x[i])"),
    # weights as they are stored
    "halves of a word change places": (
        "matmul_bf16_w4_m4_r4",
        "weights.cuh",
        "{widen(T{(u16)v.x}), widen(T{(u16)(v.x >> 16)})",
        "{widen(T{(u16)(v.x >> 16)}), widen(T{(u16)v.x})",
    ),
    "fp16 without its sign": ("matmul_f16_w1_m1_r4", "weights.cuh", "0x8fffe000", "0x0fffe000"),
    "subnormal fp16 are zero": (
        "expert_matmul_f16_w1_m1_r4",
        "weights.cuh",
        "__int_as_float(((int)((u32)v.bits << 16) >> 3) & 0x8fffe000)",
        "(v.bits & 0x7c00 ? __int_as_float(((int)((u32)v.bits << 16) >> 3) & 0x8fffe000) : 0.f)",
    ),
    "experts begin a row apart": (
        "expert_matmul_bf16_w1_m4_r2",
        "weights.cuh",
        "{w + (i64)e * n * k, k}",
        "{w + (i64)e * k, k}",
    ),
    "nibbles in another order": (
        "matmul_int4_w4_m1_r4",
        "weights.cuh",
        "nibble<0>(v) * s, nibble<1>(v) * s",
        "nibble<1>(v) * s, nibble<0>(v) * s",
    ),
    "nibbles by themselves in another order": (
        "matmul_int4_w1_m1_r4",
        "weights.cuh",
        "4 * (k & 3)",
        "4 * (3 - (k & 3))",
    ),
    "nibbles are q + 7": ("expert_matmul_int4_w1_m4_r2", "weights.cuh", "(8u << 4 * I)", "(7u << 4 * I)"),
    "nibbles by themselves are q + 7": ("matmul_int4_w1_m16_r1", "weights.cuh", "(float)(q - 8)", "(float)(q - 7)"),
    "the scale of the next group": (
        "matmul_int4_w4_m4_r4",
        "weights.cuh",
        "r.scale16[q >> r.shift]",
        "r.scale16[(q + 1) >> r.shift]",
    ),
    "the scale of the next group, one by one": (
        "matmul_int4_w1_m4_r2",
        "weights.cuh",
        "g = k / r.group",
        "g = (k + 1) / r.group",
    ),
    "a cut group has no scale": (
        "expert_matmul_int4_w4_m4_r4",
        "weights.cuh",
        "at = i * pieces(k, group)",
        "at = i * (k / group)",
    ),
    "rows and columns of a block change places": (
        "matmul_fp8_w1_m1_r4",
        "matmul.cuh",
        "k, block_rows, block_columns}",
        "k, block_columns, block_rows}",
    ),
    "a cut block has no scale": (
        "matmul_fp8_w1_m16_r1",
        "weights.cuh",
        "(i64)(i / rows) * pieces(k, columns)",
        "(i64)(i / rows) * (k / columns)",
    ),
    "blocks go on into the next expert": (
        "expert_matmul_fp8_w4_m1_r2",
        "weights.cuh",
        "(i64)e * pieces(n, rows) * pieces(k, columns)",
        "(i64)e * n / rows * pieces(k, columns)",
    ),
    "e4m3 without its sign": ("matmul_fp8_w4_m16_r4_g2", "weights.cuh", "0x87f00000", "0x07f00000"),
    "the bias of e4m3 is 8": (
        "expert_matmul_fp8_w1_m1_r4",
        "weights.cuh",
        "1.329227995784916e36f",
        "6.64613997892458e35f",
    ),
    "subnormal e4m3 are zero": (
        "matmul_fp8_w4_m4_r4",
        "weights.cuh",
        "__int_as_float(((int)(v << 24) >> 4) & 0x87f00000)",
        "(v & 0x78 ? __int_as_float(((int)(v << 24) >> 4) & 0x87f00000) : 0.f)",
    ),
    # a round of DDTree
    "a child is confirmed by its own row": (
        "accept",
        "accept.cu",
        "tokens[row + i] == posterior[row + parent]",
        "tokens[row + i] == posterior[row + i]",
    ),
    "the root is not counted": (
        "advance_round",
        "advance_round.cu",
        "starts[b] = start + count;",
        "starts[b] = start + count - 1;",
    ),
    "a sibling's score in another order": (
        "build_tree",
        "build_tree.cu",
        "(w - (double)s.here) + (double)s.next",
        "w + ((double)s.next - (double)s.here)",
    ),
    "accepted rows stay where they are": (
        "compact_cache",
        "compact_cache.cu",
        "(i64)from[k + j] * width",
        "(i64)(k + j) * width",
    ),
    "equal votes give the larger token": (
        "draft_ngram",
        "draft_ngram.cu",
        "token[l] < token[j]",
        "token[l] > token[j]",
    ),
    "the drafter's weight is multiplied first": ("draft_qkv", "draft_qkv.cu", "(x[i] * r) * w[i]", "x[i] * (r * w[i])"),
    "marginals of a sequence that has ended": (
        "draft_replay",
        "draft_replay.cu",
        "min(positions, limits[b])",
        "positions",
    ),
    "a block's rows do not see each other": ("draft_rows", "draft_rows.cu", "start + block - 1", "start + j"),
    "the noise of sampling is drawn again": (
        "draft_synthetic",
        "draft_synthetic.cu",
        "PURPOSE_DRAFT,",
        "PURPOSE_SAMPLE,",
    ),
    "rows of another sequence": (
        "gather_rows",
        "gather_rows.cu",
        "row / rows_out * rows_in + index[row]",
        "index[row]",
    ),
    "taps of all layers in one place": ("tap_rows", "tap_rows.cu", "* taps_row + column + i", "* taps_row + i"),
    "a key that is one of the first is lost": (
        "topk_parts",
        "topk_parts.cu",
        "if (rank == kept - 1) bound",
        "if (rank == (kept - 1) / 2) bound",
    ),
    "log-probabilities in another order": (
        "topk_final",
        "topk_final.cu",
        "sum = sum + __shfl_sync(FULL_WARP, mine, i);",
        "sum = sum + __shfl_sync(FULL_WARP, mine, 31 - i);",
    ),
    # tier bf16
    "halves of a tile change places": (
        "mma_matmul_w4_m1_t1",
        "mma_matmul.cuh",
        "(lane >> 2) + 8 * (c >> 1)",
        "(lane >> 2) + 8 * (c & 1)",
    ),
    "a row is read past its end": ("mma_matmul_w1_m2_t1", "mma_matmul.cuh", "at + 8 <= k)", "true)"),
    "the last unit is left out": (
        "mma_matmul_w8_m2_t2",
        "mma_matmul.cuh",
        "warp + i * W < units",
        "warp + i * W < units - 1",
    ),
    "sums are cut, not rounded": (
        "mma_matmul_w16_m1_t1",
        "mma.cuh",
        "(bits + 0x7fff + (bits >> 16 & 1)) >> 16",
        "bits >> 16",
    ),
    "gate and up change places": (
        "mma_gate_up_w4_m2",
        "mma_gate_up.cu",
        "gate = sum_at<W, M>(0, j), up = sum_at<W, M>(1, j)",
        "gate = sum_at<W, M>(1, j), up = sum_at<W, M>(0, j)",
    ),
    "all rows of a bf16 tile take the first item": (
        "mma_expert_down_w4",
        "mma_expert.cu",
        "items[first + g] / items_a_row",
        "items[first] / items_a_row",
    ),
    "bf16 experts begin a tile apart": (
        "mma_expert_gate_up_w1",
        "mma_expert.cu",
        "tiles_n = (n + 15) / 16 * T",
        "tiles_n = (n + 15) / 16",
    ),
    "eps outside the root of bf16": (
        "norm16",
        "norm16.cu",
        "sqrtf(tree_sum(all) / (float)n + eps)",
        "(sqrtf(tree_sum(all) / (float)n) + eps)",
    ),
    "NaN becomes infinity": ("round16", "mma.cuh", "(u16)(bits >> 16 | 0x40)", "(u16)0x7f80"),
    "the bf16 key turns back": ("kv_append16", "kv_append16.cu", "b * c + a * s", "b * c - a * s"),
    "the bf16 query turns by its row": ("rope_query16", "rope_query16.cu", "positions[row] * half", "row * half"),
    "the newest bf16 key is not seen": ("attn16", "attention16.cu", "position + 1 - first)", "position - first)"),
    "tree rows of bf16 in order": ("attn16", "attention16.cu", "at < start ? at :", "true ? at :"),
    "ranges are summed without their weights": (
        "attn16_combine",
        "attention16.cu",
        "total = total + w * states",
        "total = total + states",
    ),
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A device with a cache of its own: what is wrong belongs in no other."""
    with open_device("cpu") as device:
        device.cache = CompileCache(tmp_path_factory.mktemp("cache"))
        yield device


def differing(device, name: str) -> int:
    return sum(result.differing for result in check_kernels(device, [KERNELS[name]]))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(faulty, fault, tmp_path, monkeypatch):
    plant(monkeypatch, tmp_path, *FAULTS[fault])
    assert differing(faulty, FAULTS[fault][0]) > 0


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("rmsnorm", "rmsnorm.cuh"),
        ("attn_combine", "attention.cuh"),
        ("matmul_w1_m1_r4", "matmul.cuh"),
        ("mma_expert_down_w4", "mma_expert.cu"),
    ],
)
def test_a_copy_without_a_fault_is_right(faulty, name, file, tmp_path, monkeypatch):
    """The way by a copied file itself makes no difference."""
    plant(monkeypatch, tmp_path, name, file, "\n", "\n")
    assert differing(faulty, name) == 0


def test_faults_stand_in_every_file():
    assert {KERNELS[fault[0]].file for fault in FAULTS.values()} >= set(sources("cpu")) - {"matmul_block.cu"}

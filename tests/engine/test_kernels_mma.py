"""Tier bf16: weights in fragment order; a row has the same bits in any company and by any kernel of its matrix."""

import math
import re

import numpy as np
import pytest

from kdtr_cli.engine.compile import source_text
from kdtr_cli.engine.devices import Device, open_device
from kdtr_cli.engine.devices.gpu import gpu_missing
from kdtr_cli.engine.fragments import pack_fragments, pack_pairs
from kdtr_cli.engine.kernel_case import normal
from kdtr_cli.engine.kernel_cases_weights import bits_of
from kdtr_cli.engine.kernel_table import SHARED_LIMIT
from kdtr_cli.engine.kernels import KERNELS
from kdtr_cli.engine.kernels_mma import (
    MMA,
    fixed_k,
    has_mla,
    mla_decode,
    mla_ranges,
    mma_expert,
    mma_gate_up,
    mma_matmul,
    warps,
)
from kdtr_cli.engine.launch import Launcher
from kdtr_cli.reference.twins import TWINS
from kdtr_cli.workflows.kernels import check_kernels

ROWS = 37
#: n and k: the matrices of Kimi-K2 cut short in n, and widths that are no multiple of anything
SIZES = ((20, 8), (33, 192), (24, 1536), (40, 2048), (18, 1096), (2600, 4104), (17, 7168))


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(gpu_missing()), reason="no GPU")]),
    ],
)
def device(request):
    with open_device(request.param) as opened:
        yield opened


@pytest.mark.quick
class TestFragments:
    def test_every_element_is_where_the_contract_says(self):
        rng = np.random.default_rng(0)
        w = rng.integers(0, 1 << 16, (2, 37, 136)).astype(np.uint16)
        packed = pack_fragments(w)
        assert packed.shape == (2, 3, 3, 1024)
        for tile, unit, at in np.ndindex(3, 3, 1024):
            quarter, lane, element = at // 256, at // 8 % 32, at % 8
            n = 16 * tile + 8 * (quarter % 2) + lane // 4
            k = 64 * unit + 32 * (quarter // 2) + 8 * (lane % 4) + element
            wanted = w[:, n, k] if n < 37 and k < 136 else np.zeros(2, np.uint16)
            assert (packed[:, tile, unit, at] == wanted).all(), (tile, unit, at)

    def test_gate_and_up_stand_tile_by_tile_in_turn(self):
        gate, up = np.full((20, 64), 1, np.uint16), np.full((20, 64), 2, np.uint16)
        pairs = pack_pairs(gate, up)
        assert pairs.shape == (2, 2, 1, 1024)
        assert (pairs[0, 0] == 1).all()
        assert (pairs[0, 1] == 2).all()
        assert (pairs[1, 0] > 0).sum() == 4 * 64


@pytest.mark.quick
class TestChoice:
    def test_warps_depend_on_the_matrix_alone(self):
        for n, k in ((1, 8), (512, 128), (128, 512), (12288, 1536), (2112, 7168), (7168, 8192), (7168, 18432)):
            for rows in (1, 8, 9, 16, 17, 24, 25, 32, 33, 64, 65, 1000):
                assert f"_w{warps(n, k)}_" in mma_matmul(rows, n, k)
                assert mma_matmul(rows, n, k) in KERNELS
                assert mma_gate_up(rows, k) in KERNELS

    @pytest.mark.parametrize("k", [8, 128, 192, 512, 1536, 2048, 4096, 7168, 8192, 18432])
    def test_what_is_chosen_is_in_the_table_and_made_for_that_k(self, k):
        names = [mma_matmul(rows, n, k) for rows in (1, 8, 9, 64) for n in (16, 2112, 20000)]
        names += [mma_gate_up(rows, k) for rows in (1, 9)] + [mma_expert(part, k) for part in ("gate_up", "down")]
        for name in names:
            assert KERNELS[name].tier == "bf16"
            assert fixed_k(name) in (None, k)

    def test_ranges_of_the_attention_have_room_at_every_length(self):
        text = source_text("mla.cuh")
        rule = "length <= 2048 ? 64 : length <= 16384 ? 128 : length <= 65536 ? 256 : 1024"
        assert f"return {rule};" in text
        most = 0
        for length in (*range(1, 4200), 16384, 16385, 65536, 65537, 131072):
            size = 64 if length <= 2048 else 128 if length <= 16384 else 256 if length <= 65536 else 1024
            most = max(most, -(-length // size))
            assert mla_ranges(length) == most or length > 4200
        assert [mla_ranges(n) for n in (2048, 2049, 4097, 16384, 16385, 65536, 65537, 1 << 20)] == [
            32, 32, 33, 128, 128, 256, 256, 1024,
        ]  # fmt: skip

    def test_the_attentions_blocks_fit_the_device_and_divide_the_heads(self):
        assert mla_decode(1, 8192, 64, 232448) == "mla_decode_h16"
        assert mla_decode(17, 8192, 64, 232448) == mla_decode(1, 32768, 64, 232448) == "mla_decode_h32"
        assert mla_decode(17, 8192, 64, 101376) == mla_decode(17, 8192, 48, 232448) == "mla_decode_h16"
        assert KERNELS["mla_decode_h16"].shared({}) <= SHARED_LIMIT < KERNELS["mla_decode_h32"].shared({}) * 2 < 232448
        assert has_mla("gpu", 64, 512, 64)
        assert not any((has_mla("cpu", 64, 512, 64), has_mla("gpu", 24, 512, 64), has_mla("gpu", 64, 256, 64)))

    def test_a_fixed_k_is_used(self):
        assert mma_matmul(1, 18432, 7168) == "mma_matmul_w8_m1_t1_k7168"
        assert mma_matmul(12, 12288, 1536) == "mma_matmul_w4_m2_t1_k1536"
        assert mma_expert("down", 2048) == "mma_expert_down_w4_k2048"
        assert mma_gate_up(1, 7168) == "mma_gate_up_w8_m1_k7168"

    @pytest.mark.parametrize("name", [k.name for k in MMA if re.search(r"_w\d", k.name)])
    def test_block_and_shared_memory_follow_the_name(self, name):
        w, m, t = (int((re.search(rf"_{letter}(\d+)", name) or [0, 1])[1]) for letter in "wmt")
        t = 2 if "gate_up" in name else t
        assert math.prod(KERNELS[name].block) == 32 * w
        assert KERNELS[name].shared({}) == 512 * w * m * t


def product(device: Device, kernel: str, x: np.ndarray, w: np.ndarray, n: int) -> np.ndarray:
    """float32 bits of x w^T by one kernel."""
    rows, k = x.shape
    y = device.alloc("y", (rows, n), np.float32)
    values = {
        "x": device.upload("x", x),
        "w": device.upload("w", w),
        "bias": None,
        "residual": None,
        "y32": y,
        "y16": None,
    }
    values |= {"rows": rows, "n": n, "k": k, "heads": 1, "x_row": k, "y_row": n, "x_head": 0, "y_head": 0}
    Launcher(device)(kernel, **values)
    out = device.read(y)
    device.free_all()
    return out.view(np.uint32)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_a_row_has_the_same_bits_alone_in_any_place_and_by_every_kernel(device, n, k):
    rng = np.random.default_rng(n + k)
    x = bits_of(normal(rng, ROWS, k), "bf16")
    w = pack_fragments(bits_of(normal(rng, 1, n, k), "bf16"))
    wanted = product(device, mma_matmul(ROWS, n, k), x, w, n)
    alike = f"mma_matmul_w{warps(n, k)}_"
    kernels = [name for name in KERNELS if name.startswith(alike) and fixed_k(name) in (None, k)]
    assert len(kernels) >= 3
    for name in kernels if n < 1000 else kernels[:1]:
        assert (product(device, name, x, w, n) == wanted).all(), name
        for row in (0, 7, 36):
            assert (product(device, name, x[row : row + 1], w, n) == wanted[row]).all(), (name, row)
    turned = np.roll(x, 5, 0)
    assert (product(device, mma_matmul(ROWS, n, k), turned, w, n) == np.roll(wanted, 5, 0)).all()


def test_an_experts_item_has_the_same_bits_alone(device):
    rng = np.random.default_rng(3)
    n, k, items = 24, 192, 19
    x = bits_of(normal(rng, items, k), "bf16")
    w = device.upload("w", pack_fragments(bits_of(normal(rng, 1, n, k), "bf16"))[None, 0])

    def run(order: list[int]) -> np.ndarray:
        tiles = np.array([(0, first, min(8, len(order) - first)) for first in range(0, len(order), 8)], np.int32)
        y = device.alloc("y", (items, n), np.float32)
        Launcher(device)(
            mma_expert("down", k),
            x=device.upload("x", x),
            w=w,
            items=device.upload("items", np.array(order, np.int32)),
            tiles=device.upload("tiles", tiles),
            tile_count=device.upload("tile_count", np.array([len(tiles)], np.int32)),
            y=y,
            n=n,
            k=k,
            items_a_row=1,
            tile_places=len(tiles),
        )
        return device.read(y).view(np.uint32)

    wanted = run(list(range(items)))
    assert (run(list(range(items))[::-1]) == wanted).all()
    for item in (0, 8, 18):
        assert (run([item])[item] == wanted[item]).all()
    device.free_all()


class TestCloseness:
    """What `kdtr kernels test` asks of a tier that need not have the twin's bits."""

    def check(self, device, monkeypatch, change) -> list[int]:
        exact = TWINS["norm16"]

        def changed(x, weight, y16, y32, n, eps, **_):
            exact(x, weight, y16, y32, n, eps)
            change(x, y16)

        monkeypatch.setitem(TWINS, "norm16", changed)
        return [r.differing for r in check_kernels(device, [KERNELS["norm16"]])]

    def test_a_step_of_bf16_passes_and_three_do_not(self, device, monkeypatch):
        def off(steps):
            return lambda x, y16: y16.__setitem__((0, 0), y16[0, 0] + steps)

        assert set(self.check(device, monkeypatch, off(1))) == {0}
        assert set(self.check(device, monkeypatch, off(3))) == {1}

    def test_what_was_not_written_is_seen(self, device, monkeypatch):
        def nan(x, y16):
            y16[0, 0] = 0x7FC0  # NaN is wanted, and a number is there

        assert set(self.check(device, monkeypatch, nan)) == {1}
        assert set(self.check(device, monkeypatch, lambda x, y16: y16.__setitem__((0, 0), 0xFFFF))) == {1}

    def test_an_input_that_changed_is_seen(self, device, monkeypatch):
        assert set(self.check(device, monkeypatch, lambda x, y16: x.__setitem__((0, 0), 1e-30))) == {1}

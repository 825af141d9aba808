"""CUDA's warp operations, arithmetic and types on the CPU: each against its plain meaning or NumPy."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kdtr_cli.engine.devices.cpu import CpuDevice

CU = Path(__file__).parent / "cu"
f32 = np.float32


@pytest.fixture(scope="module", params=[(), ("-DKDTR_UCONTEXT",)], ids=["swap", "ucontext"])
def device(request):
    with CpuDevice(threads=2, defines=request.param) as d:
        yield d


@pytest.fixture(scope="module")
def plain():
    with CpuDevice(threads=2) as d:
        yield d


def run(device, file, entry, block, *args, grid=1, shared=0):
    device.launch(device.kernel(CU / file, entry), grid, block, args, shared)


# ---- warp operations -------------------------------------------------------------------------------------------------

finite = st.floats(-(2.0**100), 2.0**100, width=32)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([1, 4, 7]), st.data())
def test_the_collective_fold_has_the_bits_of_five_shuffles_and_of_numpy(plain, n, data):
    x = data.draw(hnp.arrays(f32, (32, n), elements=finite | st.sampled_from([0.0, -0.0, float("inf")])))
    plain.free_all()
    a, b = plain.alloc("collective", (32, n), f32), plain.alloc("shuffles", (32, n), f32)
    run(plain, "reduction.cu", f"fold_{n}", 32, plain.upload("x", x), a, b)
    want = x
    with np.errstate(over="ignore"):
        for o in (16, 8, 4, 2, 1):
            want = want + want[np.arange(32) ^ o]
    assert plain.read(a).tobytes() == want.tobytes()
    assert plain.read(b).tobytes() == want.tobytes()


def test_the_fold_keeps_nan_in_every_lane_of_its_own_value_only(device):
    x = np.ones((64, 4), f32)
    x[37, 2] = np.nan
    a, b = device.alloc("collective", (64, 4), f32), device.alloc("shuffles", (64, 4), f32)
    run(device, "reduction.cu", "fold_4", 64, device.upload("x", x), a, b)
    for got in (device.read(a), device.read(b)):
        assert np.isnan(got[32:, 2]).all()
        assert (np.delete(got, 2, axis=1) == 32).all()
        assert (got[:32] == 32).all()


@settings(max_examples=25, deadline=None)
@given(hnp.arrays(np.int8, 64))
def test_a_warp_reduction_with_an_index_gives_every_lane_the_first_maximum(plain, x):
    plain.free_all()
    chosen = plain.alloc("chosen", 64, np.int32)
    run(plain, "reduction.cu", "best", 64, plain.upload("x", x.astype(f32)), chosen)
    want = np.repeat([int(np.argmax(x[:32])), 32 + int(np.argmax(x[32:]))], 32)
    assert plain.read(chosen).tolist() == want.tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 31), st.sampled_from([2, 4, 8, 16, 32]))
def test_shuffles_move_what_cuda_says(plain, lane, width):
    plain.free_all()
    y = plain.alloc("y", (4, 32), np.int32)
    x = np.arange(100, 132, dtype=np.int32)
    run(plain, "reduction.cu", "shuffles", 32, plain.upload("x", x), y, np.int32(lane), np.int32(width))
    t = np.arange(32)
    base, last = t & -width, (t & -width) + width - 1
    xor, up, down = t ^ lane, t - lane, t + lane
    want = [
        base + lane % width,
        np.where(xor > last, t, xor),
        np.where(up < base, t, up),
        np.where(down > last, t, down),
    ]
    assert plain.read(y).tolist() == [x[w].tolist() for w in want]


def test_a_shuffle_moves_eight_bytes(device):
    x = np.random.default_rng(0).standard_normal(32)
    y = device.alloc("y", 32, np.float64)
    run(device, "reduction.cu", "wide_shuffle", 32, device.upload("x", x), y)
    assert np.array_equal(device.read(y), x[np.arange(32) ^ 5])


@pytest.mark.parametrize("seed", range(3))
def test_votes_matches_and_integer_reductions(device, seed):
    x = np.random.default_rng(seed).integers(-seed, 4, 64).astype(np.int32)
    y = device.alloc("y", (2, 16), np.int32)
    run(device, "reduction.cu", "votes", 64, device.upload("x", x), y)
    bits = 1 << np.arange(32, dtype=np.uint32)
    for w, got in enumerate(device.read(y)):
        v = x[32 * w : 32 * w + 32]
        yes = v > 0
        want = [
            bits[yes].sum(dtype=np.uint32), bits[v == v[7]].sum(dtype=np.uint32), yes.any(), yes.all(),
            v.sum(), v.min(), v.max(),
            np.bitwise_and.reduce(v), np.bitwise_or.reduce(v), np.bitwise_xor.reduce(v),
            (x > 0).sum(), (x > 0).all(), (x > 0).any(),
        ]  # fmt: skip
        assert got[:13].tolist() == [int(np.int64(n).astype(np.int32)) for n in want]


def test_the_halves_of_a_warp_may_work_apart(device):
    x = np.arange(32, dtype=f32)
    a = device.upload("x", x)
    run(device, "reduction.cu", "half_warps", 32, a)
    assert device.read(a).tolist() == [12.0] * 16 + [float(x[16:].sum())] * 16


# ---- arithmetic ------------------------------------------------------------------------------------------------------

any_float = st.floats(width=32) | st.floats(-(2.0**-120), 2.0**-120, width=32)


def same_bits(a, b):
    """The same bits, or NaN on both sides (sign and payload of a NaN are outside the contract)."""
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(
        np.signbit(a)[~np.isnan(a)], np.signbit(b)[~np.isnan(b)]
    )


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_float_operations_have_numpys_bits_subnormals_and_nan_included(plain, data):
    a, b, c = data.draw(hnp.arrays(f32, (3, 33), elements=any_float))
    plain.free_all()
    y = plain.alloc("y", (8, 33), f32)
    arrays = [plain.upload(n, v) for n, v in (("a", a), ("b", b), ("c", c))]
    run(plain, "intrinsics.cu", "float_ops", 64, *arrays, y, np.int32(33))
    with np.errstate(all="ignore"):
        want = [
            a * b + c, a / b, np.sqrt(a), np.rint(a), a * b + c, (f32(1) / b) / np.sqrt(np.abs(c)),
            (np.floor(a) - np.ceil(b)) + np.trunc(c), np.copysign(a, b),
        ]  # fmt: skip
    for i, (got, w) in enumerate(zip(plain.read(y), want, strict=True)):
        assert same_bits(got, w), f"operation {i}"


def test_subnormal_products_are_not_flushed(plain):
    tiny = np.full(1, 2.0**-140, f32)
    y = plain.alloc("y", (8, 1), f32)
    half = plain.upload("b", np.full(1, 0.5, f32))
    run(
        plain,
        "intrinsics.cu",
        "float_ops",
        1,
        plain.upload("a", tiny),
        half,
        plain.upload("c", np.zeros(1, f32)),
        y,
        np.int32(1),
    )
    assert plain.read(y)[0, 0] == f32(2.0**-141) != 0


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_double_operations_have_numpys_bits(plain, data):
    a, b = data.draw(hnp.arrays(np.float64, (2, 17)))
    plain.free_all()
    y = plain.alloc("y", (5, 17), np.float64)
    run(plain, "intrinsics.cu", "double_ops", 32, plain.upload("a", a), plain.upload("b", b), y, np.int32(17))
    with np.errstate(all="ignore"):
        want = [a * b + a, a / b, np.sqrt(np.abs(a)), a.astype(f32).astype(np.float64), np.rint(a)]
    assert all(same_bits(got, w) for got, w in zip(plain.read(y), want, strict=True))


def test_conversions_to_int_saturate_and_take_nan_to_zero_as_a_gpu_does(plain):
    x = np.array([1.5, 2.5, -1.5, -0.0, 3e9, -3e9, 5e9, 1e-42, np.nan, np.inf, -np.inf], f32)
    y = plain.alloc("y", (5, x.size), np.int32)
    run(plain, "intrinsics.cu", "to_int", 1, plain.upload("x", x), y, np.int32(x.size))
    top, low = 2**31 - 1, -(2**31)
    got = plain.read(y)
    assert got[0].tolist() == [1, 2, -1, 0, top, low, top, 0, 0, top, low]
    assert got[1].tolist() == [2, 2, -2, 0, top, low, top, 0, 0, top, low]
    assert got[2].view(np.uint32).tolist() == [1, 2, 0, 0, 3000000000, 0, 2**32 - 1, 0, 0, 2**32 - 1, 0]
    assert np.array_equal(got[3], x.view(np.int32))
    kinds = 1 * np.isnan(x) + 2 * np.isinf(x) + 4 * np.isfinite(x)
    assert np.array_equal(got[4] & 7, kinds)
    assert np.array_equal(got[4][~np.isnan(x)] >> 3, np.signbit(x)[~np.isnan(x)])


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.uint32, (2, 8), elements=st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**31, 2**32 - 1])))
def test_bit_operations(plain, ab):
    plain.free_all()
    y = plain.alloc("y", (8, 14), np.uint32)
    run(plain, "intrinsics.cu", "bit_ops", 1, plain.upload("a", ab[0]), plain.upload("b", ab[1]), y, np.int32(8))
    for u, v, got in zip(*ab.tolist(), plain.read(y).tolist(), strict=True):
        w = u << 32 | v
        signed = [n - 2**32 if n >= 2**31 else n for n in (u, v)]
        assert got == [
            u * v >> 32, u.bit_count(), w.bit_count(), 32 - u.bit_length(), 64 - w.bit_length(),
            (u & -u).bit_length(), (w & -w).bit_length(), int(f"{u:032b}"[::-1], 2), (w * w >> 64) % 2**32,
            min(u, v), max(u, v), min(signed) % 2**32,
            (u & 255) | (v & 255) << 8 | (u & 0xFF00) << 8 | (v >> 8 & 255) << 24,
            (v << 32 | u) << 13 >> 32 & 0xFFFFFFFF,
        ]  # fmt: skip


def test_vector_types_have_cudas_sizes_and_alignments(plain):
    x = np.arange(32, dtype=f32).reshape(8, 4)
    y, sizes = plain.alloc("y", (8, 4), f32), plain.alloc("sizes", 16, np.int32)
    run(plain, "intrinsics.cu", "vectors", 8, plain.upload("x", x), y, sizes)
    assert np.array_equal(plain.read(y), x[:, ::-1])
    assert plain.read(sizes).tolist() == [8, 8, 12, 4, 16, 16, 8, 16, 4, 4, 4, 8, 16, 16, 12, 4]


def test_atomics_over_several_os_threads():
    v = np.random.default_rng(0).integers(1, 16, 20000).astype(np.int32)
    with CpuDevice(threads=4) as d:
        start = np.zeros(20, np.int32)
        start[17] = 99
        h, total = d.upload("h", start), d.upload("total", np.zeros(1, np.uint64))
        run(d, "intrinsics.cu", "histogram", 128, d.upload("v", v), h, total, np.int32(v.size), grid=157)
        got = d.read(h)
        assert np.array_equal(got[:16], np.bincount(v, minlength=16))
        assert got[16:].tolist() == [15, 1, (1 << 16) - 2, 2 * v.size]
        assert d.read(total)[0] == v.sum()


def test_three_dimensional_grids_and_blocks(device):
    y = device.alloc("y", 24 * 30, np.int32)
    run(device, "intrinsics.cu", "where", (5, 3, 2), y, grid=(2, 3, 4))
    assert device.read(y).tolist() == [1000 * b + t for b in range(24) for t in range(30)]

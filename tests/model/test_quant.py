"""Packed integers and e4m3 blocks to float32 and back, against the formats' definitions, element by element."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr_cli.errors import InputError
from kdtr_cli.model.quant import (
    dequantise,
    dequantise_fp8,
    dequantise_int4,
    pack_int4,
    quantise_fp8,
    quantise_int4,
    unpack_int4,
)
from kdtr_cli.model.quantisation import Quantisation

pytestmark = pytest.mark.quick
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


def e4m3_value(code: int) -> float:
    """Sign, four bits of exponent with bias 7, three of mantissa; 0x7f and 0xff are NaN, there is no infinity."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


# --- int4


@given(st.integers(1, 5), st.integers(1, 41), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_element_i_stands_in_bits_4_i_mod_8_plus_8(rows: int, columns: int, seed: int) -> None:
    q = np.random.default_rng(seed).integers(-8, 8, (rows, columns)).astype(np.int8)
    packed = pack_int4(q)
    assert packed.dtype == np.dtype("<i4")
    assert packed.shape == (rows, (columns + 7) // 8)
    for o in range(rows):
        for word in range(packed.shape[1]):
            bits = int(packed[o, word]) & 0xFFFFFFFF
            for j in range(8):
                i = 8 * word + j
                assert (bits >> (4 * j)) & 15 == (int(q[o, i]) + 8 if i < columns else 0)
    np.testing.assert_array_equal(unpack_int4(packed, columns), q)


def test_published_example_of_nibble_order() -> None:
    # 0x76543210: the lowest nibble is the first element; 0 is −8
    assert unpack_int4(np.array([[0x76543210, -1]], np.int32), 9).tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1, 7]]


@pytest.mark.parametrize("group", [1, 3, 7, 8, 32, 50, 64])
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 50, 64])
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_int4_is_q_times_scale_exactly(group: int, columns: int, dtype: type) -> None:
    rng = np.random.default_rng(columns * 1000 + group)
    q = rng.integers(-8, 8, (3, columns)).astype(np.int8)
    scale = (rng.random((3, -(-columns // group))) * 0.1 + 1e-4).astype(dtype)
    got = dequantise_int4(pack_int4(q), scale, columns, group)
    assert got.dtype == np.float32
    for o in range(3):
        for i in range(columns):
            exact = float(q[o, i]) * float(scale[o, i // group])
            assert got[o, i] == (exact if dtype is not np.float32 else np.float32(exact))


@given(st.integers(1, 4), st.integers(1, 70), st.sampled_from([1, 5, 8, 32]), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_quantising_int4_is_the_minmax_observer(rows: int, columns: int, group: int, seed: int) -> None:
    w = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    packed, scale = quantise_int4(w.copy(), group)
    assert scale.dtype == BF16
    q = unpack_int4(packed, columns)
    for o in range(rows):
        for g in range(scale.shape[1]):
            part = w[o, g * group : (g + 1) * group]
            want = (np.abs(part).max() / np.float32(7.5)).astype(BF16)
            assert scale[o, g] == want
            steps = part / np.float32(want)
            np.testing.assert_array_equal(q[o, g * group : (g + 1) * group], np.clip(np.rint(steps), -8, 7))


def test_quantising_leaves_its_input_alone() -> None:
    w = np.random.default_rng(0).standard_normal((4, 40)).astype(np.float32)
    w.flags.writeable = False
    quantise_int4(w, 32)
    quantise_fp8(w, (3, 16))


def test_a_group_of_zeros_gets_a_scale_that_is_no_zero() -> None:
    w = np.zeros((2, 40), np.float32)
    w[1, 33] = 3
    packed, scale = quantise_int4(w, 32)
    assert scale.astype(float).tolist() == [[2.0**-23] * 2, [2.0**-23, float(BF16(0.4))]]
    np.testing.assert_allclose(dequantise_int4(packed, scale, 40, 32), w, atol=0.21)
    w8, fp8_scale = quantise_fp8(w, (1, 32))
    assert fp8_scale.tolist() == [[1, 1], [1, float(np.float32(3) / np.float32(448))]]
    assert np.array_equal(dequantise_fp8(w8, fp8_scale, (1, 32)) != 0, w != 0)


def test_a_value_on_the_grid_whose_highest_is_minus_7_and_a_half_scales_survives() -> None:
    # max|w| = 7.5 scale exactly: the scale is found again, and -7.5 rounds to even
    w = np.arange(-7, 8, dtype=np.float32)[None].repeat(2, 0) * 0.5
    w[:, 0] = [-3.75, 3.75]
    packed, scale = quantise_int4(w.copy(), 15)
    assert scale.astype(float).tolist() == [[0.5], [0.5]]
    q = unpack_int4(packed, 15)
    assert q[:, 0].tolist() == [-8, 7]  # 8 is clamped to 7
    np.testing.assert_array_equal(dequantise_int4(packed, scale, 15, 15)[:, 1:], w[:, 1:])


# --- fp8


def test_every_e4m3_value() -> None:
    codes = np.arange(256, dtype=np.uint8).view(E4M3).reshape(16, 16)
    got = dequantise_fp8(codes, np.ones((1, 1), np.float32), (128, 128)).reshape(-1)
    np.testing.assert_array_equal(got, np.array([e4m3_value(code) for code in range(256)], np.float32))


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (128, 128), (129, 130), (200, 260)])
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (3, 5)])
def test_fp8_is_value_times_scale_of_its_block_rounded_once(shape: tuple[int, int], block: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape[1] + block[0])
    codes = rng.integers(0, 127, shape).astype(np.uint8)
    scale = (rng.random((-(-shape[0] // block[0]), -(-shape[1] // block[1]))) + 1e-3).astype(np.float32)
    got = dequantise_fp8(codes.view(E4M3), scale, block)
    assert got.dtype == np.float32
    rows, columns = np.arange(shape[0])[:, None] // block[0], np.arange(shape[1])[None] // block[1]
    values = np.array([e4m3_value(code) for code in range(256)])[codes]
    np.testing.assert_array_equal(got, (values * scale[rows, columns].astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize("shape", [(5, 7), (130, 257)])
@pytest.mark.parametrize("block", [(128, 128), (3, 5)])
def test_quantising_fp8_uses_the_whole_range_of_each_block(shape: tuple[int, int], block: tuple[int, int]) -> None:
    w = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    w8, scale = quantise_fp8(w, block)
    assert (w8.dtype, scale.dtype) == (np.dtype(E4M3), np.dtype(np.float32))
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            part = np.s_[r * block[0] : (r + 1) * block[0], c * block[1] : (c + 1) * block[1]]
            assert scale[r, c] == np.abs(w[part]).max() / np.float32(448)
            assert np.abs(w8[part].astype(np.float32)).max() == 448
            np.testing.assert_array_equal(w8[part], (w[part] / scale[r, c]).astype(E4M3))
    assert np.abs(dequantise_fp8(w8, scale, block) - w).max() <= np.abs(w).max() / 16


# --- what a checkpoint may not hold


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, 0.0])
def test_a_scale_that_is_not_finite_and_positive_is_named(bad: float) -> None:
    scale = np.ones((2, 2), BF16)
    scale[1, 0] = bad
    parts = {"x.weight_packed": np.zeros((2, 5), np.int32), "x.weight_scale": scale,
             "x.weight_shape": np.array([2, 40], np.int32)}  # fmt: skip
    with pytest.raises(InputError, match=r"^tensor x\.weight_scale\[1, 0\] is .*: a scale must be finite and above 0"):
        dequantise(Quantisation("int4", group_size=32), "x.weight", (2, 40), parts)
    fp8 = {"x.weight": np.zeros((2, 40), E4M3), "x.weight_scale_inv": scale.astype(np.float32)}
    with pytest.raises(InputError, match=r"^tensor x\.weight_scale_inv\[1, 0\] is"):
        dequantise(Quantisation("fp8", block=(1, 20)), "x.weight", (2, 40), fp8)


@pytest.mark.parametrize("told", [[40, 2], [2, 39], [0, 0], [2, -40]])
def test_a_recorded_shape_that_is_another_is_named(told: list[int]) -> None:
    parts = {"x.weight_packed": np.zeros((2, 5), np.int32), "x.weight_scale": np.ones((2, 2), BF16),
             "x.weight_shape": np.array(told, np.int64)}  # fmt: skip
    with pytest.raises(InputError, match=r"^tensor x\.weight_shape holds .*needs \[2, 40\]"):
        dequantise(Quantisation("int4", group_size=32), "x.weight", (2, 40), parts)

"""Metrics against SciPy, ml_dtypes and brute force."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, rel_entr

from kdtr_cli.parity.metrics import abs_difference, equal_rows, kl_divergence, match_ids, top_k, ulp_distance

pytestmark = pytest.mark.quick

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
FAR = 2**64 - 1


def steps_by_nextafter(a: object, b: object, limit: int) -> int:
    """How often NumPy's own nextafter must be applied to get from a to b."""
    n = 0
    while a != b:
        a, n = np.nextafter(a, b), n + 1
        assert n <= limit
    return n


class TestUlp:
    @pytest.mark.parametrize("name", ["float16", "float32", "float64"])
    @given(value=st.floats(-1e4, 1e4, width=16), steps=st.integers(-40, 40))
    @settings(max_examples=60)
    def test_counts_the_steps_of_nextafter(self, name, value, steps):
        a = np.array([[value]], TYPES[name])
        b = a.copy()
        for _ in range(abs(steps)):
            b = np.nextafter(b, np.array(math.copysign(np.inf, steps), TYPES[name]))
        assert ulp_distance(a, b, a.dtype)[0, 0] == steps_by_nextafter(a[0, 0], b[0, 0], 50)
        assert ulp_distance(b, a, a.dtype)[0, 0] == ulp_distance(a, b, a.dtype)[0, 0]

    def test_bfloat16_against_all_its_values_in_order(self):
        bits = np.arange(2**16, dtype=np.uint16)
        values = bits.view(ml_dtypes.bfloat16)
        finite = values[np.isfinite(values.astype(np.float32))]
        order = np.unique(finite.astype(np.float32))  # ascending, -0 and +0 as one
        row = order.astype(ml_dtypes.bfloat16)[None]
        zero = np.zeros_like(row)
        place = np.arange(len(order)) - int(np.flatnonzero(order == 0)[0])
        assert np.array_equal(ulp_distance(row, zero, row.dtype)[0], np.abs(place).astype(np.uint64))
        assert (ulp_distance(row[:, 1:], row[:, :-1], row.dtype) == 1).all()

    @pytest.mark.parametrize(("value", "ulp"), [(1.0, 0.0078125), (16.0, 0.125), (40.0, 0.25)])
    def test_a_bfloat16_ulp_grows_with_the_value(self, value, ulp):
        a, b = np.array([[value]]), np.array([[value + ulp]])
        assert ulp_distance(a, b, np.dtype(ml_dtypes.bfloat16))[0, 0] == 1

    def test_zeros_are_one_value(self):
        a, b = np.array([[-0.0]], np.float32), np.array([[0.0]], np.float32)
        assert ulp_distance(a, b, a.dtype)[0, 0] == 0

    def test_across_zero_both_sides_count(self):
        tiny = np.array([[1e-45]], np.float32)
        assert ulp_distance(tiny, -tiny, tiny.dtype)[0, 0] == 2

    def test_the_whole_line_of_float64_does_not_overflow(self):
        big = np.array([[np.finfo(np.float64).max]])
        assert FAR > ulp_distance(big, -big, big.dtype)[0, 0] > 2**63

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_is_out_of_reach(self, bad):
        a, b = np.array([[bad]], np.float32), np.array([[1.0]], np.float32)
        assert ulp_distance(a, b, a.dtype)[0, 0] == FAR
        assert ulp_distance(b, a, a.dtype)[0, 0] == FAR
        assert ulp_distance(a, a, a.dtype)[0, 0] == FAR

    def test_a_signalling_nan_is_one_too_and_no_warning(self):
        a = np.array([[0x7FA00000, 0xFFA00000]], np.uint32).view(np.float32)
        b = np.ones_like(a)
        assert (ulp_distance(a, b, a.dtype) == FAR).all()
        assert np.isnan(abs_difference(a, b)).all()
        assert np.isnan(kl_divergence(a, b)).all()
        assert top_k(a[0], 1)[0].tolist() == [0]

    def test_a_golden_beyond_the_storage_type_is_out_of_reach(self):
        top = np.array([[65504.0]], np.float16)
        assert ulp_distance(top, np.array([[1e300]]), top.dtype)[0, 0] == FAR

    def test_the_golden_is_rounded_to_the_storage_type(self):
        run, golden = np.array([[1.0]], np.float32), np.array([[1.0 + 1e-9]])
        assert ulp_distance(run, golden, run.dtype)[0, 0] == 0


class TestKl:
    @given(seed=st.integers(0, 2**32 - 1), vocab=st.integers(1, 300), scale=st.sampled_from([1e-6, 1.0, 30.0, 300.0]))
    @settings(max_examples=60)
    def test_equals_scipy(self, seed, vocab, scale):
        rng = np.random.default_rng(seed)
        a, b = rng.normal(0, scale, (2, 3, vocab))
        p, q = np.exp(log_softmax(b, axis=1)), np.exp(log_softmax(a, axis=1))
        ours = kl_divergence(a, b)
        assert (ours >= 0).all()
        if (q > 1e-300).all():  # else SciPy's q underflows, where ours goes by logarithms
            np.testing.assert_allclose(ours, rel_entr(p, q).sum(axis=1), rtol=1e-9, atol=1e-14)

    def test_is_taken_from_the_golden_to_the_run(self):
        run, golden = np.array([[0.0, 0.0]]), np.array([[5.0, 0.0]])
        p = np.exp([5.0, 0.0]) / np.exp([5.0, 0.0]).sum()
        assert kl_divergence(run, golden)[0] == pytest.approx((p * np.log(p / 0.5)).sum(), rel=1e-14)
        assert kl_divergence(run, golden)[0] != pytest.approx(kl_divergence(golden, run)[0], rel=1e-3)

    def test_a_shift_of_all_logits_is_no_difference(self):
        x = np.random.default_rng(0).normal(0, 3, (1, 5000))
        assert kl_divergence(x + 1.0, x)[0] < 1e-15

    def test_a_swap_of_the_top_two_shows(self):
        x = np.random.default_rng(0).normal(0, 3, (1, 5000))
        first, second = np.argsort(-x[0])[:2]
        y = x.copy()
        y[0, [first, second]] = x[0, [second, first]]
        assert kl_divergence(y, x)[0] > 1e-4

    def test_zero_times_the_logarithm_of_zero_is_zero(self):
        golden, run = np.array([[0.0, -1e4]]), np.array([[0.0, -2e4]])
        assert kl_divergence(run, golden)[0] == 0

    def test_even_where_the_logarithm_is_minus_infinity_on_both_sides(self):
        row = np.array([[1e308, -1e308]])
        assert kl_divergence(row, row)[0] == 0

    def test_a_token_that_the_run_holds_impossible_is_infinitely_far(self):
        golden = np.array([[0.0, 0.0]])
        run = np.array([[1e308, -1e308]])
        assert kl_divergence(run, golden)[0] == np.inf

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @pytest.mark.parametrize("side", [0, 1])
    def test_is_nan_where_a_logit_is_none(self, bad, side):
        rows = [np.zeros((2, 4)), np.zeros((2, 4))]
        rows[side][1, 2] = bad
        kl = kl_divergence(*rows)
        assert kl[0] == 0
        assert np.isnan(kl[1])

    def test_is_taken_in_float64(self):
        a, b = np.float16([[10.0, 0.0]]), np.float16([[10.01, 0.0]])
        assert kl_divergence(a, b)[0] == kl_divergence(a.astype(float), b.astype(float))[0] != 0


class TestRows:
    def test_bits_decide(self):
        a = np.array([[0.0, 1.0], [np.nan, 1.0], [2.0, 1.0]], np.float32)
        b = np.array([[-0.0, 1.0], [np.nan, 1.0], [2.0, 1.0]], np.float32)
        assert equal_rows(a, b).tolist() == [False, True, True]

    @pytest.mark.parametrize("name", TYPES)
    @given(row=st.integers(0, 2), column=st.integers(0, 6), data=st.data())
    @settings(max_examples=30)
    def test_one_flipped_bit_is_seen(self, name, row, column, data):
        a = np.random.default_rng(1).normal(0, 3, (3, 7)).astype(TYPES[name])
        b = a.copy()
        raw = b.view(f"u{b.dtype.itemsize}")
        raw[row, column] ^= raw.dtype.type(1 << data.draw(st.integers(0, b.dtype.itemsize * 8 - 1)))
        assert equal_rows(a, b).tolist() == [i != row for i in range(3)]

    def test_the_difference_of_float16_is_taken_in_float64(self):
        a, b = np.float16([[60000.0]]), np.float16([[-60000.0]])
        assert abs_difference(a, b)[0, 0] == 2 * float(np.float16(60000))
        assert np.isnan(abs_difference(np.array([[np.nan]]), b)[0, 0])


class TestTop:
    @given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=30), k=st.integers(1, 8))
    def test_larger_first_then_the_smaller_id(self, values, k):
        ids, top = top_k(np.array(values, np.float32), k)
        expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
        assert ids.tolist() == expected
        assert top.tolist() == [values[i] for i in expected]

    @given(seed=st.integers(0, 1000))
    @settings(max_examples=20)
    def test_a_long_row_follows_the_same_rule(self, seed):
        row = np.random.default_rng(seed).integers(0, 9, 10_000).astype(np.float32)
        expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:5]
        assert top_k(row, 5)[0].tolist() == expected

    def test_nan_stands_first_and_zeros_are_equal(self):
        assert top_k(np.array([1.0, np.nan, 2.0]), 2)[0].tolist() == [1, 2]
        assert top_k(np.array([-0.0, 0.0, -1.0]), 2)[0].tolist() == [0, 1]


class TestMatchIds:
    @given(data=st.data(), n=st.integers(0, 4), k=st.integers(0, 5), length=st.integers(0, 6))
    def test_finds_what_a_search_finds(self, data, n, k, length):
        ids = st.integers(0, 8)
        wanted = np.array(data.draw(st.lists(st.lists(ids, min_size=k, max_size=k), min_size=n, max_size=n)), np.int32)
        rows = st.lists(ids, min_size=length, max_size=length, unique=True)
        given_ids = np.array(data.draw(st.lists(rows, min_size=n, max_size=n)), np.int32)
        place, found = match_ids(wanted.reshape(n, k), given_ids.reshape(n, length))
        for i in range(n):
            for j in range(k):
                at = np.flatnonzero(given_ids.reshape(n, length)[i] == wanted.reshape(n, k)[i, j])
                assert found[i, j] == bool(len(at))
                assert place[i, j] == (at[0] if len(at) else 0)

"""Mean and percentiles of a distribution against NumPy and exact sums, for any cut of the values."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr_cli.parity.distribution import Distribution, distribution_of, merged

pytestmark = pytest.mark.quick

BIN = 2.0**-8


def same(one: Distribution, other: Distribution) -> bool:
    arrays = all(
        np.array_equal(getattr(one, n), getattr(other, n), equal_nan=True) for n in ("keys", "counts", "largest")
    )
    return arrays and one.total == other.total


class TestPercentile:
    @given(
        values=st.lists(st.floats(0, 1e300, allow_subnormal=False), min_size=1, max_size=300),
        percent=st.sampled_from([0, 1, 50, 90, 99, 100]),
    )
    @settings(deadline=None, max_examples=100)
    def test_is_numpys_nearest_rank_to_within_a_bin_and_never_below(self, values, percent):
        ours = distribution_of(np.array(values)).percentile(percent)
        exact = np.percentile(values, percent, method="inverted_cdf")
        assert exact <= ours <= exact * (1 + BIN)
        assert ours in values

    @given(seed=st.integers(0, 10**6), n=st.integers(1, 2000))
    @settings(deadline=None, max_examples=30)
    def test_p99_of_small_numbers(self, seed, n):
        values = np.exp(np.random.default_rng(seed).normal(-20, 6, n))
        exact = np.percentile(values, 99, method="inverted_cdf")
        assert exact <= distribution_of(values).percentile(99) <= exact * (1 + BIN)

    @pytest.mark.parametrize(("n", "rank"), [(1, 1), (99, 99), (100, 99), (101, 100), (200, 198), (1000, 990)])
    def test_the_rank_is_rounded_up(self, n, rank):
        values = 2.0 ** np.arange(n)  # a bin each
        assert distribution_of(values[::-1]).percentile(99) == values[rank - 1]

    @pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
    def test_what_is_not_finite_is_the_largest(self, bad):
        found = distribution_of(np.array([1.0, bad, 2.0, 0.0]))
        assert repr(found.percentile(99)) == repr(found.mean) == repr(abs(bad) if bad == np.inf else math.nan)
        assert found.percentile(75) == 2.0

    def test_of_nothing(self):
        found = distribution_of(np.empty(0))
        assert (found.mean, found.percentile(99), found.n) == (None, None, 0)
        assert merged(None, None) is None


class TestMean:
    @given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=100))
    @settings(deadline=None)
    def test_is_the_mean(self, values):
        assert distribution_of(np.array(values)).mean == pytest.approx(math.fsum(values) / len(values), rel=1e-13)

    def test_no_sum_leaves_float64(self):
        assert distribution_of(np.full(9, 1.7e308)).mean == pytest.approx(1.7e308, rel=1e-13)


class TestCuts:
    @given(
        values=st.lists(st.one_of(st.floats(0, 1e9), st.sampled_from([np.nan, np.inf, 0.0])), min_size=1, max_size=80),
        cut=st.integers(0, 80),
    )
    @settings(deadline=None)
    def test_calls_one_after_another_are_one_call(self, values, cut):
        values = np.array(values)
        assert same(distribution_of(values[cut:], distribution_of(values[:cut])), distribution_of(values))

    @given(parts=st.lists(st.lists(st.floats(0, 1e9), min_size=1, max_size=9), min_size=1, max_size=9), data=st.data())
    @settings(deadline=None)
    def test_parts_add_up_in_any_order(self, parts, data):
        whole = None
        for part in parts:
            whole = merged(whole, distribution_of(np.array(part)))
        other = None
        for part in data.draw(st.permutations(parts)):
            other = merged(distribution_of(np.array(part)), other)
        assert same(whole, other)
        assert whole.total == sum((distribution_of(np.array(p)).total for p in parts), Fraction(0))
        assert whole.n == sum(map(len, parts))

    def test_memory_does_not_grow_with_the_values(self):
        rng = np.random.default_rng(0)
        found = None
        for _ in range(20):
            found = distribution_of(np.exp(rng.uniform(-40, 3, 50_000)), found)
        assert found.n == 1_000_000
        assert len(found.keys) < 64 * 256  # binades times bins

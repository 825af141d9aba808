"""What tolerance a comparison needs: the value found passes by the judge's own rule, the next smaller one does not."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kdtr_cli.parity.metrics import abs_difference, kl_divergence, ulp_distance
from kdtr_cli.parity.needs import RTOLS, RuleNeeds, RunningNeeds, least_of, most_of, used_share
from kdtr_cli.parity.tolerances import Tolerance

pytestmark = pytest.mark.quick

#: Sizes from the least subnormal to the largest, and many of the ordinary kind.
VALUES = st.one_of(st.floats(-50, 50, width=32), st.floats(width=32, allow_nan=False, allow_infinity=False))
SMALL = st.floats(-1e-300, 1e-300)


@st.composite
def pairs(draw, values=VALUES, dtype=np.float32):
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    return tuple(draw(hnp.arrays(dtype, shape, elements=values)) for _ in range(2))


def found(run: np.ndarray, golden: np.ndarray, step: int = 10**9, kl: bool = True) -> RuleNeeds:
    running = RunningNeeds()
    for lo in range(0, len(run), step):
        a, b = run[lo : lo + step], golden[lo : lo + step]
        running.values(abs_difference(a, b), b, ulp_distance(a, b, run.dtype))
        if kl:
            running.kl(kl_divergence(a, b))
    return running.needs()


def passes(run, golden, atol=None, rtol=None, max_ulp=None, max_kl=None) -> bool:
    return bool(Tolerance(atol, rtol, max_ulp, max_kl, {}).rows_pass(run, golden, run.dtype).all())


def below(value: float) -> float:
    return float(np.nextafter(value, -np.inf))


def check_tight(run: np.ndarray, golden: np.ndarray) -> None:
    needs = found(run, golden)
    rules = [({"atol": needs.atol, "rtol": 0.0}, "atol"), ({"atol": 0.0, "rtol": needs.rtol}, "rtol")]
    rules += [({"atol": atol, "rtol": rtol}, "atol") for rtol, atol in zip(RTOLS, needs.atols, strict=True)]
    rules += [({"max_ulp": needs.max_ulp}, "max_ulp"), ({"max_kl": needs.max_kl}, "max_kl")]
    for bounds, name in rules:
        value = bounds[name]
        if math.isinf(value):
            largest = 2**64 - 2 if name == "max_ulp" else np.finfo(np.float64).max
            assert not passes(run, golden, **{**bounds, name: largest}), bounds
            continue
        assert passes(run, golden, **bounds), bounds
        if value > 0:
            smaller = value - 1 if name == "max_ulp" else below(value)
            assert not passes(run, golden, **{**bounds, name: smaller}), bounds


@settings(max_examples=150, deadline=None)
@given(pairs())
def test_each_bound_is_the_least_that_passes(pair):
    check_tight(*pair)


@settings(max_examples=60, deadline=None)
@given(pairs(SMALL, np.float64))
def test_among_subnormals_too(pair):
    check_tight(*pair)


@settings(max_examples=40, deadline=None)
@given(pairs(st.floats(-9, 9, width=16), np.float16))
def test_in_another_storage_type(pair):
    check_tight(*pair)
    check_tight(pair[0].astype(ml_dtypes.bfloat16), pair[1].astype(np.float64))


@settings(max_examples=60, deadline=None)
@given(pairs(), st.integers(1, 3))
def test_blocks_change_nothing(pair, step):
    assert found(*pair, step=step) == found(*pair)


def test_a_difference_from_zero_has_no_rtol():
    needs = found(np.array([[1.0, 2.0]]), np.array([[0.0, 2.0]]))
    assert (needs.rtol, needs.atol, set(needs.atols)) == (math.inf, 1.0, {1.0})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_passes_no_bound(bad):
    needs = found(np.array([[1.0, bad]]), np.array([[1.0, 2.0]]))
    assert (needs.atol, needs.rtol, set(needs.atols), needs.max_ulp) == (math.inf, math.inf, {math.inf}, math.inf)
    later = RunningNeeds()
    for golden in (np.array([[bad]]), np.array([[1.0]])):
        later.values(abs_difference(np.ones((1, 1)), golden), golden, None)
    assert later.needs().atol == math.inf


def test_only_what_is_seen_counts():
    running = RunningNeeds()
    a, b = np.array([[1.0, 5.0, 7.0]]), np.array([[1.5, 9.0, 0.0]])
    running.values(abs_difference(a, b), b, ulp_distance(a, b, a.dtype), np.array([[True, False, False]]))
    assert (running.needs().atol, running.needs().max_kl) == (0.5, None)
    running.values(abs_difference(a, b), b, None, np.zeros((1, 3), bool))
    assert running.needs().atol == 0.5


def test_most_and_least_go_rule_by_rule():
    one = RuleNeeds(1.0, 5.0, (1.0,) * 7, 3, 0.5)
    other = RuleNeeds(2.0, 4.0, (0.5,) * 7, math.inf, 0.25)
    assert most_of([one, other]) == RuleNeeds(2.0, 5.0, (1.0,) * 7, math.inf, 0.5)
    assert least_of([one, other]) == RuleNeeds(1.0, 4.0, (0.5,) * 7, 3, 0.25)
    assert most_of([one, RuleNeeds(max_kl=None)]).max_kl is None


def test_the_share_of_a_bound():
    difference, bound = np.array([[0.0, 1.0, 0.3]]), np.array([[0.0, 4.0, 1.0]])
    assert used_share(difference, bound) == 0.3
    assert used_share(difference, bound, np.array([[True, True, False]])) == 0.25
    assert used_share(np.array([1.0]), np.array([0.0])) == math.inf
    assert used_share(np.array([np.nan]), np.array([1.0])) == math.inf
    assert used_share(np.empty(0), np.empty(0)) == 0


def test_a_baseline_far_beyond_the_run_is_left_after_eight_rows_and_one_in_reach_is_not():
    rng = np.random.default_rng(0)
    golden = rng.normal(0, 3, (30, 6))
    golden[20, 0] = 50.0  # the largest of all, after the rows that are always measured
    want = np.abs(golden).max()
    for noise, to_the_end in ((1e-6, False), (2.0, True)):
        run, zeros = RunningNeeds(), RunningNeeds()
        noisy = golden + noise * rng.choice([-1, 1], golden.shape)
        for lo in range(30):
            b = golden[lo : lo + 1]
            run.values(abs_difference(noisy[lo : lo + 1], b), b, None)
            zeros.rows_of(np.zeros_like(b), b, b.dtype, None, False, run)
        assert zeros.rows == 30
        found = zeros.needs().atol
        # all of the ULPs and of the rtol of zeros are known at once: the run's rtol keeps the rest under way
        assert (found == want) or (not to_the_end and found >= np.abs(golden[:8]).max())
        assert found > run.needs().atol
    run, zeros = RunningNeeds(), RunningNeeds()
    run.values(np.full((1, 6), 1e-9), np.full((1, 6), 1.0), np.ones((1, 6), np.uint64))
    measured = []
    zeros._ulps = lambda *args: measured.append(1)
    zeros._ulp = 10**6
    for lo in range(30):
        zeros.rows_of(np.zeros((1, 6)), golden[lo : lo + 1], golden.dtype, None, False, run)
    assert len(measured) == 8

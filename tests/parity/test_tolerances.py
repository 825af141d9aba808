"""The bounds: which apply, where they are from, and what they let pass."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr_cli.errors import InputError
from kdtr_cli.parity.tolerances import JudgeOptions, TensorRule, Tolerance, effective_tolerance

pytestmark = pytest.mark.quick

FINITE = st.floats(-1e6, 1e6)
BOUND = st.floats(0, 10)


def tolerance(**bounds: object) -> Tolerance:
    found = effective_tolerance(JudgeOptions(**bounds), "bf16")
    assert found is not None
    return found


class TestWhichApply:
    def test_tier_exact_is_judged_at_zero_unless_told_otherwise(self):
        found = effective_tolerance(JudgeOptions(), "exact")
        assert (found.atol, found.rtol, found.max_ulp, found.max_kl) == (0, 0, None, None)
        assert set(found.origins.values()) == {"default of tier exact"}
        assert found.is_zero

    @pytest.mark.parametrize("tier", ["bf16", "int4", "EXACT", "", "unknown"])
    def test_any_other_tier_needs_a_bound(self, tier):
        assert effective_tolerance(JudgeOptions(), tier) is None
        for name in ("atol", "rtol", "max_ulp", "max_kl"):
            assert effective_tolerance(JudgeOptions(**{name: 0}), tier) is not None

    @pytest.mark.parametrize(("named", "other"), [("atol", "rtol"), ("rtol", "atol")])
    def test_one_of_the_two_sets_the_other_to_zero(self, named, other):
        found = effective_tolerance(JudgeOptions(**{named: 0.5}), "exact")
        assert (getattr(found, named), getattr(found, other)) == (0.5, 0)
        assert found.origins == {named: f"--{named}", other: f"0 beside --{named}"}

    def test_a_bound_alone_is_the_only_rule(self):
        assert (tolerance(max_kl=1).atol, tolerance(max_kl=1).has_values) == (None, False)
        assert (tolerance(max_ulp=1).rtol, tolerance(max_ulp=1).has_values) == (None, True)

    def test_origins_are_kept(self):
        options = JudgeOptions(atol=1, origins={"atol": "--atol, pyproject.toml"})
        assert effective_tolerance(options, "exact").origins["atol"] == "--atol, pyproject.toml"

    @pytest.mark.parametrize("name", ["atol", "rtol", "max_kl", "max_ulp"])
    @pytest.mark.parametrize("value", [-1e-9, -1, float("nan"), float("inf"), float("-inf")])
    def test_a_bound_that_bounds_nothing_is_refused(self, name, value):
        with pytest.raises(InputError, match=f"--{name.replace('_', '-')} is"):
            JudgeOptions(**{name: value})

    @pytest.mark.parametrize(
        "bad",
        [
            {"on_tie": "maybe"}, {"steps": 0}, {"steps": -3}, {"steps": 1.5}, {"select": ()}, {"max_ulp": 1.5},
            {"allow_partial": "no"}, {"allow_loose": 0},
        ],
        ids=str,
    )  # fmt: skip
    def test_other_values_out_of_range_are_refused(self, bad):
        with pytest.raises(InputError) as caught:
            JudgeOptions(**bad)
        assert "\n" not in str(caught.value)

    def test_a_rule_of_half_a_unit_is_refused(self):
        with pytest.raises(InputError, match="give a whole number"):
            TensorRule("logits", max_ulp=1.5)


class TestTheRule:
    @given(a=FINITE, b=FINITE, atol=BOUND, rtol=BOUND)
    def test_is_that_of_assert_allclose_where_all_is_finite(self, a, b, atol, rtol):
        passes = tolerance(atol=atol, rtol=rtol).values_pass(np.array([a]), np.array([b]), np.dtype(float))[0]
        assert passes == np.isclose(a, b, atol=atol, rtol=rtol)  # |a − b| ≤ atol + rtol·|b|, b the golden

    def test_the_golden_scales_the_bound_not_the_run(self):
        rule = tolerance(rtol=0.1)
        assert rule.values_pass(np.array([90.0]), np.array([100.0]), np.dtype(float))[0]
        assert not rule.values_pass(np.array([100.0]), np.array([90.0]), np.dtype(float))[0]

    def test_the_bound_itself_passes_and_the_next_float_does_not(self):
        rule = tolerance(atol=0.5)
        a = np.array([1.5, np.nextafter(1.5, 2)])
        assert rule.values_pass(a, np.ones(2), np.dtype(float)).tolist() == [True, False]

    @given(
        bad=st.sampled_from([np.nan, np.inf, -np.inf]),
        other=st.one_of(FINITE, st.sampled_from([np.nan, np.inf, -np.inf])),
        atol=st.floats(0, 1e308),
        rtol=st.floats(0, 1e308),
        ulp=st.integers(0, 2**80),
        swap=st.booleans(),
    )
    def test_what_is_not_finite_never_passes(self, bad, other, atol, rtol, ulp, swap):
        a, b = (np.array([[x]]) for x in ((other, bad) if swap else (bad, other)))
        for rule in (tolerance(atol=atol, rtol=rtol), tolerance(max_ulp=ulp), tolerance(atol=atol, max_ulp=ulp)):
            assert not rule.values_pass(a, b, a.dtype).any()
            assert not rule.rows_pass(a, b, a.dtype).any()

    def test_a_difference_that_overflows_does_not_pass_an_overflowing_bound(self):
        big = np.array([1.7e308])
        assert not tolerance(rtol=1e300).values_pass(-big, big, big.dtype)[0]

    def test_every_bound_must_hold(self):
        a, b = np.array([[1.0, 1e-30]], np.float32), np.array([[1.0, 2e-30]], np.float32)
        assert tolerance(atol=1e-6).rows_pass(a, b, a.dtype)[0]
        assert not tolerance(max_ulp=4).rows_pass(a, b, a.dtype)[0]
        assert not tolerance(atol=1e-6, max_ulp=4).rows_pass(a, b, a.dtype)[0]
        assert tolerance(atol=1e-6, max_ulp=2**24).rows_pass(a, b, a.dtype)[0]
        assert not tolerance(atol=0, max_ulp=2**24).rows_pass(a, b, a.dtype)[0]

    def test_ulps_count_in_the_storage_type(self):
        a, b = np.array([[32.25]], np.float32), np.array([[32.0]], np.float32)
        rule = tolerance(max_ulp=1)
        assert rule.rows_pass(a, b, np.dtype(ml_dtypes.bfloat16))[0]
        assert not rule.rows_pass(a, b, np.dtype(np.float32))[0]

    def test_a_golden_beyond_the_storage_type_never_passes(self):
        a, b = np.array([[65504.0]], np.float16), np.array([[70000.0]])
        assert not tolerance(max_ulp=2**80).rows_pass(a, b, a.dtype)[0]

    def test_kl_bounds_a_row(self):
        a, b = np.array([[0.0, 0.0], [3.0, 0.0]]), np.array([[0.0, 0.0], [0.0, 0.0]])
        assert tolerance(max_kl=1e-9).rows_pass(a, b, a.dtype).tolist() == [True, False]
        assert tolerance(max_kl=1e-9).rows_pass(a, b, a.dtype, full=False).tolist() == [True, True]
        assert tolerance(max_kl=10).rows_pass(a, b, a.dtype).tolist() == [True, True]

    def test_a_kl_that_is_none_never_passes(self):
        a, b = np.array([[np.nan, 0.0]]), np.array([[0.0, 0.0]])
        assert not tolerance(max_kl=1e300).rows_pass(a, b, a.dtype)[0]

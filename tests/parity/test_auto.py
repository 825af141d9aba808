"""`--tolerance auto`: which floor, times what, and what is no floor."""

import math
import re

import pytest
from parity_cases import golden_side, perturb, run_side

from kdtr_cli.errors import InputError
from kdtr_cli.parity.auto import FACTORS, auto_tolerance
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions, Tolerance
from kdtr_cli.parity.verdicts import Verdict

pytestmark = pytest.mark.quick

EXACT = {"rows": 12, "values": 480, "max_abs": 3e-6, "max_ulp": 20, "max_kl": 2e-13}
BF16 = {"rows": 12, "values": 480, "max_abs": 0.25, "max_ulp": 9000, "max_kl": 1e-3}
BOTH = {"exact": EXACT, "bf16": BF16}


def auto(tier="exact", floors=BOTH, **options):
    manifest = {} if floors is None else {"noise_floor": floors}
    return auto_tolerance(JudgeOptions(tolerance="auto", **options), tier, manifest)


@pytest.mark.parametrize(("tier", "name"), [("exact", "exact"), ("fp32", "exact"), ("bf16", "bf16"), ("int4", "bf16")])
def test_the_tier_s_floor_times_the_factor(tier, name):
    for factor in (None, 2.0):
        found, used = auto(tier, tolerance_factor=factor), factor or FACTORS[name]
        assert (found.atol, found.rtol, found.max_ulp) == (used * BOTH[name]["max_abs"], 0, None)
        assert found.max_kl == used**2 * BOTH[name]["max_kl"]
        assert set(found.origins) == {"atol", "rtol", "max_kl"}
        assert found.origins["atol"] == f"auto: {used:g} x the golden's floor {BOTH[name]['max_abs']:.2g}; --tolerance"
        assert found.origins["max_kl"].startswith(f"auto: {used:g}^2 x the golden's floor")


def test_ulps_may_stand_beside_it_and_partial_logits_have_no_kl():
    found = auto(max_ulp=7, allow_partial=True)
    assert (found.max_ulp, found.max_kl) == (7, None)
    assert found.origins["max_ulp"] == "--max-ulp"


def test_kl_below_what_float64_can_tell_is_no_bound():
    found = auto(floors={"exact": {**EXACT, "max_kl": 0.0}})
    assert found.max_kl == FACTORS["exact"] ** 2 * 1e-14


@pytest.mark.parametrize(
    ("floors", "said"),
    [
        (None, "holds no noise floor"),
        ({}, "holds no noise floor"),
        ({"bf16": BF16}, "holds no noise floor"),
        ({"exact": {**EXACT, "rows": 0}}, "holds no noise floor"),
        ({"exact": {**EXACT, "max_abs": "inf"}}, "holds no noise floor"),
        ({"exact": {**EXACT, "max_abs": 0.0}}, r"bounds nothing \(max_abs 0\)"),
        ({"exact": {**EXACT, "max_abs": -1.0}}, r"bounds nothing \(max_abs -1\)"),
        ({"exact": {**EXACT, "max_abs": math.inf}}, r"bounds nothing \(max_abs inf\)"),
        ({"exact": {**EXACT, "max_abs": math.nan}}, r"bounds nothing \(max_abs nan\)"),
        ({"exact": {**EXACT, "max_kl": math.inf}}, r"bounds nothing \(max_kl inf\)"),
        ({"exact": {**EXACT, "max_kl": -1e-9}}, r"bounds nothing \(max_kl -1e-09\)"),
    ],
    ids=str,
)
def test_what_bounds_nothing_is_invalid_and_says_what_to_do(floors, said):
    golden = golden_side()
    run = run_side(golden)
    perturb(run, 1e-6)
    if floors is not None:
        golden.manifest["noise_floor"] = floors
    report = judge(golden.evidence(), run.evidence(), JudgeOptions(tolerance="auto"))
    assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)
    assert [f.code for f in report.findings] == ["tolerance.auto"]
    found = auto(floors=floors)
    assert report.reason == found
    assert re.search(said + ".*tier exact: make it anew with float64.*or give --atol", found)


def test_other_tiers_have_no_floor():
    assert "no noise floor for tier fp8" in auto("fp8")
    assert "kdtr golden --bf16" in auto("bf16", {"exact": EXACT})


def test_a_factor_that_overflows_bounds_nothing():
    assert "not finite" in auto(tolerance_factor=1e308, floors={"exact": {**EXACT, "max_abs": 1e3}})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tolerance": "loose"}, "--tolerance is 'loose'; allowed: auto"),
        ({"tolerance_factor": 4}, "--tolerance-factor needs --tolerance auto"),
        ({"tolerance": "auto", "tolerance_factor": 0.5}, "from 1 on"),
        ({"tolerance": "auto", "tolerance_factor": math.inf}, "from 1 on"),
        ({"tolerance": "auto", "tolerance_factor": math.nan}, "from 1 on"),
        ({"tolerance": "auto", "atol": 1e-3}, r"auto \(--tolerance\) sets what --atol \(--atol\) sets"),
        ({"tolerance": "auto", "rtol": 0.0}, "sets what --rtol"),
        ({"tolerance": "auto", "max_kl": 1.0}, "sets what --max-kl"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other(options, said):
    with pytest.raises(InputError, match=said):
        JudgeOptions(**options)


def test_it_judges_like_the_same_bounds_given():
    golden = golden_side()
    golden.manifest["noise_floor"] = BOTH
    for size, verdict in ((1e-5, Verdict.PASS), (1e-4, Verdict.DIVERGED)):
        run = run_side(golden)
        perturb(run, size)
        made = judge(golden.evidence(), run.evidence(), JudgeOptions(tolerance="auto", tolerance_factor=20))
        assert made.verdict is verdict
        assert isinstance(made.tolerance, Tolerance)
        same = JudgeOptions(atol=made.tolerance.atol, max_kl=made.tolerance.max_kl)
        assert judge(golden.evidence(), run.evidence(), same).totals == made.totals
    assert judge(golden.evidence(), run_side(golden).evidence(), JudgeOptions(tolerance="auto")).verdict is (
        Verdict.IDENTICAL
    )


def test_a_floor_so_high_that_zeros_pass_is_too_loose():
    golden = golden_side()
    golden.manifest["noise_floor"] = {"exact": {**EXACT, "max_abs": 50.0, "max_kl": 50.0}}
    run = run_side(golden)
    perturb(run, 1e-5)
    report = judge(golden.evidence(), run.evidence(), JudgeOptions(tolerance="auto"))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "too loose" in report.reason

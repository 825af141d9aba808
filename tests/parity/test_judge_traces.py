"""What a trace does to a verdict: it adds a fault, and never takes one away."""

import numpy as np
import pytest
from parity_cases import perturb
from trace_cases import CONFIG, MOE, PROMPT, noise, traced_pair

from kdtr_cli.errors import InputError
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions, TensorRule
from kdtr_cli.parity.verdicts import Level, Verdict

pytestmark = pytest.mark.quick

ROUTER = f"{MOE}mlp.router_logits"


def judged(golden, run, *rules, **options):
    return judge(golden.evidence(), run.evidence(), JudgeOptions(rules=rules, **options))


def off(size: float = 0.1, name: str = ROUTER):
    golden, run = traced_pair()
    run.one.trace[name] = noise(run.one.trace[name], size)
    return golden, run


def parted(report):
    return next((f for f in report.findings if f.code == "trace.parted"), None)


def test_equal_traces_are_identical():
    report = judged(*traced_pair())
    assert report.verdict is Verdict.IDENTICAL
    assert report.findings == ()
    assert report.totals.first_tensor is None


def test_at_tolerance_zero_a_trace_that_parts_diverges_though_logits_agree():
    report = judged(*off())
    assert report.verdict is Verdict.DIVERGED
    assert report.totals.max_abs == 0
    assert report.totals.first_tensor == (0, 0, ROUTER)


def test_with_a_tolerance_it_is_a_warning():
    report = judged(*off(), atol=1e-3)
    finding = parted(report)
    assert (finding.level, finding.verdict) == (Level.WARNING, None)
    assert "no rule bounds it" in finding.message
    assert report.verdict is Verdict.PASS  # not all bits


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [ROUTER, "final_norm"])
def test_what_is_not_finite_passes_no_tolerance(value, name):
    golden, run = off()
    run.one.trace[name] = run.one.trace[name].copy()
    run.one.trace[name][-1, 3] = value
    for atol in (1e6, 1e-3):  # by the second the router's logits part before it
        report = judged(golden, run, atol=atol, allow_loose=True)
        (finding,) = (f for f in report.findings if f.code == "trace.nonfinite")
        assert (finding.verdict, finding.hint) == (Verdict.DIVERGED, "nonfinite")
        assert name in finding.message
        assert "not finite" in finding.message
        assert report.verdict is Verdict.DIVERGED
    # nor one of its own, which decides by itself
    report = judged(golden, run, TensorRule("*", atol=1e30), atol=1e6, allow_loose=True)
    assert report.verdict is Verdict.DIVERGED


def test_unless_a_rule_bounds_it():
    report = judged(*off(), TensorRule("*.router_logits", atol=1e-6), atol=1e-3)
    assert report.verdict is Verdict.DIVERGED
    assert judged(*off(), TensorRule("*.router_logits", atol=1e6), atol=1e-3).verdict is Verdict.PASS


def test_a_later_tensor_that_a_rule_bounds_decides_too():
    golden, run = off()
    run.one.trace["final_norm"] = noise(run.one.trace["final_norm"])
    report = judged(golden, run, TensorRule("final_norm", atol=1e-6), atol=1e-3)
    assert report.verdict is Verdict.DIVERGED
    assert ROUTER in parted(report).message
    assert "final_norm is out of tolerance at 20 of 20 positions, which a rule bounds" in parted(report).message


def test_an_equal_trace_makes_no_pass_of_a_fail():
    golden, run = traced_pair()
    perturb(run, 1.0)
    report = judged(golden, run)
    assert report.verdict is Verdict.DIVERGED
    assert report.sequences[0].trace.all_bits


def test_a_sign_of_zero_is_a_note_and_no_identity():
    golden, run = traced_pair()
    golden.one.trace["embed"][3, 3], run.one.trace["embed"][3, 3] = 0.0, -0.0
    report = judged(golden, run)
    assert report.verdict is Verdict.PASS
    assert [f.code for f in report.findings] == ["trace.other_bits"]
    assert "embed differs within tolerance first, at position 3" in report.findings[0].message


def test_a_golden_that_is_not_finite_is_invalid():
    golden, run = traced_pair()
    for side in (golden, run):
        side.one.trace["embed"][3, 3] = np.nan
    assert judged(golden, run).verdict is Verdict.INVALID


@pytest.mark.parametrize("what", ["width", "kind", "rows"])
def test_tensors_that_do_not_fit_are_invalid(what):
    golden, run = traced_pair()
    trace, name = run.one.trace, f"{MOE}mlp.expert_ids"
    trace[name] = {
        "width": trace[name][:, :-1],
        "kind": trace[name].astype(np.float32),
        "rows": trace[name][:-1],
    }[what]
    report = judged(golden, run)
    assert report.verdict is Verdict.INVALID
    assert name in report.reason


def test_rows_up_to_the_first_other_token_are_compared():
    golden, run = traced_pair()
    run.one.tokens[2] ^= 1
    for values in run.one.trace.values():
        values[PROMPT + 2 :] = noise(values[PROMPT + 2 :]) if values.dtype.kind == "f" else 0
    report = judged(golden, run)
    assert {t.rows for t in report.sequences[0].trace.tensors} == {PROMPT + 2}
    assert report.sequences[0].trace.all_bits
    run.manifest["decoding"]["teacher_forced"] = True
    found = judged(golden, run).sequences[0].trace
    assert (found.first.name, found.first.first_row) == ("embed", PROMPT + 2)


def test_steps_cut_the_rows():
    golden, run = traced_pair()
    run.one.trace["embed"][PROMPT + 3 :] += 1
    assert judged(golden, run, steps=4).verdict is Verdict.IDENTICAL
    assert judged(golden, run, steps=5).sequences[0].trace.first.first_row == PROMPT + 3


class TestRules:
    def test_the_first_that_matches_holds(self):
        loose, tight = TensorRule("*.mlp.*", atol=1e6), TensorRule("*", atol=0.0)
        assert judged(*off(), loose, tight).verdict is Verdict.PASS
        assert judged(*off(), TensorRule("model.layers.1.mlp.*", atol=1e-9), TensorRule("*", atol=1e6)).verdict is (
            Verdict.DIVERGED
        )

    def test_logits_have_names_too(self):
        for name in ("logits", "prompt_logits"):
            golden, run = traced_pair()
            side = getattr(run.one, name)
            side["engine"] = side["engine"] + np.float32(1e-3) * np.linspace(0, 1, 512, dtype=np.float32)
            assert judged(golden, run).verdict is Verdict.DIVERGED
            assert judged(golden, run, TensorRule(name, atol=1e-2)).verdict is Verdict.PASS
            assert judged(golden, run, TensorRule(name, rtol=1e-9), atol=1).verdict is Verdict.DIVERGED

    @pytest.mark.parametrize("pattern", ["*.router_logit", "Logits", "model.layers.99.hidden"])
    def test_one_that_matches_nothing_is_an_error(self, pattern):
        with pytest.raises(InputError, match="matches no tensor that is compared"):
            judged(*traced_pair(), TensorRule(pattern, atol=1))

    def test_one_that_never_holds_is_an_error(self):
        with pytest.raises(InputError, match=r"'\*\.hidden' never holds: earlier rules match all"):
            judged(*traced_pair(), TensorRule("*", atol=1), TensorRule("*.hidden", atol=1))

    @pytest.mark.parametrize("bounds", [{}, {"atol": -1}, {"rtol": float("nan")}, {"atol": float("inf")}])
    def test_bounds_must_be_bounds(self, bounds):
        with pytest.raises(InputError):
            TensorRule("*", **bounds)

    def test_integers_have_no_bound(self):
        golden, run = traced_pair()
        ids = run.one.trace[f"{MOE}mlp.expert_ids"]
        ids[0] = (ids[0] + 1) % CONFIG.n_routed_experts
        assert judged(golden, run, TensorRule("*", atol=1e6)).verdict is Verdict.DIVERGED

"""Properties that hold for whatever evidence: hypothesis looks for the counterexample."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parity_cases import golden_side, perturb, run_side

from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict

pytestmark = pytest.mark.quick

GOOD = {Verdict.IDENTICAL, Verdict.PASS}
SIZES = {
    "sequences": st.integers(1, 3),
    "steps": st.integers(1, 7),
    "vocab": st.integers(2, 50),
    "seed": st.integers(0, 10_000),
    "score": st.booleans(),
}
FORMS = st.sampled_from(["full", "top:3", "digest"])
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "atol": st.floats(0, 100),
        "rtol": st.floats(0, 100),
        "max_ulp": st.integers(0, 2**40),
        "max_kl": st.floats(0, 100),
        "on_tie": st.sampled_from(["fail", "warn", "pass"]),
        "allow_partial": st.booleans(),
        "allow_loose": st.booleans(),
        "steps": st.integers(1, 9),
    },
)


@st.composite
def pairs(draw, teacher_forced=None):
    golden = golden_side(**{name: draw(strategy) for name, strategy in SIZES.items()})
    forced = draw(st.booleans()) if teacher_forced is None else teacher_forced
    run = run_side(golden, teacher_forced=forced)
    digest = draw(st.booleans())
    for side in (golden, run):
        form = draw(FORMS)
        for s in side.seqs:
            s.form, s.digest = form, digest
    return golden, run


def judged(golden, run, options):
    return judge(golden.evidence(), run.evidence(), JudgeOptions(**options))


@given(pair=pairs(), options=OPTIONS)
def test_a_run_of_the_same_bits_is_identical_under_any_options(pair, options):
    report = judged(*pair, options)
    assert (report.verdict, report.exit_code) == (Verdict.IDENTICAL, 0)
    assert report.totals.exact


@given(pair=pairs(), options=OPTIONS, data=st.data())
@settings(max_examples=300)
def test_one_flipped_bit_is_never_identical(pair, options, data):
    golden, run = pair
    s = data.draw(st.sampled_from(run.seqs))
    arrays = [*s.logits.values(), *s.prompt_logits.values()]
    raw = data.draw(st.sampled_from(arrays)).view(np.uint32)
    row, column = data.draw(st.integers(0, raw.shape[0] - 1)), data.draw(st.integers(0, raw.shape[1] - 1))
    raw[row, column] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    options.pop("steps", None)  # which may leave the bit out
    assert judged(golden, run, options).verdict is not Verdict.IDENTICAL


@given(pair=pairs(), options=OPTIONS, data=st.data(), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_a_value_that_is_not_finite_never_passes(pair, options, data, bad):
    golden, run = pair
    side = data.draw(st.sampled_from([golden, run]))
    s = data.draw(st.sampled_from(side.seqs))
    # -inf sinks below the K that a partial form keeps: nobody who has only those can see it
    assume(not (s.form.startswith("top") and bad == -np.inf))
    name = "exact" if side is golden else "engine"
    array = data.draw(st.sampled_from([s.logits[name], *([s.prompt_logits[name]] if s.prompt_logits else [])]))
    array[data.draw(st.integers(0, array.shape[0] - 1)), data.draw(st.integers(0, array.shape[1] - 1))] = bad
    options.pop("steps", None)
    report = judged(golden, run, options)
    assert report.verdict not in GOOD
    assert report.exit_code != 0


@given(pair=pairs(), options=OPTIONS, data=st.data())
def test_another_token_is_a_difference_or_a_tie(pair, options, data):
    golden, run = pair
    s = data.draw(st.sampled_from(run.seqs))
    at = data.draw(st.integers(0, len(s.tokens) - 1))
    s.tokens[at] = (s.tokens[at] + data.draw(st.integers(1, golden.vocab - 1))) % golden.vocab
    options.pop("steps", None)
    report = judged(golden, run, options)
    assert report.verdict in {Verdict.DIVERGED, Verdict.TIE_BREAK, Verdict.INCONCLUSIVE}
    assert not report.totals.exact
    # INCONCLUSIVE only where a tie could not be shown by so little or by so much tolerance
    if report.verdict is Verdict.INCONCLUSIVE:
        assert not (options.get("allow_partial") and options.get("allow_loose")) or golden.one.form != "full"


@given(pair=pairs(), options=OPTIONS, size=st.sampled_from([1e-6, 1e-3, 1.0]), seed=st.integers(0, 99))
def test_more_tolerance_never_makes_a_pass_of_diverged_tokens_nor_a_failure_of_a_pass(pair, options, size, seed):
    golden, run = pair
    perturb(run, size, seed)
    base = {"atol": options.get("atol", 0.0), "allow_loose": True, "allow_partial": True}
    tight, wide = judged(golden, run, base), judged(golden, run, {**base, "atol": base["atol"] * 2 + 1e-3})
    if tight.verdict in GOOD:
        assert wide.verdict in GOOD


@given(pair=pairs(), options=OPTIONS, size=st.sampled_from([0.0, 1e-6, 1e-3, 1.0]))
def test_the_totals_add_up(pair, options, size):
    golden, run = pair
    perturb(run, size)
    report = judged(golden, run, options)
    t = report.totals
    assert t.rows_identical <= t.rows_compared <= t.rows == t.tokens == t.steps <= t.steps_available
    assert t.rows_out <= t.rows_compared
    assert t.tokens_equal <= t.tokens
    assert sum(t.verdicts.values()) == len(report.sequences)
    assert (report.exit_code == 0) == (report.verdict in GOOD)
    assert (report.reason is not None) == (report.exit_code == 2)
    if report.verdict is Verdict.IDENTICAL:
        assert t.rows_identical == t.rows
        assert t.max_abs == 0


@given(pair=pairs(), options=OPTIONS, size=st.sampled_from([0.0, 1e-3]))
@settings(max_examples=30)
def test_judging_twice_gives_the_same_and_changes_nothing(pair, options, size):
    golden, run = pair
    perturb(run, size)
    before = [s.logits["engine"].tobytes() for s in run.seqs] + [s.logits["exact"].tobytes() for s in golden.seqs]
    assert repr(judged(golden, run, options)) == repr(judged(golden, run, options))
    assert before == [s.logits["engine"].tobytes() for s in run.seqs] + [
        s.logits["exact"].tobytes() for s in golden.seqs
    ]

"""`--suggest`: each rule given back passes, the next tighter one does not, and no verdict is changed by asking."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_cases import golden_side, make_tie, perturb, run_side
from rounds_cases import round_pair, rounds_of
from test_log_probabilities import pair as logprobs_pair
from trace_cases import DENSE, MOE, noise, traced_pair

from kdtr_cli.parity import logits as logits_module
from kdtr_cli.parity.combine import Combined
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.suggest import suggest
from kdtr_cli.parity.tolerances import JudgeOptions, TensorRule
from kdtr_cli.parity.verdicts import Verdict

pytestmark = pytest.mark.quick


def pair(size=1e-4, seed=1, **kwargs):
    golden = golden_side(**kwargs)
    run = run_side(golden)
    perturb(run, size, seed)
    return golden, run


def report_of(golden, run, **options):
    return judge(golden.evidence(), run.evidence(), JudgeOptions(suggest=True, **options))


def bounds_of(rule):
    return {n: v for n in ("atol", "rtol", "max_ulp", "max_kl") if (v := getattr(rule, n)) is not None}


def check(golden, run, rules, **options):
    """Every rule as it is, and tightened by one step."""
    assert rules
    for rule in rules:
        bounds = bounds_of(rule)
        back = report_of(golden, run, **bounds, **options)
        caught = {name for s in back.sequences for r in (s.logits, s.prompt_logits) if r for name in r.too_loose}
        if rule.too_loose:
            assert back.verdict is Verdict.INCONCLUSIVE, bounds
            assert "too loose" in back.reason
            assert caught >= set(rule.too_loose)
            back = report_of(golden, run, **bounds, allow_loose=True, **options)
        assert back.verdict in (Verdict.PASS, Verdict.IDENTICAL), bounds
        name = next(iter(bounds))  # of a pair the atol
        if bounds[name] > 0:
            tighter = bounds[name] - 1 if name == "max_ulp" else float(np.nextafter(bounds[name], 0))
            failed = report_of(golden, run, **{**bounds, name: tighter}, allow_loose=True, **options)
            assert failed.verdict is Verdict.DIVERGED, bounds


@pytest.mark.parametrize("score", [False, True])
@pytest.mark.parametrize("tier", ["exact", "bf16"])
def test_each_rule_passes_and_the_next_tighter_does_not(tier, score):
    golden, run = pair(score=score)
    run.manifest["tier"] = tier
    report = report_of(golden, run, atol=1.0)
    kinds = [tuple(bounds_of(rule)) for rule in report.suggestion.rules]
    assert kinds[:2] == [("atol",), ("rtol",)]
    assert kinds[-2:] == [("max_ulp",), ("max_kl",)]
    assert ("atol", "rtol") in kinds
    check(golden, run, report.suggestion.rules)


@settings(max_examples=25, deadline=None)
@given(
    st.floats(-8, 3),
    st.integers(0, 99),
    st.sampled_from(["full", "top:5"]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([1.0, 1e-3, 30.0]),
)
def test_whatever_the_noise_the_form_and_the_blocks(exponent, seed, form, sequences, steps, scale):
    golden, run = golden_side(sequences, steps, vocab=17, seed=seed), None
    for s in golden.seqs:
        s.logits = {name: (x * scale).astype(x.dtype) for name, x in s.logits.items()}
    run = run_side(golden)
    perturb(run, 10.0**exponent * scale, seed)
    run.seqs[0].logits["engine"][0] = golden.seqs[0].logits["exact"][0]  # a row that is equal bit for bit
    for s in (*golden.seqs, *run.seqs):
        s.form = form
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(logits_module, "BLOCK_VALUES", 40)
        suggestion = report_of(golden, run, atol=1.0, allow_partial=True).suggestion
    if suggestion.reason is None:  # large noise turns a token's place in its top K, which is another thing
        check(golden, run, suggestion.rules, allow_partial=True)


@pytest.mark.parametrize("form", ["full", "top:5"])
@pytest.mark.parametrize("size", [1e-5, 0.5])
def test_neither_threads_nor_blocks_change_anything(form, size):
    golden, run = pair(size, sequences=2, steps=40, vocab=17, score=True)
    run.one.logits["engine"][30] += np.float32(3e-3)  # far more than all rows before it
    for s in golden.seqs:
        s.form = form
    found = []
    for threads, values in ((1, 1 << 19), (3, 17), (2, 17 * 7), (4, 17 * 16)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(logits_module, "BLOCK_VALUES", values)
            options = {"atol": 9.0, "allow_partial": True, "allow_loose": True, "threads": threads}
            found.append(report_of(golden, run, **options).suggestion)
    assert found[0].reason is None
    assert found == found[:1] * 4


@pytest.mark.parametrize("tokens_equal", [True, False])
def test_of_log_probabilities_with_rows_of_fewer_values(tokens_equal):
    def change(ids, values):
        values += np.random.default_rng(1).uniform(-1e-3, 1e-3, values.shape).astype(np.float32)

    golden, run = logprobs_pair(counts=[6, 3, 1, 6, 5, 6], change=change)
    if not tokens_equal:
        tokens = run.sequences[0].tokens.copy()
        tokens[0] ^= 1
        run = replace(run, sequences=(replace(run.sequences[0], tokens=tokens),))
    asked = {"allow_partial": True, "suggest": True}
    suggestion = judge(golden, run, JudgeOptions(atol=1.0, **asked)).suggestion
    if not tokens_equal:
        assert "part at step 0" in suggestion.reason
        return
    assert [tuple(bounds_of(rule)) for rule in suggestion.rules][:2] == [("atol",), ("rtol",)]
    assert not any(rule.max_kl for rule in suggestion.rules)
    for rule in suggestion.rules:
        bounds = bounds_of(rule)
        assert judge(golden, run, JudgeOptions(**bounds, allow_partial=True)).verdict is Verdict.PASS
        name = next(iter(bounds))
        tighter = bounds[name] - 1 if name == "max_ulp" else float(np.nextafter(bounds[name], 0))
        failed = judge(golden, run, JudgeOptions(**{**bounds, name: tighter}, allow_partial=True))
        assert failed.verdict is Verdict.DIVERGED, bounds
    # without a tolerance it is INVALID, and told one all the same
    untold = judge(golden, run, JudgeOptions(**asked))
    assert (untold.verdict, untold.suggestion) == (Verdict.INVALID, suggestion)


def test_a_row_that_the_run_says_nothing_of_has_no_tolerance():
    golden, run = logprobs_pair(counts=[6, 0, 6, 6, 6, 6])
    suggestion = judge(golden, run, JudgeOptions(atol=1.0, allow_partial=True, suggest=True)).suggestion
    assert "can't be measured" in suggestion.reason


def test_a_row_whose_tops_share_no_id_has_no_tolerance():
    """One so large that the golden's may hide below the run's K-th leaves the row without a value to be measured by."""
    golden, run = pair()
    run.one.logits["engine"][2] *= -1
    for s in (*golden.seqs, *run.seqs):
        s.form = "top:5"
    assert "can't be measured" in report_of(golden, run, atol=1e-3, allow_partial=True).suggestion.reason


class TestTraces:
    def traced(self):
        golden, run = traced_pair()
        perturb(run, 1e-4)
        run.one.trace[f"{DENSE}hidden"] = noise(run.one.trace[f"{DENSE}hidden"])
        return golden, run

    def test_a_trace_that_parts_is_mended_by_any_tolerance(self):
        golden, run = self.traced()
        zero = report_of(golden, run)  # at 0 the trace decides
        assert zero.verdict is Verdict.DIVERGED
        assert zero.suggestion == report_of(golden, run, atol=1.0).suggestion
        check(golden, run, zero.suggestion.rules)

    def test_but_not_where_a_rule_bounds_the_tensor(self):
        golden, run = self.traced()
        rules = (TensorRule(f"{DENSE}hidden", atol=1e-9),)
        assert f"{DENSE}hidden" in report_of(golden, run, atol=1.0, rules=rules).suggestion.reason
        other = (TensorRule(f"{MOE}hidden", atol=1e-9),)
        assert report_of(golden, run, atol=1.0, rules=other).suggestion.rules

    def test_nothing_where_a_rule_bounds_the_logits(self):
        golden, run = self.traced()
        for tensor in ("logits", "*logits", "prompt_logits"):
            said = report_of(golden, run, atol=1.0, rules=(TensorRule(tensor, atol=1.0),)).suggestion
            assert f"the rule for '{tensor}'" in said.reason


@pytest.mark.parametrize("given_", [{}, {"atol": 1e-9}, {"max_kl": 1.0}, {"atol": 100.0}], ids=str)
def test_what_was_given_changes_nothing_of_it_and_it_nothing_of_the_verdict(given_):
    golden, run = pair()
    asked = report_of(golden, run, **given_)
    assert asked.suggestion == report_of(golden, run, rtol=0.5).suggestion
    plain = judge(golden.evidence(), run.evidence(), JudgeOptions(**given_))
    assert plain.suggestion is None
    assert (asked.verdict, asked.findings, asked.totals) == (plain.verdict, plain.findings, plain.totals)


def test_a_run_without_a_tolerance_is_still_invalid_and_told_one():
    golden, run = pair()
    run.manifest["tier"] = "bf16"
    report = report_of(golden, run)
    assert report.verdict is Verdict.INVALID
    assert report.suggestion == report_of(golden, run, atol=1.0).suggestion
    assert report.suggestion.rules


class TestNothingToSuggest:
    def said(self, golden, run, **options):
        suggestion = report_of(golden, run, **{"atol": 1.0, **options}).suggestion
        assert suggestion.rules == ()
        return suggestion.reason

    def test_a_nan(self):
        golden, run = pair()
        run.one.logits["engine"][2, 3] = np.nan
        assert "not finite" in self.said(golden, run)

    def test_other_tokens_and_a_tie(self):
        golden, run = pair()
        run.one.tokens[1] = (run.one.tokens[1] + 1) % 40
        assert "part at step 1" in self.said(golden, run)
        golden, run = pair()
        make_tie(golden, run, 5)
        assert "part" in self.said(golden, run)

    def test_a_sequence_that_is_missing_shorter_or_too_many(self):
        golden, run = pair()
        del run.seqs[1]
        assert "no such sequence" in self.said(golden, run)
        golden, run = pair()
        run.one.tokens, run.one.logits["engine"] = run.one.tokens[:3], run.one.logits["engine"][:3]
        assert "shorter" in self.said(golden, run)
        golden, run = pair()
        del golden.seqs[1]
        assert "no such sequence" in self.said(golden, run)

    def test_partial_logits_and_digests(self):
        golden, run = pair()
        for s in golden.seqs:
            s.form = "top:5"
        assert "--allow-partial" in self.said(golden, run)
        rules = report_of(golden, run, atol=1.0, allow_partial=True).suggestion.rules
        assert all(rule.max_kl is None for rule in rules)
        for s in golden.seqs:
            s.form = "digest"
        assert "can't be measured" in self.said(golden, run, allow_partial=True)
        assert "digests" in self.said(golden, run, atol=0.0, allow_partial=True)

    def test_digests_that_differ_where_all_that_is_seen_is_equal(self):
        golden, run = pair(size=0)
        run.one.logits["engine"][1, golden.one.logits["exact"][1].argmin()] -= 1
        for s in golden.seqs:
            s.form = "top:5"
        assert "digests are not" in self.said(golden, run, allow_partial=True)

    def test_rounds_that_differ_under_equal_logits(self):
        golden, run = round_pair()
        rounds_of(run, 1)["draft_top_logps"][1, 0, 0] -= np.float32(1e-6)
        assert "rounds are not" in self.said(golden, run)

    def test_another_model(self):
        golden, run = pair()
        run.manifest["model"]["weights_used_sha256"] = "0" * 64
        assert "other weights" in self.said(golden, run)


@pytest.mark.parametrize("change", [{"rows_compared": 1}, {"rows_unmeasured": 1}])
@pytest.mark.parametrize("allow_partial", [False, True])
def test_rows_that_were_not_measured_leave_nothing_to_suggest(change, allow_partial):
    result = report_of(*pair(), atol=1.0).sequences[0].logits
    assert suggest([("p0", result)], [], allow_partial).rules
    said = suggest([("p0", replace(result, **change))], [], allow_partial)
    assert not said.rules
    assert "'p0': not all logits were measured" in said.reason


def test_equal_logits_need_nothing():
    golden = golden_side()
    report = report_of(golden, run_side(golden))
    assert report.verdict is Verdict.IDENTICAL
    assert [bounds_of(rule) for rule in report.suggestion.rules] == [
        {"atol": 0.0},
        {"rtol": 0.0},
        {"max_ulp": 0},
        {"max_kl": 0.0},
    ]
    assert not any(rule.too_loose for rule in report.suggestion.rules)


def test_a_bound_that_others_would_pass_too_is_called_that():
    golden, run = pair(size=8.0)
    for g, r in zip(golden.seqs, run.seqs, strict=True):
        r.tokens = g.tokens
    rules = report_of(golden, run, atol=1.0).suggestion.rules
    assert any(rule.too_loose for rule in rules)
    assert any("zeros" in rule.too_loose for rule in rules)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_shards_together_say_what_the_whole_says(cut):
    golden, run = pair(sequences=4)
    whole = report_of(golden, run, atol=1e-5)
    combined = Combined()
    for lo in range(0, 4, cut):
        part = [replace(side, seqs=side.seqs[lo : lo + cut]) for side in (golden, run)]
        combined.add(report_of(*part, atol=1e-5), lo)
    made = combined.report("g", "r")
    assert made.suggestion == whole.suggestion
    assert made.totals.max_share == whole.totals.max_share
    run.seqs[2].logits["engine"][0, 0] = np.nan
    combined = Combined()
    for lo in range(4):
        part = [replace(side, seqs=side.seqs[lo : lo + 1]) for side in (golden, run)]
        combined.add(report_of(*part, atol=1e-5), lo)
    assert "not finite" in combined.report("g", "r").suggestion.reason


class TestUsed:
    def test_of_each_kind_of_bound(self):
        golden, run = pair()
        t = report_of(golden, run, atol=1.0).totals
        assert t.max_share == t.max_abs
        g = np.concatenate([s.logits["exact"] for s in golden.seqs]).astype(np.float64)
        r = np.concatenate([s.logits["engine"] for s in run.seqs]).astype(np.float64)
        for atol, rtol in ((0.0, 1e-2), (1e-3, 1e-2)):
            want = (np.abs(r - g) / (atol + rtol * np.abs(g))).max()
            found = report_of(golden, run, atol=atol, rtol=rtol).totals.max_share
            assert found == pytest.approx(want, rel=1e-15)
        assert report_of(golden, run, max_ulp=10**6).totals.max_share is None
        assert report_of(golden, run).totals.max_share is None

    @pytest.mark.parametrize("options", [{"atol": 1e-5}, {"rtol": 1e-6}, {"atol": 1e-6, "rtol": 1e-6}], ids=str)
    def test_all_of_it_and_no_more_is_what_passes(self, options):
        golden, run = pair(size=1e-4)
        report = report_of(golden, run, **options)
        assert (report.verdict is Verdict.PASS) == (report.totals.max_share <= 1)
        assert report.totals.max_share > 1

    def test_of_partial_logits_only_what_was_seen(self):
        golden, run = pair()
        for s in golden.seqs:
            s.form = "top:5"
        options = {"allow_partial": True, "rtol": 1e-2}
        partial = report_of(golden, run, **options).totals.max_share
        for s in golden.seqs:
            s.form = "full"
        assert 0 < partial < report_of(golden, run, **options).totals.max_share

"""A tolerance that zeros, shuffled logits or the previous position would also pass proves nothing."""

import numpy as np
import pytest
from parity_cases import golden_side, perturb, run_side

from kdtr_cli.parity.baselines import Baselines
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions, Tolerance
from kdtr_cli.parity.verdicts import Level, Verdict

pytestmark = pytest.mark.quick

ZEROS, SHUFFLED, PREVIOUS = "zeros", "shuffled logits", "the previous position's logits"


def pair(form="full", **kwargs):
    golden = golden_side(**kwargs)
    run = run_side(golden)
    perturb(run, 1e-5)
    for s in golden.seqs:
        s.form = form
    return golden, run


def report_of(golden, run, **options):
    return judge(golden.evidence(), run.evidence(), JudgeOptions(**options))


def caught(report):
    return {name for s in report.sequences for name in s.logits.too_loose}


class TestTooLoose:
    @pytest.mark.parametrize("options", [{"atol": 100}, {"rtol": 1e6}, {"max_ulp": 2**40}, {"max_kl": 1e6}], ids=str)
    def test_a_tolerance_that_all_of_them_pass(self, options):
        report = report_of(*pair(), **options)
        assert (report.verdict, report.exit_code) == (Verdict.INCONCLUSIVE, 2)
        assert caught(report) == {ZEROS, SHUFFLED, PREVIOUS}
        assert "too loose" in report.reason
        report = report_of(*pair(), **options, allow_loose=True)
        assert report.verdict is Verdict.PASS
        assert {f.level for f in report.findings} == {Level.WARNING}

    @pytest.mark.parametrize("options", [{"atol": 1e-3}, {"rtol": 1e-2}, {"max_ulp": 4000}, {"max_kl": 1e-3}], ids=str)
    def test_a_sensible_one(self, options):
        golden, run = pair()
        for g, r in zip(golden.seqs, run.seqs, strict=True):
            r.logits["engine"] = np.nextafter(g.logits["exact"], np.float32(9))
        report = report_of(golden, run, **options)
        assert (report.verdict, caught(report)) == (Verdict.PASS, set())

    def test_rtol_one_lets_zeros_pass_and_nothing_else(self):
        report = report_of(*pair(), rtol=1)
        assert (report.verdict, caught(report)) == (Verdict.INCONCLUSIVE, {ZEROS})

    @pytest.mark.parametrize("form", ["full", "top:5"])
    def test_small_logits_are_zeros_to_a_large_bound(self, form):
        golden, run = pair(form)
        for s in golden.seqs:
            s.logits["exact"] *= np.float32(1e-3)
        for s in run.seqs:
            s.logits["engine"] *= np.float32(1e-3)
        report = report_of(golden, run, atol=0.5, allow_partial=True)
        assert report.verdict is Verdict.INCONCLUSIVE
        assert ZEROS in caught(report)

    @pytest.mark.parametrize("form", ["full", "top:5"])
    def test_a_flat_golden_is_its_own_shuffle(self, form):
        golden, run = pair(form)
        for g, r in zip(golden.seqs, run.seqs, strict=True):
            level = np.arange(6, dtype=np.float32)[:, None] + 5
            g.logits["exact"] = np.zeros((6, 40), np.float32) + level
            r.logits["engine"] = g.logits["exact"] + np.float32(1e-5)
            g.tokens[:] = r.tokens[:] = 0
        report = report_of(golden, run, atol=1e-3, allow_partial=True)
        assert (report.verdict, caught(report)) == (Verdict.INCONCLUSIVE, {SHUFFLED})

    @pytest.mark.parametrize("form", ["full", "top:5"])
    def test_a_golden_that_repeats_itself_is_its_own_previous_position(self, form):
        golden, run = pair(form)
        for g, r in zip(golden.seqs, run.seqs, strict=True):
            g.logits["exact"][:] = g.logits["exact"][0]
            g.tokens[:] = r.tokens[:] = g.tokens[0]
            r.logits["engine"] = g.logits["exact"] + np.float32(1e-5)
        report = report_of(golden, run, atol=1e-3, allow_partial=True)
        assert (report.verdict, caught(report)) == (Verdict.INCONCLUSIVE, {PREVIOUS})

    def test_tops_that_share_no_id_with_the_step_before_are_another_position(self):
        golden, run = pair("top:5")
        for g, r in zip(golden.seqs, run.seqs, strict=True):
            for step, row in enumerate(g.logits["exact"]):
                row[:] = -9
                row[5 * step : 5 * step + 5] = [5, 4, 3, 2, 1]
            r.logits["engine"] = g.logits["exact"] + np.float32(1e-5)
            g.tokens[:] = r.tokens[:] = g.logits["exact"].argmax(axis=1)
        report = report_of(golden, run, atol=1e-3, allow_partial=True)
        assert (report.verdict, caught(report)) == (Verdict.PASS, set())

    def test_one_row_that_refuses_is_enough(self):
        golden, run = pair()
        for g, r in zip(golden.seqs, run.seqs, strict=True):
            g.logits["exact"][:] = g.logits["exact"][0]
            g.logits["exact"][5] = g.logits["exact"][5][::-1]
            g.tokens[:] = r.tokens[:] = g.logits["exact"].argmax(axis=1)
            r.logits["engine"] = g.logits["exact"] + np.float32(1e-5)
        assert report_of(golden, run, atol=1e-3).verdict is Verdict.PASS

    def test_a_single_step_has_no_previous_one(self):
        report = report_of(*pair(steps=1), atol=1e-3)
        assert report.verdict is Verdict.PASS
        assert caught(report_of(*pair(steps=1), atol=100)) == {ZEROS, SHUFFLED}

    def test_each_sequence_is_asked_by_itself(self):
        golden, run = pair()
        golden.one.logits["exact"] *= np.float32(1e-3)
        run.one.logits["engine"] = golden.one.logits["exact"] + np.float32(1e-6)
        report = report_of(golden, run, atol=0.1)
        assert [s.verdict for s in report.sequences] == [Verdict.INCONCLUSIVE, Verdict.PASS]

    def test_a_run_top_is_asked_where_it_was_compared(self):
        golden, run = pair()
        for s in run.seqs:
            s.form = "top:5"
        report = report_of(golden, run, atol=1e-3, allow_partial=True)
        assert report.verdict is Verdict.PASS
        assert report_of(golden, run, atol=100, allow_partial=True).verdict is Verdict.INCONCLUSIVE

    def test_prompt_logits_are_asked_too(self):
        golden, run = pair(score=True)
        for g, r in zip(golden.seqs, run.seqs, strict=True):
            g.prompt_logits["exact"] *= np.float32(1e-3)
            r.prompt_logits["engine"] = g.prompt_logits["exact"] + np.float32(1e-6)
        report = report_of(golden, run, atol=0.1)
        assert report.verdict is Verdict.INCONCLUSIVE
        assert "prompt logits" in report.reason

    def test_diverged_outweighs_it(self):
        golden, run = pair()
        run.one.tokens[2] ^= 1
        assert report_of(golden, run, atol=100).verdict is Verdict.DIVERGED

    def test_a_tie_break_by_a_loose_tolerance_is_none(self):
        golden = golden_side()
        run = run_side(golden, teacher_forced=True)
        run.one.tokens[2] = 0 if golden.one.tokens[2] else 1
        assert report_of(golden, run, atol=100, on_tie="pass").verdict is Verdict.INCONCLUSIVE
        assert report_of(golden, run, atol=100, allow_loose=True).verdict is Verdict.TIE_BREAK

    def test_at_tolerance_zero_nothing_is_asked(self):
        golden, run = pair()
        for g, r in zip(golden.seqs, run.seqs, strict=True):
            g.logits["exact"][:] = 0
            r.logits["engine"] = -g.logits["exact"]
            g.tokens[:] = r.tokens[:] = 0
        assert report_of(golden, run).verdict is Verdict.PASS


def test_of_a_row_with_fewer_values_only_those_that_are_there_count():
    golden = np.array([[-9.0, 0.1, 0.2, 0.3]])  # far from uniform at id 0 alone
    ids, there = np.array([[3, 2, 0]]), np.array([[True, True, False]])
    passed = {}
    for held in (None, there, ~there, np.zeros_like(there)):
        baselines = Baselines(Tolerance(1.0, 0.0, None, None, {}), golden.dtype)
        baselines.feed(golden, ids, held)
        passed[None if held is None else int(held.sum())] = ZEROS in baselines.passed()
    assert passed == {None: False, 2: True, 1: False, 0: False}

"""The judging section of the design, sentence by sentence, on full logits."""

import itertools

import numpy as np
import pytest
from parity_cases import golden_side, judged, make_tie, pair, perturb, run_side

from kdtr_cli.errors import InputError
from kdtr_cli.parity.evidence import Logits
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Level, Verdict

pytestmark = pytest.mark.quick


def verdict(golden, run, **options):
    return judge(golden.evidence(), run.evidence(), JudgeOptions(**options)).verdict


def codes(report):
    return {f.code for f in report.findings}


class TestIdentical:
    def test_all_bits_of_all_logits_and_all_tokens(self):
        report = judged(*pair())
        t = report.totals
        assert report.verdict is Verdict.IDENTICAL
        assert (t.tokens_equal, t.tokens, t.exact) == (12, 12, True)
        assert (t.rows, t.rows_compared, t.rows_identical, t.values_compared) == (12, 12, 12, 480)
        assert (t.max_abs, t.max_ulp, t.max_kl) == (0.0, 0, 0.0)
        assert report.findings == ()

    def test_equal_digests_are_enough_and_the_run_is_not_read(self):
        golden, run = pair()
        for s in (*golden.seqs, *run.seqs):
            s.digest = True
        evidence = run.evidence()

        def never(lo, hi):
            raise AssertionError("read though the digests are equal")

        for s in evidence.sequences:
            object.__setattr__(s.logits["engine"], "rows", never)
        assert judge(golden.evidence(), evidence).verdict is Verdict.IDENTICAL

    def test_equal_digests_do_not_hide_a_golden_that_is_not_finite(self):
        golden, run = pair()
        for side, name in ((golden, "exact"), (run, "engine")):
            side.one.logits[name][4, 7] = np.nan
            side.one.digest = True
        report = judged(golden, run)
        assert report.verdict is Verdict.INVALID
        assert "step 4, id 7" in report.reason

    def test_other_digests_are_looked_into(self):
        golden, run = pair()
        run.one.logits["engine"][3, 3] += 1
        for s in (*golden.seqs, *run.seqs):
            s.digest = True
        assert verdict(golden, run) is Verdict.DIVERGED

    def test_a_tolerance_does_not_lower_the_verdict_of_equal_bits(self):
        assert verdict(*pair(), atol=1e-3) is Verdict.IDENTICAL
        assert verdict(*pair(), atol=1e9) is Verdict.IDENTICAL  # what it would let pass does not matter

    def test_the_sign_of_a_zero_is_a_bit(self):
        golden, run = pair()
        golden.one.logits["exact"][2, 3] = 0.0
        run.one.logits["engine"][2, 3] = -0.0
        report = judged(golden, run)
        assert report.verdict is Verdict.PASS  # numerically equal: within tolerance 0, but not all bits
        assert report.exit_code == 0
        assert codes(report) == {"logits.signed_zero"}
        assert report.totals.rows_identical == 11

    def test_cannot_be_had_against_float64(self):
        golden, run = pair()
        for g, r in zip(golden.seqs, run.seqs, strict=True):
            del g.logits["exact"]
            g.logits["float64"] = r.logits["engine"].astype(np.float64)
        report = judged(golden, run, atol=1e-6)
        assert (report.verdict, report.reference) == (Verdict.PASS, "float64")
        # not even if the run stored float64 of the same bits
        for g, r in zip(golden.seqs, run.seqs, strict=True):
            r.logits["engine"] = g.logits["float64"].copy()
        assert verdict(golden, run, atol=1e-6) is Verdict.PASS


class TestPass:
    def test_all_tokens_and_full_logits_at_every_step_within_tolerance(self):
        golden, run = pair()
        perturb(run, 1e-3)
        report = judged(golden, run, atol=2e-3)
        assert report.verdict is Verdict.PASS
        assert 5e-4 < report.totals.max_abs < 1.1e-3
        assert report.totals.max_kl > 0

    def test_outside_at_one_value_of_one_step_is_diverged(self):
        golden, run = pair()
        run.seqs[1].logits["engine"][5, 39] += np.float32(0.01)
        report = judged(golden, run, atol=5e-3)
        assert report.verdict is Verdict.DIVERGED
        (finding,) = report.findings
        assert (finding.code, finding.sequence, finding.step, finding.token) == (
            "logits.out_of_tolerance",
            "s1",
            5,
            39,
        )
        assert report.totals.first_logit_failure == (1, 5)
        assert (report.totals.rows_out, report.totals.values_out) == (1, 1)
        assert report.totals.exact

    def test_tier_exact_is_judged_at_zero(self):
        golden, run = pair()
        x = run.one.logits["engine"]
        x[0, 0] = np.nextafter(x[0, 0], np.float32(np.inf))
        report = judged(golden, run)
        assert report.verdict is Verdict.DIVERGED
        assert report.tolerance.is_zero
        assert report.totals.max_ulp == 1

    @pytest.mark.parametrize(
        ("options", "expected"),
        [({"max_ulp": 1}, Verdict.PASS), ({"max_ulp": 0}, Verdict.DIVERGED), ({"max_kl": 1e-6}, Verdict.PASS)],
        ids=str,
    )
    def test_ulp_and_kl(self, options, expected):
        golden, run = pair()
        for s in run.seqs:
            s.logits["engine"] = np.nextafter(s.logits["engine"], np.float32(np.inf))
        assert verdict(golden, run, **options) is expected

    def test_kl_alone_can_fail_a_step(self):
        golden, run = pair()
        row = run.one.logits["engine"][3]
        row[row.argmin()] = row.max() - 1  # the token stays
        report = judged(golden, run, max_kl=1e-6)
        assert report.verdict is Verdict.DIVERGED
        (finding,) = report.findings
        assert (finding.code, finding.step) == ("logits.out_of_tolerance", 3)
        assert "KL" in finding.message
        assert report.sequences[0].logits.max_kl_row == 3

    def test_the_place_of_the_largest_difference_is_named(self):
        golden, run = pair()
        perturb(run, 1e-4)
        run.seqs[1].logits["engine"][2, 17] = golden.seqs[1].logits["exact"][2, 17] + np.float32(0.5)
        place = judged(golden, run, atol=1).sequences[1].logits.max_abs_at
        assert (place.row, place.token) == (2, 17)
        assert place.run - place.golden == pytest.approx(0.5, abs=1e-6)


class TestTolerance:
    @pytest.mark.parametrize("tier", ["bf16", "int4", "fast"])
    def test_any_other_tier_without_one_is_invalid(self, tier):
        golden = golden_side()
        report = judged(golden, run_side(golden, tier=tier))
        assert report.verdict is Verdict.INVALID
        assert f"a run of tier {tier} is judged by a tolerance" in report.reason
        assert "--atol" in report.reason

    def test_another_tier_is_judged_against_float64(self):
        golden = golden_side()
        report = judged(golden, run_side(golden, tier="bf16"), atol=1e-5)
        assert (report.verdict, report.reference) == (Verdict.PASS, "float64")

    def test_another_tier_takes_exact_where_there_is_no_float64(self):
        golden = golden_side()
        for s in golden.seqs:
            del s.logits["float64"]
        report = judged(golden, run_side(golden, tier="bf16"), atol=1e-5)
        assert (report.verdict, report.reference) == (Verdict.IDENTICAL, "exact")

    def test_tier_exact_is_judged_against_exact_whatever_the_tolerance(self):
        golden, run = pair()
        for s in golden.seqs:
            s.logits["float64"] += 5
        assert judged(golden, run).reference == "exact"
        assert verdict(golden, run, atol=1e-3) is Verdict.IDENTICAL

    def test_without_exact_logits_tolerance_zero_says_nothing(self):
        golden, run = pair()
        for s in golden.seqs:
            del s.logits["exact"]
        report = judged(golden, run)
        assert report.verdict is Verdict.INVALID
        assert "--no-exact" in report.reason
        assert verdict(golden, run, atol=1e-5) is Verdict.PASS

    def test_equal_bits_of_float32_logits_are_not_identical(self):
        """BLAS may give a run's bits by chance: it proves nothing, so it is judged by a bound like any others."""
        golden, run = pair()
        for s in golden.seqs:
            s.logits = {"float32": s.logits["exact"]}
        for options in ({}, {"allow_loose": True}):
            report = judged(golden, run, **options)
            assert report.verdict is Verdict.INVALID
            assert "--arith float32" in report.reason
        report = judged(golden, run, atol=1e-5)
        assert (report.verdict, report.reference) == (Verdict.PASS, "float32")

    @pytest.mark.parametrize("tier", ["exact", "bf16"])
    @pytest.mark.parametrize("other", ["exact", "float64"])
    def test_float32_is_taken_only_where_there_is_nothing_else(self, tier, other):
        golden = golden_side()
        for s in golden.seqs:
            s.logits = {"float32": s.logits["exact"] + 1, other: s.logits[other]}
        assert judged(golden, run_side(golden_side(), tier=tier), atol=1e-5).reference == other

    def test_logits_of_some_sequences_only_are_invalid(self):
        golden, run = pair()
        del golden.seqs[1].logits["exact"]
        report = judged(golden, run)
        assert report.verdict is Verdict.INVALID
        assert "'s1'" in report.reason

    def test_origins_are_in_the_report(self):
        report = judged(*pair(), atol=1e-3, max_kl=0.1)
        assert report.tolerance.origins == {"atol": "--atol", "rtol": "0 beside --atol", "max_kl": "--max-kl"}


class TestDiverged:
    @pytest.mark.parametrize("step", range(6))
    def test_another_token(self, step):
        golden, run = pair()
        run.seqs[1].tokens[step] = (run.seqs[1].tokens[step] + 1) % 40
        report = judged(golden, run)
        t = report.totals
        assert (report.verdict, report.exit_code) == (Verdict.DIVERGED, 1)
        assert (t.first_divergence, t.tokens_equal, t.exact) == ((1, step), 6 + step, False)
        assert t.rows_compared == 6 + step + 1  # what follows saw other tokens
        row = np.sort(golden.seqs[1].logits["exact"][step].astype(float))
        assert t.margin == row[-1] - row[-2]

    @pytest.mark.parametrize("kept", range(6))
    def test_a_shorter_output(self, kept):
        golden, run = pair()
        s = run.one
        s.tokens, s.logits = s.tokens[:kept], {"engine": s.logits["engine"][:kept]}
        report = judged(golden, run)
        assert report.verdict is Verdict.DIVERGED
        assert codes(report) == {"tokens.shorter"}
        assert report.totals.first_divergence == (0, kept)
        assert report.totals.margin is not None
        assert (report.totals.tokens_equal, report.totals.tokens) == (kept + 6, 12)

    def test_a_longer_output(self):
        golden, run = pair()
        s = golden.one
        s.tokens, s.logits = s.tokens[:4], {"exact": s.logits["exact"][:4]}
        report = judged(golden, run)
        assert report.verdict is Verdict.DIVERGED
        assert codes(report) == {"tokens.longer"}
        assert (report.totals.tokens_equal, report.totals.tokens, report.totals.exact) == (10, 10, False)
        assert (report.totals.first_divergence, report.totals.margin) == ((0, 4), None)

    def test_an_empty_output_where_there_should_be_one(self):
        golden, run = pair(sequences=1)
        run.one.tokens, run.one.logits = run.one.tokens[:0], {"engine": run.one.logits["engine"][:0]}
        assert verdict(golden, run, atol=1e9, allow_loose=True, allow_partial=True) is Verdict.DIVERGED

    @pytest.mark.parametrize("gone", [0, 1])
    def test_a_missing_sequence(self, gone):
        golden, run = pair()
        del run.seqs[gone]
        report = judged(golden, run)
        assert report.verdict is Verdict.DIVERGED
        assert codes(report) == {"sequence.missing"}
        t = report.totals
        assert (t.missing, t.exact, t.tokens_equal, t.first_divergence) == (1, False, 6, (gone, 0))

    def test_an_extra_sequence(self):
        golden, run = pair(sequences=3)
        del golden.seqs[1]
        report = judged(golden, run)
        assert report.verdict is Verdict.DIVERGED
        assert codes(report) == {"sequence.extra"}
        assert (report.totals.extra, report.totals.exact) == (1, False)
        assert (report.totals.tokens_equal, report.totals.tokens) == (12, 12)

    def test_a_renamed_sequence_is_missing_and_extra(self):
        golden, run = pair()
        run.one.id = "s0 "
        assert codes(judged(golden, run)) == {"sequence.missing", "sequence.extra"}

    def test_a_run_without_sequences(self):
        golden, run = pair()
        run.seqs.clear()
        assert verdict(golden, run) is Verdict.DIVERGED

    def test_another_finish_reason(self):
        golden, run = pair()
        run.one.finish = "stop"
        report = judged(golden, run)
        assert report.verdict is Verdict.DIVERGED
        assert codes(report) == {"finish_reason"}

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("options", [{}, {"atol": 1e30, "allow_loose": True}, {"max_kl": 1e30}], ids=str)
    def test_a_value_in_the_run_that_is_not_finite(self, bad, options):
        golden, run = pair()
        run.seqs[1].logits["engine"][4, 7] = bad
        report = judged(golden, run, **options)
        assert report.verdict is Verdict.DIVERGED
        finding = next(f for f in report.findings if f.code == "logits.nonfinite")
        assert (finding.sequence, finding.step, finding.token) == ("s1", 4, 7)
        assert report.totals.max_abs == pytest.approx(abs(bad), nan_ok=True)
        assert report.totals.first_logit_failure == (1, 4)

    def test_not_a_number_is_worse_than_infinite(self):
        golden, run = pair()
        run.one.logits["engine"][1, 0] = np.nan
        run.seqs[1].logits["engine"][1, 0] = np.inf
        assert np.isnan(judged(golden, run).totals.max_abs)


class TestInvalid:
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("same", [False, True], ids=["run finite", "run alike"])
    def test_a_value_in_the_golden_that_is_not_finite(self, bad, same):
        golden, run = pair()
        golden.one.logits["exact"][2, 3] = bad
        if same:
            run.one.logits["engine"][2, 3] = bad
        report = judged(golden, run, atol=1e30, allow_loose=True)
        assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)
        assert "step 2, id 3" in report.reason

    def test_even_after_the_first_divergence(self):
        golden, run = pair()
        run.one.tokens[0] = (run.one.tokens[0] + 1) % 40
        golden.one.logits["exact"][5, 3] = np.nan
        assert verdict(golden, run) is Verdict.INVALID

    def test_but_not_outside_the_judged_part(self):
        golden, run = pair()
        golden.one.logits["exact"][5, 3] = np.nan
        golden.seqs[1].logits["exact"][0, 0] = np.nan
        assert verdict(golden, run, steps=5, select=("s0",)) is Verdict.IDENTICAL


class TestInconclusive:
    def test_no_sequences(self):
        golden, run = pair()
        golden.seqs.clear()
        run.seqs.clear()
        report = judged(golden, run)
        assert (report.verdict, report.exit_code) == (Verdict.INCONCLUSIVE, 2)
        assert "nothing was compared" in report.reason
        assert not report.totals.exact

    @pytest.mark.parametrize("options", [{}, {"allow_partial": True, "allow_loose": True, "atol": 9}], ids=str)
    def test_no_tokens(self, options):
        report = judged(*pair(steps=0), **options)
        assert report.verdict is Verdict.INCONCLUSIVE

    @pytest.mark.parametrize("side", ["golden", "run"])
    def test_no_logits(self, side):
        golden, run = pair()
        for s in {"golden": golden, "run": run}[side].seqs:
            s.logits.clear()
        report = judged(golden, run)
        assert report.verdict is Verdict.INCONCLUSIVE
        assert "no logits to compare" in report.reason
        report = judged(golden, run, allow_partial=True)
        assert (report.verdict, report.totals.logits, report.totals.max_abs) == (Verdict.PASS, "none", None)

    def test_no_logits_and_other_tokens_is_diverged(self):
        golden, run = pair()
        run.one.logits.clear()
        run.one.tokens[3] ^= 1
        assert verdict(golden, run) is Verdict.DIVERGED

    def test_prompt_logits_that_the_run_lacks(self):
        golden, run = pair(score=True)
        assert verdict(golden, run) is Verdict.IDENTICAL
        for s in run.seqs:
            s.prompt_logits.clear()
        assert verdict(golden, run) is Verdict.INCONCLUSIVE
        report = judged(golden, run, allow_partial=True)
        assert (report.verdict, report.totals.prompt_logits) == (Verdict.PASS, "none")


class TestPromptLogits:
    def test_are_judged_like_the_others(self):
        golden, run = pair(score=True)
        run.seqs[1].prompt_logits["engine"][3, 5] += np.float32(0.01)
        report = judged(golden, run)
        assert report.verdict is Verdict.DIVERGED
        assert codes(report) == {"prompt_logits.out_of_tolerance"}
        assert "position 3" in report.findings[0].message
        assert verdict(golden, run, atol=0.02) is Verdict.PASS
        assert report.totals.max_abs == pytest.approx(0.01, rel=1e-3)

    def test_not_finite(self):
        golden, run = pair(score=True)
        run.one.prompt_logits["engine"][0, 0] = np.nan
        assert verdict(golden, run, atol=1) is Verdict.DIVERGED
        golden.one.prompt_logits["exact"][0, 0] = np.nan
        assert verdict(golden, run, atol=1) is Verdict.INVALID

    def test_are_compared_even_where_the_tokens_part_at_once(self):
        golden, run = pair(score=True)
        run.one.tokens[0] ^= 1
        assert judged(golden, run).sequences[0].prompt_logits.rows_compared == 4

    def test_that_only_the_run_has_are_noted(self):
        golden, run = pair(score=True)
        for s in golden.seqs:
            s.prompt_logits.clear()
        report = judged(golden, run)
        assert report.verdict is Verdict.IDENTICAL
        assert {f.level for f in report.findings} == {Level.NOTE}


class TestTieBreak:
    """tokens part, but only so: the run's token has a reference logit within the tolerance of the maximum, the run's
    logits at that step are within tolerance, and every later step was compared teacher-forced"""

    def forced(self, **kwargs):
        golden = golden_side(**kwargs)
        return golden, run_side(golden, teacher_forced=True)

    @pytest.mark.parametrize("step", range(6))
    def test_a_tie_within_tolerance(self, step):
        golden, run = self.forced()
        make_tie(golden, run, step)
        report = judged(golden, run, atol=2e-3)
        assert (report.verdict, report.exit_code) == (Verdict.TIE_BREAK, 1)
        t = report.totals
        assert (t.tokens_equal, t.tokens, t.exact, t.first_divergence) == (11, 12, False, (0, step))
        assert t.margin == pytest.approx(1e-3, rel=1e-2)
        assert t.rows_compared == 12
        assert report.sequences[0].divergence.tie

    @pytest.mark.parametrize(
        ("on_tie", "code", "level"), [("fail", 1, Level.ERROR), ("warn", 0, Level.WARNING), ("pass", 0, Level.NOTE)]
    )
    def test_on_tie(self, on_tie, code, level):
        golden, run = self.forced()
        make_tie(golden, run, 2)
        report = judged(golden, run, atol=2e-3, on_tie=on_tie)
        assert (report.verdict, report.exit_code) == (Verdict.TIE_BREAK, code)
        assert [f.level for f in report.findings] == [level]

    def test_several_ties_are_one_tie_break(self):
        golden, run = self.forced()
        for step in (1, 3, 5):
            make_tie(golden, run, step)
        make_tie(golden, run, 4, seq=1)
        report = judged(golden, run, atol=2e-3)
        assert (report.verdict, report.totals.tokens_equal) == (Verdict.TIE_BREAK, 8)

    def test_one_step_that_is_no_tie_spoils_it(self):
        golden, run = self.forced()
        make_tie(golden, run, 1)
        make_tie(golden, run, 3, gap=1.0)
        assert verdict(golden, run, atol=2e-3) is Verdict.DIVERGED

    def test_a_logit_of_the_run_out_of_tolerance_at_that_step(self):
        golden, run = self.forced()
        make_tie(golden, run, 1)
        run.one.logits["engine"][1, 0] += np.float32(0.01)
        assert verdict(golden, run, atol=2e-3) is Verdict.DIVERGED

    def test_or_at_a_later_step(self):
        golden, run = self.forced()
        make_tie(golden, run, 1)
        run.one.logits["engine"][5, 0] += np.float32(0.01)
        assert verdict(golden, run, atol=2e-3) is Verdict.DIVERGED

    def test_a_free_run_did_not_compare_the_later_steps(self):
        golden, run = pair()
        make_tie(golden, run, 2)
        report = judged(golden, run, atol=2e-3, on_tie="pass")
        assert (report.verdict, report.exit_code) == (Verdict.DIVERGED, 1)
        assert report.totals.rows_compared == 3 + 6
        assert "--teacher-force" in report.findings[0].message

    def test_the_tokens_of_a_free_run_after_the_tie_follow_other_tokens_and_count_for_nothing(self):
        golden, run = pair()
        make_tie(golden, run, 2)
        run.one.tokens[4:] = (golden.one.tokens[4:] + 7) % 40
        report = judged(golden, run, atol=2e-3)
        assert "it is a tie, but 3 later steps were not compared" in report.findings[0].message

    def test_a_free_run_at_the_last_step_has_no_later_ones(self):
        golden, run = pair()
        make_tie(golden, run, 5)
        run.one.finish = "stop"  # the other token may well be a stop token
        assert verdict(golden, run, atol=2e-3) is Verdict.TIE_BREAK

    def test_a_tie_and_another_length(self):
        golden, run = self.forced()
        make_tie(golden, run, 1)
        s = run.one
        s.tokens, s.logits = s.tokens[:5], {"engine": s.logits["engine"][:5]}
        assert verdict(golden, run, atol=2e-3) is Verdict.DIVERGED

    def test_the_tolerance_of_the_tie_is_that_of_the_logits(self):
        golden, run = self.forced()
        make_tie(golden, run, 1, gap=1e-3)
        assert verdict(golden, run, atol=9e-4) is Verdict.DIVERGED
        assert verdict(golden, run, rtol=1e-3) is Verdict.TIE_BREAK  # the maximum is above 1
        assert verdict(golden, run, max_ulp=2**20) is Verdict.TIE_BREAK
        assert verdict(golden, run, max_ulp=2) is Verdict.DIVERGED

    def test_at_tolerance_zero_only_equal_logits_tie(self):
        golden, run = self.forced()
        row = golden.one.logits["exact"][2]
        other = int(np.argsort(-row)[1])
        row[other] = row.max()
        run.one.logits["engine"][2] = row
        golden.one.tokens[2] = row.argmax()
        run.one.tokens[2] = np.flatnonzero(row == row.max())[1]
        assert verdict(golden, run) is Verdict.TIE_BREAK
        assert verdict(golden, run, max_kl=1e-9) is Verdict.TIE_BREAK
        row[other] = np.nextafter(row.max(), np.float32(0))
        run.one.logits["engine"][2] = row
        golden.one.tokens[2], run.one.tokens[2] = row.argmax(), other
        assert verdict(golden, run) is Verdict.DIVERGED

    def test_a_sampled_token_can_not_be_explained(self):
        golden, run = self.forced()
        make_tie(golden, run, 1)
        for side in (golden, run):
            side.manifest["decoding"]["temperature"] = 0.7
        report = judged(golden, run, atol=2e-3)
        assert report.verdict is Verdict.DIVERGED
        assert "temperature" in report.findings[0].message

    def test_a_token_outside_the_vocabulary_is_no_tie(self):
        golden, run = self.forced()
        run.one.tokens[2] = 40
        assert verdict(golden, run, atol=1e9, allow_loose=True) is Verdict.DIVERGED
        run.one.tokens[2] = -1
        assert verdict(golden, run, atol=1e9, allow_loose=True) is Verdict.DIVERGED

    def test_a_token_that_is_not_the_argmax_of_its_own_logits_is_pointed_out(self):
        golden, run = self.forced()
        run.one.tokens[2] = int(np.argsort(-run.one.logits["engine"][2])[1])
        report = judged(golden, run)
        assert codes(report) == {"tokens.diverged", "tokens.not_argmax"}
        assert report.sequences[0].divergence.own_argmax is False

    def test_a_recorded_tie_of_the_golden_is_told(self):
        golden, run = self.forced()
        make_tie(golden, run, 2)
        golden.one.ties = (2,)
        assert judged(golden, run, atol=2e-3).sequences[0].divergence.recorded_tie

    def test_teacher_forced_steps_are_all_compared_after_a_real_divergence(self):
        golden, run = self.forced()
        run.one.tokens[1] ^= 1
        run.one.logits["engine"][5, 5] += 1
        report = judged(golden, run)
        assert report.verdict is Verdict.DIVERGED
        assert codes(report) >= {"tokens.diverged", "logits.out_of_tolerance"}
        assert report.totals.rows_compared == 12
        assert report.totals.tokens_equal == 11


class TestPrecedence:
    """INVALID > DIVERGED > INCONCLUSIVE > TIE_BREAK > PASS > IDENTICAL over sequences"""

    SPOIL = ("INVALID", "DIVERGED", "INCONCLUSIVE", "TIE_BREAK", "PASS", "IDENTICAL")

    def spoil(self, golden, run, i, what):
        if what == "INVALID":
            golden.seqs[i].logits["exact"][0, 0] = np.nan
        elif what == "DIVERGED":
            run.seqs[i].tokens[3] ^= 1
            run.seqs[i].logits["engine"][3] *= -1
        elif what == "INCONCLUSIVE":
            del run.seqs[i].logits["engine"]
        elif what == "TIE_BREAK":
            make_tie(golden, run, 2, seq=i)
        elif what == "PASS":
            run.seqs[i].logits["engine"] += np.float32(1e-4)

    @pytest.mark.parametrize("first", range(6))
    @pytest.mark.parametrize("second", range(6))
    def test_of_two_sequences(self, first, second):
        golden = golden_side()
        run = run_side(golden, teacher_forced=True)
        for i, which in enumerate((first, second)):
            self.spoil(golden, run, i, self.SPOIL[which])
        report = judged(golden, run, atol=2e-3)
        assert [s.verdict.value for s in report.sequences] == [self.SPOIL[first], self.SPOIL[second]]
        assert report.verdict.value == self.SPOIL[min(first, second)]

    def test_an_extra_sequence_outweighs_a_tie(self):
        golden = golden_side(sequences=3)
        run = run_side(golden, teacher_forced=True)
        make_tie(golden, run, 2)
        del golden.seqs[2]
        assert verdict(golden, run, atol=2e-3, on_tie="pass") is Verdict.DIVERGED


class TestParts:
    def test_steps_judge_the_first_tokens(self):
        golden, run = pair()
        run.one.tokens[4] ^= 1
        run.one.logits["engine"][4:] = 0
        report = judged(golden, run, steps=4)
        t = report.totals
        assert report.verdict is Verdict.IDENTICAL
        assert (t.steps, t.steps_available, t.tokens_equal, t.tokens) == (8, 12, 8, 8)
        assert verdict(golden, run, steps=5) is Verdict.DIVERGED

    def test_steps_accept_a_run_that_was_made_with_fewer(self):
        golden, run = pair()
        for s in run.seqs:
            s.tokens, s.logits = s.tokens[:4], {"engine": s.logits["engine"][:4]}
        assert verdict(golden, run) is Verdict.DIVERGED
        assert verdict(golden, run, steps=4) is Verdict.IDENTICAL
        assert verdict(golden, run, steps=5) is Verdict.DIVERGED

    def test_steps_do_not_hide_that_the_run_ended_earlier_or_later(self):
        golden, run = pair()
        for s in golden.seqs:
            s.tokens, s.logits = s.tokens[:3], {k: v[:3] for k, v in s.logits.items()}
        assert verdict(golden, run, steps=3) is Verdict.IDENTICAL
        assert verdict(golden, run, steps=4) is Verdict.DIVERGED

    def test_finish_reasons_count_where_all_was_judged(self):
        golden, run = pair()
        run.one.finish = "stop"
        assert verdict(golden, run, steps=5) is Verdict.IDENTICAL
        assert verdict(golden, run, steps=6) is Verdict.DIVERGED

    def test_select_judges_the_named_sequences(self):
        golden, run = pair(sequences=3)
        run.one.tokens[0] ^= 1
        del run.seqs[2]
        report = judged(golden, run, select=("s1",))
        t = report.totals
        assert report.verdict is Verdict.IDENTICAL
        assert (t.sequences, t.sequences_available, t.tokens) == (1, 3, 6)
        assert [s.index for s in report.sequences] == [1]
        assert verdict(golden, run, select=("s1", "s2")) is Verdict.DIVERGED  # selected and missing

    def test_select_keeps_the_index_of_the_golden(self):
        golden, run = pair()
        run.seqs[1].tokens[2] ^= 1
        assert judged(golden, run, select=("s1",)).totals.first_divergence == (1, 2)

    @pytest.mark.parametrize("name", ["s7", "S0", "", "s0,s1"])
    def test_a_selection_that_the_golden_lacks(self, name):
        golden, run = pair()
        with pytest.raises(InputError, match="no such sequence") as caught:
            judged(golden, run, select=("s0", name))
        assert "\n" not in str(caught.value)


class TestBlocks:
    """Logits come in blocks of rows; where a block ends changes nothing."""

    def spoiled(self):
        golden, run = pair(steps=13, score=True)
        perturb(run, 1e-4)
        run.one.logits["engine"][3] = golden.one.logits["exact"][3]
        run.one.logits["engine"][7, 7] += np.float32(0.01)
        run.one.logits["engine"][11, 2] = np.nan
        run.seqs[1].logits["engine"][12, 39] -= np.float32(0.02)
        return golden, run

    @pytest.mark.parametrize("values", [1, 40, 41, 80, 200, 520, 10**9])
    @pytest.mark.parametrize("form", ["full", "top:5", "digest"])
    def test_of_any_size_give_the_same(self, values, form, monkeypatch):
        golden, run = self.spoiled()
        for s in golden.seqs:
            s.form = form
        whole = judged(golden, run, atol=1e-3, allow_partial=True)
        monkeypatch.setattr("kdtr_cli.parity.logits.BLOCK_VALUES", values)
        parts = judged(golden, run, atol=1e-3, allow_partial=True)
        assert repr(parts.totals) == repr(whole.totals)
        assert [repr(s.logits) for s in parts.sequences] == [repr(s.logits) for s in whole.sequences]
        assert parts.findings == whole.findings or repr(parts.findings) == repr(whole.findings)

    @pytest.mark.parametrize("values", [40, 80, 10**9])
    def test_of_any_size_leave_a_loose_tolerance_loose(self, values, monkeypatch):
        monkeypatch.setattr("kdtr_cli.parity.logits.BLOCK_VALUES", values)
        golden, run = pair()
        for g, r in zip(golden.seqs, run.seqs, strict=True):
            g.logits["exact"][:] = g.logits["exact"][0] + np.linspace(0, 1e-3, 6, dtype=np.float32)[:, None]
            r.logits["engine"] = g.logits["exact"] + np.float32(1e-5)
        report = judged(golden, run, atol=3e-4)
        assert report.sequences[0].logits.too_loose == ("the previous position's logits",)

    def test_are_small_and_asked_for_in_order(self):
        n, vocab, asked = 300, 40_000, []
        row = np.random.default_rng(0).normal(0, 3, vocab).astype(np.float32)
        golden, run = pair(sequences=1, steps=1)

        def lazy(name):
            def rows(lo, hi):
                asked.append((name, lo, hi))
                return np.broadcast_to(row, (hi - lo, vocab)) + np.float32(name == "run") * np.float32(1e-6)

            return Logits(n, vocab, np.dtype(np.float32), rows=rows)

        sides = []
        for side, name in ((golden, "exact"), (run, "engine")):
            side.vocab = vocab
            side.one.tokens = np.full(n, row.argmax(), np.int32)
            side.one.logits = {}
            evidence = side.evidence()
            evidence.sequences[0].logits[name] = lazy(side.kind)
            sides.append(evidence)
        report = judge(*sides, JudgeOptions(atol=1e-5, allow_loose=True))
        assert report.verdict is Verdict.PASS
        assert report.totals.rows_compared == n
        assert max(hi - lo for _, lo, hi in asked) * vocab <= 1 << 19
        for name in ("golden", "run"):
            mine = [(lo, hi) for who, lo, hi in asked if who == name]
            assert mine[0][0] == 0
            assert mine[-1][1] == n
            assert all(a[1] == b[0] for a, b in itertools.pairwise(mine))  # each row once

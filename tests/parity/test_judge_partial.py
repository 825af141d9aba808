"""Partial logits: what a top K and what digests can show, and that they never show more."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from parity_cases import golden_side, judged, make_tie, perturb, run_side

from kdtr_cli.parity.evidence import logits_of, sha256_rows
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict

pytestmark = pytest.mark.quick

FORMS = ("full", "top:5", "digest")
MIXED = [p for p in itertools.product(FORMS, repeat=2) if p != ("full", "full")]


def pair(golden_form="full", run_form="full", **kwargs):
    golden = golden_side(**kwargs)
    run = run_side(golden)
    for side, form in ((golden, golden_form), (run, run_form)):
        for s in side.seqs:
            s.form = form
    return golden, run


def without_digests(evidence):
    for s in evidence.sequences:
        for logits in s.logits.values():
            object.__setattr__(logits, "row_sha256", None)
    return evidence


def codes(report):
    return {f.code for f in report.findings}


class TestDigests:
    @pytest.mark.parametrize("forms", MIXED)
    def test_equal_ones_are_enough_for_identical(self, forms):
        report = judged(*pair(*forms))
        assert report.verdict is Verdict.IDENTICAL
        assert report.totals.logits == ("digest" if "digest" in forms else "top5")
        assert (report.totals.rows_identical, report.totals.max_abs) == (12, 0.0)

    @pytest.mark.parametrize("forms", MIXED)
    @pytest.mark.parametrize("place", ["least", "largest"])
    def test_one_other_bit_is_diverged_at_tolerance_zero(self, forms, place):
        golden, run = pair(*forms)
        row = run.seqs[1].logits["engine"][5]
        at = row.argmin() if place == "least" else row.argmax()
        row[at] = np.nextafter(row[at], np.float32(np.inf))
        for options in ({}, {"allow_partial": True}, {"atol": 0}):
            report = judged(golden, run, **options)
            assert report.verdict is Verdict.DIVERGED
            assert report.totals.rows_identical == 11

    @pytest.mark.parametrize("forms", [f for f in MIXED if "digest" in f])
    def test_other_ones_measure_nothing(self, forms):
        golden, run = pair(*forms)
        run.one.logits["engine"][2, 2] += np.float32(1e-6)
        report = judged(golden, run, atol=1.0, allow_partial=True, allow_loose=True)
        assert (report.verdict, codes(report)) == (Verdict.INCONCLUSIVE, {"logits.unmeasured"})
        assert "1 rows of logits can't be measured" in report.reason

    def test_of_another_type_say_nothing(self):
        golden, run = pair("digest")
        for s in golden.seqs:
            del s.logits["exact"]
        report = judged(golden, run, atol=0)
        assert (report.verdict, report.reference) == (Verdict.INCONCLUSIVE, "float64")

    def test_of_rows_that_are_not_finite_in_the_run_convict_the_golden(self):
        golden, run = pair("digest")
        for side, name in ((golden, "exact"), (run, "engine")):
            side.one.logits[name][3, 3] = np.nan
        assert judged(golden, run).verdict is Verdict.INVALID

    @pytest.mark.parametrize("form", ["digest", "top:5"])
    def test_a_run_that_is_not_finite(self, form):
        golden, run = pair(form)
        low = golden.one.logits["exact"][3].argmin()
        run.one.logits["engine"][3, low] = -np.inf  # outside every top K
        report = judged(golden, run, atol=1e9, allow_partial=True, allow_loose=True)
        assert report.verdict is Verdict.DIVERGED
        assert "logits.nonfinite" in codes(report)

    def test_are_those_of_the_little_endian_bytes(self):
        import hashlib

        rows = np.arange(6, dtype=np.float32).reshape(2, 3)
        expected = hashlib.sha256(rows[1].astype("<f4").tobytes()).digest()
        assert sha256_rows(rows)[1].tobytes() == expected
        assert sha256_rows(rows.astype(">f4"))[1].tobytes() == expected
        assert sha256_rows(rows[:, ::1])[1].tobytes() == expected


TOPS = [("top:5", "full"), ("full", "top:5"), ("top:5", "top:5"), ("top:5", "top:3"), ("top:3", "top:5")]


#: Each kind of bound on single values; an rtol above 1 alone says nothing of a value that is not seen.
BOUNDS = [{"atol": 1e-3}, {"max_ulp": 0}, {"max_ulp": 64}, {"max_ulp": 64, "rtol": 2.0}]


class TestTopK:
    @pytest.mark.parametrize("forms", TOPS)
    def test_partial_logits_need_to_be_allowed(self, forms):
        golden, run = pair(*forms)
        perturb(run, 1e-4)
        report = judged(golden, run, atol=1e-3)
        assert (report.verdict, report.exit_code, codes(report)) == (Verdict.INCONCLUSIVE, 2, {"logits.partial"})
        report = judged(golden, run, atol=1e-3, allow_partial=True)
        assert report.verdict is Verdict.PASS
        assert report.totals.logits == ("top3" if "top:3" in forms else "top5")
        assert 0 < report.totals.max_abs < 1e-4 * 1.01

    @pytest.mark.parametrize("forms", TOPS)
    def test_a_compared_value_out_of_tolerance_is_diverged(self, forms):
        golden, run = pair(*forms)
        row = run.one.logits["engine"][4]
        at = int(np.argsort(-row)[1])
        row[at] -= np.float32(0.01)
        report = judged(golden, run, atol=1e-3)
        finding = next(f for f in report.findings if f.code == "logits.out_of_tolerance")
        assert report.verdict is Verdict.DIVERGED
        assert (finding.step, finding.token) == (4, at)

    @pytest.mark.parametrize("forms", TOPS)
    def test_values_are_compared_by_id_not_by_rank(self, forms):
        golden, run = pair(*forms)
        row = run.one.logits["engine"][4]
        second, third = np.argsort(-row)[1:3]
        row[[second, third]] = row[[third, second]]  # sorted values stay as they are
        assert judged(golden, run, atol=1e-3, allow_partial=True).verdict is Verdict.DIVERGED

    @pytest.mark.parametrize("forms", TOPS)
    def test_without_digests_no_bits_are_claimed(self, forms):
        golden, run = pair(*forms)
        g, r = without_digests(golden.evidence()), without_digests(run.evidence())
        assert judge(g, r).verdict is Verdict.INCONCLUSIVE
        report = judge(g, r, JudgeOptions(allow_partial=True))
        assert (report.verdict, report.totals.rows_identical) == (Verdict.PASS, 0)

    @pytest.mark.parametrize("bound", BOUNDS)
    def test_a_value_outside_the_golden_s_top_is_at_most_its_last(self, bound):
        golden, run = pair("top:5")
        row = run.one.logits["engine"][2]
        least = int(row.argmin())
        row[least] = np.sort(row)[-2]  # the golden has it far below its fifth; the token stays
        report = judged(golden, run, **bound, allow_partial=True, allow_loose=True)
        assert report.verdict is Verdict.DIVERGED
        (finding,) = report.findings
        assert (finding.step, finding.token, finding.golden, finding.run) == (2, least, None, float(row[least]))

    @pytest.mark.parametrize("bound", BOUNDS)
    @pytest.mark.parametrize("golden_form", ["full", "top:5"])
    def test_a_value_outside_the_run_s_top_is_at_most_its_last(self, golden_form, bound):
        golden, run = pair(golden_form, "top:5")
        row = run.one.logits["engine"][2]
        second = int(np.argsort(-row)[1])
        row[second] = row.min() - 1  # drops out of the run's top five
        report = judged(golden, run, **bound, allow_partial=True, allow_loose=True)
        assert report.verdict is Verdict.DIVERGED
        assert any(f.token == second and f.run is None for f in report.findings)

    def test_what_could_lie_within_tolerance_below_the_top_is_no_miss(self):
        golden, run = pair("full", "top:5")
        for g, r in zip(golden.seqs, run.seqs, strict=True):
            for a, b in zip(g.logits["exact"], r.logits["engine"], strict=True):
                fifth, sixth = np.sort(a)[-5], np.argsort(-a)[5]
                a[sixth] = fifth - np.float32(1e-5)
                b[sixth] = fifth - np.float32(2e-5)
        assert judged(golden, run, atol=1e-4, allow_partial=True).verdict is Verdict.PASS
        ulps = int(np.float32(1e-4) / np.spacing(np.float32(1e-3)))
        assert judged(golden, run, max_ulp=ulps, allow_partial=True).verdict is Verdict.PASS

    def test_tops_that_share_no_id_compare_nothing(self):
        golden, run = pair()
        flat = np.zeros((6, 40), np.float32)
        for g, r in zip(golden.seqs, run.seqs, strict=True):
            g.tokens[:] = r.tokens[:] = 0
            g.logits = {"exact": flat + np.float32(1e-3) * (np.arange(40) < 5).astype(np.float32)}
            r.logits = {"engine": flat + np.float32(1e-3) * (np.arange(40) >= 35).astype(np.float32)}
            g.form = r.form = "top:5"
        report = judged(golden, run, atol=1.0, allow_partial=True, allow_loose=True)
        assert report.verdict is Verdict.INCONCLUSIVE
        assert "logits.unmeasured" in codes(report)

    @pytest.mark.parametrize("forms", TOPS)
    def test_kl_needs_the_full_vocabulary(self, forms):
        golden, run = pair(*forms)
        perturb(run, 1e-4)
        report = judged(golden, run, atol=1e-3, max_kl=10, allow_partial=True)
        assert (report.verdict, codes(report)) == (Verdict.INCONCLUSIVE, {"logits.no_kl"})
        assert report.totals.max_kl is None

    def test_a_run_of_the_least_logits_is_diverged_by_any_bound(self):
        """All values that it gives are right; what it hides are the golden's largest."""
        golden = golden_side()
        evidence = run_side(golden).evidence()
        for g, r in zip(golden.seqs, evidence.sequences, strict=True):
            least = logits_of(-g.logits["exact"], "top:5")
            values = least.top_values
            low = replace(least, top_values=lambda lo, hi, values=values: -values(lo, hi), row_sha256=None)
            r.logits["engine"] = low
        for bound in BOUNDS:
            options = JudgeOptions(**bound, allow_partial=True, allow_loose=True)
            assert judge(golden.evidence(), evidence, options).verdict is Verdict.DIVERGED

    def test_a_golden_value_that_is_not_finite(self):
        golden, run = pair("top:5")
        golden.one.logits["exact"][2, int(golden.one.logits["exact"][2].argmax())] = np.inf
        assert judged(golden, run, atol=1e9, allow_partial=True).verdict is Verdict.INVALID

    def test_ids_outside_the_vocabulary_or_twice_are_invalid(self):
        for bad, words in ((40, "outside the vocabulary"), (-1, "outside"), (None, "an id twice")):
            golden, run = pair("full", "top:5")
            evidence = run.evidence()
            ids = evidence.sequences[0].logits["engine"].top_ids(0, 6)
            ids[3, 2] = ids[3, 1] if bad is None else bad
            report = judge(golden.evidence(), evidence, JudgeOptions(allow_partial=True))
            assert report.verdict is Verdict.INVALID
            assert words in report.reason

    def test_a_tie_within_the_top(self):
        golden = golden_side()
        run = run_side(golden, teacher_forced=True)
        make_tie(golden, run, 2)
        for s in golden.seqs:
            s.form = "top:5"
        assert judged(golden, run, atol=2e-3).verdict is Verdict.INCONCLUSIVE
        assert judged(golden, run, atol=2e-3, allow_partial=True).verdict is Verdict.TIE_BREAK

    @pytest.mark.parametrize("form", ["top:2", "digest"])
    def test_a_tie_that_is_not_shown_is_none(self, form):
        golden = golden_side()
        run = run_side(golden, teacher_forced=True)
        run.one.tokens[2] = int(np.argsort(-golden.one.logits["exact"][2])[2])
        for s in golden.seqs:
            s.form = form
        report = judged(golden, run, atol=100, allow_partial=True, allow_loose=True)
        assert report.verdict is Verdict.DIVERGED

    def test_the_larger_k_is_cut_to_the_vocabulary(self):
        logits = logits_of(np.zeros((2, 3), np.float32), "top:20")
        assert (logits.form, logits.top_ids(0, 2).tolist()) == ("top3", [[0, 1, 2]] * 2)


class TestNoLogits:
    """Tokens alone: what a free run chose, but what a teacher-forced one was told."""

    @pytest.mark.parametrize("missing", ["golden", "run", "both"])
    def test_a_teacher_forced_run_shows_nothing_whatever_is_allowed(self, missing):
        for forced, verdict in ((False, Verdict.PASS), (True, Verdict.INCONCLUSIVE)):
            golden = golden_side()
            run = run_side(golden, teacher_forced=forced)
            for side in (golden, run):
                if missing in (side.evidence().kind, "both"):
                    for s in side.seqs:
                        s.logits.clear()
            report = judged(golden, run, atol=1e-3, allow_partial=True, allow_loose=True)
            assert (report.verdict, report.totals.tokens_equal) == (verdict, 12)

    def test_one_other_token_is_still_diverged(self):
        golden = golden_side()
        run = run_side(golden)
        for s in run.seqs:
            s.logits.clear()
        run.one.tokens[2] ^= 1
        assert judged(golden, run, allow_partial=True).verdict is Verdict.DIVERGED


def test_a_signalling_nan_is_seen_without_a_warning():
    values = np.zeros((2, 4), np.float32)
    values.view(np.uint32)[1, 2] = 0x7F800001
    assert logits_of(values, "top:1").top_ids(0, 2).tolist() == [[0], [2]]

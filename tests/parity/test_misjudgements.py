"""Where other comparison tools misjudged: each public report as a case that kdtr must get right.

The names say what went wrong elsewhere; what is asserted is the verdict here.
"""

import json

import numpy as np
import pytest
from parity_cases import golden_side, manifest, perturb, run_side

from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.json import report_json
from kdtr_cli.report.line import verdict_line
from kdtr_cli.report.text import report_text

pytestmark = pytest.mark.quick

#: As generous as a user can be without calling partial or loose evidence good.
GENEROUS = {"atol": 10.0, "rtol": 10.0, "allow_loose": True, "allow_partial": True, "on_tie": "pass"}


def pair(**kwargs):
    golden = golden_side(**kwargs)
    return golden, run_side(golden)


def report_of(golden, run, **options):
    return judge(golden.evidence(), run.evidence(), JudgeOptions(**options))


class TestNotANumber:
    def test_a_nan_output_passes_any_threshold(self):
        """tensara #87, flame/blis #279, athena #223: `difference > tolerance` is false for NaN."""
        golden, run = pair()
        for s in run.seqs:
            s.logits["engine"][:] = np.nan
        assert report_of(golden, run, **GENEROUS).verdict is Verdict.DIVERGED

    @pytest.mark.parametrize("with_run", [False, True])
    def test_a_nan_in_the_expected_output_is_a_wildcard(self, with_run):
        """gpu-mode/pygpubench PR #7; numpy assert_allclose, pytorch #72194, assertpy #155, IREE: NaN equals NaN."""
        golden, run = pair()
        golden.one.logits["exact"][1, 1] = np.nan
        if with_run:
            run.one.logits["engine"][1, 1] = np.nan
        assert report_of(golden, run, **GENEROUS).verdict is Verdict.INVALID

    @pytest.mark.parametrize("how_many", [1, 2])
    def test_a_single_bad_value_is_forgiven(self, how_many):
        """Liger-Kernel #259: NaN counted as equal, and more than one mismatch was needed."""
        golden, run = pair()
        run.one.logits["engine"].flat[:how_many] = np.nan
        assert report_of(golden, run, **GENEROUS).verdict is Verdict.DIVERGED
        run.one.logits["engine"].flat[:how_many] = 50
        assert report_of(golden, run, atol=1e-3).verdict is Verdict.DIVERGED

    def test_infinities_of_one_sign_are_equal(self):
        golden, run = pair()
        golden.one.logits["exact"][0, 0] = run.one.logits["engine"][0, 0] = -np.inf
        assert report_of(golden, run, **GENEROUS).verdict is Verdict.INVALID


class TestMissing:
    def test_a_missing_output_is_skipped(self):
        """Polygraphy compare: skipped with a warning."""
        golden, run = pair()
        del run.seqs[1]
        assert report_of(golden, run, **GENEROUS).verdict is Verdict.DIVERGED

    @pytest.mark.parametrize("name", ["S1", "s1 ", "s01", "s1.0"])
    def test_a_name_is_guessed(self, name):
        """Polygraphy compare: the closest name is taken."""
        golden, run = pair()
        run.seqs[1].id = name
        report = report_of(golden, run, **GENEROUS)
        assert (report.verdict, report.totals.missing, report.totals.extra) == (Verdict.DIVERGED, 1, 1)

    def test_what_only_the_baseline_has_is_ignored(self):
        """SGLang's comparator: tensors of one side only are allowed by default."""
        golden, run = pair(score=True)
        for s in run.seqs:
            s.prompt_logits.clear()
        assert report_of(golden, run, atol=1e-3).exit_code == 2
        golden, run = pair()
        run.seqs.append(run_side(golden_side(sequences=3)).seqs[2])
        assert report_of(golden, run, **GENEROUS).verdict is Verdict.DIVERGED

    @pytest.mark.parametrize("kept", range(6))
    def test_a_shorter_output_is_cut_to_fit(self, kept):
        """vLLM check_logprobs_close: zip truncates."""
        golden, run = pair()
        s = run.seqs[1]
        s.tokens, s.logits = s.tokens[:kept], {"engine": s.logits["engine"][:kept]}
        assert report_of(golden, run, **GENEROUS).verdict is Verdict.DIVERGED
        golden, run = pair()
        s = golden.seqs[1]
        s.tokens, s.logits = s.tokens[:kept], {k: v[:kept] for k, v in s.logits.items()}
        assert report_of(golden, run, **GENEROUS).verdict is Verdict.DIVERGED

    def test_nothing_after_the_first_mismatch_is_compared_and_nobody_says_so(self):
        """vLLM check_logprobs_close again."""
        golden, run = pair(sequences=1)
        run.one.tokens[1] ^= 1
        report = report_of(golden, run)
        assert (report.totals.rows_compared, report.totals.rows) == (2, 6)
        assert "2 of 6 rows of logits compared" in report_text(report)

    @pytest.mark.parametrize("step", range(6))
    @pytest.mark.parametrize("seq", range(2))
    def test_only_the_first_step_is_examined(self, step, seq):
        """PaDiff get_all_valid_path: a return inside the loop; llm.c PR #851: verified once, before the loop ended."""
        golden, run = pair()
        run.seqs[seq].logits["engine"][step, 20] += np.float32(0.1)
        report = report_of(golden, run, atol=1e-2)
        assert (report.verdict, report.totals.first_logit_failure) == (Verdict.DIVERGED, (seq, step))

    def test_both_sides_that_died_alike_agree(self):
        """d-inference PR #595: both ended without output, and that was a match."""
        assert report_of(*pair(steps=0), **GENEROUS).verdict is Verdict.INCONCLUSIVE
        golden, run = pair()
        golden.seqs.clear()
        run.seqs.clear()
        assert report_of(golden, run, **GENEROUS).verdict is Verdict.INCONCLUSIVE

    def test_another_failure_than_the_one_allowed_is_swallowed(self):
        """let-go PR #681: an allowance for one thing let another through."""
        golden, run = pair()
        run.one.tokens[2] ^= 1
        run.one.logits["engine"][2] = 0
        assert report_of(golden, run, atol=1e-3, on_tie="pass", allow_partial=True).verdict is Verdict.DIVERGED


class TestWrongMeasure:
    @pytest.mark.parametrize("form", ["full", "top:5"])
    def test_sorted_values_are_compared_without_their_ids(self, form):
        """SGLang check_close_model_outputs."""
        golden, run = pair()
        for s in (*golden.seqs, *run.seqs):
            s.form = form
        row = run.one.logits["engine"][3]
        rest = np.argsort(-row)[1:5]
        row[rest] = row[rest[::-1]]  # the same values in the same order of size, at other ids
        assert report_of(golden, run, atol=1e-3, allow_partial=True).verdict is Verdict.DIVERGED

    def test_a_top_ten_mismatch_is_printed_and_success_returned(self):
        """llama.cpp compare-logits.py: the exit code came from elsewhere."""
        golden, run = pair()
        run.one.logits["engine"][0, [1, 2]] = run.one.logits["engine"][0, [2, 1]]
        report = report_of(golden, run)
        assert report.exit_code == 1
        assert verdict_line(report).startswith("FAIL ")
        assert json.loads(report_json(report))["exit_code"] == 1

    def test_logits_are_rounded_before_they_are_compared(self):
        """ik_llama.cpp PR #325: a base of 16 bits gave negative KL; #2019: the sum covered what was printed."""
        golden, run = pair(vocab=5000, sequences=1, steps=2)
        run.one.logits["engine"][1, 4999] = np.nextafter(run.one.logits["engine"][1, 4999], np.float32(99))
        report = report_of(golden, run)
        assert report.verdict is Verdict.DIVERGED
        assert report.totals.max_kl >= 0
        assert report.totals.values_compared == 10_000

    @pytest.mark.parametrize("fill", [0.0, 1e-3])
    def test_zeros_pass_small_outputs(self, fill):
        """KernelBench #165, mlir-air #1427, triton #723: a tolerance of 1e-2 whatever the size of the values."""
        golden, run = pair()
        for g, r in zip(golden.seqs, run.seqs, strict=True):
            g.logits["exact"] *= np.float32(1e-3)
            r.logits["engine"][:] = fill
        assert report_of(golden, run, atol=2e-2).exit_code == 2

    def test_a_stale_buffer_gives_the_right_answer(self):
        """KernelBench PR #82: the memory still held the last result; here that of the step before."""
        golden, run = pair()
        for s in run.seqs:
            s.logits["engine"][1:] = s.logits["engine"][:-1].copy()
        assert report_of(golden, run, atol=1e-2).verdict is Verdict.DIVERGED

    def test_statistics_are_taken_in_the_type_of_the_run(self):
        """executorch #22018: errors of fp16 computed in fp16 overflow or vanish."""
        golden, run = pair(sequences=1)
        run.one.logits["engine"] = run.one.logits["engine"].astype(np.float16)
        run.one.logits["engine"][0, 0] = np.float16(-60000)
        golden.one.logits["exact"][0, 0] = 60000
        report = report_of(golden, run, atol=1)
        assert report.verdict is Verdict.DIVERGED
        assert report.totals.max_abs == 60000 + float(np.float16(60000))

    def test_the_reference_lacked_the_quantisation(self):
        """aiter #455: such a gate measures the format. Here the weights as used must be the same."""
        golden = golden_side()
        run = run_side(golden, tier="int4")
        run.manifest["model"]["weights_used_sha256"] = "f" * 64
        assert report_of(golden, run, **GENEROUS).verdict is Verdict.INVALID

    @pytest.mark.parametrize("width", [39, 41])
    def test_the_vocabulary_is_sliced_to_fit(self, width):
        """MaxText; NxDI strips pads."""
        golden, run = pair()
        for s in run.seqs:
            s.logits["engine"] = np.resize(s.logits["engine"], (6, width))
        run.vocab = None
        assert report_of(golden, run, **GENEROUS).verdict is Verdict.INVALID

    def test_one_bound_for_all_sizes(self):
        """atoma-infer #269, vllm-rbln #741: a gap that is one ULP at 32 is many at 0.01. ULPs scale."""
        golden, run = pair(sequences=1)
        golden.one.logits["exact"][:, 0] = 1000
        golden.one.tokens[:] = run.one.tokens[:] = 0
        run.one.logits["engine"] = golden.one.logits["exact"] * np.float32(1 + 2**-22)
        assert report_of(golden, run, max_ulp=8).verdict is Verdict.PASS
        run.one.logits["engine"][:, 1] = golden.one.logits["exact"][:, 1] + np.float32(1e-4)
        assert report_of(golden, run, max_ulp=8).verdict is Verdict.DIVERGED
        assert report_of(golden, run, atol=1e-3).verdict is Verdict.PASS

    def test_no_tolerance_at_all_for_a_rounded_tier(self):
        golden = golden_side()
        assert report_of(golden, run_side(golden, tier="bf16")).verdict is Verdict.INVALID


class TestReports:
    NAMES = ("a/b", "\u00e4\u4e2d", "x\ny", 'q"uo"te', "\x1b[31mred", " ", "%0A::error::", "-", "0:1 verdict=PASS")

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("size", [0.0, 1.0])
    def test_a_report_crashes_on_zero_differences_or_odd_names(self, name, size):
        """TensorRT #4507 and Polygraphy's changelog; a report may never change the verdict."""
        golden, run = pair()
        perturb(run, size)
        golden.one.id = run.one.id = name
        report = report_of(golden, run)
        assert report.verdict is (Verdict.DIVERGED if size else Verdict.IDENTICAL)
        text = report_text(report)
        assert text.isascii()
        assert "\x1b" not in text
        assert text.splitlines()[-1] == verdict_line(report)
        assert json.loads(report_json(report))["sequences"][0]["id"] == name

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_values_that_are_not_finite_break_the_json(self, bad):
        """heretic #346, sonar #183, mlx-omni-server #56."""
        golden, run = pair()
        run.one.logits["engine"][2, 2] = bad

        def refuse(constant):
            raise AssertionError(constant)

        document = json.loads(report_json(report_of(golden, run)), parse_constant=refuse)
        assert document["totals"]["max_abs"] in ("nan", "inf")
        assert document["verdict"] == "DIVERGED"

    def test_a_kl_of_impossible_tokens_is_no_nan(self):
        """heretic #346: 0 · log 0."""
        golden, run = pair(sequences=1)
        golden.one.logits["exact"][:, 5] = -1e5
        run.one.logits["engine"][:, 5] = -2e5
        assert report_of(golden, run, max_kl=1e-9, allow_loose=True).verdict is Verdict.PASS


def test_the_manifest_of_the_cases_is_one_that_bundles_accept():
    from kdtr_cli.bundle.manifest import check_manifest

    for kind in ("golden", "run"):
        check_manifest({**manifest(kind), "schema": "kdtr/1", "kind": kind, "sequences": [], "datasets": {}})

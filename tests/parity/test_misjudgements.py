"""Where other comparison tools misjudged: each public report as a case that kdtr must get right.

The names say what went wrong elsewhere; what is asserted is the verdict here. `ROWS` lists the reports, each with the
tests that show the right verdict; a test in this file names its reports in its docstring.
"""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
from parity_cases import golden_side, judged, make_tie, manifest, pair, perturb, run_side

from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.github import report_github
from kdtr_cli.report.json import report_json
from kdtr_cli.report.junit import report_junit
from kdtr_cli.report.line import verdict_line
from kdtr_cli.report.markdown import report_markdown
from kdtr_cli.report.short import report_short
from kdtr_cli.report.text import report_text

pytestmark = pytest.mark.quick

#: As generous as a user can be without calling partial or loose evidence good.
GENEROUS = {"atol": 10.0, "rtol": 10.0, "allow_loose": True, "allow_partial": True, "on_tie": "pass"}


#: Public report → the tests of its right verdict: here by name, elsewhere by file below tests/ and name.
ROWS = {
    "tensara #87": ("test_a_nan_output_passes_any_threshold", "test_infinities_of_one_sign_are_equal"),
    "flame/blis #279, athena #223": (
        "test_a_residual_that_is_nan_is_not_above_the_tolerance",
        "parity/test_tolerances.py::test_what_is_not_finite_never_passes",
    ),
    "gpu-mode/pygpubench PR #7": ("test_a_nan_in_the_expected_output_is_a_wildcard",),
    "Liger-Kernel #259": ("test_a_single_bad_value_is_forgiven",),
    "numpy #8145, pytorch #72194": ("test_a_nan_in_the_expected_output_is_a_wildcard",),
    "assertpy #155": ("test_a_nan_in_the_expected_output_is_a_wildcard",),
    "IREE": ("test_a_nan_in_the_expected_output_is_a_wildcard",),
    "TensorRT #4507, Polygraphy's changelog": (
        "test_a_report_crashes_on_zero_differences_or_odd_names",
        "test_a_format_changes_what_was_judged",
        "cli/test_cli_diff.py::test_no_format_changes_an_exit_code",
    ),
    "Polygraphy compare": ("test_a_missing_output_is_skipped", "test_a_name_is_guessed"),
    "vLLM check_logprobs_close": (
        "test_a_shorter_output_is_cut_to_fit",
        "test_nothing_after_the_first_mismatch_is_compared_and_nobody_says_so",
        "test_a_forced_run_too_ends_at_the_first_mismatch",
    ),
    "SGLang check_close_model_outputs": ("test_sorted_values_are_compared_without_their_ids",),
    "SGLang's comparator": ("test_what_only_the_baseline_has_is_ignored",),
    "llama.cpp compare-logits.py": (
        "test_a_top_ten_mismatch_is_printed_and_success_returned",
        "cli/test_cli_diff.py::test_one_for_a_run_that_differs",
        "parity/test_verdicts.py::test_only_agreement_exits_with_zero",
    ),
    "ik_llama.cpp PR #325, #2019": (
        "test_logits_are_rounded_before_they_are_compared",
        "test_partial_logits_are_not_called_so",
    ),
    "PaDiff get_all_valid_path": (
        "test_only_the_first_step_is_examined",
        "test_nobody_says_how_much_was_compared",
        "parity/test_judge.py::test_no_tokens",
        "parity/test_provenance.py::test_other_rows_than_tokens",
    ),
    "KernelBench #165, PR #82": (
        "test_zeros_pass_small_outputs",
        "test_a_stale_buffer_gives_the_right_answer",
        "engine/test_kernel_table.py::test_a_kernel_that_does_nothing_finds_no_old_answer",
        "engine/test_kernel_table.py::test_a_kernel_that_changes_its_input_is_seen",
        "engine/test_device_arrays.py::test_new_memory_is_nan_aligned_and_counted",
        "workflows/test_engine_run.py::test_an_engine_that_changes_its_inputs_changes_no_question",
        "testing/test_assert_parity.py::test_an_engine_that_changes_its_inputs_changes_no_question",
    ),
    "llm.c PR #851, #852": (
        "test_only_the_first_step_is_examined",
        "parity/test_judge_rounds.py::test_the_cache_at_the_end",
        "workflows/test_probe.py::test_a_bit_that_hangs_on_the_second_run",
    ),
    "mlir-air #1427, triton #723": (
        "test_zeros_pass_small_outputs",
        "test_an_output_that_knows_nothing_passes_a_large_bound",
        "test_no_tolerance_at_all_for_a_rounded_tier",
    ),
    "aiter #455, executorch #22018": (
        "test_the_reference_lacked_the_quantisation",
        "test_statistics_are_taken_in_the_type_of_the_run",
        "parity/test_parity_metrics.py::test_the_difference_of_float16_is_taken_in_float64",
        "parity/test_parity_metrics.py::test_is_taken_in_float64",
    ),
    "NxDI, MaxText": ("test_the_vocabulary_is_sliced_to_fit", "test_pads_are_stripped"),
    "let-go PR #681, d-inference PR #595": (
        "test_another_failure_than_the_one_allowed_is_swallowed",
        "test_an_allowance_lets_more_through_than_it_names",
        "test_both_sides_that_died_alike_agree",
        "workflows/test_engine_command.py::test_a_failure",
    ),
    "heretic #346, sonar #183, mlx-omni-server #56": (
        "test_values_that_are_not_finite_break_the_json",
        "test_a_kl_of_impossible_tokens_is_no_nan",
    ),
    "atoma-infer #269": ("test_one_bound_for_all_sizes",),
}


class TestNotANumber:
    def test_a_nan_output_passes_any_threshold(self):
        """tensara #87, flame/blis #279, athena #223: `difference > tolerance` is false for NaN."""
        golden, run = pair()
        for s in run.seqs:
            s.logits["engine"][:] = np.nan
        assert judged(golden, run, **GENEROUS).verdict is Verdict.DIVERGED

    @pytest.mark.parametrize("rule", [{}, {"atol": 1e9}, {"rtol": 1e9}, {"max_ulp": 2**62}, {"max_kl": 1e9}], ids=str)
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_residual_that_is_nan_is_not_above_the_tolerance(self, rule, bad):
        """flame/blis #279, athena #223: `resid > tol` is false for NaN, and so is `inf - inf > tol`."""
        golden, run = pair()
        run.one.logits["engine"][2, 7] = bad
        report = judged(golden, run, **rule, allow_loose=True, allow_partial=True, on_tie="pass")
        assert report.verdict is Verdict.DIVERGED
        assert report.totals.first_logit_failure == (0, 2)

    @pytest.mark.parametrize("with_run", [False, True])
    def test_a_nan_in_the_expected_output_is_a_wildcard(self, with_run):
        """gpu-mode/pygpubench PR #7; numpy #8145, pytorch #72194, assertpy #155, IREE: NaN equals NaN by default."""
        golden, run = pair()
        golden.one.logits["exact"][1, 1] = np.nan
        if with_run:
            run.one.logits["engine"][1, 1] = np.nan
        assert judged(golden, run, **GENEROUS).verdict is Verdict.INVALID

    @pytest.mark.parametrize("how_many", [1, 2])
    def test_a_single_bad_value_is_forgiven(self, how_many):
        """Liger-Kernel #259: NaN counted as equal, and more than one mismatch was needed."""
        golden, run = pair()
        run.one.logits["engine"].flat[:how_many] = np.nan
        assert judged(golden, run, **GENEROUS).verdict is Verdict.DIVERGED
        run.one.logits["engine"].flat[:how_many] = 50
        assert judged(golden, run, atol=1e-3).verdict is Verdict.DIVERGED

    def test_infinities_of_one_sign_are_equal(self):
        """tensara #87: what is not finite agrees with nothing; kdtr knows no declaration that would let it."""
        golden, run = pair()
        golden.one.logits["exact"][0, 0] = run.one.logits["engine"][0, 0] = -np.inf
        assert judged(golden, run, **GENEROUS).verdict is Verdict.INVALID


class TestMissing:
    def test_a_missing_output_is_skipped(self):
        """Polygraphy compare: skipped with a warning."""
        golden, run = pair()
        del run.seqs[1]
        assert judged(golden, run, **GENEROUS).verdict is Verdict.DIVERGED

    @pytest.mark.parametrize("name", ["S1", "s1 ", "s01", "s1.0"])
    def test_a_name_is_guessed(self, name):
        """Polygraphy compare: the closest name is taken."""
        golden, run = pair()
        run.seqs[1].id = name
        report = judged(golden, run, **GENEROUS)
        assert (report.verdict, report.totals.missing, report.totals.extra) == (Verdict.DIVERGED, 1, 1)

    def test_what_only_the_baseline_has_is_ignored(self):
        """SGLang's comparator: tensors of one side only are allowed by default."""
        golden, run = pair(score=True)
        for s in run.seqs:
            s.prompt_logits.clear()
        assert judged(golden, run, atol=1e-3).exit_code == 2
        golden, run = pair()
        run.seqs.append(run_side(golden_side(sequences=3)).seqs[2])
        assert judged(golden, run, **GENEROUS).verdict is Verdict.DIVERGED

    @pytest.mark.parametrize("kept", range(6))
    def test_a_shorter_output_is_cut_to_fit(self, kept):
        """vLLM check_logprobs_close: zip truncates."""
        golden, run = pair()
        s = run.seqs[1]
        s.tokens, s.logits = s.tokens[:kept], {"engine": s.logits["engine"][:kept]}
        assert judged(golden, run, **GENEROUS).verdict is Verdict.DIVERGED
        assert "tokens.shorter" in {f.code for f in judged(golden, run, **GENEROUS).findings}
        golden, run = pair()
        s = golden.seqs[1]
        s.tokens, s.logits = s.tokens[:kept], {k: v[:kept] for k, v in s.logits.items()}
        report = judged(golden, run, **GENEROUS)
        assert report.verdict is Verdict.DIVERGED
        assert "tokens.longer" in {f.code for f in report.findings}

    def test_nothing_after_the_first_mismatch_is_compared_and_nobody_says_so(self):
        """vLLM check_logprobs_close again."""
        golden, run = pair(sequences=1)
        run.one.tokens[1] ^= 1
        report = judged(golden, run)
        assert (report.totals.rows_compared, report.totals.rows) == (2, 6)
        assert "2 of 6 rows of logits compared" in report_text(report)

    def test_a_forced_run_too_ends_at_the_first_mismatch(self):
        """vLLM check_logprobs_close: with the golden's tokens fed, what follows can be compared, and is."""
        golden = golden_side(sequences=1)
        run = run_side(golden, teacher_forced=True)
        run.one.tokens[1] ^= 1
        run.one.logits["engine"][4, 3] += np.float32(0.5)
        report = judged(golden, run, atol=1e-3)
        assert (report.totals.rows_compared, report.totals.rows_out) == (6, 1)
        assert report.totals.tokens_equal == 5

    @pytest.mark.parametrize("how", ["no sequence", "no token", "no logits", "fewer rows", "fewer tokens"])
    def test_nobody_says_how_much_was_compared(self, how):
        """PaDiff get_all_valid_path: none, or fewer than declared, is no pass, and the counts are printed."""
        golden, run = pair(sequences=1)
        text = report_text(judged(golden, run))
        assert "1 of 1 sequences, 6 of 6 steps: 6 of 6 rows of logits compared, 6 of them identical" in text
        side = run.one
        match how:
            case "no sequence":
                run.seqs.clear()
            case "no token":
                side.tokens, side.logits = side.tokens[:0], {"engine": side.logits["engine"][:0]}
            case "no logits":
                side.logits = {}
            case "fewer rows":
                side.logits = {"engine": side.logits["engine"][:5]}
            case "fewer tokens":
                side.tokens, side.logits = side.tokens[:5], {"engine": side.logits["engine"][:5]}
        loose = {**GENEROUS, "allow_partial": False}
        report = judged(golden, run, **loose)
        assert report.exit_code != 0
        assert report.totals.rows_compared < 6 or report.verdict is Verdict.INVALID
        if how != "fewer rows":  # invalid evidence is not measured
            assert f"{report.totals.rows_compared} of 6 rows of logits compared" in report_text(report)

    @pytest.mark.parametrize("step", range(6))
    @pytest.mark.parametrize("seq", range(2))
    def test_only_the_first_step_is_examined(self, step, seq):
        """PaDiff get_all_valid_path: a return inside the loop; llm.c PR #851, #852: verified before the loop ended."""
        golden, run = pair()
        run.seqs[seq].logits["engine"][step, 20] += np.float32(0.1)
        report = judged(golden, run, atol=1e-2)
        assert (report.verdict, report.totals.first_logit_failure) == (Verdict.DIVERGED, (seq, step))

    def test_both_sides_that_died_alike_agree(self):
        """d-inference PR #595: both ended without output, and that was a match."""
        assert judged(*pair(steps=0), **GENEROUS).verdict is Verdict.INCONCLUSIVE
        golden, run = pair()
        golden.seqs.clear()
        run.seqs.clear()
        assert judged(golden, run, **GENEROUS).verdict is Verdict.INCONCLUSIVE

    def test_another_failure_than_the_one_allowed_is_swallowed(self):
        """let-go PR #681: an allowance for one thing let another through."""
        golden, run = pair()
        run.one.tokens[2] ^= 1
        run.one.logits["engine"][2] = 0
        assert judged(golden, run, atol=1e-3, on_tie="pass", allow_partial=True).verdict is Verdict.DIVERGED

    @pytest.mark.parametrize("fault", ["tie", "partial", "loose", "token", "value", "missing", "longer"])
    @pytest.mark.parametrize("allowed", [(), ("tie",), ("partial",), ("loose",), ("tie", "partial", "loose")], ids=str)
    def test_an_allowance_lets_more_through_than_it_names(self, fault, allowed):
        """let-go PR #681: each allowance lets its own finding through, and no other, whatever stands beside it."""
        golden, run = pair()
        bound = {"atol": 1e-3}
        s = run.seqs[1]
        match fault:
            case "tie":  # at the last step: there is no later one to compare
                make_tie(golden, run, 5, gap=5e-4)
            case "partial":
                s.form = "top:4"
                perturb(run, 1e-5)
            case "loose":
                bound = {"atol": 1e3}
                perturb(run, 1e-5)
            case "token":
                s.tokens[3] ^= 1
            case "value":
                s.logits["engine"][0, 0] += np.float32(0.1)
            case "missing":
                del run.seqs[1]
            case "longer":
                s.tokens = np.append(s.tokens, s.tokens[:1])
                s.logits = {"engine": np.vstack([s.logits["engine"], s.logits["engine"][:1]])}
        said = {"tie": {"on_tie": "pass"}, "partial": {"allow_partial": True}, "loose": {"allow_loose": True}}
        options = {k: v for name in allowed for k, v in said[name].items()}
        report = judged(golden, run, **bound, **options)
        assert (report.exit_code == 0) == (fault in allowed)


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
        assert judged(golden, run, atol=1e-3, allow_partial=True).verdict is Verdict.DIVERGED

    def test_a_top_ten_mismatch_is_printed_and_success_returned(self):
        """llama.cpp compare-logits.py: the exit code came from elsewhere."""
        golden, run = pair()
        run.one.logits["engine"][0, [1, 2]] = run.one.logits["engine"][0, [2, 1]]
        report = judged(golden, run)
        assert report.exit_code == 1
        assert verdict_line(report).startswith("FAIL ")
        assert json.loads(report_json(report))["exit_code"] == 1

    def test_logits_are_rounded_before_they_are_compared(self):
        """ik_llama.cpp PR #325: a base of 16 bits gave negative KL; #2019: the sum covered what was printed."""
        golden, run = pair(vocab=5000, sequences=1, steps=2)
        run.one.logits["engine"][1, 4999] = np.nextafter(run.one.logits["engine"][1, 4999], np.float32(99))
        report = judged(golden, run)
        assert report.verdict is Verdict.DIVERGED
        assert report.totals.max_kl >= 0
        assert report.totals.values_compared == 10_000

    def test_partial_logits_are_not_called_so(self):
        """ik_llama.cpp PR #325, #2019: the sum of a slice stood for the whole. The line says what it saw."""
        golden, run = pair()
        for s in run.seqs:
            s.form = "top:7"
        perturb(run, 1e-6)
        report = judged(golden, run, atol=1e-3)
        assert report.verdict is Verdict.INCONCLUSIVE
        report = judged(golden, run, atol=1e-3, allow_partial=True)
        assert report.verdict is Verdict.PASS
        assert " logits=top7 " in verdict_line(report)
        assert report.totals.values_compared < 2 * 6 * 40

    @pytest.mark.parametrize("trivial", ["zeros", "shuffled", "previous", "constant"])
    @pytest.mark.parametrize("bound", [{"atol": 20.0}, {"rtol": 40.0, "atol": 20.0}, {"max_kl": 50.0}], ids=str)
    def test_an_output_that_knows_nothing_passes_a_large_bound(self, trivial, bound):
        """mlir-air #1427, triton #723: a bound is asked whether it would pass what can't be right."""
        golden, run = pair()
        for s in run.seqs:
            x = s.logits["engine"]
            s.logits["engine"] = {
                "zeros": np.zeros_like(x),
                "shuffled": np.random.default_rng(0).permuted(x, axis=1),
                "previous": np.vstack([x[:1], x[:-1]]),
                "constant": np.full_like(x, 1.0),
            }[trivial]
        report = judged(golden, run, **bound)
        assert report.verdict in (Verdict.INCONCLUSIVE, Verdict.DIVERGED)
        assert "tolerance.too_loose" in {f.code for f in report.findings}

    @pytest.mark.parametrize("fill", [0.0, 1e-3])
    def test_zeros_pass_small_outputs(self, fill):
        """KernelBench #165, mlir-air #1427, triton #723: a tolerance of 1e-2 whatever the size of the values."""
        golden, run = pair()
        for g, r in zip(golden.seqs, run.seqs, strict=True):
            g.logits["exact"] *= np.float32(1e-3)
            r.logits["engine"][:] = fill
        assert judged(golden, run, atol=2e-2).exit_code == 2

    def test_a_stale_buffer_gives_the_right_answer(self):
        """KernelBench PR #82: the memory still held the last result; here that of the step before."""
        golden, run = pair()
        for s in run.seqs:
            s.logits["engine"][1:] = s.logits["engine"][:-1].copy()
        assert judged(golden, run, atol=1e-2).verdict is Verdict.DIVERGED

    def test_statistics_are_taken_in_the_type_of_the_run(self):
        """executorch #22018: errors of fp16 computed in fp16 overflow or vanish."""
        golden, run = pair(sequences=1)
        run.one.logits["engine"] = run.one.logits["engine"].astype(np.float16)
        run.one.logits["engine"][0, 0] = np.float16(-60000)
        golden.one.logits["exact"][0, 0] = 60000
        report = judged(golden, run, atol=1)
        assert report.verdict is Verdict.DIVERGED
        assert report.totals.max_abs == 60000 + float(np.float16(60000))

    def test_the_reference_lacked_the_quantisation(self):
        """aiter #455: such a gate measures the format. Here the weights as used must be the same."""
        golden = golden_side()
        run = run_side(golden, tier="int4")
        run.manifest["model"]["weights_used_sha256"] = "f" * 64
        assert judged(golden, run, **GENEROUS).verdict is Verdict.INVALID

    @pytest.mark.parametrize("width", [39, 41])
    def test_the_vocabulary_is_sliced_to_fit(self, width):
        """NxDI, MaxText: no option says how much of a row counts; another width is told with both."""
        golden, run = pair()
        for s in run.seqs:
            s.logits["engine"] = np.resize(s.logits["engine"], (6, width))
        run.vocab = None
        report = judged(golden, run, **GENEROUS)
        assert report.verdict is Verdict.INVALID
        assert f"{width} values a row, not 40" in verdict_line(report)

    @pytest.mark.parametrize("side", ["golden", "run"])
    @pytest.mark.parametrize("pad", [0, 2])
    def test_pads_are_stripped(self, side, pad):
        """NxDI: pads at the end of an output, or before a prompt, are tokens like any other."""
        golden, run = pair()
        s = (golden if side == "golden" else run).seqs[1]
        s.tokens = np.append(s.tokens, [pad, pad]).astype(np.int32)
        s.logits = {k: np.vstack([v, v[-2:]]) for k, v in s.logits.items()}
        assert judged(golden, run, **GENEROUS).verdict is Verdict.DIVERGED
        golden, run = pair()
        s = (golden if side == "golden" else run).seqs[1]
        s.prompt = np.append([pad], s.prompt).astype(np.int32)
        assert judged(golden, run, **GENEROUS).verdict is Verdict.INVALID

    def test_one_bound_for_all_sizes(self):
        """atoma-infer #269, vllm-rbln #741: a gap that is one ULP at 32 is many at 0.01. ULPs scale."""
        golden, run = pair(sequences=1)
        golden.one.logits["exact"][:, 0] = 1000
        golden.one.tokens[:] = run.one.tokens[:] = 0
        run.one.logits["engine"] = golden.one.logits["exact"] * np.float32(1 + 2**-22)
        assert judged(golden, run, max_ulp=8).verdict is Verdict.PASS
        run.one.logits["engine"][:, 1] = golden.one.logits["exact"][:, 1] + np.float32(1e-4)
        assert judged(golden, run, max_ulp=8).verdict is Verdict.DIVERGED
        assert judged(golden, run, atol=1e-3).verdict is Verdict.PASS

    def test_no_tolerance_at_all_for_a_rounded_tier(self):
        """triton #723: no bound is guessed from a type; whoever judges a rounded tier says one."""
        golden = golden_side()
        assert judged(golden, run_side(golden, tier="bf16")).verdict is Verdict.INVALID


class TestReports:
    NAMES = ("a/b", "\u00e4\u4e2d", "x\ny", 'q"uo"te', "\x1b[31mred", " ", "%0A::error::", "-", "0:1 verdict=PASS")

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("size", [0.0, 1.0])
    def test_a_report_crashes_on_zero_differences_or_odd_names(self, name, size):
        """TensorRT #4507, Polygraphy's changelog; a report may never change the verdict."""
        golden, run = pair()
        perturb(run, size)
        golden.one.id = run.one.id = name
        report = judged(golden, run)
        assert report.verdict is (Verdict.DIVERGED if size else Verdict.IDENTICAL)
        text = report_text(report)
        assert text.isascii()
        assert "\x1b" not in text
        assert text.splitlines()[-1] == verdict_line(report)
        assert json.loads(report_json(report))["sequences"][0]["id"] == name

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("size", [0.0, 1e-6, 1.0])
    def test_a_format_changes_what_was_judged(self, name, size):
        """TensorRT #4507, Polygraphy's changelog: every format of one report, and the report is as it was."""
        golden, run = pair(score=True)
        perturb(run, size)
        golden.one.id = run.one.id = name
        report = judged(golden, run, atol=1e-3)
        line = verdict_line(report)
        for render in (report_text, report_json, report_junit, report_github, report_short):
            assert line.rpartition(" verdict=")[2] in render(report)
        assert report.verdict.value in report_markdown(report, 1 << 20)
        assert verdict_line(report) == line
        assert report.exit_code == (1 if size == 1.0 else 0)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_values_that_are_not_finite_break_the_json(self, bad):
        """heretic #346, sonar #183, mlx-omni-server #56."""
        golden, run = pair()
        run.one.logits["engine"][2, 2] = bad

        def refuse(constant):
            raise AssertionError(constant)

        document = json.loads(report_json(judged(golden, run)), parse_constant=refuse)
        assert document["totals"]["max_abs"] in ("nan", "inf")
        assert document["verdict"] == "DIVERGED"

    def test_a_kl_of_impossible_tokens_is_no_nan(self):
        """heretic #346, sonar #183: 0 · log 0."""
        golden, run = pair(sequences=1)
        golden.one.logits["exact"][:, 5] = -1e5
        run.one.logits["engine"][:, 5] = -2e5
        assert judged(golden, run, max_kl=1e-9, allow_loose=True).verdict is Verdict.PASS


def test_the_manifest_of_the_cases_is_one_that_bundles_accept():
    from kdtr_cli.bundle.manifest import check_manifest

    for kind in ("golden", "run"):
        check_manifest({**manifest(kind), "schema": "kdtr/1", "kind": kind, "sequences": [], "datasets": {}})


class TestRows:
    """Every row has its tests, and every test its rows: nothing is left out by mistake."""

    TESTS = Path(__file__).parents[1]

    def test_there_are_23(self):
        assert len(ROWS) == 23
        assert all(ROWS.values())

    @pytest.mark.parametrize("row", ROWS)
    def test_the_tests_are_there_and_say_what_they_are_for(self, row):
        for test in ROWS[row]:
            path, _, name = test.rpartition("::")
            file = self.TESTS / path if path else Path(__file__)
            found = [
                node
                for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
                if isinstance(node, ast.FunctionDef) and node.name == name
            ]
            assert found, f"{test} is not there"
            if not path:
                said = ast.get_docstring(found[0]) or ""
                names = row.split(", ")
                assert any(part.removesuffix("'s changelog") in said for part in names), f"{name} does not name {row}"

    def test_every_test_here_belongs_to_a_row(self):
        listed = {test for tests in ROWS.values() for test in tests}
        tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name != "TestRows"]
        tests = {
            f.name for c in classes for f in c.body if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")
        }
        assert tests <= listed

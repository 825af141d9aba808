"""The verdict line: the exact format that CI jobs grep for."""

import re

import numpy as np
import pytest
from parity_cases import golden_side, make_tie, perturb, run_side
from report_cases import REPORTS
from rounds_cases import round_pair, rounds_of

from kdtr_cli.parity.combine import Combined
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.report.line import safe, verdict_line

pytestmark = pytest.mark.quick

FORM = re.compile(
    r"(PASS|FAIL|ERROR) \S+ tokens=\d+/\d+(?P<exact> exact)?(?P<first> first_divergence=\d+:\d+)?"
    r"(?P<margin> margin=\S+)? max_abs_logit_diff=(?P<max>\S+)( [a-z_]+=[\w./:-]+)*"
    r" verdict=(?P<verdict>[A-Z_]+)"
    r'( reason="(?P<reason>([^"\\]|\\.)*)")?'
)


def pair(**kwargs):
    golden = golden_side(**{"sequences": 1, "steps": 24, **kwargs})
    return golden, run_side(golden)


def line(golden, run, **options):
    found = verdict_line(judge(golden.evidence(), run.evidence(), JudgeOptions(**options)))
    assert FORM.fullmatch(found), found
    return found


def test_the_line_of_the_design_for_a_run_that_agrees():
    assert line(*pair()) == "PASS ar tokens=24/24 exact max_abs_logit_diff=0.000e+00 verdict=IDENTICAL"


def test_the_line_of_the_design_for_a_run_that_differs():
    golden, run = pair()
    row = golden.one.logits["exact"][17]
    first, second = np.argsort(-row)[:2]
    row[second] = row[first] - np.float32(0.3125)
    run.one.logits["engine"][17] = row
    run.one.logits["engine"][17, second] = row[first] + np.float32(0.25)
    run.one.tokens[17] = second
    shown = line(golden, run)
    assert shown.startswith("FAIL ar tokens=17/24 first_divergence=0:17 margin=3.1e-01 max_abs_logit_diff=5.625e-01 ")
    assert shown.endswith(" verdict=DIVERGED")
    assert " exact " not in shown


def test_several_sequences_are_summed_and_the_index_is_the_golden_s():
    golden, run = pair(sequences=3)
    run.seqs[2].tokens[4] ^= 1
    assert line(golden, run).startswith("FAIL ar tokens=52/72 first_divergence=2:4 margin=")


@pytest.mark.parametrize("mode", ["ar", "ddtree", "chain"])
def test_the_mode_is_the_run_s(mode):
    golden, run = pair()
    run.manifest["decoding"]["mode"] = mode
    rounds = "" if mode == "ar" else "rounds=not-compared "
    assert line(golden, run) == f"PASS {mode} tokens=24/24 exact max_abs_logit_diff=0.000e+00 {rounds}verdict=IDENTICAL"


def test_exact_stands_where_all_tokens_are_equal_though_logits_differ():
    golden, run = pair()
    run.one.logits["engine"][3, 3] += np.float32(0.5)
    assert line(golden, run).startswith(
        "FAIL ar tokens=24/24 exact max_abs_logit_diff=5.000e-01 first_logit_failure=0:3 verdict=DIVERGED"
    )


def test_pass_shows_the_largest_difference():
    golden, run = pair()
    perturb(run, 1e-3)
    assert re.fullmatch(
        r"PASS ar tokens=24/24 exact max_abs_logit_diff=\d\.\d{3}e-04 verdict=PASS", line(golden, run, atol=2e-3)
    )


@pytest.mark.parametrize(("bad", "shown"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "inf")])
def test_a_difference_that_is_not_finite_is_a_word(bad, shown):
    golden, run = pair()
    run.one.logits["engine"][5, 5] = bad
    assert f" max_abs_logit_diff={shown} " in line(golden, run)


class TestErrors:
    def test_invalid_has_a_reason_and_no_numbers(self):
        golden, run = pair()
        run.manifest["decoding"]["stop_ids"] = [3]
        assert line(golden, run) == (
            "ERROR ar tokens=0/24 max_abs_logit_diff=none verdict=INVALID "
            'reason="other stop ids: golden [2, 5], run [3] (decoding.stop_ids)"'
        )

    def test_inconclusive_has_one_too(self):
        golden, run = pair()
        run.one.logits.clear()
        found = line(golden, run)
        assert found.startswith("ERROR ar tokens=24/24 exact max_abs_logit_diff=none logits=none verdict=INCONCLUSIVE ")
        assert 'reason="sequence ' in found

    def test_pass_and_fail_have_none(self):
        golden, run = pair()
        assert "reason" not in line(golden, run)
        run.one.tokens[0] ^= 1
        assert "reason" not in line(golden, run)

    def test_the_reason_is_quoted_and_on_one_line(self):
        golden, run = pair(sequences=2)
        for s in (*golden.seqs, *run.seqs):
            s.id = 'a"b\\\n\x1b\u00e9'
        found = line(golden, run)
        assert "\n" not in found
        assert found.isascii()
        assert FORM.fullmatch(found)["reason"]


class TestFurtherPairs:
    def test_partial_logits(self):
        golden, run = pair()
        for s in golden.seqs:
            s.form = "top:20"
        assert " logits=top20 verdict=IDENTICAL" in line(golden, run)
        for s in golden.seqs:
            s.form = "digest"
        assert " logits=digest verdict=IDENTICAL" in line(golden, run)

    def test_the_reference_where_it_is_not_exact(self):
        golden, run = pair()
        del golden.one.logits["exact"]
        assert " reference=float64 verdict=PASS" in line(golden, run, atol=1e-3)
        golden, run = pair()
        run.manifest["tier"] = "bf16"
        assert " reference=float64 verdict=PASS" in line(golden, run, atol=1e-3)

    def test_unverified_weights(self):
        golden, run = pair()
        run.manifest["model"]["weights_used_sha256"] = None
        run.manifest["model"]["rope_table_sha256"] = None
        assert " weights=unverified rope=unverified verdict=IDENTICAL" in line(golden, run)

    def test_parts_are_n_of_m(self):
        golden, run = pair(sequences=3)
        assert " steps=12/72 verdict=IDENTICAL" in line(golden, run, steps=4)
        assert " tokens=24/24 exact max_abs_logit_diff=0.000e+00 sequences=1/3 verdict=" in line(
            golden, run, select=("s1",)
        )
        assert " steps=8/48 sequences=2/3 verdict=" in line(golden, run, steps=4, select=("s1", "s0"))

    def test_missing_and_extra(self):
        golden, run = pair(sequences=2)
        del run.seqs[1]
        assert line(golden, run).startswith("FAIL ar tokens=24/48 first_divergence=1:0 margin=")
        assert " missing=1 verdict=DIVERGED" in line(golden, run)
        golden, run = pair(sequences=2)
        del golden.seqs[1]
        assert " tokens=24/24 max_abs_logit_diff=0.000e+00 extra=1 verdict=DIVERGED" in line(golden, run)

    def test_prompt_logits_that_were_not_compared(self):
        golden, run = pair(score=True)
        for s in run.seqs:
            s.prompt_logits.clear()
        assert " prompt_logits=not-compared verdict=PASS" in line(golden, run, allow_partial=True)

    @pytest.mark.parametrize(("on_tie", "word"), [("fail", "FAIL"), ("warn", "PASS"), ("pass", "PASS")])
    def test_a_tie_break(self, on_tie, word):
        golden = golden_side(sequences=1, steps=24)
        run = run_side(golden, teacher_forced=True)
        make_tie(golden, run, 5)
        assert line(golden, run, atol=2e-3, on_tie=on_tie) == (
            f"{word} ar tokens=23/24 first_divergence=0:5 margin=1.0e-03 max_abs_logit_diff=1.000e-03 "
            "teacher_forced=yes verdict=TIE_BREAK"
        )

    def test_a_longer_run_has_no_margin(self):
        golden, run = pair()
        golden.one.tokens = golden.one.tokens[:20]
        golden.one.logits = {k: v[:20] for k, v in golden.one.logits.items()}
        assert line(golden, run) == (
            "FAIL ar tokens=20/20 first_divergence=0:20 max_abs_logit_diff=0.000e+00 verdict=DIVERGED"
        )


class TestRounds:
    """Where both sides drafted alike: how many rounds agree, and the first that does not."""

    def test_all_equal(self):
        golden, run = round_pair(sequences=1, steps=24)
        count = len(golden.one.rounds["rounds/start"])
        assert line(golden, run) == (
            f"PASS ddtree tokens=24/24 exact max_abs_logit_diff=0.000e+00 rounds={count}/{count} verdict=IDENTICAL"
        )

    def test_the_first_that_differs_by_sequence_and_round(self):
        golden, run = round_pair(sequences=3, steps=24)
        counts = [len(s.rounds["rounds/start"]) for s in golden.seqs]
        rounds_of(run, 1)["bonus"][2] ^= 1
        rounds_of(run, 2)["bonus"][1] ^= 1
        assert line(golden, run) == (
            "FAIL ddtree tokens=72/72 exact max_abs_logit_diff=0.000e+00 "
            f"rounds={counts[0] + 2 + 1}/{sum(counts)} first_round_difference=1:2 verdict=DIVERGED"
        )

    def test_the_pairs_stand_between_the_logits_and_the_digests(self):
        golden, run = round_pair(sequences=2, steps=24, score=True)
        rounds_of(run)["bonus"][0] ^= 1
        run.manifest["model"]["weights_used_sha256"] = None
        for s in run.seqs:
            s.prompt_logits = {}
        assert re.search(
            r" prompt_logits=not-compared rounds=\d+/\d+ first_round_difference=0:0 weights=unverified"
            r" sequences=1/2 verdict=DIVERGED$",
            line(golden, run, select=("s0",)),
        )

    def test_other_drafting_is_not_compared(self):
        golden, run = round_pair(sequences=1, steps=24)
        run.manifest["drafting"]["drafter"] = "ngram"
        assert line(golden, run) == (
            "PASS ddtree tokens=24/24 exact max_abs_logit_diff=0.000e+00 rounds=not-compared verdict=IDENTICAL"
        )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\t c", "a b c"),
        ("\x1b[0m", "\\x1b[0m"),
        ("\u00e9\u4e2d", "\\xe9\\u4e2d"),
        ("\x7f", "\\x7f"),
        ("##[error]", "#\\x23[error]"),
    ],
)
def test_safe_text_is_one_line_of_ascii(text, shown):
    assert safe(text) == shown


def test_the_first_tensor_stands_last_of_the_pairs():
    found = verdict_line(REPORTS["trace parts"]())
    assert FORM.fullmatch(found)
    assert found.endswith(" first_tensor=0:0:model.layers.1.self_attn.q_latent verdict=DIVERGED")
    assert "first_tensor" not in verdict_line(REPORTS["traced"]())
    # in a sweep the place counts on
    combined = Combined()
    for report, first in ((REPORTS["traced"](), 0), (REPORTS["trace parts"](), 1)):
        combined.add(report, first)
    assert " first_tensor=1:0:model.layers.1.self_attn.q_latent " in verdict_line(combined.report("g", "r"))


def test_a_tolerance_that_would_let_anything_pass_is_said():
    golden, run = pair()
    perturb(run, 1e-3)
    assert " tolerance=loose verdict=PASS" in line(golden, run, atol=1e9, allow_loose=True)
    assert "loose" not in line(golden, run, atol=1e-2, allow_loose=True)  # allowed, and not made use of
    refused = line(golden, run, atol=1e9)
    assert "tolerance=loose" not in refused
    assert "verdict=INCONCLUSIVE" in refused

"""The report for people."""

import re

import numpy as np
import pytest
from parity_cases import golden_side, make_tie, perturb, run_side
from report_cases import REPORTS
from rounds_cases import round_pair, rounds_of
from trace_cases import noise, traced_pair

from kdtr_cli.parity.evidence import RoundProblem
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.report.line import verdict_line
from kdtr_cli.report.text import MAX_SEQUENCES, report_text

pytestmark = pytest.mark.quick


def pair(**kwargs):
    golden = golden_side(**{"sequences": 1, "steps": 24, **kwargs})
    return golden, run_side(golden)


def text_of(golden, run, width=100, **options):
    report = judge(golden.evidence(), run.evidence(), JudgeOptions(**options))
    text = report_text(report, width)
    assert text.endswith("\n")
    assert text.splitlines()[-1] == verdict_line(report)
    assert text.isascii()
    return text


def token_rows(text, label):
    """The numbers of all lines with that label, in order."""
    words = [line.split() for line in text.splitlines()]
    return [w[1:] for w in words if w and w[0] == label and len(w) > 1 and all(x.isdigit() or x == "-" for x in w[1:])]


def shown(text, label):
    return [x for row in token_rows(text, label) for x in row]


class TestTolerance:
    def line(self, **options):
        golden, run = pair(steps=6)
        run.one.logits["engine"] += np.float32(0.25)
        text = text_of(golden, run, **options)
        return next((line for line in text.splitlines() if line.startswith("used ")), None)

    def test_how_much_of_it_was_used_is_always_said(self):
        assert self.line() is None
        assert self.line(atol=0) is None
        assert self.line(atol=1) == "used    25 % of atol"
        assert self.line(atol=0.125) == "used    200 % of atol"
        assert re.fullmatch(r"used    [0-9.e+]+ % of rtol", self.line(rtol=0.5))
        assert re.fullmatch(r"used    [0-9.]+ % of atol \+ rtol \* \|golden\|", self.line(atol=1, rtol=0.5))
        assert re.fullmatch(
            r"used    25 % of atol, \S+ % of max_ulp, \S+ % of max_kl", self.line(atol=1, max_ulp=10**8, max_kl=1)
        )

    def test_of_what_is_not_finite_more_than_all(self):
        golden, run = pair(steps=6)
        run.one.logits["engine"][0, 0] = np.nan
        assert "used    more than all of atol" in text_of(golden, run, atol=1)

    def test_a_suggestion_stands_before_the_findings_and_names_what_is_too_loose(self):
        golden, run = pair(steps=6)
        perturb(run, 4.0)
        lines = text_of(golden, run, atol=1e-3, suggest=True).splitlines()
        first = lines.index("suggest the tightest that passes, each line by itself:")
        assert re.fullmatch(r" {10}--atol [0-9.e-]+", lines[first + 1])
        assert any(line.endswith("zeros would pass too)") for line in lines[first:])
        assert lines[first - 1] == ""
        assert any(line.startswith("error ") for line in lines[first:])


class TestTokens:
    @pytest.mark.parametrize("width", [20, 40, 79, 100, 300])
    @pytest.mark.parametrize("steps", [1, 5, 24, 96])
    def test_both_lists_stand_one_above_the_other(self, width, steps):
        golden, run = pair(steps=steps, vocab=512)
        run.one.tokens[steps // 2] ^= 1
        text = text_of(golden, run, width)
        assert shown(text, "golden") == [str(t) for t in golden.one.tokens]
        assert shown(text, "run") == [str(t) for t in run.one.tokens]
        assert shown(text, "step") == [str(i) for i in range(steps)]
        lines = text.splitlines()
        for i, line in enumerate(lines):
            if line.strip().startswith("step "):
                assert len(lines[i]) == len(lines[i + 1]) == len(lines[i + 2]) <= max(width, 16)
                ends = [[m.end() for m in re.finditer(r"\d+", row)] for row in lines[i : i + 3]]
                assert ends[0] == ends[1] == ends[2]

    @pytest.mark.parametrize("step", [0, 7, 23])
    def test_the_first_difference_is_marked(self, step):
        golden, run = pair()
        run.one.tokens[step] = 38 if golden.one.tokens[step] == 39 else 39
        lines = text_of(golden, run).splitlines()
        at = next(i for i, line in enumerate(lines) if line.strip().startswith("^"))
        assert sum("^" in line for line in lines) == 1
        ends = [m.end() for m in re.finditer(r"\d+", lines[at - 1])]
        assert len(lines[at]) == ends[step]

    def test_a_teacher_forced_run_has_every_difference_marked(self):
        golden, run = pair()
        run.manifest["decoding"]["teacher_forced"] = True
        for step in (3, 9):
            run.one.tokens[step] ^= 1
        (marks,) = [line for line in text_of(golden, run).splitlines() if line.strip().startswith("^")]
        assert len(marks.split()) == 2

    def test_where_one_side_ended_there_is_a_dash(self):
        golden, run = pair()
        run.one.tokens, run.one.logits = run.one.tokens[:20], {"engine": run.one.logits["engine"][:20]}
        assert shown(text_of(golden, run), "run")[20:24] == ["-"] * 4
        assert "the run is shorter: 20 tokens, the golden has 24 (kdtr diff --steps 20" in text_of(golden, run)

    def test_a_missing_sequence_is_shown(self):
        golden, run = pair(sequences=2)
        del run.seqs[0]
        text = text_of(golden, run)
        assert "the run lacks it" in text
        assert shown(text, "run")[:24] == ["-"] * 24

    def test_long_lists_are_cut_and_say_what_was_left_out(self):
        golden, run = pair(steps=2000, vocab=10)
        text = text_of(golden, run)
        assert "steps 24 to 1991 left out: all equal" in text
        assert len(shown(text, "golden")) == 32
        run.manifest["decoding"]["teacher_forced"] = True
        for step in (1000, 1500, 1501):
            run.one.tokens[step] = (run.one.tokens[step] + 1) % 10
        text = text_of(golden, run)
        assert "steps 24 to 987 left out: all equal" in text
        assert "steps 1012 to 1991 left out: 2 differ" in text
        assert "1000" in shown(text, "step")
        assert len(text.splitlines()) < 60


class TestContent:
    def test_the_header_says_what_was_compared_by_which_rule(self):
        text = text_of(*pair())
        assert "golden  golden.h5, tier exact, exact + float64" in text
        assert "run     run.h5, ar, tier exact, engine, device cpu, batch 1" in text
        assert "atol 0 (default of tier exact) and rtol 0 (default of tier exact)" in text
        assert "against the golden's exact logits" in text
        assert "1 of 1 sequences, 24 of 24 steps: 24 of 24 rows of logits compared, 24 of them identical" in text

    def test_the_verdict_and_what_it_means_come_first(self):
        golden, run = pair()
        assert text_of(golden, run).startswith(
            "verdict IDENTICAL: All tokens and all bits of all logits are the same.\n"
        )
        run.one.logits.clear()
        assert text_of(golden, run).startswith("verdict INCONCLUSIVE: sequence 's0': there are no logits to compare")

    def test_a_table_of_the_sequences(self):
        golden, run = pair(sequences=3)
        run.seqs[1].tokens[5] ^= 1
        del run.seqs[2]
        lines = text_of(golden, run).splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("#  sequence"))
        rows = [line.split() for line in lines[at : at + 4]]
        assert rows[0] == [
            "#",
            "sequence",
            "verdict",
            "tokens",
            "first",
            "margin",
            "max",
            "abs",
            "max",
            "ULP",
            "max",
            "KL",
        ]
        assert rows[1] == ["0", "s0", "IDENTICAL", "24/24", "-", "-", "0.000e+00", "0", "0.000e+00"]
        assert rows[2][:5] == ["1", "s1", "DIVERGED", "5/24", "5"]
        assert rows[3][:5] == ["2", "s2", "DIVERGED", "0/24", "missing"]
        assert lines[at + 4] == "marks   = same bits  X another token  - not compared"

    def test_texts_of_tokens_can_not_break_a_line(self):
        golden, run = pair()
        run.one.tokens[5] ^= 1
        report = judge(golden.evidence(), run.evidence())
        plain = report_text(report)
        for hostile in ("\x1b[2J", "\n\nPASS", "\u202e", "[red]", "\r", "##[error]", "x" * 5000, ""):
            text = report_text(report, text_of=lambda token, hostile=hostile: hostile)
            assert text.isascii()
            assert all(c.isprintable() for c in text.replace("\n", ""))
            assert len(text.splitlines()) == len(plain.splitlines()) + 2  # the passages of both sides
            assert max(map(len, text.splitlines())) < 200
            assert "##[" not in text
        assert report_text(report, text_of=lambda token: None).splitlines()[-1] == plain.splitlines()[-1]

    def test_every_rule_and_its_origin_is_shown(self):
        golden, run = pair()
        text = text_of(golden, run, rtol=0.5, max_ulp=3, max_kl=0.25, allow_loose=True, steps=3, on_tie="warn")
        assert "atol 0 (0 beside --rtol) and rtol 0.5 (--rtol)" in text
        assert "at most 3 ULP (--max-ulp)" in text
        assert "KL at most 0.25 (--max-kl)" in text
        assert "options on_tie warn (--on-tie), allow_loose True (--allow-loose), steps 3 (--steps)" in text

    def test_the_first_divergence_in_detail(self):
        golden, run = pair()
        golden.one.ties = (5,)
        token = make_tie(golden, run, 5)
        text = text_of(golden, run, atol=2e-3)
        row = golden.one.logits["exact"][5]
        assert f"first divergence at step 5: golden {golden.one.tokens[5]}, run {token}" in text
        assert "margin (top1 - top2): golden 0.001" in text
        assert "tie: the run's token is within tolerance of the golden's maximum; the golden recorded" in text
        ranked = np.argsort(-row)[:5]
        lines = text.splitlines()
        at = next(i for i, line in enumerate(lines) if line.strip().startswith("top 5"))
        assert [int(line.split()[1]) for line in lines[at + 1 : at + 6]] == ranked.tolist()
        assert "logits after the first divergence follow other tokens" in text

    def test_findings_are_listed_with_their_codes(self):
        golden, run = pair()
        run.one.logits["engine"][2, 3] = np.nan
        text = text_of(golden, run)
        assert "error   sequence 's0': the run's logits are not finite, first at step 2, id 3: nan" in text
        assert "[logits.nonfinite]" in text

    def test_invalid_evidence_is_told_without_tables(self):
        golden, _ = pair()
        report = judge(golden.evidence(), golden.evidence())
        text = report_text(report)
        assert "two goldens were given" in text
        assert token_rows(text, "step") == []

    @pytest.mark.parametrize("form", ["top:5", "digest"])
    def test_partial_logits_are_labelled(self, form):
        golden, run = pair()
        golden.one.form = form
        run.one.tokens[3] ^= 1
        text = text_of(golden, run)
        assert f"logits {form.replace(':', '')}: 4 of 24 rows compared" in text

    def test_many_sequences_are_cut_but_no_failure_is_left_out(self):
        golden, run = pair(sequences=100, steps=3)
        for bad in (50, 99):
            run.seqs[bad].tokens[1] ^= 1
        text = text_of(golden, run)
        assert text.count("\nsequence ") == 2  # those that agree stand in the table alone
        assert f"\n{MAX_SEQUENCES - 2} sequences that agree stand in the table alone; kdtr diff --select ID" in text
        assert "sequence 50 's50': DIVERGED" in text
        assert "sequence 99 's99': DIVERGED" in text
        assert "68 more sequences are not shown; all together: 98 IDENTICAL, 2 DIVERGED" in text

    def test_many_findings_are_cut(self):
        golden, run = pair(sequences=100, steps=3)
        for s in run.seqs:
            s.tokens[1] ^= 1
        text = text_of(golden, run)
        assert text.count("[tokens.diverged]") <= 40
        assert "more findings" in text

    def test_a_pass_shows_how_far_it_was(self):
        golden, run = pair()
        perturb(run, 1e-3)
        assert "0 identical; max abs " in text_of(golden, run, atol=1e-2)


class TestRounds:
    def lines(self, golden, run, **options):
        return [line for line in text_of(golden, run, **options).splitlines() if line.startswith("  rounds ")]

    def test_one_line_a_sequence_with_the_acceptance_length(self):
        golden, run = round_pair(sequences=2, steps=24)
        taus = [s.rounds["rounds/n_accepted"].mean() for s in golden.seqs]
        assert self.lines(golden, run) == [
            f"  rounds {n} of {n} equal; tau golden {tau:.2f}, run {tau:.2f}"
            for n, tau in zip((len(s.rounds["rounds/start"]) for s in golden.seqs), taus, strict=True)
        ]

    def test_the_first_difference_and_both_values(self):
        golden, run = round_pair(sequences=2, steps=24)
        a = rounds_of(run, 1)
        old, start = int(a["root"][0]), int(a["start"][0])
        a["root"][0] ^= 1
        a["n_accepted"][...] = 1
        run.seqs[1].rounds["rounds/accepted"] = np.zeros(len(a["start"]), np.int32)
        count, tau = len(a["start"]), golden.seqs[1].rounds["rounds/n_accepted"].mean()
        assert self.lines(golden, run)[1] == (
            f"  rounds 0 of {count} equal; tau golden {tau:.2f}, run 1.00; first difference in "
            f"round 0 (position {start}): the root is {old ^ 1}, golden {old}"
        )

    def test_the_finding_says_it_too(self):
        golden, run = round_pair(sequences=1, steps=24)
        a = rounds_of(run)
        old = int(a["bonus"][2])
        a["bonus"][2] = 7 if old != 7 else 8
        text = text_of(golden, run)
        place = f"round 2 (position {a['start'][2]}): the bonus is {a['bonus'][2]}, golden {old}"
        assert f"equal; tau golden {a['n_accepted'].mean():.2f}" in text
        assert f"; first difference in {place}\n" in text
        assert f"error   sequence 's0': {place} [rounds.bonus] (hint: tree)\n" in text

    def test_rounds_that_are_not_compared(self):
        golden, run = round_pair(sequences=1, steps=24)
        count, tau = len(golden.one.rounds["rounds/start"]), golden.one.rounds["rounds/n_accepted"].mean()
        run.manifest["drafting"]["budget"] = 9
        assert self.lines(golden, run) == [
            f"  rounds not compared: golden {count} rounds (tau {tau:.2f}), run {count} rounds (tau {tau:.2f})"
        ]
        assert "note    rounds are not compared: other budgets: golden 6, run 9 (drafting.budget)" in (
            text_of(golden, run)
        )
        golden.one.rounds = {}
        assert self.lines(golden, run)[0].startswith("  rounds not compared: golden none to read, run ")

    def test_rounds_that_can_t_be_read(self):
        golden, run = round_pair(sequences=1, steps=24)
        run.one.problems = (RoundProblem("round 2: no cycle: node 5 is its own ancestor", True, 2),)
        assert self.lines(golden, run)[0].endswith(", run none to read")
        assert "the run's rounds are malformed: round 2: no cycle: node 5 is its own ancestor [rounds.malformed]" in (
            text_of(golden, run)
        )

    def test_no_round_has_no_acceptance_length(self):
        golden, run = round_pair(sequences=1, steps=1)
        assert self.lines(golden, run) == ["  rounds 0 of 0 equal; tau golden -, run -"]

    def test_plain_decoding_has_no_such_line(self):
        assert self.lines(*pair()) == []


def test_a_field_s_name_can_not_break_a_line():
    golden, run = golden_side(), run_side(golden_side())
    run.manifest["choices"]["x\nPASS"] = 1
    text = report_text(judge(golden.evidence(), run.evidence()))
    assert "\nPASS" not in text
    assert "[provenance.choices.x PASS]" in text


class TestNext:
    """after logits that are out, the command that finds the operation: for kdtr's own engine in tier exact"""

    LINE = "\nnext    kdtr bisect GOLDEN names the operation at fault\n"

    def parted(self, **manifest):
        golden = golden_side()
        run = run_side(golden, **manifest)
        run.one.logits["engine"][2, 3] += np.float32(0.5)
        return golden, run

    def test_its_own_engine(self):
        assert self.LINE in text_of(*self.parted())

    def test_a_foreign_engine_can_not_be_bisected(self):
        golden, run = self.parted()
        run.manifest["run"]["batch"] = None
        assert self.LINE not in text_of(golden, run)

    def test_another_tier_neither(self):
        assert self.LINE not in text_of(*self.parted(tier="bf16"), atol=1e-3)

    def test_a_sampler_is_no_operation_of_the_forward_pass(self):
        golden, run = golden_side(), run_side(golden_side())
        run.one.tokens[2] ^= 1
        assert self.LINE not in text_of(golden, run)

    def test_a_trace_says_where_already(self):
        golden, run = traced_pair()
        run.one.logits["engine"][2, 3] += np.float32(0.5)
        text = text_of(golden, run)
        assert "[logits.out_of_tolerance]" in text
        assert self.LINE not in text


class TestTraces:
    def test_equal_ones_are_counted(self):
        text = report_text(REPORTS["traced"](), 100)
        assert re.search(r"\n  trace (\d+) of \1 tensors identical\n", text)
        assert "<-" not in text

    def test_the_first_tensor_stands_first_with_figures_and_hint(self):
        text = report_text(REPORTS["trace parts"](), 100)
        lines = text.split("\n")
        at = next(i for i, line in enumerate(lines) if "rows out" in line)
        assert lines[at].split() == ["step", "position", "rows", "out", "max", "abs", "nmse", "tensor"]
        first, second, third, after = (line.split() for line in lines[at + 1 : at + 5])
        assert first[:3] == ["0", "0", "20/20"]
        assert first[4:] == ["1.000e+00", "model.layers.1.self_attn.q_latent", "<-", "constant-scale"]
        assert (second[-1], third[-1]) == ("model.layers.1.mlp.moe_out", "final_norm")
        assert after == []
        assert "[trace.parted] (hint: constant-scale)" in text
        assert "golden alone has traced embed: not compared [trace.partial]" in text

    def test_rules_stand_beside_the_bounds(self):
        text = report_text(REPORTS["trace parts within"](), 100)
        assert "\n        *.q_latent: max_ulp 1099511627776 (--rule)\n        logits: rtol 0.001 (--rule)\n" in text

    def test_many_tensors_are_cut(self):
        golden, run = traced_pair()
        for name, values in run.one.trace.items():
            run.one.trace[name] = noise(values) if values.dtype.kind == "f" else values
        text = text_of(golden, run)
        assert len(re.findall(r"\n +0 +0 +20/20 ", text)) == 6
        more = sum(a.dtype.kind == "f" for a in run.one.trace.values()) - 6
        assert f"\n    and {more} more tensors out of tolerance\n" in text

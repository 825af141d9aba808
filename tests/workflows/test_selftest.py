"""The self-test's own parts: sabotages that fit the engine, goldens that bring what they say, one change at a time."""

import dataclasses

import numpy as np
import pytest

from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.engine.compile import compile_ptx, source_text
from kdtr_cli.engine.kernels import sources
from kdtr_cli.errors import DeviceError, Exit, InputError
from kdtr_cli.model.presets import PRESETS
from kdtr_cli.parity.hints import HINTS
from kdtr_cli.parity.tolerances import JudgeOptions, TensorRule
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.workflows import selftest as workflow
from kdtr_cli.workflows import selftest_goldens as goldens
from kdtr_cli.workflows import selftest_outputs as outputs
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.golden_rounds import DraftOptions
from kdtr_cli.workflows.run import RunOptions, make_run
from kdtr_cli.workflows.selftest import SelftestOptions, selftest
from kdtr_cli.workflows.selftest_goldens import GOLDENS, make_selftest_golden
from kdtr_cli.workflows.selftest_report import BaselineRow, SabotageRow, SelftestReport
from kdtr_cli.workflows.selftest_sabotage import Edit, Sabotage, replaced_sources
from kdtr_cli.workflows.selftest_sabotages import SABOTAGES


@pytest.mark.quick
class TestSabotages:
    @pytest.mark.parametrize("name", SABOTAGES)
    def test_fits_the_engine(self, name):
        sabotage = SABOTAGES[name]
        texts = replaced_sources(name, sabotage)
        assert set(texts) == {edit.file for edit in sabotage.edits} <= set(sources())
        for file, text in texts.items():
            assert text != source_text(file)
        means = (bool(sabotage.edits), sabotage.job, sabotage.output, sabotage.other_weights)
        assert sum(map(bool, means)) == 1
        assert sabotage.where
        assert sabotage.golden in GOLDENS
        assert sabotage.hints
        assert set(sabotage.hints) <= set(HINTS)
        assert sabotage.verdict not in (Verdict.IDENTICAL, Verdict.PASS)

    def test_every_hint_is_demanded_by_one(self):
        # constant-scale of what is no scale, say, would show in a hint that no sabotage asks for
        assert {hint for s in SABOTAGES.values() for hint in s.hints} == set(HINTS)

    def test_there_are_enough_on_every_golden(self):
        assert len(SABOTAGES) >= 24
        assert {s.golden for s in SABOTAGES.values()} == set(GOLDENS)
        assert {s.kind for s in SABOTAGES.values()} == {"engine", "host", "output"}

    @pytest.mark.parametrize(("right", "times"), [("score[i] = no such text;", 0), ("__syncthreads();", 7)])
    def test_a_text_that_is_not_there_once_breaks_the_self_test(self, right, times):
        assert source_text("router.cu").count(right) == times
        broken = Sabotage("", "", "groups", ("router-choice",), edits=(Edit("router.cu", right, ""),))
        with pytest.raises(DeviceError, match=f"'mine' is broken: router.cu holds its text {times} times, not once"):
            selftest(SelftestOptions(), sabotages={"mine": broken})

    def test_edits_of_one_file_follow_each_other(self):
        way = (Edit("accept.cu", "if (t) return;", "if (t > 1) return;"), Edit("accept.cu", "(t > 1)", "(t > 2)"))
        whole = Sabotage("", "", "tree", (), edits=way)
        assert "if (t > 2) return;" in replaced_sources("x", whole)["accept.cu"]
        with pytest.raises(DeviceError, match=r"accept\.cu holds its text 0 times"):
            replaced_sources("x", dataclasses.replace(whole, edits=way[::-1]))

    def test_an_unknown_name(self):
        with pytest.raises(InputError, match="no sabotage is called 'nap'"):
            selftest(SelftestOptions(only=("nan", "nap")))


@pytest.mark.slow
def test_every_sabotaged_kernel_compiles_for_a_gpu():
    """And to another program: a change that a compiler takes out is none."""
    made = {(name, *one) for name, s in SABOTAGES.items() for one in replaced_sources(name, s).items()}
    right = {file: compile_ptx(source_text(file), "sm_90") for file in {file for _, file, _ in made}}
    wrong = {text: compile_ptx(text, "sm_90") for text in {text for _, _, text in made}}
    for name, file, text in made:
        assert wrong[text] != right[file], name


class TestGoldens:
    """Each is refused as soon as it lacks what makes bugs show."""

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("groups", {"prompts": (4, 4)}),
            ("groups", {"model": lambda _: goldens._preset("tiny")}),
            ("groups", {"model": lambda _: goldens._preset("tiny-groups", _positive_bias)}),
            ("offset", {"model": lambda _: goldens._preset("tiny")}),
            ("offset", {"model": lambda _: goldens._preset("tiny", _far_biases)}),
            ("ties", {"model": lambda _: goldens._preset("tiny")}),
            ("border", {"prompts": (9, 5)}),
            ("border", {"prompts": (1,)}),
            ("int4", {"model": lambda _: goldens._preset("tiny")}),
            ("tree", {"model": lambda _: goldens._small_vocabulary(63)}),
            ("tree", {"drafting": lambda _: DraftOptions("chain", "synthetic:0.5", block_size=6)}),
            ("drafter", {"drafting": lambda _: DraftOptions("chain", "ngram", budget=3)}),
        ],
        ids=lambda value: value if isinstance(value, str) else next(iter(value)),
    )
    def test_is_no_test_without_what_it_brings(self, name, change, monkeypatch, tmp_path):
        monkeypatch.setitem(GOLDENS, name, dataclasses.replace(GOLDENS[name], **change))
        with pytest.raises(DeviceError, match=f"golden '{name}' is no test any more"):
            make_selftest_golden(name, tmp_path)

    def test_a_preset_that_is_not_changed_is_the_preset(self):
        assert goldens._preset("tiny").weights.digests().used == goldens.open_model("tiny").weights.digests().used
        assert PRESETS["tiny"]["vocab_size"] == 512


def _far_biases(weights, config):
    for router in goldens._routers(config):
        weights[f"{router}.e_score_correction_bias"] += 12.6


def _positive_bias(weights, config):
    weights[f"{goldens._routers(config)[1]}.e_score_correction_bias"][3] = 0.25


class TestOutputs:
    def test_what_is_not_changed_is_the_same_file(self, tmp_path):
        make_golden(GoldenOptions("tiny", tmp_path / "g.h5", steps=2, drafting=DraftOptions("ddtree", "ngram", 2, 3)))
        make_run(RunOptions(tmp_path / "g.h5", tmp_path / "r.h5", mode="ddtree", device="cpu"))
        outputs.rewrite(tmp_path / "r.h5", tmp_path / "again.h5", lambda sequences: sequences)
        assert (tmp_path / "again.h5").read_bytes() == (tmp_path / "r.h5").read_bytes()

    @pytest.mark.quick
    @pytest.mark.parametrize("name", sorted(set(outputs.__all__) - {"rewrite"}))
    def test_changes_the_last_sequence_alone(self, name):
        rng = np.random.default_rng(0)
        made = [
            SequenceData(i, 0, np.ones(2, np.int32), np.arange(3, dtype=np.int32), "length", {"logits/engine": logits})
            for i, logits in zip("ab", rng.standard_normal((2, 3, 8)).astype(np.float32), strict=True)
        ]
        before = [s.arrays["logits/engine"].copy() for s in made]
        first, *others = getattr(outputs, name)(list(made))
        assert first is made[0]
        for sequence, logits in zip(made, before, strict=True):
            assert sequence.arrays["logits/engine"].tobytes() == logits.tobytes()
        if name == "dropped":
            assert others == []
            return
        (last,) = others
        assert last.arrays["logits/engine"].dtype == np.float32
        assert len(last.arrays["logits/engine"]) == len(last.tokens)
        assert last.arrays["logits/engine"].tobytes() != before[1].tobytes()


@pytest.mark.quick
class TestReport:
    def row(self, **change) -> SabotageRow:
        values = {
            "name": "a", "what": "", "like": "", "kind": "host", "where": "", "golden": "g", "expected": "DIVERGED",
            "expected_hints": ("stop",), "verdict": "DIVERGED", "exit_code": 1, "hint": "stop", "first_tensor": None,
            "finding": "", "gated": False, "seconds": 0.0,
        }  # fmt: skip
        return SabotageRow(**{**values, **change})

    def report(self, *rows: SabotageRow, red: bool = False, gate: str | None = None, sabotages: int | None = None):
        bases = (BaselineRow("g", "", "IDENTICAL", 0, 0.0), BaselineRow("h", "", "PASS", 2 if red else 0, 0.0))
        return SelftestReport("cpu", gate, bases, rows, len(rows) if sabotages is None else sabotages, 1.0)

    def test_all_killed(self):
        report = self.report(self.row(), self.row(name="b", expected_hints=("tree", "stop")))
        assert (report.exit_code, report.line) == (Exit.AGREES, "PASS selftest killed=2/2 false_red=0/2")

    def test_one_that_passes_is_a_survivor(self):
        report = self.report(self.row(name="b", verdict="PASS", exit_code=0), self.row())
        assert report.exit_code == Exit.DIFFERS
        assert report.line == "FAIL selftest killed=1/2 false_red=0/2 survivors=b"
        assert (report.survivors[0].name, report.misnamed) == ("b", [])

    @pytest.mark.parametrize("change", [{"verdict": "INVALID", "exit_code": 2}, {"hint": "tree"}, {"hint": None}])
    def test_another_verdict_or_another_hint_is_no_kill(self, change):
        report = self.report(self.row(**change), self.row(name="b"))
        assert report.exit_code == Exit.DIFFERS
        assert report.line == "FAIL selftest killed=1/2 false_red=0/2 misnamed=a"

    def test_under_a_tolerance_of_ones_own_any_refusal_is_a_kill(self):
        rows = [self.row(gated=True, verdict="INCONCLUSIVE", exit_code=2, hint=None)]
        rows.append(self.row(name="b", gated=True, verdict="PASS", exit_code=0))
        report = self.report(*rows, gate='--atol 1 "x"')
        assert report.exit_code == Exit.DIFFERS
        assert report.line == 'FAIL selftest killed=1/2 false_red=0/2 survivors=b gate="--atol 1 \\"x\\""'

    def test_an_engine_as_it_is_that_does_not_pass(self):
        report = self.report(self.row(), red=True, sabotages=5)
        assert report.exit_code == Exit.DIFFERS
        assert report.line == "FAIL selftest killed=1/1 false_red=1/2 red=h sabotages=1/5"

    def test_nothing_tried_is_no_success(self):
        assert self.report(sabotages=5).exit_code == Exit.UNJUDGED


def test_a_gate_that_is_red_anyway_is_seen(monkeypatch):
    """The engine as it is, broken in every run: what it says of sabotages is worth nothing."""
    broken = SABOTAGES["scaling-twice"].job

    def make_broken(options):
        with workflow.open_device("cpu") as device:
            return workflow.run_changed(device, options, broken)

    monkeypatch.setattr(workflow, "make_run", make_broken)
    report = selftest(SelftestOptions(only=("truncated",)))
    assert report.false_red == ["groups"]
    assert report.exit_code == Exit.DIFFERS


def test_a_failing_engine_is_named_and_no_verdict():
    """A sabotage that makes the engine itself give up says nothing about the gate."""
    edits = (Edit("combine.cu", "residual[row * n + i] + sum", "residual[row * n + i] / 0.f"),)
    sabotage = Sabotage("", "", "border", ("nonfinite",), edits=edits)
    with pytest.raises(DeviceError, match=r"^mine: .*not finite"):
        selftest(SelftestOptions(), sabotages={"mine": sabotage})


def test_rules_of_tensors_that_are_not_here_play_no_part():
    """They are made for the user's model; here they would be refused as rules that hold for nothing."""
    rules = (
        TensorRule("*.hidden", atol=1e9),
        TensorRule("*.layers.60.hidden", atol=1.0),
        TensorRule("*.k_rope", atol=0.0),
    )
    report = selftest(
        SelftestOptions(only=("latent-norm",), gate=JudgeOptions(atol=1e9, allow_loose=True, rules=rules))
    )
    (row,) = report.rows
    # the rule for k_rope holds: the first key that comes of another hidden state
    assert (row.first_tensor, report.false_red) == ("model.layers.1.self_attn.k_rope", [])


def test_one_that_changes_nothing_survives():
    edits = (Edit("combine.cu", "residual[row * n + i] + sum", "sum + residual[row * n + i]"),)
    report = selftest(SelftestOptions(), sabotages={"mine": Sabotage("", "", "border", ("first-tensor",), edits=edits)})
    assert report.line == "FAIL selftest killed=0/1 false_red=0/1 survivors=mine"
    assert report.exit_code == Exit.DIFFERS

"""Golden, run and diff together on the CPU device: what the three of them must say."""

import h5py
import pytest

from kdtr_cli.model.presets import write_model
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.line import verdict_line
from kdtr_cli.report.text import report_text
from kdtr_cli.workflows.diff import diff
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.golden_rounds import DraftOptions
from kdtr_cli.workflows.run import RunOptions, make_run


@pytest.fixture
def files(tmp_path):
    return tmp_path / "g.h5", tmp_path / "r.h5"


def test_a_replay_is_named_in_the_line(files):
    golden, out = files
    make_golden(GoldenOptions("tiny", golden, steps=4, drafting=DraftOptions("ddtree", "ngram", 4)))
    for drafter, said in ((None, False), ("replay", True)):
        make_run(RunOptions(golden, out, mode="ddtree", device="cpu", drafter=drafter, force=True))
        report = diff(golden, out)
        assert (" drafts=replayed " in verdict_line(report)) is said
        assert f"drafter {drafter or 'ngram'}, budget 4" in report_text(report, 100)


def test_a_damaged_weight_is_a_broken_bundle_though_no_comparison_reads_it(files):
    golden, out = files
    make_golden(GoldenOptions("tiny", golden, steps=2))
    make_run(RunOptions(golden, out, device="cpu"))
    assert diff(golden, out).verdict is Verdict.IDENTICAL
    with h5py.File(golden, "r+") as file:
        weight = file["model/weights/lm_head.weight"]
        values = weight[...]
        values[0, 0] ^= 1
        weight[...] = values
    report = diff(golden, out)
    assert report.verdict is Verdict.INVALID
    assert "lm_head.weight" in report.reason


def test_another_model_is_told_before_the_run_and_judged_invalid(files, tmp_path):
    golden, out = files
    make_golden(GoldenOptions("tiny", golden, steps=2))
    write_model(tmp_path / "other", "tiny", seed=1)
    summary = make_run(RunOptions(golden, out, device="cpu", model=str(tmp_path / "other")))
    assert summary.notes == ("the weights are not the golden's; a diff will be INVALID",)
    assert diff(golden, out).verdict is Verdict.INVALID
    again = make_run(RunOptions(golden, out, device="cpu", model="tiny", force=True))
    assert again.notes == ()

"""Golden, run and diff together on the CPU device: what the three of them must say."""

import h5py
import pytest

from kdtr_cli.errors import InputError
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.presets import write_model
from kdtr_cli.parity.tolerances import JudgeOptions, TensorRule
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


class TestTraces:
    """What a trace adds, with an engine whose softmax scale lacks YaRN's mscale squared."""

    @pytest.fixture
    def wrong_scale(self, monkeypatch):
        monkeypatch.setattr(ModelConfig, "softmax_scale", lambda c: c.qk_head_dim**-0.5)

    @pytest.fixture
    def golden(self, files):
        make_golden(GoldenOptions("tiny", files[0], steps=4, trace="full"))
        return files[0]

    def test_the_first_tensor_is_named(self, golden, files, request):
        make_run(RunOptions(golden, files[1], device="cpu", trace="full"))
        report = diff(golden, files[1])
        assert (report.verdict, report.sequences[0].trace.all_bits) == (Verdict.IDENTICAL, True)
        request.getfixturevalue("wrong_scale")
        make_run(RunOptions(golden, files[1], device="cpu", trace="full", force=True))
        report = diff(golden, files[1])
        name = "model.layers.0.self_attn.attn_out"
        assert (report.verdict, report.findings[0].hint) == (Verdict.DIVERGED, "yarn-scale")
        assert f" first_tensor=0:1:{name} verdict=DIVERGED" in verdict_line(report)
        text = report_text(report, 100)
        assert f"{name}  <- yarn-scale" in text
        assert f"error   sequence '0': {name} (position 1 of the prompt) parts first: right at position 0 alone" in text

    def test_a_level_of_fewer_tensors_names_the_layer(self, golden, files, wrong_scale):
        make_run(RunOptions(golden, files[1], device="cpu", trace="layers"))
        report = diff(golden, files[1])
        assert report.sequences[0].trace.first.name == "model.layers.0.hidden"
        assert "trace.partial" in [f.code for f in report.findings]

    def test_a_side_without_a_trace_is_a_note(self, golden, files):
        make_run(RunOptions(golden, files[1], device="cpu"))
        report = diff(golden, files[1])
        assert report.verdict is Verdict.IDENTICAL
        assert [f.code for f in report.findings] == ["trace.not_compared"]
        assert "(kdtr run --trace)" in report.findings[0].message

    def test_who_asks_for_a_tensor_that_is_not_compared_is_told(self, golden, files):
        make_run(RunOptions(golden, files[1], device="cpu"))
        rule = TensorRule("*.router_logits", atol=1e-4)
        with pytest.raises(InputError, match=r"router_logits' matches no tensor that is compared: logits \(traces"):
            diff(golden, files[1], JudgeOptions(rules=(rule,)))

    def test_a_damaged_tensor_is_a_broken_bundle(self, golden, files):
        make_run(RunOptions(golden, files[1], device="cpu", trace="full"))
        with h5py.File(files[1], "r+") as file:
            file["sequences/000000/trace/embed"][0, 0] += 1
        report = diff(golden, files[1])
        assert report.verdict is Verdict.INVALID
        assert "trace/embed" in report.reason

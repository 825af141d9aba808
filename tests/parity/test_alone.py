"""What one side alone holds is compared with nothing, and still a value that is not finite never passes."""

import numpy as np
import pytest
from parity_cases import golden_side, run_side

from kdtr_cli.parity import alone
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict

pytestmark = pytest.mark.quick

GENEROUS = {"atol": 10.0, "rtol": 10.0, "allow_loose": True, "allow_partial": True, "on_tie": "pass"}
BAD = pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])


def judged(golden, run, **options):
    return judge(golden.evidence(), run.evidence(), JudgeOptions(**{**GENEROUS, **options}))


def found(report, code):
    (finding,) = (f for f in report.findings if f.code == code)
    return finding.sequence, finding.step, finding.token


@BAD
@pytest.mark.parametrize("form", ["full", "top:40"])
def test_prompt_logits_that_the_golden_lacks(bad, form):
    golden = golden_side()
    run = run_side(golden)
    for s in run.seqs:
        s.prompt_logits = {"engine": np.zeros((len(s.prompt), 40), np.float32)}
        s.form = form
    assert judged(golden, run).exit_code == 0
    run.seqs[1].prompt_logits["engine"][2, 7] = bad
    report = judged(golden, run)
    assert report.verdict is Verdict.DIVERGED
    assert found(report, "prompt_logits.nonfinite") == ("s1", 2, 7)


@BAD
def test_logits_that_the_golden_lacks(bad):
    golden = golden_side()
    run = run_side(golden)
    for s in golden.seqs:
        s.logits = {}
    assert judged(golden, run).verdict is Verdict.PASS
    run.seqs[1].logits["engine"][5, 39] = bad
    report = judged(golden, run)
    assert report.verdict is Verdict.DIVERGED
    assert found(report, "logits.nonfinite") == ("s1", 5, 39)
    assert judged(golden, run, steps=5).verdict is Verdict.PASS  # it lies outside the judged part


@BAD
@pytest.mark.parametrize("lacks", ["its logits", "the sequence"])
def test_logits_that_the_run_lacks(bad, lacks):
    golden = golden_side()
    run = run_side(golden)
    if lacks == "its logits":
        for s in run.seqs:
            s.logits = {}
        assert judged(golden, run).verdict is Verdict.PASS
    else:
        del run.seqs[1]
        assert judged(golden, run).verdict is Verdict.DIVERGED
    golden.seqs[1].logits["exact"][4, 0] = bad
    report = judged(golden, run)
    assert report.verdict is Verdict.INVALID
    assert found(report, "logits.golden_nonfinite") == ("s1", 4, 0)


@BAD
def test_prompt_logits_that_the_run_lacks(bad):
    golden = golden_side(score=True)
    run = run_side(golden)
    for s in run.seqs:
        s.prompt_logits = {}
    golden.one.prompt_logits["exact"][0, 3] = bad
    report = judged(golden, run)
    assert report.verdict is Verdict.INVALID
    assert found(report, "prompt_logits.golden_nonfinite") == ("s0", 0, 3)


@pytest.mark.parametrize("values", [1, 40, 79, 1 << 19])
def test_blocks_of_any_size_find_the_first(values, monkeypatch):
    monkeypatch.setattr(alone, "BLOCK_VALUES", values)
    golden = golden_side(sequences=1)
    run = run_side(golden)
    golden.one.logits = {}
    run.one.logits["engine"][[3, 3, 5], [9, 8, 0]] = np.nan
    assert found(judged(golden, run), "logits.nonfinite") == ("s0", 3, 8)


def test_digests_hold_no_value_to_look_at():
    golden = golden_side(sequences=1)
    run = run_side(golden)
    golden.one.logits = {}
    run.one.form = "digest"
    run.one.logits["engine"][0, 0] = np.nan
    assert judged(golden, run).verdict is Verdict.PASS

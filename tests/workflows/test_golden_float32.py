"""`kdtr golden --arith float32`: float32 logits alone; no run is IDENTICAL to them, none passes without a bound."""

import numpy as np
import pytest
from click.testing import CliRunner

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.cli.golden import golden
from kdtr_cli.errors import InputError
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.line import verdict_line
from kdtr_cli.workflows.diff import diff
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.run import RunOptions, make_run
from kdtr_cli.workflows.verify import verify_bundle

pytestmark = pytest.mark.quick


def call(*args):
    return CliRunner().invoke(golden, [str(arg) for arg in args])


def arrays(path):
    with open_bundle(path) as bundle:
        (sequence,) = bundle.sequences
        names = {name for name in sequence.array_names() if "logits" in name}
        return bundle.manifest["arithmetic"], {name: sequence.array(name) for name in names}


def test_the_bundle_names_its_arithmetic(tmp_path):
    out = tmp_path / "g.h5"
    assert call("tiny", "-o", out, "--steps", 3, "--score", "--arith", "float32").exit_code == 0
    arithmetic, held = arrays(out)
    assert arithmetic == ["float32"]
    assert set(held) == {"logits/float32", "prompt_logits/float32"}
    assert {array.dtype for array in held.values()} == {np.dtype(np.float32)}
    verify_bundle(out)


def test_the_three_choices(tmp_path):
    want = {"exact,float64": ["exact", "float64"], "float64": ["float64"], "float32": ["float32"]}
    found = {}
    for arith, names in want.items():
        out = tmp_path / f"{arith}.h5"
        assert call("tiny", "-o", out, "--steps", 2, "--arith", arith).exit_code == 0
        arithmetic, found[arith] = arrays(out)
        assert arithmetic == names
    assert call("tiny", "-o", tmp_path / "d.h5", "--steps", 2).exit_code == 0
    assert call("tiny", "-o", tmp_path / "n.h5", "--steps", 2, "--no-exact").exit_code == 0
    assert arrays(tmp_path / "d.h5")[0] == ["exact", "float64"]
    assert (tmp_path / "n.h5").read_bytes() == (tmp_path / "float64.h5").read_bytes()
    apart = np.abs(found["float32"]["logits/float32"] - found["float64"]["logits/float64"]).max()
    assert 0 < apart < 1e-4


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--no-exact", "--arith", "float32"), "--no-exact is --arith float64, and --arith float32 was given"),
        (("--arith", "float32", "--ddtree", "--drafter", "ngram"), "--arith float32: rounds are made in the exact"),
    ],
)
def test_options_that_contradict_each_other(tmp_path, args, word):
    result = call("tiny", "-o", tmp_path / "g.h5", *args)
    assert isinstance(result.exception, InputError)
    assert word in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_run_needs_a_bound_and_is_never_identical(tmp_path):
    """Fails closed: no verdict without a bound; with one, a run within it passes, and one beyond it does not."""
    gold, out = tmp_path / "g.h5", tmp_path / "r.h5"
    make_golden(GoldenOptions("tiny", gold, steps=4, exact=False, single="float32"))
    make_run(RunOptions(gold, out, device="cpu"))
    report = diff(gold, out)
    assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)
    assert "made with --arith float32" in report.reason
    report = diff(gold, out, JudgeOptions(atol=1e-4))
    assert (report.verdict, report.reference) == (Verdict.PASS, "float32")
    assert " reference=float32 " in verdict_line(report)
    assert diff(gold, out, JudgeOptions(atol=1e-12)).verdict is Verdict.DIVERGED

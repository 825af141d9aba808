"""Rules of tensors: as text on the command line, as tables in pyproject.toml, one parser for both."""

import re
import sys
from pathlib import Path

import click
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from parity_bundles import write_pair
from parity_cases import golden_side, perturb, run_side

from kdtr_cli.cli.main import main
from kdtr_cli.cli.tensor_rule import TensorRuleType
from kdtr_cli.parity.tolerances import TensorRule

pytestmark = pytest.mark.quick

TYPE = TensorRuleType()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("*.router_logits:atol=1e-4,rtol=0", TensorRule("*.router_logits", 1e-4, 0.0)),
        ("logits:max_ulp=3", TensorRule("logits", max_ulp=3)),
        ("logits:max-ulp=3, rtol=.5", TensorRule("logits", rtol=0.5, max_ulp=3)),
        ("a:b:atol=1", TensorRule("a:b", 1.0)),
    ],
)
def test_a_text_is_read(text, rule):
    assert TYPE.convert(text, None, None) == rule


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("logits", "PATTERN:atol=X"),
        ("logits:", "bounds nothing"),
        (":atol=1", "needs the pattern"),
        ("logits:atol", "atol is '', not a number"),
        ("logits:atol=x", "atol is 'x', not a number"),
        ("logits:max_ulp=1.5", "not a whole number"),
        ("logits:max_kl=1", "'max_kl' is none of atol, rtol, max_ulp"),
        ("logits:atol=1,atol=2", "'atol' stands twice"),
        ("logits:atol=-1", "give a number from 0 on"),
        ("logits:atol=nan", "give a number from 0 on"),
        ("logits:atol=1,", "'' is none of"),
    ],
)
def test_other_texts_are_refused(text, word):
    with pytest.raises(click.BadParameter, match=re.escape(word)):
        TYPE.convert(text, None, None)


def test_a_table_is_its_text():
    for rule in (TensorRule("*.hidden", 1e-4, 0.5, 3), TensorRule("logits", max_ulp=7)):
        table = {key: getattr(rule, key) for key in ("tensor", "atol", "rtol", "max_ulp")}
        table = {key: value for key, value in table.items() if value is not None}
        assert TYPE.convert(TYPE.text_of(table), None, None) == rule


@pytest.fixture
def repository(tmp_path, monkeypatch, capsys):
    """A repository with two bundles that are 1e-3 apart; called with a pyproject.toml and options of `kdtr diff`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    golden = golden_side()
    run = run_side(golden)
    perturb(run, 1e-3)
    write_pair(golden, run, tmp_path)

    def call(text: str, *args: str) -> tuple[int, str, str]:
        Path("pyproject.toml").write_text(text)
        code = main(["diff", "g.h5", "r.h5", *args])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


LOGITS = '[[tool.kdtr.diff.rules]]\ntensor = "logits"\natol = 1e-2\n'


class TestInAFile:
    def test_it_holds_and_its_origin_is_told(self, repository):
        assert repository("")[0] == 1
        code, out, _ = repository(LOGITS)
        assert code == 0
        assert "\n        logits: atol 0.01 (--rule, pyproject.toml)\n" in out

    def test_the_command_line_wins(self, repository):
        code, out, _ = repository(LOGITS, "--rule", "log*:atol=1e-9")
        assert code == 1
        assert "log*: atol 1e-09 (--rule, command line)" in out
        assert "pyproject.toml" not in out

    def test_in_order(self, repository):
        tight = LOGITS.replace("1e-2", "0").replace("logits", "log*")
        assert repository(tight + LOGITS.replace("logits", "*"))[0] == 2  # the second never holds
        code, *_ = repository(LOGITS.replace("1e-2", "0"))
        assert code == 1

    def test_texts_do_too(self, repository):
        assert repository('[tool.kdtr.diff]\nrule = ["logits:atol=1e-2"]\n')[0] == 0

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (LOGITS + "atoll = 1\n", ["pyproject.toml", "tool.kdtr.diff.rules[0]", "'atoll'"]),
            (LOGITS + LOGITS.replace("tensor", "tensr"), ["tool.kdtr.diff.rules[1]", "'tensr'"]),
            (LOGITS.replace('"logits"', "7"), ["tool.kdtr.diff.rules[0]", "tensor must be a string"]),
            (LOGITS.replace("1e-2", '"1e-2"'), ["tool.kdtr.diff.rules[0]", "atol must be a number"]),
            (LOGITS.replace("1e-2", "true"), ["atol must be a number"]),
            (LOGITS.replace("atol = 1e-2", "max_ulp = 1.0"), ["max_ulp must be a whole number"]),
            (LOGITS.replace("atol = 1e-2", ""), ["bounds nothing"]),
            (LOGITS.replace("1e-2", "-1"), ["give a number from 0 on"]),
            (LOGITS.replace("logits", "*.hidden"), ["'*.hidden' matches no tensor", "pyproject.toml"]),
            ("[tool.kdtr.diff]\nrules = 3\n", ["tool.kdtr.diff.rules", "must be a list"]),
            (LOGITS.replace("diff", "golden"), ["tool.kdtr.golden.rules", "no such option"]),
            (LOGITS.replace("[[", "[").replace("]]", "]"), ["tool.kdtr.diff.rules", "must be a list"]),
        ],
    )
    def test_mistakes_are_one_line_and_exit_2(self, repository, text, words):
        if "golden" in text:
            code, out, err = golden_with(text)
        else:
            code, out, err = repository(text)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert all(word in err for word in words), err


def golden_with(text: str) -> tuple[int, str, str]:
    from click.testing import CliRunner

    from kdtr_cli.cli.main import cli

    Path("pyproject.toml").write_text(text)
    result = CliRunner().invoke(cli, ["golden", "-o", "x.h5"])
    return result.exit_code, result.stdout, result.stderr

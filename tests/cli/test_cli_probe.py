"""`kdtr probe` on the command line: table, last line, JSON, exit codes."""

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kdtr_cli.cli import probe as command
from kdtr_cli.cli.main import cli
from kdtr_cli.workflows.bitwise import Difference
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.probe_report import DIFFERS, SAME, ProbeReport, ProbeRow
from kdtr_cli.workflows.prompts import PromptOptions


def kdtr(*args: object) -> Result:
    return CliRunner().invoke(cli, ["--no-config", "probe", *map(str, args)])


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "golden.h5"
    make_golden(GoldenOptions("tiny", path, PromptOptions(ids=("1 2 3", "7")), 3))
    return path


def test_two_probes_as_text_and_as_json(golden):
    before = sorted(golden.parent.iterdir())
    options = (golden, "--device", "cpu", "--probe", "rerun", "--probe", "place", "--steps", 2, "--sequences", 2)
    made = kdtr(*options)
    assert made.exit_code == 0, made.stderr
    lines = made.stdout.splitlines()
    assert lines[0].split() == ["probe", "varied", "sequences", "tokens", "verdict"]
    assert [line.split()[0] for line in lines[1:4]] == ["rerun", "place", "golden"]
    assert lines[-1] == "PASS probes=2/2 tokens=8/8 golden=same selected=2/7 steps=2/3 verdict=DETERMINISTIC"
    assert made.stderr == ""
    document = json.loads(kdtr(*options, "--format", "json").stdout)
    assert (document["schema"], document["line"]) == ("kdtr.probe/1", lines[-1])
    assert document["exit_code"] == 0
    assert sorted(golden.parent.iterdir()) == before


def test_a_probe_that_cannot_be_made_is_no_pass(golden):
    made = kdtr(golden, "--device", "cpu", "--probe", "solo", "--steps", 1)
    assert made.exit_code == 2
    assert made.stdout.splitlines()[-1].startswith("ERROR probes=0/1 skipped=solo tokens=0/0 ")


def test_a_difference_is_shown_with_its_place_and_bits(golden, monkeypatch):
    found = Difference("logits", 4, 17, 1.0, 1.0000001, "0x3f800000", "0x3f800001")
    row = ProbeRow("place", "reversed", DIFFERS, 2, 6, 5, sequence="[red]", place=1, difference=found)
    same = ProbeRow("golden", "the golden", SAME, 2, 6, 6)
    report = ProbeReport("cpu", (row,), same, False)
    monkeypatch.setattr(command, "run_probes", lambda options, progress: report)
    made = kdtr(golden)
    assert made.exit_code == 1
    assert "sequence '[red]' step 4 logits[17]: 0x3f800000 (1) -> 0x3f800001 (1.0000001)" in made.stdout
    assert made.stdout.splitlines()[-1] == report.line
    prompt = dataclasses.replace(found, part="prompt_logits")
    monkeypatch.setattr(
        command,
        "run_probes",
        lambda options, progress: dataclasses.replace(report, rows=(dataclasses.replace(row, difference=prompt),)),
    )
    assert "sequence '[red]' prompt position 4 logits[17]: " in kdtr(golden).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--probe", "nosuch"], "Invalid value for '--probe'"),
        (["--sequences", 0], "Invalid value for '--sequences'"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(golden, options, message):
    made = kdtr(golden, *options)
    assert made.exit_code == 2
    assert message in made.stderr
    assert made.stderr.count("\n") == 1
    assert made.stdout == ""


def test_a_run_is_no_golden(golden, tmp_path):
    run = CliRunner().invoke(
        cli, ["--no-config", "run", str(golden), "-o", str(tmp_path / "r.h5"), "--device", "cpu", "--steps", "1"]
    )
    assert run.exit_code == 0
    made = kdtr(tmp_path / "r.h5")
    assert made.exit_code == 2
    assert "is a run, not a golden" in made.stderr

"""`kdtr bisect` on the command line: table, last line, JSON, exit codes."""

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from kdtr_cli.cli.main import cli
from kdtr_cli.engine.weights import upload_weights
from kdtr_cli.workflows import bisect as workflow
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.prompts import PromptOptions

SCHEMA = json.loads(resources.files("kdtr_cli.report").joinpath("schema/bisect-1.json").read_text(encoding="utf-8"))


def kdtr(*args: object) -> Result:
    return CliRunner().invoke(cli, ["--no-config", "bisect", *map(str, args)])


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bisect") / "golden.h5"
    make_golden(GoldenOptions("odd", path, PromptOptions(ids=("1 2 3 4", "7 8")), 2))
    return path


def test_an_engine_that_is_right_as_text_and_as_json(golden):
    before = sorted(golden.parent.iterdir())
    options = (golden, "--device", "cpu", "--select", "0", "--positions", "0, 3")
    made = kdtr(*options)
    assert (made.exit_code, made.stderr) == (0, "")
    lines = made.stdout.splitlines()
    assert lines[0].split() == ["operation", "layer", "form", "kernels", "rows", "max", "abs", "ULP", "NMSE"]
    assert lines[1].split()[:5] == ["embed", "-", "all", "embed_bf16", "14/14"]
    assert len(lines) == 1 + 28 + 2
    assert lines[-1] == "PASS bisect operations=60/60 identical sequences=1/2 verdict=IDENTICAL"
    document = json.loads(kdtr(*options, "--format", "json").stdout)
    Draft202012Validator(SCHEMA).validate(document)
    assert (document["line"], document["sequences"]) == (lines[-1], {"fed": 1, "of": 2})
    assert sum(row["rows"] for row in document["operations"] if row["operation"] == "embed") == 14
    every = kdtr(*options, "--all-layers").stdout.splitlines()
    assert len(every) == 1 + len(document["operations"]) + 2
    assert sorted(golden.parent.iterdir()) == before


def test_a_fault_is_marked_and_placed(golden, monkeypatch):
    def upload(device, config, weights):
        made = upload_weights(device, config, weights)
        array = made.layers[1].o.w
        device.write(array, np.roll(device.read(array), 1, 0))
        return made

    monkeypatch.setattr(workflow, "upload_weights", upload)
    made = kdtr(golden, "--device", "cpu")
    assert made.exit_code == 1
    lines = made.stdout.splitlines()
    marked = [line.split()[1:3] + line.split()[-1:] for line in lines if line.startswith("!")]
    assert marked == [["o", "1", "out"]]
    assert "o of layer 1 (prefill): first wrong at position 0 of sequence '0'" in lines
    assert lines[-1] == "FAIL bisect operations=59/60 faulty=o@layer1 hint=first-tensor verdict=DIVERGED"
    document = json.loads(kdtr(golden, "--device", "cpu", "--format", "json").stdout)
    Draft202012Validator(SCHEMA).validate(document)
    assert document["faulty"] == ["o@layer1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--positions", "1-2"], "all, or positions separated by commas"),
        (["--positions", "99"], "--positions 99: the sequences feed positions 0 to 4"),
        (["--select", "x"], "--select x: no such sequence"),
        (["--select", ","], "--select names no sequence"),
        (["--atol", "-1"], "--atol is -1.0; give a finite number"),
        (["--max-ulp", "-1"], "Invalid value for '--max-ulp'"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(golden, options, message):
    made = kdtr(golden, *options)
    assert (made.exit_code, made.stdout) == (2, "")
    assert message in made.stderr
    assert made.stderr.count("\n") == 1

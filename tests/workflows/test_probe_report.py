"""The verdict of all probes and its line: what was skipped never counts as passed."""

import dataclasses
import json

import pytest

from kdtr_cli.workflows.bitwise import Difference
from kdtr_cli.workflows.probe_report import DIFFERS, SAME, SKIPPED, ProbeReport, ProbeRow

pytestmark = pytest.mark.quick

GOLDEN = ProbeRow("golden", "g", SAME, 2, 6, 6)


def same(probe: str) -> ProbeRow:
    return ProbeRow(probe, "v", SAME, 2, 6, 6)


def differs(probe: str) -> ProbeRow:
    found = Difference("logits", 1, 5, 1.0, float("nan"), "0x3f800000", "0x7fc00000")
    return ProbeRow(probe, "v", DIFFERS, 2, 6, 4, sequence="x", place=1, difference=found)


def skipped(probe: str) -> ProbeRow:
    return ProbeRow(probe, "v", SKIPPED, note='no "reason"')


@pytest.mark.parametrize(
    ("rows", "golden", "named", "code", "line"),
    [
        ([same("a"), same("b")], GOLDEN, False, 0, "PASS probes=2/2 tokens=12/12 golden=same verdict=DETERMINISTIC"),
        (
            [same("a"), same("b"), differs("b")],
            GOLDEN,
            False,
            1,
            "FAIL probes=1/2 tokens=16/18 golden=same first=b first_difference=1:1 verdict=NONDETERMINISTIC",
        ),
        (
            [same("a"), skipped("b")],
            GOLDEN,
            False,
            0,
            "PASS probes=1/2 skipped=b tokens=6/6 golden=same verdict=DETERMINISTIC",
        ),
        (
            [same("a"), same("b"), skipped("b")],
            GOLDEN,
            True,
            2,
            'ERROR probes=1/2 skipped=b tokens=12/12 golden=same verdict=INCONCLUSIVE reason="b: no \\"reason\\""',
        ),
        (
            [skipped("a"), skipped("b")],
            GOLDEN,
            False,
            2,
            'ERROR probes=0/2 skipped=a,b tokens=0/0 golden=same verdict=INCONCLUSIVE reason="a: no \\"reason\\""',
        ),
        (
            [skipped("a"), differs("a")],
            GOLDEN,
            True,
            1,
            "FAIL probes=0/1 tokens=4/6 golden=same first=a first_difference=1:1 verdict=NONDETERMINISTIC",
        ),
        (
            [same("a")],
            differs("golden"),
            False,
            1,
            "FAIL probes=1/1 tokens=6/6 golden=differs first=golden first_difference=1:1 verdict=DIVERGED",
        ),
        (
            [same("a"), differs("b")],
            differs("golden"),
            False,
            1,
            "FAIL probes=1/2 tokens=10/12 golden=differs first=b first_difference=1:1 verdict=NONDETERMINISTIC",
        ),
        (
            [same("a")],
            skipped("golden"),
            False,
            0,
            "PASS probes=1/1 tokens=6/6 golden=not-compared verdict=DETERMINISTIC",
        ),
        (
            [],
            GOLDEN,
            False,
            2,
            'ERROR probes=0/0 tokens=0/0 golden=same verdict=INCONCLUSIVE reason="nothing was compared"',
        ),
    ],
)
def test_the_line(rows, golden, named, code, line):
    report = ProbeReport("cpu", tuple(rows), golden, named)
    assert (report.line, report.exit_code) == (line, code)


def test_the_line_says_what_was_cut():
    report = ProbeReport("cpu", (same("a"),), GOLDEN, True, (("selected", 1, 7), ("steps", 3, 6)))
    assert " golden=same selected=1/7 steps=3/6 verdict=" in report.line


def test_the_document_is_json_and_holds_no_nan():
    report = ProbeReport("cpu", (same("a"), differs("b")), GOLDEN, False)
    document = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert document["schema"] == "kdtr.probe/1"
    assert document["verdict"] == "NONDETERMINISTIC"
    assert document["exit_code"] == 1
    assert document["line"] == report.line
    assert document["probes"] == {"a": "SAME", "b": "DIFFERS"}
    assert document["rows"][1]["difference"] == {
        **dataclasses.asdict(differs("b").difference),
        "other": "nan",
    }

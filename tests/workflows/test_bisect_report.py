"""Verdict, line and JSON of `kdtr bisect`, from rows made by hand."""

import copy
import json
import math
from dataclasses import replace
from importlib import resources

import pytest
from jsonschema import Draft202012Validator

from kdtr_cli.parity.operation_hints import HINTS
from kdtr_cli.parity.operations import OperationResult
from kdtr_cli.parity.tolerances import JudgeOptions, effective_tolerance
from kdtr_cli.workflows.bisect_operations import OPERATIONS
from kdtr_cli.workflows.bisect_report import SCHEMA, BisectReport, grouped

pytestmark = pytest.mark.quick

DOCUMENT = json.loads(resources.files("kdtr_cli.report").joinpath("schema/bisect-1.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(DOCUMENT)
FORMS = ("prefill", "batch", "decode")
RIGHT = OperationResult("w_uv", 0, "prefill", ("matmul_w1_m4_r2",), 5, 5, 0, 0.0, 0, 0.0, 0, None)


def wrong(row: OperationResult, **changes) -> OperationResult:
    found = {"rows_identical": 2, "rows_out": 3, "max_abs": 0.5, "max_ulp": 7, "nmse": 0.25, "first_row": ("1", 4)}
    return replace(row, **{**found, **changes})


def rows_of(operation: str, layers, forms=FORMS) -> list[OperationResult]:
    return [replace(RIGHT, operation=operation, layer=layer, form=form) for layer in layers for form in forms]


def report(*rows: OperationResult, sequences=(2, 2), unseen=(), **judge) -> BisectReport:
    return BisectReport("cpu", rows, effective_tolerance(JudgeOptions(**judge), "exact"), sequences, unseen)


def checked(made: BisectReport) -> dict:
    document = json.loads(json.dumps(made.as_json(), allow_nan=False))
    VALIDATOR.validate(document)
    assert document["line"] == made.line
    return document


class TestVerdict:
    def test_all_bits_the_same(self):
        made = report(*rows_of("embed", [None]), *rows_of("w_uv", range(3)))
        assert made.line == "PASS bisect operations=4/4 identical verdict=IDENTICAL"
        assert checked(made)["exit_code"] == 0

    def test_within_the_tolerance(self):
        made = report(*rows_of("w_uv", [0]), wrong(RIGHT, layer=1, rows_out=0), atol=1.0)
        assert made.line == "PASS bisect operations=2/2 verdict=PASS"
        assert [row["status"] for row in checked(made)["operations"]][-1] == "within"

    def test_faults_of_some_layers_and_forms(self):
        rows = rows_of("w_uv", range(6)) + rows_of("lm_head", [None])
        rows = [
            wrong(row) if row.layer in (1, 2, 4) or (row.layer == 5 and row.form == "decode") else row for row in rows
        ]
        rows[-3] = wrong(rows[-3], hints=("shift",))
        made = report(*rows, sequences=(1, 2), unseen=("x", "y"))
        assert made.faulty == ("w_uv@layer1-2", "w_uv@layer4", "w_uv@layer5:decode", "lm_head:prefill")
        assert made.line == (
            "FAIL bisect operations=2/7 faulty=w_uv@layer1-2,w_uv@layer4,w_uv@layer5:decode,lm_head:prefill "
            "hint=first-tensor sequences=1/2 unseen=x,y verdict=DIVERGED"
        )
        assert checked(made)["exit_code"] == 1

    def test_nothing_compared_is_no_pass(self):
        made = report()
        assert (made.exit_code, made.line) == (2, "ERROR bisect operations=0/0 verdict=INCONCLUSIVE")


class TestHint:
    def test_what_fits_every_form_of_the_first_faulty_operation(self):
        first = [
            wrong(row, hints=hints)
            for row, hints in zip(
                rows_of("rope_query", [0]),
                [("position",), ("yarn-scale", "position"), ("yarn-scale", "position")],
                strict=True,
            )
        ]
        assert report(*first, wrong(RIGHT, hints=("shift",))).hint == "position"

    def test_one_form_alone(self):
        rows = rows_of("w_uv", [0])
        assert report(*rows[:2], wrong(rows[2])).hint == "prefill-decode"
        assert report(*rows[:2], wrong(rows[2], hints=("constant-scale",))).hint == "constant-scale"
        assert report(*map(wrong, rows)).hint == "first-tensor"
        assert report(*rows).hint is None


class TestGroups:
    def test_an_operation_is_one_row_and_its_faults_another(self):
        rows = rows_of("w_uv", range(3)) + rows_of("embed", [None])
        rows[4] = wrong(rows[4], max_abs=math.nan)
        rows[5] = wrong(rows[5], nmse=3.0)
        made = grouped(tuple(rows), False)
        assert [(g.rows[0].operation, g.status, len(g.rows)) for g in made] == [
            ("embed", "identical", 3),
            ("w_uv", "identical", 7),
            ("w_uv", "out", 2),
        ]
        assert math.isnan(made[2].max_abs)
        assert (made[2].max_ulp, made[2].nmse, made[2].rows_total, made[2].rows_out) == (7, 3.0, 10, 6)
        assert len(grouped(tuple(rows), True)) == 12

    def test_integers_have_no_distance(self):
        row = replace(RIGHT, operation="group_experts", max_abs=None, max_ulp=None, nmse=None)
        assert [(g.max_abs, g.max_ulp) for g in grouped((row,), False)] == [(None, None)]


class TestSchema:
    def test_names_the_format_and_all_codes(self):
        Draft202012Validator.check_schema(DOCUMENT)
        assert DOCUMENT["properties"]["schema"] == {"const": SCHEMA}
        assert DOCUMENT["$defs"]["hint"]["enum"] == list(HINTS)
        assert len({op.name for op in OPERATIONS}) == len(OPERATIONS)

    def test_what_is_not_finite_is_a_string(self):
        made = report(wrong(RIGHT, max_abs=math.inf, nmse=math.nan, nonfinite=3, hints=("nonfinite",)))
        row = checked(made)["operations"][0]
        assert (row["max_abs"], row["nmse"], made.hint) == ("inf", "nan", "nonfinite")

    def test_every_key_is_demanded_and_no_other_is_allowed(self):
        document = checked(report(*rows_of("w_uv", [0]), wrong(RIGHT, layer=1)))
        objects = [(), ("sequences",), ("tolerance",), ("operations", 0), ("operations", 3, "first_row")]
        for path in objects:
            for key in [*_at(document, path), "surplus"]:
                other = copy.deepcopy(document)
                if key == "surplus":
                    _at(other, path)[key] = 1
                else:
                    del _at(other, path)[key]
                assert not VALIDATOR.is_valid(other), (*path, key)

    @pytest.mark.parametrize(
        ("key", "value"),
        [("verdict", "IDENTICAL"), ("exit_code", 0), ("faulty", []), ("hint", None), ("line", "PASS"), ("hint", "x")],
    )
    def test_a_fault_can_be_no_pass(self, key, value):
        document = checked(report(wrong(RIGHT)))
        assert not VALIDATOR.is_valid({**document, key: value})


def _at(document, path):
    for key in path:
        document = document[key]
    return document

"""The JSON Schema in the package: every document keeps to it, and a document that is wrong anywhere does not."""

import copy
import json
from collections.abc import Iterator
from importlib import resources

import pytest
from jsonschema import Draft202012Validator
from report_cases import REPORTS

from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.json import SCHEMA, report_document, report_json

pytestmark = pytest.mark.quick

TEXT = resources.files("kdtr_cli.report").joinpath("schema/diff-1.json").read_text(encoding="utf-8")
DOCUMENT = json.loads(TEXT)
VALIDATOR = Draft202012Validator(DOCUMENT)


def test_the_schema_is_one_and_names_the_format():
    Draft202012Validator.check_schema(DOCUMENT)
    assert DOCUMENT["properties"]["schema"] == {"const": SCHEMA}


def test_the_cases_have_every_verdict():
    assert {make().verdict for make in REPORTS.values()} == set(Verdict)


@pytest.mark.parametrize("name", REPORTS)
def test_every_document_keeps_to_the_schema(name):
    VALIDATOR.validate(json.loads(report_json(REPORTS[name]())))


def objects(schema: object) -> Iterator[dict]:
    """Every part of the schema that describes an object."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for part in schema.values():
            yield from objects(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from objects(part)


def test_no_object_is_open_and_no_key_optional():
    found = list(objects(DOCUMENT))
    assert len(found) > 10
    for schema in found:
        if "propertyNames" in schema:
            continue
        assert schema["additionalProperties"] is False
        assert schema["required"] == list(schema["properties"])


def places(document: object, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value in the document; of a list, of its first two."""
    yield path
    items = document.items() if isinstance(document, dict) else ()
    for key, value in enumerate(document[:2]) if isinstance(document, list) else items:
        yield from places(value, (*path, key))


def at(document: object, path: tuple) -> object:
    for key in path:
        document = document[key]
    return document


def changed(document: dict, path: tuple, value: object) -> dict:
    other = copy.deepcopy(document)
    at(other, path[:-1])[path[-1]] = value
    return other


def is_free(path: tuple) -> bool:
    """What a finding or a round's difference quotes may be anything."""
    quotes = {"findings", "first_difference", "first_open"} & set(path)
    return bool(quotes) and any(key in ("golden", "run") for key in path)


WRONG = ["diverged", "rounds differ", "within", "trace parts within", "auto and suggested"]


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_another_type_is_refused_at_every_place(name):
    document = report_document(REPORTS[name]())
    tried = 0
    for path in places(document):
        if path and not is_free(path):
            assert not VALIDATOR.is_valid(changed(document, path, {"strange": 1})), path
            tried += 1
    assert tried > 100


@pytest.mark.parametrize("name", WRONG)
def test_a_key_too_many_or_too_few_is_refused_in_every_object(name):
    document = report_document(REPORTS[name]())
    for path in places(document):
        value = at(document, path)
        if not isinstance(value, dict) or is_free(path):
            continue
        other = copy.deepcopy(document)
        at(other, path)["surplus"] = 1
        assert not VALIDATOR.is_valid(other), path
        if path == ("totals", "verdicts"):
            continue
        for key in value:
            other = copy.deepcopy(document)
            del at(other, path)[key]
            assert not VALIDATOR.is_valid(other), (*path, key)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), "kdtr.diff/2"),
        (("verdict",), "FINE"),
        (("verdict",), "PASS"),
        (("exit_code",), 0),
        (("exit_code",), 3),
        (("totals", "reason"), "why"),
        (("totals", "line"), "PASS ar"),
        (("totals", "tokens"), -1),
        (("totals", "tokens"), 1.5),
        (("totals", "max_abs"), "NaN"),
        (("totals", "logits"), "top"),
        (("totals", "verdicts"), {"GOOD": 1}),
        (("totals", "verdicts"), {"PASS": 0}),
        (("totals", "first_divergence"), [0]),
        (("totals", "first_divergence"), [0, 1, 2]),
        (("tolerance", "on_tie", "value"), "ignore"),
        (("tolerance", "atol", "value"), -1),
        (("tolerance", "steps", "value"), 0),
        (("tolerance", "select", "value"), []),
        (("sequences", 0, "divergence", "golden_logits"), [1.0]),
        (("sequences", 0, "divergence", "golden_top"), [[1, 2.0, 3]]),
        (("sequences", 0, "golden_tokens"), [1.5]),
        (("findings", 0, "level"), "fatal"),
        (("findings", 0, "message"), ""),
        (("findings", 0, "code"), "No Code"),
    ],
)
def test_a_value_out_of_range_is_refused(path, value):
    document = report_document(REPORTS["diverged"]())
    assert VALIDATOR.is_valid(document)
    assert not VALIDATOR.is_valid(changed(document, path, value))


def test_what_can_not_be_judged_needs_a_reason():
    document = report_document(REPORTS["partial"]())
    assert VALIDATOR.is_valid(document)
    assert not VALIDATOR.is_valid(changed(document, ("totals", "reason"), None))

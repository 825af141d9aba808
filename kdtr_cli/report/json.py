"""The report as one JSON document, schema `kdtr.diff/1`; docs/judging.md describes every key.

JSON has no NaN and no infinity: they become the strings "nan", "inf" and "-inf". Lists of plain values stand on one
line, all else is indented.
"""

import json
import math
from dataclasses import fields, is_dataclass
from enum import Enum

import numpy as np

from kdtr_cli.parity.results import Report, SequenceResult
from kdtr_cli.parity.verdicts import Finding
from kdtr_cli.report.headroom import used_shares
from kdtr_cli.report.line import verdict_line

__all__ = ["SCHEMA", "report_document", "report_json"]

SCHEMA = "kdtr.diff/1"


def report_json(report: Report) -> str:
    """The document as text, with a newline at its end."""
    return _dump(report_document(report)) + "\n"


def report_document(report: Report) -> dict[str, object]:
    """The document as plain dicts, lists, strings, integers, finite floats, booleans and None."""
    return {
        "schema": SCHEMA,
        "verdict": report.verdict.value,
        "exit_code": int(report.exit_code),
        "totals": {
            "line": verdict_line(report),
            "reason": report.reason,
            "mode": report.mode,
            "golden": _plain(report.golden),
            "run": _plain(report.run),
            "teacher_forced": report.teacher_forced,
            "rounds": report.rounds,
            "unverified": list(report.unverified),
            "values": report.values,
            **_plain(report.totals),
        },
        "sequences": [_sequence(s) for s in report.sequences],
        "tolerance": _tolerance(report),
        "findings": [_finding(f) for f in report.findings],
    }


def _sequence(result: SequenceResult) -> dict[str, object]:
    document = _plain(result)
    document["findings"] = [_finding(f) for f in result.findings]
    document["all_tokens"] = result.all_tokens
    return document


def _tolerance(report: Report) -> dict[str, object]:
    bounds = {}
    for name in ("atol", "rtol", "max_ulp", "max_kl"):
        value = None if report.tolerance is None else getattr(report.tolerance, name)
        bounds[name] = None if value is None else {"value": value, "origin": report.tolerance.origins[name]}
    options = {
        name: {"value": _plain(getattr(report.options, name)), "origin": report.options.origins.get(name, "default")}
        for name in ("tolerance", "tolerance_factor", "on_tie", "allow_partial", "allow_loose", "steps", "select")
    }
    suggested = None
    if (suggestion := report.suggestion) is not None:
        suggested = {"reason": suggestion.reason, "rules": _plain(suggestion.rules)}
    return {
        "reference": report.reference,
        **bounds,
        **options,
        "rules": [_plain(rule) for rule in report.options.rules],
        "used": _plain(used_shares(report)),
        "suggested": suggested,
    }


def _finding(finding: Finding) -> dict[str, object]:
    return {name: _plain(getattr(finding, name)) for name in (f.name for f in fields(finding))}


def _plain(value: object) -> object:
    """`value` as JSON can hold it."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.metadata.get("json", True)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _dump(value: object, indent: str = "") -> str:
    deeper = indent + "  "
    if isinstance(value, dict) and value:
        lines = [f"{deeper}{json.dumps(k)}: {_dump(v, deeper)}" for k, v in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        return "[\n" + ",\n".join(f"{deeper}{_dump(v, deeper)}" for v in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)

"""The report as JUnit XML: one test suite a judgement, one test case a sequence, for the test pages of CI servers.

There is no one standard: this keeps to what Jenkins, GitLab and the GitHub actions all read. A sequence that differs is
a failure; one that can't be judged, or evidence that can't, is an error; nothing is ever "skipped", which would look
like a pass. The counts of the suite are those of its cases; the totals of the judgement are its properties.

All of it is ASCII. What XML 1.0 can't hold (control characters, lone surrogates) stands as an escape: ``\\x1b``.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from xml.etree import ElementTree

from kdtr_cli.errors import Exit
from kdtr_cli.parity.results import Report, SequenceResult
from kdtr_cli.parity.verdicts import Finding, Verdict, exit_code
from kdtr_cli.report.line import hinted, safe, verdict_line
from kdtr_cli.report.rest import Rest, rest_of

__all__ = ["report_junit"]

#: As many findings a case shows.
MAX_FINDINGS = 20

_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>\n'
#: White space other than the blank is allowed, but an attribute doesn't keep it.
_NOT_IN_XML = re.compile("[^\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class _Case:
    """A test case: what it is called, its verdict, one line on why, and more lines."""

    name: str
    verdict: Verdict
    message: str
    lines: tuple[str, ...] = ()


def report_junit(report: Report) -> str:
    """The document, with a newline at its end."""
    cases = list(_cases(report))
    line = verdict_line(report)
    root = ElementTree.Element("testsuites", name="kdtr diff")
    suite = ElementTree.SubElement(root, "testsuite", name=_clean(_name(report)))
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(report):
        ElementTree.SubElement(properties, "property", name=name, value=_clean(value))
    counts = {"failure": 0, "error": 0}
    taken: dict[str, int] = {}
    for case in cases:
        name = _unique(_clean(case.name), taken)
        element = ElementTree.SubElement(suite, "testcase", classname=_clean(_classname(report)), name=name, time="0")
        kind = _kind(case.verdict, report)
        if kind is None:
            if case.lines:  # a tie that is let pass
                ElementTree.SubElement(element, "system-out").text = "".join(f"{_clean(text)}\n" for text in case.lines)
            continue
        counts[kind] += 1
        bad = ElementTree.SubElement(element, kind, message=_clean(case.message), type=case.verdict.value)
        bad.text = "".join(f"{_clean(text)}\n" for text in (*case.lines, line))
    ElementTree.SubElement(suite, "system-out").text = line + "\n"
    for element in (root, suite):
        for key, count in (("tests", len(cases)), ("failures", counts["failure"]), ("errors", counts["error"])):
            element.set(key, str(count))
        element.set("skipped", "0")
        element.set("time", "0")
    ElementTree.indent(root)
    return _DECLARATION + ElementTree.tostring(root, encoding="us-ascii", xml_declaration=False).decode() + "\n"


def _cases(report: Report) -> Iterator[_Case]:
    """A case for each sequence that is listed, for each that only the run has, for those that are not listed (one for
    each verdict), and one for what is wrong with the pair as a whole."""
    worst = Exit.AGREES
    for case in (*_pair(report), *map(_sequence, report.sequences), *_unlisted(rest_of(report))):
        worst = max(worst, exit_code(case.verdict, report.options.on_tie))
        yield case
    # whatever a report may lack, no page that shows green stands beside an exit code that isn't 0
    if worst is Exit.AGREES and report.exit_code is not Exit.AGREES:
        yield _Case("the pair", report.verdict, report.reason or verdict_line(report))


def _pair(report: Report) -> Iterator[_Case]:
    found = [f for f in report.findings if f.verdict is not None]
    if report.sequences:
        found = [f for f in found if f.sequence is None]
    if found:
        message = f"{found[0].verdict.value}: {found[0].message}"
        yield _Case("the pair", found[0].verdict, message, _messages(found))


def _sequence(result: SequenceResult) -> _Case:
    found = [f for f in result.findings if f.verdict is not None]
    parts = []
    if (d := result.divergence) is not None and result.run_tokens is not None:
        golden, run = ("nothing" if t is None else str(t) for t in (d.golden_token, d.run_token))
        parts.append(f"first divergence at step {d.step}: golden {golden}, run {run}")
        if d.golden_margin is not None:
            parts.append(f"margin {d.golden_margin:.7g}")
    elif found:
        parts.append(found[0].message)
    if result.logits.max_abs is not None:
        parts.append(f"max abs logit diff {result.logits.max_abs:.3e}")
    return _Case(result.id, result.verdict, f"{result.verdict.value}: {'; '.join(parts)}", _messages(found))


def _unlisted(rest: Rest) -> Iterator[_Case]:
    for finding in rest.extra:
        yield _Case(finding.sequence or "", finding.verdict or Verdict.DIVERGED, finding.message)
    if rest.more_extra:
        message = f"{rest.more_extra} more sequences that the golden lacks"
        yield _Case(message, Verdict.DIVERGED, message)
    for verdict, count in rest.verdicts.items():
        message = f"{count} more sequences, not listed: {verdict.value}"
        yield _Case(f"more sequences: {verdict.value}", verdict, message)


def _messages(findings: list[Finding]) -> tuple[str, ...]:
    lines = [f"{f.level.value}: {safe(f.message)} [{safe(f.code)}]{hinted(f)}" for f in findings[:MAX_FINDINGS]]
    if len(findings) > MAX_FINDINGS:
        lines.append(f"and {len(findings) - MAX_FINDINGS} more findings (--format json lists all)")
    return tuple(lines)


def _kind(verdict: Verdict, report: Report) -> str | None:
    """The element that says what a verdict is; None: it passes."""
    match exit_code(verdict, report.options.on_tie):
        case Exit.AGREES:
            return None
        case Exit.DIFFERS:
            return "failure"
    return "error"


def _properties(report: Report) -> Iterator[tuple[str, str]]:
    t = report.totals
    yield "verdict", report.verdict.value
    yield "exit_code", str(int(report.exit_code))
    for name in ("sequences", "sequences_available", "missing", "extra", "tokens_equal", "tokens"):
        yield name, str(getattr(t, name))
    for verdict, count in t.verdicts.items():
        yield f"sequences.{verdict}", str(count)


def _name(report: Report) -> str:
    sides = [side.name or side.kind for side in (report.golden, report.run) if side is not None]
    return " / ".join(sides) or "kdtr diff"


def _classname(report: Report) -> str:
    """The same on every machine: the golden's file name, not its folder, and the run's mode. A dot in one of them would
    be a package to Jenkins."""
    golden = "golden" if report.golden is None else PurePath(report.golden.name).stem or "golden"
    return ".".join(part.replace(".", "_") for part in ("kdtr", golden, report.mode))


def _clean(text: str) -> str:
    return _NOT_IN_XML.sub(lambda m: m[0].encode("unicode_escape").decode(), text)


def _unique(name: str, taken: dict[str, int]) -> str:
    """GitLab keeps one of two cases of the same name."""
    taken[name] = taken.get(name, 0) + 1
    return name if taken[name] == 1 else _unique(f"{name} ({taken[name]})", taken)

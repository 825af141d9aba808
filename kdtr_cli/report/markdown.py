"""The report as Markdown, for the summary page of a GitHub Actions step: verdict, line, sequences, findings.

What comes from bundles is escaped, character by character: no id makes a link, a heading, HTML or another cell.
"""

import string
from collections.abc import Iterator

from kdtr_cli.parity.results import Report, SequenceResult
from kdtr_cli.parity.verdicts import Verdict, first_word
from kdtr_cli.report.line import hinted, safe, verdict_line
from kdtr_cli.report.rest import rest_of

__all__ = ["report_markdown"]

#: More are counted only; those that do not agree come first.
MAX_SEQUENCES = 100
MAX_FINDINGS = 100
#: A longer text in a cell or an item is cut.
MAX_TEXT = 1000

_GOOD = (Verdict.IDENTICAL, Verdict.PASS)
_HEADER = (
    "| # | sequence | verdict | tokens equal | first divergence | margin | max abs logit diff |",
    "|--:|---|---|--:|---|--:|--:|",
)
# CommonMark lets a backslash stand before any ASCII punctuation
_ESCAPES = str.maketrans({mark: f"\\{mark}" for mark in string.punctuation})


def report_markdown(report: Report, limit: int) -> str:
    """The summary in at most `limit` bytes (it is ASCII), ending with a newline; rows are left out, and counted, until
    it fits. Empty, if not even the verdict does."""
    rows = sorted(report.sequences, key=lambda s: s.verdict in _GOOD)
    n_rows, n_findings = min(len(rows), MAX_SEQUENCES), min(len(report.findings), MAX_FINDINGS)
    while True:
        text = "\n".join([*_head(report), *_sequences(report, rows[:n_rows]), *_findings(report, n_findings)]) + "\n"
        if len(text) <= limit:
            return text
        if not n_rows and not n_findings:
            return ""
        n_rows, n_findings = n_rows // 2, n_findings // 2


def _head(report: Report) -> Iterator[str]:
    yield f"### kdtr diff: {first_word(report.exit_code)} ({_escape(report.verdict.value)})"
    yield ""
    line = verdict_line(report)
    yield f"    {_cut(line)}"  # code needs no escape
    sides = [side for side in (report.golden, report.run) if side is not None]
    if sides:
        yield ""
        yield ", ".join(f"{side.kind} {_escape(side.name)}" for side in sides)


def _sequences(report: Report, shown: list[SequenceResult]) -> Iterator[str]:
    if shown:
        yield ""
        yield from _HEADER
        for result in sorted(shown, key=lambda s: s.index):
            yield _row(result)
    rest = rest_of(report)
    if hidden := report.totals.sequences - len(shown):
        counts = ", ".join(f"{n} {_escape(name)}" for name, n in report.totals.verdicts.items())
        yield ""
        yield f"Sequences that are not shown: {hidden}. All together: {counts}"
    if extra := len(rest.extra) + rest.more_extra:
        yield ""
        yield f"Sequences that only the run has: {extra}"


def _row(result: SequenceResult) -> str:
    d = result.divergence
    if result.run_tokens is None:
        where = "the run lacks it"
    elif d is None:
        where = ""
    else:
        golden, run = ("nothing" if t is None else str(t) for t in (d.golden_token, d.run_token))
        where = f"step {d.step}: golden {golden}, run {run}"
    verdict = _escape(result.verdict.value)
    cells = (
        str(result.index),
        _escape(result.id),
        verdict if result.verdict in _GOOD else f"**{verdict}**",
        f"{result.tokens_equal} / {len(result.golden_tokens)}",
        where,
        "" if d is None or d.golden_margin is None else f"{d.golden_margin:.3g}",
        "" if result.logits.max_abs is None else f"{result.logits.max_abs:.3e}",
    )
    return f"| {' | '.join(cells)} |"


def _findings(report: Report, count: int) -> Iterator[str]:
    if not report.findings:
        return
    yield ""
    yield f"<details><summary>Findings: {len(report.findings)}</summary>"
    yield ""
    for finding in report.findings[:count]:
        hint = f" {_escape(hinted(finding))}" if finding.hint else ""
        yield f"- **{finding.level.value}** {_escape(finding.message)} \\[{_escape(finding.code)}\\]{hint}"
    if more := len(report.findings) - count:
        yield f"- and {more} more (--format json lists all)"
    yield ""
    yield "</details>"


def _escape(text: str) -> str:
    return _cut(safe(text)).translate(_ESCAPES)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."

"""The report for a GitHub Actions log: annotations by workflow commands, the verdict line last.

GitHub shows ten annotations of each kind of a step and drops the rest in silence; so the rest is counted here, in one
plain line.
"""

from collections.abc import Iterator

from kdtr_cli.errors import Exit
from kdtr_cli.parity.results import Report
from kdtr_cli.parity.verdicts import Level
from kdtr_cli.report.line import hinted, safe, verdict_line

__all__ = ["report_github"]

MAX_ANNOTATIONS = 10
#: An annotation longer than this (an id may be of any length) is cut.
MAX_MESSAGE = 2000

_COMMANDS = {Level.ERROR: "error", Level.WARNING: "warning", Level.NOTE: "notice"}


def report_github(report: Report) -> str:
    """The lines, with a newline at the end."""
    lines = list(_annotations(report))
    if report.exit_code is not Exit.AGREES and not any(line.startswith("::error ") for line in lines):
        lines.insert(0, _command("error", f"kdtr diff: {report.verdict.value}", verdict_line(report)))
    return "\n".join([*lines, verdict_line(report)]) + "\n"


def _annotations(report: Report) -> Iterator[str]:
    more = []
    for level, command in _COMMANDS.items():
        found = [f for f in report.findings if f.level is level]
        for finding in found[:MAX_ANNOTATIONS]:
            led_to = "" if finding.verdict is None else f" {finding.verdict.value}"
            yield _command(
                command, f"kdtr diff:{led_to} [{safe(finding.code)}]", safe(finding.message) + hinted(finding)
            )
        if len(found) > MAX_ANNOTATIONS:
            more.append(f"{len(found) - MAX_ANNOTATIONS} more {command}s")
    if more:
        yield f"{', '.join(more)} without an annotation (--format json lists all)"


def _command(command: str, title: str, message: str) -> str:
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 3] + "..."
    return f"::{command} title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")

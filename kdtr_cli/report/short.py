"""The report in a few lines, for the message of a failed assertion: the rules, what weighs most, the verdict line."""

from collections.abc import Sequence

from kdtr_cli.parity.results import Report
from kdtr_cli.parity.tolerances import Tolerance
from kdtr_cli.report.line import hinted, safe, verdict_line

__all__ = ["report_short"]

MAX_FINDINGS = 8


def report_short(report: Report, notes: Sequence[str] = ()) -> str:
    """Lines of ASCII, what weighs most first (test runners show the first line alone), then the rules and `notes`, the
    verdict line last, without a newline at the end."""
    heavy = [f for f in report.findings if f.verdict is not None] or list(report.findings)
    lines = [f"{f.level.value}: {safe(f.message)} [{safe(f.code)}]{hinted(f)}" for f in heavy[:MAX_FINDINGS]]
    if rest := len(report.findings) - len(heavy[:MAX_FINDINGS]):
        lines.append(f"and {rest} more findings")
    if report.tolerance is not None:
        against = f" against the golden's {report.reference} logits" if report.reference else ""
        lines.append(f"judged by {_bounds(report.tolerance)}{against}")
    return "\n".join([*lines, *notes, verdict_line(report)])


def _bounds(tolerance: Tolerance) -> str:
    names = ("atol", "rtol", "max_ulp", "max_kl")
    held = [(name, getattr(tolerance, name)) for name in names if getattr(tolerance, name) is not None]
    return ", ".join(f"{name} {value:g} ({safe(tolerance.origins[name])})" for name, value in held)

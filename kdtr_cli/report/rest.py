"""What the totals of a report count and its list of sequences does not show: a sweep's report lists a part, and a
sequence that only the run has is none of the golden's."""

from collections import Counter
from dataclasses import dataclass

from kdtr_cli.parity.results import Report
from kdtr_cli.parity.verdicts import Finding, Verdict

__all__ = ["Rest", "rest_of"]


@dataclass(frozen=True)
class Rest:
    """`verdicts`: how many judged sequences of each verdict are not listed. `extra`: what was found of sequences that
    only the run has, of which there are `more_extra` more."""

    verdicts: dict[Verdict, int]
    extra: tuple[Finding, ...]
    more_extra: int


def rest_of(report: Report) -> Rest:
    """Nothing, where nothing could be judged: the findings say why."""
    if not report.sequences:
        return Rest({}, (), 0)
    listed = Counter(s.verdict for s in report.sequences)
    verdicts = {v: n for v in Verdict if (n := report.totals.verdicts.get(v.value, 0) - listed[v]) > 0}
    extra = tuple(f for f in report.findings if f.code == "sequence.extra")
    return Rest(verdicts, extra, max(0, report.totals.extra - len(extra)))

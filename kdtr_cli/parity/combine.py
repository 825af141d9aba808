"""One report from the reports of a sweep's shards: the same verdict and totals as of one judgement of all.

Shards are added one after another, in order, and let go: what is kept of them is bounded. Sequences that agree are the
first to be left out of the list; totals and verdict count them all.
"""

from dataclasses import replace

from kdtr_cli.parity.drawn import lightened
from kdtr_cli.parity.results import Report, SequenceResult, Side, Totals
from kdtr_cli.parity.suggest import Suggestion, add_suggestions
from kdtr_cli.parity.totals import add_totals, logits_forms, poorest
from kdtr_cli.parity.traces import TraceResult
from kdtr_cli.parity.verdicts import Finding, Level, Verdict, combine, exit_code, ordered

__all__ = ["MAX_FINDINGS", "MAX_SEQUENCES", "Combined"]

#: As many sequences and findings a report of a sweep lists at most, those first that weigh most.
MAX_SEQUENCES = 1000
MAX_FINDINGS = 1000
#: And as many tensors of a sequence's trace: the first that are out.
MAX_TENSORS = 16

_GOOD = (Verdict.IDENTICAL, Verdict.PASS)

#: What the reports of all shards must have in common: field of the report, what it is to the user.
_COMMON = {
    "mode": "modes",
    "tolerance": "tolerances",
    "reference": "reference logits",
    "teacher_forced": "teacher forcing",
    "rounds": "comparisons of rounds",
    "unverified": "digests to compare",
    "values": "values",
}


class Combined:
    """The running sum of the reports of shards."""

    def __init__(self) -> None:
        self._first: Report | None = None  # of those that could be judged
        self._refused: Report | None = None  # the first that could not be judged at all
        self._totals = Totals()
        self._forms: tuple[set[str], set[str]] = (set(), set())
        self._verdicts: list[Verdict] = []
        self._sequences: list[SequenceResult] = []
        self._general: dict[str, Finding] = {}  # once, though every shard finds them
        self._particular: list[Finding] = []
        self._dropped = 0
        self._suggestion: Suggestion | None = None

    def add(self, report: Report, first: int) -> None:
        """Add the next shard's report; ``first``: the place of its first sequence in the whole."""
        self._verdicts.append(report.verdict)
        self._add_findings(report)
        self._suggestion = add_suggestions(self._suggestion, report.suggestion)
        if report.verdict is Verdict.INVALID and not report.sequences:
            self._refused = self._refused or report
            self._totals = replace(self._totals, tokens=self._totals.tokens + report.totals.tokens)
            return
        results = [replace(r, index=r.index + first, trace=_brief(r.trace)) for r in report.sequences]
        begun = self._first is not None
        self._totals = add_totals(self._totals, report.totals, first, begun)
        for known, new in zip(self._forms, logits_forms(results), strict=True):
            known |= new
        self._sequences = lightened(_heaviest(self._sequences + results))
        if self._first is None:
            self._first = report
            return
        for field, what in _COMMON.items():
            one, other = getattr(self._first, field), getattr(report, field)
            if one != other:
                message = f"the shards can't be judged together: they have other {what}: {one}, {other}"
                self.refuse(Finding(Level.ERROR, "sweep.mixed", message, Verdict.INVALID))
                return

    def skip(self, sequences: int) -> None:
        """Count a shard that holds nothing to be judged."""
        available = self._totals.sequences_available + sequences
        self._totals = replace(self._totals, sequences_available=available)

    def refuse(self, finding: Finding) -> None:
        """Add a finding that makes the whole INVALID."""
        self._verdicts.append(Verdict.INVALID)
        self._general.setdefault(finding.message, finding)

    def report(self, golden: str, run: str) -> Report:
        """The whole; ``golden`` and ``run`` are the names of the two sweeps. ValueError: nothing was added."""
        base = self._refused or self._first
        if base is None:
            raise ValueError("no shard was added")
        verdict = combine(self._verdicts)
        findings = ordered([*self._general.values(), *self._particular])
        dropped = self._dropped + max(0, len(findings) - MAX_FINDINGS)
        findings = findings[:MAX_FINDINGS]
        reason = next((f.message for f in findings if f.verdict is verdict), None)
        if dropped:
            message = f"{dropped} more findings are left out: the report of a sweep lists {MAX_FINDINGS}"
            findings += (Finding(Level.NOTE, "sweep.findings", message),)
        refused = self._refused is not None
        totals = self._totals
        if refused:
            totals = replace(self._refused.totals, tokens=totals.tokens)
        else:
            logits, prompts = self._forms
            totals = replace(totals, logits=poorest(logits), prompt_logits=poorest(prompts) if prompts else None)
        return replace(
            base,
            verdict=verdict,
            exit_code=exit_code(verdict, base.options.on_tie),
            golden=_side(base.golden, golden),
            run=_side(base.run, run),
            totals=totals,
            sequences=() if refused else tuple(sorted(self._sequences, key=lambda r: r.index)),
            findings=findings,
            reason=reason if verdict in (Verdict.INVALID, Verdict.INCONCLUSIVE) else None,
            suggestion=self._suggestion,
        )

    def _add_findings(self, report: Report) -> None:
        """Findings of sequences apart from those of the whole, which come once and, among equals, first."""
        for finding in report.findings:
            if finding.sequence is None:
                self._general.setdefault(finding.message, finding)
            else:
                self._particular.append(finding)
        if len(self._particular) > 2 * MAX_FINDINGS:
            kept = ordered(self._particular)[:MAX_FINDINGS]
            self._dropped += len(self._particular) - len(kept)
            self._particular = list(kept)


def _side(side: Side | None, name: str) -> Side | None:
    """The sweep as a side: what is said of one shard's file alone is left out."""
    if side is None:
        return None
    provenance = tuple((path, text) for path, text in side.provenance if not path.endswith("manifest_sha256"))
    return replace(side, name=name, provenance=provenance)


def _brief(trace: TraceResult | None) -> TraceResult | None:
    if trace is None:
        return None
    out = [t for t in trace.tensors if t.rows_out and t is not trace.first]
    return replace(trace, tensors=tuple([t for t in (trace.first, *out) if t is not None][:MAX_TENSORS]))


def _heaviest(results: list[SequenceResult]) -> list[SequenceResult]:
    """At most MAX_SEQUENCES of them: those that do not agree before those that do, earlier ones before later."""
    if len(results) <= MAX_SEQUENCES:
        return results
    return sorted(results, key=lambda r: (r.verdict in _GOOD, r.index))[:MAX_SEQUENCES]

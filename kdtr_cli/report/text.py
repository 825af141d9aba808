"""The report for people: what was compared and by which rules, both token lists one above the other, what was found,
and the verdict line last. Plain ASCII, so that it survives any terminal, pipe and log."""

from collections.abc import Iterator, Sequence

import numpy as np

from kdtr_cli.parity.results import Report, RoundsResult, SequenceResult, Side, StepDetail
from kdtr_cli.parity.tally import LogitsResult
from kdtr_cli.parity.tolerances import Tolerance
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.headroom import suggestion_lines, used_line
from kdtr_cli.report.line import safe, verdict_line

__all__ = ["report_text"]

#: Longer token lists are shown in part.
MAX_TOKENS = 96
#: More sequences than these are counted only; those that do not agree are shown first.
MAX_SEQUENCES = 32
MAX_FINDINGS = 40
_LABEL = 12


def report_text(report: Report, width: int = 100) -> str:
    """The whole report for lines of `width` characters, with a newline at its end."""
    lines = [*_header(report)]
    for result in _shown(report.sequences):
        lines += ["", *_sequence(result, report.teacher_forced, width)]
    # of a sweep the report lists a part
    if hidden := report.totals.sequences - MAX_SEQUENCES:
        counts = ", ".join(f"{n} {name}" for name, n in report.totals.verdicts.items())
        if hidden > 0:
            lines += ["", f"{hidden} more sequences are not shown; all together: {counts}"]
    if report.suggestion is not None:
        first, *more = suggestion_lines(report.suggestion)
        lines += ["", f"{'suggest':<8}{safe(first)}", *(f"{'':<10}{safe(line)}" for line in more)]
    if report.findings:
        lines += ["", *_findings(report)]
    lines += ["", verdict_line(report)]
    return "\n".join(lines) + "\n"


def _header(report: Report) -> Iterator[str]:
    for label, side in (("golden", report.golden), ("run", report.run)):
        if side is not None:
            yield f"{label:<8}{_side(side)}"
    if report.tolerance is not None:
        against = f"the golden's {report.reference} logits" if report.reference else "no logits: the golden has none"
        yield f"{'rule':<8}{_rule(report.tolerance)}, against {against}"
        if (used := used_line(report)) is not None:
            yield f"{'used':<8}{used}"
    o = report.options
    said = [
        f"{name} {safe(str(value))} ({safe(o.origin(name))})"
        for name, value, default in (
            ("on_tie", o.on_tie, "fail"),
            ("allow_partial", o.allow_partial, False),
            ("allow_loose", o.allow_loose, False),
            ("steps", o.steps, None),
            ("select", o.select and ",".join(o.select), None),
        )
        if value != default
    ]
    if said:
        yield f"{'options':<8}{', '.join(said)}"
    t = report.totals
    if report.sequences:
        yield (
            f"{'judged':<8}{t.sequences} of {t.sequences_available} sequences, {t.steps} of {t.steps_available} steps: "
            f"{t.rows_compared} of {t.rows} rows of logits compared, {t.rows_identical} of them identical"
        )
        if t.rows_compared < t.rows and t.first_divergence is not None and not report.teacher_forced:
            yield f"{'':<8}(logits after the first divergence follow other tokens: they are not compared)"


def _side(side: Side) -> str:
    parts = [safe(side.name) or side.kind]
    if side.kind == "run":
        parts.append(safe(side.mode))
    parts += [f"tier {safe(side.tier)}", " + ".join(safe(a) for a in side.arithmetic)]
    parts += [f"{key} {safe(value)}" for key, value in side.details if key in ("device", "batch", "drafter", "budget")]
    return ", ".join(part for part in parts if part)


def _rule(tolerance: Tolerance) -> str:
    origins = tolerance.origins
    rules = []
    if tolerance.atol is not None and tolerance.rtol is not None:
        bounds = " and ".join(f"{n} {getattr(tolerance, n):g} ({safe(origins[n])})" for n in ("atol", "rtol"))
        rules.append(f"|run - golden| <= atol + rtol * |golden| with {bounds}")
    if tolerance.max_ulp is not None:
        rules.append(f"at most {tolerance.max_ulp} ULP ({safe(origins['max_ulp'])})")
    if tolerance.max_kl is not None:
        rules.append(f"KL at most {tolerance.max_kl:g} ({safe(origins['max_kl'])})")
    return " and ".join(rules)


def _shown(sequences: Sequence[SequenceResult]) -> list[SequenceResult]:
    if len(sequences) <= MAX_SEQUENCES:
        return list(sequences)
    good = (Verdict.IDENTICAL, Verdict.PASS)
    by_need = sorted(sequences, key=lambda s: s.verdict in good)[:MAX_SEQUENCES]
    return sorted(by_need, key=lambda s: s.index)


def _sequence(result: SequenceResult, teacher_forced: bool, width: int) -> Iterator[str]:
    yield f"sequence {result.index} {safe(repr(result.id))}: {result.verdict.value}"
    counts = f"  prompt {result.prompt_length} ids; golden {_length(result.golden_length, result.golden_finish)}"
    if result.run_tokens is None:
        yield f"{counts}; the run lacks it"
        yield from _tokens(result.golden_tokens, np.empty(0, np.int32), False, width)
        return
    yield f"{counts}, run {_length(result.run_length, result.run_finish)}; {result.tokens_equal} equal"
    yield f"  logits {_logits(result.logits)}"
    if result.prompt_logits is not None:
        yield f"  prompt logits {_logits(result.prompt_logits)}"
    if result.rounds is not None:
        yield f"  rounds {_rounds(result.rounds)}"
    yield from _tokens(result.golden_tokens, result.run_tokens, teacher_forced, width)
    if result.divergence is not None:
        yield from _divergence(result.divergence)


def _length(n: int | None, finish: str | None) -> str:
    return f"{n} tokens ({finish})"


def _logits(r: LogitsResult) -> str:
    if r.form == "none":
        return "none to compare"
    text = f"{r.form}: {r.rows_compared} of {r.rows_total} rows compared, {r.rows_identical} identical"
    if r.max_abs is not None:
        text += f"; max abs {r.max_abs:.3e}"
        if r.max_abs_at is not None and r.max_abs != 0:
            text += f" at row {r.max_abs_at.row} id {r.max_abs_at.token}"
    if r.max_ulp is not None:
        text += f", max ULP {r.max_ulp}"
    if r.max_kl is not None:
        text += f", max KL {r.max_kl:.3e}"
    if r.rows_out:
        text += f"; {r.values_out} values in {r.rows_out} rows out of tolerance"
    return text


def _rounds(r: RoundsResult) -> str:
    sides = (("golden", r.golden_rounds, r.golden_tau), ("run", r.run_rounds, r.run_tau))
    if not r.compared or r.golden_rounds is None or r.run_rounds is None:
        held = ", ".join(f"{name} {_held(rounds, mean)}" for name, rounds, mean in sides)
        return f"not compared: {held}"
    text = f"{r.equal} of {r.judged} equal; tau " + ", ".join(f"{name} {_tau(mean)}" for name, _, mean in sides)
    if r.first_difference is not None:
        text += f"; first difference in {safe(r.first_difference.where)}"
    return text


def _held(rounds: int | None, mean: float | None) -> str:
    return "none to read" if rounds is None else f"{rounds} rounds (tau {_tau(mean)})"


def _tau(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.2f}"


def _tokens(golden: np.ndarray, run: np.ndarray, mark_all: bool, width: int) -> Iterator[str]:
    """Both lists in columns, wrapped; the first difference marked, in a teacher-forced run every one."""
    total = max(len(golden), len(run))
    common = min(len(golden), len(run))
    parted = [*np.flatnonzero(golden[:common] != run[:common]).tolist(), *range(common, total)]
    first = parted[0] if parted else None
    marks = set(parted if mark_all else parted[:1])
    end = 0
    for lo, hi in _windows(total, first):
        if lo > end:
            yield _gap(end, lo, parted)
        yield from _columns(golden, run, lo, hi, marks, width)
        end = hi
    if end < total:
        yield _gap(end, total, parted)


def _windows(total: int, first: int | None) -> list[tuple[int, int]]:
    """The ranges of a list of `total` tokens to show: all, or the start, the place of the difference and the end."""
    if total <= MAX_TOKENS:
        return [(0, total)] if total else []
    wanted = [(0, 24), (total - 8, total)]
    if first is not None:
        wanted.append((max(0, first - 12), min(total, first + 12)))
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(wanted):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return merged


def _gap(lo: int, hi: int, parted: list[int]) -> str:
    differ = sum(lo <= step < hi for step in parted)
    what = "all equal" if not differ else f"{differ} differ"
    return f"{'...':>{_LABEL - 2}}  steps {lo} to {hi - 1} left out: {what}"


def _columns(golden: np.ndarray, run: np.ndarray, lo: int, hi: int, marks: set[int], width: int) -> Iterator[str]:
    rows = {
        "step": [str(i) for i in range(lo, hi)],
        "golden": [str(golden[i]) if i < len(golden) else "-" for i in range(lo, hi)],
        "run": [str(run[i]) if i < len(run) else "-" for i in range(lo, hi)],
    }
    cell = max(len(text) for row in rows.values() for text in row)
    each = max(1, (width - _LABEL) // (cell + 1))
    for start in range(0, hi - lo, each):
        for label, row in rows.items():
            cells = " ".join(text.rjust(cell) for text in row[start : start + each])
            yield f"{label:>{_LABEL - 2}}  {cells}"
        steps = range(lo + start, min(lo + start + each, hi))
        if any(step in marks for step in steps):
            ticks = " ".join(("^" * cell if step in marks else "").rjust(cell) for step in steps)
            yield f"{'':>{_LABEL - 2}}  {ticks}".rstrip()


def _divergence(d: StepDetail) -> Iterator[str]:
    golden, run = ("nothing" if t is None else str(t) for t in (d.golden_token, d.run_token))
    yield f"  first divergence at step {d.step}: golden {golden}, run {run}"
    if d.golden_margin is not None or d.run_margin is not None:
        yield f"    margin (top1 - top2): golden {_number(d.golden_margin)}, run {_number(d.run_margin)}"
    if d.tie or d.recorded_tie:
        said = ["the run's token is within tolerance of the golden's maximum"] if d.tie else []
        said += ["the golden recorded that its float64 argmax is another token"] if d.recorded_tie else []
        yield f"    tie: {'; '.join(said)}"
    if d.golden_top or d.run_top:
        yield f"    {'logits':<10}{'of ' + golden:>16}{'of ' + run:>16}"
        for label, logits in (("golden", d.golden_logits), ("run", d.run_logits)):
            yield f"    {label:<10}" + "".join(f"{_number(v):>16}" for v in logits)
        yield f"    {'top 5':<10}{'golden':>24}{'run':>24}"
        for rank in range(max(len(d.golden_top), len(d.run_top))):
            yield f"    {rank + 1:<10}" + "".join(_entry(top, rank) for top in (d.golden_top, d.run_top))


def _entry(top: tuple[tuple[int, float], ...], rank: int) -> str:
    return f"{top[rank][0]:>9}{top[rank][1]:>15.7g}" if rank < len(top) else f"{'-':>24}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.7g}"


def _findings(report: Report) -> Iterator[str]:
    for finding in report.findings[:MAX_FINDINGS]:
        yield f"{finding.level.value:<8}{safe(finding.message)} [{safe(finding.code)}]"
    if len(report.findings) > MAX_FINDINGS:
        yield f"{'':<8}and {len(report.findings) - MAX_FINDINGS} more findings (--format json lists all)"

"""The report for people: what was compared and by which rules, a table of the sequences, of each a strip of its steps
and both token lists one above the other, what was found, and the verdict line last.

Where it goes to no terminal it is plain ASCII, so that it survives any pipe and log; a terminal gets the same lines
with colours, and better marks where it takes UTF-8.
"""

import io
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from kdtr_cli.parity.results import Report, RoundsResult, SequenceResult, Side
from kdtr_cli.parity.tally import LogitsResult
from kdtr_cli.parity.tolerances import TensorRule, Tolerance
from kdtr_cli.parity.traces import TraceResult, step_of
from kdtr_cli.parity.verdicts import Level, Verdict
from kdtr_cli.report.divergence import Look, divergence, passage
from kdtr_cli.report.headroom import suggestion_lines, used_line
from kdtr_cli.report.line import hinted, safe, verdict_line
from kdtr_cli.report.meaning import MEANS
from kdtr_cli.report.overview import overview_table, verdict_style
from kdtr_cli.report.strip import legend, strip
from kdtr_cli.report.windows import windows

__all__ = ["Part", "report_parts", "report_text"]

#: More sequences than these are counted only; those that do not agree are shown first.
MAX_SEQUENCES = 32
#: With more sequences than these, one that agrees stands in the table alone.
MAX_DETAILED = 8
MAX_FINDINGS = 40
#: Of the tensors that are out, the first ones.
MAX_TENSORS = 6
_LABEL = 12
_GOOD = (Verdict.IDENTICAL, Verdict.PASS)

#: What rich prints, or a line as it is.
Part = object

_LEVELS = {Level.ERROR: "red", Level.WARNING: "yellow", Level.NOTE: "dim"}


def report_text(report: Report, width: int = 100, text_of: Callable[[int], str | None] | None = None) -> str:
    """The whole report in plain ASCII for lines of `width` characters, with a newline at its end."""
    plain = Console(file=io.StringIO(), width=100_000, color_system=None, force_terminal=False, legacy_windows=False)
    lines = []
    for part in report_parts(report, Look(width, text_of=text_of)):
        if isinstance(part, str | Text):
            lines.append(str(part))
        else:
            with plain.capture() as captured:
                plain.print(part)
            lines += [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join([*lines, verdict_line(report)]) + "\n"


def report_parts(report: Report, look: Look) -> Iterator[Part]:
    """All of the report but its last line, part by part: lines (str or rich's Text), and tables."""
    verdict = (report.verdict.value, verdict_style(report.verdict))
    yield Text.assemble(
        "verdict ", verdict, f": {MEANS[report.verdict] if report.reason is None else safe(report.reason)}"
    )
    yield from _header(report)
    shown = _shown(report.sequences)
    if shown:
        yield ""
        yield overview_table(shown)
        yield from legend(shown, report.teacher_forced, look.unicode)
    detailed = shown if len(shown) <= MAX_DETAILED else [s for s in shown if s.verdict not in _GOOD]
    for result in detailed:
        yield ""
        yield from _sequence(result, report.teacher_forced, look)
    if len(detailed) < len(shown):
        agree = f"{len(shown) - len(detailed)} sequences that agree stand in the table alone"
        yield ""
        yield f"{agree}; kdtr diff --select ID shows one"
    # of a sweep the report lists a part
    if (hidden := report.totals.sequences - MAX_SEQUENCES) > 0:
        counts = ", ".join(f"{n} {name}" for name, n in report.totals.verdicts.items())
        yield ""
        yield f"{hidden} more sequences are not shown; all together: {counts}"
    if report.suggestion is not None:
        first, *more = suggestion_lines(report.suggestion)
        yield ""
        yield f"{'suggest':<8}{safe(first)}"
        for line in more:
            yield f"{'':<10}{safe(line)}"
    if report.findings:
        yield ""
        yield from _findings(report)
    yield ""


def _header(report: Report) -> Iterator[str]:
    for label, side in (("golden", report.golden), ("run", report.run)):
        if side is not None:
            yield f"{label:<8}{_side(side)}"
    if report.tolerance is not None:
        against = f"the golden's {report.reference} logits" if report.reference else "no logits: the golden has none"
        if report.values == "logprobs":
            against = f"the log-softmax of {against}: the run holds log-probabilities"
        yield f"{'rule':<8}{_rule(report.tolerance)}, against {against}"
        if (used := used_line(report)) is not None:
            yield f"{'used':<8}{used}"
    o = report.options
    for rule in o.rules:
        yield f"{'':<8}{_tensor_rule(rule)}"
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


def _tensor_rule(rule: TensorRule) -> str:
    bounds = [f"{n} {getattr(rule, n):g}" for n in ("atol", "rtol") if getattr(rule, n) is not None]
    bounds += [f"max_ulp {rule.max_ulp}"] if rule.max_ulp is not None else []
    return f"{safe(rule.tensor)}: {', '.join(bounds)} ({safe(rule.origin)})"


def _shown(sequences: Sequence[SequenceResult]) -> list[SequenceResult]:
    if len(sequences) <= MAX_SEQUENCES:
        return list(sequences)
    by_need = sorted(sequences, key=lambda s: s.verdict in _GOOD)[:MAX_SEQUENCES]
    return sorted(by_need, key=lambda s: s.index)


def _sequence(result: SequenceResult, teacher_forced: bool, look: Look) -> Iterator[str | Text]:
    name = safe(repr(result.id))
    yield Text.assemble(f"sequence {result.index} {name}: ", (result.verdict.value, verdict_style(result.verdict)))
    counts = f"  prompt {result.prompt_length} ids; golden {_length(result.golden_length, result.golden_finish)}"
    if result.run_tokens is None:
        yield f"{counts}; the run lacks it"
        yield from _tokens(result.golden_tokens, np.empty(0, np.int32), False, look.width)
        return
    yield f"{counts}, run {_length(result.run_length, result.run_finish)}; {result.tokens_equal} equal"
    for name, part in (("logits", result.logits), ("prompt logits", result.prompt_logits)):
        if part is not None:
            yield f"  {name} {_logits(part)}"
            yield from _summaries(part)
    if result.rounds is not None:
        yield f"  rounds {_rounds(result.rounds)}"
    yield from strip(result, teacher_forced, look.width, look.unicode)
    yield from _tokens(result.golden_tokens, result.run_tokens, teacher_forced, look.width)
    if result.divergence is not None:
        yield from divergence(result.divergence, look)
        if look.text_of is not None:
            yield from passage(result, result.divergence.step, look)
    if result.trace is not None:
        yield from _trace(result.trace, result.prompt_length)


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


def _summaries(r: LogitsResult) -> Iterator[str]:
    """What no bound looks at."""
    parts = []
    if r.mean_kl is not None:
        parts.append(f"KL mean {r.mean_kl:.3e} p99 {r.p99_kl:.3e}")
    if r.top and r.top[0].rows:
        parts.append(f"argmax equal in {r.top[0].equal} of {r.top[0].rows} rows")
        parts += [f"top {t.k} {_percent(t.shared, t.ids)} equal" for t in r.top[1:] if t.rows]
    if r.min_golden_margin is not None:
        parts.append(f"smallest margin {r.min_golden_margin:.3e} at row {r.min_golden_margin_row}")
        if r.min_run_margin is not None:
            parts[-1] += f", the run's {r.min_run_margin:.3e} at row {r.min_run_margin_row}"
    if r.nmse is not None:
        parts.append(f"NMSE {r.nmse:.3e}" + ("" if r.cosine is None else f", cosine {r.cosine:.9g}"))
    if parts:
        yield f"    {'; '.join(parts)}"


def _percent(part: int, whole: int) -> str:
    """Rounded down, so that 100 % is all of them."""
    return f"{part * 1000 // whole / 10:g} %"


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


def _trace(r: TraceResult, prompt: int) -> Iterator[str]:
    yield f"  trace {r.identical} of {r.compared} tensors identical"
    if r.first is None:
        return
    yield f"    {'step':>5} {'position':>9} {'rows out':>10} {'max abs':>10} {'nmse':>10}  tensor"
    out = [t for t in r.tensors if t.rows_out]
    shown = out[out.index(r.first) :][:MAX_TENSORS]
    for t in shown:
        worst, nmse = ("-" if v is None else f"{v:.3e}" for v in (t.max_abs, t.nmse))
        hint = f"  <- {r.hint}" if t is r.first and r.hint else ""
        figures = f"{f'{t.rows_out}/{t.rows}':>10} {worst:>10} {nmse:>10}"
        yield f"    {step_of(t.first_row, prompt):>5} {t.first_row:>9} {figures}  {safe(t.name)}{hint}"
    if more := len(out) - len(shown):
        yield f"    and {more} more tensors out of tolerance"


def _tokens(golden: np.ndarray, run: np.ndarray, mark_all: bool, width: int) -> Iterator[str | Text]:
    """Both lists in columns, wrapped; the first difference marked, in a teacher-forced run every one."""
    total = max(len(golden), len(run))
    common = min(len(golden), len(run))
    parted = [*np.flatnonzero(golden[:common] != run[:common]).tolist(), *range(common, total)]
    first = parted[0] if parted else None
    marks = set(parted if mark_all else parted[:1])
    end = 0
    for lo, hi in windows(total, first):
        if lo > end:
            yield _gap(end, lo, parted)
        yield from _columns(golden, run, lo, hi, marks, width)
        end = hi
    if end < total:
        yield _gap(end, total, parted)


def _gap(lo: int, hi: int, parted: list[int]) -> str:
    differ = sum(lo <= step < hi for step in parted)
    what = "all equal" if not differ else f"{differ} differ"
    return f"{'...':>{_LABEL - 2}}  steps {lo} to {hi - 1} left out: {what}"


def _columns(
    golden: np.ndarray, run: np.ndarray, lo: int, hi: int, marks: set[int], width: int
) -> Iterator[str | Text]:
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
            yield Text(f"{'':>{_LABEL - 2}}  {ticks}".rstrip(), "bold red")


def _findings(report: Report) -> Iterator[str | Text]:
    for finding in report.findings[:MAX_FINDINGS]:
        level = (f"{finding.level.value:<8}", _LEVELS[finding.level])
        yield Text.assemble(level, safe(finding.message), (f" [{safe(finding.code)}]", "dim"), hinted(finding))
    if len(report.findings) > MAX_FINDINGS:
        yield f"{'':<8}and {len(report.findings) - MAX_FINDINGS} more findings (--format json lists all)"
    if _wants_bisect(report):
        yield f"{'next':<8}kdtr bisect GOLDEN names the operation at fault"


def _wants_bisect(report: Report) -> bool:
    """Whether kdtr's own exact engine computed something else, and no trace says where."""
    golden, run = report.golden, report.run
    if golden is None or run is None or "exact" not in golden.arithmetic or run.tier != "exact":
        return False
    own = "batch" in dict(run.details)  # no other engine's run has one
    numbers = any(f.code == "logits.out_of_tolerance" for f in report.findings)
    return own and numbers and all(s.trace is None for s in report.sequences)

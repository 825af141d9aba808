"""The report for people: what was compared and by which rules, a table of the sequences, of each a strip of its steps
and both token lists one above the other, what was found, and the verdict line last.

Where it goes to no terminal it is plain ASCII, so that it survives any pipe and log; a terminal gets the same lines
with colours, and better marks where it takes UTF-8.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from kdtr_cli.parity.results import Report, RoundsResult, SequenceResult, Side, StepDetail
from kdtr_cli.parity.tally import LogitsResult
from kdtr_cli.parity.tolerances import Tolerance
from kdtr_cli.parity.verdicts import Level, Verdict
from kdtr_cli.report.line import safe, verdict_line
from kdtr_cli.report.meaning import MEANS
from kdtr_cli.report.overview import overview_table, verdict_style
from kdtr_cli.report.strip import legend, strip
from kdtr_cli.report.visible import visible
from kdtr_cli.report.windows import windows

__all__ = ["Look", "Part", "report_parts", "report_text"]

#: More sequences than these are counted only; those that do not agree are shown first.
MAX_SEQUENCES = 32
MAX_FINDINGS = 40
_LABEL = 12
_MAX_TEXT = 20

#: What rich prints, or a line as it is.
Part = object

_LEVELS = {Level.ERROR: "red", Level.WARNING: "yellow", Level.NOTE: "dim"}


@dataclass(frozen=True)
class Look:
    """How a report is shown: `width` characters a line, `unicode` where more than ASCII can be shown, and what gives
    the text of a token id (None: nothing does; for one id: it is not known)."""

    width: int = 100
    unicode: bool = False
    text_of: Callable[[int], str | None] | None = None

    def text(self, token: int) -> str:
        """The text of a token between quotes; empty where it is not known."""
        text = None if self.text_of is None else self.text_of(token)
        if text is None:
            return ""
        return f'"{self.shown(text, _MAX_TEXT)}"'

    def shown(self, text: str, limit: int) -> str:
        clean = visible(text)
        clean = clean if self.unicode else clean.encode("ascii", "backslashreplace").decode()
        return clean if len(clean) <= limit else clean[: limit - 3] + "..."


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
    for result in shown:
        yield ""
        yield from _sequence(result, report.teacher_forced, look)
    # of a sweep the report lists a part
    if (hidden := report.totals.sequences - MAX_SEQUENCES) > 0:
        counts = ", ".join(f"{n} {name}" for name, n in report.totals.verdicts.items())
        yield ""
        yield f"{hidden} more sequences are not shown; all together: {counts}"
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
        yield f"{'rule':<8}{_rule(report.tolerance)}, against {against}"
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


def _sequence(result: SequenceResult, teacher_forced: bool, look: Look) -> Iterator[str | Text]:
    name = safe(repr(result.id))
    yield Text.assemble(f"sequence {result.index} {name}: ", (result.verdict.value, verdict_style(result.verdict)))
    counts = f"  prompt {result.prompt_length} ids; golden {_length(result.golden_length, result.golden_finish)}"
    if result.run_tokens is None:
        yield f"{counts}; the run lacks it"
        yield from _tokens(result.golden_tokens, np.empty(0, np.int32), False, look.width)
        return
    yield f"{counts}, run {_length(result.run_length, result.run_finish)}; {result.tokens_equal} equal"
    yield f"  logits {_logits(result.logits)}"
    if result.prompt_logits is not None:
        yield f"  prompt logits {_logits(result.prompt_logits)}"
    if result.rounds is not None:
        yield f"  rounds {_rounds(result.rounds)}"
    trace = getattr(result, "trace", None)
    if trace is not None and trace.message is not None:
        yield f"  tensors {safe(trace.message)}"
    yield from strip(result, teacher_forced, look.width, look.unicode)
    yield from _tokens(result.golden_tokens, result.run_tokens, teacher_forced, look.width)
    if result.divergence is not None:
        yield from _divergence(result.divergence, look)
        if look.text_of is not None:
            yield from _passage(result, result.divergence.step, look)


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


def _divergence(d: StepDetail, look: Look) -> Iterator[str | Text]:
    golden, run = ("nothing" if t is None else str(t) for t in (d.golden_token, d.run_token))
    with_text = ["" if t is None else f" {look.text(t)}".rstrip() for t in (d.golden_token, d.run_token)]
    yield Text(f"  first divergence at step {d.step}: golden {golden}{with_text[0]}, run {run}{with_text[1]}", "bold")
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
        texts = [look.text(token) for top in (d.golden_top, d.run_top) for token, _ in top]
        room = max(map(cell_len, texts), default=0)
        gap = " " * (room + 2 if room else 0)
        yield f"    {'top 5':<10}{'golden':>24}{gap}{'run':>24}".rstrip()
        for rank in range(max(len(d.golden_top), len(d.run_top))):
            sides = [_entry(top, rank, look, room) for top in (d.golden_top, d.run_top)]
            yield f"    {rank + 1:<10}{''.join(sides)}".rstrip()


def _entry(top: tuple[tuple[int, float], ...], rank: int, look: Look, room: int) -> str:
    text = set_cell_size(look.text(top[rank][0]) if rank < len(top) else "", room)
    entry = f"{top[rank][0]:>9}{top[rank][1]:>15.7g}" if rank < len(top) else f"{'-':>24}"
    return f"{entry}  {text}" if room else entry


def _passage(result: SequenceResult, step: int, look: Look) -> Iterator[str]:
    """What both sides said around the step, as text."""
    run = np.empty(0, np.int32) if result.run_tokens is None else result.run_tokens
    for label, tokens in (("golden", result.golden_tokens), ("run", run)):
        ids = tokens[max(0, step - 12) : step + 5].tolist()
        texts = [look.text_of(token) or "" for token in ids]
        here = min(step, 12)
        before = look.shown("".join(texts[:here]), 400)
        room = max(8, (look.width - _LABEL) // 2)
        before = before if len(before) <= room else "..." + before[3 - room :]
        yield f'    {label:<8}"{before}" | "{look.shown("".join(texts[here:]), room)}"'


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.7g}"


def _findings(report: Report) -> Iterator[str | Text]:
    for finding in report.findings[:MAX_FINDINGS]:
        level = (f"{finding.level.value:<8}", _LEVELS[finding.level])
        yield Text.assemble(level, safe(finding.message), (f" [{safe(finding.code)}]", "dim"))
    if len(report.findings) > MAX_FINDINGS:
        yield f"{'':<8}and {len(report.findings) - MAX_FINDINGS} more findings (--format json lists all)"

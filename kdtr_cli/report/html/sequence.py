"""One sequence of the page: its facts, both token lists around the first divergence, the largest logits there, and the
places where the script draws."""

import numpy as np

from kdtr_cli.parity.results import SequenceResult, StepDetail
from kdtr_cli.parity.tally import LogitsResult
from kdtr_cli.report.html.parts import esc, name, number, table, verdict_tag
from kdtr_cli.report.html.payload import TextOf
from kdtr_cli.report.steps import Mark, marks
from kdtr_cli.report.windows import windows

__all__ = ["section"]

_CLASSES = {Mark.NOT_COMPARED: "none", Mark.SAME: "same", Mark.EQUAL: "equal", Mark.TIE: "tie"}
_CLASSES |= {Mark.OUT: "out", Mark.DIFFERS: "differs"}


def section(result: SequenceResult, teacher_forced: bool, text_of: TextOf | None) -> str:
    """The section, with places for pictures that the script fills."""
    i = result.index
    parts = [
        f'<section class="seq" id="seq-{i}" data-seq="{i}" aria-labelledby="seq-{i}-h">',
        f'<h2 id="seq-{i}-h">Sequence {i} {name(result.id, 200)} {verdict_tag(result.verdict)}</h2>',
        _facts(result),
        '<noscript><p class="quiet">The pictures need scripts, which this viewer does not run.</p></noscript>',
        '<div class="draw" data-draw="plots"></div>',
        _tokens(result, marks(result, teacher_forced), text_of),
        "" if result.divergence is None else _divergence(result.divergence, text_of),
        _trace(result),
        '<div class="draw" data-draw="rounds"></div>',
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _facts(r: SequenceResult) -> str:
    run = "the run lacks it" if r.run_tokens is None else f"run {r.run_length} tokens ({esc(r.run_finish)})"
    said = [f"Prompt of {r.prompt_length} ids; golden {r.golden_length} tokens ({esc(r.golden_finish)}), {run}."]
    said.append(f"Logits: {_logits(r.logits)}.")
    if r.prompt_logits is not None:
        said.append(f"Logits of the prompt: {_logits(r.prompt_logits)}.")
    if r.rounds is not None and r.rounds.compared:
        said.append(f"Rounds: {r.rounds.equal} of {r.rounds.judged} equal.")
    return "".join(f"<p>{text}</p>" for text in said)


def _logits(r: LogitsResult) -> str:
    if r.form == "none":
        return "none to compare"
    text = f"{r.form}, {r.rows_compared} of {r.rows_total} rows compared, {r.rows_identical} of them identical"
    if r.max_abs is not None:
        text += f"; largest |run − golden| {r.max_abs:.3e}"
        if r.max_abs_at is not None and r.max_abs != 0:
            text += f" at row {r.max_abs_at.row}, id {r.max_abs_at.token}"
    if r.rows_out:
        text += f"; {r.values_out} values in {r.rows_out} rows out of tolerance"
    return text


def _tokens(result: SequenceResult, state: np.ndarray, text_of: TextOf | None) -> str:
    """Both lists, one above the other; of a long one the start, the place of the difference and the end."""
    golden = result.golden_tokens
    run = np.empty(0, np.int32) if result.run_tokens is None else result.run_tokens
    first = None if result.divergence is None else result.divergence.step
    parts, end, total = [], 0, max(len(golden), len(run))
    for lo, hi in windows(total, first):
        if lo > end:
            parts.append(f'<li class="gap">steps {end} to {lo - 1} left out</li>')
        for step in range(lo, hi):
            cells = "".join(f"<span>{_token(side, step, text_of)}</span>" for side in (golden, run))
            here = ' aria-current="true"' if step == first else ""
            parts.append(f'<li class="{_CLASSES[Mark(state[step])]}"{here}><i>{step}</i>{cells}</li>')
        end = hi
    if not parts:
        return ""
    framed = "" if first is None else f" The first divergence, step {first}, is framed."
    legend = f'<p class="quiet">From top to bottom: step, golden, run.{framed}</p>'
    return f'<h3>Tokens</h3>{legend}<ol class="tokens">{"".join(parts)}</ol>'


def _token(side: np.ndarray, step: int, text_of: TextOf | None) -> str:
    if step >= len(side):
        return "–"
    token = int(side[step])
    text = None if text_of is None else text_of(token)
    return str(token) if text is None else f"{token} <bdi>{esc(text, 24)}</bdi>"


def _divergence(d: StepDetail, text_of: TextOf | None) -> str:
    golden, run = ("nothing" if t is None else str(t) for t in (d.golden_token, d.run_token))
    said = [f"Golden <b>{golden}</b>, run <b>{run}</b>."]
    if d.golden_margin is not None or d.run_margin is not None:
        margins = (number(m, ".7g") for m in (d.golden_margin, d.run_margin))
        said.append("Margin (largest minus second largest logit): golden {}, run {}.".format(*margins))
    if d.tie:
        said.append("A tie: the run's token is within tolerance of the golden's maximum.")
    if d.recorded_tie:
        said.append("The golden recorded a tie: its float64 argmax is another token.")
    if d.own_argmax is False:
        said.append("The run's token is not the argmax of its own logits.")
    out = f"<h3>First divergence: step {d.step}</h3><p>{' '.join(said)}</p>"
    if not d.golden_top and not d.run_top:
        return out
    rows = []
    for rank in range(max(len(d.golden_top), len(d.run_top))):
        cells = [str(rank + 1)]
        for top in (d.golden_top, d.run_top):
            if rank < len(top):
                token, logit = top[rank]
                text = None if text_of is None else text_of(token)
                marked = f"<b>{token}</b>" if token in (d.golden_token, d.run_token) else str(token)
                cells += [marked, "" if text is None else f"<bdi>{esc(text, 24)}</bdi>", f"{logit:.7g}"]
            else:
                cells += ["–", "", ""]
        rows.append(cells)
    head = ["Rank", "Golden", "", "logit", "Run", "", "logit"]
    return out + table(head, rows, "Largest logits of both sides", "rr rr r", "topk")


def _trace(result: SequenceResult) -> str:
    trace = result.trace
    if trace is None or not trace.tensors:
        return ""
    said = "" if trace.message is None else f"<p>{esc(trace.message)}</p>"
    rows = [
        [
            f"<code>{esc(t.name, 120)}</code>",
            f"{t.rows_identical}/{t.rows}",
            str(t.rows_out),
            number(t.max_abs),
            number(t.nmse),
            "–" if t.first_row is None else str(t.first_row),
        ]
        for t in trace.tensors
    ]
    head = ["Tensor", "Rows identical", "Rows out", "max abs", "NMSE", "First row"]
    listed = table(head, rows, "Tensors in the order of execution", " rrrrr")
    place = '<div class="draw" data-draw="trace"></div>'
    return f"<h3>Tensors</h3>{said}{place}<details><summary>All {len(rows)} tensors</summary>{listed}</details>"

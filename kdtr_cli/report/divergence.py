"""The first divergence of a sequence as lines for people: both tokens, margins, the largest logits of both sides, and
the text around it where there is a tokenizer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from kdtr_cli.parity.results import SequenceResult, StepDetail
from kdtr_cli.report.visible import visible

__all__ = ["Look", "divergence", "passage"]

_MAX_TEXT = 20
_LABEL = 12


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


def divergence(d: StepDetail, look: Look) -> Iterator[str | Text]:
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


def passage(result: SequenceResult, step: int, look: Look) -> Iterator[str]:
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

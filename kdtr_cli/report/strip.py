"""A sequence in one character a step, for the terminal: where it parts, and what was not compared, at a glance."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from rich.text import Text

from kdtr_cli.parity.results import SequenceResult
from kdtr_cli.report.steps import Mark, marks
from kdtr_cli.report.windows import windows

__all__ = ["legend", "strip"]

#: Mark: ASCII, better, colour, what it means.
_MARKS = {
    Mark.SAME: ("=", "■", "green", "same bits"),
    Mark.EQUAL: (".", "□", "cyan", "same token"),
    Mark.TIE: ("~", "≈", "bold yellow", "a tie"),
    Mark.OUT: ("!", "▲", "bold red", "same token, logits out of tolerance from here"),
    Mark.DIFFERS: ("X", "✗", "bold red", "another token"),
    Mark.NOT_COMPARED: ("-", "·", "dim", "not compared"),
}
_GROUP = 10
_MARGIN = 20
#: Longer strips are cut to so many lines.
_MAX_LINES = 6


def legend(sequences: Sequence[SequenceResult], teacher_forced: bool, unicode: bool) -> Iterator[Text]:
    """One line that explains the marks that occur; none without steps."""
    seen = {Mark(m) for r in sequences for m in np.unique(marks(r, teacher_forced))}
    if not seen:
        return
    line = Text("marks   ")
    for i, mark in enumerate(m for m in _MARKS if m in seen):
        line.append("  " if i else "").append(_MARKS[mark][unicode], _MARKS[mark][2]).append(f" {_MARKS[mark][3]}")
    yield line


def strip(result: SequenceResult, teacher_forced: bool, width: int, unicode: bool) -> Iterator[Text]:
    """Lines of at most `width` characters, groups of ten steps, the number of the first step before each line. A long
    strip is cut: its start, the place of the first divergence and its end are shown."""
    state = marks(result, teacher_forced)
    each = max(1, (width - _MARGIN) // (_GROUP + 1)) * _GROUP
    first = None if result.divergence is None else result.divergence.step
    end = 0
    for lo, hi in windows(len(state), first, each * _MAX_LINES):
        lo = lo // _GROUP * _GROUP if lo > end else lo
        if lo > end:
            yield _gap(state, end, lo)
        for start in range(lo, hi, each):
            yield _line(state[start : min(start + each, hi)], start, unicode)
        end = hi
    if end < len(state):
        yield _gap(state, end, len(state))


def _line(state: np.ndarray, start: int, unicode: bool) -> Text:
    line = Text(f"{'steps':>10}{start:>8}  ")
    for i in range(0, len(state), _GROUP):
        line.append(" " if i else "")
        for mark, same in groupby(state[i : i + _GROUP].tolist()):
            line.append(_MARKS[Mark(mark)][unicode] * len(list(same)), _MARKS[Mark(mark)][2])
    return line


def _gap(state: np.ndarray, lo: int, hi: int) -> Text:
    kinds, counts = np.unique(state[lo:hi], return_counts=True)
    said = ", ".join(f"{n} {_MARKS[Mark(kind)][3].partition(',')[0]}" for kind, n in zip(kinds, counts, strict=True))
    return Text(f"{'...':>10}{lo:>8}  to {hi - 1} left out: {said}", "dim")

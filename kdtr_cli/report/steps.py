"""What can be said of each output step of a sequence in one mark: for the strip of the terminal and of the page."""

from enum import IntEnum

import numpy as np

from kdtr_cli.parity.results import SequenceResult
from kdtr_cli.parity.verdicts import Verdict

__all__ = ["Mark", "marks"]


class Mark(IntEnum):
    """Of several marks in one place the largest is shown."""

    NOT_COMPARED = 0  #: after the first divergence of a free run, or the run lacks the sequence
    SAME = 1  #: the same token, and no logit differs
    EQUAL = 2  #: the same token; logits differ, or are not there to be compared
    TIE = 3  #: another token, which the golden has as a tie
    OUT = 4  #: the same token, but the first row of logits that is out of tolerance or not finite
    DIFFERS = 5  #: another token, or one side had stopped


def marks(result: SequenceResult, teacher_forced: bool) -> np.ndarray:
    """uint8 [n], a `Mark` for each step that either side has."""
    golden, run = result.golden_tokens, result.run_tokens
    if run is None:
        return np.zeros(len(golden), np.uint8)
    total, common = max(len(golden), len(run)), min(len(golden), len(run))
    out = np.full(total, Mark.EQUAL, np.uint8)
    out[:common][_same_rows(result, common)] = Mark.SAME
    parted = np.flatnonzero(golden[:common] != run[:common])
    out[parted] = Mark.DIFFERS
    out[common:] = Mark.DIFFERS
    if any(f.code == "tokens.tie" and f.verdict is Verdict.TIE_BREAK for f in result.findings):
        out[parted] = Mark.TIE
    elif result.divergence is not None and result.divergence.tie and result.divergence.step < common:
        out[result.divergence.step] = Mark.TIE
    if not teacher_forced and result.divergence is not None:
        out[result.divergence.step + 1 :] = Mark.NOT_COMPARED
    fault = result.logits.first_fault
    if fault is not None and fault.row < total and out[fault.row] in (Mark.SAME, Mark.EQUAL):
        out[fault.row] = Mark.OUT
    return out


def _same_rows(result: SequenceResult, n: int) -> np.ndarray:
    """bool [n]: the steps whose logits were compared with no difference found."""
    same = np.zeros(n, bool)
    logits = result.logits
    if logits.form != "none" and logits.rows_identical == logits.rows_compared:
        same[: logits.rows_compared] = True
        return same
    curves = logits.curves
    if curves is None:
        return same
    quiet = np.repeat(curves.max_abs == 0, curves.rows_per_entry)[: logits.rows_compared][:n]
    same[: len(quiet)] = quiet
    return same

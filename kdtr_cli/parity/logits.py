"""One pass over two sets of logits, block by block: everything a verdict needs to know about them.

Whatever the size of a bundle, a few blocks are in memory at a time. Rows with equal bits are recognised first and
cost no float arithmetic; two sets with equal verified digests are not read a second time but for one look at
whether the golden is finite.
"""

from collections.abc import Iterator

from kdtr_cli.parity.evidence import Logits
from kdtr_cli.parity.partial import compare_partial
from kdtr_cli.parity.tally import LogitsResult, Tally
from kdtr_cli.parity.tolerances import Tolerance

__all__ = ["compare_logits", "missing_logits"]

#: Values of one side that are looked at together.
BLOCK_VALUES = 1 << 19


def missing_logits(rows_total: int) -> LogitsResult:
    """The result where one side has no logits."""
    return LogitsResult("none", rows_total)


def compare_logits(
    golden: Logits, run: Logits, n_rows: int, rows_total: int, tolerance: Tolerance, suggest: bool = False
) -> LogitsResult:
    """Compare the first `n_rows` rows of two sets of logits of one vocabulary. `rows_total` is how many the golden has
    to be judged by: those after `n_rows` are not compared, but one that is not finite is still found. A golden value
    that is not finite ends the comparison. `suggest`: find out what tolerance would be needed."""
    tally = Tally(tolerance, run.dtype, suggest)
    full = golden.rows is not None and run.rows is not None
    same = full and n_rows > 0 and _same_digest(golden, run)
    for lo, hi in _blocks(0, n_rows, _step(golden, run)):
        if same:
            tally.same(lo, golden.rows(lo, hi))
        elif full:
            tally.full(lo, golden.rows(lo, hi), run.rows(lo, hi))
        else:
            compare_partial(tally, golden, run, lo, hi)
        if tally.golden_nonfinite is not None:
            break
    values = golden.rows if golden.rows is not None else golden.top_values
    if values is not None and tally.golden_nonfinite is None:
        for lo, hi in _blocks(n_rows, rows_total, _step(golden, run)):
            if not tally.golden_is_finite(lo, values(lo, hi), golden.top_ids and golden.top_ids(lo, hi)):
                break
    return tally.result(_poorer(golden, run), n_rows, rows_total)


def _blocks(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    return ((lo, min(lo + step, stop)) for lo in range(start, stop, step))


def _step(golden: Logits, run: Logits) -> int:
    widths = [lg.vocab if lg.rows is not None else lg.k for lg in (golden, run)]
    return max(1, BLOCK_VALUES // max(1, *(w or 0 for w in widths)))


def _poorer(golden: Logits, run: Logits) -> str:
    forms = [lg.form for lg in (golden, run)]
    for form in ("digest", *(f"top{k}" for k in sorted(lg.k for lg in (golden, run)))):
        if form in forms:
            return form
    return "full"


def _same_digest(golden: Logits, run: Logits) -> bool:
    if golden.dataset_sha256 is None or run.dataset_sha256 is None:
        return False
    if (golden.n_rows, golden.vocab, golden.dtype) != (run.n_rows, run.vocab, run.dtype):
        return False
    return golden.dataset_sha256() == run.dataset_sha256()

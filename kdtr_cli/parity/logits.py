"""One pass over two sets of logits, block by block: everything a verdict needs to know about them.

Whatever the size of a bundle, a few blocks are in memory at a time. Blocks are read and measured by several threads
and added up in order, so that nothing depends on their number. Evidence that comes as a scan is verified in the same
pass: its bytes are hashed in order beside the measuring, and no result leaves here before the digests were found right.
Rows with equal bits are recognised first; two sets that claim equal digests are not compared at all, only hashed, which
shows the claim true, and looked at once: whether they are finite, and for their margins.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np

from kdtr_cli.parity.evidence import Logits, Scan
from kdtr_cli.parity.measure import Measure, find_golden_nonfinite
from kdtr_cli.parity.partial import compare_partial
from kdtr_cli.parity.rows import Place, RowBlock
from kdtr_cli.parity.tally import LogitsResult, Tally
from kdtr_cli.parity.tolerances import Tolerance

__all__ = ["compare_logits", "missing_logits"]

#: Values of one side that are looked at together.
BLOCK_VALUES = 1 << 19

#: Blocks that may wait to be hashed.
WAITING = 4

_Item, _Result = TypeVar("_Item"), TypeVar("_Result")


def missing_logits(rows_total: int) -> LogitsResult:
    """The result where one side has no logits."""
    return LogitsResult("none", rows_total)


def compare_logits(
    golden: Logits,
    run: Logits,
    n_rows: int,
    rows_total: int,
    tolerance: Tolerance,
    threads: int = 1,
    suggest: bool = False,
) -> LogitsResult:
    """Compare the first `n_rows` rows of two sets of logits of one vocabulary. `rows_total` is how many the golden has
    to be judged by: those after `n_rows` are not compared, but one that is not finite is still found. A golden value
    that is not finite ends the comparison. `suggest`: find out what tolerance would be needed."""
    tally = Tally(tolerance, run.dtype, n_rows, golden.vocab or run.vocab, suggest)
    tally.baselines.uniform = golden.uniform
    if golden.rows is not None and run.rows is not None:
        _compare_full(tally, golden, run, n_rows, rows_total, threads)
    else:
        _compare_parts(tally, golden, run, n_rows, rows_total)
    return tally.result(_poorer(golden, run, n_rows), n_rows, rows_total)


def _compare_parts(tally: Tally, golden: Logits, run: Logits, n_rows: int, rows_total: int) -> None:
    """At least one side has no full rows."""
    for lo, hi in _blocks(0, n_rows, _step(golden, run)):
        tally.add(compare_partial(tally.tolerance, golden, run, lo, hi))
        if tally.golden_nonfinite is not None:
            return
    values = golden.rows if golden.rows is not None else golden.top_values
    if values is None:
        return
    for lo, hi in _blocks(n_rows, rows_total, _step(golden, run)):
        bad = find_golden_nonfinite(lo, values(lo, hi))
        if bad is not None:
            token = bad.token if golden.rows is not None else int(golden.top_ids(bad.row, bad.row + 1)[0, bad.token])
            tally.golden_nonfinite = Place(bad.row, token, golden=bad.golden)
            return


def _compare_full(tally: Tally, golden: Logits, run: Logits, n_rows: int, rows_total: int, threads: int) -> None:
    g_scan = None if golden.scan is None else golden.scan()
    r_scan = None if run.scan is None else run.scan()
    same = n_rows > 0 and _same_digest(golden, run, g_scan, r_scan)
    step = _step(golden, run)
    unread = max(golden.n_rows if g_scan is not None else 0, run.n_rows if r_scan is not None else 0)
    parts = [
        *(("compare", *ends) for ends in _blocks(0, n_rows, step)),
        *(("look", *ends) for ends in _blocks(n_rows, rows_total, step)),
        *(("hash", *ends) for ends in _blocks(max(n_rows, rows_total), unread, step)),
    ]
    # a part's memory is used again when so many have begun after it that it must be done: see _mapped and _InOrder
    slots = min(len(parts), threads + WAITING + 4)
    read_golden = _Reader(golden, g_scan, step, slots)
    read_run = _Reader(run, r_scan, step, slots)
    measures = threading.local()

    def work(part: tuple[int, tuple[str, int, int]]) -> _Work:
        """Read the rows that are needed and measure them; of sets that are the same only the golden is looked at."""
        number, (what, lo, hi) = part
        done = _Work(what if tally.golden_nonfinite is None else "hash")
        if done.what != "hash" or (g_scan is not None and lo < golden.n_rows):
            done.golden = read_golden(number, lo, min(hi, golden.n_rows))
        if (done.what == "compare" and not same) or (r_scan is not None and lo < run.n_rows):
            done.run = read_run(number, lo, min(hi, run.n_rows))
        if done.what == "compare":
            if not hasattr(measures, "own"):
                measures.own = Measure(tally.tolerance, golden.vocab, run.dtype)
            done.block = measures.own.same(lo, done.golden) if same else measures.own.full(lo, done.golden, done.run)
        elif done.what == "look":
            done.bad = find_golden_nonfinite(lo, done.golden)
        return done

    with ExitStack() as stack:
        hashing = [
            (side, scan, stack.enter_context(_InOrder(threads > 1 and len(parts) > 1)))
            for side, scan in (("golden", g_scan), ("run", r_scan))
            if scan is not None
        ]
        for done in stack.enter_context(closing(_mapped(work, list(enumerate(parts)), threads))):
            for side, scan, thread in hashing:
                if (rows := getattr(done, side)) is not None:
                    thread.do(scan.feed, rows)
            if tally.golden_nonfinite is None:
                if done.block is not None:
                    tally.add(done.block)
                elif done.bad is not None:
                    tally.golden_nonfinite = done.bad
            elif not hashing:
                break
        for _, scan, thread in hashing:
            thread.wait()
            scan.finish()


@dataclass
class _Work:
    """What a part of the pass is ("compare", "look" whether the golden is finite, "hash"), the rows that were read, and
    what came of them."""

    what: str
    golden: np.ndarray | None = None
    run: np.ndarray | None = None
    block: RowBlock | None = None
    bad: Place | None = None


class _Reader:
    """Reads rows of a side, a scan's into memory that is used again: fresh memory costs more than what is read."""

    def __init__(self, logits: Logits, scan: Scan | None, step: int, slots: int) -> None:
        self._logits, self._scan = logits, scan
        row_bytes = (logits.vocab or 0) * logits.dtype.itemsize
        self._memory = None if scan is None else np.empty((slots, min(step, logits.n_rows) * row_bytes), np.uint8)

    def __call__(self, number: int, lo: int, hi: int) -> np.ndarray:
        if self._scan is None:
            return self._logits.rows(lo, hi)
        return self._scan.rows(lo, hi, self._memory[number % len(self._memory)])


class _InOrder:
    """Calls one after another on a thread of their own, a few of them waiting at most; or at once, without a thread."""

    def __init__(self, threaded: bool) -> None:
        self._pool = ThreadPoolExecutor(1) if threaded else None
        self._waiting: deque[Future] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def do(self, function: Callable[[np.ndarray], None], rows: np.ndarray) -> None:
        if self._pool is None:
            function(rows)
            return
        self._waiting.append(self._pool.submit(function, rows))
        while len(self._waiting) > WAITING:
            self._waiting.popleft().result()

    def wait(self) -> None:
        while self._waiting:
            self._waiting.popleft().result()


def _mapped(function: Callable[[_Item], _Result], items: Sequence[_Item], threads: int) -> Iterator[_Result]:
    """The results of all items in their order; a few more than there are threads are begun before they are due."""
    if threads < 2 or len(items) < 2:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        begun: deque[Future] = deque()
        try:
            for item in items:
                begun.append(pool.submit(function, item))
                if len(begun) > threads + 1:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()


def _blocks(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    return ((lo, min(lo + step, stop)) for lo in range(start, stop, step))


def _step(golden: Logits, run: Logits) -> int:
    widths = [lg.vocab if lg.rows is not None else lg.k for lg in (golden, run)]
    return max(1, BLOCK_VALUES // max(1, *(w or 0 for w in widths)))


def _poorer(golden: Logits, run: Logits, n_rows: int) -> str:
    forms = [lg.form for lg in (golden, run)]
    if "digest" in forms:
        return "digest"
    tops = [_least(lg, n_rows) for lg in (golden, run) if lg.rows is None]
    return f"top{min(tops)}" if tops else "full"


def _least(logits: Logits, n_rows: int) -> int:
    """The K of the poorest of the rows: one may hold fewer values than others. A row without any is no top K at all,
    and is counted as not measured."""
    if logits.top_counts is None or not n_rows:
        return logits.k
    counts = logits.top_counts(0, n_rows)
    return int(counts.min(initial=logits.k, where=counts > 0))


def _same_digest(golden: Logits, run: Logits, g_scan: Scan | None, r_scan: Scan | None) -> bool:
    """Whether both claim the same bits; where it is a claim of a scan, its end verifies it."""
    if (golden.n_rows, golden.vocab, golden.dtype) != (run.n_rows, run.vocab, run.dtype):
        return False
    digests = []
    for logits, scan in ((golden, g_scan), (run, r_scan)):
        if scan is None and logits.dataset_sha256 is None:
            return False
        digests.append(logits.dataset_sha256() if scan is None else scan.sha256)
    return digests[0] == digests[1]

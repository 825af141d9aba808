"""Every figure of full rows in one pass over values that stay in the processor's cache.

The figures are those of metrics.py, taken without a temporary of a block's size: rows are cut into tiles, and every
step of NumPy writes into a buffer that is used again. A row's sums are those of its tiles, added from left to right;
tiles are cut by the size of the vocabulary alone, and what a row gives does not depend on its neighbours. So no number
depends on how rows are cut into blocks or on which thread measures them. Rows with a value that is not finite go
through metrics.py itself.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from kdtr_cli.parity.curves import curve_block_size
from kdtr_cli.parity.metrics import abs_difference, equal_rows, kl_divergence, top_k, ulp_distance
from kdtr_cli.parity.ranks import MOST, largest_of_blocks, rank_rows, wide_values
from kdtr_cli.parity.rows import Place, RowBlock, blank_block
from kdtr_cli.parity.tolerances import Tolerance

__all__ = ["Measure", "find_golden_nonfinite"]

#: Values of a tile. Measured (docs/log.md): four float64 buffers and the integers stay in a cache of 1 MiB.
TILE = 1 << 15

#: A row is the golden's moved by a constant c if no difference lies further from c than this part of |c|, and there
#: are enough values for that to be no accident.
SHIFT_SPREAD = 1 / 16
SHIFT_VOCAB = 8
PROBE = 64


def find_golden_nonfinite(first: int, golden: np.ndarray) -> Place | None:
    """The first value of rows [n, V] that is not finite; the rows are numbered from `first`."""
    if not golden.size:
        return None
    wide = wide_values(golden)
    with np.errstate(invalid="ignore"):
        good = np.isfinite(wide.max(axis=1)) & np.isfinite(wide.min(axis=1))
    if good.all():
        return None
    row = int(np.argmin(good))
    token = int(np.argmax(~np.isfinite(wide[row])))
    return Place(first + row, token, golden=float(golden[row, token]))


def _offset(largest: np.ndarray) -> np.ndarray:
    """What to take off a row's values before exp, from its largest: nothing, as a rule."""
    return np.where((largest > -200.0) & (largest < 500.0), 0.0, largest)


class _Moved:
    """Whether each of n rows may still be another one moved by a constant, from its differences tile by tile."""

    def __init__(self, n: int) -> None:
        self.largest, self.smallest = np.full(n, -np.inf), np.full(n, np.inf)

    def add(self, d: np.ndarray) -> bool:
        """The next differences [n, C]; False: no row is. A look at a few of them shows that nearly always."""
        if not np.isnan(self._with(d[:, :PROBE])).all():
            self._with(d)
        return not np.isnan(self.by()).all()

    def _with(self, d: np.ndarray) -> np.ndarray:
        np.maximum(self.largest, d.max(axis=1), out=self.largest)
        np.minimum(self.smallest, d.min(axis=1), out=self.smallest)
        return self.by()

    def by(self) -> np.ndarray:
        """The constants, NaN where there is none."""
        center, spread = (self.largest + self.smallest) / 2, (self.largest - self.smallest) / 2
        return np.where((spread <= SHIFT_SPREAD * np.abs(center)) & (center != 0), center, np.nan)


class Measure:
    """Measures blocks of rows over a vocabulary of `vocab` by `tolerance`, the run stored as `dtype`. It holds one
    thread's buffers: each thread has its own."""

    def __init__(self, tolerance: Tolerance, vocab: int, dtype: np.dtype) -> None:
        self.tolerance, self.vocab, self.dtype = tolerance, vocab, dtype
        self.block_size = curve_block_size(vocab)
        size = max(TILE, self.block_size)
        self._floats = np.empty((4, size))
        self._integers = np.empty((2, size), f"i{dtype.itemsize}")
        self._flags = np.empty((2, size), bool)

    def same(self, first: int, golden: np.ndarray) -> RowBlock:
        """Rows [n, V] that both sides have bit for bit: nothing is measured but the margins."""
        block, golden, wide = self._begin(first, golden)
        block.set_identical(np.arange(len(golden)))
        if golden.size:
            _, block.golden_margin = rank_rows(wide, largest_of_blocks(wide), 2)
            block.run_margin = block.golden_margin
        return block

    def full(self, first: int, golden: np.ndarray, run: np.ndarray) -> RowBlock:
        """Rows [n, V] of both sides, up to the golden's first that is not finite."""
        block, golden, wide = self._begin(first, golden)
        run = run[: len(golden)]
        if not golden.size:
            if run.dtype == golden.dtype:
                block.set_identical(np.arange(len(golden)))
            return block
        equal = equal_rows(run, golden) if run.dtype == golden.dtype else np.zeros(len(golden), bool)
        block.set_identical(np.flatnonzero(equal))
        maxima = largest_of_blocks(wide)
        top, block.golden_margin = rank_rows(wide, maxima, MOST)
        block.golden_top[:, : top.shape[1]] = top
        block.run_margin[equal] = block.golden_margin[equal]
        block.run_top[equal] = block.golden_top[equal]
        if not equal.all():
            other = np.flatnonzero(~equal)
            block.measured[other] = True
            columns = {"abs": np.zeros(len(golden), np.int64), "ulp": np.zeros(len(golden), np.int64)}
            block.locate = partial(self._locate, first, golden, run, columns)
            self._measure(block, columns, other, golden, wide, maxima.max(axis=1), run)
        return block

    def _begin(self, first: int, golden: np.ndarray) -> tuple[RowBlock, np.ndarray, np.ndarray]:
        bad = find_golden_nonfinite(first, golden)
        golden = golden if bad is None else golden[: bad.row - first]
        block = blank_block(first, len(golden), self.vocab, full=True)
        block.golden_nonfinite = bad
        block.seen[:] = self.vocab
        block.feed = lambda baselines: baselines.feed(golden)
        return block, golden, wide_values(golden)

    def _measure(
        self,
        block: RowBlock,
        columns: dict[str, np.ndarray],
        other: np.ndarray,
        golden: np.ndarray,
        golden_wide: np.ndarray,
        golden_max: np.ndarray,
        run: np.ndarray,
    ) -> None:
        """Fill in the rows `other`, which differ."""
        run_wide = wide_values(run)
        maxima = largest_of_blocks(run_wide)
        with np.errstate(invalid="ignore", over="ignore"):
            run_max = maxima.max(axis=1)
            finite = np.isfinite(run_max) & np.isfinite(run_wide.min(axis=1))
            plain = finite.copy()
            if golden.dtype != self.dtype:  # a golden beyond the run's type has no place on its scale
                ends = golden_max, golden_wide.min(axis=1)
                plain &= np.isfinite(ends[0].astype(self.dtype)) & np.isfinite(ends[1].astype(self.dtype))
        block.nonfinite[other] = ~finite[other]
        good, odd = other[plain[other]], other[~plain[other]]
        for i in odd:
            self._measure_odd(block, columns, int(i), golden, run)
        if not len(good):
            return
        values = run_wide if len(good) == len(run) else run_wide[good]
        top, block.run_margin[good] = rank_rows(values, maxima[good], MOST)
        block.run_top[good, : top.shape[1]] = top
        step = max(1, TILE // self.vocab)
        with np.errstate(all="ignore"):
            for lo in range(0, len(good), step):
                self._measure_rows(
                    block, columns, good[lo : lo + step], golden, golden_wide, golden_max, run, run_wide, run_max
                )

    def _measure_odd(
        self, block: RowBlock, columns: dict[str, np.ndarray], i: int, golden: np.ndarray, run: np.ndarray
    ) -> None:
        """Row i with a value that is not finite, by metrics.py."""
        a, b = run[i : i + 1], golden[i : i + 1]
        difference, ulps = abs_difference(a, b), ulp_distance(a, b, self.dtype)
        ok = self.tolerance.values_within(difference, b, ulps) & np.isfinite(a)
        block.max_abs[i], block.max_ulp[i], block.kl[i] = difference.max(), ulps.max(), kl_divergence(a, b)[0]
        columns["abs"][i], columns["ulp"][i] = difference.argmax(), ulps.argmax()  # the first NaN is the largest
        block.out[i] = np.count_nonzero(~ok)
        top = top_k(a[0], MOST)[0]
        block.run_top[i, : len(top)] = top
        with np.errstate(all="ignore"):
            if len(top) > 1:
                block.run_margin[i] = float(a[0, top[0]]) - float(a[0, top[1]])
            y, d = b[0].astype(np.float64), a[0].astype(np.float64) - b[0].astype(np.float64)
            block.sums[i] = (d * d).sum(), (y * y).sum(), (y * d).sum()
            block.blocks[i] = largest_of_blocks(difference)[0]

    def _spans(self) -> Iterator[tuple[int, int]]:
        """The tiles of a row: whole blocks of the curves."""
        step = self.vocab if self.vocab <= TILE else max(1, TILE // self.block_size) * self.block_size
        return ((lo, min(lo + step, self.vocab)) for lo in range(0, self.vocab, step))

    def _measure_rows(
        self,
        block: RowBlock,
        columns: dict[str, np.ndarray],
        rows: np.ndarray,
        golden: np.ndarray,
        golden_wide: np.ndarray,
        golden_max: np.ndarray,
        run: np.ndarray,
        run_wide: np.ndarray,
        run_max: np.ndarray,
    ) -> None:
        """As many rows as fit into one tile, or one that has several; all finite."""
        n = len(rows)
        together = rows[-1] - rows[0] + 1 == n
        pick = slice(int(rows[0]), int(rows[-1]) + 1) if together else rows
        a, b, raw_a, raw_b = run_wide[pick], golden_wide[pick], run[pick], golden[pick]
        # exp needs no maximum taken off where nothing can leave float64
        a_off, b_off = (_offset(maxima[rows].astype(np.float64))[:, None] for maxima in (run_max, golden_max))
        moved = _Moved(n) if self.vocab >= SHIFT_VOCAB else None
        largest, ulps, sums = np.zeros(n), np.zeros(n, np.uint64), np.zeros((n, 6))
        for lo, hi in self._spans():
            shape, size = (n, hi - lo), n * (hi - lo)
            x, y, d, t = (buffer[:size].reshape(shape) for buffer in self._floats)
            np.copyto(x, a[:, lo:hi])
            np.copyto(y, b[:, lo:hi])
            np.subtract(x, y, out=d)
            if moved is not None and not moved.add(d):
                moved = None
            for place, one, two in ((0, d, d), (1, y, y), (2, y, d)):
                sums[:, place] += np.multiply(one, two, out=t).sum(axis=1)
            u = d
            if a_off.any() or b_off.any():
                x, t = np.subtract(x, a_off, out=x), np.subtract(y, b_off, out=t)
                u = x - t  # where nothing was taken off it is d to the last bit
            sums[:, 3] += np.exp(x, out=x).sum(axis=1)
            np.exp(y if u is d else t, out=x)
            sums[:, 4] += x.sum(axis=1)
            sums[:, 5] += np.multiply(x, u, out=x).sum(axis=1)
            np.abs(d, out=d)
            blocks = np.maximum.reduceat(d, np.arange(0, hi - lo, self.block_size), axis=1)
            first = lo // self.block_size
            block.blocks[rows, first : first + blocks.shape[1]] = blocks
            distance = self._ulps(raw_a[:, lo:hi], raw_b[:, lo:hi])
            for what, values, most, best in (("abs", d, blocks, largest), ("ulp", distance, distance, ulps)):
                more = (most := most.max(axis=1)) > best
                if more.any():
                    best[more] = most[more]
                    columns[what][rows[more]] = lo + values[more].argmax(axis=1)
            block.out[rows] += self._count_out(d, y, t, blocks.max(), distance)
        block.max_abs[rows], block.max_ulp[rows], block.sums[rows] = largest, ulps, sums[:, :3]
        kl = np.log(sums[:, 3] / sums[:, 4]) - sums[:, 5] / sums[:, 4]
        for i in np.flatnonzero(~np.isfinite(kl)):  # 0 · inf where differences leave float64
            kl[i] = kl_divergence(raw_a[i : i + 1], raw_b[i : i + 1])[0]
        block.kl[rows] = np.where(kl < 0, 0.0, kl)
        if moved is not None:
            block.shift[rows] = moved.by()

    def _ulps(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """ULP distances of finite values [n, C], unsigned of the run's size: `ulp_distance` in buffers."""
        kind = self._integers.dtype
        p, q = (values.astype(self.dtype, copy=False).view(kind) for values in (a, b))
        t, signs = (buffer[: a.size].reshape(a.shape) for buffer in self._integers)
        apart = self._flags[0, : a.size].reshape(a.shape)
        np.less(np.bitwise_xor(p, q, out=signs), 0, out=apart)
        np.abs(np.subtract(p, q, out=t), out=t)
        distance = t.view(f"u{kind.itemsize}")
        if apart.any():  # on either side of zero the two magnitudes add up
            both = np.iinfo(kind).max
            distance[apart] = ((p[apart] & both).view(distance.dtype)) + ((q[apart] & both).view(distance.dtype))
        return distance

    def _count_out(
        self, difference: np.ndarray, golden: np.ndarray, t: np.ndarray, largest: float, ulps: np.ndarray
    ) -> np.ndarray | int:
        """How many values of each row [n] break a bound on single values: `Tolerance.values_within` in buffers, and
        without a look where the largest of all is within."""
        rule = self.tolerance
        absolute = rule.atol is not None and rule.rtol is not None and not largest <= rule.atol
        by_ulp = rule.max_ulp is not None and not ulps.max() <= rule.max_ulp
        if not (absolute or by_ulp or not np.isfinite(largest)):
            return 0
        ok, more = (buffer[: difference.size].reshape(difference.shape) for buffer in self._flags)
        if absolute:
            np.abs(golden, out=t)
            t *= rule.rtol
            t += rule.atol
            np.less_equal(difference, t, out=ok)
        else:
            ok[...] = True
        if by_ulp:
            ok &= np.less_equal(ulps, min(rule.max_ulp, np.iinfo(ulps.dtype).max), out=more)
        if not np.isfinite(largest):
            ok &= np.isfinite(difference, out=more)
        return ok.shape[1] - np.count_nonzero(ok, axis=1)

    def _locate(
        self, first: int, golden: np.ndarray, run: np.ndarray, columns: dict[str, np.ndarray], what: str, i: int
    ) -> Place:
        """See RowBlock.locate."""
        a, b = run[i : i + 1], golden[i : i + 1]
        match what:
            case "abs" | "ulp":
                token = columns[what][i]
            case "value":
                token = np.argmin(self.tolerance.values_pass(a, b, self.dtype) & np.isfinite(a))
            case "nonfinite":
                token = np.argmin(np.isfinite(a))
            case _:
                raise ValueError(f"full rows have no {what}")
        return Place(first + i, int(token), float(b[0, token]), float(a[0, token]))

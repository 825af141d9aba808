"""Every figure of full rows in one pass over values that stay in the processor's cache.

The figures are those of metrics.py, taken without a temporary of a block's size: rows are cut into tiles, and every
step of NumPy writes into a buffer that is used again. A row's sums are those of its tiles, added from left to right;
tiles are cut by the size of the vocabulary alone, and what a row gives does not depend on its neighbours. So no number
depends on how rows are cut into blocks or on which thread measures them. Rows with a value that is not finite go
through metrics.py itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kdtr_cli.parity.curves import curve_block_size
from kdtr_cli.parity.metrics import abs_difference, equal_rows, kl_divergence, top_k, ulp_distance
from kdtr_cli.parity.needs import RunningNeeds, used_share
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

#: So many values of a row are looked at first, whether the rest can be of interest.
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


@dataclass
class _Pair:
    """Two blocks of rows [n, V], as they are stored and as `wide_values` has them, each row's largest value, and where
    in it the largest difference and ULP distance are."""

    golden: np.ndarray
    golden_wide: np.ndarray
    golden_max: np.ndarray
    run: np.ndarray
    run_wide: np.ndarray
    run_max: np.ndarray = field(init=False)
    abs_at: np.ndarray = field(init=False)
    ulp_at: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.abs_at, self.ulp_at = np.zeros((2, len(self.golden)), np.int64)


def _equal_rows(run: np.ndarray, golden: np.ndarray) -> np.ndarray:
    """`equal_rows`, which look at all of a row only where its first values are equal."""
    if run.dtype != golden.dtype:
        return np.zeros(len(golden), bool)
    equal = equal_rows(run[:, :PROBE], golden[:, :PROBE])
    if (rows := np.flatnonzero(equal)).size:
        equal[rows] = equal_rows(run, golden) if equal.all() else equal_rows(run[rows], golden[rows])
    return equal


def _offset(largest: np.ndarray) -> np.ndarray:
    """What to take off the values of rows [n] before exp, from their largest ones: nothing where exp stays well inside
    float64 all the same; float64 [n, 1]."""
    largest = largest.astype(np.float64)[:, None]
    return np.where((largest > -200.0) & (largest < 500.0), 0.0, largest)


def _differences(a: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray, d: np.ndarray) -> None:
    """Run and golden in float64, and their difference."""
    np.copyto(x, a)
    np.copyto(y, b)
    np.subtract(x, y, out=d)


def _add_squares(sums: np.ndarray, y: np.ndarray, d: np.ndarray, t: np.ndarray) -> None:
    """Add to sums [n, 3] those of d², y² and y · d."""
    for place, one, two in ((0, d, d), (1, y, y), (2, y, d)):
        sums[:, place] += np.multiply(one, two, out=t).sum(axis=1)


def _add_masses(
    sums: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    d: np.ndarray,
    t: np.ndarray,
    offsets: tuple[np.ndarray, np.ndarray],
) -> None:
    """Add to sums [n, 3] those of exp x, of exp y and of exp y · (x − y), all but the offsets; x is used up."""
    of_y = y
    if offsets[0].any() or offsets[1].any():
        x, of_y = np.subtract(x, offsets[0], out=x), np.subtract(y, offsets[1], out=t)
        d = x - of_y  # where nothing was taken off it is d to the last bit
    sums[:, 0] += np.exp(x, out=x).sum(axis=1)
    sums[:, 1] += np.exp(of_y, out=x).sum(axis=1)
    sums[:, 2] += np.multiply(x, d, out=x).sum(axis=1)


def _largest_of_tile(d: np.ndarray, block_size: int) -> np.ndarray:
    """Makes d absolute, and gives the largest of each block."""
    np.abs(d, out=d)
    return np.maximum.reduceat(d, np.arange(0, d.shape[1], block_size), axis=1)


def _weigh(pair: _Pair, ulps: np.ndarray, needs: RunningNeeds, i: int) -> None:
    """See RowBlock.weigh; `ulps` are each row's largest distance."""
    a, b = pair.run[i : i + 1], pair.golden[i : i + 1]
    needs.values(abs_difference(a, b), b, ulps[i : i + 1])


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
        equal = _equal_rows(run, golden)
        block.set_identical(np.flatnonzero(equal))
        if not golden.size:
            return block
        maxima = largest_of_blocks(wide)
        top, block.golden_margin = rank_rows(wide, maxima, MOST)
        block.golden_top[:, : top.shape[1]] = top
        block.run_margin[equal] = block.golden_margin[equal]
        block.run_top[equal] = block.golden_top[equal]
        if not equal.all():
            other = np.flatnonzero(~equal)
            block.measured[other] = True
            pair = _Pair(golden, wide, maxima.max(axis=1), run, wide_values(run))
            block.locate = partial(self._locate, first, pair)
            block.weigh = partial(_weigh, pair, block.max_ulp)  # not the block: what it holds should go with it
            self._measure(block, pair, other)
        return block

    def _begin(self, first: int, golden: np.ndarray) -> tuple[RowBlock, np.ndarray, np.ndarray]:
        bad = find_golden_nonfinite(first, golden)
        golden = golden if bad is None else golden[: bad.row - first]
        block = blank_block(first, len(golden), self.vocab, full=True)
        block.golden_nonfinite = bad
        block.seen[:] = self.vocab
        block.feed = lambda baselines, lo, hi: baselines.feed(golden[lo:hi])
        return block, golden, wide_values(golden)

    def _measure(self, block: RowBlock, pair: _Pair, other: np.ndarray) -> None:
        """Fill in the rows `other`, which differ."""
        maxima = largest_of_blocks(pair.run_wide)
        with np.errstate(invalid="ignore", over="ignore"):
            pair.run_max = maxima.max(axis=1)
            finite = np.isfinite(pair.run_max) & np.isfinite(pair.run_wide.min(axis=1))
            plain = finite.copy()
            if pair.golden.dtype != self.dtype:  # a golden beyond the run's type has no place on its scale
                for ends in (pair.golden_max, pair.golden_wide.min(axis=1)):
                    plain &= np.isfinite(ends.astype(self.dtype))
        block.nonfinite[other] = ~finite[other]
        for i in other[~plain[other]]:
            self._measure_odd(block, pair, int(i))
        good = other[plain[other]]
        if not len(good):
            return
        values = pair.run_wide if len(good) == len(finite) else pair.run_wide[good]
        top, block.run_margin[good] = rank_rows(values, maxima[good], MOST)
        block.run_top[good, : top.shape[1]] = top
        step = max(1, TILE // self.vocab)
        with np.errstate(all="ignore"):
            for lo in range(0, len(good), step):
                self._measure_rows(block, pair, good[lo : lo + step])

    def _measure_odd(self, block: RowBlock, pair: _Pair, i: int) -> None:
        """Row i with a value that is not finite, by metrics.py."""
        a, b = pair.run[i : i + 1], pair.golden[i : i + 1]
        difference, ulps = abs_difference(a, b), ulp_distance(a, b, self.dtype)
        ok = self.tolerance.values_within(difference, b, ulps) & np.isfinite(a)
        block.max_abs[i], block.max_ulp[i], block.kl[i] = difference.max(), ulps.max(), kl_divergence(a, b)[0]
        pair.abs_at[i], pair.ulp_at[i] = difference.argmax(), ulps.argmax()  # the first NaN is the largest
        block.out[i] = np.count_nonzero(~ok)
        top = top_k(a[0], MOST)[0]
        block.run_top[i, : len(top)] = top
        with np.errstate(all="ignore"):
            if len(top) > 1:
                block.run_margin[i] = float(a[0, top[0]]) - float(a[0, top[1]])
            y, d = b[0].astype(np.float64), a[0].astype(np.float64) - b[0].astype(np.float64)
            block.sums[i] = (d * d).sum(), (y * y).sum(), (y * d).sum()
            block.blocks[i] = largest_of_blocks(difference)[0]
            if self.tolerance.rtol:
                block.share[i] = used_share(difference, self.tolerance.bound(b))

    def _spans(self) -> Iterator[tuple[int, int]]:
        """The tiles of a row: whole blocks of the curves."""
        step = self.vocab if self.vocab <= TILE else max(1, TILE // self.block_size) * self.block_size
        return ((lo, min(lo + step, self.vocab)) for lo in range(0, self.vocab, step))

    def _measure_rows(self, block: RowBlock, pair: _Pair, rows: np.ndarray) -> None:
        """As many rows as fit into one tile, or one that has several; all finite."""
        n = len(rows)
        together = rows[-1] - rows[0] + 1 == n
        pick = slice(int(rows[0]), int(rows[-1]) + 1) if together else rows
        a, b, raw_a, raw_b = (side[pick] for side in (pair.run_wide, pair.golden_wide, pair.run, pair.golden))
        offsets = _offset(pair.run_max[rows]), _offset(pair.golden_max[rows])
        moved = _Moved(n) if self.vocab >= SHIFT_VOCAB else None
        largest, ulps, squares, masses = np.zeros(n), np.zeros(n, np.uint64), np.zeros((n, 3)), np.zeros((n, 3))
        for lo, hi in self._spans():
            shape, size = (n, hi - lo), n * (hi - lo)
            x, y, d, t = (buffer[:size].reshape(shape) for buffer in self._floats)
            _differences(a[:, lo:hi], b[:, lo:hi], x, y, d)
            if moved is not None and not moved.add(d):
                moved = None
            _add_squares(squares, y, d, t)
            _add_masses(masses, x, y, d, t, offsets)
            blocks = _largest_of_tile(d, self.block_size)
            first = lo // self.block_size
            block.blocks[rows, first : first + blocks.shape[1]] = blocks
            distance = self._ulps(raw_a[:, lo:hi], raw_b[:, lo:hi])
            for at, values, most, best in (
                (pair.abs_at, d, blocks, largest),
                (pair.ulp_at, distance, distance, ulps),
            ):
                more = (most := most.max(axis=1)) > best
                if more.any():
                    best[more] = most[more]
                    at[rows[more]] = lo + (values if n == 1 else values[more]).argmax(axis=1)
            if self.tolerance.rtol:
                self._fill_bound(y, t)
            block.out[rows] += self._count_out(d, t, blocks.max(), distance)
            if self.tolerance.rtol:
                block.share[rows] = np.maximum(block.share[rows], self._share(d, y, t))
        block.max_abs[rows], block.max_ulp[rows], block.sums[rows] = largest, ulps, squares
        kl = np.log(masses[:, 0] / masses[:, 1]) - masses[:, 2] / masses[:, 1]
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

    def _fill_bound(self, golden: np.ndarray, out: np.ndarray) -> None:
        """`Tolerance.bound` in a buffer."""
        np.abs(golden, out=out)
        out *= self.tolerance.rtol
        out += self.tolerance.atol

    def _count_out(
        self, difference: np.ndarray, bound: np.ndarray, largest: float, ulps: np.ndarray
    ) -> np.ndarray | int:
        """How many values of each row [n] break a bound on single values: `Tolerance.values_within` in buffers, and
        without a look where the largest of all is within. `bound` is read where there is an rtol."""
        rule = self.tolerance
        absolute = rule.atol is not None and rule.rtol is not None and not largest <= rule.atol
        by_ulp = rule.max_ulp is not None and not ulps.max() <= rule.max_ulp
        if not (absolute or by_ulp or not np.isfinite(largest)):
            return 0
        ok, more = (buffer[: difference.size].reshape(difference.shape) for buffer in self._flags)
        if absolute and rule.rtol:
            np.less_equal(difference, bound, out=ok)
        elif absolute:
            np.less_equal(difference, rule.atol, out=ok)
        else:
            ok[...] = True
        if by_ulp:
            ok &= np.less_equal(ulps, min(rule.max_ulp, np.iinfo(ulps.dtype).max), out=more)
        if not np.isfinite(largest):
            ok &= np.isfinite(difference, out=more)
        return ok.shape[1] - np.count_nonzero(ok, axis=1)

    def _share(self, difference: np.ndarray, golden: np.ndarray, bound: np.ndarray) -> np.ndarray:
        """`used_share` of each row [n] of finite values; the bound is used up."""
        most = np.divide(difference, bound, out=bound).max(axis=1)
        for i in np.flatnonzero(np.isnan(most)):  # 0 / 0, or values beyond float64
            most[i] = used_share(difference[i], self.tolerance.bound(golden[i]))
        return most

    def _locate(self, first: int, pair: _Pair, what: str, i: int) -> Place:
        """See RowBlock.locate."""
        a, b = pair.run[i : i + 1], pair.golden[i : i + 1]
        match what:
            case "abs":
                token = pair.abs_at[i]
            case "ulp":
                token = pair.ulp_at[i]
            case "value":
                token = np.argmin(self.tolerance.values_pass(a, b, self.dtype) & np.isfinite(a))
            case "nonfinite":
                token = np.argmin(np.isfinite(a))
            case _:
                raise ValueError(f"full rows have no {what}")
        return Place(first + i, int(token), float(b[0, token]), float(a[0, token]))

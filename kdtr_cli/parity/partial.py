"""Comparing rows of which a side has only the top K values, or only digests.

What can be said of such a row:

* equal digests: the rows are equal bit for bit, whatever the forms;
* other digests: some bit differs; by how much only the values say that both sides have;
* values are compared *by id*, never by rank; an id that one side does not hold is not compared, but
* an id outside a top-K set has a value of at most the K-th; a value of the other side that lies further above it than
  the tolerance allows is out of bounds without being seen.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kdtr_cli.parity.curves import curve_block_size
from kdtr_cli.parity.evidence import Logits, sha256_rows
from kdtr_cli.parity.measure import find_golden_nonfinite
from kdtr_cli.parity.metrics import abs_difference, match_ids, top_k, ulp_distance
from kdtr_cli.parity.needs import RunningNeeds, used_share
from kdtr_cli.parity.ranks import MOST
from kdtr_cli.parity.rows import Place, RowBlock, blank_block
from kdtr_cli.parity.tolerances import Tolerance

__all__ = ["compare_partial"]


@dataclass(frozen=True)
class _Side:
    """One side's rows lo..hi: `values` [n, V] with ids None (full), values [n, K] with ids [n, K] (top K), or neither
    (digest). `there` bool [n, K] says which of the top K there are (None: all)."""

    values: np.ndarray | None
    ids: np.ndarray | None
    there: np.ndarray | None = None

    @classmethod
    def read(cls, logits: Logits, lo: int, hi: int) -> "_Side":
        if logits.rows is not None:
            return cls(logits.rows(lo, hi), None)
        if logits.top_ids is not None and logits.top_values is not None:
            ids, values = logits.top_ids(lo, hi), logits.top_values(lo, hi)
            if logits.top_counts is None:
                return cls(values, ids)
            there = np.arange(ids.shape[1]) < logits.top_counts(lo, hi)[:, None]
            # what is not there may be anything; 0 is an id and a number that can be worked with
            return cls(np.where(there, values, values.dtype.type(0)), np.where(there, ids, 0), there)
        return cls(None, None)

    @property
    def is_full(self) -> bool:
        return self.values is not None and self.ids is None

    @property
    def is_top(self) -> bool:
        return self.ids is not None

    def head(self, n: int) -> "_Side":
        """The first n rows."""
        return _Side(*(None if held is None else held[:n] for held in (self.values, self.ids, self.there)))

    def at(self, rows: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The values of the rows numbered `rows` [m] at `ids` [m, K], and which of them this side holds."""
        if self.ids is None:
            return np.take_along_axis(self.values[rows], ids.astype(np.int64), axis=1), np.ones(ids.shape, bool)
        place, found = match_ids(ids, self.ids[rows])
        if self.there is not None:
            found = found & np.take_along_axis(self.there[rows], place, axis=1)
        return np.take_along_axis(self.values[rows], place, axis=1), found


def compare_partial(tolerance: Tolerance, golden: Logits, run: Logits, lo: int, hi: int) -> RowBlock:
    """The figures of rows lo..hi of the two sets, up to the golden's first that is not finite; at least one set is not
    full. Differences are taken where both sides hold a value."""
    g, r = _Side.read(golden, lo, hi), _Side.read(run, lo, hi)
    equal, known = _digests_agree(golden, run, g, r, lo, hi)
    bad = None if g.values is None else _first_nonfinite(lo, g.values, g.ids)
    if bad is None and r.is_full:  # equal digests: the golden's row has what the run's has
        bad = _first_nonfinite(lo, np.where(equal[:, None], r.values, 0), None)
    if bad is not None:
        n = bad.row - lo
        g, r, equal, known = g.head(n), r.head(n), equal[:n], known[:n]
    vocab = golden.vocab or run.vocab
    block = blank_block(lo, len(equal), vocab, full=False)
    block.golden_nonfinite = bad
    block.set_identical(np.flatnonzero(equal))
    block.other_bits = known & ~equal
    _rank(block, g, r)
    rest = np.flatnonzero(~equal)
    if len(rest) and r.values is not None:
        block.nonfinite[rest] = ~np.isfinite(r.values[rest]).all(axis=1)
        if g.values is not None:
            _measure(block, rest, g, r, tolerance, run.dtype)
        elif block.nonfinite.any():
            block.locate = partial(_locate_nonfinite, lo, r)
    if g.is_full and r.is_top:
        block.feed = lambda baselines, lo, hi: baselines.feed(
            g.values[lo:hi], r.ids[lo:hi], None if r.there is None else r.there[lo:hi]
        )
    elif g.is_top:
        block.feed = lambda baselines, lo, hi: baselines.feed_top(g.ids[lo:hi], g.values[lo:hi])
    return block


def _first_nonfinite(lo: int, values: np.ndarray, ids: np.ndarray | None) -> Place | None:
    bad = find_golden_nonfinite(lo, values)
    return bad if bad is None or ids is None else replace(bad, token=int(ids[bad.row - lo, bad.token]))


def _locate_nonfinite(lo: int, r: _Side, what: str, i: int) -> Place:
    at = int(np.argmin(np.isfinite(r.values[i])))
    return Place(lo + i, at if r.ids is None else int(r.ids[i, at]), run=float(r.values[i, at]))


def _rank(block: RowBlock, g: _Side, r: _Side) -> None:
    """The largest ids and the margins, as far as each side holds them."""
    for side, top, margin in ((g, block.golden_top, block.golden_margin), (r, block.run_top, block.run_margin)):
        if side.values is None:
            continue
        for i, row in enumerate(side.values):
            if side.ids is None:
                at, values = top_k(row, MOST)
            else:
                ids = side.ids[i]
                if side.there is not None:
                    ids, row = ids[side.there[i]], row[side.there[i]]
                order = np.argsort(ids)  # so that equal values come in the order of their ids
                at, values = top_k(row[order], MOST)
                at = ids[order[at]]
            top[i, : len(at)] = at
            if len(at) > 1:
                with np.errstate(all="ignore"):
                    margin[i] = float(values[0]) - float(values[1])


def _digests_agree(golden: Logits, run: Logits, g: _Side, r: _Side, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
    """Which rows have equal digests, and of which that could be said: bool [n] each."""
    nothing = np.zeros(hi - lo, bool)
    if golden.dtype != run.dtype:
        return nothing, nothing
    digests = []
    for logits, side in ((golden, g), (run, r)):
        if logits.row_sha256 is not None:
            digests.append(logits.row_sha256(lo, hi))
        elif side.is_full:
            digests.append(sha256_rows(side.values))
        else:
            return nothing, nothing
    return (digests[0] == digests[1]).all(axis=1), np.ones(hi - lo, bool)


def _measure(block: RowBlock, rest: np.ndarray, g: _Side, r: _Side, tolerance: Tolerance, dtype: np.dtype) -> None:
    """Fill in the rows `rest`, whose bits are not known to be equal; both sides hold values."""
    asked = g if g.is_top else r
    ids = asked.ids[rest]
    (b, b_held), (a, a_held) = g.at(rest, ids), r.at(rest, ids)
    seen = a_held & b_held
    if asked.there is not None:
        seen &= asked.there[rest]
    difference, ulps = abs_difference(a, b), ulp_distance(a, b, dtype)
    ok = ~seen | (tolerance.values_within(difference, b, ulps) & np.isfinite(a))
    block.seen[rest] = seen.sum(axis=1)
    block.out[rest] = (~ok).sum(axis=1)
    met = seen.any(axis=1)
    block.measured[rest] = met
    if tolerance.rtol:
        shares = zip(difference, tolerance.bound(b), seen, strict=True)
        block.share[rest] = [used_share(*row) for row in shares]
    difference, ulps = np.where(seen, difference, -1.0), np.where(seen, ulps, np.uint64(0))
    if ids.shape[1]:
        block.max_abs[rest[met]], block.max_ulp[rest[met]] = difference.max(axis=1)[met], ulps.max(axis=1)[met]
    if block.blocks.shape[1]:
        _fill_blocks(block, rest, ids, difference)
    hidden_places: dict[int, Place] = {}
    if r.is_top:
        _above_the_rest(block, rest, g, r, tolerance, hidden_places, golden_above=True)
    if g.is_top:
        _above_the_rest(block, rest, r, g, tolerance, hidden_places, golden_above=False)
    row_of = {int(i): at for at, i in enumerate(rest)}

    def locate(what: str, i: int) -> Place:
        if what == "hidden":
            return hidden_places[i]
        if what == "nonfinite":
            return _locate_nonfinite(block.first, r, what, i)
        at = row_of[i]
        column = {"abs": difference[at].argmax, "ulp": ulps[at].argmax, "value": ok[at].argmin}[what]()
        return Place(block.first + i, int(ids[at, column]), float(b[at, column]), float(a[at, column]))

    def weigh(needs: RunningNeeds, i: int) -> None:
        at, row = row_of[i], np.array([i])
        if not met[at]:
            needs.refuse()  # nothing of it is seen on both sides
        needs.values(difference[at], b[at], ulps[at])  # what is not seen stands there as −1 and 0: it needs nothing
        if r.is_top:
            _weigh_the_rest(needs, row, g, r, golden_above=True)
        if g.is_top:
            _weigh_the_rest(needs, row, r, g, golden_above=False)

    block.locate, block.weigh = locate, weigh


def _fill_blocks(block: RowBlock, rest: np.ndarray, ids: np.ndarray, difference: np.ndarray) -> None:
    """The largest difference seen of each block of the vocabulary; of blocks without one nothing is known."""
    size = curve_block_size(block.vocab)
    largest = np.full((len(rest), block.blocks.shape[1]), -1.0)
    places = ids.astype(np.int64) // size
    with np.errstate(invalid="ignore", over="ignore"):
        np.maximum.at(largest, (np.arange(len(rest))[:, None], places), difference)
        block.blocks[rest] = np.where(largest == -1.0, np.nan, largest)


def _above_the_rest(
    block: RowBlock,
    rest: np.ndarray,
    one: _Side,
    top: _Side,
    tolerance: Tolerance,
    found: dict[int, Place],
    *,
    golden_above: bool,
) -> None:
    """Count the values of `one`, at ids that `top` does not hold, that are out of bounds above top's K-th value, and
    keep the place of the first in each row in `found`.

    The value not held is at most the K-th, t. With b = one's value (golden above) |a − b| ≥ b − t; with a = one's,
    |a − b| − rtol · |b| is least at b = t as long as rtol ≤ 1. So x − t > bound proves the miss.
    """
    if not golden_above and (tolerance.rtol or 0) > 1:
        return
    values, kth, held = _beside_the_rest(rest, one, top)
    with np.errstate(invalid="ignore", over="ignore"):
        bound = tolerance.bound(values if golden_above else kth)
        misses = ~held & (values - kth > bound)
    block.hidden[rest] += misses.sum(axis=1)
    for at in np.flatnonzero(misses.any(axis=1)):
        i, column = int(rest[at]), int(misses[at].argmax())
        token = column if one.ids is None else int(one.ids[i, column])
        value = float(values[at, column])
        place = Place(block.first + i, token, value if golden_above else None, None if golden_above else value)
        found.setdefault(i, place)


def _weigh_the_rest(needs: RunningNeeds, rest: np.ndarray, one: _Side, top: _Side, *, golden_above: bool) -> None:
    """Add what lets the misses of `_above_the_rest` pass: beside an rtol above 1 none of the run's values is one."""
    values, kth, held = _beside_the_rest(rest, one, top)
    with np.errstate(invalid="ignore", over="ignore"):
        beside = np.where(held, 0, values if golden_above else kth)
        enough = math.inf if golden_above else math.nextafter(1.0, 2.0)
        needs.values(values - kth, beside, None, ~held & (values > kth), enough)


def _beside_the_rest(rest: np.ndarray, one: _Side, top: _Side) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the rows `rest`, in float64: the values of `one`, top's K-th, and which of one's ids `top` holds too (or `one`
    does not)."""
    with np.errstate(invalid="ignore"):
        values = one.values[rest].astype(np.float64)
        known = top.values[rest].astype(np.float64)
        there = np.ones(known.shape, bool) if top.there is None else top.there[rest]
        kth = np.where(there, known, np.inf).min(axis=1, keepdims=True)  # a row that holds nothing bounds nothing
    if one.is_full:
        held = np.zeros(values.shape, bool)
        row, at = np.nonzero(there)
        held[row, top.ids[rest][row, at]] = True
    else:
        held = top.at(rest, one.ids[rest])[1]
        if one.there is not None:
            held |= ~one.there[rest]
    return values, kth, held

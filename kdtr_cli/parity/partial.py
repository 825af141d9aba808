"""Comparing rows of which a side has only the top K values, or only digests.

What can be said of such a row:

* equal digests: the rows are equal bit for bit, whatever the forms;
* other digests: some bit differs; by how much only the values say that both sides have;
* values are compared *by id*, never by rank; an id that one side does not hold is not compared, but
* an id outside a top-K set has a value of at most the K-th; a value of the other side that lies further above it than
  the tolerance allows is out of bounds without being seen.
"""

import math
from dataclasses import dataclass

import numpy as np

from kdtr_cli.parity.evidence import Logits, sha256_rows
from kdtr_cli.parity.metrics import match_ids
from kdtr_cli.parity.tally import Place, Tally

__all__ = ["compare_partial"]


@dataclass(frozen=True)
class _Side:
    """One side's rows lo..hi: `values` [n, V] with ids None (full), values [n, K] with ids [n, K] (top K), or neither
    (digest)."""

    values: np.ndarray | None
    ids: np.ndarray | None

    @classmethod
    def read(cls, logits: Logits, lo: int, hi: int) -> "_Side":
        if logits.rows is not None:
            return cls(logits.rows(lo, hi), None)
        if logits.top_ids is not None and logits.top_values is not None:
            return cls(logits.top_values(lo, hi), logits.top_ids(lo, hi))
        return cls(None, None)

    @property
    def is_full(self) -> bool:
        return self.values is not None and self.ids is None

    @property
    def is_top(self) -> bool:
        return self.ids is not None

    def at(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The values at `ids` [n, K], and which of them this side holds."""
        if self.ids is None:
            return np.take_along_axis(self.values, ids.astype(np.int64), axis=1), np.ones(ids.shape, bool)
        place, found = match_ids(ids, self.ids)
        return np.take_along_axis(self.values, place, axis=1), found


def compare_partial(tally: Tally, golden: Logits, run: Logits, lo: int, hi: int) -> None:
    """Put rows lo..hi of the two sets into the tally; at least one of them is not full."""
    g, r = _Side.read(golden, lo, hi), _Side.read(run, lo, hi)
    equal, known = _digests_agree(golden, run, g, r, lo, hi)
    if g.values is not None and not tally.golden_is_finite(lo, g.values, g.ids):
        return
    if r.is_full and not tally.golden_is_finite(lo, np.where(equal[:, None], r.values, 0)):
        return  # the golden's digest is that of a row with a NaN
    tally.identical += int(equal.sum())
    tally.other_bits += int((known & ~equal).sum())
    if equal.any():
        tally.zero_difference()
    rest = np.flatnonzero(~equal)
    if len(rest):
        if r.values is not None:
            tally.look_for_nonfinite(lo, rest, r.values, r.ids)
        if g.values is None or r.values is None:
            tally.unmeasured += len(rest)
        else:
            _measure(tally, lo, rest, g, r)
    if g.is_full and r.is_top:
        tally.baselines.feed(g.values, r.ids)
    elif g.is_top:
        tally.baselines.feed_top(g.ids, g.values)


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


def _measure(tally: Tally, lo: int, rest: np.ndarray, g: _Side, r: _Side) -> None:
    ids = g.ids if g.is_top else r.ids
    (b, b_held), (a, a_held) = g.at(ids), r.at(ids)
    seen = (a_held & b_held)[rest]
    tally.values += int(seen.sum())
    out = tally.measure(lo + rest, a[rest], b[rest], ids[rest], seen)
    if tally.needs is not None and not seen.any(axis=1).all():
        tally.needs.refuse()  # a row of which nothing is seen on both sides
    hidden = np.zeros(len(rest), bool)
    if r.is_top:
        hidden |= _above_the_rest(tally, lo, rest, g, r, golden_above=True)
    if g.is_top:
        hidden |= _above_the_rest(tally, lo, rest, r, g, golden_above=False)
    tally.out += int((out | hidden).sum())
    tally.unmeasured += int((~seen.any(axis=1) & ~hidden).sum())


def _above_the_rest(
    tally: Tally, lo: int, rest: np.ndarray, one: _Side, top: _Side, *, golden_above: bool
) -> np.ndarray:
    """Which rows have a value of `one`, at an id that `top` does not hold, out of bounds above top's K-th value.

    The value not held is at most the K-th, t. With b = one's value (golden above) |a − b| ≥ b − t; with a = one's,
    |a − b| − rtol · |b| is least at b = t as long as rtol ≤ 1. So x − t > bound proves the miss.
    """
    unproved = not golden_above and (tally.tolerance.rtol or 0) > 1
    if unproved and tally.needs is None:
        return np.zeros(len(rest), bool)
    with np.errstate(invalid="ignore"):
        values = one.values[rest].astype(np.float64)
        kth = top.values[rest].astype(np.float64).min(axis=1, keepdims=True)
    if one.is_full:
        held = np.zeros(values.shape, bool)
        np.put_along_axis(held, top.ids[rest].astype(np.int64), True, axis=1)
    else:
        held = match_ids(one.ids[rest], top.ids[rest])[1]
    with np.errstate(invalid="ignore", over="ignore"):
        bound = tally.tolerance.bound(values if golden_above else kth)
        misses = ~held & (values - kth > bound) & (not unproved)
        if tally.needs is not None:
            beside = np.where(held, 0, values if golden_above else kth)
            enough = math.inf if golden_above else math.nextafter(1.0, 2.0)
            tally.needs.values(values - kth, beside, None, ~held & (values > kth), enough)
    for i, j in np.argwhere(misses)[:1]:
        token = int(j if one.ids is None else one.ids[rest[i], j])
        value = float(values[i, j])
        place = Place(int(lo + rest[i]), token, value if golden_above else None, None if golden_above else value)
        tally.note_out(place, "hidden")
    tally.values_out += int(misses.sum())
    return misses.any(axis=1)

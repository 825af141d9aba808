"""Mean and percentiles of a figure over any number of rows, in bounded memory, the same for any cut of the rows.

Values that are not negative are counted in bins of equal *relative* width: a bin holds the float64 values that agree in
exponent and the first 8 bits of the mantissa, so its ends lie less than 2⁻⁸ = 0.4 % apart (from 2.3e-308 on). Each bin
remembers the largest value that it was given. A percentile is by nearest rank (the ⌈q·n⌉-th smallest of n) and is
answered with the largest value of the bin that holds it: a value that did occur, never below the true one, at most
0.4 % above it.
Bins of two distributions add up, so a sweep's percentile is that of all its rows.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

__all__ = ["Distribution", "distribution_of", "merged"]

#: float64 has 52 bits of mantissa; 8 are kept.
_DROPPED_BITS = 44

_SCALE = 2**64


@dataclass(frozen=True, eq=False)
class Distribution:
    """Values float64 ≥ 0, infinity and NaN (the largest of all) among them. `keys` int64 ascending names the bins,
    `counts` int64 how many values each has, `largest` float64 the largest of them, all [bins]; `total` is the sum of
    the values that are finite."""

    keys: np.ndarray
    counts: np.ndarray
    largest: np.ndarray
    total: Fraction

    @property
    def n(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float | None:
        """None of nothing; infinite or NaN where a value is."""
        if not len(self.keys):
            return None
        if not math.isfinite(self.largest[-1]):
            return float(self.largest[-1])
        return float(self.total / self.n)

    def percentile(self, percent: int) -> float | None:
        """By nearest rank, to within a bin (see above); None of nothing."""
        if not len(self.keys):
            return None
        rank = max(1, -(-percent * self.n // 100))
        return float(self.largest[np.searchsorted(np.cumsum(self.counts), rank)])


def distribution_of(values: np.ndarray, before: "Distribution | None" = None) -> Distribution:
    """Of float64 values [n], added to those of `before`; the sum goes on where that of `before` ended, from left to
    right, so it does not depend on how the values are cut into calls."""
    values = np.abs(np.asarray(values, np.float64))  # a NaN's sign would be the first bit of its key
    # a power of 2 smaller, so that no sum leaves float64
    begun = 0.0 if before is None else float(before.total / _SCALE)
    finite = values[np.isfinite(values)] / float(_SCALE)
    total = Fraction(float(np.add.accumulate(np.concatenate([[begun], finite]))[-1])) * _SCALE
    keys = values.view(np.int64) >> _DROPPED_BITS
    counts = np.ones(len(keys), np.int64)
    if before is not None:
        keys, counts = np.concatenate([before.keys, keys]), np.concatenate([before.counts, counts])
        values = np.concatenate([before.largest, values])
    return _binned(keys, counts, values, total)


def merged(one: "Distribution | None", other: "Distribution | None") -> "Distribution | None":
    """Both together; None is nothing. Sums are exact here, so the order does not matter."""
    if one is None or other is None:
        return other if one is None else one
    keys, counts = np.concatenate([one.keys, other.keys]), np.concatenate([one.counts, other.counts])
    return _binned(keys, counts, np.concatenate([one.largest, other.largest]), one.total + other.total)


def _binned(keys: np.ndarray, counts: np.ndarray, values: np.ndarray, total: Fraction) -> Distribution:
    order = np.argsort(keys, kind="stable")
    keys, counts, values = keys[order], counts[order], values[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    if not len(starts):
        return Distribution(keys, counts, values, total)
    largest = np.maximum.reduceat(values, starts)
    return Distribution(keys[starts], np.add.reduceat(counts, starts), largest, total)

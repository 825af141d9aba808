"""The least bound of each rule that lets a comparison pass, found block by block; and how much of a bound is used.

All bounds are found with the very expressions that judge (tolerances.py), to the last bit: the value found passes, and
the next smaller float64 does not. An infinite one says that no bound of this rule lets it pass.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kdtr_cli.parity.metrics import abs_difference, kl_divergence, ulp_distance

__all__ = ["RTOLS", "Needed", "RuleNeeds", "RunningNeeds", "least_of", "most_of", "used_share"]

#: The rtol of each pair of atol and rtol that is looked at.
RTOLS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)

_FAR = 2**64 - 1  # metrics.ulp_distance: one of the two is not finite
_LOOKED_AT = 8  # rows of a baseline that are measured whatever comes out
_FAR_BEYOND = 16


@dataclass(frozen=True)
class RuleNeeds:
    """The least bound of each rule by itself: atol with rtol 0, rtol with atol 0, the atol beside each of RTOLS, ULPs,
    and KL (None: not to be had, the rows are partial)."""

    atol: float = 0.0
    rtol: float = 0.0
    atols: tuple[float, ...] = (0.0,) * len(RTOLS)
    max_ulp: int | float = 0
    max_kl: float | None = 0.0


@dataclass(frozen=True)
class Needed:
    """What a run needs, and what each engine that knows nothing (baselines.py) would need to pass at every row."""

    run: RuleNeeds
    baselines: Mapping[str, RuleNeeds]


def most_of(needs: Iterable[RuleNeeds]) -> RuleNeeds:
    """What lets all of them pass."""
    return _fold(needs, max)


def least_of(needs: Iterable[RuleNeeds]) -> RuleNeeds:
    """What lets, for each rule, at least one of them pass."""
    return _fold(needs, min)


def _fold(needs: Iterable[RuleNeeds], pick: Callable) -> RuleNeeds:
    first, *rest = needs
    for other in rest:
        kls = [kl for kl in (first.max_kl, other.max_kl) if kl is not None]
        first = RuleNeeds(
            pick(first.atol, other.atol),
            pick(first.rtol, other.rtol),
            tuple(map(pick, first.atols, other.atols)),
            pick(first.max_ulp, other.max_ulp),
            pick(kls) if len(kls) == 2 else None,
        )
    return first


class RunningNeeds:
    """Fed with blocks of compared values, and of rows' KL."""

    def __init__(self) -> None:
        self.rows = 0
        self._atol = self._rtol = 0.0
        self._atols = np.zeros(len(RTOLS))
        self._ulp: int | float = 0
        self._kl: float | None = None

    def needs(self) -> RuleNeeds:
        """Those of all blocks so far."""
        return RuleNeeds(self._atol, self._rtol, tuple(self._atols.tolist()), self._ulp, self._kl)

    def values(
        self,
        difference: np.ndarray,
        golden: np.ndarray,
        ulps: np.ndarray | None,
        seen: np.ndarray | None = None,
        enough: float = math.inf,
    ) -> None:
        """|a - b| float64, b and the ULP distances uint64 (None: not to be had) of values [n, K]; only those that are
        ``seen``. An rtol of ``enough`` alone lets all of them pass."""
        if seen is not None:
            difference, golden = difference[seen], golden[seen]
        if ulps is not None:
            self._ulps(ulps, seen)
        if not difference.size:
            return
        if not np.isfinite(difference).all():
            self.refuse()
            return
        self._atol = max(self._atol, float(difference.max()))
        # a value that keeps the smallest bound so far asks for nothing more: few are left to be looked at
        size = np.abs(golden.astype(np.float64))
        with np.errstate(over="ignore", invalid="ignore"):
            over = ~(difference <= self._rtol * size)
            if self._rtol < enough and over.any():
                self._rtol = max(self._rtol, min(_least_rtol(difference[over], size[over]), enough))
            over = difference > self._atols.min()
            if over.any():
                difference, size = difference[over], size[over]
                for k, rtol in enumerate(RTOLS):
                    share = rtol * size
                    over = ~(difference <= self._atols[k] + share)
                    if over.any():
                        self._atols[k] = _least_atol(difference[over], share[over])

    def kl(self, values: np.ndarray) -> None:
        """KL of rows [n]."""
        most = float(values.max(initial=0.0))
        self._kl = max(self._kl or 0.0, math.inf if math.isnan(most) else most)

    def refuse(self) -> None:
        """Something that no bound on values lets pass."""
        self._atol = self._rtol = math.inf
        self._atols[:] = math.inf

    def rows_of(
        self,
        wrong: np.ndarray,
        golden: np.ndarray,
        dtype: np.dtype,
        counts: np.ndarray | None,
        full: bool,
        run: "RunningNeeds",
    ) -> None:
        """Whole rows [n, K] of a baseline against the golden's; ``counts``: the values that count. A row without any
        shows the two apart.

        Needs only grow. One that is far beyond what the ``run`` needs of the same rows is left as it is: it is at least
        that, and the rest of the rows would be measured for nothing.
        """
        far = self._far(run)
        self.rows += len(golden)
        if counts is not None and not counts.any(axis=1).all():
            self.refuse()
            self._ulp = math.inf
            return
        if not all(far[:-2]):
            self.values(abs_difference(wrong, golden), golden, None, counts)
        if not far[-2]:
            self._ulps(ulp_distance(wrong, golden, dtype), counts)
        if full and not far[-1]:
            self.kl(kl_divergence(wrong, golden))

    def skip(self, run: "RunningNeeds", rows: int, full: bool) -> bool:
        """Whether `rows_of` would leave the next rows as they are; then they count as looked at."""
        far = self._far(run)
        if not all(far if full else far[:-1]):
            return False
        self.rows += rows
        return True

    def _far(self, run: "RunningNeeds") -> list[bool]:
        return [self.rows >= _LOOKED_AT and mine > _FAR_BEYOND * its for mine, its in self._beside(run)]

    def _beside(self, run: "RunningNeeds") -> list[tuple[float, float]]:
        """Each need and the run's, ULPs and KL last."""
        pairs = [(self._atol, run._atol), (self._rtol, run._rtol), *zip(self._atols, run._atols, strict=True)]
        return [*pairs, (self._ulp, run._ulp), (self._kl or 0.0, run._kl or 0.0)]

    def _ulps(self, ulps: np.ndarray, seen: np.ndarray | None = None) -> None:
        if seen is not None:
            ulps = ulps[seen]
        most = int(ulps.max(initial=0))
        self._ulp = max(self._ulp, math.inf if most == _FAR else most)


def used_share(difference: np.ndarray, bound: np.ndarray, seen: np.ndarray | None = None) -> float:
    """The largest difference as a part of its bound, of values [n, K] that are ``seen``; one without a difference uses
    nothing, and one without a bound, or that is not finite, more than there is."""
    if seen is not None:
        difference, bound = difference[seen], bound[seen]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        share = np.where(difference == 0, 0.0, difference / bound)
    most = float(share.max(initial=0.0))
    return math.inf if math.isnan(most) else most


def _least_rtol(difference: np.ndarray, size: np.ndarray) -> float:
    if (size == 0).any():
        return math.inf
    return _least(lambda rtol: bool((difference <= rtol * size).all()), float((difference / size).max()))


def _least_atol(difference: np.ndarray, share: np.ndarray) -> float:
    return _least(lambda atol: bool((difference <= atol + share).all()), float((difference - share).max()))


def _least(passes: Callable[[float], bool], guess: float) -> float:
    """The least float64 from 0 on that passes, where all larger ones do; infinite: none does. Float64s from 0 on are in
    the order of their bits, and the guess is near."""
    top = _bits(np.finfo(np.float64).max)
    at = min(_bits(max(guess, 0.0)), top)
    step = 1
    if passes(_float(at)):
        high, low = at, -1
        while high > 0:
            trial = max(high - step, 0)
            if not passes(_float(trial)):
                low = trial
                break
            high, step = trial, 2 * step
    else:
        low = at
        while True:
            high = min(low + step, top)
            if passes(_float(high)):
                break
            if high == top:
                return math.inf
            low, step = high, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(_float(middle)) else (middle, high)
    return _float(high)


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def _float(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))

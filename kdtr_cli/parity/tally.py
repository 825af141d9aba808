"""The running totals of one comparison of logits, and what they become.

Differences are taken in float64. NaN is the worst of all differences, and a place is kept for each extreme, so that
a report can point at it.
"""

import math
from dataclasses import dataclass

import numpy as np

from kdtr_cli.parity.baselines import Baselines
from kdtr_cli.parity.metrics import abs_difference, equal_rows, kl_divergence, ulp_distance
from kdtr_cli.parity.needs import Needed, RunningNeeds, used_share
from kdtr_cli.parity.tolerances import Tolerance

__all__ = ["LogitsResult", "Place", "Tally"]


@dataclass(frozen=True)
class Place:
    """A value in two sets of logits: its row, its place in the vocabulary (None: the whole row), both values."""

    row: int
    token: int | None = None
    golden: float | None = None
    run: float | None = None


@dataclass(frozen=True)
class LogitsResult:
    """What was compared and what came out. None where nothing was measured.

    `form` is the poorer of the two forms (full, topK, digest, none). Of `rows_total` rows `rows_compared` were
    compared, `rows_identical` of them equal bit for bit, `rows_out` outside a bound, `rows_unmeasured` known to have
    other bits with no values to measure them by, `rows_other_bits` known by digest to differ (measured or not).
    `max_ulp` is infinite where a value was not finite. `too_loose` names what else the tolerance lets pass.
    `max_share` is the largest |run − golden| / (atol + rtol · |golden|); `needed`, where it was asked for, what
    tolerance would be needed.
    """

    form: str
    rows_total: int
    rows_compared: int = 0
    rows_identical: int = 0
    rows_out: int = 0
    rows_unmeasured: int = 0
    rows_other_bits: int = 0
    values_compared: int = 0
    values_out: int = 0
    max_abs: float | None = None
    max_abs_at: Place | None = None
    max_ulp: int | float | None = None
    max_ulp_at: Place | None = None
    max_kl: float | None = None
    max_kl_row: int | None = None
    first_out: Place | None = None
    first_out_rule: str | None = None
    run_nonfinite: Place | None = None
    golden_nonfinite: Place | None = None
    too_loose: tuple[str, ...] = ()
    max_share: float | None = None
    needed: Needed | None = None

    @property
    def all_bits(self) -> bool:
        """Whether every row there is was compared and is equal bit for bit."""
        return self.form != "none" and self.rows_identical == self.rows_compared == self.rows_total

    @property
    def within(self) -> bool:
        """Whether every compared row keeps every bound, as far as its values were seen."""
        return not (self.rows_out or self.run_nonfinite or self.golden_nonfinite)

    @property
    def first_fault(self) -> Place | None:
        """The first place that is out of bounds or not finite in the run."""
        places = [p for p in (self.run_nonfinite, self.first_out) if p is not None]
        return min(places, key=lambda p: p.row, default=None)


class Tally:
    """The running totals of one comparison."""

    def __init__(self, tolerance: Tolerance, dtype: np.dtype, suggest: bool = False) -> None:
        self.tolerance, self.dtype = tolerance, dtype
        self.needs = RunningNeeds() if suggest else None
        self.baselines = Baselines(tolerance, dtype, self.needs)
        self.share = 0.0
        self.identical = self.out = self.unmeasured = self.other_bits = 0
        self.values = self.values_out = 0
        self.max_abs: float | None = None
        self.max_ulp: int | float | None = None
        self.max_kl: float | None = None
        self.max_abs_at = self.max_ulp_at = self.first_out = self.run_nonfinite = None
        self.golden_nonfinite: Place | None = None
        self.max_kl_row: int | None = None
        self.first_out_rule: str | None = None

    def golden_is_finite(self, lo: int, golden: np.ndarray, ids: np.ndarray | None = None) -> bool:
        if (finite := np.isfinite(golden)).all():
            return True
        row, at = np.argwhere(~finite)[0]
        token = int(at if ids is None else ids[row, at])
        self.golden_nonfinite = Place(lo + int(row), token, golden=float(golden[row, at]))
        return False

    def same(self, lo: int, rows: np.ndarray) -> None:
        """Rows [n, V] that both sides have bit for bit."""
        if self.golden_is_finite(lo, rows):
            self.identical += len(rows)
            self.values += rows.size
            self.zero_difference()
            self.zero_kl()
            self.baselines.feed(rows)

    def zero_difference(self) -> None:
        self.max_abs = 0.0 if self.max_abs is None else self.max_abs
        self.max_ulp = 0 if self.max_ulp is None else self.max_ulp

    def zero_kl(self) -> None:
        self.max_kl = 0.0 if self.max_kl is None else self.max_kl
        if self.needs is not None:
            self.needs.kl(np.zeros(1))

    def full(self, lo: int, golden: np.ndarray, run: np.ndarray) -> None:
        """The next rows [n, V] of both sides."""
        if not self.golden_is_finite(lo, golden):
            return
        equal = equal_rows(run, golden) if run.dtype == golden.dtype else np.zeros(len(golden), bool)
        self.identical += int(equal.sum())
        self.values += golden.size
        if equal.any():
            self.zero_difference()
            self.zero_kl()
        if not equal.all():
            other = np.flatnonzero(~equal)
            a, b = (run, golden) if not equal.any() else (run[other], golden[other])
            out = self.measure(lo + other, a, b)
            kl = kl_divergence(a, b)
            self.note_kl(lo + other, kl)
            if self.tolerance.max_kl is not None:
                out |= self.note_kl_out(lo + other, kl, out)
            self.out += int(out.sum())
        self.baselines.feed(golden)

    def measure(
        self,
        rows: np.ndarray,
        run: np.ndarray,
        golden: np.ndarray,
        ids: np.ndarray | None = None,
        seen: np.ndarray | None = None,
    ) -> np.ndarray:
        """Measure values [n, K] of the rows numbered `rows` [n]: at the places `ids` [n, K] (None: 0..V-1), where
        `seen` (None: everywhere). Returns which rows [n] are out of bounds."""
        difference = abs_difference(run, golden)
        ulps = ulp_distance(run, golden, self.dtype)
        ok = self.tolerance.values_within(difference, golden, ulps)
        finite = np.isfinite(run)
        if self.needs is not None:
            self.needs.values(difference, golden, ulps, seen)
        if self.tolerance.rtol:
            self.share = max(self.share, used_share(difference, self.tolerance.bound(golden), seen))
        if seen is not None:
            difference, ulps = np.where(seen, difference, -1.0), np.where(seen, ulps, 0)
            ok, finite = ok | ~seen, finite | ~seen
            if not seen.any():
                return np.zeros(len(rows), bool)
        ok &= finite

        def place(flat: int) -> Place:
            i, j = divmod(int(flat), run.shape[1])
            token = j if ids is None else int(ids[i, j])
            return Place(int(rows[i]), token, float(golden[i, j]), float(run[i, j]))

        at = int(difference.argmax())  # numpy's argmax takes the first NaN for the largest
        largest = float(difference.flat[at])
        if self.max_abs is None or _larger(largest, self.max_abs):
            self.max_abs, self.max_abs_at = largest, place(at)
        at = int(ulps.argmax())
        most = int(ulps.flat[at])
        most = math.inf if most == 2**64 - 1 else most
        if self.max_ulp is None or most > self.max_ulp:
            self.max_ulp, self.max_ulp_at = most, place(at)
        if self.run_nonfinite is None and not finite.all():
            self.run_nonfinite = place(int(np.argmax(~finite)))
        if not ok.all():
            self.values_out += int((~ok).sum())
            self.note_out(place(int(np.argmax(~ok))), "value")
        return ~ok.all(axis=1)

    def note_kl(self, rows: np.ndarray, kl: np.ndarray) -> None:
        at = int(kl.argmax())
        if self.max_kl is None or _larger(float(kl[at]), self.max_kl):
            self.max_kl, self.max_kl_row = float(kl[at]), int(rows[at])
        if self.needs is not None:
            self.needs.kl(kl)

    def note_kl_out(self, rows: np.ndarray, kl: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Which rows [n] have a KL over the bound; a row that is out for a value too is not named again."""
        over = ~(kl <= self.tolerance.max_kl)
        only = np.flatnonzero(over & ~out)
        if len(only):
            self.note_out(Place(int(rows[only[0]])), "kl")
        return over

    def note_out(self, place: Place, rule: str) -> None:
        """Keep the first place that is out of bounds: "value", "kl" or "hidden" (outside a top-K set)."""
        if self.first_out is None or place.row < self.first_out.row:
            self.first_out, self.first_out_rule = place, rule

    def look_for_nonfinite(self, lo: int, rows: np.ndarray, run: np.ndarray, ids: np.ndarray | None) -> None:
        """Look at all the run's values of the given rows of a block [n, K], whether they are compared or not."""
        finite = np.isfinite(run[rows])
        if self.run_nonfinite is None and not finite.all():
            i, j = np.argwhere(~finite)[0]
            token = int(j if ids is None else ids[rows[i], j])
            self.run_nonfinite = Place(int(lo + rows[i]), token, run=float(run[rows[i], j]))

    def result(self, form: str, n_rows: int, rows_total: int) -> LogitsResult:
        return LogitsResult(
            form=form,
            rows_total=rows_total,
            rows_compared=n_rows,
            rows_identical=self.identical,
            rows_out=self.out,
            rows_unmeasured=self.unmeasured,
            rows_other_bits=self.other_bits,
            values_compared=self.values,
            values_out=self.values_out,
            max_abs=self.max_abs,
            max_abs_at=self.max_abs_at,
            max_ulp=self.max_ulp,
            max_ulp_at=self.max_ulp_at,
            max_kl=self.max_kl,
            max_kl_row=self.max_kl_row,
            first_out=self.first_out,
            first_out_rule=self.first_out_rule,
            run_nonfinite=self.run_nonfinite,
            golden_nonfinite=self.golden_nonfinite,
            too_loose=self.baselines.passed(),
            max_share=self._share(),
            needed=None if self.needs is None else Needed(self.needs.needs(), self.baselines.needs()),
        )

    def _share(self) -> float | None:
        """How much of the bound on values was used; None where there is none, or nothing was measured."""
        if self.max_abs is None or self.tolerance.atol is None or self.tolerance.is_zero:
            return None
        if self.tolerance.rtol:
            return self.share
        return math.inf if math.isnan(self.max_abs) else self.max_abs / self.tolerance.atol


def _larger(new: float, old: float) -> bool:
    """Whether `new` is the worse of two differences: NaN is the worst there is."""
    return not math.isnan(old) and (math.isnan(new) or new > old)

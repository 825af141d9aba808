"""One operation of an engine, by itself, against what it must give: counts and distances, added up over passes."""

import math
from dataclasses import dataclass

import numpy as np

from kdtr_cli.parity.metrics import abs_difference, ulp_distance
from kdtr_cli.parity.operation_hints import HINTS, Look, fitting
from kdtr_cli.parity.tolerances import Tolerance

__all__ = ["IDENTICAL", "OUT", "WITHIN", "OperationResult", "OperationTally"]

IDENTICAL, WITHIN, OUT = "identical", "within", "out"


@dataclass(frozen=True)
class OperationResult:
    """An operation of one layer (None: of no layer), given right inputs: its rows in passes of one form, by the same
    kernels.

    kernels: in order of launch. rows: compared; first_row: (sequence id, position) of the first that is not
    identical. max_abs, max_ulp, nmse: of its floating-point output, None where it has none; where ``nonfinite`` values
    came out, max_abs and nmse are infinite or NaN, and max_ulp is that of the others. hints: what the error looks like
    in every pass, codes of operation_hints.HINTS, the strongest first.
    """

    operation: str
    layer: int | None
    form: str
    kernels: tuple[str, ...]
    rows: int
    rows_identical: int
    rows_out: int
    max_abs: float | None
    max_ulp: int | None
    nmse: float | None
    nonfinite: int
    first_row: tuple[str, int] | None
    hints: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """IDENTICAL, WITHIN the tolerance, or OUT of it."""
        if self.rows_out:
            return OUT
        return IDENTICAL if self.rows_identical == self.rows else WITHIN


class OperationTally:
    """Adds up what is seen of one operation. ULPs are those of float32, in which the engine's tensors are."""

    def __init__(
        self, operation: str, layer: int | None, form: str, kernels: tuple[str, ...], tolerance: Tolerance
    ) -> None:
        self.operation, self.layer, self.form, self.kernels = operation, layer, form, kernels
        self.tolerance = tolerance
        self.rows = self.rows_identical = self.rows_out = self.nonfinite = self.max_ulp = 0
        self.max_abs = self.squares = self.wanted_squares = 0.0
        self.has_floats = False
        self.first_row: tuple[str, int] | None = None
        self.codes: frozenset[str] | None = None

    def add(
        self,
        sequence: str,
        positions: np.ndarray,
        floats: tuple[np.ndarray, np.ndarray] | None,
        integers: tuple[np.ndarray, np.ndarray] | None = None,
        look: Look | None = None,
    ) -> None:
        """One pass's rows of a sequence at these positions [M]: (got, wanted) of its floating-point output [M, …] and
        of its integers [M, …], which know no tolerance. Golden values are finite.

        ``look``: where a hint is to be looked for, if not in the floating-point output as a whole.
        """
        m = len(positions)
        same, good = np.ones(m, bool), np.ones(m, bool)
        if integers is not None:
            got, wanted = (a.reshape(m, -1) for a in integers)
            same &= (got == wanted).all(-1)
            good &= same
        if floats is not None:
            self.has_floats = True
            got, wanted = (np.ascontiguousarray(a.reshape(m, -1), np.float32) for a in floats)
            equal = (got.view(np.uint32) == wanted.view(np.uint32)).all(-1)
            same &= equal
            if not equal.all():
                good[~equal] &= self._apart(got[~equal], wanted[~equal])
            self.wanted_squares += float(np.square(wanted, dtype=np.float64).sum())
        if not same.all() and (look is not None or floats is not None):
            codes = fitting(look or Look("", *floats), positions)
            self.codes = codes if self.codes is None else self.codes & codes
        self.rows += m
        self.rows_identical += int(same.sum())
        self.rows_out += int((~good).sum())
        if self.first_row is None and not same.all():
            self.first_row = (sequence, int(positions[np.argmin(same)]))

    def _apart(self, got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Rows whose bits differ: distances; which of them are within the tolerance."""
        difference = abs_difference(got, wanted)
        ulps = ulp_distance(got, wanted, np.dtype(np.float32))
        self.max_abs = float(np.maximum(self.max_abs, difference.max()))  # NaN stays
        finite = np.isfinite(got)
        self.nonfinite += int((~finite).sum())
        self.max_ulp = max(self.max_ulp, int(ulps[finite].max(initial=0)))
        with np.errstate(invalid="ignore", over="ignore"):
            self.squares += float(np.square(difference).sum())
        return self.tolerance.values_within(difference, wanted, ulps).all(-1)

    def result(self) -> OperationResult:
        """What was seen by now."""
        share = None
        if self.has_floats:
            share = self.squares / self.wanted_squares if self.wanted_squares else (math.inf if self.squares else 0.0)
        return OperationResult(
            self.operation,
            self.layer,
            self.form,
            self.kernels,
            self.rows,
            self.rows_identical,
            self.rows_out,
            self.max_abs if self.has_floats else None,
            self.max_ulp if self.has_floats else None,
            share,
            self.nonfinite,
            self.first_row,
            tuple(code for code in HINTS if code in (self.codes or ())),
        )

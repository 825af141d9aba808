"""The running totals of one comparison of logits, and what they become.

NaN is the worst of all differences, and a place is kept for each extreme, so that a report can point at it.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from kdtr_cli.parity.baselines import Baselines
from kdtr_cli.parity.curves import CurveBuilder, RowCurves
from kdtr_cli.parity.distribution import Distribution, distribution_of
from kdtr_cli.parity.metrics import FAR
from kdtr_cli.parity.needs import Needed, RunningNeeds
from kdtr_cli.parity.ranks import TOP_KS, shared_ids
from kdtr_cli.parity.rows import Place, RowBlock
from kdtr_cli.parity.tolerances import Tolerance

__all__ = ["LogitsResult", "Tally", "TopAgreement"]


#: So many rows' KLs are put into their distribution together.
BATCH = 4096


@dataclass(frozen=True)
class TopAgreement:
    """On how many of the k largest ids two sides agree: over `rows` rows in which both are known, `equal` of them with
    the same k ids, `shared` of the golden's `ids` ids in all are among the run's k."""

    k: int
    rows: int = 0
    equal: int = 0
    ids: int = 0
    shared: int = 0


@dataclass(frozen=True)
class LogitsResult:
    """What was compared and what came out. None where nothing was measured.

    `form` is the poorer of the two forms (full, topK, digest, none). Of `rows_total` rows `rows_compared` were
    compared, `rows_identical` of them equal bit for bit, `rows_out` outside a bound, `rows_unmeasured` known to have
    other bits with no values to measure them by, `rows_other_bits` known by digest to differ (measured or not).
    `max_ulp` is infinite where a value was not finite. `too_loose` names what else the tolerance lets pass.
    `max_share` is the largest |run − golden| / (atol + rtol · |golden|); `needed`, where it was asked for, what
    tolerance would be needed.

    Summaries that no bound looks at: `mean_kl` and `p99_kl` over full rows (`kl` has their distribution), `top` for
    each k of TOP_KS, the smallest margins with their rows, `rows_shifted` rows that are the golden's moved by one
    constant, `shift` the largest of these, `nmse` = Σ(run − golden)² / Σ golden² and `cosine` over the full rows that
    differ (0 and 1 where none does). `curves` has the figures of every row for those who draw them.
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
    mean_kl: float | None = None
    p99_kl: float | None = None
    top: tuple[TopAgreement, ...] = tuple(TopAgreement(k) for k in TOP_KS)
    min_golden_margin: float | None = None
    min_golden_margin_row: int | None = None
    min_run_margin: float | None = None
    min_run_margin_row: int | None = None
    rows_shifted: int = 0
    shift: float | None = None
    nmse: float | None = None
    cosine: float | None = None
    kl: Distribution | None = field(default=None, repr=False, compare=False, metadata={"json": False})
    curves: RowCurves | None = field(default=None, repr=False, compare=False, metadata={"json": False})
    max_share: float | None = None
    needed: Needed | None = field(default=None, metadata={"json": False})

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


class _Extreme:
    """The first of the worst of the values so far, and its row. NaN is the worst, else the largest or smallest is."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.row: int | None = None

    def add(self, first: int, rows: np.ndarray, values: np.ndarray, *, smallest: bool = False) -> int | None:
        """Look at `values` [m] of the rows numbered `rows` [m] from `first`; the row of a new extreme, or None."""
        if not len(rows):
            return None
        at = int(values.argmin() if smallest else values.argmax())  # NumPy takes the first NaN for either
        value, old = values[at].item(), self.value
        if old is not None and not (value < old if smallest else value > old) and not (_is_nan(value) > _is_nan(old)):
            return None
        self.value, self.row = value, first + int(rows[at])
        return int(rows[at])


def _is_nan(value: float) -> bool:
    return value != value


class Tally:
    """The running totals of one comparison of `n_rows` rows over a vocabulary of `vocab` (None: not known)."""

    def __init__(
        self, tolerance: Tolerance, dtype: np.dtype, n_rows: int, vocab: int | None, suggest: bool = False
    ) -> None:
        self.tolerance = tolerance
        self._needs = RunningNeeds() if suggest else None
        self.baselines = Baselines(tolerance, dtype, self._needs)
        self._share = 0.0
        self.golden_nonfinite: Place | None = None
        self._vocab = vocab
        self._identical = self._out = self._unmeasured = self._other_bits = self._values = self._values_out = 0
        self._abs, self._ulp, self._kl = _Extreme(), _Extreme(), _Extreme()
        self._golden_margin, self._run_margin, self._shift = _Extreme(), _Extreme(), _Extreme()
        self._abs_at = self._ulp_at = self._first_out = self._run_nonfinite = None
        self._first_out_rule: str | None = None
        self._kls: Distribution | None = None
        self._waiting: list[np.ndarray] = []
        self._n_waiting = 0
        self._top = {k: np.zeros(4, np.int64) for k in TOP_KS}
        self._shifted, self._shift_by = 0, None
        self._sums = np.zeros(3)
        self._curves = CurveBuilder(n_rows, vocab)

    def add(self, block: RowBlock) -> None:
        """The next rows, in order."""
        self.golden_nonfinite = block.golden_nonfinite
        identical, measured = block.identical, block.measured
        self._identical += int(identical.sum())
        self._other_bits += int(block.other_bits.sum())
        self._values += int(block.seen.sum())
        self._values_out += int(block.out.sum() + block.hidden.sum())
        self._unmeasured += int((~identical & ~measured & (block.hidden == 0)).sum())
        rows = np.flatnonzero(measured)
        if (i := self._abs.add(block.first, rows, block.max_abs[rows])) is not None:
            self._abs_at = block.locate("abs", i)
        if (i := self._ulp.add(block.first, rows, block.max_ulp[rows])) is not None:
            self._ulp_at = block.locate("ulp", i)
        with_kl = np.flatnonzero(measured | identical) if block.full else np.empty(0, np.int64)
        self._waiting.append(block.kl[with_kl])
        self._n_waiting += len(with_kl)
        if self._n_waiting > BATCH:
            self._add_kls()
        self._kl.add(block.first, rows if block.full else with_kl, block.kl[rows if block.full else with_kl])
        if self._run_nonfinite is None and block.nonfinite.any():
            self._run_nonfinite = block.locate("nonfinite", int(np.argmax(block.nonfinite)))
        self._add_out(block)
        self._add_summaries(block, rows)
        if self.tolerance.rtol and len(rows):
            self._share = max(self._share, float(block.share[rows].max()))
        if self._needs is not None:
            self._add_needs(block)
        elif block.feed is not None and len(block):
            block.feed(self.baselines, 0, len(block))

    def _add_needs(self, block: RowBlock) -> None:
        """Row by row, so that what is left out of the baselines does not depend on the blocks."""
        for i in range(len(block)):
            if not block.identical[i] and block.weigh is not None:
                block.weigh(self._needs, i)
            if block.full:
                self._needs.kl(block.kl[i : i + 1])
            if block.feed is not None:
                block.feed(self.baselines, i, i + 1)

    def _add_kls(self) -> None:
        if self._n_waiting:
            self._kls = distribution_of(np.concatenate(self._waiting), self._kls)
        self._waiting, self._n_waiting = [], 0

    def _add_out(self, block: RowBlock) -> None:
        over = np.zeros(len(block), bool)
        if self.tolerance.max_kl is not None and block.full:
            over = block.measured & ~(block.kl <= self.tolerance.max_kl)
        by_value, hidden = block.out > 0, block.hidden > 0
        out = by_value | hidden | over
        self._out += int(out.sum())
        if self._first_out is None and out.any():
            i = int(np.argmax(out))
            rule = "value" if by_value[i] else "hidden" if hidden[i] else "kl"
            self._first_out = Place(block.first + i) if rule == "kl" else block.locate(rule, i)
            self._first_out_rule = rule

    def _add_summaries(self, block: RowBlock, rows: np.ndarray) -> None:
        top1 = np.where(block.identical, 1, -1).astype(np.int8)
        for k, counts in self._top.items():
            # of a vocabulary smaller than k all ids are among the k largest
            wide = k if self._vocab is None else min(k, self._vocab)
            golden, run = block.golden_top[:, :wide], block.run_top[:, :wide]
            known = ~block.identical & (golden >= 0).all(axis=1) & (run >= 0).all(axis=1)
            shared = shared_ids(golden[known], run[known])
            same = int(block.identical.sum())
            n = len(shared) + same
            counts += n, (shared == wide).sum() + same, n * wide, shared.sum() + same * wide
            if k == 1:
                top1[known] = shared
        for extreme, margins in (
            (self._golden_margin, block.golden_margin),
            (self._run_margin, block.run_margin),
        ):
            known = np.flatnonzero(~np.isnan(margins))
            extreme.add(block.first, known, margins[known], smallest=True)
        shifted = rows[~np.isnan(block.shift[rows])]
        self._shifted += len(shifted)
        if (i := self._shift.add(block.first, shifted, np.abs(block.shift[shifted]))) is not None:
            self._shift_by = float(block.shift[i])
        # row by row, so that the sums do not depend on the blocks
        self._sums = np.add.accumulate(np.vstack([self._sums, block.sums[rows]]), axis=0)[-1]
        ulps = block.max_ulp.astype(np.float64)
        ulps[block.max_ulp == FAR] = np.inf
        ulps[~(block.measured | block.identical)] = np.nan
        figures = {name: getattr(block, name) for name in ("max_abs", "kl", "golden_margin", "run_margin")}
        self._curves.add(figures | {"max_ulp": ulps}, top1, block.blocks)

    def result(self, form: str, n_rows: int, rows_total: int) -> LogitsResult:
        self._add_kls()
        nothing = 0 if self._identical else None  # rows that are equal bit for bit have no place to point at
        ulp = self._ulp.value
        kl = self._kls
        nmse, cosine = self._summaries(form)
        return LogitsResult(
            form=form,
            rows_total=rows_total,
            rows_compared=n_rows,
            rows_identical=self._identical,
            rows_out=self._out,
            rows_unmeasured=self._unmeasured,
            rows_other_bits=self._other_bits,
            values_compared=self._values,
            values_out=self._values_out,
            max_abs=(None if nothing is None else 0.0) if self._abs.value is None else self._abs.value,
            max_abs_at=self._abs_at,
            max_ulp=nothing if ulp is None else math.inf if ulp == int(FAR) else ulp,
            max_ulp_at=self._ulp_at,
            max_kl=(None if kl is None else 0.0) if self._kl.value is None else self._kl.value,
            max_kl_row=self._kl.row,
            first_out=self._first_out,
            first_out_rule=self._first_out_rule,
            run_nonfinite=self._run_nonfinite,
            golden_nonfinite=self.golden_nonfinite,
            too_loose=self.baselines.passed(),
            mean_kl=None if kl is None else kl.mean,
            p99_kl=None if kl is None else kl.percentile(99),
            top=tuple(TopAgreement(k, *counts.tolist()) for k, counts in self._top.items()),
            min_golden_margin=self._golden_margin.value,
            min_golden_margin_row=self._golden_margin.row,
            min_run_margin=self._run_margin.value,
            min_run_margin_row=self._run_margin.row,
            rows_shifted=self._shifted,
            shift=self._shift_by,
            nmse=nmse,
            cosine=cosine,
            kl=kl,
            curves=self._curves.curves(),
            max_share=self._max_share(nothing),
            needed=None if self._needs is None else Needed(self._needs.needs(), self.baselines.needs()),
        )

    def _max_share(self, nothing: int | None) -> float | None:
        """How much of the bound on values was used; None where there is none, or nothing was measured."""
        most = nothing if self._abs.value is None else self._abs.value
        if most is None or self.tolerance.atol is None or self.tolerance.is_zero:
            return None
        if self.tolerance.rtol:
            return self._share
        return math.inf if math.isnan(most) else most / self.tolerance.atol

    def _summaries(self, form: str) -> tuple[float | None, float | None]:
        """NMSE and cosine of the rows that differ."""
        if form != "full" or self._kls is None:
            return None, None
        if self._abs.value is None:
            return 0.0, 1.0
        error, square, cross = self._sums.tolist()
        nmse = error / square if square else math.inf if error else 0.0
        lengths = math.sqrt(square) * math.sqrt(max(0.0, square + 2 * cross + error))
        return nmse, (square + cross) / lengths if lengths else None

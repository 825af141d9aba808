"""Would a wrong engine pass too? Three that know nothing are held against the same tolerance.

* **zeros**: every logit 0, what an output that was never written holds (of log-probabilities: all of them equal);
* **shuffled**: the golden's logits with the vocabulary permuted (seeded), right in distribution and wrong in content;
* **previous position**: the golden's logits of the step before, what an off-by-one gives.

A tolerance that lets one of them pass at every row of a sequence proves nothing about that sequence.
"""

from collections.abc import Callable

import numpy as np

from kdtr_cli.parity.metrics import match_ids
from kdtr_cli.parity.needs import RuleNeeds, RunningNeeds
from kdtr_cli.parity.tolerances import Tolerance

__all__ = ["BASELINES", "Baselines"]

BASELINES = ("zeros", "shuffled logits", "the previous position's logits")

#: (the baseline's values, the golden's values, which of them count), all [n, K], for a range of rows
_Pair = Callable[[int, int], tuple[np.ndarray, np.ndarray, np.ndarray | None]]


class Baselines:
    """Fed with the golden's rows from first to last; `passed()` then names the baselines that were never refused.

    A baseline that fails at one row is dropped, so that in the ordinary case only the first row costs anything. With
    ``run``, the needs of the run on the same rows so far, none is, and `needs()` says what tolerance each would need to
    pass at every row; at least that, where it is far beyond the run's.
    """

    def __init__(self, tolerance: Tolerance, dtype: np.dtype, run: RunningNeeds | None = None) -> None:
        self._tolerance = tolerance
        self._dtype = dtype
        # at tolerance zero only a golden that is itself a baseline would let it pass
        self._alive = set() if tolerance.is_zero else set(BASELINES)
        self._rows = dict.fromkeys(BASELINES, 0)
        self.uniform = 0.0  #: what stands for zero
        self._needs = {name: RunningNeeds() for name in BASELINES} if run is not None else {}
        self._run = run
        self._order: np.ndarray | None = None
        self._last: np.ndarray | None = None
        self._last_ids: np.ndarray | None = None

    def passed(self) -> tuple[str, ...]:
        return tuple(name for name in BASELINES if name in self._alive and self._rows[name])

    def needs(self) -> dict[str, RuleNeeds]:
        """What each baseline that there was a row for would need."""
        return {name: running.needs() for name, running in self._needs.items() if running.rows}

    @property
    def _idle(self) -> bool:
        return not self._alive and not self._needs

    def feed(self, golden: np.ndarray, ids: np.ndarray | None = None, there: np.ndarray | None = None) -> None:
        """The next full rows [n, V]; `ids` [n, K]: only these places are compared, of them those that are `there`."""
        if self._idle:
            return
        permutation = self._permutation(golden.shape[1])
        before, self._last = self._last, golden[-1:].copy()

        def at(rows: np.ndarray, lo: int, hi: int) -> np.ndarray:
            return rows if ids is None else np.take_along_axis(rows, ids[lo:hi].astype(np.int64), axis=1)

        def counts(lo: int, hi: int) -> np.ndarray | None:
            return None if there is None else there[lo:hi]

        def zeros(lo: int, hi: int) -> tuple:
            target = at(golden[lo:hi], lo, hi)
            return np.full_like(target, self.uniform), target, counts(lo, hi)

        def shuffled(lo: int, hi: int) -> tuple:
            return at(golden[lo:hi][:, permutation], lo, hi), at(golden[lo:hi], lo, hi), counts(lo, hi)

        def previous(lo: int, hi: int) -> tuple:
            rows = golden[lo - 1 : hi - 1] if lo else np.concatenate([before, golden[: hi - 1]])
            return at(rows, lo, hi), at(golden[lo:hi], lo, hi), counts(lo, hi)

        self._test(len(golden), before is None, (zeros, shuffled, previous), full=ids is None)

    def feed_top(self, ids: np.ndarray, values: np.ndarray) -> None:
        """The next rows of a top:K golden: ids and values [n, K]. Shuffled means shuffled among the K; of the previous
        row, the values of those ids that it holds too."""
        if self._idle:
            return
        permutation = self._permutation(values.shape[1])
        before, before_ids = self._last, self._last_ids
        self._last, self._last_ids = values[-1:].copy(), ids[-1:].copy()

        def zeros(lo: int, hi: int) -> tuple:
            return np.full_like(values[lo:hi], self.uniform), values[lo:hi], None

        def shuffled(lo: int, hi: int) -> tuple:
            return values[lo:hi][:, permutation], values[lo:hi], None

        def previous(lo: int, hi: int) -> tuple:
            rows = values[lo - 1 : hi - 1] if lo else np.concatenate([before, values[: hi - 1]])
            row_ids = ids[lo - 1 : hi - 1] if lo else np.concatenate([before_ids, ids[: hi - 1]])
            place, found = match_ids(ids[lo:hi], row_ids)
            return np.take_along_axis(rows, place, axis=1), values[lo:hi], found

        self._test(len(values), before is None, (zeros, shuffled, previous), full=False)

    def _permutation(self, n: int) -> np.ndarray:
        if self._order is None or len(self._order) != n:
            self._order = _permutation(n)
        return self._order

    def _test(self, n: int, at_start: bool, pairs: tuple[_Pair, _Pair, _Pair], *, full: bool) -> None:
        for name, pair in zip(BASELINES, pairs, strict=True):
            first = 1 if at_start and pair is pairs[2] else 0  # the first row of all has no row before it
            for lo, hi in ((first, first + 1), (first + 1, n)):
                hi = min(hi, n)
                if lo < hi and (name in self._alive or self._measured(name, hi - lo, full)):
                    self._hold(name, *pair(lo, hi), full=full)

    def _measured(self, name: str, rows: int, full: bool) -> bool:
        return bool(self._needs) and not self._needs[name].skip(self._run, rows, full)

    def _hold(self, name: str, wrong: np.ndarray, golden: np.ndarray, counts: np.ndarray | None, *, full: bool) -> None:
        if self._needs:
            self._needs[name].rows_of(wrong, golden, self._dtype, counts, full, self._run)
            if name not in self._alive:
                return
        if counts is None:
            passes = self._tolerance.rows_pass(wrong, golden, self._dtype, full=full)
        else:
            ok = self._tolerance.values_pass(wrong, golden, self._dtype)
            # a row that shares no id with the one before shows the two apart
            passes = (ok | ~counts).all(axis=1) & counts.any(axis=1)
        self._rows[name] += len(passes)
        if not passes.all():
            self._alive.discard(name)


def _permutation(n: int) -> np.ndarray:
    """A fixed permutation of n places; never the identity where there are two places or more."""
    order = np.random.default_rng(0).permutation(n)
    return order if n < 2 or (order != np.arange(n)).any() else np.roll(order, 1)

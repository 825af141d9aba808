"""The curves of a comparison as pictures show them: no more entries than a picture has room for, the worst of each
group of steps kept."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kdtr_cli.parity.curves import RowCurves

__all__ = ["MAX_ENTRIES", "Series", "pooled", "series_of"]

#: As many places along the axis of steps a picture has; more steps are grouped.
MAX_ENTRIES = 2000


@dataclass(frozen=True, eq=False)
class Series:
    """What is drawn of n entries, each of `per` steps one after another (the last may have fewer), `rows` in all.

    float64 [n] each, NaN where not known: max_abs, max_ulp, kl (the largest of the group) and the margins (the
    smallest). blocks float32 [n, B]: the largest |run - golden| in each block of `block_size` ids; B is 0 where the
    vocabulary is not known.
    """

    per: int
    rows: int
    max_abs: np.ndarray
    max_ulp: np.ndarray
    kl: np.ndarray
    golden_margin: np.ndarray
    run_margin: np.ndarray
    blocks: np.ndarray
    block_size: int

    @property
    def all_zero(self) -> bool:
        """Whether nothing differs anywhere."""
        return bool((self.max_abs == 0).all())


def series_of(curves: RowCurves | None, rows: int, limit: int = MAX_ENTRIES) -> Series | None:
    """The series of the curves of `rows` compared rows; None where there are none."""
    if curves is None or len(curves) == 0:
        return None
    factor = -(-len(curves) // limit)
    return Series(
        per=factor * curves.rows_per_entry,
        rows=rows,
        max_abs=pooled(curves.max_abs, factor, np.maximum),
        max_ulp=pooled(curves.max_ulp, factor, np.maximum),
        kl=pooled(curves.kl, factor, np.maximum),
        golden_margin=pooled(curves.golden_margin, factor, np.fmin),
        run_margin=pooled(curves.run_margin, factor, np.fmin),
        blocks=pooled(curves.blocks, factor, np.maximum),
        block_size=curves.block_size,
    )


def pooled(values: np.ndarray, factor: int, worst: Callable[..., np.ndarray]) -> np.ndarray:
    """`worst` (a ufunc) over each group of `factor` rows of [n, ...] -> [ceil(n / factor), ...]."""
    if factor == 1:
        return np.asarray(values)
    return worst.reduceat(values, np.arange(0, len(values), factor), axis=0)

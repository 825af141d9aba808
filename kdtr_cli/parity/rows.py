"""The figures of a block of rows, whoever measured them: what the tally adds up."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kdtr_cli.parity.baselines import Baselines
from kdtr_cli.parity.curves import curve_block_size
from kdtr_cli.parity.metrics import FAR
from kdtr_cli.parity.needs import RunningNeeds
from kdtr_cli.parity.ranks import MOST

__all__ = ["Place", "RowBlock", "blank_block"]


@dataclass(frozen=True)
class Place:
    """A value in two sets of logits: its row, its place in the vocabulary (None: the whole row), both values."""

    row: int
    token: int | None = None
    golden: float | None = None
    run: float | None = None


@dataclass(eq=False)
class RowBlock:
    """The figures of n rows from row `first` on; arrays are [n] unless said otherwise.

    `identical`: the bits are equal. `measured`: they are not, and there are values to say by how much. `full`: the
    rows span the vocabulary, so there is a KL.

    - `max_abs`, `kl` float64; `max_ulp` uint64, FAR where a value is not finite;
    - `nonfinite` bool: the run's row has such a value;
    - `seen`, `out`, `hidden` int64: values compared, out of bounds, and those proved to be so though the other side has
      them below its top K;
    - `other_bits` bool: known by digests to differ;
    - `golden_top`, `run_top` int64 [n, MOST]: the ids of the largest, −1 where not known or past the vocabulary;
    - `golden_margin`, `run_margin` float64, NaN where not known;
    - `shift` float64: the constant by which the whole row is moved, NaN where it is not so;
    - `sums` float64 [n, 3]: of d², of y² and of y·d, y the golden's value and d the difference;
    - `share` float64: the largest |d| / (atol + rtol · |y|); taken where there is an rtol, else 0;
    - `blocks` float32 [n, B]: see RowCurves.

    `locate(what, i)` finds the place of row i's "abs", "ulp", "value" (the first out of bounds), "nonfinite" or
    "hidden"; `feed(baselines, lo, hi)` shows them the golden's rows lo..hi of these; `weigh(needs, i)` adds the bounds
    that let the values of row i pass, its bits not being equal; `golden_nonfinite` is the golden's first value that is
    not finite, in the row after these, which ends the comparison.
    """

    first: int
    vocab: int | None
    full: bool
    identical: np.ndarray
    measured: np.ndarray
    max_abs: np.ndarray
    max_ulp: np.ndarray
    kl: np.ndarray
    nonfinite: np.ndarray
    seen: np.ndarray
    out: np.ndarray
    hidden: np.ndarray
    other_bits: np.ndarray
    golden_top: np.ndarray
    run_top: np.ndarray
    golden_margin: np.ndarray
    run_margin: np.ndarray
    shift: np.ndarray
    sums: np.ndarray
    share: np.ndarray
    blocks: np.ndarray
    locate: Callable[[str, int], Place] | None = None
    feed: Callable[[Baselines, int, int], None] | None = None
    weigh: Callable[[RunningNeeds, int], None] | None = None
    golden_nonfinite: Place | None = None

    def __len__(self) -> int:
        return len(self.identical)

    def set_identical(self, rows: np.ndarray) -> None:
        """Say of the rows numbered `rows` (from this block's first) that their bits are equal."""
        self.identical[rows] = True
        self.max_abs[rows] = self.blocks[rows] = 0.0
        self.max_ulp[rows] = 0
        if self.full:
            self.kl[rows] = 0.0


def blank_block(first: int, n: int, vocab: int | None, *, full: bool) -> RowBlock:
    """n rows of which nothing is known yet. `vocab` None: its size is not known."""
    n_blocks = -(-vocab // curve_block_size(vocab)) if vocab else 0
    return RowBlock(
        first,
        vocab,
        full,
        identical=np.zeros(n, bool),
        measured=np.zeros(n, bool),
        max_abs=np.full(n, np.nan),
        max_ulp=np.full(n, FAR),
        kl=np.full(n, np.nan),
        nonfinite=np.zeros(n, bool),
        seen=np.zeros(n, np.int64),
        out=np.zeros(n, np.int64),
        hidden=np.zeros(n, np.int64),
        other_bits=np.zeros(n, bool),
        golden_top=np.full((n, MOST), -1, np.int64),
        run_top=np.full((n, MOST), -1, np.int64),
        golden_margin=np.full(n, np.nan),
        run_margin=np.full(n, np.nan),
        shift=np.full(n, np.nan),
        sums=np.zeros((n, 3)),
        share=np.zeros(n),
        blocks=np.full((n, n_blocks), np.nan, np.float32),
    )

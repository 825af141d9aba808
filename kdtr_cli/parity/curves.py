"""The figures of every row, kept so that a report can draw them, in memory that does not grow with the rows."""

from dataclasses import dataclass

import numpy as np

__all__ = ["MAX_BLOCKS", "MAX_ENTRIES", "CurveBuilder", "RowCurves", "curve_block_size"]

#: At most as many blocks of the vocabulary, and as many entries.
MAX_BLOCKS = 64
MAX_ENTRIES = 65_536

#: Blocks are no shorter than this where the vocabulary is small: a reduction of fewer values is mostly overhead.
_MIN_BLOCK = 32


@dataclass(frozen=True, eq=False)
class RowCurves:
    """One entry for each of n compared rows, 0 first, or for each `rows_per_entry` rows one after another (the last
    entry may have fewer): the worst of these rows.

    `max_abs`, `max_ulp`, `kl` float64 [n]: the row's largest |run − golden| and ULP distance and its KL; NaN where the
    row could not be measured (KL: where it is partial, too) or where the figure is that; a row that is equal bit for
    bit has zeros. `golden_margin`, `run_margin` float64 [n]: largest minus second largest logit (the smallest margin
    of an entry's rows); NaN where not known. `top1_equal` int8 [n]: 1 the argmax is the same id, in every row of the
    entry; 0 in some row it is not; −1 not known. `blocks` float32 [n, B]: the largest |run − golden| of each block of
    `block_size` ids of the vocabulary, the last may be shorter; NaN where nothing was measured. B is
    ceil(V / block_size), at most 64; both are 0 where the vocabulary is not known.
    """

    max_abs: np.ndarray
    max_ulp: np.ndarray
    kl: np.ndarray
    golden_margin: np.ndarray
    run_margin: np.ndarray
    top1_equal: np.ndarray
    blocks: np.ndarray
    block_size: int
    rows_per_entry: int = 1

    def __len__(self) -> int:
        return len(self.max_abs)


def curve_block_size(vocab: int) -> int:
    """Ids in a block of a vocabulary of `vocab` ids."""
    return max(_MIN_BLOCK, -(-vocab // MAX_BLOCKS))


class CurveBuilder:
    """Takes the figures of `n_rows` rows in order and makes `RowCurves` of them. `vocab` None: not known."""

    def __init__(self, n_rows: int, vocab: int | None) -> None:
        self.rows_per_entry = max(1, -(-n_rows // MAX_ENTRIES))
        entries = -(-n_rows // self.rows_per_entry)
        self.block_size = 0 if vocab is None else curve_block_size(vocab)
        n_blocks = -(-vocab // self.block_size) if vocab else 0
        self._columns = {name: np.full(entries, np.nan) for name in _FLOATS}
        self._top1 = np.full(entries, -1, np.int8)
        self._blocks = np.full((entries, n_blocks), np.nan, np.float32)
        self._rows = 0

    def add(self, figures: dict[str, np.ndarray], top1_equal: np.ndarray, blocks: np.ndarray | None) -> None:
        """The next m rows: max_abs, max_ulp, kl, golden_margin and run_margin float64 [m] by name, top1_equal int8 [m],
        blocks float32 [m, B] (None: nothing is known)."""
        m = len(top1_equal)
        if not m:
            return
        entry = np.arange(self._rows, self._rows + m) // self.rows_per_entry
        starts = np.flatnonzero(np.r_[True, np.diff(entry) > 0])
        into = slice(int(entry[0]), int(entry[-1]) + 1)
        begun = self._rows % self.rows_per_entry > 0  # the first entry has rows of an earlier call
        self._rows += m
        with np.errstate(invalid="ignore"):
            for name, column in self._columns.items():
                worst = _FLOATS[name]
                new = worst.reduceat(figures[name], starts)
                if begun:
                    new[0] = worst(new[0], column[into][0])
                column[into] = new
            new = np.minimum.reduceat(_TOP1_RANK[top1_equal], starts)
            if begun:
                new[0] = min(new[0], _TOP1_RANK[self._top1[into][0]])
            self._top1[into] = _TOP1[new]
            if blocks is not None and blocks.shape[1]:
                new = np.maximum.reduceat(blocks, starts, axis=0)
                if begun:
                    new[0] = np.maximum(new[0], self._blocks[into][0])
                self._blocks[into] = new

    def curves(self) -> RowCurves:
        """The curves of the rows added so far: fewer than announced where the comparison ended early."""
        n = -(-self._rows // self.rows_per_entry)
        columns = {name: column[:n] for name, column in self._columns.items()}
        return RowCurves(
            **columns,
            top1_equal=self._top1[:n],
            blocks=self._blocks[:n],
            block_size=self.block_size,
            rows_per_entry=self.rows_per_entry,
        )


#: top1_equal from the worst to the best, and the place of 0, 1 and −1 in it.
_TOP1 = np.array([0, -1, 1], np.int8)
_TOP1_RANK = np.array([0, 2, 1], np.int8)

#: What is the worst of an entry's rows. Both keep a NaN.
_FLOATS: dict[str, np.ufunc] = {
    "max_abs": np.maximum,
    "max_ulp": np.maximum,
    "kl": np.maximum,
    "golden_margin": np.minimum,
    "run_margin": np.minimum,
}

"""The largest logits of rows: their ids, the margin between the first two, and on how many two sides agree.

The rule everywhere: larger value first, then smaller id; −0 and +0 are equal.
"""

import numpy as np

from kdtr_cli.parity.curves import curve_block_size

__all__ = ["MOST", "TOP_KS", "largest_of_blocks", "rank_rows", "shared_ids", "wide_values"]

#: For each of these k the k largest of both sides are compared by id.
TOP_KS = (1, 5, 10)
MOST = max(TOP_KS)


def wide_values(values: np.ndarray) -> np.ndarray:
    """The values in a type that NumPy is fast with: types of 16 bits as float32, which holds all of them."""
    if values.dtype.itemsize > 2:
        return values
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return values.astype(np.float32)


def largest_of_blocks(values: np.ndarray) -> np.ndarray:
    """The largest value of each block of the vocabulary: [n, V] -> [n, B], the blocks of curves.py. NaN is largest."""
    starts = np.arange(0, values.shape[1], curve_block_size(values.shape[1]))
    with np.errstate(invalid="ignore"):
        return np.maximum.reduceat(values, starts, axis=1)


def rank_rows(values: np.ndarray, maxima: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the k largest (of all V, if they are fewer) of rows [n, V] that hold no NaN, int64 [n, k], and the margins
    between the first two, float64 [n] (NaN where V is 1). `maxima` [n, B] is `largest_of_blocks(values)`.

    The k-th largest of the blocks' maxima is no larger than the k-th largest value, and hardly smaller: only what
    reaches it is sorted.
    """
    n, vocab = values.shape
    k, n_blocks = min(k, vocab), maxima.shape[1]
    if n_blocks < k:
        ids = np.argsort(-values, axis=1, kind="stable")[:, :k]
    else:
        bound = np.partition(maxima, n_blocks - k, axis=1)[:, n_blocks - k]
        flat = np.flatnonzero(values >= bound[:, None])
        rows, columns = np.divmod(flat, vocab)
        order = np.lexsort((-values.reshape(-1)[flat], rows))  # stable: equal values stay in the order of their ids
        starts = np.searchsorted(rows, np.arange(n))
        ids = columns[order[starts[:, None] + np.arange(k)]]
    if k < 2:
        return ids, np.full(n, np.nan)
    pair = np.take_along_axis(values, ids[:, :2], axis=1).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return ids, pair[:, 0] - pair[:, 1]


def shared_ids(golden: np.ndarray, run: np.ndarray) -> np.ndarray:
    """How many of the golden's ids [n, k] the run's [n, k] have too, whatever their order: int64 [n]. No row holds an
    id twice."""
    return (golden[:, :, None] == run[:, None, :]).any(axis=2).sum(axis=1)

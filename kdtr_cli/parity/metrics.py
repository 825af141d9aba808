"""How far two blocks of logits are apart. Pure functions on arrays [n, V]; float64 inside, whatever comes in.

A is the run's block, B the golden's. Not-a-number never makes a difference small: it comes out as NaN, and the
rules of tolerances.py let nothing pass that is not shown to be within bounds.
"""

import numpy as np

__all__ = ["FAR", "abs_difference", "equal_rows", "kl_divergence", "match_ids", "top_k", "ulp_distance"]

#: A distance that no tolerance can reach: given where a value can't be placed on the scale of the storage type.
FAR = np.uint64(np.iinfo(np.uint64).max)


def equal_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which rows have the same bits: two [n, V] of one dtype -> bool [n]. NaNs of the same bits are the same, −0 and
    +0 are not."""
    raw = np.dtype(f"u{a.dtype.itemsize}")
    return (np.ascontiguousarray(a).view(raw) == np.ascontiguousarray(b).view(raw)).all(axis=1)


def abs_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a − b| in float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.abs(a.astype(np.float64) - b.astype(np.float64))


def ulp_distance(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """How many representable values of `dtype` lie between a and b: uint64, the largest where one is not finite.

    Both are first rounded to `dtype`, the type the run stores (a is there already). −0 and +0 are one value. The
    ordered-integer method: the bits of a float, read as sign and magnitude, count the floats from zero.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        x, y = np.ascontiguousarray(a.astype(dtype)), np.ascontiguousarray(b.astype(dtype))
        finite = np.isfinite(x) & np.isfinite(y)
    if x.dtype.itemsize < 8:
        distance = np.abs(np.subtract(_place(x), _place(y), dtype=np.int64)).view(np.uint64)
    else:  # places may lie further apart than int64 can say; in uint64 the difference wraps to what it should be
        px, py = _place(x), _place(y)
        distance = np.where(px >= py, px.view(np.uint64) - py.view(np.uint64), py.view(np.uint64) - px.view(np.uint64))
    if not finite.all():
        distance[~finite] = FAR
    return distance


def _place(values: np.ndarray) -> np.ndarray:
    """The place of each float on the number line, in steps of one ULP from zero: a signed integer of its size."""
    raw = values.view(f"i{values.dtype.itemsize}")
    magnitude = raw & np.iinfo(raw.dtype).max
    return np.where(raw < 0, -magnitude, magnitude)


def kl_divergence(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """KL(P ‖ Q) of each row in nats, P = softmax(b) the golden's, Q = softmax(a) the run's, over the whole row:
    float64 [n]. 0 · log 0 is 0; a rounding error below zero is 0; a NaN stays one."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        log_p, log_q = _log_softmax(b.astype(np.float64)), _log_softmax(a.astype(np.float64))
        p = np.exp(log_p)
        terms = np.where(p == 0.0, 0.0, p * (log_p - log_q))
        # where p is 0, q may still be NaN; such a row is no distribution
        sums = np.where(np.isnan(log_q).any(axis=1), np.nan, terms.sum(axis=1))
        return np.where(sums < 0.0, 0.0, sums)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def top_k(row: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 [k] and values of the k largest of a row, larger value first, then smaller id; NaN counts as largest,
    so that it can't hide. −0 and +0 compare equal."""
    with np.errstate(invalid="ignore"):  # a signalling NaN may complain when it is converted
        values = row.astype(np.float64)
    key = np.where(np.isnan(values), np.inf, values)
    k = min(k, len(row))
    if len(row) > 4096:  # the k-th largest value bounds the candidates; ties with it are kept for the id rule
        kth = np.partition(key, len(key) - k)[len(key) - k]
        candidates = np.flatnonzero(key >= kth)
    else:
        candidates = np.arange(len(row))
    order = candidates[np.argsort(-key[candidates], kind="stable")][:k]
    return order, row[order]


def match_ids(wanted: np.ndarray, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find each id of `wanted` int [n, K] in the same row of `given` int [n, L]: (place int64 [n, K], found bool
    [n, K]); where not found the place is 0."""
    n, length = given.shape
    if n * length == 0:
        return np.zeros(wanted.shape, np.int64), np.zeros(wanted.shape, bool)
    stride = np.int64(1) << np.int64(32)
    row = np.arange(n, dtype=np.int64)[:, None] * stride
    keys = (given.astype(np.int64) + row).ravel()
    order = np.argsort(keys, kind="stable")
    sought = wanted.astype(np.int64) + row
    at = np.minimum(np.searchsorted(keys[order], sought), n * length - 1)
    source = order[at]
    found = keys[source] == sought
    return np.where(found, source % length, 0), found

"""The truth: the model's operations in float64, under the names of the exact ones.

The weights are the float32 values of rule 7; everything after them is float64, sums in NumPy's own order. What is left
of rounding is about 1e-13 of a logit, far below anything that a gate looks at.
"""

from collections.abc import Callable

import numpy as np

from kdtr_cli.reference.arith import argmax, order
from kdtr_cli.reference.attention import Branches, rotate

__all__ = ["argmax", "attend", "linear", "log_softmax", "order", "pack", "rms_norm", "sigmoid", "softmax", "swiglu"]
__all__ += ["by_branch", "cast", "rotate", "stored", "total"]


SHARED_PARTS = False  #: the last bits of a row depend on the rows that it is multiplied with
_TILE = 1 << 24  # scores of one tile of rows


def cast(x: object) -> np.ndarray:
    """x as float64."""
    return np.asarray(x, np.float64)


def stored(x: np.ndarray) -> np.ndarray:
    """x as it is: nothing is rounded between operations."""
    return x


def pack(w: np.ndarray) -> np.ndarray:
    """w [N, K] as float64."""
    return cast(w)


def linear(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x [M, K] times w [N, K] transposed (+ bias [N]) -> [M, N]."""
    y = x @ cast(w).T
    return y if bias is None else y + bias


def total(x: np.ndarray) -> np.ndarray:
    """Sum over the last axis."""
    return x.sum(-1)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x * x) + eps) * weight over the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + np.exp(-x))


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SiLU(gate) * up."""
    return gate * sigmoid(gate) * up


def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Log-softmax over the last axis."""
    m = x.max(-1, keepdims=True)
    return x - m - np.log(np.exp(x - m).sum(-1, keepdims=True))


def attend(
    query: np.ndarray,
    keys: np.ndarray,
    visible: np.ndarray,
    scale: float,
    latent: int,
    branches: Branches | None = None,
) -> np.ndarray:
    """Absorbed attention of query [M, H, D] over keys [S, D]; row m sees keys 0..visible[m]-1 -> [M, H, latent]."""
    if branches is not None:
        return by_branch(attend, query, keys, visible, scale, latent, branches)
    tile = max(1, _TILE // (query.shape[1] * keys.shape[0]))  # by the shape alone: it may change the last bits
    if len(query) > tile:
        rows = (slice(first, first + tile) for first in range(0, len(query), tile))
        return np.concatenate([attend(query[r], keys, visible[r], scale, latent) for r in rows])
    scores = np.einsum("mhd,sd->mhs", query, keys, optimize=True) * scale
    scores = np.where((np.arange(keys.shape[0]) < visible[:, None])[:, None], scores, -np.inf)
    return softmax(scores) @ keys[:, :latent]


def by_branch(
    attend: Callable[..., np.ndarray],
    query: np.ndarray,
    keys: np.ndarray,
    visible: np.ndarray,
    scale: float,
    latent: int,
    branches: Branches,
) -> np.ndarray:
    """An arithmetic's ``attend`` over rows of a draft tree, each over the keys of its own branch."""
    shared = np.broadcast_to(np.arange(branches.start), (len(query), branches.start))
    each = keys[np.concatenate([shared, branches.rows], 1)]
    return np.concatenate(
        [attend(query[i : i + 1], each[i], visible[i : i + 1], scale, latent) for i in range(len(query))]
    )

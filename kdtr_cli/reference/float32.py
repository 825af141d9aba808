"""Plain float32: the model's operations with BLAS for products, under the names of the exact ones.

For a quick look at a big model. Sums go in BLAS's and NumPy's own order, which changes with the library, the machine
and the batch: nothing here is bit-exact. Choices (order, argmax) follow the contract's rule.
"""

import numpy as np

from kdtr_cli.reference import float64
from kdtr_cli.reference.arith import argmax, order
from kdtr_cli.reference.attention import Branches, rotate
from kdtr_cli.reference.float64 import log_softmax, softmax, stored, total

__all__ = ["argmax", "attend", "linear", "log_softmax", "order", "pack", "rms_norm", "sigmoid", "softmax", "swiglu"]
__all__ += ["cast", "rotate", "stored", "total"]

f32 = np.float32
SHARED_PARTS = True  #: no bit is promised, so that speed decides


def cast(x: object) -> np.ndarray:
    """x as float32, rounded once."""
    return np.asarray(x, f32)


def pack(w: np.ndarray) -> np.ndarray:
    """w [N, K] as float32: the weights themselves where they are it, no second copy."""
    return cast(w)


def linear(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x [M, K] times w [N, K] transposed (+ bias [N]) -> [M, N]."""
    # with few rows OpenBLAS took half as long for w xT as for x wT; one row is a product with a vector either way
    y = (w @ x.T).T if len(x) > 1 else x @ w.T
    return y if bias is None else y + bias


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x * x) + eps) * weight over the last axis."""
    mean = np.einsum("...i,...i->...", x, x)[..., None] / f32(x.shape[-1])
    return x / np.sqrt(mean + f32(eps)) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return f32(1) / (f32(1) + np.exp(-x))


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SiLU(gate) * up."""
    return gate * sigmoid(gate) * up


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
        return float64.attend(query, keys, visible, f32(scale), latent, branches)
    m, heads, dim = query.shape
    size = len(keys)
    p = (query.reshape(m * heads, dim) @ keys.T).reshape(m, heads, size)
    p *= f32(scale)
    hidden = np.arange(size) >= visible[:, None]
    if hidden.any():
        np.copyto(p, f32(-np.inf), where=hidden[:, None])
    p -= p.max(-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(-1, keepdims=True)
    return (p.reshape(m * heads, size) @ keys[:, :latent]).reshape(m, heads, latent)

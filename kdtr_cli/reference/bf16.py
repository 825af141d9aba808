"""Emulated bf16: what an engine with bf16 matrix units computes, under the names of the exact operations.

Weights, activations and cached rows are rounded to bf16 (to nearest even), and so is every operand of a matrix product,
attention's weights included. Norms, router, softmax and all sums are float32; the logits, lm_head's sums, stay so.
Sums go in BLAS's order, as in `float32`: a measure of the rounding, no bits to be matched.
"""

import ml_dtypes
import numpy as np

from kdtr_cli.reference import float32
from kdtr_cli.reference.arith import argmax, order
from kdtr_cli.reference.attention import Branches
from kdtr_cli.reference.attention import rotate as rotate_float32
from kdtr_cli.reference.float32 import cast, linear, log_softmax, pack, sigmoid, softmax, total
from kdtr_cli.reference.float64 import by_branch

__all__ = ["argmax", "attend", "cast", "linear", "log_softmax", "order", "pack", "rms_norm", "rotate", "sigmoid"]
__all__ += ["softmax", "stored", "swiglu", "total"]

SHARED_PARTS = False  #: BLAS: the last bits of a row depend on the rows that it is multiplied with


def stored(x: np.ndarray) -> np.ndarray:
    """x rounded to bf16, as float32."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x * x) + eps) * weight over the last axis, rounded at the end."""
    return stored(float32.rms_norm(x, weight, eps))


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SiLU(gate) * up, rounded at the end."""
    return stored(float32.swiglu(gate, up))


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotary embedding with float32 tables, rounded at the end."""
    return stored(rotate_float32(x, cos, sin, interleaved))


def attend(
    query: np.ndarray,
    keys: np.ndarray,
    visible: np.ndarray,
    scale: float,
    latent: int,
    branches: Branches | None = None,
) -> np.ndarray:
    """Absorbed attention of query [M, H, D] over keys [S, D]; row m sees keys 0..visible[m]-1 -> [M, H, latent].

    exp(score - max) is rounded before it is multiplied with the latents, and summed as it is, as flash attention does.
    """
    if branches is not None:
        return by_branch(attend, query, keys, visible, scale, latent, branches)
    m, heads, dim = query.shape
    size = len(keys)
    p = (query.reshape(m * heads, dim) @ keys.T).reshape(m, heads, size) * np.float32(scale)
    p = np.where((np.arange(size) < visible[:, None])[:, None], p, np.float32(-np.inf))
    p = np.exp(p - p.max(-1, keepdims=True))
    vector = (stored(p).reshape(m * heads, size) @ keys[:, :latent]).reshape(m, heads, latent)
    return stored(vector / p.sum(-1, keepdims=True))

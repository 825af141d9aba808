"""The exact arithmetic as one set of operations, under the names that the transformer calls."""

import numpy as np

from kdtr_cli.reference.arith import (
    argmax,
    linear,
    log_softmax,
    order,
    pack,
    rms_norm,
    sigmoid,
    softmax,
    swiglu,
)
from kdtr_cli.reference.arith import sum128 as total
from kdtr_cli.reference.attention import attend, rotate
from kdtr_cli.reference.float64 import stored

__all__ = ["argmax", "attend", "cast", "linear", "log_softmax", "order", "pack", "rms_norm", "rotate", "sigmoid"]
__all__ += ["softmax", "stored", "swiglu", "total"]

SHARED_PARTS = True  #: sequences may share a part of a pass: the bits of a row do not depend on the others


def cast(x: object) -> np.ndarray:
    """x as float32, rounded once."""
    return np.asarray(x, np.float32)

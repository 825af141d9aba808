"""One call of a kernel for a test: its arguments by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Case", "Maker", "angles", "normal", "poison"]


@dataclass(frozen=True)
class Case:
    """One call of a kernel: what it is for, and its arguments by name (arrays, numbers, None)."""

    label: str
    values: dict[str, Any]


#: makes the cases of a kernel
Maker = Callable[[np.random.Generator], Iterator[Case]]


def poison(*shape: int, dtype: type = np.float32) -> np.ndarray:
    """An array whose bytes are all 0xFF: NaN, or -1."""
    out = np.empty(shape, dtype)
    out.view(np.uint8)[...] = 0xFF
    return out


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """float32 of standard normal distribution."""
    return rng.standard_normal(shape, np.float32)


def angles(rng: np.random.Generator, positions: int, half: int) -> dict[str, np.ndarray]:
    """A rotary table: float32 ``cos`` and ``sin`` [positions, half] of random angles."""
    angle = rng.uniform(0, 6.3, (positions, half))
    return {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}

"""A model's weights as one arithmetic uses them, in blocks of rows, with a bound on the memory that they keep.

A block that fits under the limit is kept; the others are read, dequantised and packed each time they are used, and one
such block is alive at a time. Weights are used in the same order pass after pass, so that keeping the first ones that
fit is as good as any choice (to drop the least recently used would drop each just before its use).
"""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from kdtr_cli.model.weights import BLOCK_ELEMENTS, Weights, block_rows

__all__ = ["PackedWeights", "block_ranges"]


def block_ranges(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first, last) of each block of rows of a weight."""
    step = block_rows(shape)
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


class PackedWeights:
    """``limit``: bytes of packed weights to keep; None keeps all. ``kept`` is how many are."""

    def __init__(self, weights: Weights, ops: ModuleType, limit: int | None = None) -> None:
        self.weights, self.ops, self.limit = weights, ops, limit
        self.kept = 0
        self._kept: dict[Any, Any] = {}

    def keep_at_most(self, limit: int | None) -> None:
        """Another limit; where more is kept than it allows, all goes."""
        self.limit = limit
        if limit is not None and self.kept > limit:
            self.kept, self._kept = 0, {}

    def __contains__(self, name: str) -> bool:
        return name in self.weights

    def blocks(self, name: str, as_read: bool = False) -> Iterator[Any]:
        """The packed blocks of rows of a matrix [N, K], in order; ``as_read``: not rounded as the arithmetic does."""
        stored = (lambda w: w) if as_read else self.ops.stored
        for first, last in block_ranges(self.weights.shape(name)):
            yield self._get((name, first), lambda a=first, b=last: self.ops.pack(stored(self.weights.rows(name, a, b))))

    def vector(self, name: str) -> np.ndarray:
        """A bias or a norm's weight."""
        return self._get(name, lambda: self.ops.cast(self.weights[name]))

    def heads(self, name: str, heads: int, nope: int) -> list[tuple[Any, Any]]:
        """Each head's packed (W_UK transposed [latent, nope], W_UV [v, latent]) out of kv_b_proj."""

        def make() -> list[tuple[Any, Any]]:
            kv_b = self.weights[name]
            by_head = kv_b.reshape(heads, -1, kv_b.shape[1])
            pack, stored = self.ops.pack, self.ops.stored
            return [(pack(stored(h[:nope].T)), pack(stored(h[nope:]))) for h in by_head]

        return self._get(name, make)

    def rows(self, name: str, index: np.ndarray) -> np.ndarray:
        """Rows index int [M] of a table; of a large one only these are read."""
        shape = self.weights.shape(name)
        if shape[0] * shape[1] <= BLOCK_ELEMENTS:
            return self._get(name, lambda: self.ops.cast(self.weights[name]))[index]
        wanted, where = np.unique(index, return_inverse=True)
        found = [self.weights.rows(name, int(i), int(i) + 1)[0] for i in wanted]
        return self.ops.cast(np.stack(found))[where.reshape(-1)]

    def _get(self, key: Any, make: Callable[[], Any]) -> Any:
        if key in self._kept:
            return self._kept[key]
        value = make()
        size = packed_bytes(value)
        if self.limit is None or self.kept + size <= self.limit:
            self._kept[key] = value
            self.kept += size
        return value


def packed_bytes(value: Any) -> int:
    """Bytes of what ``ops.pack`` and ``ops.cast`` return, and of lists of it."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, list | tuple):
        return sum(packed_bytes(item) for item in value)
    return sum(chunk.nbytes for chunk in value.chunks)

"""What a decoding cost: forward passes, and how many experts each of them touched in each layer.

In a mixture of experts a pass reads the weights of every expert that any of its rows chose, so a batch or a draft tree
is not free: the union of experts says what it moved.
"""

from dataclasses import dataclass, field

import numpy as np

__all__ = ["Statistics"]


@dataclass
class Statistics:
    """Counted by the decoding loops; padding rows and resting slots are left out."""

    prefill_passes: int = 0
    passes: int = 0  #: decode steps or verify passes, of whole batches
    touched: list[np.ndarray] = field(default_factory=list)  #: of each of these passes, distinct experts by layer [L]

    def count(self, ids: np.ndarray | None, rows: np.ndarray) -> None:
        """A decode or verify pass: the experts int32 [layers, M, slots] that its rows chose, and which rows count."""
        self.passes += 1
        if ids is not None:
            self.touched.append(np.array([len(np.unique(layer[rows])) for layer in ids]))

    def summary(self) -> dict[str, object]:
        """Plain numbers for a manifest: passes, and the mean of distinct experts a layer and pass (None without)."""
        mean = float(np.mean([t.mean() for t in self.touched])) if self.touched else None
        return {"prefill_passes": self.prefill_passes, "passes": self.passes, "experts_touched": mean}

"""Compaction: after a round the accepted rows of a cache move to the front of the round's rows (rule 20)."""

import numpy as np

__all__ = ["compact"]


def compact(rows: np.ndarray, start: int, accepted: np.ndarray) -> None:
    """Row start + k of rows [capacity, width] becomes row start + accepted[k], for every k, in place.

    All rows are read before one is written. No rotation is due: a node's row was rotated for position start + depth,
    and depth k is where it goes. Rows after start + len(accepted) are left over and belong to nobody.
    """
    rows[start : start + len(accepted)] = rows[start + accepted]

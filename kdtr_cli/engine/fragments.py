"""bf16 weights in the order in which matrix units take them (kernels_cu/mma_matmul.cuh), made when they are loaded."""

import numpy as np

__all__ = ["pack_fragments", "pack_pairs"]


def pack_fragments(weights: np.ndarray) -> np.ndarray:
    """bf16 weights as their bits, uint16 [..., n, k] -> uint16 [..., ceil(n / 16), ceil(k / 64), 1024].

    What is missing to whole tiles of 16 and units of 64 is zero.
    """
    *of, n, k = weights.shape
    tiles, units = -(-n // 16), -(-k // 64)
    padded = np.zeros((*of, tiles * 16, units * 64), np.uint16)
    padded[..., :n, :k] = weights
    # tile, half r, row g, unit, half q, t, element -> tile, unit, q, r, g, t, element
    parts, first = padded.reshape(*of, tiles, 2, 8, units, 2, 4, 8), len(of)
    order = [first + axis for axis in (0, 3, 4, 1, 2, 5, 6)]
    return np.ascontiguousarray(parts.transpose(*range(first), *order)).reshape(*of, tiles, units, 1024)


def pack_pairs(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Gate and up projection [..., n, k], tile by tile in turn -> uint16 [..., ceil(n / 16), 2, ceil(k / 64), 1024]."""
    return np.stack([pack_fragments(gate), pack_fragments(up)], axis=-3)

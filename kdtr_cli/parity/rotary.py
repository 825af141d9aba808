"""Are the values of two rows the same, rotated or reordered? For rotary keys and queries, [n, heads * rope]."""

from dataclasses import dataclass

import numpy as np

__all__ = ["Rotation", "describe_rotation", "is_permutation"]

_FAR = 64  # positions that a shift is looked for in, either way


@dataclass(frozen=True)
class Rotation:
    """`rotation`: every pair keeps its length, so that it is turned. `shift`: in words, by how many positions, where
    that is a whole number in every row."""

    rotation: bool
    shift: str | None


def is_permutation(golden: np.ndarray, run: np.ndarray, close: float, group: int | None = None) -> np.ndarray:
    """Which rows hold the golden's values in another order, within each `group` of columns (None: the row): bool [n].

    close: as near as equal values are, a share of the row's largest. Many values of one distribution lie close once
    they are sorted, whatever they are; so values of one head are better looked at by themselves.
    """
    g, r = (x.reshape(len(x), -1, group or x.shape[1]) for x in (golden, run))
    size = np.abs(g).max(axis=(1, 2))
    sorted_apart = np.abs(np.sort(g, axis=2) - np.sort(r, axis=2)).max(axis=(1, 2))
    return (sorted_apart <= close * size) & (np.abs(g - r).max(axis=(1, 2)) > 5 * close * size)


def describe_rotation(
    golden: np.ndarray, run: np.ndarray, positions: np.ndarray, rotary: np.ndarray, close: float
) -> Rotation:
    """Compare rows that are out, of keys or queries at these positions. `rotary`: radians a position of each pair.
    `close`: as for `is_permutation`."""
    g, r = _pairs(golden, len(rotary)), _pairs(run, len(rotary))
    size = np.abs(g).max(axis=(1, 2), initial=0.0)
    if not (np.abs(np.abs(g) - np.abs(r)).max(axis=(1, 2)) <= close * size).all():
        return Rotation(False, None)
    shifts = [_shift(*row, at, rotary, close) for *row, at in zip(g, r, positions.tolist(), strict=True)]
    if None in shifts or not shifts:
        return Rotation(True, None)
    low, high = min(shifts), max(shifts)
    rows = f"in {len(shifts)} rows, first at position {int(positions[0])}"
    if low == high:
        return Rotation(True, f"turned as {abs(low)} position{'s' * (abs(low) > 1)} {_side(low)} {rows}")
    return Rotation(True, f"turned as {low:+d} to {high:+d} positions away, another number each row, {rows}")


def _side(shift: int) -> str:
    return "later" if shift > 0 else "earlier"


def _pairs(x: np.ndarray, half: int) -> np.ndarray:
    """[n, heads * rope] as complex [n, heads, half]."""
    x = x.reshape(len(x), -1, 2 * half)
    return x[..., :half] + 1j * x[..., half:]


def _shift(golden: np.ndarray, run: np.ndarray, position: int, rotary: np.ndarray, close: float) -> int | None:
    """By how many positions a row is turned too far, the smallest such number; None: no whole number fits."""
    size = np.abs(golden).max()
    for distance in range(1, _FAR + 1):
        for shift in (distance, -distance):
            if position + shift >= 0:
                turned = golden * np.exp(1j * shift * rotary)
                if np.abs(turned - run).max() <= close * size:
                    return shift
    return None

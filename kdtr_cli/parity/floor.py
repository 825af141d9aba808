"""The noise floor: how far an arithmetic's rounding alone takes a model's logits from the float64 truth.

A golden measures it on its own rows and keeps it in the manifest (docs/bundle.md). All figures are extremes and counts:
the floor of a whole is that of its parts together, however it is cut into groups or shards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from kdtr_cli.parity.metrics import abs_difference, kl_divergence, ulp_distance

__all__ = ["FLOOR_KEY", "NoiseFloor", "add_floors", "floor_entries", "floors_of", "measure_floor", "shared_floors"]

#: The manifest's key.
FLOOR_KEY = "noise_floor"

_BLOCK_VALUES = 1 << 19


@dataclass(frozen=True)
class NoiseFloor:
    """Over ``rows`` rows of ``values`` logits: the largest |logit - float64|, the largest distance in ULPs of the type
    that the logits are stored in, and the largest KL(float64 || logits) of a row, in nats."""

    rows: int
    values: int
    max_abs: float
    max_ulp: int
    max_kl: float


def measure_floor(logits: np.ndarray, truth: np.ndarray) -> NoiseFloor:
    """The floor of logits [n, V], finite, against the truth, float64 [n, V]; n is at least 1."""
    step = max(1, _BLOCK_VALUES // max(1, logits.shape[1]))
    largest, ulps, kl = 0.0, 0, 0.0
    for lo in range(0, len(logits), step):
        a, b = logits[lo : lo + step], truth[lo : lo + step]
        largest = max(largest, float(abs_difference(a, b).max()))
        ulps = max(ulps, int(ulp_distance(a, b, logits.dtype).max()))
        kl = max(kl, float(kl_divergence(a, b).max()))
    return NoiseFloor(len(logits), logits.size, largest, ulps, kl)


def add_floors(one: NoiseFloor | None, other: NoiseFloor) -> NoiseFloor:
    """The floor of both parts' rows together; None is of nothing yet."""
    if one is None:
        return other
    return NoiseFloor(
        one.rows + other.rows,
        one.values + other.values,
        max(one.max_abs, other.max_abs),
        max(one.max_ulp, other.max_ulp),
        max(one.max_kl, other.max_kl),
    )


def floor_entries(floors: Mapping[str, NoiseFloor]) -> dict[str, dict[str, int | float]]:
    """Floors by arithmetic as the manifest keeps them."""
    return {name: asdict(floor) for name, floor in sorted(floors.items())}


def floors_of(manifest: Mapping[str, Any]) -> dict[str, NoiseFloor]:
    """The floors that a manifest holds, by arithmetic; an entry that is none is left out, as if it were missing."""
    entries = manifest.get(FLOOR_KEY)
    found = {}
    for name, entry in entries.items() if isinstance(entries, Mapping) else ():
        held = [entry.get(f.name) if isinstance(entry, Mapping) else None for f in fields(NoiseFloor)]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in held):
            found[name] = NoiseFloor(*held)
    return found


def shared_floors(parts: Iterable[Mapping[str, NoiseFloor]]) -> dict[str, NoiseFloor]:
    """The floors of the whole that the parts make up: of those arithmetics that every part has a floor of."""
    whole: dict[str, NoiseFloor] | None = None
    for part in parts:
        if whole is None:
            whole = dict(part)
        else:
            whole = {name: add_floors(floor, part[name]) for name, floor in whole.items() if name in part}
    return whole or {}

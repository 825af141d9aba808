"""What the shape of an operation's error says about its cause: codes of the hints (docs/bisect.md has the table).

Each pass leaves the codes that fit what it saw; what fits every pass is the hint.
"""

from dataclasses import dataclass

import numpy as np

from kdtr_cli.parity.rotary import describe_rotation, is_permutation

__all__ = ["HINTS", "Look", "fitting"]

#: Strongest first: of several codes that fit, the first is told.
HINTS = (
    "nonfinite",
    "constant-scale",
    "shift",
    "rope-layout",
    "yarn-scale",
    "position",
    "router-choice",
    "router-bias",
    "single-expert",
)

_CLOSE = 1e-5  # of a factor or a shift: float32 keeps seven digits, sums lose one or two
_TURNED = 5e-4  # of rotated vectors: an angle in float32 loses digits with its position


@dataclass(frozen=True, eq=False)
class Look:
    """What an operation gave and should have given, float32 [M, …], and what it is.

    kind: "rope" (rotated vectors in the last axis), "router" (weights, with the experts' ids on both sides), "experts"
    (items [M, slots, n], with the ids), "logits", or anything else. ids: int32 [M, slots]. rotary: radians a position
    of each rotated pair.
    """

    kind: str
    got: np.ndarray
    wanted: np.ndarray
    ids: np.ndarray | None = None
    got_ids: np.ndarray | None = None
    rotary: np.ndarray | None = None


def fitting(look: Look, positions: np.ndarray) -> frozenset[str]:
    """The codes that fit rows at these positions [M]; none where the numbers are right (and so are a router's ids)."""
    got, wanted = look.got, look.wanted
    if not np.isfinite(got).all():
        return frozenset({"nonfinite"})
    wrong = (got != wanted).reshape(len(got), -1).any(-1)
    if not wrong.any() and (look.kind != "router" or np.array_equal(look.got_ids, look.ids)):
        return frozenset()
    codes = set()
    if wrong.any() and _is_scaled(got[wrong], wanted[wrong]):
        codes.add("constant-scale")
    match look.kind:
        case "rope":
            codes |= _rope(look, wrong, positions)
        case "router" if not np.array_equal(look.got_ids, look.ids):
            codes = {"router-choice"}
        case "router":
            codes.add("router-bias")
        case "experts" if _is_one_expert((got != wanted).any(-1), look.ids):
            codes.add("single-expert")
        case "logits" if _is_shifted(got, wanted):
            codes.add("shift")
    return frozenset(codes)


def _is_scaled(got: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether one factor, other than 1, leads from wanted to got."""
    a, b = got.astype(np.float64).reshape(-1), wanted.astype(np.float64).reshape(-1)
    square = b @ b
    if not square:
        return False
    factor = (a @ b) / square
    rest = a - factor * b
    return abs(factor - 1) > _CLOSE and abs(factor) > _CLOSE and rest @ rest <= _CLOSE**2 * (a @ a)


def _is_shifted(got: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether each row is another by a constant."""
    apart = got.astype(np.float64) - wanted
    shift = apart.mean(-1, keepdims=True)
    return bool((np.abs(apart - shift) <= _CLOSE * np.maximum(np.abs(shift), np.abs(wanted))).all())


def _rope(look: Look, wrong: np.ndarray, positions: np.ndarray) -> set[str]:
    """The layout, where the right numbers stand elsewhere; else of vectors that are turned: by another position, where
    that is a whole number or position 0 is turned too; by other frequencies, where position 0 alone is right."""
    got, wanted = (a.reshape(len(a), -1)[wrong].astype(np.float64) for a in (look.got, look.wanted))
    if is_permutation(wanted, got, _CLOSE, look.wanted.shape[-1]).all():
        return {"rope-layout"}
    turned = describe_rotation(wanted, got, positions[wrong], look.rotary, _TURNED)
    if turned.shift is not None:
        return {"position"}
    first = positions == 0
    if not turned.rotation or not (wrong | first).all():
        return set()
    if not first.any():
        return {"yarn-scale", "position"}
    return {"position" if wrong[first].any() else "yarn-scale"}


def _is_one_expert(wrong: np.ndarray, ids: np.ndarray) -> bool:
    """Whether the items [M, slots] that are wrong are all those of one expert, and others are right."""
    bad = np.unique(ids[wrong])
    return len(bad) == 1 and not wrong.all() and bool(wrong[ids == bad[0]].all())

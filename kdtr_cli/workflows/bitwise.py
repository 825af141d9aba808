"""Two outputs of the same prompt, bit for bit: how far they are the same, and where they part."""

from dataclasses import dataclass

import numpy as np

from kdtr_cli.model.prompts import Generated

__all__ = ["Difference", "first_difference"]


@dataclass(frozen=True)
class Difference:
    """Where two outputs part. ``step`` counts output tokens, in ``prompt_logits`` positions of the prompt."""

    part: str  #: prompt_logits, logits, token, length or finish_reason; at one step logits come before the token
    step: int
    index: int | None  #: the vocabulary id of the logit; None where the part has none
    base: float | int | str
    other: float | int | str
    base_bits: str | None = None  #: of a logit, such as 0x3f800000
    other_bits: str | None = None


def first_difference(base: Generated, other: Generated) -> tuple[int, Difference | None]:
    """How many leading tokens agree with their logits, and the first difference in the order of computing.

    Logits float32 [T, V] are compared as bits, so -0 is not 0; a value that is not finite is never the same as any.
    In their place both sides may hold the digests of their rows, uint8 [T, 32].
    """
    if (base.prompt_logits is None) != (other.prompt_logits is None):
        sides = ["none" if logits is None else "present" for logits in (base.prompt_logits, other.prompt_logits)]
        return 0, Difference("prompt_logits", 0, None, *sides)
    if base.prompt_logits is not None:
        at = _first_row(base.prompt_logits, other.prompt_logits)
        if at is not None:
            return 0, _logit("prompt_logits", base.prompt_logits, other.prompt_logits, *at)
    steps = min(len(base.tokens), len(other.tokens))
    tokens = np.flatnonzero(base.tokens[:steps] != other.tokens[:steps])
    token = int(tokens[0]) if len(tokens) else steps
    at = _first_row(base.logits[: token + 1], other.logits[: token + 1])
    if at is not None:
        return at[0], _logit("logits", base.logits, other.logits, *at)
    if token < steps:
        return token, Difference("token", token, None, int(base.tokens[token]), int(other.tokens[token]))
    if len(base.tokens) != len(other.tokens):
        return steps, Difference("length", steps, None, len(base.tokens), len(other.tokens))
    if base.finish_reason != other.finish_reason:
        return steps, Difference("finish_reason", steps - 1, None, base.finish_reason, other.finish_reason)
    return steps, None


def _first_row(base: np.ndarray, other: np.ndarray) -> tuple[int, int] | None:
    """Row and place of the first value that differs; row by row, so that no mask of all logits is made."""
    for row, (a, b) in enumerate(zip(base, other, strict=False)):
        if a.dtype == np.uint8:
            wrong = a != b
        else:
            wrong = (a.view(np.uint32) != b.view(np.uint32)) | ~np.isfinite(a) | ~np.isfinite(b)
        if wrong.any():
            return row, int(np.argmax(wrong))
    return None


def _logit(part: str, base: np.ndarray, other: np.ndarray, row: int, place: int) -> Difference:
    if base.dtype == np.uint8:
        return Difference(part, row, None, *(f"sha256 {side[row].tobytes().hex()[:16]}" for side in (base, other)))
    pair = (base[row, place], other[row, place])
    bits = [f"0x{int(value.view(np.uint32)):08x}" for value in pair]
    return Difference(part, row, place, *(float(value) for value in pair), *bits)

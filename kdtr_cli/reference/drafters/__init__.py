"""Drafters in NumPy: what proposes the tokens of a round. Each is one small class with the methods of ``Drafter``."""

from typing import Protocol

import numpy as np

from kdtr_cli.model.prompts import Prompt

__all__ = ["Drafter", "Marginals"]

#: ids int32 [L, K], log-probabilities float32 [L, K], counts int32 [L]: rank r of depth d exists iff r < counts[d]
Marginals = tuple[np.ndarray, np.ndarray, np.ndarray]


class Drafter(Protocol):
    """What the round loop asks of a drafter. A slot is a sequence of the batch.

    ``taps``: the target's layers whose outputs it reads (none for most). ``horizon``: L, depths drafted.
    """

    taps: tuple[int, ...]
    horizon: int

    def reset(self, slot: int, prompt: Prompt) -> None:
        """Begin a sequence: forget all that the slot had."""

    def extend(self, slot: int, tokens: np.ndarray, features: np.ndarray | None) -> None:
        """Tokens int32 [n] were committed at the next n positions, the prompt's first; features [n, taps * hidden]."""

    def marginals(self, slot: int, start: int, root: int, k: int) -> Marginals:
        """Up to k candidates for each of positions start + 1 … start + L, given what lies before start, and the root.

        ``start`` may be any position up to the number of committed tokens.
        """

"""The n-gram drafter: what followed the same last tokens earlier in the text (docs/numerics.md rule 22). No weights."""

import numpy as np

from kdtr_cli.model.prompts import Prompt
from kdtr_cli.reference.arith import log
from kdtr_cli.reference.drafters import Marginals

__all__ = ["LONGEST", "MATCHES", "NgramDrafter", "ngram_marginals"]

LONGEST = 3  #: tokens of the longest context that is looked up
MATCHES = 8  #: places looked at, the latest first

f32 = np.float32


def ngram_marginals(history: np.ndarray, horizon: int, k: int) -> Marginals:
    """Marginals for the ``horizon`` positions after history int32 [n], whose last element is the root.

    The last 3 tokens, else the last 2, else the last are looked for; at each of the latest 8 places where they stand
    earlier, the d-th token after them votes for depth d. More votes first, then the smaller id; the log-probability is
    log(votes / all votes at that depth).
    """
    ids, logps = np.zeros((horizon, k), np.int32), np.zeros((horizon, k), f32)
    counts = np.zeros(horizon, np.int32)
    start = len(history) - 1
    for n in range(min(LONGEST, start), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(history[:start], n)
        found = np.flatnonzero((windows == history[start + 1 - n :]).all(-1))
        if not len(found):
            continue
        after = found[-MATCHES:] + n
        for d in range(horizon):
            at = after + d
            tokens, votes = np.unique(history[at[at <= start]], return_counts=True)
            first = np.lexsort((tokens, -votes))[:k]
            counts[d] = len(first)
            ids[d, : len(first)] = tokens[first]
            logps[d, : len(first)] = log(votes[first].astype(f32) / f32(votes.sum()))
        break
    return ids, logps, counts


class NgramDrafter:
    """Looks up each sequence's own text; reads no features."""

    taps: tuple[int, ...] = ()

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self._history: dict[int, np.ndarray] = {}

    def reset(self, slot: int, prompt: Prompt) -> None:
        self._history[slot] = np.zeros(0, np.int32)

    def extend(self, slot: int, tokens: np.ndarray, features: np.ndarray | None) -> None:
        self._history[slot] = np.append(self._history[slot], tokens).astype(np.int32)

    def marginals(self, slot: int, start: int, root: int, k: int) -> Marginals:
        history = np.append(self._history[slot][:start], np.int32(root))
        return ngram_marginals(history, self.horizon, k)

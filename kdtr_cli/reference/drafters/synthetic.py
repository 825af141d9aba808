"""The synthetic drafter: seeded marginals around the known continuation that hit with a given rate (rule 23).

It needs no weights and has any acceptance one asks for: a test instrument, and a load for measurements.
"""

from collections.abc import Mapping

import numpy as np

from kdtr_cli.model.prompts import Prompt
from kdtr_cli.reference.arith import log
from kdtr_cli.reference.drafters import Marginals
from kdtr_cli.reference.sampling import PURPOSE_DRAFT, uniform_words

__all__ = ["SyntheticDrafter", "synthetic_marginals"]

f32 = np.float32


def synthetic_marginals(
    known: np.ndarray, first: int, start: int, stream: int, *, rate: float, seed: int, horizon: int, vocab: int, k: int
) -> Marginals:
    """Marginals for positions start + 1 … start + horizon; known int32 [n] are the tokens at positions first and on.

    All that is random comes from Philox by position and stream (purpose 2): whether the right token has rank 0, else
    its rank if it is there at all, how sure the drafter seems, and what fills the other ranks. A position whose token
    is not known has a random one. K = V leaves one rank empty where the right token is absent: no other id is left.
    """
    k = min(k, vocab)
    ids, logps, counts = np.zeros((horizon, k), np.int32), np.zeros((horizon, k), f32), np.full(horizon, k, np.int32)
    for d in range(horizon):
        position = start + 1 + d
        w0, w1, w2, w3 = (int(w) for w in uniform_words(4, position, stream, PURPOSE_DRAFT, seed))
        at = position - first
        token = int(known[at]) if 0 <= at < len(known) else w3 % vocab
        rank = 0 if (w0 + 0.5) * 2.0**-32 < rate else 1 + w1 % k
        counts[d] = k if rank < k else min(k, vocab - 1)
        filler = 0
        for r in range(counts[d]):
            if r == rank:
                ids[d, r] = token
            else:
                ids[d, r] = (token + 1 + (w3 + filler) % (vocab - 1)) % vocab
                filler += 1
        q = f32(0.3) + f32(0.6) * f32((w2 >> 8) * 2.0**-24)
        logps[d, 0] = log(q)
        logps[d, 1:] = log(f32(1) - q) - np.arange(1, k, dtype=f32) * f32(0.69314718)
    return ids, logps, counts


class SyntheticDrafter:
    """``known``: for each prompt id the continuation int32 [T] at positions len(prompt) …; rate from 0 to 1."""

    taps: tuple[int, ...] = ()

    def __init__(self, rate: float, seed: int, horizon: int, vocab: int, known: Mapping[str, np.ndarray]) -> None:
        self.rate, self.seed, self.horizon, self.vocab, self.known = rate, seed, horizon, vocab, known
        self._prompts: dict[int, Prompt] = {}

    def reset(self, slot: int, prompt: Prompt) -> None:
        self._prompts[slot] = prompt

    def extend(self, slot: int, tokens: np.ndarray, features: np.ndarray | None) -> None:
        pass

    def marginals(self, slot: int, start: int, root: int, k: int) -> Marginals:
        prompt = self._prompts[slot]
        return synthetic_marginals(
            self.known.get(prompt.id, np.zeros(0, np.int32)),
            len(prompt.ids),
            start,
            prompt.stream,
            rate=self.rate,
            seed=self.seed,
            horizon=self.horizon,
            vocab=self.vocab,
            k=k,
        )

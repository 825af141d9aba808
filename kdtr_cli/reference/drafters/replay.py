"""The replay drafter: marginals that a bundle stores for every output position (docs/numerics.md rule 24)."""

from collections.abc import Mapping

import numpy as np

from kdtr_cli.model.prompts import Prompt
from kdtr_cli.reference.drafters import Marginals

__all__ = ["ReplayDrafter", "replay_marginals"]


def replay_marginals(top_ids: np.ndarray, top_logps: np.ndarray, counts: np.ndarray, output: int, k: int) -> Marginals:
    """Stored marginals [T, L, Kd] of an output position, cut or padded to k ids a depth.

    Past the last stored position every count is 0, so that the round has a root alone; more than Kd ids never come.
    """
    horizon, stored = top_ids.shape[1:]
    ids, logps = np.zeros((horizon, k), np.int32), np.zeros((horizon, k), np.float32)
    if not 0 <= output < len(top_ids):
        return ids, logps, np.zeros(horizon, np.int32)
    kept = min(k, stored)
    ids[:, :kept], logps[:, :kept] = top_ids[output, :, :kept], top_logps[output, :, :kept]
    return ids, logps, np.minimum(counts[output], k).astype(np.int32)


class ReplayDrafter:
    """``stored``: for each prompt id (top_ids int32 [T, L, Kd], top_logps float32 [T, L, Kd], counts int32 [T, L])."""

    taps: tuple[int, ...] = ()

    def __init__(self, horizon: int, stored: Mapping[str, Marginals]) -> None:
        self.horizon, self.stored = horizon, stored
        self._prompts: dict[int, Prompt] = {}

    def reset(self, slot: int, prompt: Prompt) -> None:
        self._prompts[slot] = prompt

    def extend(self, slot: int, tokens: np.ndarray, features: np.ndarray | None) -> None:
        pass

    def marginals(self, slot: int, start: int, root: int, k: int) -> Marginals:
        prompt = self._prompts[slot]
        return replay_marginals(*self.stored[prompt.id], start - len(prompt.ids), k)

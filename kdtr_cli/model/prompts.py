"""Prompts as token ids, checked once against the model: what golden, run and the engines all take."""

from dataclasses import dataclass

import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.model.config import ModelConfig

__all__ = ["Decoding", "Generated", "Prompt", "check_prompts"]


@dataclass(frozen=True)
class Prompt:
    """One sequence to continue: its name, its token ids int32 [P], and the stream that keys its draws (rule 15)."""

    id: str
    ids: np.ndarray
    stream: int


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen: greedy at temperature 0, else by Gumbel noise from the seed."""

    steps: int
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"--steps {self.steps}: at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"--temperature {self.temperature}: 0 (greedy) or a positive finite number")
        if self.temperature and not 1e-30 <= self.temperature <= 1e30:
            # a float32 logit divided by it must neither overflow nor vanish
            raise InputError(f"--temperature {self.temperature}: 1e-30 to 1e30, or 0 for greedy")
        if not 0 <= self.seed < 1 << 64:
            raise InputError(f"--seed {self.seed}: 0 to 2**64 - 1")

    def stops(self, token: int) -> bool:
        """Whether decoding ends with this token."""
        return not self.ignore_eos and token in self.stop_ids


@dataclass
class Generated:
    """One decoded sequence: tokens int32 [T], their logits [T, V], the prompt's logits [P, V] if asked for.

    Row t of the logits chose token t; ``finish_reason`` is "stop" (the last token is a stop id) or "length". ``trace``:
    the arrays trace/NAME of a bundle, where they were asked for.
    """

    tokens: np.ndarray
    logits: np.ndarray
    prompt_logits: np.ndarray | None
    finish_reason: str
    trace: dict[str, np.ndarray] | None = None


def check_prompts(prompts: list[Prompt], config: ModelConfig, steps: int) -> int:
    """Check ids and lengths; returns how many positions the longest sequence feeds, prompt + steps - 1.

    The last token is drawn but never fed. InputError names the prompt, the place and the limit.
    """
    if not prompts:
        raise InputError("no prompts: give --prompt-ids, --prompt-text, --prompts or --num-prompts")
    seen: set[str] = set()
    longest = 0
    for prompt in prompts:
        if prompt.id in seen:
            raise InputError(f"prompt id {prompt.id!r} stands twice; ids must differ")
        seen.add(prompt.id)
        if not len(prompt.ids):
            raise InputError(f"prompt {prompt.id!r} is empty; a sequence needs at least one token")
        wrong = np.flatnonzero((prompt.ids < 0) | (prompt.ids >= config.vocab_size))
        if len(wrong):
            at = int(wrong[0])
            raise InputError(
                f"prompt {prompt.id!r}: token {int(prompt.ids[at])} at place {at} is outside "
                f"the vocabulary 0..{config.vocab_size - 1}"
            )
        longest = max(longest, len(prompt.ids) + steps - 1)
        if len(prompt.ids) + steps - 1 > config.max_position_embeddings:
            raise InputError(
                f"prompt {prompt.id!r}: {len(prompt.ids)} tokens and {steps} steps need position "
                f"{len(prompt.ids) + steps - 2}; the model ends at "
                f"{config.max_position_embeddings - 1} (max_position_embeddings)"
            )
    return longest

"""Autoregressive decoding with the NumPy model: the tokens and logits of a golden."""

from collections.abc import Callable

import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.model.prompts import Decoding, Generated, Prompt
from kdtr_cli.reference.sampling import choose
from kdtr_cli.reference.transformer import Cache, Model, Observe, Rows

__all__ = ["FiniteCheck", "generate", "prefill", "score"]

_PREFILL_ROWS = 256  # rows of one forward pass: bounds memory, changes no bit


class FiniteCheck:
    """Observer that stops at the first tensor with a NaN or an infinity and says which sequence it belongs to."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts = prompts
        self.rows: Rows | None = None

    def __call__(self, name: str, value: np.ndarray) -> None:
        if np.isfinite(value).all():
            return
        row = int(np.argwhere(~np.isfinite(value))[0, 0])
        prompt = self.prompts[int(self.rows.slots[row])]
        raise InputError(
            f"{name} is not finite in sequence {prompt.id!r} at position {int(self.rows.positions[row])}: "
            f"the weights overflow {value.dtype.name}; check the checkpoint"
        )


def _feed(
    model: Model,
    cache: Cache,
    check: FiniteCheck,
    tokens: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    observe: Observe | None = None,
) -> np.ndarray:
    rows = Rows(tokens.astype(np.int32), slots.astype(np.int32), positions.astype(np.int32))
    check.rows = rows
    return model.forward(rows, cache, observe or check)


def _logits(
    model: Model, check: FiniteCheck, hidden: np.ndarray, slots: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    check.rows = Rows(slots, slots, positions)
    logits = model.logits(hidden)
    check("logits", logits)
    return logits


def prefill(
    model: Model,
    cache: Cache,
    check: FiniteCheck,
    slot: int,
    ids: np.ndarray,
    keep_all: bool,
    observe: Observe | None = None,
    fed: Callable[[np.ndarray], None] = lambda ids: None,
) -> np.ndarray:
    """Feed a prompt; the logits of its last position [1, V], or of all [P, V].

    ``observe`` watches instead of the check (which it has to call); ``fed`` gets the ids of each part after it was fed.
    """
    logits = []
    for first in range(0, len(ids), _PREFILL_ROWS):
        part = ids[first : first + _PREFILL_ROWS]
        positions = np.arange(first, first + len(part))
        slots = np.full(len(part), slot)
        hidden = _feed(model, cache, check, part, slots, positions, observe)
        fed(part)
        if keep_all:
            logits.append(_logits(model, check, hidden, slots, positions))
        elif first + len(part) == len(ids):
            logits.append(_logits(model, check, hidden[-1:], slots[-1:], positions[-1:]))
    return np.concatenate(logits)


def generate(
    model: Model,
    prompts: list[Prompt],
    decoding: Decoding,
    keep_prompt_logits: bool = False,
    cache: Cache | None = None,
) -> list[Generated]:
    """Decode all prompts together; a sequence's bits do not depend on the others.

    ``cache``: an empty one of P + steps - 1 rows a prompt, for who wants to look at it afterwards.

    The prompts and lengths must have been checked by ``check_prompts``; the model must hold rotary tables for them.
    InputError, naming the tensor, when the model's own arithmetic overflows.
    """
    count = len(prompts)
    if cache is None:
        cache = model.cache([len(p.ids) + decoding.steps - 1 for p in prompts])
    check = FiniteCheck(prompts)
    vocab = model.config.vocab_size
    dtype = model.ops.cast(0).dtype
    logits = [np.empty((decoding.steps, vocab), dtype) for _ in prompts]
    tokens = np.zeros((count, decoding.steps), np.int32)
    lengths = np.zeros(count, np.int32)
    streams = np.array([p.stream for p in prompts])
    starts = np.array([len(p.ids) for p in prompts])
    prompt_logits: list[np.ndarray | None] = [None] * count
    active = np.arange(count)
    for slot, prompt in enumerate(prompts):
        rows = prefill(model, cache, check, slot, prompt.ids, keep_prompt_logits)
        logits[slot][0] = rows[-1]
        prompt_logits[slot] = rows if keep_prompt_logits else None
    stopped = np.zeros(count, bool)
    for step in range(decoding.steps):
        chosen = choose(
            np.stack([logits[s][step] for s in active]),
            starts[active] + step,
            streams[active],
            temperature=decoding.temperature,
            seed=decoding.seed,
        )
        tokens[active, step] = chosen
        lengths[active] = step + 1
        stopped[active] = [decoding.stops(int(t)) for t in chosen]
        active = active[~stopped[active]]
        if step + 1 == decoding.steps or not len(active):
            break
        positions = starts[active] + step
        hidden = _feed(model, cache, check, tokens[active, step], active, positions)
        for slot, row in zip(active, _logits(model, check, hidden, active, positions), strict=True):
            logits[slot][step + 1] = row
    return [
        Generated(
            tokens[s, : lengths[s]], logits[s][: lengths[s]], prompt_logits[s], "stop" if stopped[s] else "length"
        )
        for s in range(count)
    ]


def score(model: Model, prompt: Prompt, tokens: np.ndarray) -> np.ndarray:
    """Logits [P + T - 1, V] along given tokens int32 [T]; row i predicts element i + 1 of prompt + tokens."""
    ids = np.concatenate([prompt.ids, tokens[:-1]]).astype(np.int32)
    return prefill(model, model.cache([len(ids)]), FiniteCheck([prompt]), 0, ids, keep_all=True)

"""Autoregressive decoding with the NumPy model: the tokens and logits of a golden."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.model.prompts import Decoding, Generated, Prompt
from kdtr_cli.model.traces import Trace
from kdtr_cli.reference.sampling import choose
from kdtr_cli.reference.transformer import Cache, Model, Observe, Parts, Rows

__all__ = ["Decode", "FiniteCheck", "Scoring", "advance", "advance_scoring", "begin", "generate", "prefill", "score"]
__all__ += ["score", "score_group", "scored", "sequence_parts"]

_PREFILL_ROWS = 256  # rows of one forward pass: bounds memory, changes no bit


class FiniteCheck:
    """Observer that stops at the first tensor with a NaN or an infinity and says which sequence it belongs to.

    ``rows`` are those of the pass that it watches; ``of`` makes one for each part of a pass.
    """

    def __init__(self, prompts: list[Prompt], rows: Rows | None = None) -> None:
        self.prompts, self.rows = prompts, rows

    def of(self, parts: list[Rows]) -> list[Observe]:
        """One observer a part."""
        return [FiniteCheck(self.prompts, rows) for rows in parts]

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


@dataclass
class Decode:
    """A group of sequences while it is decoded, between two layers of a pass.

    ``step`` passes are done: the prompts', then one for each token. ``hidden`` has the outputs of ``layer`` layers for
    each part of the pass under way, and is empty between passes. Of ``tokens`` int32 [B, steps] and ``logits`` B times
    [steps, V] the first ``lengths[b]`` rows are made; ``prompt_logits`` is empty or has B times [P, V]; ``traces`` is
    empty or has one a sequence, which passes write to.
    """

    cache: Cache
    tokens: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray
    logits: list[np.ndarray]
    prompt_logits: list[np.ndarray] = field(default_factory=list)
    step: int = 0
    layer: int = 0
    hidden: Parts = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)

    def active(self) -> np.ndarray:
        """Sequences that the next pass feeds."""
        return np.flatnonzero(~self.stopped)

    def done(self) -> bool:
        """Whether every sequence has its last token."""
        return self.step == self.tokens.shape[1] or bool(self.stopped.all())

    def results(self) -> list[Generated]:
        """What was decoded."""
        return [
            Generated(
                self.tokens[s, :n],
                self.logits[s][:n],
                self.prompt_logits[s] if self.prompt_logits else None,
                "stop" if self.stopped[s] else "length",
            )
            for s, n in enumerate(self.lengths)
        ]


def sequence_parts(sequences: list[np.ndarray], shared: bool = False) -> list[Rows]:
    """Whole sequences of ids as the parts of one pass, none longer than _PREFILL_ROWS.

    ``shared``: several sequences may stand in one part, which is faster; else each part is of one sequence.
    """
    parts, filled = [], 0
    for slot, ids in enumerate(sequences):
        for first in range(0, len(ids), _PREFILL_ROWS):
            some = ids[first : first + _PREFILL_ROWS].astype(np.int32)
            at = np.arange(first, first + len(some), dtype=np.int32)
            rows = Rows(some, np.full(len(some), slot, np.int32), at)
            if shared and parts and filled + len(some) <= _PREFILL_ROWS:
                parts[-1].append(rows)
                filled += len(some)
            else:
                parts.append([rows])
                filled = len(some)
    return [
        Rows(*(np.concatenate([getattr(r, f) for r in part]) for f in ("tokens", "slots", "positions")))
        for part in parts
    ]


def begin(model: Model, prompts: list[Prompt], decoding: Decoding, cache: Cache | None = None) -> Decode:
    """The state before the first pass. ``cache``: an empty one of at least P + steps - 1 rows a prompt."""
    count, dtype = len(prompts), model.ops.cast(0).dtype
    return Decode(
        cache or model.cache([len(p.ids) + decoding.steps - 1 for p in prompts]),
        np.zeros((count, decoding.steps), np.int32),
        np.zeros(count, np.int32),
        np.zeros(count, bool),
        [np.empty((decoding.steps, model.config.vocab_size), dtype) for _ in prompts],
    )


def advance(
    model: Model, prompts: list[Prompt], decoding: Decoding, state: Decode, keep_prompt_logits: bool = False
) -> None:
    """One layer of the pass under way; with the last one its logits and the next token of each sequence.

    Intermediate tensors go into ``state.traces``, where there are any.
    InputError, naming the tensor, when the model's own arithmetic overflows.
    """
    starts = np.array([len(p.ids) for p in prompts])
    active = state.active()
    if state.step == 0:
        parts = sequence_parts([p.ids for p in prompts], model.ops.SHARED_PARTS)
    else:
        positions = (starts[active] + state.step - 1).astype(np.int32)
        parts = [Rows(state.tokens[active, state.step - 1], active.astype(np.int32), positions)]
    check = FiniteCheck(prompts)
    observe = check.of(parts)
    if state.traces:
        observe = [_recording(state.traces, rows, watch) for rows, watch in zip(parts, observe, strict=True)]
    if not state.hidden:
        state.layer, state.hidden = 0, [model.embed(rows.tokens) for rows in parts]
        for watch, hidden in zip(observe, state.hidden, strict=True):
            watch("embed", hidden)
    state.hidden = model.layer(state.layer, state.hidden, parts, state.cache.rows[state.layer], observe)
    state.layer += 1
    if state.layer < model.config.num_hidden_layers:
        return
    hidden = model.final_norm(state.hidden, observe)
    if state.step == 0:
        by_prompt = _by_sequence(hidden, [len(p.ids) for p in prompts])
        if keep_prompt_logits:
            all_rows = model.logits_of(hidden)
            for watch, rows in zip(observe, all_rows, strict=True):
                watch("logits", rows)
            state.prompt_logits = _by_sequence(all_rows, [len(p.ids) for p in prompts])
            rows = np.stack([logits[-1] for logits in state.prompt_logits])
        else:
            rows = model.logits(np.stack([h[-1] for h in by_prompt]))
    else:
        rows = model.logits(hidden[0])
    check.rows = Rows(active, active, starts[active] + state.step - 1)
    check("logits", rows)
    streams = np.array([p.stream for p in prompts])[active]
    chosen = choose(rows, starts[active] + state.step, streams, temperature=decoding.temperature, seed=decoding.seed)
    for slot, row in zip(active, rows, strict=True):
        state.logits[slot][state.step] = row
    state.tokens[active, state.step] = chosen
    state.lengths[active] = state.step + 1
    state.stopped[active] = [decoding.stops(int(t)) for t in chosen]
    state.step, state.layer, state.hidden = state.step + 1, 0, []


def _recording(traces: list[Trace], rows: Rows, watch: Observe) -> Observe:
    """An observer of these rows that keeps what it sees, after another one has looked."""

    def observe(name: str, value: np.ndarray) -> None:
        watch(name, value)
        for slot, run in rows.runs():
            traces[slot].put(name, rows.positions[run], value[run])

    return observe


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
    state = begin(model, prompts, decoding, cache)
    while not state.done():
        advance(model, prompts, decoding, state, keep_prompt_logits)
    return state.results()


@dataclass
class Scoring:
    """A group of whole sequences on their way through the layers; ``hidden`` as in Decode."""

    layer: int = 0
    hidden: Parts = field(default_factory=list)


def advance_scoring(model: Model, prompts: list[Prompt], outputs: list[np.ndarray], state: Scoring) -> None:
    """One layer of the pass over prompts and outputs. Keys are needed inside the layer only, and not kept."""
    fed = [_fed(prompt, tokens) for prompt, tokens in zip(prompts, outputs, strict=True)]
    parts = sequence_parts(fed)
    if not state.hidden:
        state.hidden = [model.embed(rows.tokens) for rows in parts]
    width, dtype = model.config.latent_dim, model.ops.cast(0).dtype
    cached = [np.full((len(ids), width), np.nan, dtype) for ids in fed]
    state.hidden = model.layer(state.layer, state.hidden, parts, cached, FiniteCheck(prompts).of(parts))
    state.layer += 1


def scored(
    model: Model, prompts: list[Prompt], outputs: list[np.ndarray], state: Scoring, keep_prompt_logits: bool
) -> list[tuple[np.ndarray | None, np.ndarray]]:
    """After the last layer, for each sequence: the prompt's logits [P, V] if asked for, and the outputs' [T, V].

    Row t of the outputs' logits predicts token t. The products are the same with and without the prompt's.
    """
    fed = [_fed(prompt, tokens) for prompt, tokens in zip(prompts, outputs, strict=True)]
    parts = sequence_parts(fed)
    observe = FiniteCheck(prompts).of(parts)
    hidden = model.final_norm(state.hidden, observe)
    by_sequence = _by_sequence(hidden, [len(ids) for ids in fed])
    rows = model.logits_of([h[-len(tokens) :] for h, tokens in zip(by_sequence, outputs, strict=True)])
    for slot, (prompt, logits) in enumerate(zip(prompts, rows, strict=True)):
        at = np.arange(len(prompt.ids) - 1, len(fed[slot]))
        FiniteCheck(prompts, Rows(at, np.full(len(at), slot), at))("logits", logits)
    if not keep_prompt_logits:
        return [(None, logits) for logits in rows]
    every = model.logits_of(hidden)
    for watch, logits in zip(observe, every, strict=True):
        watch("logits", logits)
    along = _by_sequence(every, [len(ids) for ids in fed])
    return [
        (np.concatenate([logits[: len(prompt.ids) - 1], own[:1]]), own)
        for prompt, logits, own in zip(prompts, along, rows, strict=True)
    ]


def score(model: Model, prompt: Prompt, tokens: np.ndarray) -> np.ndarray:
    """Logits [P + T - 1, V] along given tokens int32 [T]; row i predicts element i + 1 of prompt + tokens."""
    of_prompt, own = score_group(model, [prompt], [tokens], keep_prompt_logits=True)[0]
    return np.concatenate([of_prompt[:-1], own])


def score_group(
    model: Model, prompts: list[Prompt], outputs: list[np.ndarray], keep_prompt_logits: bool = False
) -> list[tuple[np.ndarray | None, np.ndarray]]:
    """Logits along given outputs int32 [T], teacher-forced: see ``scored``."""
    state = Scoring()
    while state.layer < model.config.num_hidden_layers:
        advance_scoring(model, prompts, outputs, state)
    return scored(model, prompts, outputs, state, keep_prompt_logits)


def _fed(prompt: Prompt, tokens: np.ndarray) -> np.ndarray:
    """The ids that are fed to predict every token: the last one is not."""
    return np.concatenate([prompt.ids, tokens[:-1]]).astype(np.int32)


def _by_sequence(parts: Parts, lengths: list[int]) -> Parts:
    """Parts of whole sequences (``sequence_parts``) cut into one array a sequence."""
    return np.split(np.concatenate(parts), np.cumsum(lengths)[:-1])

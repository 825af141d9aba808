"""One group of a golden's sequences: decoded, drafted, scored in float64, and made into the arrays of a bundle."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kdtr_cli.ddtree.rounds import Round
from kdtr_cli.model.prompts import Decoding, Generated, Prompt
from kdtr_cli.model.traces import Trace
from kdtr_cli.reference.generate import Scoring, advance, advance_scoring, begin, scored
from kdtr_cli.reference.sampling import choose
from kdtr_cli.reference.transformer import Model
from kdtr_cli.workflows.golden_plan import Costs
from kdtr_cli.workflows.golden_rounds import Drafting, draft_group
from kdtr_cli.workflows.golden_state import SavedWork, pack_state, unpack_state
from kdtr_cli.workflows.manifest import logits_arrays

__all__ = ["GroupOptions", "MadeSequence", "Tick", "make_group", "pack_group", "unpack_group"]

Tick = Callable[[str, float], None]  #: called with what was done and the seconds that it was expected to take


@dataclass(frozen=True)
class GroupOptions:
    """What all groups of a golden share. ``single``: the arithmetic where it isn't exact with float64;
    ``form``: what is kept of a row of logits; ``score``: of prompts too; ``trace``: the level of the trace, of what
    decodes."""

    truth: Model
    reference: Model
    decoding: Decoding
    form: str
    exact: bool
    single: str
    score: bool
    drafting: Drafting | None
    trace: str | None = None


@dataclass(frozen=True)
class MadeSequence:
    """One sequence of a finished group; ``result`` without its logits, which are in ``arrays``."""

    result: Generated
    arrays: dict[str, np.ndarray]
    difference: float
    ties: int
    rounds: list[Round]


def make_group(
    options: GroupOptions,
    group: list[Prompt],
    number: int,
    costs: Costs,
    tick: Tick,
    work: SavedWork | None,
) -> list[MadeSequence]:
    """Decode and score one group, layer by layer; saved work goes on from where it stopped."""
    decoding, reference, drafting = options.decoding, options.reference, options.drafting
    label = "exact" if options.exact else options.single
    layers = reference.config.num_hidden_layers
    lengths = [len(prompt.ids) for prompt in group]
    decode = begin(reference, group, decoding)
    if options.trace is not None:
        dtype = reference.ops.cast(0).dtype
        rows = [length + decoding.steps - 1 for length in lengths]
        decode.traces = [Trace(reference.config, options.trace, n, dtype) for n in rows]
    saved = work.state(number) if work else None
    scoring = unpack_state(saved, decode) if saved is not None else None
    while scoring is None and not decode.done():
        step, layer = decode.step, decode.layer
        rows = len(decode.active()) if step else sum(lengths)
        advance(reference, group, decoding, decode, options.score)
        context = max(lengths) / 2 if not step else max(lengths) + step
        first = number == 0 and step == 0
        seconds = costs.layer(label, layer, rows, context, first)
        seconds += costs.logits(label, len(group), first) if decode.step > step else 0
        tick("prompts" if not step else f"step {step} of {decoding.steps}", seconds)
        if work is not None:
            work.save_state(number, lambda: pack_state(decode, None))
    results = decode.results()
    drafted = draft_group(drafting, reference, group, decoding, results, decode.cache) if drafting else None
    decode.cache.rows.clear()  # of no use any more
    outputs = [result.tokens for result in results]
    real: list[tuple[np.ndarray | None, np.ndarray]] | list[None] = [None] * len(group)
    if options.exact:
        scoring = scoring or Scoring()
        rows = sum(lengths) + sum(len(tokens) - 1 for tokens in outputs)
        while scoring.layer < layers:
            advance_scoring(options.truth, group, outputs, scoring)
            tick("float64", costs.layer("float64", scoring.layer - 1, rows, max(lengths), True))
            if work is not None:
                work.save_state(number, lambda: pack_state(decode, scoring))
        real = scored(options.truth, group, outputs, scoring, options.score)
        tick("float64", costs.logits("float64", sum(len(tokens) for tokens in outputs), True))
    made = []
    for index, (prompt, result) in enumerate(zip(group, results, strict=True)):
        arrays, apart, parted = _arrays(options, prompt, result, real[index])
        if options.trace is not None:
            arrays |= decode.traces[index].finished(lengths[index] + len(result.tokens) - 1)
        rounds: list[Round] = []
        if drafted is not None:
            arrays |= drafted[index].arrays
            rounds = drafted[index].rounds
        # without its logits: they are in the arrays, and of many sequences they fill the memory
        bare = Generated(result.tokens, result.logits[:0].copy(), None, result.finish_reason)
        made.append(MadeSequence(bare, arrays, apart, parted, rounds))
    return made


def pack_group(made: list[MadeSequence]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {"count": np.array(len(made))}
    for i, one in enumerate(made):
        arrays[f"{i}/tokens"] = one.result.tokens
        arrays[f"{i}/stopped"] = np.array(one.result.finish_reason == "stop")
        arrays[f"{i}/difference"], arrays[f"{i}/ties"] = np.array(one.difference), np.array(one.ties)
        arrays |= {f"{i}/arrays/{name}": array for name, array in one.arrays.items()}
    return arrays


def unpack_group(arrays: Mapping[str, np.ndarray]) -> list[MadeSequence]:
    made = []
    for i in range(int(arrays["count"])):
        inside = f"{i}/arrays/"
        own = {name.removeprefix(inside): array for name, array in arrays.items() if name.startswith(inside)}
        reason = "stop" if arrays[f"{i}/stopped"] else "length"
        result = Generated(arrays[f"{i}/tokens"], np.empty((0, 0), np.float32), None, reason)
        made.append(MadeSequence(result, own, float(arrays[f"{i}/difference"]), int(arrays[f"{i}/ties"]), []))
    return made


def _arrays(
    options: GroupOptions,
    prompt: Prompt,
    result: Generated,
    real: tuple[np.ndarray | None, np.ndarray] | None,
) -> tuple[dict[str, np.ndarray], float, int]:
    """A sequence's arrays, the largest difference of exact from float64, and the number of steps that would part.

    real: the prompt's logits, if they are kept, and the outputs' in float64.
    """
    decoding, form = options.decoding, options.form
    if not options.exact:
        arrays = logits_arrays("logits", options.single, result.logits, form)
        if options.score:
            arrays |= logits_arrays("prompt_logits", options.single, result.prompt_logits, form)
        return arrays, 0.0, 0
    of_prompt, logits = real
    arrays = logits_arrays("logits", "exact", result.logits, form) | logits_arrays("logits", "float64", logits, form)
    if options.score:
        arrays |= logits_arrays("prompt_logits", "exact", result.prompt_logits, form)
        arrays |= logits_arrays("prompt_logits", "float64", of_prompt, form)
    drawn = len(prompt.ids) + np.arange(len(result.tokens))
    streams = np.full(len(drawn), prompt.stream)
    chosen = choose(logits, drawn, streams, temperature=decoding.temperature, seed=decoding.seed)
    ties = np.flatnonzero(chosen != result.tokens).astype(np.int32)
    if len(ties):
        arrays["ties"] = ties
    return arrays, float(np.abs(result.logits - logits).max()), len(ties)

"""One group of a golden's sequences: decoded, drafted, scored in float64, and made into the arrays of a bundle."""

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass

import numpy as np

from kdtr_cli.ddtree.rounds import Round
from kdtr_cli.model.prompts import Decoding, Generated, Prompt
from kdtr_cli.model.traces import Trace
from kdtr_cli.parity.floor import NoiseFloor, add_floors, measure_floor
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
    decodes; ``emulated``: the model in bf16."""

    truth: Model
    reference: Model
    decoding: Decoding
    form: str
    exact: bool
    single: str
    score: bool
    drafting: Drafting | None
    trace: str | None = None
    emulated: Model | None = None

    def scoring(self) -> list[tuple[str, Model]]:
        """The arithmetics that score the tokens once they are chosen, in this order."""
        models = [("float64", self.truth)] if self.exact else []
        return models if self.emulated is None else [*models, ("bf16", self.emulated)]


@dataclass(frozen=True)
class MadeSequence:
    """One sequence of a finished group; ``result`` without its logits, which are in ``arrays``."""

    result: Generated
    arrays: dict[str, np.ndarray]
    floors: dict[str, NoiseFloor]
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
    scoring, done = unpack_state(saved, decode) if saved is not None else (None, {})
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
            work.save_state(number, lambda: pack_state(decode, None, done))
    results = decode.results()
    drafted = draft_group(drafting, reference, group, decoding, results, decode.cache) if drafting else None
    decode.cache.rows.clear()  # of no use any more
    outputs = [result.tokens for result in results]
    rows = sum(lengths) + sum(len(tokens) - 1 for tokens in outputs)
    for name, model in options.scoring():
        if name in done:
            continue
        under_way, scoring = scoring or Scoring(), None
        while under_way.layer < layers:
            advance_scoring(model, group, outputs, under_way)
            tick(name, costs.layer(name, under_way.layer - 1, rows, max(lengths), True))
            if work is not None:
                work.save_state(number, lambda state=under_way: pack_state(decode, state, done))
        done[name] = scored(model, group, outputs, under_way, options.score)
        tick(name, costs.logits(name, sum(len(tokens) for tokens in outputs), True))
        if work is not None:
            work.save_state(number, lambda: pack_state(decode, Scoring(), done))
    done[label] = [(result.prompt_logits, result.logits) for result in results]
    made = []
    for index, (prompt, result) in enumerate(zip(group, results, strict=True)):
        each = {name: scored_rows[index] for name, scored_rows in done.items()}
        arrays, ties = _arrays(options, prompt, result, each)
        floors = _floors(each)
        if options.trace is not None:
            arrays |= decode.traces[index].finished(lengths[index] + len(result.tokens) - 1)
        rounds: list[Round] = []
        if drafted is not None:
            arrays |= drafted[index].arrays
            rounds = drafted[index].rounds
        # without its logits: they are in the arrays, and of many sequences they fill the memory
        bare = Generated(result.tokens, result.logits[:0].copy(), None, result.finish_reason)
        made.append(MadeSequence(bare, arrays, floors, ties, rounds))
    return made


def pack_group(made: list[MadeSequence]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {"count": np.array(len(made))}
    for i, one in enumerate(made):
        arrays[f"{i}/tokens"] = one.result.tokens
        arrays[f"{i}/stopped"] = np.array(one.result.finish_reason == "stop")
        arrays[f"{i}/ties"] = np.array(one.ties)
        arrays |= {f"{i}/floor/{name}": np.array(astuple(floor), np.float64) for name, floor in one.floors.items()}
        arrays |= {f"{i}/arrays/{name}": array for name, array in one.arrays.items()}
    return arrays


def unpack_group(arrays: Mapping[str, np.ndarray]) -> list[MadeSequence]:
    made = []
    for i in range(int(arrays["count"])):
        own = _below(arrays, f"{i}/arrays/")
        floors = {
            name: NoiseFloor(int(v[0]), int(v[1]), float(v[2]), int(v[3]), float(v[4]))
            for name, v in _below(arrays, f"{i}/floor/").items()
        }
        reason = "stop" if arrays[f"{i}/stopped"] else "length"
        result = Generated(arrays[f"{i}/tokens"], np.empty((0, 0), np.float32), None, reason)
        made.append(MadeSequence(result, own, floors, int(arrays[f"{i}/ties"]), []))
    return made


def _below(arrays: Mapping[str, np.ndarray], path: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(path): array for name, array in arrays.items() if name.startswith(path)}


def _arrays(
    options: GroupOptions, prompt: Prompt, result: Generated, each: Mapping[str, tuple[np.ndarray | None, np.ndarray]]
) -> tuple[dict[str, np.ndarray], int]:
    """A sequence's arrays, and the number of steps where float64 would choose another token.

    each: by arithmetic the prompt's logits, if they are kept, and the outputs'.
    """
    decoding, arrays = options.decoding, {}
    for name, (of_prompt, logits) in each.items():
        arrays |= logits_arrays("logits", name, logits, options.form)
        if of_prompt is not None:
            arrays |= logits_arrays("prompt_logits", name, of_prompt, options.form)
    if not options.exact:
        return arrays, 0
    drawn = len(prompt.ids) + np.arange(len(result.tokens))
    streams = np.full(len(drawn), prompt.stream)
    truth = each["float64"][1]
    chosen = choose(truth, drawn, streams, temperature=decoding.temperature, seed=decoding.seed)
    ties = np.flatnonzero(chosen != result.tokens).astype(np.int32)
    if len(ties):
        arrays["ties"] = ties
    return arrays, len(ties)


def _floors(each: Mapping[str, tuple[np.ndarray | None, np.ndarray]]) -> dict[str, NoiseFloor]:
    """How far each arithmetic is from float64, over the rows of the outputs, and of the prompt if they are kept."""
    floors: dict[str, NoiseFloor] = {}
    for name in each.keys() & {"exact", "bf16"}:
        for logits, truth in zip(each[name], each["float64"], strict=True):
            if logits is not None:
                floors[name] = add_floors(floors.get(name), measure_floor(logits, truth))
    return floors

"""`kdtr golden`: reference tokens and logits from the NumPy model, as a bundle."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.writer import BundleWriter, check_target
from kdtr_cli.ddtree.rounds import DraftSettings, Round
from kdtr_cli.errors import InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Decoding, Generated, Prompt, check_prompts
from kdtr_cli.model.source import Model, open_model
from kdtr_cli.reference import exact, float32, float64
from kdtr_cli.reference.generate import generate, score
from kdtr_cli.reference.sampling import choose
from kdtr_cli.reference.transformer import Model as NumpyModel
from kdtr_cli.workflows.drafting import drafting_manifest
from kdtr_cli.workflows.golden_rounds import DraftOptions, draft_group, open_drafting
from kdtr_cli.workflows.manifest import check_weights, common_manifest, logits_arrays, parse_logits
from kdtr_cli.workflows.prompts import PromptOptions, collect_prompts

__all__ = ["EMBED_LIMIT", "GoldenOptions", "GoldenSummary", "make_golden"]

EMBED_LIMIT = 64 * 10**6  #: stored bytes below which the weights are embedded unless told otherwise
_SINGLE = {"float64": float64, "float32": float32}
_BATCH = 32  # sequences decoded together: bounds memory, changes no bit

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class GoldenOptions:
    """The options of ``kdtr golden``. Without ``exact`` there is one arithmetic, ``single``: float64 or float32."""

    model: str
    output: Path
    prompts: PromptOptions = field(default_factory=PromptOptions)
    steps: int = 24
    ignore_eos: bool = False
    temperature: float = 0.0
    exact: bool = True
    single: str = "float64"
    logits: str = "full"
    score: bool = False
    choices: Choices = field(default_factory=Choices)
    embed_weights: bool | None = None
    force: bool = False
    drafting: DraftOptions | None = None


@dataclass(frozen=True)
class GoldenSummary:
    """What was made: the sequences as stored, the largest |exact - float64| of a logit, and the places of ties.

    rounds: those of all sequences, and settings how they were drafted; None in plain decoding.
    """

    path: Path
    model: Model
    sequences: list[tuple[Prompt, Generated]]
    max_difference: float | None
    ties: int
    embedded: bool
    settings: DraftSettings | None = None
    rounds: list[Round] | None = None


def make_golden(options: GoldenOptions, progress: Progress = lambda what, done, total: None) -> GoldenSummary:
    """Make a golden bundle. InputError for anything wrong with the input, before the output is touched.

    DeviceError when the rounds of a drafted golden break an invariant, 'output = AR output' among them.
    """
    check_target(options.output, options.force)
    if options.drafting is not None and not options.exact:
        what = "--no-exact" if options.single == "float64" else f"--arith {options.single}"
        raise InputError(f"{what}: rounds are made in the exact arithmetic alone; leave one of the two out")
    model = open_model(options.model)
    config = model.config
    drafting = open_drafting(options.drafting, config) if options.drafting is not None else None
    prompts = collect_prompts(options.prompts, config, model.folder)
    decoding = Decoding(
        options.steps, config.eos_token_ids, options.ignore_eos, options.temperature, options.prompts.seed
    )
    form = parse_logits(options.logits, config.vocab_size)
    positions = check_prompts(prompts, config, options.steps)
    check_weights(model.weights)
    embedded = options.embed_weights
    if embedded is None:
        embedded = sum(model.weights.stored_nbytes(name) for name in model.weights.stored_names) < EMBED_LIMIT
    ops = float64 if options.exact else _SINGLE[options.single]
    truth = NumpyModel(config, model.weights, options.choices, positions, ops)
    reference = truth
    if options.exact:
        reach = min(positions + drafting.settings.horizon, config.max_position_embeddings) if drafting else positions
        reference = NumpyModel(config, model.weights, options.choices, reach, exact)
    manifest = common_manifest(
        model,
        options.choices,
        decoding,
        positions=positions,
        teacher_forced=False,
        arithmetic=["exact", "float64"] if options.exact else [options.single],
        logits=form,
        score=options.score,
        embedded=embedded,
    )
    if drafting is not None:
        manifest["decoding"]["mode"] = drafting.settings.mode
        manifest["drafting"] = drafting_manifest(drafting.spec, drafting.settings)
    made: list[tuple[Prompt, Generated]] = []
    rounds: list[Round] = []
    difference, ties = 0.0, 0
    with BundleWriter(options.output, "golden", options.force) as bundle:
        bundle.add_config(model.config_text)
        if embedded:
            for name in model.weights.stored_names:
                bundle.add_weight(name, model.weights.stored(name))
        for first in range(0, len(prompts), _BATCH):
            group = prompts[first : first + _BATCH]
            cache = reference.cache([len(prompt.ids) + decoding.steps - 1 for prompt in group])
            results = generate(reference, group, decoding, options.score, cache)
            drafted = draft_group(drafting, reference, group, decoding, results, cache) if drafting else None
            for index, (prompt, result) in enumerate(zip(group, results, strict=True)):
                arrays, apart, parted = _arrays(truth, options, decoding, form, prompt, result)
                difference, ties = max(difference, apart), ties + parted
                if drafted is not None:
                    arrays |= drafted[index].arrays
                    rounds += drafted[index].rounds
                bundle.add_sequence(
                    SequenceData(prompt.id, prompt.stream, prompt.ids, result.tokens, result.finish_reason, arrays)
                )
                made.append((prompt, result))
                progress("golden", len(made), len(prompts))
        bundle.finish(manifest)
    return GoldenSummary(
        options.output,
        model,
        made,
        difference if options.exact else None,
        ties,
        embedded,
        drafting.settings if drafting else None,
        rounds if drafting else None,
    )


def _arrays(
    truth: NumpyModel, options: GoldenOptions, decoding: Decoding, form: str, prompt: Prompt, result: Generated
) -> tuple[dict[str, np.ndarray], float, int]:
    """A sequence's arrays, the largest difference of exact from float64, and the number of steps that would part."""
    if not options.exact:
        arrays = logits_arrays("logits", options.single, result.logits, form)
        if options.score:
            arrays |= logits_arrays("prompt_logits", options.single, result.prompt_logits, form)
        return arrays, 0.0, 0
    count = len(prompt.ids)
    along = score(truth, prompt, result.tokens)
    real = along[count - 1 :]
    arrays = logits_arrays("logits", "exact", result.logits, form) | logits_arrays("logits", "float64", real, form)
    if options.score:
        arrays |= logits_arrays("prompt_logits", "exact", result.prompt_logits, form)
        arrays |= logits_arrays("prompt_logits", "float64", along[:count], form)
    drawn = np.arange(count, count + len(result.tokens))
    streams = np.full(len(drawn), prompt.stream)
    chosen = choose(real, drawn, streams, temperature=decoding.temperature, seed=decoding.seed)
    ties = np.flatnonzero(chosen != result.tokens).astype(np.int32)
    if len(ties):
        arrays["ties"] = ties
    return arrays, float(np.abs(result.logits - real).max()), len(ties)

"""`kdtr golden`: reference tokens and logits from the NumPy model, as a bundle."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.writer import BundleWriter, check_target
from kdtr_cli.ddtree.rounds import DraftSettings, Round
from kdtr_cli.errors import InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Decoding, Generated, Prompt, check_prompts
from kdtr_cli.model.source import Model, open_model
from kdtr_cli.reference import exact, float64
from kdtr_cli.reference.generate import generate, score_group
from kdtr_cli.reference.sampling import choose
from kdtr_cli.reference.transformer import Model as NumpyModel
from kdtr_cli.workflows.drafting import drafting_manifest
from kdtr_cli.workflows.golden_rounds import Drafting, DraftOptions, draft_group, open_drafting
from kdtr_cli.workflows.manifest import check_weights, common_manifest, logits_arrays, parse_logits
from kdtr_cli.workflows.prompts import PromptOptions, collect_prompts

__all__ = ["EMBED_LIMIT", "GoldenOptions", "GoldenSummary", "PreparedGolden", "Progress", "make_golden"]
__all__ += ["open_prompts", "prepare_golden", "write_golden"]

EMBED_LIMIT = 64 * 10**6  #: stored bytes below which the weights are embedded unless told otherwise
_BATCH = 32  # sequences decoded together: bounds memory, changes no bit of the exact arithmetic

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class GoldenOptions:
    """The options of ``kdtr golden``."""

    model: str
    output: Path
    prompts: PromptOptions = field(default_factory=PromptOptions)
    steps: int = 24
    ignore_eos: bool = False
    temperature: float = 0.0
    exact: bool = True
    logits: str = "full"
    score: bool = False
    choices: Choices = field(default_factory=Choices)
    embed_weights: bool | None = None
    force: bool = False
    drafting: DraftOptions | None = None


@dataclass(frozen=True)
class GoldenSummary:
    """What was made: the sequences (their logits are in the bundle only), the largest |exact - float64| of a logit, and
    the number of ties.

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


@dataclass(frozen=True)
class PreparedGolden:
    """All that a golden needs but its prompts: models ready to run, and the manifest that says what they are."""

    options: GoldenOptions
    model: Model
    decoding: Decoding
    form: str
    truth: NumpyModel
    reference: NumpyModel
    drafting: Drafting | None
    manifest: dict[str, Any]


def make_golden(options: GoldenOptions, progress: Progress = lambda what, done, total: None) -> GoldenSummary:
    """Make a golden bundle. InputError for anything wrong with the input, before the output is touched.

    DeviceError when the rounds of a drafted golden break an invariant, 'output = AR output' among them.
    """
    check_target(options.output, options.force)
    model, prompts, positions = open_prompts(options)
    return write_golden(prepare_golden(options, model, positions), prompts, options.output, options.force, progress)


def open_prompts(options: GoldenOptions) -> tuple[Model, list[Prompt], int]:
    """The model, its checked prompts, and how many positions the longest of them feeds."""
    if options.drafting is not None and not options.exact:
        raise InputError("--no-exact: rounds are made in the exact arithmetic alone; leave one of the two out")
    model = open_model(options.model)
    prompts = collect_prompts(options.prompts, model.config, model.folder)
    return model, prompts, check_prompts(prompts, model.config, options.steps)


def prepare_golden(options: GoldenOptions, model: Model, positions: int) -> PreparedGolden:
    """Check every weight and make the models ready for sequences that feed up to ``positions`` positions."""
    config = model.config
    drafting = open_drafting(options.drafting, config) if options.drafting is not None else None
    decoding = Decoding(
        options.steps, config.eos_token_ids, options.ignore_eos, options.temperature, options.prompts.seed
    )
    form = parse_logits(options.logits, config.vocab_size)
    check_weights(model.weights)
    embedded = options.embed_weights
    if embedded is None:
        embedded = sum(model.weights.stored_nbytes(name) for name in model.weights.stored_names) < EMBED_LIMIT
    truth = NumpyModel(config, model.weights, options.choices, positions, float64)
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
        arithmetic=["exact", "float64"] if options.exact else ["float64"],
        logits=form,
        score=options.score,
        embedded=embedded,
    )
    if drafting is not None:
        manifest["decoding"]["mode"] = drafting.settings.mode
        manifest["drafting"] = drafting_manifest(drafting.spec, drafting.settings)
    return PreparedGolden(options, model, decoding, form, truth, reference, drafting, manifest)


def write_golden(
    prepared: PreparedGolden,
    prompts: list[Prompt],
    output: Path,
    force: bool,
    progress: Progress = lambda what, done, total: None,
) -> GoldenSummary:
    """Decode the prompts and write the bundle; the weights go into it where the prepared manifest says so."""
    options, model, decoding, drafting = prepared.options, prepared.model, prepared.decoding, prepared.drafting
    reference, form, embedded = prepared.reference, prepared.form, prepared.manifest["model"]["embedded"]
    made: list[tuple[Prompt, Generated]] = []
    rounds: list[Round] = []
    difference, ties = 0.0, 0
    with BundleWriter(output, "golden", force) as bundle:
        bundle.add_config(model.config_text)
        if embedded:
            for name in model.weights.stored_names:
                bundle.add_weight(name, model.weights.stored(name))
        for first in range(0, len(prompts), _BATCH):
            group = prompts[first : first + _BATCH]
            cache = reference.cache([len(prompt.ids) + decoding.steps - 1 for prompt in group])
            results = generate(reference, group, decoding, options.score, cache)
            drafted = draft_group(drafting, reference, group, decoding, results, cache) if drafting else None
            real = (
                score_group(prepared.truth, group, [r.tokens for r in results], options.score)
                if options.exact
                else results
            )
            for index, (prompt, result) in enumerate(zip(group, results, strict=True)):
                arrays, apart, parted = _arrays(options, decoding, form, prompt, result, real[index])
                difference, ties = max(difference, apart), ties + parted
                if drafted is not None:
                    arrays |= drafted[index].arrays
                    rounds += drafted[index].rounds
                bundle.add_sequence(
                    SequenceData(prompt.id, prompt.stream, prompt.ids, result.tokens, result.finish_reason, arrays)
                )
                # without its logits: they are in the bundle, and of many sequences they fill the memory
                made.append((prompt, Generated(result.tokens, result.logits[:0].copy(), None, result.finish_reason)))
                progress("golden", len(made), len(prompts))
        bundle.finish(prepared.manifest)
    return GoldenSummary(
        output,
        model,
        made,
        difference if options.exact else None,
        ties,
        embedded,
        drafting.settings if drafting else None,
        rounds if drafting else None,
    )


def _arrays(
    options: GoldenOptions,
    decoding: Decoding,
    form: str,
    prompt: Prompt,
    result: Generated,
    real: tuple[np.ndarray | None, np.ndarray],
) -> tuple[dict[str, np.ndarray], float, int]:
    """A sequence's arrays, the largest difference of exact from float64, and the number of steps that would part.

    real: the prompt's logits, if they are kept, and the outputs' in float64.
    """
    if not options.exact:
        arrays = logits_arrays("logits", "float64", result.logits, form)
        if options.score:
            arrays |= logits_arrays("prompt_logits", "float64", result.prompt_logits, form)
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

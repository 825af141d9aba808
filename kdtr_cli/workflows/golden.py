"""`kdtr golden`: reference tokens and logits from the NumPy model, as a bundle."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kdtr_cli import __version__
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.writer import BundleWriter, check_target
from kdtr_cli.ddtree.rounds import DraftSettings, Round
from kdtr_cli.errors import InputError
from kdtr_cli.model.chat import load_chat_template
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Decoding, Generated, Prompt, check_prompts
from kdtr_cli.model.source import Model, open_model
from kdtr_cli.parity.floor import FLOOR_KEY, NoiseFloor, add_floors, floor_entries
from kdtr_cli.reference import bf16, exact, float32, float64
from kdtr_cli.reference.arith import CONTRACT_VERSION
from kdtr_cli.reference.transformer import Model as NumpyModel
from kdtr_cli.workflows.drafting import drafting_manifest
from kdtr_cli.workflows.golden_groups import GroupOptions, MadeSequence, Tick, make_group, pack_group, unpack_group
from kdtr_cli.workflows.golden_memory import Budget, check_trace, make_budget
from kdtr_cli.workflows.golden_plan import NOMINAL, Costs, PlanLine, Rates, calibrate, plan_lines
from kdtr_cli.workflows.golden_rounds import Drafting, DraftOptions, open_drafting
from kdtr_cli.workflows.golden_state import SavedWork
from kdtr_cli.workflows.manifest import common_manifest, parse_logits
from kdtr_cli.workflows.prompts import PromptOptions, collect_prompts

__all__ = ["EMBED_LIMIT", "GoldenOptions", "GoldenPlan", "GoldenSummary", "PreparedGolden", "Progress", "make_golden"]
__all__ += ["golden_budget", "open_prompts", "plan_golden", "prepare_golden", "write_golden"]

EMBED_LIMIT = 64 * 10**6  #: stored bytes below which the weights are embedded unless told otherwise
_SINGLE = {"float64": float64, "float32": float32}

#: Called with what is being done, how much of all work is done, and how much there is.
Progress = Callable[[str, float, float], None]


@dataclass(frozen=True)
class GoldenOptions:
    """The options of ``kdtr golden``. Without ``exact`` the tokens come of one arithmetic, ``single``: float64 or
    float32. ``bf16``: an emulated bf16 engine scores them too."""

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
    memory_limit: int | None = None
    chat: bool = False
    trace: str | None = None
    bf16: bool = False


@dataclass(frozen=True)
class GoldenSummary:
    """What was made: the sequences (their logits are in the bundle only), and the number of ties.

    rounds: those of all sequences, and settings how they were drafted; None in plain decoding. resumed: it went on
    from saved work. floors: how far exact and bf16 are from float64, where they were made.
    """

    path: Path
    model: Model
    sequences: list[tuple[Prompt, Generated]]
    ties: int
    embedded: bool
    settings: DraftSettings | None = None
    rounds: list[Round] | None = None
    resumed: bool = False
    floors: dict[str, NoiseFloor] = field(default_factory=dict)


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
    emulated: NumpyModel | None = None


def make_golden(options: GoldenOptions, progress: Progress = lambda what, done, total: None) -> GoldenSummary:
    """Make a golden bundle. InputError for anything wrong with the input, before the output is touched.

    With a memory limit the work is saved beside the output as it goes, and a golden that was stopped goes on from
    there (kdtr_cli.workflows.golden_state). Rounds are made from a finished group, and are not saved.

    DeviceError when the rounds of a drafted golden break an invariant, 'output = AR output' among them.
    """
    check_target(options.output, options.force)
    model, prompts, positions = open_prompts(options)
    budget = golden_budget(options, model, prompts)
    costs = _costs(options, model, NOMINAL, budget)
    meter = _Meter(progress, sum(line.seconds for line in plan_lines(costs, budget, options.steps, options.bf16)))
    if options.memory_limit is None or options.drafting is not None:
        return _make(options, model, prompts, positions, budget, meter, None)
    sizes = [len(group) for group in budget.groups]
    work = SavedWork(options.output, _job(options, model, prompts), sizes, options.force)
    try:
        budget = budget.regrouped(work.groups)
        resumed = work.resumed
        if resumed:
            progress(f"going on from {work.folder}", 0, 1)
        model.weights.known_digests = work.digests()
        summary = _make(options, model, prompts, positions, budget, meter, work)
    except KeyboardInterrupt as stop:
        work.close()
        stop.add_note("the same command goes on where this one stopped")
        raise
    except BaseException:
        work.close()
        raise
    work.remove()
    return replace(summary, resumed=resumed)


def golden_budget(options: GoldenOptions, model: Model, prompts: list[Prompt]) -> Budget:
    """How the prompts are grouped and how much of the weights is kept. InputError where a trace doesn't fit."""
    budget = make_budget(
        options.memory_limit,
        model.config,
        prompts,
        options.steps,
        score=options.score,
        exact=options.exact,
        trace=options.trace,
        bf16=options.bf16,
    )
    for group in budget.groups:
        check_trace(model.config, options.trace, *_trace_size(options, group))
    return budget


def _trace_size(options: GoldenOptions, prompts: list[Prompt]) -> tuple[int, int]:
    """Positions of a trace of these prompts, and the bytes of a value."""
    rows = sum(len(prompt.ids) + options.steps - 1 for prompt in prompts)
    return rows, 4 if options.exact or options.single == "float32" else 8


def _costs(options: GoldenOptions, model: Model, rates: Rates, budget: Budget) -> Costs:
    return Costs(model.config, rates, budget.weights_limit, "exact" if options.exact else options.single)


@dataclass(frozen=True)
class GoldenPlan:
    """What a golden would take. Bytes: as stored, packed in all arithmetics, in memory at most, and of its trace."""

    lines: list[PlanLine]
    budget: Budget
    stored_bytes: int
    packed_bytes: int
    memory: int
    trace: int = 0


def plan_golden(options: GoldenOptions) -> GoldenPlan:
    """Look at the model, the prompts and this machine, and say what the golden would take; nothing is written."""
    model, prompts, _ = open_prompts(options)
    parse_logits(options.logits, model.config.vocab_size)
    if options.drafting is not None:
        open_drafting(options.drafting, model.config)
    budget = golden_budget(options, model, prompts)
    costs = _costs(options, model, calibrate(model.config, model.weights), budget)
    packed = costs.total * ((4 + 8 if options.exact else 8) + (4 if options.bf16 else 0))
    return GoldenPlan(
        list(plan_lines(costs, budget, options.steps, options.bf16)),
        budget,
        sum(model.weights.stored_nbytes(name) for name in model.weights.stored_names),
        packed,
        budget.working + (packed if budget.weights_limit is None else min(packed, budget.weights_limit)),
        sum(check_trace(model.config, options.trace, *_trace_size(options, group)) for group in budget.groups),
    )


class _Meter:
    """Counts expected seconds (kdtr_cli.workflows.golden_plan) and tells the progress."""

    def __init__(self, progress: Progress, total: float) -> None:
        self.progress, self.total, self.done = progress, total, 0.0

    def add(self, what: str, seconds: float) -> None:
        self.done = min(self.done + seconds, self.total)
        self.progress(what, self.done, self.total)

    def reach(self, what: str, seconds: float) -> None:
        self.done = max(self.done, min(seconds, self.total))
        self.progress(what, self.done, self.total)


def _job(options: GoldenOptions, model: Model, prompts: list[Prompt]) -> dict[str, Any]:
    """Everything that decides a golden's bytes, for who wants to go on with it later."""
    files = sorted(model.folder.glob("*.safetensors")) if model.folder else []
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.id}\n{prompt.stream}\n{len(prompt.ids)}\n".encode() + prompt.ids.tobytes())
    return {
        "kdtr": f"{__version__}, contract {CONTRACT_VERSION}",
        "model": [model.name, hashlib.sha256(model.config_text.encode()).hexdigest()],
        "weight files": [[file.name, *_identity(file)] for file in files],
        "prompts": digest.hexdigest(),
        "steps": [options.steps, options.ignore_eos],
        "stop ids": list(model.config.eos_token_ids),
        "temperature": [options.temperature, options.prompts.seed],
        "arithmetic": ["exact" if options.exact else options.single, options.bf16],
        "logits": [options.logits, options.score],
        "choices": [options.choices.latent_norm_eps, options.choices.rope_angles],
        "trace": options.trace,
        "memory limit": options.memory_limit,
    }


def _identity(file: Path) -> list[int]:
    """What changes when somebody writes to a file, even if the time of the last change is put back."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _make(
    options: GoldenOptions,
    model: Model,
    prompts: list[Prompt],
    positions: int,
    budget: Budget,
    meter: _Meter,
    work: SavedWork | None,
) -> GoldenSummary:
    costs = _costs(options, model, NOMINAL, budget)
    stored = sum(model.weights.stored_nbytes(name) for name in model.weights.stored_names)
    digests = model.weights.digests(lambda size: meter.add("digests", costs.digests() * size / max(1, stored)))
    if work is not None:
        work.save_digests(digests)
    meter.reach("digests", costs.digests())
    return write_golden(
        prepare_golden(options, model, positions), prompts, options.output, options.force, meter.add, budget, work
    )


def open_prompts(options: GoldenOptions) -> tuple[Model, list[Prompt], int]:
    """The model, its checked prompts, and how many positions the longest of them feeds."""
    if options.drafting is not None and not options.exact:
        what = "--no-exact" if options.single == "float64" else f"--arith {options.single}"
        raise InputError(f"{what}: rounds are made in the exact arithmetic alone; leave one of the two out")
    if options.bf16 and not options.exact and options.single != "float64":
        raise InputError(
            f"--bf16 is measured against float64, which --arith {options.single} leaves out; leave one of the two out"
        )
    model = open_model(options.model, cache=False)  # what is used is kept packed
    template = load_chat_template(model.folder) if options.chat else None
    prompts = collect_prompts(options.prompts, model.config, model.folder, template)
    return model, prompts, check_prompts(prompts, model.config, options.steps)


def prepare_golden(options: GoldenOptions, model: Model, positions: int) -> PreparedGolden:
    """Check every weight and make the models ready for sequences that feed up to ``positions`` positions."""
    config = model.config
    drafting = open_drafting(options.drafting, config) if options.drafting is not None else None
    decoding = Decoding(
        options.steps, config.eos_token_ids, options.ignore_eos, options.temperature, options.prompts.seed
    )
    form = parse_logits(options.logits, config.vocab_size)
    model.weights.digests()  # every weight is read once, and must be finite
    embedded = options.embed_weights
    if embedded is None:
        embedded = sum(model.weights.stored_nbytes(name) for name in model.weights.stored_names) < EMBED_LIMIT
    ops = float64 if options.exact else _SINGLE[options.single]
    truth = NumpyModel(config, model.weights, options.choices, positions, ops)
    reference = truth
    if options.exact:
        reach = min(positions + drafting.settings.horizon, config.max_position_embeddings) if drafting else positions
        reference = NumpyModel(config, model.weights, options.choices, reach, exact)
    emulated = NumpyModel(config, model.weights, options.choices, positions, bf16) if options.bf16 else None
    manifest = common_manifest(
        model,
        options.choices,
        decoding,
        positions=positions,
        teacher_forced=False,
        arithmetic=(["exact", "float64"] if options.exact else [options.single]) + ["bf16"] * options.bf16,
        logits=form,
        score=options.score,
        embedded=embedded,
    )
    if options.chat:
        manifest["prompts"] = {"chat_template_sha256": load_chat_template(model.folder).sha256}
    if options.trace is not None:
        manifest["trace"] = options.trace
    if drafting is not None:
        manifest["decoding"]["mode"] = drafting.settings.mode
        manifest["drafting"] = drafting_manifest(drafting.spec, drafting.settings)
    return PreparedGolden(options, model, decoding, form, truth, reference, drafting, manifest, emulated)


def write_golden(
    prepared: PreparedGolden,
    prompts: list[Prompt],
    output: Path,
    force: bool,
    tick: Tick = lambda what, seconds: None,
    budget: Budget | None = None,
    work: SavedWork | None = None,
) -> GoldenSummary:
    """Decode the prompts and write the bundle; the weights go into it where the prepared manifest says so.

    Without saved work every group is on disk, in the bundle that grows, when it is finished. With it the bundle is
    written when all are, so that a kill leaves nothing but the work.
    """
    options, model, drafting = prepared.options, prepared.model, prepared.drafting
    budget = budget or golden_budget(options, model, prompts)
    prepared.reference.packed.keep_at_most(budget.weights_limit)
    if budget.weights_limit is not None:
        for scoring in (prepared.truth, prepared.emulated):
            if scoring not in (None, prepared.reference):
                scoring.packed.keep_at_most(0)  # it is used once a group
    costs = _costs(options, model, NOMINAL, budget)
    shared = GroupOptions(
        prepared.truth,
        prepared.reference,
        prepared.decoding,
        prepared.form,
        options.exact,
        options.single,
        options.score,
        drafting,
        options.trace,
        prepared.emulated,
    )

    def finished(number: int) -> list[MadeSequence]:
        saved = work.group(number) if work else None
        if saved is not None:
            return unpack_group(saved)
        made = make_group(shared, budget.groups[number], number, costs, tick, work)
        if work is not None:
            work.save_group(number, pack_group(made))
        return made

    if work is not None:
        for number in range(len(budget.groups)):
            finished(number)
    made: list[tuple[Prompt, Generated]] = []
    rounds: list[Round] = []
    floors: dict[str, NoiseFloor] = {}
    ties = 0
    embedded = prepared.manifest["model"]["embedded"]
    with BundleWriter(output, "golden", force) as bundle:
        bundle.add_config(model.config_text)
        if embedded:
            for name in model.weights.stored_names:
                bundle.add_weight(name, model.weights.stored(name))
        for number, group in enumerate(budget.groups):
            for prompt, one in zip(group, finished(number), strict=True):
                result = one.result
                floors |= {name: add_floors(floors.get(name), floor) for name, floor in one.floors.items()}
                ties += one.ties
                rounds += one.rounds
                bundle.add_sequence(
                    SequenceData(prompt.id, prompt.stream, prompt.ids, result.tokens, result.finish_reason, one.arrays)
                )
                made.append((prompt, result))
        measured = {FLOOR_KEY: floor_entries(floors)} if floors else {}
        bundle.finish({**prepared.manifest, **measured})
    return GoldenSummary(
        output,
        model,
        made,
        ties,
        embedded,
        drafting.settings if drafting else None,
        rounds if drafting else None,
        floors=floors,
    )

"""`kdtr run`: a golden's prompts through the CUDA engine, as a bundle."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.bundle.reader import Bundle, BundleSequence, open_bundle
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.writer import BundleWriter, check_target
from kdtr_cli.ddtree.rounds import Round, pack_rounds
from kdtr_cli.engine.compile import source_text
from kdtr_cli.engine.devices import Device, open_device
from kdtr_cli.engine.drafters import Sequence
from kdtr_cli.engine.generate import Request
from kdtr_cli.engine.kernels import sources
from kdtr_cli.engine.statistics import Statistics
from kdtr_cli.errors import InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import ModelConfig, parse_config
from kdtr_cli.model.prompts import Decoding, Generated, Prompt, check_prompts
from kdtr_cli.model.source import Model, open_model
from kdtr_cli.model.weights import Weights
from kdtr_cli.workflows.decode import Decoded, Draft, Job, decode
from kdtr_cli.workflows.drafting import draft_settings, drafting_manifest, parse_drafter
from kdtr_cli.workflows.golden_memory import check_trace
from kdtr_cli.workflows.manifest import common_manifest, logits_arrays

__all__ = ["RunOptions", "RunSummary", "check_golden", "embedded_config", "golden_decoding", "make_job", "make_run"]
__all__ += ["open_golden_model", "prepare_run", "run_changed", "run_on"]

_BATCH = 8

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RunOptions:
    """The options of ``kdtr run``; ``prefill`` is the most rows of a prefill pass."""

    golden: Path
    output: Path
    mode: str = "ar"
    device: str = "auto"
    tier: str = "exact"
    model: str | None = None
    batch: int | None = None
    prefill: int | None = None
    teacher_force: bool = False
    steps: int | None = None
    drafter: str | None = None
    budget: int | None = None
    block_size: int | None = None
    force: bool = False
    trace: str | None = None


@dataclass(frozen=True)
class RunSummary:
    """What was run: the device, the model, and each prompt with its result, in the golden's order."""

    path: Path
    model: Model
    device: dict[str, str]
    sequences: list[tuple[Prompt, Generated]]
    rounds: list[list[Round]]
    statistics: Statistics
    seconds: float  #: of decoding, prefill and recording included; in no bundle
    drafter: str | None  #: identity, None in plain decoding
    notes: tuple[str, ...] = ()  #: what the user should know and no verdict says


def make_run(options: RunOptions, progress: Progress = lambda what, done, total: None) -> RunSummary:
    """Run a golden's prompts and write the run bundle. The engine sees prompts, config, weights and settings only."""
    target = check_target(options.output, options.force)
    if target.exists() and options.golden.exists() and target.samefile(options.golden):
        raise InputError(f"{options.output} is the golden itself; give the run another name")
    with open_bundle(options.golden) as golden:
        check_golden(golden)
        model = open_golden_model(golden, options)
        job = make_job(golden, model, options)
        manifest = _manifest(golden, job, options)
        with open_device(options.device) as device:
            return _run(device, golden, job, manifest, options, progress)


def run_on(device: Device, model: Model, manifest: dict[str, Any], options: RunOptions) -> RunSummary:
    """Run one shard of a sweep on an open device: as `make_run`, but model and ``manifest`` are as prepared before."""
    check_target(options.output, options.force)
    with device, open_bundle(options.golden) as golden:
        return _run(device, golden, make_job(golden, model, options), manifest, options)


def run_changed(device: Device, options: RunOptions, change: Callable[[Job], Job]) -> RunSummary:
    """Run a golden on an open device, by what ``change`` makes of the job that `make_run` would do.

    The bundle says what was asked for, whatever the change: so does an engine that does something else.
    """
    check_target(options.output, options.force)
    with device, open_bundle(options.golden) as golden:
        check_golden(golden)
        job = make_job(golden, open_golden_model(golden, options), options)
        return _run(device, golden, change(job), _manifest(golden, job, options), options)


def prepare_run(device: Device, golden: Bundle, model: Model, options: RunOptions) -> dict[str, Any]:
    """The manifest that all runs of these options share, whatever part of the golden they run."""
    manifest = _manifest(golden, make_job(golden, model, options), options)
    manifest["run"] = _described(device, options)
    return manifest


def check_golden(golden: Bundle) -> None:
    """InputError where it is none."""
    if golden.kind != "golden":
        raise InputError(f"{golden.path} is a {golden.kind}, not a golden; make one with 'kdtr golden'")


def _run(
    device: Device,
    golden: Bundle,
    job: Job,
    manifest: dict[str, Any],
    options: RunOptions,
    progress: Progress = lambda what, done, total: None,
) -> RunSummary:
    statistics = Statistics()
    begin = time.monotonic()
    results = decode(device, job, statistics, lambda done: progress("run", done, len(job.requests)))
    seconds = time.monotonic() - begin
    described = {
        **_described(device, options),
        "golden_manifest_sha256": golden.manifest_sha256,
        "statistics": statistics.summary(),
    }
    _write(options, job, {**manifest, "run": described}, results)
    prompts = [r.prompt for r in job.requests]
    pairs = [(prompt, result.generated) for prompt, result in zip(prompts, results, strict=True)]
    drafter = job.draft.spec.identity if job.draft is not None else None
    rounds = [r.rounds for r in results]
    notes = _other_model(golden.manifest["model"], manifest["model"])
    return RunSummary(options.output, job.model, described, pairs, rounds, statistics, seconds, drafter, notes)


def _described(device: Device, options: RunOptions) -> dict[str, Any]:
    return {**device.describe(), "kernels_sha256": _kernels_sha256(device.replaced), "batch": options.batch or _BATCH}


def make_job(golden: Bundle, model: Model, options: RunOptions) -> Job:
    """What a run decodes; ``output`` and ``device`` play no part. InputError for options that don't fit the golden."""
    decoding = golden_decoding(golden.manifest["decoding"], options.steps)
    if options.teacher_force and options.mode != "ar":
        raise InputError(f"--teacher-force goes with --mode ar: in {options.mode} the engine's choices are the walk")
    if options.trace is not None and options.tier != "exact":
        raise InputError(f"--trace goes with --tier exact: the tensors of tier {options.tier} are not kept yet")
    requests = [
        Request(Prompt(s.id, s.prompt, s.stream), s.tokens[: decoding.steps] if options.teacher_force else None)
        for s in golden.sequences
    ]
    positions = check_prompts([r.prompt for r in requests], model.config, decoding.steps)
    check_trace(model.config, options.trace, sum(len(r.prompt.ids) + decoding.steps - 1 for r in requests))
    return Job(
        model=model,
        choices=_choices(golden.manifest["choices"]),
        requests=requests,
        decoding=decoding,
        positions=positions,
        batch=min(options.batch or _BATCH, len(requests)),
        prefill=options.prefill,
        keep_prompt_logits=bool(golden.manifest.get("score", False)),
        draft=_draft(golden, model, options),
        trace=options.trace,
        tier=options.tier,
    )


def _draft(golden: Bundle, model: Model, options: RunOptions) -> Draft | None:
    """The drafter of a run: as told, else the golden's own; its DFlash marginals are replayed where it stored them."""
    told = {"--drafter": options.drafter, "--budget": options.budget, "--block-size": options.block_size}
    if options.mode == "ar":
        for name, value in told.items():
            if value is not None:
                raise InputError(f"{name} goes with --mode ddtree or --mode chain")
        return None
    made = golden.manifest.get("drafting") or {}
    own = made.get("drafter", "ngram")
    text = options.drafter or ("replay" if own.startswith("dflash:") else own)
    spec = parse_drafter(text, model.config)
    budget = made.get("budget") if options.budget is None else options.budget
    block = options.block_size
    if block is None and spec.kind != "dflash":
        block = made.get("block_size")
    settings = draft_settings(spec, options.mode, budget, block)
    sequences = [
        Sequence(s.prompt, s.stream, s.tokens, **(_stored(golden, s, settings.horizon) if text == "replay" else {}))
        for s in golden.sequences
    ]
    return Draft(settings, spec, sequences)


def _stored(golden: Bundle, sequence: BundleSequence, horizon: int) -> dict[str, np.ndarray]:
    """A golden's marginals at every output position, as far as the horizon."""
    names = {"top_ids": "drafts/top_ids", "top_logps": "drafts/top_logps", "counts": "drafts/counts"}
    if names["counts"] not in sequence.array_names():
        raise InputError(f"{golden.path} holds no marginals to replay; make it with 'kdtr golden --ddtree'")
    arrays = {name: sequence.array(path) for name, path in names.items()}
    if arrays["counts"].shape[1] < horizon:
        own = arrays["counts"].shape[1] + 1
        raise InputError(f"--block-size {horizon + 1}: the golden's marginals are of blocks of {own}")
    return {name: np.ascontiguousarray(array[:, :horizon]) for name, array in arrays.items()}


def _manifest(golden: Bundle, job: Job, options: RunOptions) -> dict[str, Any]:
    made = golden.manifest
    manifest = common_manifest(
        job.model,
        job.choices,
        job.decoding,
        positions=_rope_positions(made, job.model, job.positions),
        teacher_forced=options.teacher_force,
        arithmetic=["engine"],
        logits=made["logits"],
        score=job.keep_prompt_logits,
        embedded=False,
    )
    if job.trace is not None:
        manifest["trace"] = job.trace
    manifest["tier"] = job.tier
    if job.draft is not None:
        manifest["decoding"]["mode"] = options.mode
        of = (made.get("drafting") or {}).get("drafter") if job.draft.spec.kind == "replay" else None
        manifest["drafting"] = drafting_manifest(job.draft.spec, job.draft.settings, of)
    return manifest


def _other_model(golden: dict[str, Any], run: dict[str, Any]) -> tuple[str, ...]:
    """Told at once, though only the diff judges it: a long run of another model is of no use."""
    parts = [(key, what) for key, what in (("config_sha256", "config"), ("weights_used_sha256", "weights"))]
    other = [what for key, what in parts if golden.get(key) != run.get(key)]
    return (f"the {' and the '.join(other)} are not the golden's; a diff will be INVALID",) if other else ()


def _write(options: RunOptions, job: Job, manifest: dict[str, Any], results: list[Decoded]) -> None:
    with BundleWriter(options.output, "run", options.force) as bundle:
        bundle.add_config(job.model.config_text)
        for request, result in zip(job.requests, results, strict=True):
            prompt, made = request.prompt, result.generated
            arrays = logits_arrays("logits", "engine", made.logits, manifest["logits"])
            if made.prompt_logits is not None:
                arrays |= logits_arrays("prompt_logits", "engine", made.prompt_logits, manifest["logits"])
            arrays |= made.trace or {}
            if job.draft is not None:
                settings = job.draft.settings
                width = settings.width(job.model.config.vocab_size)
                arrays |= pack_rounds(result.rounds, settings.horizon, width, result.cache_digest)
            bundle.add_sequence(
                SequenceData(prompt.id, prompt.stream, prompt.ids, made.tokens, made.finish_reason, arrays)
            )
        bundle.finish(manifest)


def open_golden_model(golden: Bundle, options: RunOptions) -> Model:
    """The model to run: ``--model``, or the config and the weights that the golden holds.

    Weights are not kept as float32: the manifest's digest and the upload read them, tensor by tensor.
    """
    if options.model is not None:
        return open_model(options.model, cache=False)
    names = golden.weight_names()
    if not names:
        name = golden.manifest["model"].get("name", "the same model")
        raise InputError(f"{options.golden} holds no weights; give the checkpoint with --model DIR ({name})")
    text = golden.config_text
    config = embedded_config(golden, options.golden)
    weights = Weights.from_arrays({name: golden.weight(name) for name in names}, config, cache=False)
    return Model(config, text, weights, None, golden.manifest["model"].get("name", "embedded"))


def embedded_config(golden: Bundle, path: Path) -> ModelConfig:
    """The config that a golden holds, for its path in messages."""
    try:
        config = json.loads(golden.config_text)
    except ValueError:
        raise InputError(f"{path}: the config in it is not JSON") from None
    return parse_config(config, where=f"{path} /model/config")


def golden_decoding(settings: dict[str, Any], steps: int | None) -> Decoding:
    """How a golden was decoded (its manifest's ``decoding``), for a run of ``steps`` steps (None: as many)."""
    return Decoding(
        steps if steps is not None else settings["steps"],
        tuple(settings["stop_ids"]),
        settings["ignore_eos"],
        settings["temperature"],
        settings["seed"],
    )


def _choices(settings: dict[str, Any]) -> Choices:
    rule = settings.get("tie_rule", "smallest-index")
    if rule != "smallest-index":
        raise InputError(f"the golden's tie rule is {rule!r}; this engine knows smallest-index alone")
    return Choices(settings.get("latent_norm_eps", "hf"), settings.get("rope_angles", "f64"))


def _rope_positions(manifest: dict[str, Any], model: Model, capacity: int) -> int:
    """How many positions the rotary digest covers: as many as the golden's, so that the two can be compared."""
    recorded = manifest["model"].get("rope_positions")
    if isinstance(recorded, int) and 0 < recorded <= model.config.max_position_embeddings:
        return recorded
    return capacity


def _kernels_sha256(replaced: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for file in sources():
        digest.update(source_text(file, replaced).encode())
    return digest.hexdigest()

"""`kdtr run`: a golden's prompts through the CUDA engine, as a bundle."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtr_cli.bundle.reader import Bundle, open_bundle
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.writer import BundleWriter, check_target
from kdtr_cli.engine.compile import source_text
from kdtr_cli.engine.devices import Device, open_device
from kdtr_cli.engine.generate import Request, generate
from kdtr_cli.engine.kernels import sources
from kdtr_cli.engine.transformer import Transformer, prefill_rows
from kdtr_cli.engine.weights import upload_weights
from kdtr_cli.errors import InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import ModelConfig, parse_config
from kdtr_cli.model.prompts import Decoding, Generated, Prompt, check_prompts
from kdtr_cli.model.source import Model, open_model
from kdtr_cli.model.weights import Weights
from kdtr_cli.workflows.manifest import check_weights, common_manifest, logits_arrays

__all__ = ["RunOptions", "RunSummary", "make_run"]

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
    force: bool = False


@dataclass(frozen=True)
class RunSummary:
    """What was run: the device, the model, and each prompt with its result, in the golden's order."""

    path: Path
    model: Model
    device: dict[str, str]
    sequences: list[tuple[Prompt, Generated]]


def make_run(options: RunOptions, progress: Progress = lambda what, done, total: None) -> RunSummary:
    """Run a golden's prompts and write the run bundle. The engine sees prompts, config, weights and settings only."""
    target = check_target(options.output, options.force)
    if target.exists() and options.golden.exists() and target.samefile(options.golden):
        raise InputError(f"{options.output} is the golden itself; give the run another name")
    with open_bundle(options.golden) as golden:
        if golden.kind != "golden":
            raise InputError(f"{options.golden} is a {golden.kind}, not a golden; make one with 'kdtr golden'")
        model = _open_model(golden, options)
        manifest = golden.manifest
        decoding = _decoding(manifest["decoding"], options.steps)
        choices = _choices(manifest["choices"])
        prompts = [Prompt(s.id, s.prompt, s.stream) for s in golden.sequences]
        requests = [
            Request(p, s.tokens[: decoding.steps] if options.teacher_force else None)
            for p, s in zip(prompts, golden.sequences, strict=True)
        ]
        capacity = check_prompts(prompts, model.config, decoding.steps)
        check_weights(model.weights)
        score = bool(manifest.get("score", False))
        run_manifest = common_manifest(
            model,
            choices,
            decoding,
            positions=_rope_positions(manifest, model, capacity),
            teacher_forced=options.teacher_force,
            arithmetic=["engine"],
            logits=manifest["logits"],
            score=score,
            embedded=False,
        )
        batch = min(options.batch or _BATCH, len(prompts))
        with open_device(options.device) as device:
            described = device.describe()
            run_manifest["run"] = {
                **described,
                "kernels_sha256": _kernels_sha256(),
                "batch": options.batch or _BATCH,
                "golden_manifest_sha256": golden.manifest_sha256,
            }
            results = _decode(device, model, choices, requests, decoding, batch, options, capacity, score, progress)
        _write(options, model, run_manifest, prompts, results)
    return RunSummary(options.output, model, described, list(zip(prompts, results, strict=True)))


def _decode(
    device: Device,
    model: Model,
    choices: Choices,
    requests: list[Request],
    decoding: Decoding,
    batch: int,
    options: RunOptions,
    capacity: int,
    score: bool,
    progress: Progress,
) -> list[Generated]:
    prefill = options.prefill or prefill_rows(model.config, capacity)
    transformer = Transformer(
        device,
        model.config,
        upload_weights(device, model.config, model.weights),
        choices,
        rows=max(batch, prefill),
        slots=batch,
        capacity=capacity,
    )
    results: list[Generated | None] = [None] * len(requests)
    decoded = generate(transformer, requests, decoding, batch=batch, prefill=prefill, keep_prompt_logits=score)
    for done, (index, result) in enumerate(decoded, 1):
        results[index] = result
        progress("run", done, len(requests))
    device.synchronize()
    device.check_guards()
    return results


def _write(
    options: RunOptions, model: Model, manifest: dict[str, Any], prompts: list[Prompt], results: list[Generated]
) -> None:
    with BundleWriter(options.output, "run", options.force) as bundle:
        bundle.add_config(model.config_text)
        for prompt, result in zip(prompts, results, strict=True):
            arrays = logits_arrays("logits", "engine", result.logits, manifest["logits"])
            if result.prompt_logits is not None:
                arrays |= logits_arrays("prompt_logits", "engine", result.prompt_logits, manifest["logits"])
            bundle.add_sequence(
                SequenceData(prompt.id, prompt.stream, prompt.ids, result.tokens, result.finish_reason, arrays)
            )
        bundle.finish(manifest)


def _open_model(golden: Bundle, options: RunOptions) -> Model:
    """The model to run: ``--model``, or the config and the weights that the golden holds."""
    if options.model is not None:
        return open_model(options.model)
    names = golden.weight_names()
    if not names:
        name = golden.manifest["model"].get("name", "the same model")
        raise InputError(f"{options.golden} holds no weights; give the checkpoint with --model DIR ({name})")
    text = golden.config_text
    config = _embedded_config(golden, options.golden)
    weights = Weights.from_arrays({name: golden.weight(name) for name in names}, config)
    return Model(config, text, weights, None, golden.manifest["model"].get("name", "embedded"))


def _embedded_config(golden: Bundle, path: Path) -> ModelConfig:
    try:
        config = json.loads(golden.config_text)
    except ValueError:
        raise InputError(f"{path}: the config in it is not JSON") from None
    return parse_config(config, where=f"{path} /model/config")


def _decoding(settings: dict[str, Any], steps: int | None) -> Decoding:
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


def _kernels_sha256() -> str:
    digest = hashlib.sha256()
    for file in sources():
        digest.update(source_text(file).encode())
    return digest.hexdigest()

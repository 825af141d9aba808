"""`kdtr golden -o DIR/`: a golden as a sweep. Merged, its shards are the golden that one process would have made."""

import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kdtr_cli.bundle.integrity import array_sha256
from kdtr_cli.bundle.sweep import Shard, Sweep, cut, difference
from kdtr_cli.errors import InputError
from kdtr_cli.model.presets import PRESETS
from kdtr_cli.model.prompts import Prompt
from kdtr_cli.model.source import open_model
from kdtr_cli.parity.floor import NoiseFloor
from kdtr_cli.workflows.executors import check_executor
from kdtr_cli.workflows.golden import (
    GoldenOptions,
    PreparedGolden,
    Progress,
    golden_budget,
    open_prompts,
    prepare_golden,
    write_golden,
)
from kdtr_cli.workflows.golden_memory import BATCH as GROUP
from kdtr_cli.workflows.prompts import PromptOptions
from kdtr_cli.workflows.sweep import DEFAULT_SHARD_SIZE, SweepOptions, SweepSummary, make_sweep, publish_shard

__all__ = ["ShardFigures", "make_golden_shard", "make_golden_sweep"]


@dataclass(frozen=True)
class ShardFigures:
    """What a worker says of the shard that it made."""

    floors: dict[str, NoiseFloor]
    ties: int


def make_golden_sweep(
    options: GoldenOptions, sweep_options: SweepOptions, progress: Progress = lambda what, done, total: None
) -> SweepSummary:
    """Make a golden as a sweep in the directory ``options.output``, or what of it is missing.

    InputError as `make_golden` and `make_sweep`, before anything is written wherever it can be known.
    """
    check_executor(sweep_options.executor, sweep_options.jobs)
    size = sweep_options.shard_size or DEFAULT_SHARD_SIZE
    if not options.exact and size % GROUP:
        raise InputError(
            f"--shard-size {size}: with --no-exact a multiple of {GROUP}, since float64 bits depend on the sequences "
            "that are decoded together"
        )
    sweep, prompts = _plan(options, size)
    common = replace(options, prompts=PromptOptions(seed=options.prompts.seed), **_everywhere(options))

    def argument(shard: Shard) -> tuple[GoldenOptions, list[Prompt]]:
        return common, prompts[shard.first : shard.first + shard.count]

    return make_sweep(options.output, sweep, make_golden_shard, argument, sweep_options, options.force, progress)


def _plan(options: GoldenOptions, size: int) -> tuple[Sweep, list[Prompt]]:
    """The plan and all prompts; the model does not outlive this: workers open their own."""
    model, prompts, positions = open_prompts(options)
    golden_budget(options, model, prompts)  # a limit too small for a sequence is said before anything is written
    shards = cut(((prompt.id, prompt.stream, array_sha256(prompt.ids)) for prompt in prompts), size)
    return Sweep("golden", prepare_golden(options, model, positions).manifest, shards), prompts


def _everywhere(options: GoldenOptions) -> dict[str, Any]:
    """The options that are paths, so that a worker that stands elsewhere finds the same."""
    drafting, model = options.drafting, options.model
    if drafting is not None and Path(drafting.drafter).is_dir():
        drafting = replace(drafting, drafter=os.path.abspath(drafting.drafter))
    if model not in PRESETS:
        model = os.path.abspath(model)
    return {"model": model, "drafting": drafting, "output": Path()}


#: A worker keeps its models for the next shard; a thread of a Dask worker its own, since a model fills its caches.
_kept = threading.local()


def make_golden_shard(
    folder: Path, sweep: Sweep, shard: Shard, argument: tuple[GoldenOptions, list[Prompt]]
) -> ShardFigures | None:
    """Make one shard; None where another worker's equal file came first."""
    options, prompts = argument
    key = (options, sweep.sha256())
    if getattr(_kept, "key", None) != key:
        _kept.key = _kept.prepared = None  # the old models go before the new ones come
        _kept.prepared = _prepare(options, sweep, shard)
        _kept.key = key
    prepared = replace(_kept.prepared, manifest=sweep.expected(shard))

    def write(path: Path) -> ShardFigures:
        made = write_golden(prepared, prompts, path, False)
        return ShardFigures(made.floors, made.ties)

    return publish_shard(folder, sweep, shard, write)


def _prepare(options: GoldenOptions, sweep: Sweep, shard: Shard) -> PreparedGolden:
    prepared = prepare_golden(options, open_model(options.model), sweep.manifest["model"]["rope_positions"])
    found = replace(sweep, manifest=prepared.manifest).expected(shard)
    if (said := difference(found, sweep.expected(shard))) is not None:
        raise InputError(f"a worker on {os.uname().nodename} has another kdtr or another model: {said}")
    return prepared

"""`kdtr run DIR -o DIR2/`: a sweep of goldens through the engine, one run bundle for each golden shard."""

import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.bundle.sweep import Shard, Sweep, difference, read_sweep
from kdtr_cli.engine.devices import Device, open_device
from kdtr_cli.errors import InputError
from kdtr_cli.model.source import Model
from kdtr_cli.workflows.executors import check_executor
from kdtr_cli.workflows.run import Progress, RunOptions, open_golden_model, prepare_run, run_on
from kdtr_cli.workflows.sweep import SweepOptions, SweepSummary, finished_shards, make_sweep, publish_shard

__all__ = ["RunShardFigures", "make_run_shard", "make_run_sweep"]


@dataclass(frozen=True)
class RunShardFigures:
    """What a worker says of the shard that it ran."""

    seconds: float
    notes: tuple[str, ...]


def make_run_sweep(
    options: RunOptions, sweep_options: SweepOptions, progress: Progress = lambda what, done, total: None
) -> SweepSummary:
    """Run a sweep of goldens, the directory ``options.golden``, into the directory ``options.output``, or what of it is
    missing. InputError as `make_run` and `make_sweep`, and where a shard of the goldens is missing or damaged."""
    check_executor(sweep_options.executor, sweep_options.jobs)
    if sweep_options.shard_size is not None:
        raise InputError("--shard-size goes with 'kdtr golden': a run has the shards of its golden")
    goldens = read_sweep(options.golden)
    if goldens.kind != "golden":
        raise InputError(f"{options.golden} is a sweep of {goldens.kind}s; a run needs goldens ('kdtr golden -o DIR/')")
    folder = Path(options.golden)
    if options.output.exists() and options.output.samefile(folder):
        raise InputError(f"{options.output} is the golden itself; give the run another name")
    shards = tuple(
        replace(shard, golden=manifest["manifest_sha256"]) for shard, manifest in finished_shards(folder, goldens)
    )
    common = replace(options, **_everywhere(options))
    jobs = sweep_options.jobs or 1
    sweep = Sweep("run", _manifest(goldens.shards[0], common, jobs), shards)

    def argument(shard: Shard) -> tuple[RunOptions, int]:
        return common, jobs

    return make_sweep(options.output, sweep, make_run_shard, argument, sweep_options, options.force, progress)


def _manifest(first: Shard, options: RunOptions, jobs: int) -> dict[str, Any]:
    """What all runs share; neither device nor model outlives this: workers open their own."""
    with open_device(options.device) as device:
        if device.kind == "gpu" and jobs > 1:
            raise InputError(f"--jobs {jobs}: processes share one GPU badly; leave it out, or give --device cpu")
        with open_bundle(options.golden / first.name) as golden:
            return prepare_run(device, golden, open_golden_model(golden, options), options)


def _everywhere(options: RunOptions) -> dict[str, Any]:
    """The options that are paths, so that a worker that stands elsewhere finds the same."""
    paths: dict[str, Any] = {"golden": Path(os.path.abspath(options.golden)), "output": Path(), "force": False}
    if options.model is not None and Path(options.model).is_dir():
        paths["model"] = os.path.abspath(options.model)
    if options.drafter is not None and Path(options.drafter).is_dir():
        paths["drafter"] = os.path.abspath(options.drafter)
    return paths


def _model(folder: Path, first: Shard, options: RunOptions) -> Model:
    """The weights lie in the first shard, if anywhere."""
    with open_bundle(folder / first.name) as golden:
        return open_golden_model(golden, options)


@dataclass(frozen=True)
class _Engine:
    """What a worker keeps for the next shard: the device with its compiled kernels, and the model."""

    key: tuple[RunOptions, str]
    device: Device
    model: Model


_kept: list[_Engine] = []
_one_at_a_time = threading.Lock()  # a device is not made for several threads; a Dask worker may have them


def make_run_shard(
    folder: Path, sweep: Sweep, shard: Shard, argument: tuple[RunOptions, int]
) -> RunShardFigures | None:
    """Run one shard; None where another worker's equal file came first."""
    options, jobs = argument
    with _one_at_a_time:
        key = (options, sweep.sha256())
        if not _kept or _kept[0].key != key:
            _kept.clear()
            _kept.append(_Engine(key, *_open(options, sweep, shard, jobs)))
        engine = _kept[0]

        def write(path: Path) -> RunShardFigures:
            one = replace(options, golden=options.golden / shard.name, output=path)
            made = run_on(engine.device, engine.model, sweep.expected(shard), one)
            return RunShardFigures(made.seconds, made.notes)

        return publish_shard(folder, sweep, shard, write)


def _open(options: RunOptions, sweep: Sweep, shard: Shard, jobs: int) -> tuple[Device, Model]:
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    device = open_device(options.device, threads=threads)
    model = _model(options.golden, sweep.shards[0], options)
    with open_bundle(options.golden / shard.name) as golden:
        manifest = prepare_run(device, golden, model, options)
    found = replace(sweep, manifest=manifest).expected(shard)
    if (said := difference(found, sweep.expected(shard))) is not None:
        raise InputError(f"a worker on {os.uname().nodename} has another kdtr, model or device: {said}")
    return device, model

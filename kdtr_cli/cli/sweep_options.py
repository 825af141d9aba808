"""The options that `kdtr golden` and `kdtr run` share for sweeps, and what a sweep prints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kdtr_cli.bundle.sweep import is_sweep
from kdtr_cli.errors import InputError
from kdtr_cli.workflows.sweep import SweepOptions, SweepSummary

__all__ = ["output_option", "show_sweep", "sweep_options", "wanted_sweep"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

#: A text, not a path: a Path drops the slash that says "a sweep".
output_option = click.option(
    "-o", "--output", required=True, type=click.Path(), help="The bundle to write; DIR/ makes a sweep of shards."
)


def sweep_options(command: _Command) -> _Command:
    """Adds --jobs and --executor to a command."""
    command = click.option(
        "--executor",
        metavar="processes|dask:ADDRESS|mpi",
        help="Who makes the shards of a sweep.  [default: processes]",
    )(command)
    return click.option(
        "--jobs", type=click.IntRange(1, 1024), help="Processes that make the shards of a sweep.  [default: 1]"
    )(command)


def wanted_sweep(
    output: str, jobs: int | None, executor: str | None, shard_size: int | None = None
) -> SweepOptions | None:
    """The options of a sweep where ``output`` names one, else None; InputError for such options without a sweep."""
    if is_sweep(output):
        return SweepOptions(shard_size, jobs, executor)
    for name, value in (("--shard-size", shard_size), ("--jobs", jobs), ("--executor", executor)):
        if value is not None:
            raise InputError(f"{name} goes with a sweep; to make one end the output with a slash: -o {output}/")
    return None


def show_sweep(summary: SweepSummary, name: Path, more: list[str]) -> None:
    """Print one line: what there is now, how much of it was there before, and what else the command says."""
    sweep = summary.sweep
    parts = [
        f"{sweep.kind} {name}: {sweep.manifest['model'].get('name', 'model')}",
        f"sequences={sweep.sequences}",
        f"tokens={summary.tokens}",
        f"shards={len(sweep.shards)}",
    ]
    if summary.found:
        parts.append(f"resumed={summary.found}")
    click.echo(" ".join([*parts, *more]))

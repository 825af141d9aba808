"""Sweeps: many prompts as a directory of shards (bundle/sweep.py), each made by whatever worker is free.

A shard is one task: it is made from its own prompts alone, written atomically, and not made again once it is there. So
a sweep that was stopped, in whatever way, goes on where it was: its plan is compared, its shards are looked at, what is
missing is made.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtr_cli.bundle.sweep import (
    SWEEP_FILE,
    Shard,
    Sweep,
    check_shard,
    difference,
    is_own,
    is_temporary,
    read_sweep,
    write_sweep,
)
from kdtr_cli.errors import DeviceError, InputError
from kdtr_cli.workflows.executors import map_shards, open_executor

__all__ = ["DEFAULT_SHARD_SIZE", "SweepOptions", "SweepSummary", "Work", "finished_shards", "make_sweep"]
__all__ += ["publish_shard"]

DEFAULT_SHARD_SIZE = 256

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SweepOptions:
    """Where and how a sweep is made. ``jobs`` None: 1 process; ``shard_size`` None: the default."""

    shard_size: int | None = None
    jobs: int | None = None
    executor: str | None = None


@dataclass(frozen=True)
class SweepSummary:
    """What there is now. ``found``: shards that were there already; ``results``: what the work said of the others."""

    folder: Path
    sweep: Sweep
    tokens: int
    found: int
    results: list[Any]


#: The work on one shard: (directory, plan, shard, what it needs beside them) -> what it has to say. A function that can
#: be pickled, and that may run twice.
Work = Callable[[Path, Sweep, Shard, Any], Any]


def make_sweep(
    folder: Path,
    sweep: Sweep,
    work: Work,
    argument: Callable[[Shard], Any],
    options: SweepOptions,
    force: bool,
    progress: Progress,
) -> SweepSummary:
    """Make every shard of the plan that is not there yet, by ``work``, which is given the shard's ``argument``.

    ``force`` removes what kdtr wrote there before. InputError: the directory holds another sweep or something else,
    another kdtr is at work there, or what a shard's input brings. DeviceError: workers died.
    """
    folder = _absolute(folder)
    _make_folder(folder)
    with _locked(folder) as alone:
        if alone:
            _remove_temporaries(folder)
        _claim(folder, sweep, force)
        held = _look(folder, sweep)
        done = sum(shard.count for shard in sweep.shards if shard.index in held)
        tokens = sum(held.values())
        missing = [shard for shard in sweep.shards if shard.index not in held]
        progress(sweep.kind, done, sweep.sequences)
        results = []
        if missing:
            with open_executor(options.executor, options.jobs) as (executor, workers):
                there = _There(work, folder, sweep.sha256())
                tasks = ((shard, argument(shard)) for shard in missing)
                for shard, result in map_shards(executor, there, tasks, workers):
                    tokens += _arrived(folder, sweep, shard)
                    results.append(result)
                    done += shard.count
                    progress(sweep.kind, done, sweep.sequences)
        if alone:
            _remove_temporaries(folder)  # of workers that were killed on the way
    return SweepSummary(folder, sweep, tokens, len(held), results)


@dataclass(frozen=True)
class _There:
    """What an executor calls. It takes the plan from the directory, and so knows that the worker sees the same one."""

    work: Work
    folder: Path
    sha256: str

    def __call__(self, task: tuple[Shard, Any]) -> tuple[Shard, Any]:
        shard, argument = task
        try:
            sweep = read_sweep(self.folder)
            seen = sweep.sha256() == self.sha256
        except InputError:
            sweep, seen = None, False
        if not seen:
            what = "does not see" if sweep is None else "sees another sweep in"
            raise InputError(
                f"{self.folder}: a worker on {os.uname().nodename} {what} this directory; workers on several machines "
                "need one file system, and the same path on each"
            )
        return shard, self.work(self.folder, sweep, shard, argument)


def publish_shard(folder: Path, sweep: Sweep, shard: Shard, write: Callable[[Path], Any]) -> Any:
    """Have ``write`` make the shard's file; its result, or None where it is there already."""
    with contextlib.suppress(InputError):
        if check_shard(folder, sweep, shard) is not None:
            return None  # the worker that made it died before it could say so
    try:
        return write(folder / shard.name)
    except InputError:
        # the work was given to two workers, one of which was thought dead: both files have the same content
        with contextlib.suppress(InputError):
            if check_shard(folder, sweep, shard) is not None:
                return None
        raise


def finished_shards(folder: Path, sweep: Sweep) -> Iterator[tuple[Shard, dict[str, Any]]]:
    """Each shard with its manifest, checked against the plan. InputError: one is missing, damaged or another."""
    missing = [shard for shard in sweep.shards if not (folder / shard.name).exists()]
    if missing:
        raise InputError(
            f"{folder}: incomplete: {len(missing)} of {len(sweep.shards)} shards are missing, the first is "
            f"{missing[0].name}; the command that made the sweep goes on where it stopped"
        )
    for shard in sweep.shards:
        manifest = check_shard(folder, sweep, shard)
        if manifest is None:
            raise InputError(f"{folder}: incomplete: {shard.name} has just vanished")
        yield shard, manifest


def _absolute(folder: Path) -> Path:
    return Path(os.path.abspath(folder))  # workers may stand elsewhere; links stay as the user wrote them


def _make_folder(folder: Path) -> None:
    if not folder.parent.is_dir():
        raise InputError(f"{folder}: the folder {folder.parent} does not exist; create it first")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        what = "is a file, not a directory" if folder.exists() else (error.strerror or str(error))
        raise InputError(f"{folder}: {what}; choose another place for the sweep") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{folder}: no permission to write in it")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the directory against another kdtr; False where the file system has no locks (renames keep the files whole).

    The system lets go when the process ends, in whatever way.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            said = "another kdtr is writing this sweep; wait for it, or choose another place"
            raise InputError(f"{folder}: {said}") from None
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(handle)


def _remove_temporaries(folder: Path) -> None:
    for name in os.listdir(folder):
        if is_temporary(name):
            (folder / name).unlink(missing_ok=True)


def _claim(folder: Path, sweep: Sweep, force: bool) -> None:
    """Make the directory this sweep's: write its plan, or find that it is there."""
    if force:
        for name in sorted(os.listdir(folder)):
            if is_own(name) and name != SWEEP_FILE:  # the old plan goes last: till then it is an unfinished old sweep
                (folder / name).unlink()
    elif (folder / SWEEP_FILE).exists():
        there = read_sweep(folder)
        if (said := _other_sweep(there, sweep)) is not None:
            raise InputError(f"{folder} holds another sweep: {said}; choose another place, or --force to make it anew")
        return
    elif foreign := sorted(name for name in os.listdir(folder) if not is_temporary(name)):
        raise InputError(
            f"{folder} holds {foreign[0]} and no sweep.json; a sweep needs a new or empty directory (or --force)"
        )
    write_sweep(folder, sweep)


def _other_sweep(there: Sweep, wanted: Sweep) -> str | None:
    if there.kind != wanted.kind:
        return f"its kind is {there.kind}, not {wanted.kind}"
    if (said := difference(there.expected(there.shards[0]), wanted.expected(wanted.shards[0]))) is not None:
        return said
    if there.sequences != wanted.sequences:
        return f"it has {there.sequences} prompts, not {wanted.sequences}"
    if [s.first for s in there.shards] != [s.first for s in wanted.shards]:
        return f"its shards have {there.shards[0].count} sequences (--shard-size), not {wanted.shards[0].count}"
    for one, other in zip(there.shards, wanted.shards, strict=True):
        if one.prompts_sha256 != other.prompts_sha256:
            return f"its prompts {one.first} to {one.first + one.count - 1} are others"
        if one.golden != other.golden:
            return f"it was run from another golden ({one.name})"
    return None


def _look(folder: Path, sweep: Sweep) -> dict[int, int]:
    """The tokens of each shard that is there. InputError: one is damaged, or another bundle; nothing is deleted."""
    held: dict[int, int] = {}
    for shard in sweep.shards:
        try:
            manifest = check_shard(folder, sweep, shard)
        except InputError as error:
            raise InputError(f"{error}; delete this file to have it made again") from None
        if manifest is not None:
            held[shard.index] = _tokens(manifest)
    return held


def _arrived(folder: Path, sweep: Sweep, shard: Shard) -> int:
    """The tokens of a shard that a worker says is done. DeviceError: it is not to be seen from here."""
    manifest = check_shard(folder, sweep, shard)
    if manifest is None:
        raise DeviceError(f"{folder / shard.name}: a worker wrote it, and it is not here: is the directory shared?")
    return _tokens(manifest)


def _tokens(manifest: dict[str, Any]) -> int:
    entries: Sequence[str] = [path for path in manifest["datasets"] if path.endswith("/tokens")]
    return sum(manifest["datasets"][path]["shape"][0] for path in entries if path.count("/") == 2)

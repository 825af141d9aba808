"""`kdtr diff DIR1 DIR2`: a sweep of runs against its sweep of goldens, shard by shard, with one verdict.

Sweeps that are not whole, or not of the same shards, are no evidence: INVALID, whatever the rest would say.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

from kdtr_cli.bundle.sweep import Sweep, read_sweep
from kdtr_cli.errors import InputError
from kdtr_cli.parity.combine import Combined
from kdtr_cli.parity.evidence import Evidence
from kdtr_cli.parity.floor import NoiseFloor, floors_of, shared_floors
from kdtr_cli.parity.judge import invalid
from kdtr_cli.parity.provenance import check_kinds
from kdtr_cli.parity.results import Report
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Finding, Level, Verdict
from kdtr_cli.workflows.diff import judge_bundles
from kdtr_cli.workflows.sweep import finished_shards

__all__ = ["diff_sweeps"]

Progress = Callable[[str, int, int], None]


def diff_sweeps(
    golden: str | Path,
    run: str | Path,
    options: JudgeOptions | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Judge the sweep of runs in the directory ``run`` against the sweep of goldens in ``golden``.

    Memory is that of one pair of shards. What is missing, damaged or of another sweep makes the report INVALID.
    InputError: a directory that is not there, a bundle in place of a sweep, an unknown sequence in ``select``.
    """
    options = options or JudgeOptions()
    folders = Path(golden), Path(run)
    for folder in folders:
        if not folder.exists():
            raise InputError(f"{folder}: no such directory; give a sweep of goldens and a sweep of runs")
        if not folder.is_dir():
            raise InputError(f"{folder} is no sweep; a sweep is judged against a sweep ('kdtr merge' makes one bundle)")
    sides: list[Evidence] = []
    try:
        sweeps = []
        for folder in folders:
            sweeps.append(read_sweep(folder))
            sides.append(Evidence(sweeps[-1].kind, sweeps[-1].manifest, (), str(folder)))
        if (finding := check_kinds(*sides)) is not None:
            return invalid([finding], options, *sides)
        ids, floors = _check(folders, sweeps)
    except InputError as error:
        return invalid([Finding(Level.ERROR, "sweep", str(error), Verdict.INVALID)], options, *sides)
    chosen = None if options.select is None else _choose(ids, options.select)
    combined = Combined()
    done = 0
    for shard in sweeps[0].shards:
        if chosen is None or shard.index in chosen:
            asked = options if chosen is None else replace(options, select=chosen[shard.index])
            report = judge_bundles(folders[0] / shard.name, folders[1] / shard.name, asked, floors)
            combined.add(report, shard.first)
        else:
            combined.skip(shard.count)
        done += shard.count
        progress("diff", done, sweeps[0].sequences)
    return replace(combined.report(str(golden), str(run)), options=options)


def _check(folders: tuple[Path, Path], sweeps: list[Sweep]) -> tuple[list[list[str]], dict[str, NoiseFloor]]:
    """The ids of the golden's sequences, shard by shard, and the noise floors of the whole. InputError: the two sweeps
    are no pair, or not whole.

    Every manifest is read, no data: what a shard holds is checked when it is judged.
    """
    layouts = [[(s.first, s.count) for s in sweep.shards] for sweep in sweeps]
    if layouts[0] != layouts[1]:
        counts = [f"{len(sweep.shards)} shards of {sweep.sequences} sequences" for sweep in sweeps]
        raise InputError(
            f"the sweeps are cut into other shards: golden {counts[0]}, run {counts[1]}; "
            "merge both ('kdtr merge') and judge the bundles"
        )
    ids, floors = [], []
    for _, manifest in finished_shards(folders[0], sweeps[0]):
        ids.append([entry["id"] for entry in manifest["sequences"]])
        floors.append(floors_of(manifest))
    seen: set[str] = set()
    for name in chain.from_iterable(ids):
        if name in seen:
            raise InputError(f"the golden has two sequences with the id {name!r}")
        seen.add(name)
    for _ in finished_shards(folders[1], sweeps[1]):
        pass
    return ids, shared_floors(floors)


def _choose(ids: list[list[str]], select: tuple[str, ...]) -> Mapping[int, tuple[str, ...]]:
    """Which of the selected sequences lie in which shard. InputError: one lies in none."""
    wanted, known = set(select), set(chain.from_iterable(ids))
    if unknown := [name for name in select if name not in known]:
        some = ", ".join(sorted(known)[:8]) + (", ..." if len(known) > 8 else "")
        raise InputError(f"--select {unknown[0]!r}: the golden has no such sequence; it has: {some}")
    held = {index: tuple(name for name in names if name in wanted) for index, names in enumerate(ids)}
    return {index: names for index, names in held.items() if names}

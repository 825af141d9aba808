"""`kdtr merge`: a sweep as one ordinary bundle, the same file that one process would have written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtr_cli.bundle.reader import BundleSequence, open_bundle
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.sweep import Sweep, read_sweep
from kdtr_cli.bundle.writer import BundleWriter, check_target
from kdtr_cli.parity.floor import FLOOR_KEY, NoiseFloor, floor_entries, floors_of, shared_floors
from kdtr_cli.workflows.sweep import finished_shards

__all__ = ["MergeSummary", "merge_sweep"]


@dataclass(frozen=True)
class MergeSummary:
    """What was written: its manifest_sha256, and how much of what kind."""

    path: Path
    kind: str
    shards: int
    sequences: int
    manifest_sha256: str


def merge_sweep(
    folder: Path, output: Path, force: bool, progress: Callable[[str, int, int], None] = lambda what, done, total: None
) -> MergeSummary:
    """Copy all shards into one bundle, one sequence in memory at a time; every array is verified on the way.

    InputError: no sweep, shards that are missing, damaged or not of this sweep, or a place that can't be written to.
    """
    check_target(output, force)
    sweep = read_sweep(folder)
    shards, floors = [], []
    for shard, manifest in finished_shards(folder, sweep):
        shards.append(shard)
        floors.append(floors_of(manifest))
    done = 0
    with BundleWriter(output, sweep.kind, force) as writer:
        for shard in shards:
            with open_bundle(folder / shard.name) as bundle:
                if shard.index == 0:
                    writer.add_config(bundle.config_text)
                    for name in bundle.weight_names():
                        writer.add_weight(name, bundle.weight(name))
                for sequence in bundle.sequences:
                    writer.add_sequence(_copy(sequence))
                    done += 1
                    progress("merge", done, sweep.sequences)
        sha256 = writer.finish(_manifest(sweep, shared_floors(floors)))
    return MergeSummary(output, sweep.kind, len(shards), done, sha256)


def _copy(sequence: BundleSequence) -> SequenceData:
    arrays = {name: sequence.array(name) for name in sequence.array_names()}
    return SequenceData(sequence.id, sequence.stream, sequence.prompt, sequence.tokens, sequence.finish_reason, arrays)


def _manifest(sweep: Sweep, floors: Mapping[str, NoiseFloor]) -> dict[str, Any]:
    """The manifest of the whole. Runs were made from shards, not from the one golden that these would be merged to."""
    manifest = dict(sweep.manifest)
    if floors:
        manifest[FLOOR_KEY] = floor_entries(floors)
    if sweep.kind == "run":
        manifest["run"] = {**manifest["run"], "golden_manifest_sha256": None}
    return manifest

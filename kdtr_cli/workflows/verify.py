"""Checks a bundle whole: structure, manifest, the digest of every array, and its rounds (schema kdtr.verify/1)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kdtr_cli.bundle.reader import Bundle, open_bundle
from kdtr_cli.bundle.sweep import check_shard, read_sweep
from kdtr_cli.errors import Exit, InputError
from kdtr_cli.workflows.rounds import broken_rounds

__all__ = ["Verification", "exit_code", "verify_bundle", "verify_document", "verify_sweep"]


@dataclass(frozen=True)
class Verification:
    """What checking one bundle said. problems: one line each, empty if the bundle is whole.

    The other fields are None where the bundle can't even be opened. array_bytes: bytes of all arrays, as declared. Of
    a sweep the numbers are sums over its shards.
    """

    path: str
    kind: str | None = None
    manifest_sha256: str | None = None
    sequences: int | None = None
    arrays: int | None = None
    array_bytes: int | None = None
    problems: tuple[str, ...] = ()
    shards: int | None = None  #: of a sweep; None: a bundle

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_sweep(folder: str | Path) -> Verification:
    """Read all of a sweep: are all shards there, of this sweep, and whole? Never raises, as `verify_bundle`."""
    folder = Path(folder)
    try:
        sweep = read_sweep(folder)
        missing = [shard for shard in sweep.shards if not (folder / shard.name).exists()]
    except (InputError, OSError) as error:
        return Verification(str(folder), problems=(str(error),))
    problems = []
    if missing:
        problems.append(f"{folder}: {len(missing)} of {len(sweep.shards)} shards are missing, first {missing[0].name}")
    sums = [0, 0, 0]
    for shard in sweep.shards:
        if shard in missing:
            continue
        try:
            check_shard(folder, sweep, shard)
        except InputError as error:
            problems.append(str(error))
            continue
        one = verify_bundle(folder / shard.name)
        problems += one.problems
        sums = [n + (m or 0) for n, m in zip(sums, (one.sequences, one.arrays, one.array_bytes), strict=True)]
    return Verification(str(folder), sweep.kind, None, *sums, tuple(problems), len(sweep.shards))


def verify_bundle(path: str | Path) -> Verification:
    """Read all of a bundle. Never raises for what is wrong with it: that stands in `problems`."""
    try:
        bundle = open_bundle(path)
    except InputError as error:
        return Verification(str(path), problems=(str(error),))
    problems: list[str] = []
    with bundle:
        paths = bundle.array_paths()
        total = 0
        for array in paths:
            try:
                total += bundle.verify(array)
            except InputError as error:
                problems.append(str(error))
        if not problems:
            problems += _rounds(bundle)
        return Verification(
            str(path),
            bundle.kind,
            bundle.manifest_sha256,
            len(bundle.sequences),
            len(paths),
            total,
            tuple(problems),
        )


def _rounds(bundle: Bundle) -> list[str]:
    """What is wrong with rounds whose arrays are whole: one line for each sequence."""
    problems = []
    for sequence in bundle.sequences:
        try:
            broken = broken_rounds(bundle, sequence)
        except InputError as error:
            problems.append(str(error))
        else:
            problems += [f"{bundle.path}: sequence {sequence.id!r}: {broken[0]}"] if broken else []
    return problems


def exit_code(results: Sequence[Verification]) -> Exit:
    """AGREES if all bundles are whole, else UNJUDGED."""
    return Exit.AGREES if all(result.ok for result in results) else Exit.UNJUDGED


def verify_document(results: Sequence[Verification]) -> dict[str, Any]:
    """The JSON document: schema, exit_code, bundles."""
    return {
        "schema": "kdtr.verify/1",
        "exit_code": int(exit_code(results)),
        "bundles": [{**asdict(result), "problems": list(result.problems), "ok": result.ok} for result in results],
    }

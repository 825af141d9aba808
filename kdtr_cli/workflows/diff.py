"""`kdtr diff`: opens two bundles, makes evidence of them, has it judged; and writes the report to a file."""

import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from kdtr_cli.bundle.reader import Bundle, BundleSequence, open_bundle
from kdtr_cli.bundle.schema import ARITHMETICS
from kdtr_cli.errors import DeviceError, InputError
from kdtr_cli.model.traces import execution_order
from kdtr_cli.parity.evidence import Evidence, EvidenceSequence, Logits, Rounds, Tensor
from kdtr_cli.parity.floor import FLOOR_KEY, NoiseFloor, floor_entries
from kdtr_cli.parity.judge import invalid, judge
from kdtr_cli.parity.results import Report
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Finding, Level, Verdict
from kdtr_cli.workflows.diff_facts import model_facts
from kdtr_cli.workflows.diff_rounds import drafts_kept, has_rounds, read_rounds

__all__ = ["bundle_evidence", "check_report_target", "diff", "judge_bundles", "write_report"]

_T = TypeVar("_T")


class _BrokenBundle(InputError):
    """A bundle that turned out broken while it was read: a verdict (INVALID), not a mistake in the command."""


def diff(golden: str | Path, run: str | Path, options: JudgeOptions | None = None) -> Report:
    """Judge the bundle `run` against the bundle `golden`.

    A bundle that is broken, whenever that shows, makes the report INVALID. InputError: a file that isn't there, or
    options that don't fit the golden.
    """
    options = options or JudgeOptions()
    for path in (golden, run):
        if not Path(path).exists():
            raise InputError(f"{path}: no such file; give a golden and a run ('kdtr golden' and 'kdtr run' make them)")
    return judge_bundles(golden, run, options)


def judge_bundles(
    golden: str | Path, run: str | Path, options: JudgeOptions, floors: Mapping[str, NoiseFloor] | None = None
) -> Report:
    """As `diff`, for bundles that are there. `floors`: the noise floors of the sweep that the golden is a shard of."""
    sides: list[Evidence] = []
    try:
        with ExitStack() as stack:
            for path in (golden, run):
                sides.append(bundle_evidence(stack.enter_context(_open(path))))
            if floors is not None:
                sides[0] = replace(sides[0], manifest={**sides[0].manifest, FLOOR_KEY: floor_entries(floors)})
            return judge(sides[0], sides[1], replace(options, threads=_threads()))
    except _BrokenBundle as error:
        finding = Finding(Level.ERROR, "bundle", str(error), Verdict.INVALID)
        return invalid([finding], options, *sides)


def _threads() -> int:
    """As many as there are cores for this process; past 16 the two digests, each a chain, take the whole time."""
    return min(16, len(os.sched_getaffinity(0)))


def bundle_evidence(bundle: Bundle) -> Evidence:
    """The evidence that an open bundle holds. Tokens are read at once, logits and rounds when they are asked for."""
    _reading(lambda: _verify_unread(bundle))
    sequences = _reading(lambda: tuple(_sequence(bundle, s) for s in bundle.sequences))
    return Evidence(
        kind=bundle.kind,
        manifest=bundle.manifest,
        sequences=sequences,
        name=str(bundle.path),
        manifest_sha256=bundle.manifest_sha256,
        vocab_size=bundle.vocab,
        drafts_kept=drafts_kept(bundle),
        facts=model_facts(bundle) if any(s.trace for s in sequences) else None,
    )


def _verify_unread(bundle: Bundle) -> None:
    """Check the arrays that no comparison reads, weights above all: a broken bundle is no evidence."""
    for path in bundle.array_paths():
        if not re.match(r"sequences/\d+/(prompt|tokens|ties|(prompt_)?logits/.*|rounds/.*)$", path):
            bundle.verify(path)


def _open(path: str | Path) -> Bundle:
    return _reading(lambda: open_bundle(path))


def _reading(read: Callable[[], _T]) -> _T:
    try:
        return read()
    except InputError as error:
        raise _BrokenBundle(str(error)) from error


def _sequence(bundle: Bundle, sequence: BundleSequence) -> EvidenceSequence:
    names = set(sequence.array_names())
    groups = {
        group: {
            arithmetic: _logits(sequence, f"{group}/{arithmetic}", names, np.dtype(dtype))
            for arithmetic, dtype in ARITHMETICS[bundle.kind].items()
            if names & {f"{group}/{arithmetic}{suffix}" for suffix in ("", "_top_values", "_sha256")}
        }
        for group in ("logits", "prompt_logits")
    }
    return EvidenceSequence(
        id=sequence.id,
        stream=sequence.stream,
        prompt=sequence.prompt,
        tokens=sequence.tokens,
        finish_reason=sequence.finish_reason,
        logits=groups["logits"],
        prompt_logits=groups["prompt_logits"],
        ties=tuple(sequence.array("ties").tolist()) if "ties" in names else (),
        rounds=partial(_rounds, bundle, sequence) if has_rounds(sequence) else None,
        trace=_trace(sequence, names),
    )


def _trace(sequence: BundleSequence, names: set[str]) -> dict[str, Tensor]:
    traced = {}
    for name in execution_order(n.removeprefix("trace/") for n in names if n.startswith("trace/")):
        path = f"trace/{name}"
        rows, digest = partial(_rows, sequence, path), partial(_verified_digest, sequence, path)
        traced[name] = Tensor(*sequence.shape(path), sequence.dtype(path), rows, digest)
    return traced


def _logits(sequence: BundleSequence, base: str, names: set[str], dtype: np.dtype) -> Logits:
    def rows(path: str) -> Callable[[int, int], np.ndarray] | None:
        return partial(_rows, sequence, path) if path in names else None

    top, digests = f"{base}_top_values", f"{base}_sha256"
    richest = next(path for path in (base, top, digests) if path in names)
    shape = sequence.shape(richest)
    return Logits(
        n_rows=shape[0],
        vocab=shape[1] if richest == base else None,
        dtype=dtype,
        rows=rows(base),
        top_ids=rows(f"{base}_top_ids"),
        top_values=rows(top),
        k=shape[1] if richest == top else 0,
        row_sha256=rows(digests),
        top_counts=rows(f"{base}_top_counts"),
        dataset_sha256=partial(_verified_digest, sequence, base) if base in names else None,
        scan=partial(_Scan, sequence, base) if base in names else None,
    )


def _rounds(bundle: Bundle, sequence: BundleSequence) -> Rounds:
    return _reading(lambda: read_rounds(bundle, sequence))


def _rows(sequence: BundleSequence, path: str, lo: int, hi: int) -> np.ndarray:
    return _reading(lambda: sequence.rows(path, lo, hi))


def _verified_digest(sequence: BundleSequence, path: str) -> str:
    return _reading(lambda: sequence.verified_sha256(path))


class _Scan:
    """A scan of a bundle's array, for `Logits.scan`."""

    def __init__(self, sequence: BundleSequence, path: str) -> None:
        self._scan = _reading(lambda: sequence.scan(path))
        self.sha256 = self._scan.sha256

    def rows(self, lo: int, hi: int, memory: np.ndarray | None = None) -> np.ndarray:
        return _reading(lambda: self._scan.rows(lo, hi, memory))

    def feed(self, rows: np.ndarray) -> None:
        self._scan.feed(rows)

    def finish(self) -> None:
        _reading(self._scan.finish)


def check_report_target(path: Path, force: bool, bundles: tuple[Path, ...] = (), option: str = "--output-file") -> None:
    """Say before any work whether what `option` names could be written to `path`. InputError: it exists and `force` is
    off, it is no regular file, it is one of the bundles, its folder is missing or can't be written to."""
    folder = path.parent
    if path.exists() or path.is_symlink():
        if any(path.exists() and bundle.exists() and path.samefile(bundle) for bundle in bundles):
            raise InputError(f"{option} {path} is one of the bundles; name another file")
        if not path.is_file():
            raise InputError(f"{option} {path} is not a regular file; name another")
        if not force:
            raise InputError(f"{option} {path} exists; use --force to overwrite it")
    if not folder.is_dir():
        raise InputError(f"{option} {path}: the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{option} {path}: no permission to write in the folder {folder}")


def write_report(path: Path, report: str | bytes) -> None:
    """Write a report, all of it or nothing. DeviceError (exit 3): it can't be written; no verdict is given then."""
    temporary = path.parent / f".{secrets.token_hex(4)}.kdtr-report.partial"
    try:
        with open(temporary, "xb") as file:
            file.write(report.encode() if isinstance(report, str) else report)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise DeviceError(f"the report could not be written to {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)

"""`kdtr export`: a bundle, or a golden's inputs alone, as a file that other programs read without HDF5.

The same bundle gives the same bytes. An array is read, verified and written in blocks of rows; the file appears under
its name whole or not at all, and only after every digest was right.
"""

import os
import secrets
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kdtr_cli.bundle.manifest import encode_manifest
from kdtr_cli.bundle.reader import Bundle, open_bundle
from kdtr_cli.bundle.target import cannot_write, check_target, publish
from kdtr_cli.errors import InputError
from kdtr_cli.model.safetensors_file import NAMES
from kdtr_cli.model.safetensors_writer import write_tensors
from kdtr_cli.workflows.engine_inputs import write_inputs
from kdtr_cli.workflows.engine_run import EngineRunOptions, make_question
from kdtr_cli.workflows.run import check_golden

__all__ = ["EXPORT_SCHEMA", "FORMATS", "INPUT_FORMATS", "ExportOptions", "ExportSummary", "export_bundle"]

EXPORT_SCHEMA = "kdtr.export/1"

FORMATS = ("safetensors", "npz")
INPUT_FORMATS = ("safetensors", "hdf5")

_SUFFIX = {"safetensors": ".safetensors", "npz": ".npz", "hdf5": ".h5"}

#: .npy has no name for bfloat16 and fp8: bytes of their width.
_OPAQUE = {"bfloat16": "V2", "float8_e4m3fn": "V1"}


@dataclass(frozen=True)
class ExportOptions:
    """The options of ``kdtr export``; ``output`` None: beside the bundle. ``inputs``: what an engine is given, no more;
    ``teacher_force``, ``steps`` and ``model`` go with it."""

    bundle: Path
    output: Path | None = None
    format: str = "safetensors"
    inputs: bool = False
    teacher_force: bool = False
    steps: int | None = None
    model: str | None = None
    force: bool = False


@dataclass(frozen=True)
class ExportSummary:
    """What was written: where, how many arrays and bytes."""

    path: Path
    arrays: int
    bytes: int


def export_bundle(options: ExportOptions) -> ExportSummary:
    """Write the file, or raise and write nothing. InputError: options that don't go together, a broken bundle."""
    allowed = INPUT_FORMATS if options.inputs else FORMATS
    if options.format not in allowed:
        what = "--inputs is" if options.inputs else "a bundle is"
        raise InputError(f"--format {options.format}: {what} written as {' or '.join(allowed)}")
    if not options.inputs and (options.teacher_force or options.steps is not None or options.model is not None):
        raise InputError("--teacher-force, --steps and --model go with --inputs")
    suffix = ".inputs" * options.inputs + _SUFFIX[options.format]
    path = options.bundle.with_suffix(suffix) if options.output is None else options.output
    with open_bundle(options.bundle) as bundle:
        if check_target(path, options.force).exists() and path.samefile(options.bundle):
            raise InputError(f"{path} is the bundle itself; give the file another name")
        if options.inputs:
            return _inputs(bundle, options, path)
        writer = {"safetensors": _write_safetensors, "npz": _write_npz}[options.format]
        return _publish(path, options.force, lambda file: writer(file, bundle), len(bundle.array_paths()))


def _inputs(golden: Bundle, options: ExportOptions, path: Path) -> ExportSummary:
    check_golden(golden)
    asked = EngineRunOptions(
        options.bundle, path, "", options.model, teacher_force=options.teacher_force, steps=options.steps,
        container=options.format,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="kdtr-export-") as private:
        made = write_inputs(make_question(golden, asked, Path(private), with_model=False))
        count = 5 if options.teacher_force else 3
        return _publish(path, options.force, lambda file: _copy(made, file), count)


def _copy(source: Path, file: BinaryIO) -> None:
    with open(source, "rb") as opened:
        while block := opened.read(1 << 20):
            file.write(block)


def _publish(path: Path, force: bool, write: Callable[[BinaryIO], None], arrays: int) -> ExportSummary:
    stem = os.fsdecode(os.fsencode(path.name)[:200])
    temporary = path.parent / f".{stem}.{secrets.token_hex(4)}.partial"
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        publish(temporary, path, force)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return ExportSummary(path, arrays, size)


def _texts(bundle: Bundle) -> dict[str, str]:
    manifest = encode_manifest(bundle.manifest).decode()
    return {"schema": EXPORT_SCHEMA, "kind": bundle.kind, "manifest": manifest, "config": bundle.config_text}


def _blocks(bundle: Bundle, name: str) -> Iterator[np.ndarray]:
    if not bundle.layout(name).shape:
        yield bundle.array(name)
        return
    for _, rows in bundle.blocks(name):
        yield rows


def _write_safetensors(file: BinaryIO, bundle: Bundle) -> None:
    layouts = {name: bundle.layout(name) for name in bundle.array_paths()}
    plan = {n: (NAMES[at.kind.name], at.kind.array.itemsize, at.shape) for n, at in layouts.items()}
    write_tensors(file, _texts(bundle), plan, lambda name: _blocks(bundle, name))


def _write_npz(file: BinaryIO, bundle: Bundle) -> None:
    """As np.savez writes: a zip of .npy files, stored; the texts as arrays of one text."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, text in _texts(bundle).items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.array(text), version=(1, 0), allow_pickle=False)
        for name in bundle.array_paths():
            layout = bundle.layout(name)
            stored = np.dtype(_OPAQUE.get(layout.kind.name, layout.kind.array))
            head = {"descr": np.lib.format.dtype_to_descr(stored), "fortran_order": False, "shape": layout.shape}
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, head)
                for rows in _blocks(bundle, name):
                    member.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))

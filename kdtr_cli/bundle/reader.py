"""Reads a bundle. Opening checks all of its structure; data are read, and checked by digest, when asked for.

    with open_bundle("golden.h5") as bundle:
        for sequence in bundle.sequences:
            sequence.tokens                              # int32 [T]
            sequence.array("logits/exact")               # float32 [T, V], verified
            sequence.rows("logits/exact", 0, 16)         # some rows; the first call verifies the dataset once
            for low, block in sequence.blocks("logits/exact"): ...   # one pass; verified when the loop has ended

Every refusal is an InputError of one line that starts with the path.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

import h5py
import numpy as np
from h5py import h5d, h5o

from kdtr_cli.bundle import guard
from kdtr_cli.bundle.integrity import BLOCK_BYTES, digest_header
from kdtr_cli.bundle.scan import ArrayScan
from kdtr_cli.bundle.schema import (
    Limits,
    SchemaError,
    check_values,
    limits_from_environment,
    sequence_name,
)
from kdtr_cli.bundle.structure import Structure, read_head, read_structure
from kdtr_cli.errors import InputError

__all__ = ["Bundle", "BundleSequence", "open_bundle", "read_manifest"]


def open_bundle(path: str | Path, limits: Limits | None = None) -> "Bundle":
    """Open a bundle and check its structure; use as a context manager. Several processes may read one at once.

    limits: what to accept, by default `schema.DEFAULT_LIMITS` with the environment's override. InputError: not a
    bundle, damaged, or outside the format or the limits.
    """
    path = Path(path)
    limits = limits_from_environment() if limits is None else limits
    file = _open_file(path)
    try:
        with guard.refusing(path):
            return Bundle(path, file, read_structure(file, limits))
    except BaseException:
        file.close()
        raise


def read_manifest(path: str | Path) -> tuple[dict[str, Any], str]:
    """A bundle's manifest and manifest_sha256. Nothing else is checked, so it costs little; errors as `open_bundle`."""
    path = Path(path)
    file = _open_file(path)
    with file, guard.refusing(path):
        _, manifest, sha256 = read_head(file, limits_from_environment())
        return manifest, sha256


def _open_file(path: Path) -> h5py.File:
    if path.name.startswith(".") and path.name.endswith(".partial"):
        raise InputError(f"{path}: what an interrupted kdtr left behind, not a bundle; delete it")
    return guard.open_hdf5(path)


class BundleSequence:
    """One sequence of an open bundle. index: its place. id, stream, finish_reason: as written."""

    def __init__(self, bundle: "Bundle", index: int) -> None:
        entry = bundle.manifest["sequences"][index]
        self.index = index
        self.id: str = entry["id"]
        self.stream: int = entry["stream"]
        self.finish_reason: str = entry["finish_reason"]
        self._bundle = bundle
        self._where = f"sequences/{sequence_name(index)}"

    @cached_property
    def prompt(self) -> np.ndarray:
        """int32 [P], verified."""
        return self.array("prompt")

    @cached_property
    def tokens(self) -> np.ndarray:
        """int32 [T], verified."""
        return self.array("tokens")

    def array_names(self) -> list[str]:
        """The paths of all arrays but prompt and tokens, e.g. 'logits/exact', sorted."""
        return [name for name in self._bundle.names(self.index) if name not in ("prompt", "tokens")]

    def shape(self, path: str) -> tuple[int, ...]:
        """The shape of an array, without reading it."""
        return self._bundle.layout(f"{self._where}/{path}").shape

    def dtype(self, path: str) -> np.dtype:
        """The dtype of an array, without reading it."""
        return self._bundle.layout(f"{self._where}/{path}").kind.array

    def verified_sha256(self, path: str) -> str:
        """The digest of an array (its form: integrity.py), after checking that the data have it; checked once."""
        return self._bundle.verified_sha256(f"{self._where}/{path}")

    def array(self, path: str) -> np.ndarray:
        """A whole array, read-only, verified against its digest. InputError: no such array, or it is damaged."""
        return self._bundle.array(f"{self._where}/{path}")

    def rows(self, path: str, low: int, high: int) -> np.ndarray:
        """Rows low … high (exclusive, within the array), read-only. The first call verifies the whole array once."""
        return self._bundle.rows(f"{self._where}/{path}", low, high)

    def scan(self, path: str) -> ArrayScan:
        """One pass over an array's rows that verifies it on the way and lets several threads read (scan.py)."""
        return self._bundle.scan(f"{self._where}/{path}")

    def blocks(self, path: str, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, np.ndarray]]:
        """All rows in order as (first row, array) pairs of about block_bytes, in one pass over the file.

        The digest is known only at the end: a damaged array raises InputError after the last block, so nothing drawn
        from the blocks may be used before the loop has ended.
        """
        return self._bundle.blocks(f"{self._where}/{path}", block_bytes)


class _Sequences(Sequence[BundleSequence]):
    """The sequences of a bundle, each made when it is asked for."""

    def __init__(self, bundle: "Bundle") -> None:
        self._bundle = bundle

    def __len__(self) -> int:
        return len(self._bundle.manifest["sequences"])

    @overload
    def __getitem__(self, index: int) -> BundleSequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[BundleSequence]: ...
    def __getitem__(self, index: int | slice) -> BundleSequence | list[BundleSequence]:
        if isinstance(index, slice):
            return [BundleSequence(self._bundle, at) for at in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        return BundleSequence(self._bundle, index % len(self))


class Bundle:
    """An open bundle. Made by `open_bundle`; paths are those in the file, e.g. 'sequences/000000/logits/exact'.

    path. kind: 'golden' or 'run'. manifest: dict, not to be changed. manifest_sha256: hexadecimal. config_text: the
    model's config.json. vocab: vocabulary size where config or logits tell. sequences: lazy. file_bytes: file size.
    """

    def __init__(self, path: Path, file: h5py.File, structure: Structure) -> None:
        self.path = path
        self.kind = structure.kind
        self.manifest: dict[str, Any] = structure.manifest
        self.manifest_sha256 = structure.manifest_sha256
        self.config_text = structure.config_text
        self.vocab = structure.vocab
        self.file_bytes: int = file.id.get_filesize()
        self.sequences: Sequence[BundleSequence] = _Sequences(self)
        self._file = file
        self._structure = structure
        self._verified: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Arrays that were read stay valid."""
        self._file.close()

    def weight_names(self) -> list[str]:
        """The names of the embedded weights, sorted; empty where none are embedded."""
        prefix = "model/weights/"
        return [path.removeprefix(prefix) for path in self.array_paths() if path.startswith(prefix)]

    def weight(self, name: str) -> np.ndarray:
        """An embedded weight in its stored dtype, read-only, verified. InputError: no such weight, or damaged."""
        return self.array(f"model/weights/{name}")

    def array_paths(self) -> list[str]:
        """The paths of all arrays, sorted. (Manifest and config are text; opening verifies them.)"""
        return sorted(self._structure.arrays)

    def names(self, index: int) -> list[str]:
        """The paths of all arrays inside the sequence at `index`, relative to it."""
        return self._structure.names[index]

    def layout(self, path: str) -> guard.Layout:
        """Dtype, shape and bytes of an array. InputError: no such array."""
        if path not in self._structure.arrays:
            raise InputError(f"{self.path}: it holds no {path}")
        return self._structure.arrays[path].layout

    def array(self, path: str) -> np.ndarray:
        """A whole array, read-only, verified. InputError: no such array, or it is damaged."""
        layout = self.layout(path)
        with guard.refusing(self.path):
            dataset = self._open(path)
            stored = guard.read_all(dataset, layout)
            digest = hashlib.sha256(digest_header(layout.kind.name, layout.shape))
            digest.update(stored.reshape(-1).view(np.uint8))
            self._accept(path, digest.hexdigest())
            return self._checked(path, guard.as_array(stored, layout))

    def rows(self, path: str, low: int, high: int) -> np.ndarray:
        """Rows low … high (exclusive) of an array, read-only. The first call verifies the whole array once."""
        layout = self.layout(path)
        if not layout.shape or not 0 <= low <= high <= layout.shape[0]:
            raise ValueError(f"rows {low} to {high} of {path}, which has shape {list(layout.shape)}")
        self.verified_sha256(path)
        with guard.refusing(self.path):
            stored = guard.read_rows(self._open(path), layout, low, high)
            return self._checked(path, guard.as_array(stored, layout))

    def blocks(self, path: str, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, np.ndarray]]:
        """All rows in order as (first row, array); see BundleSequence.blocks."""
        layout = self.layout(path)
        if not layout.shape:
            raise ValueError(f"{path} has no rows: it is scalar")
        digest = hashlib.sha256(digest_header(layout.kind.name, layout.shape))
        with guard.refusing(self.path):
            dataset = self._open(path)
        for low, high in guard.row_ranges(layout, block_bytes):
            with guard.refusing(self.path):
                stored = guard.read_rows(dataset, layout, low, high)
                digest.update(stored.reshape(-1).view(np.uint8))
                array = self._checked(path, guard.as_array(stored, layout))
            yield low, array
        with guard.refusing(self.path):
            self._accept(path, digest.hexdigest())

    def scan(self, path: str) -> ArrayScan:
        """See BundleSequence.scan."""
        layout = self.layout(path)
        check = None if path in self._verified else partial(self._accept, path)
        with guard.refusing(self.path):
            return ArrayScan(self.path, self._open(path), path, layout, self._structure.arrays[path].sha256, check)

    def verified_sha256(self, path: str) -> str:
        """See BundleSequence.verified_sha256."""
        if path not in self._verified:
            self.verify(path)
        return self._structure.arrays[path].sha256

    def verify(self, path: str) -> int:
        """Check an array against its digest, in blocks; returns its bytes. InputError: no such array, or damaged."""
        layout = self.layout(path)
        # integers are few, and a damaged one must be called damaged before it is called out of range
        if layout.shape and layout.kind.array.kind != "i":
            for _ in self.blocks(path):
                pass
        else:
            self.array(path)
        return layout.declared

    def _open(self, path: str) -> h5d.DatasetID:
        dataset = h5o.open(self._file.id, path.encode())
        guard.check_inflation(dataset, path, self._structure.arrays[path].layout)
        return dataset

    def _accept(self, path: str, digest: str) -> None:
        if digest != self._structure.arrays[path].sha256:
            raise SchemaError(f"{path} does not match its digest; the file was changed or damaged")
        self._verified.add(path)

    def _checked(self, path: str, array: np.ndarray) -> np.ndarray:
        array.flags.writeable = False
        if path.startswith("sequences/"):
            where, name = path[: len("sequences/000000")], path[len("sequences/000000/") :]
            if name != "ties" or array.shape == self.layout(path).shape:
                check_values(where, name, array, self.vocab, self.layout(f"{where}/tokens").shape[0])
        return array

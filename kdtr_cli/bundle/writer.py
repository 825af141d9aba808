"""Writes a bundle: all of it or nothing, and the same bytes for the same content.

The file grows under a name that `open_bundle` refuses (`.NAME.XXXXXXXX.partial`, in the target's folder). `finish`
syncs it, gives it its final name in one step and syncs the folder. Whatever ends the block earlier removes it: an
exception, Ctrl-C, or SIGTERM, which the command line turns into an exception. After kill -9 the partial file stays
behind, never a half bundle under the final name; nothing deletes such leftovers, as another kdtr may be writing one.

Equal bytes need more than equal data: no time stamps, one format version, fixed-length strings, little-endian
contiguous datasets without filters (compressed bytes depend on the zlib at hand), names in ascending order.
"""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
from h5py import h5f, h5g, h5p

from kdtr_cli.bundle.integrity import array_sha256, stored_view, text_sha256
from kdtr_cli.bundle.manifest import OWN_KEYS, check_manifest, decode_manifest, encode_manifest
from kdtr_cli.bundle.schema import (
    DEFAULT_LIMITS,
    DTYPES,
    KINDS,
    SCHEMA,
    TEXT_DTYPE,
    SchemaError,
    SequenceData,
    check_id,
    check_sequence_meta,
    check_shapes,
    check_values,
    check_weight_name,
    config_vocab,
    dtype_name,
    sequence_name,
)
from kdtr_cli.bundle.target import cannot_write, check_target, publish

__all__ = ["BundleWriter", "check_target"]


class BundleWriter:
    """Writes one bundle; a context manager.

        with BundleWriter(path, kind="golden", force=False) as writer:
            writer.add_config(text)                  # once, first
            writer.add_weight(name, stored_array)    # ascending names; none when not embedded
            writer.add_sequence(sequence)            # in order; each is on disk when the call returns
            digest = writer.finish(manifest)         # returns manifest_sha256

    Entering creates the temporary file, so that a folder that can't be written to is found before the work.
    Content that breaks the format, or a path that can't be used: InputError. A full or broken disk: DeviceError. Wrong
    order of calls: ValueError.
    """

    def __init__(self, path: str | Path, kind: str, force: bool = False) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
        self.path = check_target(path, force)
        self.kind = kind
        self.force = force
        self._temporary: Path | None = None
        self._file: h5py.File | None = None
        self._fd = -1
        self._vocab: int | None = None
        self._has_config = False
        self._last_weight = ""
        self._sequences: list[dict[str, Any]] = []
        self._ids: set[str] = set()
        self._datasets: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        # names may have 255 bytes: leave room for the rest of the temporary name
        stem = os.fsdecode(os.fsencode(self.path.name)[:200])
        self._temporary = self.path.parent / f".{stem}.{secrets.token_hex(4)}.partial"
        try:
            with self._writing():
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                try:
                    self._fd = os.open(self._temporary, flags, 0o666)
                except FileExistsError:
                    self._temporary = None  # somebody else's, which must not be removed
                    raise
                self._file = _create_hdf5(self._temporary)
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandon()

    def add_config(self, text: str) -> None:
        """Store the model's config.json as read."""
        file = self._open_file()
        if self._has_config:
            raise ValueError("the config is already in the bundle")
        data = _encode_text(text, DEFAULT_LIMITS.config_bytes, "model/config")
        self._vocab = config_vocab(text)
        with self._writing():
            _write_text(file, "model/config", data)
        self._datasets["model/config"] = {"sha256": text_sha256(data), "dtype": TEXT_DTYPE, "shape": [len(data)]}
        self._has_config = True

    def add_weight(self, name: str, array: np.ndarray) -> None:
        """Store one weight in its stored dtype, any shape. Names must ascend: their order is part of the bytes."""
        self._open_file()
        check_weight_name(name)
        if name <= self._last_weight or self._sequences or not self._has_config:
            raise ValueError("add the config first, then weights by ascending name, then sequences")
        self._write_array(f"model/weights/{name}", array)
        self._last_weight = name

    def add_sequence(self, sequence: SequenceData) -> None:
        """Check and store one sequence; its index is the number of those before it."""
        file = self._open_file()
        if not self._has_config:
            raise ValueError("add the config first, then weights by ascending name, then sequences")
        where = f"sequences/{sequence_name(len(self._sequences))}"
        meta = {
            "id": sequence.id,
            "stream": int(sequence.stream) if isinstance(sequence.stream, np.integer) else sequence.stream,
            "finish_reason": sequence.finish_reason,
        }
        check_id(meta["id"])
        check_sequence_meta(where, meta["stream"], meta["finish_reason"])
        if meta["id"] in self._ids:
            raise SchemaError(f"{where}: the id {meta['id']!r} is already in the bundle")
        if "prompt" in sequence.arrays or "tokens" in sequence.arrays:
            raise ValueError("prompt and tokens are fields of SequenceData, not entries of arrays")
        arrays = {"prompt": sequence.prompt, "tokens": sequence.tokens, **sequence.arrays}
        shapes = {}
        for path, array in arrays.items():
            shapes[path] = (_name_dtype(f"{where}/{path}", array), array.shape)
        self._vocab = check_shapes(self.kind, where, shapes, self._vocab)
        for path, array in arrays.items():
            check_values(where, path, array, self._vocab, sequence.tokens.shape[0])
        with self._writing():
            group = _require_group(file, where)
            _write_attribute(group, "finish_reason", meta["finish_reason"])
            _write_attribute(group, "id", meta["id"])
            group.attrs.create("stream", np.int64(meta["stream"]), dtype="<i8")
        for path in sorted(arrays):
            self._write_array(f"{where}/{path}", arrays[path])
        self._sequences.append(meta)
        self._ids.add(meta["id"])

    def finish(self, manifest: Mapping[str, Any]) -> str:
        """Add the manifest, sync the file, give it its final name. Returns manifest_sha256 (hexadecimal).

        The writer adds schema, kind, sequences and datasets. InputError: no sequence, an entry that breaks the
        format, or a file that has appeared under the final name meanwhile (without force). DeviceError: a full disk.
        """
        file = self._open_file()
        for key in OWN_KEYS:
            if key in manifest:
                raise ValueError(f"the writer itself adds {key!r} to the manifest")
        if not self._has_config:
            raise ValueError("a bundle needs the model's config")
        if not self._sequences:
            raise SchemaError(f"{self.path}: a bundle without sequences says nothing; none was written")
        data = encode_manifest(
            {
                **manifest,
                "schema": SCHEMA,
                "kind": self.kind,
                "sequences": self._sequences,
                "datasets": self._datasets,
            }
        )
        if len(data) > DEFAULT_LIMITS.manifest_bytes:
            raise SchemaError(f"the manifest has {len(data)} bytes; {DEFAULT_LIMITS.manifest_bytes} are allowed")
        check_manifest(decode_manifest(data))
        digest = hashlib.sha256(data).hexdigest()
        with self._writing():
            _write_text(file, "manifest", data)
            _write_attribute(file, "kdtr_schema", SCHEMA)
            _write_attribute(file, "kind", self.kind)
            _write_attribute(file, "manifest_sha256", digest)
            # flush first: it can fail on a full disk and be told; a close that fails crashes libhdf5
            file.flush()
            file.close()
            self._file = None
            os.fsync(self._fd)
            publish(self._temporary, self.path, self.force)
            self._temporary = None
        return digest

    def _abandon(self) -> None:
        """Close and remove what is open and unfinished. Never raises but for an interrupt."""
        file, self._file = self._file, None
        temporary, self._temporary = self._temporary, None
        fd, self._fd = self._fd, -1
        try:
            if temporary is not None:
                # first of all, so that a second Ctrl-C in the middle of the rest leaves nothing behind
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
        finally:
            if file is not None:
                with contextlib.suppress(OSError, RuntimeError, ValueError):
                    _divert(file)
                    file.close()
            if fd >= 0:
                os.close(fd)

    def _open_file(self) -> h5py.File:
        if self._file is None:
            raise ValueError("the writer is not open: use it in a with block, before finish")
        return self._file

    def _write_array(self, path: str, array: np.ndarray) -> None:
        name = _name_dtype(path, array)
        stored = stored_view(array)
        with self._writing():
            parent, _, last = path.rpartition("/")
            group = _require_group(self._open_file(), parent)
            # contiguous and unfiltered on purpose: docs/bundle.md has the measurements
            dataset = group.create_dataset(last, data=stored, dtype=DTYPES[name].stored, track_times=False)
            # small arrays wait in a buffer that h5py would flush, ignoring a full disk, when the object ends
            dataset.flush()
            if DTYPES[name].marked:
                _write_attribute(dataset, "kdtr_dtype", name)
        self._datasets[path] = {"sha256": array_sha256(array), "dtype": name, "shape": list(array.shape)}

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns what h5py and the system raise into one line."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise cannot_write(self.path, error) from error


def _divert(file: h5py.File) -> None:
    """Let HDF5 write what it still holds to nowhere.

    Closing flushes, and so does the end of each h5py object. Where the disk is full that fails: h5py then complains
    on standard error, and libhdf5 crashes at exit over the file that it could not close.
    """
    sink = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.dup2(sink, file.id.get_vfd_handle(), inheritable=False)
    finally:
        os.close(sink)


def _name_dtype(where: str, array: np.ndarray) -> str:
    if not isinstance(array, np.ndarray):
        raise SchemaError(f"{where} is a {type(array).__name__}, not an array")
    try:
        return dtype_name(array)
    except SchemaError as error:
        raise SchemaError(f"{where}: {error}") from None


def _encode_text(text: str, limit: int, where: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise SchemaError(f"{where} is not valid Unicode: {error.reason}") from None
    if not data or b"\0" in data or len(data) > limit:
        raise SchemaError(f"{where} must be 1 to {limit} bytes of text without NUL")
    return data


def _create_hdf5(path: Path) -> h5py.File:
    create = h5p.create(h5p.FILE_CREATE)
    create.set_obj_track_times(False)  # of the root group
    access = h5p.create(h5p.FILE_ACCESS)
    # HDF5 1.8 files: every libhdf5 since 2008 reads them, and their object headers carry checksums
    access.set_libver_bounds(h5f.LIBVER_V18, h5f.LIBVER_V18)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_file_locking(False, True)
    return h5py.File(h5f.create(os.fsencode(path), h5f.ACC_TRUNC, create, access))


def _require_group(file: h5py.File, path: str) -> h5py.Group:
    """The group at a path, made where need be. Not by h5py's own means: older versions store the time in groups."""
    group: h5py.Group = file
    for name in filter(None, path.split("/")):
        if name in group:
            group = group[name]
        else:
            plan = h5p.create(h5p.GROUP_CREATE)
            plan.set_obj_track_times(False)
            group = h5py.Group(h5g.create(group.id, name.encode(), gcpl=plan))
    return group


def _write_text(file: h5py.File, path: str, data: bytes) -> None:
    dtype = h5py.string_dtype("utf-8", len(data))
    parent, _, last = path.rpartition("/")
    group = _require_group(file, parent)
    dataset = group.create_dataset(last, shape=(), data=np.array(data, dtype=dtype), dtype=dtype, track_times=False)
    dataset.flush()


def _write_attribute(target: h5py.HLObject, name: str, text: str) -> None:
    # fixed length: variable-length strings live in a heap, which costs 4 KiB and a parser in every reader
    data = text.encode()
    dtype = h5py.string_dtype("utf-8", len(data))
    target.attrs.create(name, np.array(data, dtype=dtype), dtype=dtype)

"""What opening a bundle checks: every object and attribute against the format, and all of it against the manifest.

One pass over the objects, no array data. Each object is opened through a hard link and only once, so cycles, aliases
and links out of the file end here.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
from h5py import h5g, h5o

from kdtr_cli.bundle import guard
from kdtr_cli.bundle.integrity import text_sha256
from kdtr_cli.bundle.manifest import check_manifest, decode_manifest
from kdtr_cli.bundle.schema import (
    KINDS,
    MAX_ID_BYTES,
    SCHEMA,
    TEXT_DTYPE,
    Limits,
    SchemaError,
    check_shapes,
    check_weight_name,
    config_vocab,
    sequence_name,
)

__all__ = ["StoredArray", "Structure", "read_head", "read_structure"]

_NONE: frozenset[str] = frozenset()
_ROOT_ATTRIBUTES = frozenset({"kdtr_schema", "kind", "manifest_sha256"})
_SEQUENCE_ATTRIBUTES = frozenset({"id", "stream", "finish_reason"})


@dataclass(frozen=True)
class StoredArray:
    """A dataset that passed the checks; sha256 as the manifest gives it."""

    layout: guard.Layout
    sha256: str


@dataclass(frozen=True)
class Structure:
    """A bundle without its data. arrays: path in the file → StoredArray. names: per sequence, the paths inside it."""

    kind: str
    manifest: dict[str, Any]
    manifest_sha256: str
    config_text: str
    vocab: int | None
    arrays: dict[str, StoredArray]
    names: list[list[str]]


def read_structure(file: h5py.File, limits: Limits) -> Structure:
    """Check a file from its root down. SchemaError for what breaks the format; whatever h5py raises for damage."""
    root = h5g.open(file.id, b"/")
    kind, manifest, manifest_sha256 = read_head(file, limits)
    walk = _Walk(file.id.get_filesize(), limits, manifest, {h5o.get_info(root).addr: "/"})
    text, names = walk.run(root)
    vocab = config_vocab(text)
    for index, inside in enumerate(names):
        where = f"sequences/{sequence_name(index)}"
        shapes = {}
        for name in inside:
            layout = walk.arrays[f"{where}/{name}"].layout
            shapes[name] = (layout.kind.name, layout.shape)
        vocab = check_shapes(kind, where, shapes, vocab)
    return Structure(kind, manifest, manifest_sha256, text, vocab, walk.arrays, names)


def read_head(file: h5py.File, limits: Limits) -> tuple[str, dict[str, Any], str]:
    """Kind, manifest and its digest, without a look at anything else in the file; errors as `read_structure`."""
    root = h5g.open(file.id, b"/")
    kind, manifest_sha256 = _read_head(root)
    return kind, _read_manifest(root, kind, manifest_sha256, limits), manifest_sha256


def _read_head(root: h5g.GroupID) -> tuple[str, str]:
    if not h5py.h5a.exists(root, b"kdtr_schema"):
        raise SchemaError("an HDF5 file, but not a bundle: it lacks the attribute 'kdtr_schema'")
    schema = guard.attribute_text(root, "", "kdtr_schema", 64)
    if schema != SCHEMA:
        family, _, version = schema.partition("/")
        if family == "kdtr" and version.isdecimal() and int(version) > int(SCHEMA.partition("/")[2]):
            raise SchemaError(f"written as {schema}, newer than {SCHEMA}; upgrade kdtr to read it")
        raise SchemaError(f"its schema is {schema!r}; this kdtr reads {SCHEMA}")
    guard.check_attributes(root, "", _ROOT_ATTRIBUTES)
    kind = guard.attribute_text(root, "", "kind", 64)
    if kind not in KINDS:
        raise SchemaError(f"its kind is {kind!r}, not {' or '.join(KINDS)}")
    return kind, guard.attribute_text(root, "", "manifest_sha256", 64)


def _read_manifest(root: h5g.GroupID, kind: str, expected: str, limits: Limits) -> dict[str, Any]:
    # listing also classifies: only hard links are left to open
    if "manifest" not in guard.list_links(root, "", 16):
        raise SchemaError("manifest is missing")
    data = guard.read_text(guard.open_dataset(root, "manifest", "manifest", {}), "manifest", limits.manifest_bytes)
    if hashlib.sha256(data).hexdigest() != expected:
        raise SchemaError("the manifest does not match manifest_sha256; the file was changed or damaged")
    manifest = decode_manifest(data)
    check_manifest(manifest)
    if manifest["kind"] != kind:
        raise SchemaError(f"the attribute 'kind' says {kind}, the manifest {manifest['kind']}")
    return manifest


class _Walk:
    """One pass over all objects: what was seen so far, and the totals."""

    def __init__(self, file_bytes: int, limits: Limits, manifest: dict[str, Any], seen: dict[int, str]) -> None:
        self.file_bytes = file_bytes
        self.limits = limits
        self.entries: dict[str, Any] = manifest["datasets"]
        self.sequences: list[dict[str, Any]] = manifest["sequences"]
        self.seen = seen
        self.arrays: dict[str, StoredArray] = {}
        self.declared = 0
        self.stored = 0

    def run(self, root: h5g.GroupID) -> tuple[str, list[list[str]]]:
        """Returns the config's text, and for each sequence the paths inside it."""
        _expect(self._links(root, ""), "", required=("manifest", "model", "sequences"))
        guard.check_attributes(guard.open_dataset(root, "manifest", "manifest", self.seen), "manifest", _NONE)
        model = self._group(root, "model", "model", _NONE)
        inside = self._links(model, "model")
        _expect(inside, "model", required=("config",), optional=("weights",))
        config = guard.open_dataset(model, "config", "model/config", self.seen)
        guard.check_attributes(config, "model/config", _NONE)
        text = self._config(guard.read_text(config, "model/config", self.limits.config_bytes))
        if "weights" in inside:
            weights = self._group(model, "weights", "model/weights", _NONE)
            for name in self._links(weights, "model/weights"):
                check_weight_name(name)
                self._array(weights, name, f"model/weights/{name}")
        names = list(self._sequences(self._group(root, "sequences", "sequences", _NONE)))
        missing = self.entries.keys() - self.arrays.keys() - {"model/config"}
        if missing:
            raise SchemaError(f"{min(missing)} stands in the manifest but not in the file")
        return text, names

    def _sequences(self, group: h5g.GroupID) -> Iterator[list[str]]:
        links = self._links(group, "sequences")
        if len(links) != len(self.sequences):
            raise SchemaError(f"the file has {len(links)} sequences, its manifest {len(self.sequences)}")
        for index, name in enumerate(links):
            where = f"sequences/{name}"
            if name != sequence_name(index):
                raise SchemaError(f"{where} stands where sequences/{sequence_name(index)} belongs")
            sequence = self._group(group, name, where, _SEQUENCE_ATTRIBUTES)
            entry = self.sequences[index]
            found = {
                "id": guard.attribute_text(sequence, where, "id", MAX_ID_BYTES),
                "stream": guard.attribute_int(sequence, where, "stream"),
                "finish_reason": guard.attribute_text(sequence, where, "finish_reason", 64),
            }
            for key, value in found.items():
                if value != entry[key]:
                    raise SchemaError(f"{where}: {key} is {value!r}, but {entry[key]!r} in the manifest")
            inside: list[str] = []
            self._inside(sequence, where, "", inside)
            yield inside

    def _inside(self, group: h5g.GroupID, where: str, prefix: str, found: list[str]) -> None:
        """Every dataset below a sequence; groups are told from datasets by the manifest, not by the file."""
        if prefix.count("/") >= self.limits.depth:
            raise SchemaError(f"{where}/{prefix} is nested deeper than {self.limits.depth} levels")
        links = self._links(group, f"{where}/{prefix}".rstrip("/"))
        if not links:
            raise SchemaError(f"{where}/{prefix}".rstrip("/") + " is an empty group")
        for name in links:
            path = f"{prefix}{name}"
            if f"{where}/{path}" in self.entries:
                self._array(group, name, f"{where}/{path}")
                found.append(path)
            else:
                self._inside(self._group(group, name, f"{where}/{path}", _NONE), where, f"{path}/", found)

    def _links(self, group: h5g.GroupID, where: str) -> list[str]:
        return guard.list_links(group, where, self.limits.objects - len(self.seen))

    def _group(self, parent: h5g.GroupID, name: str, where: str, attributes: frozenset[str]) -> h5g.GroupID:
        group = guard.open_group(parent, name, where, self.seen)
        guard.check_attributes(group, where, attributes)
        return group

    def _array(self, parent: h5g.GroupID, name: str, where: str) -> None:
        entry = self.entries.get(where)
        if entry is None or entry["dtype"] == TEXT_DTYPE:
            raise SchemaError(f"{where} is not an array of the manifest")
        dataset = guard.open_dataset(parent, name, where, self.seen)
        layout = guard.inspect_dataset(dataset, where, self.limits, self.file_bytes, entry["dtype"])
        if list(layout.shape) != entry["shape"]:
            raise SchemaError(f"{where} has shape {list(layout.shape)}, but {entry['shape']} in the manifest")
        self.declared += layout.declared
        self.stored += layout.stored
        if self.declared > self.limits.total_bytes:
            raise SchemaError(f"its arrays declare more than {self.limits.total_bytes} bytes; {self.limits.remedy}")
        if self.stored > self.file_bytes:
            raise SchemaError("its arrays overlap: they store more bytes than the file has")
        self.arrays[where] = StoredArray(layout, entry["sha256"])

    def _config(self, data: bytes) -> str:
        entry = self.entries.get("model/config")
        if entry != {"dtype": TEXT_DTYPE, "shape": [len(data)], "sha256": text_sha256(data)}:
            raise SchemaError("model/config does not match its digest; the file was changed or damaged")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise SchemaError("model/config is not UTF-8") from None


def _expect(names: Sequence[str], where: str, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    prefix = f"{where}/" if where else ""
    for name in names:
        if name not in required and name not in optional:
            raise SchemaError(f"{prefix}{name} is unknown to {SCHEMA}")
    for name in required:
        if name not in names:
            raise SchemaError(f"{prefix}{name} is missing")

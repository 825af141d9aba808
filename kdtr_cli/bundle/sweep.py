"""A sweep: many prompts as a directory of ordinary bundles, one a shard, and `sweep.json`, which says what belongs.

    DIR/sweep.json            written first: the plan
    DIR/shard-000000.h5 …     complete bundles, in the order of their sequences

`sweep.json` never changes while shards are made. A shard that exists is finished (a bundle appears whole or not at
all), and its own manifest says whether it is the one that the plan wants: no record has to be kept in step with it.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtr_cli.bundle.manifest import OWN_KEYS, decode_manifest, encode_manifest
from kdtr_cli.bundle.reader import read_manifest
from kdtr_cli.bundle.schema import KINDS, MAX_SEQUENCES, SchemaError, sequence_name
from kdtr_cli.bundle.target import cannot_write, sync_folder
from kdtr_cli.errors import InputError

__all__ = ["SWEEP_FILE", "SWEEP_SCHEMA", "Shard", "Sweep", "check_shard", "cut", "difference"]
__all__ += ["is_own", "is_sweep", "is_temporary", "prompts_sha256", "read_sweep", "shared_manifest", "write_sweep"]

SWEEP_FILE = "sweep.json"
SWEEP_SCHEMA = "kdtr.sweep/1"

_FILE_LIMIT = 64 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHARD = r"shard-\d{6}\.h5"
_OWN = re.compile(rf"{_SHARD}|{re.escape(SWEEP_FILE)}")
_TEMPORARY = re.compile(rf"\.({_SHARD}|{re.escape(SWEEP_FILE)})\.[0-9a-f]{{8}}\.partial")


@dataclass(frozen=True)
class Shard:
    """Sequences ``first`` … ``first + count - 1`` of the sweep; ``index`` is its number.

    prompts_sha256: of the ids, streams and prompts (`prompts_sha256`). golden: in a sweep of runs, the manifest_sha256
    of the golden shard that the run is of; else None.
    """

    index: int
    first: int
    count: int
    prompts_sha256: str
    golden: str | None = None

    @property
    def name(self) -> str:
        """Its file name."""
        return f"shard-{self.index:06d}.h5"


@dataclass(frozen=True)
class Sweep:
    """The plan. kind: 'golden' or 'run'. manifest: what the manifests of all shards have in common, in the bundle's own
    form; its ``model.embedded`` says whether shard 0 holds the weights (the others never do)."""

    kind: str
    manifest: Mapping[str, Any]
    shards: tuple[Shard, ...]

    @property
    def sequences(self) -> int:
        """Of all shards together."""
        return sum(shard.count for shard in self.shards)

    def text(self) -> str:
        """`sweep.json`: the same text for the same plan."""
        document = {
            "schema": SWEEP_SCHEMA,
            "kind": self.kind,
            "manifest": json.loads(encode_manifest(self.manifest)),
            "sequences": self.sequences,
            "shards": [_entry(shard) for shard in self.shards],
        }
        return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"

    def sha256(self) -> str:
        """The digest of `text`, which names the plan."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def expected(self, shard: Shard) -> dict[str, Any]:
        """What `shared_manifest` of this shard's manifest must be."""
        manifest = json.loads(encode_manifest(self.manifest))
        manifest["model"]["embedded"] = bool(manifest["model"].get("embedded")) and shard.index == 0
        return manifest


def _entry(shard: Shard) -> dict[str, Any]:
    entry = {"first": shard.first, "count": shard.count, "prompts_sha256": shard.prompts_sha256}
    return entry if shard.golden is None else {**entry, "golden_manifest_sha256": shard.golden}


def cut(prompts: Iterable[tuple[str, int, str]], size: int) -> tuple[Shard, ...]:
    """Shards of ``size`` sequences, the last one of what is left, from each prompt's (id, stream, digest)."""
    shards: list[Shard] = []
    part: list[tuple[str, int, str]] = []
    first = 0
    for prompt in prompts:
        part.append(prompt)
        if len(part) == size:
            shards.append(Shard(len(shards), first, size, prompts_sha256(part)))
            first, part = first + size, []
    if part:
        shards.append(Shard(len(shards), first, len(part), prompts_sha256(part)))
    return tuple(shards)


def prompts_sha256(prompts: Iterable[tuple[str, int, str]]) -> str:
    """SHA-256 over one line of JSON for each prompt: its id, its stream, the digest of its token ids as a dataset."""
    digest = hashlib.sha256()
    for name, stream, sha256 in prompts:
        digest.update(json.dumps([name, stream, sha256], ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def shared_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A bundle's manifest without what belongs to that one bundle: sequences, datasets, what was measured on them, the
    golden it was made from, what its decoding cost."""
    shared = {key: value for key, value in manifest.items() if key not in (*OWN_KEYS, "noise_floor")}
    if isinstance(shared.get("run"), Mapping):
        own = ("golden_manifest_sha256", "statistics")
        shared["run"] = {key: value for key, value in shared["run"].items() if key not in own}
    return shared


def difference(found: object, wanted: object, where: str = "") -> str | None:
    """The first place where two JSON values differ, with both values: 'decoding.steps is 8, not 16'; None: equal."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*found, *wanted}):
            place = f"{where}.{key}" if where else str(key)
            if key not in found or key not in wanted:
                return f"{place} is {'missing' if key in wanted else 'there, and should not be'}"
            if (said := difference(found[key], wanted[key], place)) is not None:
                return said
        return None
    if type(found) is type(wanted) and found == wanted:
        return None
    return f"{where} is {_short(found)}, not {_short(wanted)}"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:24]}…"


def is_sweep(path: str | Path) -> bool:
    """Whether a path names a sweep: it ends in a slash or is a directory."""
    return str(path).endswith(os.sep) or Path(path).is_dir()


def is_own(name: str) -> bool:
    """Whether a file of this name in a sweep's directory is kdtr's own."""
    return _OWN.fullmatch(name) is not None or is_temporary(name)


def is_temporary(name: str) -> bool:
    """Whether it is what a killed kdtr left behind."""
    return _TEMPORARY.fullmatch(name) is not None


def read_sweep(folder: str | Path) -> Sweep:
    """The plan of a sweep's directory. InputError of one line: no sweep there, or a damaged sweep.json."""
    path = Path(folder) / SWEEP_FILE
    try:
        with open(path, "rb") as file:
            data = file.read(_FILE_LIMIT + 1)
    except FileNotFoundError:
        what = "no sweep in it (it has no sweep.json)" if Path(folder).is_dir() else "no such directory"
        raise InputError(f"{folder}: {what}; make one with 'kdtr golden … -o {folder}/'") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if len(data) > _FILE_LIMIT:
        raise InputError(f"{path}: larger than {_FILE_LIMIT} bytes")
    try:
        return _parse(decode_manifest(data))
    except SchemaError as error:
        raise InputError(f"{path}: damaged: {str(error).replace('the manifest', 'it')}") from None


def _parse(document: dict[str, Any]) -> Sweep:
    if document.get("schema") != SWEEP_SCHEMA:
        raise SchemaError(f"its schema is {document.get('schema')!r}; this kdtr reads {SWEEP_SCHEMA}")
    kind, manifest, entries = document.get("kind"), document.get("manifest"), document.get("shards")
    if kind not in KINDS:
        raise SchemaError(f"its kind is {kind!r}")
    if not isinstance(manifest, dict) or not isinstance(manifest.get("model"), dict):
        raise SchemaError("it lacks the shards' common manifest")
    if not isinstance(entries, list) or not entries:
        raise SchemaError("it lists no shards")
    shards, first = [], 0
    for index, entry in enumerate(entries):
        shard = _shard(index, entry, kind)
        if shard.first != first:
            raise SchemaError(f"shard {index} begins at sequence {shard.first}, not {first}")
        shards.append(shard)
        first += shard.count
    if document.get("sequences") != first or first > MAX_SEQUENCES:
        raise SchemaError(f"its shards hold {first} sequences, and it says {document.get('sequences')!r}")
    return Sweep(kind, manifest, tuple(shards))


def _shard(index: int, entry: object, kind: str) -> Shard:
    keys = {"first", "count", "prompts_sha256"} | ({"golden_manifest_sha256"} if kind == "run" else set())
    if not isinstance(entry, dict) or set(entry) != keys:
        raise SchemaError(f"shard {index} must have {', '.join(sorted(keys))}")
    numbers = [entry["first"], entry["count"]]
    if any(isinstance(n, bool) or not isinstance(n, int) for n in numbers) or numbers[0] < 0 or numbers[1] < 1:
        raise SchemaError(f"shard {index} has no proper first and count")
    for key in keys - {"first", "count"}:
        if not isinstance(entry[key], str) or not _SHA256.fullmatch(entry[key]):
            raise SchemaError(f"shard {index}: {key} is no SHA-256")
    return Shard(index, *numbers, entry["prompts_sha256"], entry.get("golden_manifest_sha256"))


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Write sweep.json, all of it or nothing, over one that is there."""
    path = folder / SWEEP_FILE
    temporary = folder / f".{SWEEP_FILE}.{secrets.token_hex(4)}.partial"
    try:
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.write(sweep.text())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(folder)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_shard(folder: Path, sweep: Sweep, shard: Shard) -> dict[str, Any] | None:
    """The manifest of a finished shard, from a look at it alone (no data are read); None: it is not there yet.

    InputError: it is damaged, or a bundle that is not the one that the plan wants.
    """
    path = folder / shard.name
    if not path.exists() and not path.is_symlink():
        return None
    manifest, sha256 = read_manifest(path)
    if manifest["kind"] != sweep.kind:
        raise InputError(f"{path} is not of this sweep: it is a {manifest['kind']}, not a {sweep.kind}")
    if (said := difference(shared_manifest(manifest), sweep.expected(shard))) is not None:
        raise InputError(f"{path} is not of this sweep: {said}")
    held = []
    for index, entry in enumerate(manifest["sequences"]):
        prompt = manifest["datasets"].get(f"sequences/{sequence_name(index)}/prompt", {"sha256": ""})
        held.append((entry["id"], entry["stream"], prompt["sha256"]))
    if len(held) != shard.count:
        raise InputError(f"{path} is not of this sweep: it has {len(held)} sequences, not {shard.count}")
    if prompts_sha256(held) != shard.prompts_sha256:
        raise InputError(f"{path} is not of this sweep: it has other prompts")
    if shard.golden is not None and manifest.get("run", {}).get("golden_manifest_sha256") != shard.golden:
        raise InputError(f"{path} is not of this sweep: it was run from another golden")
    return manifest | {"manifest_sha256": sha256}

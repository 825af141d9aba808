"""The manifest: strict JSON in, canonical JSON out, and what its entries must look like."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from kdtr_cli.bundle.schema import (
    DTYPES,
    KINDS,
    SCHEMA,
    TEXT_DTYPE,
    SchemaError,
    check_id,
    check_sequence_meta,
    sequence_name,
)

__all__ = ["OWN_KEYS", "check_manifest", "decode_manifest", "encode_manifest"]

#: Keys that the writer adds itself.
OWN_KEYS = ("datasets", "kind", "schema", "sequences")

_MAX_DEPTH = 16
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_objects(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(item, dict) for item in value.values())


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(_is_int(item) for item in value)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_digests(value: object) -> bool:
    return isinstance(value, dict) and all(_is_sha256(item) for item in value.values())


# What is known of the keys: a wrong type here would otherwise surface far away, as a crash in a comparison.
# A value may be null only where the last column says so (a foreign engine can't know every digest).
_KEYS: tuple[tuple[str, Any, str, bool, bool], ...] = (
    # path, test, what it must be, required, may be null
    ("producer", _is_object, "an object", True, False),
    ("producer/name", _is_text, "text", True, False),
    ("producer/version", _is_text, "text", True, False),
    ("contract_version", _is_int, "an integer", True, False),
    ("model", _is_object, "an object", True, False),
    ("model/config_sha256", _is_sha256, "64 lower-case hexadecimal digits", True, False),
    ("model/weights", _is_digests, "an object of SHA-256 digests", False, True),
    ("model/weights_used_sha256", _is_sha256, "64 lower-case hexadecimal digits", False, True),
    ("model/rope_table_sha256", _is_sha256, "64 lower-case hexadecimal digits", False, True),
    ("model/embedded", _is_bool, "true or false", False, False),
    ("choices", _is_object, "an object", True, False),
    ("decoding", _is_object, "an object", True, False),
    ("decoding/mode", _is_text, "text", True, False),
    ("decoding/temperature", _is_number, "a finite number", True, False),
    ("decoding/seed", _is_int, "an integer", True, False),
    ("decoding/steps", _is_int, "an integer", True, False),
    ("decoding/ignore_eos", _is_bool, "true or false", True, False),
    ("decoding/stop_ids", _is_ids, "a list of integers", True, False),
    ("decoding/teacher_forced", _is_bool, "true or false", True, False),
    ("drafting", _is_object, "an object", False, False),
    ("drafting/drafter", _is_text, "text", False, False),
    ("drafting/budget", _is_int, "an integer", False, False),
    ("drafting/block_size", _is_int, "an integer", False, False),
    ("drafting/mode", _is_text, "text", False, False),
    ("drafting/drafter_sha256", _is_sha256, "64 lower-case hexadecimal digits", False, True),
    ("drafting/horizon", _is_int, "an integer", False, False),
    ("arithmetic", _is_texts, "a list of names", True, False),
    ("noise_floor", _is_objects, "an object of objects", False, False),
    ("tier", _is_text, "text", True, False),
    ("logits", _is_text, "text", True, False),
    ("score", _is_bool, "true or false", False, False),
    ("trace", _is_text, "text", False, False),
    ("values", lambda value: value in ("logits", "logprobs"), "logits or logprobs", False, False),
    ("run", _is_object, "an object", False, False),
    ("run/device", _is_text, "text", False, True),
    ("run/driver", _is_text, "text", False, True),
    ("run/compiler", _is_text, "text", False, True),
    ("run/kernels_sha256", _is_sha256, "64 lower-case hexadecimal digits", False, True),
    ("run/batch", _is_int, "an integer", False, True),
    ("run/golden_manifest_sha256", _is_sha256, "64 lower-case hexadecimal digits", False, True),
    ("schema", _is_text, "text", True, False),
    ("kind", _is_text, "text", True, False),
    ("sequences", lambda value: isinstance(value, list), "a list", True, False),
    ("datasets", _is_object, "an object", True, False),
)


def encode_manifest(manifest: Mapping[str, Any]) -> bytes:
    """UTF-8 JSON: keys sorted, no white space, no NaN or infinity; the same bytes for equal content.

    NumPy scalars become plain numbers. TypeError or ValueError where a value is no JSON.
    """
    text = json.dumps(
        manifest, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain_number
    )
    return text.encode()


def _plain_number(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a manifest can't hold a {type(value).__name__}")


def decode_manifest(data: bytes) -> dict[str, Any]:
    """Parse a manifest strictly: an object, UTF-8, no duplicate keys, finite numbers, at most 16 levels."""
    try:
        manifest = json.loads(
            data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except SchemaError:
        raise
    except RecursionError:
        raise SchemaError("the manifest is nested too deeply") from None
    except ValueError as error:
        raise SchemaError(f"the manifest is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(manifest, dict):
        raise SchemaError("the manifest is not a JSON object")
    level: list[Any] = [manifest]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return manifest
    raise SchemaError(f"the manifest is nested deeper than {_MAX_DEPTH} levels")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise SchemaError(f"the manifest has the key {twice!r} twice")
    return result


def _no_constant(text: str) -> float:
    raise SchemaError(f"the manifest holds {text}, which is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise SchemaError(f"the manifest holds {text}, which no float64 can")
    return value


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Check the entries that readers rely on; other keys pass: later versions add some. SchemaError names the key."""
    schema = manifest.get("schema")
    if schema != SCHEMA:
        raise SchemaError(f"the manifest's schema is {schema!r}, not {SCHEMA!r}")
    for path, test, wanted, required, nullable in _KEYS:
        value, present = _look_up(manifest, path)
        if not present:
            if required:
                raise SchemaError(f"the manifest lacks {path!r}")
        elif not (test(value) or (nullable and value is None)):
            raise SchemaError(f"the manifest's {path!r} must be {wanted}")
    if manifest["kind"] not in KINDS:
        raise SchemaError(f"the manifest's kind {manifest['kind']!r} is not one of {', '.join(KINDS)}")
    if not re.fullmatch(r"full|digest|none|top:[1-9][0-9]{0,8}", manifest["logits"]):
        raise SchemaError(f"the manifest's logits {manifest['logits']!r} is not full, top:K, digest or none")
    _check_sequences(manifest["sequences"])
    for path, entry in manifest["datasets"].items():
        _check_entry(path, entry)


def _look_up(manifest: Mapping[str, Any], path: str) -> tuple[Any, bool]:
    node: Any = manifest
    for key in path.split("/"):
        if not isinstance(node, Mapping) or key not in node:
            return None, False
        node = node[key]
    return node, True


def _check_sequences(entries: list[Any]) -> None:
    seen: dict[str, str] = {}
    for index, entry in enumerate(entries):
        where = f"sequences/{sequence_name(index)}"
        if not isinstance(entry, dict) or set(entry) != {"id", "stream", "finish_reason"}:
            raise SchemaError(f"{where}: the manifest must give id, stream and finish_reason")
        check_id(entry["id"])
        check_sequence_meta(where, entry["stream"], entry["finish_reason"])
        if entry["id"] in seen:
            raise SchemaError(f"{where} and {seen[entry['id']]} have the same id {entry['id']!r}")
        seen[entry["id"]] = where


def _check_entry(path: str, entry: object) -> None:
    good = (
        isinstance(entry, dict)
        and set(entry) == {"sha256", "dtype", "shape"}
        and _is_sha256(entry["sha256"])
        and _is_text(entry["dtype"])
        and (entry["dtype"] in DTYPES or entry["dtype"] == TEXT_DTYPE)
        and _is_ids(entry["shape"])
        and all(0 <= size < 2**63 for size in entry["shape"])
    )
    if not good:
        raise SchemaError(f"the manifest's entry for {path} must be a sha256, a known dtype and a shape")

"""Typed reading of one JSON object: every fault names the field, shows its value and says what is allowed.

The readers of config.json, generation_config.json and the safetensors index share it. A JSON ``true`` is not an
integer here, NaN and Infinity are not numbers, and a key given twice is an error instead of the last one winning.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdtr_cli.errors import InputError
from kdtr_cli.model.regular_file import open_regular

__all__ = ["Fields", "named", "parse_json", "read_json", "read_text", "shown"]

MAX_INT = 2**31 - 1  # token ids and sizes are int32 in bundles and kernels
MAX_ITEMS = 1_000_000  # of a JSON text; one takes up to 200 bytes of memory and as little as two of the file
_FLOAT32 = 1.2e-38, 3.4e38  # what is smaller or larger is zero or infinite once a model computes with it
_MISSING = object()


def shown(value: Any) -> str:
    """A value as JSON on one line, cut to 60 characters, for messages."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # an int of thousands of digits, or nested too deeply for dumps
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def named(name: str) -> str:
    """A key as it stands, for messages; as ``shown`` where it would break the line or fill it."""
    return name if name.isprintable() and 0 < len(name) <= 60 else shown(name)


def read_text(path: Path, limit: int) -> str:
    """The text of a UTF-8 file of at most ``limit`` bytes; InputError when it is missing, larger, or not text."""
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise InputError(
                    f"{path}: {size} bytes is more than the {limit} that kdtr reads; is it the right file?"
                )
            return file.read(limit + 1).decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"key {shown(key)} is given twice")
        out[key] = value
    return out


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def parse_json(
    text: str | bytes | bytearray, where: object, items: int = MAX_ITEMS, infinities: bool = False
) -> dict[str, Any]:
    """A JSON object, strictly: no duplicate keys, at most about ``items`` values; no NaN and no Infinity, unless
    ``infinities`` lets them be what they say, as Python writes them.

    ``where`` heads the message.
    """
    marks = (b",", b"[", b"{") if isinstance(text, bytes | bytearray) else (",", "[", "{")
    if sum(text.count(mark) for mark in marks) > items:
        raise InputError(f"{where}: more than {items} values, which is no file of this kind")
    try:
        constant = float if infinities else _no_constant
        obj = json.loads(text, object_pairs_hook=_unique, parse_constant=constant)
    except RecursionError:
        raise InputError(f"{where}: JSON nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(obj, dict):
        raise InputError(f"{where}: holds {shown(obj)} where a JSON object is expected")
    return obj


def read_json(path: Path, limit: int = 16 << 20, items: int = MAX_ITEMS) -> tuple[dict[str, Any], str]:
    """The JSON object in a file, and its text."""
    text = read_text(path, limit)
    return parse_json(text, path, items), text


class Fields:
    """Typed access to one JSON object.

    ``prefix`` is put before every field's name in messages ('text_config.'). ``unknown()`` gives the keys that nobody
    asked for. Each getter takes a default; without one, a missing or null field is an error.
    """

    def __init__(self, obj: Mapping[str, Any], where: object, prefix: str = "") -> None:
        self.obj, self.where, self.prefix = obj, where, prefix
        self.asked: set[str] = set()

    def fail(self, name: str, allowed: str) -> InputError:
        """The error for a field with a value that is not allowed (to be raised by the caller)."""
        return InputError(f"{self.where}: {self.prefix}{name} is {shown(self.obj.get(name))}; allowed: {allowed}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.raw(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it stands, None when missing."""
        self.asked.add(name)
        return self.obj.get(name)

    def unknown(self) -> list[str]:
        """Keys of the object that no getter has asked for, in order of appearance."""
        return [key for key in self.obj if key not in self.asked]

    def refuse_unknown(self) -> None:
        """InputError naming the first key that nobody asked for."""
        unknown = self.unknown()
        if unknown:
            more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            name, value = named(unknown[0]), shown(self.obj[unknown[0]])
            raise InputError(
                f"{self.where}: {self.prefix}{name} is {value}: unknown field{more}; kdtr "
                "ignores no field that could change the model: remove it if it does not"
            )

    def _get(self, name: str, default: Any, allowed: str) -> Any:
        value = self.raw(name)
        if value is not None:
            return value
        if default is not _MISSING:
            return default
        state = "is null" if name in self.obj else "is missing"
        raise InputError(f"{self.where}: {self.prefix}{name} {state}; needed: {allowed}")

    def integer(self, name: str, low: int = 1, default: Any = _MISSING, high: int = MAX_INT) -> Any:
        allowed = f"an integer from {low} to {high}" if high != MAX_INT else f"an integer, at least {low}"
        value = self._get(name, default, allowed)
        if value is default:
            return value
        if type(value) is not int or not low <= value <= high:
            raise self.fail(name, allowed)
        return value

    def number(
        self,
        name: str,
        default: Any = _MISSING,
        above: float | None = None,
        least: float | None = None,
        most: float | None = None,
    ) -> Any:
        """A float that float32 holds too: neither infinite there nor, without being 0, zero."""
        allowed = "a finite number"
        if above is not None:
            allowed += f" above {above:g}"
        if least is not None:
            allowed += f", at least {least:g}"
        if most is not None:
            allowed += f", at most {most:g}"
        value = self._get(name, default, allowed)
        if value is default:
            return value
        if type(value) not in (int, float) or not (value == 0 or _FLOAT32[0] <= abs(value) <= _FLOAT32[1]):
            raise self.fail(name, allowed)
        low = (above is not None and value <= above) or (least is not None and value < least)
        if low or (most is not None and value > most):
            raise self.fail(name, allowed)
        return float(value)

    def boolean(self, name: str, default: Any = _MISSING) -> Any:
        value = self._get(name, default, "true or false")
        if value is default:
            return value
        if type(value) is not bool:
            raise self.fail(name, "true or false")
        return value

    def choice(self, name: str, choices: tuple[str, ...], default: Any = _MISSING) -> Any:
        allowed = " or ".join(shown(c) for c in choices)
        value = self._get(name, default, allowed)
        if value is default:
            return value
        if type(value) is not str or value not in choices:
            raise self.fail(name, allowed)
        return value

    def table(self, name: str) -> dict[str, Any] | None:
        """A nested object; None when missing, null or empty."""
        value = self.raw(name)
        if value is not None and type(value) is not dict:
            raise self.fail(name, "a JSON object or null")
        return value or None

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """One id or a list of ids, sorted and without repeats; None when missing or null."""
        value = self.raw(name)
        if value is None:
            return None
        ids = value if type(value) is list else [value]
        if any(type(i) is not int or not 0 <= i <= MAX_INT for i in ids):
            raise self.fail(name, "a token id, or a list of token ids")
        return tuple(sorted(set(ids)))

    def only(self, name: str, *values: Any) -> None:
        """A field that kdtr supports at these values only (or missing, or null)."""
        value = self.raw(name)
        if value is not None and not any(type(value) is type(v) and value == v for v in values):
            raise self.fail(name, " or ".join(shown(v) for v in values) + "; kdtr has nothing else")

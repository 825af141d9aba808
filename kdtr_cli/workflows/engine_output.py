"""What a foreign engine wrote, by the contract of docs/engines.md: npz, safetensors or JSON, told apart by content.

Every fault is an EngineError of one line that names the array and what was expected. Nothing is guessed: an array that
the contract does not know is a fault too, for it may be a misspelt one that matters.
"""

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.errors import EngineError, InputError
from kdtr_cli.model.fields import parse_json, read_json, shown
from kdtr_cli.workflows.engine_containers import Arrays, Stored, open_npz, open_safetensors
from kdtr_cli.workflows.engines import Answer, AnswerSequence, Question

__all__ = ["kind_of", "read_output"]

MAX_JSON_BYTES = 64 << 20
MAX_JSON_VALUES = 4_000_000

_MAX_HEADER = 100 << 20
_SUFFIX = {"npz": ".npz", "safetensors": ".safetensors", "json": ".json"}
_FINISH = ("length", "stop")
_NONFINITE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}

#: Logits by the name of their array: whose rows they have (tokens' or the prompts').
_LOGITS = {"logits": "tokens", "top_ids": "tokens", "top_values": "tokens", "prompt_logits": "prompts"}


def read_output(path: Path, question: Question) -> Answer:
    """Read an engine's output; its logits one sequence at a time, as the answer's sequences are gone through."""
    try:
        kind = kind_of(path)
        if kind == "npy":
            raise EngineError(f"{path.name} is one array (.npy); several with their names are expected (.npz)")
        if path.suffix not in ("", _SUFFIX[kind]):
            raise EngineError(f"{path.name} holds {kind}; its name says otherwise")
        if kind == "json":
            return _read_json(path, question)
        held = open_npz(path) if kind == "npz" else open_safetensors(path)
        about = {} if held.about is None else parse_json(held.about, f"{path.name}: about")
    except InputError as error:
        raise _fault(path, error) from error
    return Answer("", _sequences(path, held, question), about)


def _fault(path: Path, error: InputError) -> EngineError:
    return EngineError(str(error).replace(str(path), path.name))


def kind_of(path: Path) -> str:
    """npz, npy, safetensors or json, by content. EngineError: none of them."""
    with open(path, "rb") as file:
        head = file.read(64)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return "npz"
    if len(head) > 8 and head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] <= _MAX_HEADER:
        return "safetensors"
    if head[:6] == b"\x93NUMPY":
        return "npy"
    if head.lstrip()[:1] == b"{":
        return "json"
    if head[:8] == b"\x89HDF\r\n\x1a\n":
        raise EngineError(
            f"{path.name} is an HDF5 file, not npz, safetensors or JSON; a run bundle goes to 'kdtr diff' as it is"
        )
    raise EngineError(f"{path.name} is neither npz nor safetensors nor JSON ({path.stat().st_size} bytes)")


def _sequences(path: Path, held: Arrays, question: Question) -> Iterator[AnswerSequence]:
    count = len(question.prompts)
    arrays = dict(held.arrays)
    tokens = _offsets(path, arrays, count)
    prompts = np.cumsum([0, *(len(prompt.ids) for prompt in question.prompts)], dtype=np.int64)
    ids = _take(path, arrays, "tokens/ids", (int(tokens[-1]),))
    finish = _finish(path, arrays, count)
    logits = {
        name: found
        for name, rows in _LOGITS.items()
        if (found := _logits(path, arrays, name, tokens if rows == "tokens" else prompts)) is not None
    }
    if arrays:
        raise EngineError(f"{path.name}: the array {sorted(arrays)[0]!r} is none of the contract (docs/engines.md)")
    for index in range(count):
        try:
            yield AnswerSequence(
                tokens=ids[tokens[index] : tokens[index + 1]],
                finish_reason=finish[index],
                **{name: read(index) for name, read in logits.items()},
            )
        except InputError as error:  # the file was cut short while it was read
            raise _fault(path, error) from error


def _take(path: Path, arrays: dict[str, Stored], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A small array of integers that must be there, whole."""
    stored = arrays.pop(name, None)
    if stored is None:
        raise EngineError(f"{path.name}: the array {name!r} is missing")
    if stored.dtype not in (np.int32, np.int64) or stored.shape != shape:
        raise EngineError(
            f"{path.name}: {name} is {stored.dtype} {list(stored.shape)}, not int32 or int64 {list(shape)}"
        )
    try:
        return stored.rows(0, shape[0])
    except InputError as error:
        raise _fault(path, error) from error


def _offsets(path: Path, arrays: dict[str, Stored], count: int) -> np.ndarray:
    offsets = _take(path, arrays, "tokens/offsets", (count + 1,)).astype(np.int64)
    if offsets[0] != 0 or np.any(offsets[1:] < offsets[:-1]):
        raise EngineError(f"{path.name}: tokens/offsets must begin with 0 and never fall")
    return offsets


def _finish(path: Path, arrays: dict[str, Stored], count: int) -> list[str]:
    codes = _take(path, arrays, "finish", (count,))
    if np.any((codes < 0) | (codes > 1)):
        raise EngineError(f"{path.name}: finish holds {int(codes[(codes < 0) | (codes > 1)][0])}; 0 length, 1 stop")
    return [_FINISH[int(code)] for code in codes]


def _logits(
    path: Path, arrays: dict[str, Stored], name: str, offsets: np.ndarray
) -> Callable[[int], np.ndarray] | None:
    """How to read the rows of a sequence: of one array of all of them, or of an array of its own, ``NAME/INDEX``."""
    count = len(offsets) - 1
    own = [key for key in arrays if re.fullmatch(rf"{name}/[0-9]+", key)]
    whole = arrays.pop(name, None)
    if whole is not None:
        if own:
            raise EngineError(f"{path.name}: both {name} and {own[0]}; give all rows in one array or one a sequence")
        _check_rows(path, name, whole, int(offsets[-1]))
        return lambda index: whole.rows(int(offsets[index]), int(offsets[index + 1]))
    if not own:
        return None
    parts = [arrays.pop(f"{name}/{index}", None) for index in range(count)]
    for index, part in enumerate(parts):
        if part is None:
            raise EngineError(f"{path.name}: {name}/{index} is missing, though {own[0]} is there")
        _check_rows(path, f"{name}/{index}", part, int(offsets[index + 1] - offsets[index]))
    return lambda index: parts[index].rows(0, parts[index].shape[0])


def _check_rows(path: Path, name: str, stored: Stored, rows: int) -> None:
    if len(stored.shape) != 2 or stored.shape[0] != rows:
        raise EngineError(f"{path.name}: {name} has shape {list(stored.shape)}, not {rows} rows, one for each id")


def _read_json(path: Path, question: Question) -> Answer:
    document, _ = read_json(path, MAX_JSON_BYTES, MAX_JSON_VALUES)
    _known(path, document, ("about", "sequences"), "the document")
    about, entries = document.get("about", {}), document.get("sequences")
    if not isinstance(about, dict):
        raise EngineError(f"{path.name}: about is {shown(about)}, not an object")
    if not isinstance(entries, list) or len(entries) != len(question.prompts):
        what = f"a list of {len(entries)}" if isinstance(entries, list) else shown(entries)
        raise EngineError(f"{path.name}: sequences is {what}, not a list of {len(question.prompts)}, one a prompt")
    return Answer("", [_entry(path, i, entry, question) for i, entry in enumerate(entries)], about)


def _known(path: Path, entry: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in entry:
        if key not in keys:
            raise EngineError(f"{path.name}: {where} has the key {shown(key)}, which is none of {', '.join(keys)}")


def _entry(path: Path, index: int, entry: Any, question: Question) -> AnswerSequence:
    where = f"sequences[{index}]"
    if not isinstance(entry, dict):
        raise EngineError(f"{path.name}: {where} is {shown(entry)}, not an object")
    _known(path, entry, ("id", "tokens", "finish_reason", *_LOGITS), where)
    if entry.get("id", question.prompts[index].id) != question.prompts[index].id:
        raise EngineError(
            f"{path.name}: {where} has the id {shown(entry['id'])}, the prompt {shown(question.prompts[index].id)}"
        )
    tokens = _integers(path, f"{where}.tokens", entry.get("tokens"))
    rows = {name: _rows(path, f"{where}.{name}", entry[name], name == "top_ids") for name in _LOGITS if name in entry}
    return AnswerSequence(tokens, entry.get("finish_reason"), **rows)


def _integers(path: Path, where: str, value: Any) -> np.ndarray:
    if not isinstance(value, list) or any(type(item) is not int or abs(item) >= 2**62 for item in value):
        raise EngineError(f"{path.name}: {where} is {shown(value)}, not a list of ids")
    return np.array(value, np.int64)


def _rows(path: Path, where: str, value: Any, integers: bool) -> np.ndarray:
    """A list of rows of equal length as an array; numbers as float32, "nan", "inf" and "-inf" as what they say."""
    if not isinstance(value, list) or any(not isinstance(row, list) for row in value):
        raise EngineError(f"{path.name}: {where} is {shown(value)}, not a list of rows")
    if len({len(row) for row in value}) > 1:
        raise EngineError(f"{path.name}: {where} has rows of different lengths")
    if integers:
        rows = [_integers(path, where, row) for row in value]
        return np.array(rows, np.int64).reshape(len(value), -1 if value else 0)
    values = [[_number(path, where, item) for item in row] for row in value]
    with np.errstate(over="ignore"):
        return np.array(values, np.float64).astype(np.float32).reshape(len(value), -1 if value else 0)


def _number(path: Path, where: str, item: Any) -> float:
    if type(item) is float:
        return item
    if type(item) is int and abs(item) < 2**62:
        return float(item)
    if type(item) is str and item in _NONFINITE:
        return _NONFINITE[item]
    raise EngineError(f"{path.name}: {where} holds {shown(item)}, which is no number")

"""Where prompts come from: ids or text on the command line, a .jsonl or .txt file, or a seed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.prompts import Prompt
from kdtr_cli.model.tokenizer import load_tokenizer
from kdtr_cli.reference.sampling import PURPOSE_PROMPT, uniform_words

__all__ = ["PromptOptions", "collect_prompts", "random_prompt"]

_DEFAULT_LENGTH = 16
_FILE_LIMIT = 1 << 30


@dataclass(frozen=True)
class PromptOptions:
    """The prompt options of ``kdtr golden``, as given; sequences are numbered in the order of these fields."""

    ids: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    file: Path | None = None
    count: int | None = None
    length: int | None = None
    seed: int = 0


def random_prompt(index: int, length: int, vocab_size: int, seed: int) -> np.ndarray:
    """Ids int32 [length] from Philox, purpose 1 (rule 15): the high part of word * vocab_size, stream = index."""
    words = uniform_words(length, 0, index, PURPOSE_PROMPT, seed).astype(np.uint64)
    return (words * np.uint64(vocab_size) >> np.uint64(32)).astype(np.int32)


def collect_prompts(options: PromptOptions, config: ModelConfig, folder: Path | None) -> list[Prompt]:
    """All prompts in order; ids default to the index, streams are the index. InputError says which one is wrong.

    Text needs the tokenizer of the model's folder. Without any option there is one random prompt of 16 ids.
    """
    found: list[tuple[str | None, Any]] = [(None, _parse_ids(text, "--prompt-ids")) for text in options.ids]
    found += [(None, text) for text in options.texts]
    if options.file is not None:
        found += _read_file(options.file)
    if options.length is not None and options.count is None:
        raise InputError("--prompt-len needs --num-prompts")
    if options.count is not None or not found:
        length = _DEFAULT_LENGTH if options.length is None else options.length
        if length < 1:
            raise InputError(f"--prompt-len {length}: a prompt needs at least one token")
        for i in range(1 if options.count is None else options.count):
            found.append((None, random_prompt(i, length, config.vocab_size, options.seed)))
    tokenizer = load_tokenizer(folder) if any(isinstance(what, str) for _, what in found) else None
    prompts = []
    for index, (name, what) in enumerate(found):
        if isinstance(what, str):
            what = np.array(tokenizer.encode(what), np.int32)
        prompts.append(Prompt(str(index) if name is None else name, what, index))
    return prompts


def _parse_ids(text: str, where: str) -> np.ndarray:
    words = text.replace(",", " ").split()
    try:
        return _ids([int(w) for w in words], where)
    except ValueError:
        raise InputError(f'{where} {text!r}: not a list of whole numbers such as "1 2 3"') from None


def _ids(values: list[int], where: str) -> np.ndarray:
    if any(not -(1 << 31) <= v < 1 << 31 for v in values):
        raise InputError(f"{where}: a token id does not fit in 32 bits")
    return np.array(values, np.int32)


def _read_file(path: Path) -> list[tuple[str | None, Any]]:
    if path.suffix not in (".jsonl", ".txt"):
        raise InputError(f"--prompts {path}: the name must end in .jsonl or .txt")
    try:
        if path.stat().st_size > _FILE_LIMIT:
            raise InputError(f"--prompts {path}: larger than 1 GB")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"--prompts {path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise InputError(f"--prompts {path}: {error.strerror or error}") from None
    # not splitlines(): U+2028 and others may stand inside a prompt
    lines = text.removesuffix("\n").split("\n") if text else []
    found = []
    for number, line in enumerate(lines, 1):
        where = f"--prompts {path} line {number}"
        if not line.strip():
            raise InputError(f"{where}: empty; a prompt needs at least one token")
        found.append((None, line.removesuffix("\r")) if path.suffix == ".txt" else _parse_line(line, where))
    if not found:
        raise InputError(f"--prompts {path}: no prompts in it")
    return found


def _parse_line(line: str, where: str) -> tuple[str | None, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"{where}: not JSON") from None
    if not isinstance(entry, dict) or ("ids" in entry) == ("text" in entry) or set(entry) - {"id", "ids", "text"}:
        raise InputError(f'{where}: must be {{"id": …, "ids": […]}} or {{"id": …, "text": …}}')
    name = entry.get("id")
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise InputError(f"{where}: id must be text or a whole number")
    if "text" in entry:
        if not isinstance(entry["text"], str):
            raise InputError(f"{where}: text must be a string")
        return None if name is None else str(name), entry["text"]
    ids = entry["ids"]
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise InputError(f"{where}: ids must be a list of whole numbers")
    return None if name is None else str(name), _ids(ids, where)

"""Where prompts come from: ids, text or messages on the command line or in a file, or a seed."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.bundle.schema import MAX_SEQUENCES, check_id
from kdtr_cli.errors import InputError
from kdtr_cli.model.chat import ChatTemplate, check_messages, render_chats
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.prompts import Prompt, check_prompts
from kdtr_cli.model.rope import MAX_POSITIONS
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


@dataclass(frozen=True)
class _Found:
    """A prompt as it was given: where (for errors), its id if it has one, text, chat messages or token ids."""

    where: str
    name: str | None
    what: str | list[dict[str, Any]] | np.ndarray


def random_prompt(index: int, length: int, vocab_size: int, seed: int) -> np.ndarray:
    """Ids int32 [length] from Philox, purpose 1 (rule 15): the high part of word * vocab_size, stream = index."""
    words = uniform_words(length, 0, index, PURPOSE_PROMPT, seed).astype(np.uint64)
    return (words * np.uint64(vocab_size) >> np.uint64(32)).astype(np.int32)


def collect_prompts(
    options: PromptOptions, config: ModelConfig, folder: Path | None, template: ChatTemplate | None = None
) -> list[Prompt]:
    """All prompts in order; ids default to the index, streams are the index. InputError says which one is wrong.

    Text needs the tokenizer of the model's folder; with a template it becomes one message of a user, and no prompt may
    be token ids. Without any option there is one random prompt of 16 ids.
    """
    found = [_Found(f"--prompt-ids {_shortened(text)}", None, _parse_ids(text)) for text in options.ids]
    found += [_Found(f"--prompt-text {_shortened(text)}", None, text) for text in options.texts]
    if options.file is not None:
        found += _read_file(options.file)
    if options.length is not None and options.count is None:
        raise InputError("--prompt-len needs --num-prompts")
    if options.count is not None or not found:
        found += _random(options, config)
    found = _rendered(found, template)
    tokenizer = load_tokenizer(folder) if any(isinstance(f.what, str) for f in found) else None
    prompts = []
    for index, f in enumerate(found):
        name = str(index) if f.name is None else f.name
        try:
            check_id(name)
            if isinstance(f.what, str):
                f.what.encode()
                ids = _ids(tokenizer.encode(f.what, rendered=template is not None), f"{folder}'s tokenizer.json")
            else:
                ids = f.what
            prompts.append(Prompt(name, ids, index))
            check_prompts(prompts[-1:], config, 1)
        except InputError as error:
            raise InputError(f"{f.where}: {error}") from None
        except UnicodeEncodeError:
            raise InputError(f"{f.where}: half a surrogate pair, which no UTF-8 text holds") from None
    return prompts


def _rendered(found: list[_Found], template: ChatTemplate | None) -> list[_Found]:
    """The prompts as text or token ids: what a chat template makes of them, or as they are without one."""
    if template is None:
        wrong = next((f for f in found if isinstance(f.what, list)), None)
        if wrong is not None:
            raise InputError(f"{wrong.where}: messages need --chat")
        return found
    wrong = next((f for f in found if isinstance(f.what, np.ndarray)), None)
    if wrong is not None:
        raise InputError(f"{wrong.where}: --chat takes text or messages (--prompt-text, --prompts), not token ids")
    chats = [[{"role": "user", "content": f.what}] if isinstance(f.what, str) else f.what for f in found]
    texts, problem = render_chats(template, chats)
    if problem is not None:
        raise InputError(f"{found[len(texts)].where}: {problem}")
    return [replace(f, what=text) for f, text in zip(found, texts, strict=True)]


def _random(options: PromptOptions, config: ModelConfig) -> Iterator[_Found]:
    count = 1 if options.count is None else options.count
    length = _DEFAULT_LENGTH if options.length is None else options.length
    if not 1 <= count <= MAX_SEQUENCES:
        raise InputError(f"--num-prompts {count}: 1 to {MAX_SEQUENCES}")
    limit = min(config.max_position_embeddings, MAX_POSITIONS)
    if not 1 <= length <= limit:
        raise InputError(f"--prompt-len {length}: 1 to {limit}, the positions of this model (max_position_embeddings)")
    for i in range(count):
        yield _Found(f"random prompt {i}", None, random_prompt(i, length, config.vocab_size, options.seed))


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def _parse_ids(text: str) -> np.ndarray:
    words = text.replace(",", " ").split()
    # int() takes more than digits: 1_0 is 10 to it
    if not all(re.fullmatch(r"[+-]?[0-9]{1,18}", word) for word in words):
        raise InputError(f'--prompt-ids {_shortened(text)}: not a list of whole numbers such as "1 2 3"')
    return _ids([int(word) for word in words], "--prompt-ids")


def _ids(values: list[int], where: str) -> np.ndarray:
    if any(not -(1 << 31) <= v < 1 << 31 for v in values):
        raise InputError(f"{where}: a token id does not fit in 32 bits")
    return np.array(values, np.int32)


def _read_file(path: Path) -> list[_Found]:
    if path.suffix not in (".jsonl", ".txt"):
        raise InputError(f"--prompts {path}: the name must end in .jsonl or .txt")
    try:
        if path.stat().st_size > _FILE_LIMIT:
            raise InputError(f"--prompts {path}: larger than 1 GB")
        text = path.read_bytes().decode()  # read_text would end lines at a lone CR too
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
        if path.suffix == ".txt":
            found.append(_Found(where, None, line.removesuffix("\r")))
        else:
            found.append(_parse_line(line, where))
    if not found:
        raise InputError(f"--prompts {path}: no prompts in it")
    return found


def _parse_line(line: str, where: str) -> _Found:
    try:
        entry = json.loads(line, object_pairs_hook=_unique)
    except _TwiceError as error:
        raise InputError(f"{where}: the key {error.args[0]!r} stands twice") from None
    except (ValueError, RecursionError):
        raise InputError(f"{where}: not JSON") from None
    kinds = {"ids", "text", "messages"}
    if not isinstance(entry, dict) or len(kinds & set(entry)) != 1 or set(entry) - kinds - {"id"}:
        raise InputError(f'{where}: must be {{"id": …, "ids": […]}}, {{"id": …, "text": …}} or {{"messages": […]}}')
    name = entry.get("id")
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise InputError(f"{where}: id must be text or a whole number")
    name = None if name is None else str(name)
    if "text" in entry:
        if not isinstance(entry["text"], str):
            raise InputError(f"{where}: text must be a string")
        return _Found(where, name, entry["text"])
    if "messages" in entry:
        try:
            return _Found(where, name, check_messages(entry["messages"]))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    ids = entry["ids"]
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise InputError(f"{where}: ids must be a list of whole numbers")
    return _Found(where, name, _ids(ids, where))


class _TwiceError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a line; of two values under one key json would take the second and say nothing."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _TwiceError(key)
        seen.add(key)
    return dict(pairs)

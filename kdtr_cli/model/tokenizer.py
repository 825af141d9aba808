"""Text to token ids and back, by the tokenizer of a model folder: tokenizer.json, else Kimi's tiktoken.model."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import tokenizers

from kdtr_cli.errors import InputError
from kdtr_cli.model.fields import parse_json, read_text
from kdtr_cli.model.tiktoken_model import load_tiktoken

__all__ = ["Tokenizer", "load_tokenizer"]

_LIMIT = 256 << 20  # bytes; the largest published ones have some 30 MB
_ITEMS = 5_000_000  # JSON values; a vocabulary of 256,000 has some 1,500,000
_MAX_GROWTH = 1000  # of a text by replacements; the published ones replace a character by one
T = TypeVar("T")


class Tokenizer(Protocol):
    """What every tokenizer does. Special tokens written in a text are recognised."""

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer can give, added tokens included."""

    def encode(self, text: str, rendered: bool = False) -> list[int]:
        """Token ids of a text. ``rendered``: by a chat template, which wrote all special tokens: none is added."""

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; special tokens are kept, bytes that are no UTF-8 are shown as U+FFFD."""


class _JsonTokenizer:
    """encode and decode of one tokenizer.json.

    ``encode`` adds special tokens only where the file's own post-processor does (Kimi's and DeepSeek's differ in this),
    and not to a rendered text. InputError where the file makes the library fail on the way.
    """

    def __init__(self, inner: tokenizers.Tokenizer, path: Path) -> None:
        self._inner, self._path = inner, path

    @property
    def vocab_size(self) -> int:
        return self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, rendered: bool = False) -> list[int]:
        encode = self._inner.encode
        return list(
            _tried(lambda: encode(text, add_special_tokens=not rendered).ids, f"{self._path}: cannot encode text")
        )

    def decode(self, ids: list[int]) -> str:
        plain = [int(i) for i in ids]
        return _tried(
            lambda: self._inner.decode(plain, skip_special_tokens=False), f"{self._path}: cannot decode tokens"
        )


def load_tokenizer(folder: Path | str | None) -> Tokenizer:
    """The tokenizer of a model folder; None stands for a preset, which has none. InputError where there is none.

    tokenizer.json wins where both files exist: it is complete in itself, its split pattern included.
    """
    if folder is None:
        raise InputError("a preset has no tokenizer: give token ids instead of text")
    path, ranks = Path(folder) / "tokenizer.json", Path(folder) / "tiktoken.model"
    if os.path.lexists(path):
        return _load_json(path)
    if os.path.lexists(ranks):
        return load_tiktoken(ranks)
    raise InputError(f"{folder}: no tokenizer.json and no tiktoken.model; give token ids instead of text")


def _load_json(path: Path) -> _JsonTokenizer:
    text = read_text(path, _LIMIT)
    spec = parse_json(text, f"{path}: not a tokenizer", _ITEMS)
    if any(_growth(spec.get(name)) > _MAX_GROWTH for name in ("normalizer", "pre_tokenizer", "decoder")):
        raise InputError(f"{path}: its Replace steps make a text more than {_MAX_GROWTH} times as long")
    inner = _tried(
        lambda: tokenizers.Tokenizer.from_str(text), f"{path}: not a tokenizer that the tokenizers library reads"
    )
    # a file may carry settings for batches of training examples; a prompt is never cut or filled up
    inner.no_truncation()
    inner.no_padding()
    return _JsonTokenizer(inner, path)


def _growth(step: Any) -> int:
    """How many characters one character may become by the Replace steps in a normalizer, pre-tokenizer or decoder."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1
    content = step.get("content")
    own = len(content) if step.get("type") == "Replace" and isinstance(content, str) else 1
    return max(1, own) * math.prod(map(_growth, step.values()))


def _tried(call: Callable[[], T], what: str) -> T:
    """The result of a call into the library, which raises plain Exception, and PanicException where it did not expect
    what it reads; that one is no Exception, and has no name in Python."""
    try:
        with _silent():
            return call()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{what} ({_one_line(error)})") from None


@contextmanager
def _silent() -> Iterator[None]:
    """Standard error leads nowhere: a panic writes lines of its own there before it becomes an exception."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 120 else text[:117] + "..."

"""Text to token ids and back, by the tokenizer of a model folder: tokenizer.json, else Kimi's tiktoken.model."""

from pathlib import Path
from typing import Protocol

import tokenizers

from kdtr_cli.errors import InputError
from kdtr_cli.model.tiktoken_model import load_tiktoken

__all__ = ["Tokenizer", "load_tokenizer"]


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
    and not to a rendered text.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    @property
    def vocab_size(self) -> int:
        return self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, rendered: bool = False) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=not rendered).ids)

    def decode(self, ids: list[int]) -> str:
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(folder: Path | str | None) -> Tokenizer:
    """The tokenizer of a model folder; None stands for a preset, which has none. InputError where there is none.

    tokenizer.json wins where both files exist: it is complete in itself, its split pattern included.
    """
    if folder is None:
        raise InputError("a preset has no tokenizer: give token ids instead of text")
    path, ranks = Path(folder) / "tokenizer.json", Path(folder) / "tiktoken.model"
    if path.is_file():
        return _load_json(path)
    if ranks.is_file():
        return load_tiktoken(ranks)
    raise InputError(f"{folder}: no tokenizer.json and no tiktoken.model; give token ids instead of text")


def _load_json(path: Path) -> _JsonTokenizer:
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{path}: not a tokenizer that the tokenizers library reads ({_one_line(error)})") from None
    # a file may carry settings for batches of training examples; a prompt is never cut or filled up
    inner.no_truncation()
    inner.no_padding()
    return _JsonTokenizer(inner)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 120 else text[:117] + "..."

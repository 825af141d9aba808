"""Text to token ids and back, by the tokenizer.json of a model folder (the Hugging Face tokenizers library)."""

from pathlib import Path

import tokenizers

from kdtr_cli.errors import InputError

__all__ = ["Tokenizer", "load_tokenizer"]


class Tokenizer:
    """encode and decode of one tokenizer.json.

    ``encode`` adds special tokens only where the file's own post-processor does (Kimi's and DeepSeek's differ in this);
    no chat template is applied. Special tokens written in the text are recognised. ``decode`` keeps special tokens and
    shows bytes that are no UTF-8 as U+FFFD.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer can give, added tokens included."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; empty for an empty text without a post-processor."""
        return list(self._inner.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; an id that the tokenizer does not know gives nothing."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(folder: Path | str | None) -> Tokenizer:
    """The tokenizer of a model folder; None stands for a preset, which has none. InputError where there is none."""
    if folder is None:
        raise InputError("a preset has no tokenizer: give token ids instead of text")
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{folder}: no tokenizer.json; give token ids instead of text")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{path}: not a tokenizer that the tokenizers library reads ({_one_line(error)})") from None
    # a file may carry settings for batches of training examples; a prompt is never cut or filled up
    inner.no_truncation()
    inner.no_padding()
    return Tokenizer(inner)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 120 else text[:117] + "..."

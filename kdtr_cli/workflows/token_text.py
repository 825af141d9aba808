"""Token ids as text, for reports: by the tokenizer of a model folder, one id at a time."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from kdtr_cli.errors import InputError
from kdtr_cli.model.tokenizer import load_tokenizer

__all__ = ["token_texts"]


def token_texts(folder: str | Path) -> Callable[[int], str | None]:
    """A function from a token id to its text, None for an id that the tokenizer does not know or cannot decode.

    A token that is a part of a character only shows as U+FFFD. InputError: the folder has no tokenizer that can be
    read.
    """
    if not Path(folder).is_dir():
        raise InputError(f"--tokenizer {folder}: no such folder; give the folder of a model, or of a tokenizer")
    tokenizer = load_tokenizer(folder)
    size = tokenizer.vocab_size

    @lru_cache(maxsize=1 << 16)
    def text(token: int) -> str | None:
        if not 0 <= token < size:
            return None
        try:
            return tokenizer.decode([token])
        except InputError:
            return None

    return text

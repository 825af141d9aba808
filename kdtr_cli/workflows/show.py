"""What a model said, for people: prompt and continuation as text where there is a tokenizer, else as ids."""

from pathlib import Path

from kdtr_cli.errors import InputError
from kdtr_cli.model.prompts import Generated, Prompt
from kdtr_cli.model.tokenizer import Tokenizer, load_tokenizer
from kdtr_cli.report.visible import visible

__all__ = ["continuation"]

_SHOWN = 8  # sequences
_IDS = 32


def continuation(folder: Path | None, sequences: list[tuple[Prompt, Generated]]) -> list[str]:
    """Lines that show the first sequences: their prompt and what follows."""
    tokenizer = _tokenizer(folder)
    lines = []
    for prompt, result in sequences[:_SHOWN]:
        text = None if tokenizer is None else _decoded(tokenizer, prompt, result)
        name = visible(prompt.id)
        if text is None:
            lines.append(f"[{name}] {_ids(prompt.ids.tolist())} -> {_ids(result.tokens.tolist())}")
        else:
            lines += [f"[{name}] prompt:", *_indent(text[0]), f"[{name}] continuation:", *_indent(text[1])]
    if len(sequences) > _SHOWN:
        lines.append(f"… and {len(sequences) - _SHOWN} more sequences")
    return lines


def _tokenizer(folder: Path | None) -> Tokenizer | None:
    try:
        return load_tokenizer(folder)
    except InputError:
        return None


def _decoded(tokenizer: Tokenizer, prompt: Prompt, result: Generated) -> tuple[str, str] | None:
    """Both texts; None where the tokenizer cannot: what was made is shown as ids then, and not lost."""
    try:
        return tokenizer.decode(prompt.ids.tolist()), tokenizer.decode(result.tokens.tolist())
    except InputError:
        return None


def _ids(ids: list[int]) -> str:
    shown = " ".join(map(str, ids[:_IDS]))
    return shown if len(ids) <= _IDS else f"{shown} … ({len(ids)})"


def _indent(text: str) -> list[str]:
    # control characters of a stranger's tokenizer must not reach the terminal
    clean = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return [f"    {line}" for line in clean.split("\n")]

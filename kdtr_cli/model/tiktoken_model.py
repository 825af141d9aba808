"""Kimi's tiktoken.model: byte-level BPE ranks, with the special tokens that tokenizer_config.json names.

The split pattern, the number of special ids and the cutting of long texts are those of moonshotai's published
tokenization_kimi.py; no code of a model folder is ever run.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kdtr_cli.errors import InputError
from kdtr_cli.model.fields import read_json, shown

if TYPE_CHECKING:
    import tiktoken

__all__ = ["PATTERN", "RESERVED", "TiktokenModel", "load_tiktoken", "read_ranks"]

RESERVED = 256  #: special ids above the ranks, named in tokenizer_config.json or not

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        + _SUFFIX,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        + _SUFFIX,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)  #: Kimi's split into words; a token never reaches over two of them

_CLASS = "TikTokenTokenizer"  # Kimi's: another class has another pattern
_PIECE = 400_000  # characters; a cut is a token boundary, so both are part of what Kimi's tokens are
_RUN = 25_000  # characters of one run of white space, or of none
_FILE_LIMIT = 64 << 20  # Kimi's has 2.8 MB


class TiktokenModel:
    """encode and decode of one tiktoken.model.

    Nothing is added to a text; special tokens written in it are recognised, reserved ones (``<|reserved_token_N|>``)
    too. ``decode`` keeps special tokens and shows bytes that are no UTF-8 as U+FFFD.
    """

    def __init__(self, inner: "tiktoken.Encoding") -> None:
        self._inner = inner

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer can give, the reserved ones included."""
        return self._inner.n_vocab

    def encode(self, text: str, rendered: bool = False) -> list[int]:
        """Token ids of a text; empty for an empty one. ``rendered`` changes nothing: no token is ever added."""
        return [i for piece in _pieces(text) for i in self._inner.encode(piece, allowed_special="all")]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; an id that the tokenizer does not know gives nothing."""
        known = [int(i) for i in ids if 0 <= i < self._inner.n_vocab]
        return self._inner.decode_bytes(known).decode("utf-8", errors="replace")


def load_tiktoken(path: Path) -> TiktokenModel:
    """The tokenizer of a tiktoken.model and the tokenizer_config.json beside it. InputError for anything wrong."""
    try:
        import tiktoken
    except ImportError:
        raise InputError(
            f"{path}: needs the tiktoken package: pip install 'kdtr[tiktoken]', or give token ids instead of text"
        ) from None
    ranks = read_ranks(path)
    special = _special_tokens(path.with_name("tokenizer_config.json"), len(ranks))
    return TiktokenModel(tiktoken.Encoding(path.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special))


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token → rank from lines "base64 rank"; the ranks are 0 … n-1, every byte is a token. InputError if not so."""
    try:
        with open(path, "rb") as file:
            data = file.read(_FILE_LIMIT + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > _FILE_LIMIT:
        raise InputError(f"{path}: more than {_FILE_LIMIT >> 20} MiB; is it a tiktoken.model?")
    lines = data.splitlines()
    ranks: dict[bytes, int] = {}
    lines_of: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        where = f"{path} line {number}"
        words = line.split(b" ")
        if len(words) != 2 or not re.fullmatch(rb"[0-9]{1,9}", words[1]):
            raise InputError(f"{where}: not a token in base64, a space and its rank; is the file whole?")
        try:
            token, rank = base64.b64decode(words[0], validate=True), int(words[1])
        except binascii.Error:
            raise InputError(f"{where}: the token is not base64; is the file whole?") from None
        if not token:
            raise InputError(f"{where}: an empty token")
        if rank in lines_of:
            raise InputError(f"{where}: rank {rank} stands in line {lines_of[rank]} too")
        if token in ranks:
            raise InputError(f"{where}: the token of line {lines_of[ranks[token]]} again")
        ranks[token] = rank
        lines_of[rank] = number
    _check_whole(path, ranks, lines_of)
    return ranks


def _check_whole(path: Path, ranks: dict[bytes, int], lines_of: dict[int, int]) -> None:
    gap = next((rank for rank in range(len(ranks)) if rank not in lines_of), None)
    if gap is not None:
        raise InputError(f"{path}: {len(ranks)} tokens, but none has rank {gap}; is the file whole?")
    byte = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if byte is not None:
        raise InputError(
            f"{path}: no token for the byte 0x{byte:02X}, so not every text has tokens; is the file whole?"
        )


def _special_tokens(path: Path, first: int) -> dict[str, int]:
    """Text → id of the RESERVED special tokens, ids ``first`` on, as tokenizer_config.json names them."""
    if not path.is_file():
        raise InputError(f"{path}: missing; it names the special tokens of tiktoken.model")
    config, _ = read_json(path)
    kind = config.get("tokenizer_class")
    if kind != _CLASS:
        raise InputError(
            f"{path}: tokenizer_class is {shown(kind)}; of tiktoken models kdtr knows Kimi's alone ({_CLASS}), "
            "another splits text in another way; give token ids instead of text"
        )
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict):
        raise InputError(f"{path}: added_tokens_decoder must be an object: id → {{content: …}}")
    texts = {i: f"<|reserved_token_{i}|>" for i in range(first, first + RESERVED)}
    for key, entry in added.items():
        where = f"{path}: added_tokens_decoder {shown(key)}"
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content:
            raise InputError(f"{where}: content must be a text that is not empty")
        if not re.fullmatch(r"[0-9]{1,9}", key) or int(key) not in texts:
            raise InputError(
                f"{where}: tiktoken.model has {first} tokens, so special ids are {first} to {first + RESERVED - 1}; "
                "do the two files belong together, and are they whole?"
            )
        trims = [flag for flag in ("lstrip", "rstrip", "single_word") if entry.get(flag)]
        if trims:
            raise InputError(f"{where}: {trims[0]} is not supported; Kimi's special tokens have none")
        texts[int(key)] = content
    special: dict[str, int] = {}
    for i, text in texts.items():
        if text in special:
            raise InputError(f"{path}: added_tokens_decoder: {special[text]} and {i} are both {shown(text)}")
        special[text] = i
    return special


def _pieces(text: str) -> Iterator[str]:
    """A text cut as Kimi's code cuts it: every _PIECE characters, and runs after every _RUN."""
    for first in range(0, len(text), _PIECE):
        piece = text[first : first + _PIECE]
        cuts = [0]
        if len(piece) > _RUN:
            for run in re.finditer(r"\s+|\S+", piece):  # \s is str.isspace()
                cuts += range(run.start() + _RUN, run.end(), _RUN)
        yield from (piece[low:high] for low, high in zip(cuts, [*cuts[1:], len(piece)], strict=True))

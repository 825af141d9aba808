"""Kimi's tiktoken.model: the same tokens as tiktoken gives and as plain BPE gives, and one line for a broken file."""

import base64
import json
import random
import re
import sys
from pathlib import Path

import pytest
import regex
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr_cli.errors import InputError
from kdtr_cli.model import tiktoken_model
from kdtr_cli.model.tiktoken_model import PATTERN, RESERVED, load_tiktoken, read_ranks
from kdtr_cli.model.tokenizer import load_tokenizer

pytestmark = pytest.mark.quick

MERGES = [
    "th",
    "the",
    " the",
    "in",
    "ing",
    "'s",
    "  ",
    "    ",
    "\n\n",
    "中",
    "中文",
    "é",
    "12",
    "123",
    "Th",
    "!!",
    " a",
    "aa",
]
NAMED = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<think>": 22, "[UNK]": 254, "[PAD]": 255}  # above the ranks
# code points whose class no version of Unicode has changed
TEXTS = st.text(alphabet="theinga'sTHEäéЖǅʰ中文あ\u0301١123!.,-😀  \t\n\r\u3000\u00a0", max_size=40)


def ranks() -> dict[bytes, int]:
    """All bytes in a shuffled order (Kimi's are not in order either), then MERGES with the halves that they need."""
    order = list(range(256))
    random.Random(1).shuffle(order)
    found = {bytes([byte]): rank for rank, byte in enumerate(order)}
    for merge in MERGES:
        data = merge.encode()
        for size in range(2, len(data) + 1):
            found.setdefault(data[:size], len(found))
    return found


def lines(found: dict[bytes, int]) -> list[str]:
    return [f"{base64.b64encode(token).decode()} {rank}" for token, rank in found.items()]


def config(first: int) -> dict:
    added = {str(first + i): {"content": text, "special": text[0] != "<"} for text, i in NAMED.items()}
    return {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added, "bos_token": "[BOS]"}


def write(folder: Path, text: str | bytes | None = None, settings: dict | str | None = None) -> Path:
    text = "\n".join(lines(ranks())) + "\n" if text is None else text
    settings = config(len(ranks())) if settings is None else settings
    (folder / "tiktoken.model").write_bytes(text if isinstance(text, bytes) else text.encode())
    (folder / "tokenizer_config.json").write_text(settings if isinstance(settings, str) else json.dumps(settings))
    return folder / "tiktoken.model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("kimi")).parent


@pytest.fixture(scope="module")
def ours(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs() -> tiktoken.Encoding:
    found = ranks()
    special = {f"<|reserved_token_{len(found) + i}|>": len(found) + i for i in range(256) if i not in NAMED.values()}
    special |= {text: len(found) + i for text, i in NAMED.items()}
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=found, special_tokens=special)


def plain_bpe(text: str) -> list[int]:
    """Words by the pattern, then the pair of lowest rank merged, over and over. No special tokens."""
    found, ids = ranks(), []
    for word in regex.findall(f"(?V1){PATTERN}", text):
        parts = [bytes([byte]) for byte in word.encode()]
        while len(parts) > 1:
            rank, at = min((found.get(parts[i] + parts[i + 1], 10**9), i) for i in range(len(parts) - 1))
            if rank == 10**9:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [found[part] for part in parts]
    return ids


class TestEncode:
    @settings(deadline=None, max_examples=300)
    @given(text=TEXTS)
    def test_is_plain_bpe_and_what_tiktoken_gives_and_comes_back(self, ours, theirs, text):
        ids = ours.encode(text)
        assert ids == plain_bpe(text)
        assert ids == theirs.encode(text, allowed_special="all")
        assert ours.decode(ids) == text

    def test_merges_happen(self, ours):
        assert len(ours.encode("the thing's 123中文")) < len("the thing's 123中文")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("中文ab", ["中文", "ab"]),
            ("HelloWorld's", ["Hello", "World's"]),
            ("1234567", ["123", "456", "7"]),
            ("a  b\n\n c", ["a", " ", " b", "\n\n", " c"]),
            ("x!!\n\ny", ["x", "!!\n\n", "y"]),
        ],
    )
    def test_the_pattern_splits_as_kimi_s_does(self, text, words):
        assert regex.findall(f"(?V1){PATTERN}", text) == words

    def test_special_tokens_in_a_text_are_recognised_and_none_is_added(self, ours):
        base = len(ranks())
        assert ours.encode("") == []
        assert ours.encode("[BOS]the<think>[PAD]") == [base, ranks()[b"the"], base + 22, base + 255]
        assert ours.encode(f"<|reserved_token_{base + 3}|>") == [base + 3]
        # that id has a name of its own
        assert len(ours.encode(f"<|reserved_token_{base}|>")) > 1
        assert ours.encode("[BOS]x", rendered=True) == ours.encode("[BOS]x")
        assert ours.vocab_size == base + RESERVED

    def test_half_a_character_and_unknown_ids_can_be_shown(self, ours):
        halves = [ranks()[bytes([byte])] for byte in "é".encode()]
        assert ours.decode(halves) == "é"
        assert [ours.decode([i]) for i in halves] == ["\ufffd", "\ufffd"]
        assert ours.decode([len(ranks()) + 256, -1, 10**12, *halves]) == "é"
        assert all(ours.decode([i]) for i in range(ours.vocab_size))
        assert ours.decode([len(ranks()) + 1]) == "[EOS]"

    def test_long_texts_are_cut_where_kimi_s_code_cuts_them(self, monkeypatch):
        monkeypatch.setattr(tiktoken_model, "_PIECE", 17)
        monkeypatch.setattr(tiktoken_model, "_RUN", 3)
        dice = random.Random(0)
        for _ in range(2000):
            text = "".join(dice.choices("ab \n\x1c\u3000", k=dice.randrange(60)))
            assert list(tiktoken_model._pieces(text)) == cut_by_counting(text, 17, 3)

    def test_a_cut_is_a_boundary_of_tokens(self, ours):
        mark, one, pair = (ranks()[token] for token in (b"!", b"a", b"aa"))
        assert ours.encode("!" + "a" * 24_999) == [mark, *[pair] * 12_499, one]
        # one word of 25,002 characters: uncut it would end with the lone a
        assert ours.encode("!" + "a" * 25_001) == [mark, *[pair] * 12_499, one, pair]
        assert plain_bpe("!" + "a" * 101) == [mark, *[pair] * 50, one]
        # 400,000 characters end amid a word
        ids = ours.encode("the " * 100_000 + "the")
        assert (ids[0], len(ids)) == (ranks()[b"the"], 100_002)

    def test_white_space_of_the_cuts_is_str_isspace(self):
        every = "".join(map(chr, range(sys.maxunicode + 1)))
        assert re.findall(r"\s", every) == [c for c in every if c.isspace()]


def cut_by_counting(text: str, piece: int, run: int) -> list[str]:
    """Character by character: a new part begins where a run of one kind would grow over the limit."""
    parts = []
    for first in range(0, len(text), piece):
        count, kind, part = 0, None, ""
        for c in text[first : first + piece]:
            count = count + 1 if c.isspace() == kind else 1
            kind = c.isspace()
            if count > run:
                parts.append(part)
                count, part = 1, ""
            part += c
        parts.append(part)
    return parts


class TestFolder:
    def test_tokenizer_json_wins(self, tmp_path):
        write(tmp_path, "broken")
        fixture = Path(__file__).parents[2] / "fixtures" / "tiny-kimi" / "tokenizer.json"
        (tmp_path / "tokenizer.json").write_bytes(fixture.read_bytes())
        assert load_tokenizer(tmp_path).encode("[BOS]") == [1000]

    def test_without_the_library(self, tmp_path, monkeypatch):
        write(tmp_path)
        monkeypatch.setitem(sys.modules, "tiktoken", None)
        with pytest.raises(InputError, match=r"tiktoken\.model: needs the tiktoken package: pip install 'kdtr\[tiktok"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda c: "{", "not valid JSON"),
            (
                lambda c: c | {"tokenizer_class": "QWenTokenizer"},
                'tokenizer_class is "QWenTokenizer"; .* Kimi\'s alone',
            ),
            (lambda c: {k: v for k, v in c.items() if k != "tokenizer_class"}, "tokenizer_class is null"),
            (lambda c: {"tokenizer_class": "TikTokenTokenizer"}, "added_tokens_decoder must be an object"),
            (
                lambda c: with_added(c, "0", {"content": "x"}),
                r'added_tokens_decoder "0": .* special ids are \d+ to \d+',
            ),
            (lambda c: with_added(c, str(10**6), {"content": "x"}), "do the two files belong together"),
            (lambda c: with_added(c, "x", {"content": "x"}), 'added_tokens_decoder "x"'),
            (lambda c: with_added(c, next_id(3), {"content": ""}), "content must be a text that is not empty"),
            (lambda c: with_added(c, next_id(3), {"content": 3}), "content must be a text"),
            (lambda c: with_added(c, next_id(3), "x"), "content must be a text"),
            (lambda c: with_added(c, next_id(3), {"content": "[EOS]"}), r'are both "\[EOS\]"'),
            (lambda c: with_added(c, next_id(3), {"content": "x", "lstrip": True}), "lstrip is not supported"),
        ],
    )
    def test_a_config_that_does_not_fit(self, tmp_path, change, words):
        write(tmp_path, None, change(config(len(ranks()))))
        refused(tmp_path, words, "tokenizer_config.json")

    def test_no_config(self, tmp_path):
        write(tmp_path).with_name("tokenizer_config.json").unlink()
        refused(tmp_path, "missing; it names the special tokens", "tokenizer_config.json")


def next_id(i: int) -> str:
    return str(len(ranks()) + i)


def with_added(settings: dict, key: str, entry: object) -> dict:
    return settings | {"added_tokens_decoder": settings["added_tokens_decoder"] | {key: entry}}


def refused(folder: Path, words: str, name: str = "tiktoken.model") -> None:
    with pytest.raises(InputError, match=words) as caught:
        load_tokenizer(folder)
    assert str(caught.value).startswith(str(folder / name))
    assert "\n" not in str(caught.value)


class TestBrokenFiles:
    GOOD = lines(ranks())

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "no token for the byte 0x00"),
            ("\x00\x01\x02", "line 1: not a token in base64"),
            (b"\xff\xfe" * 1000, "line 1: not a token in base64"),
            ("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n", "line 1: not a token in base64"),
            ("\n".join([*GOOD[:-1], "!!! 300"]), r"line \d+: the token is not base64"),
            ("\n".join([*GOOD, "YQ 9999"]), "the token is not base64"),
            ("\n".join([*GOOD, "YWJj"]), "not a token in base64, a space and its rank; is the file whole"),
            ("\n".join([*GOOD, "YWJj -1"]), "not a token in base64"),
            ("\n".join([*GOOD, "YWJj 1e3"]), "not a token in base64"),
            ("\n".join([*GOOD, f"YWJj {10**30}"]), "not a token in base64"),
            ("\n".join([*GOOD, f"{GOOD[3].split()[0]} {len(GOOD)}"]), r"line \d+: the token of line 4 again"),
            ("\n".join([*GOOD, "YWJj 3"]), r"line \d+: rank 3 stands in line 4 too"),
            ("\n".join([*GOOD, f"YWJj {len(GOOD) + 1}"]), r"tokens, but none has rank \d+; is the file whole"),
            ("\n".join(GOOD[:300])[:-1], "rank 27 stands in line 28 too"),
            ("\n".join(line for i, line in enumerate(GOOD) if i != 100), "none has rank 100"),
            ("\n".join(GOOD[:200]), "no token for the byte 0x"),
            ("\n".join([*GOOD, f" {len(GOOD)}"]), "an empty token"),
            ("\n".join(GOOD[:-1]), "do the two files belong together, and are they whole"),
        ],
    )
    def test_are_one_line(self, tmp_path, text, words):
        write(tmp_path, text)
        with pytest.raises(InputError, match=words) as caught:
            load_tiktoken(tmp_path / "tiktoken.model")
        assert str(caught.value).startswith(str(tmp_path))
        assert "\n" not in str(caught.value)

    def test_a_file_that_is_too_large_is_not_read(self, tmp_path):
        path = write(tmp_path)
        with open(path, "r+b") as file:
            file.truncate(1 << 34)
        with pytest.raises(InputError, match="more than 64 MiB"):
            read_ranks(path)

    def test_a_file_cut_anywhere_is_refused(self, tmp_path):
        whole = ("\n".join(self.GOOD) + "\n").encode()
        for size in range(0, len(whole) - 1, 37):
            write(tmp_path, whole[:size])
            with pytest.raises(InputError):
                load_tokenizer(tmp_path)

    def test_line_ends_of_windows(self, tmp_path, ours):
        write(tmp_path, "\r\n".join(self.GOOD))
        assert load_tokenizer(tmp_path).encode("the thing") == ours.encode("the thing")

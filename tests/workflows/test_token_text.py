"""Token ids as text, by a folder's tokenizer."""

from pathlib import Path

import pytest

from kdtr_cli.errors import InputError
from kdtr_cli.model.tokenizer import load_tokenizer
from kdtr_cli.workflows.token_text import token_texts

pytestmark = pytest.mark.quick

MODEL = Path(__file__).parents[2] / "fixtures" / "tiny-kimi"


def test_every_token_that_the_tokenizer_has_and_no_other():
    text_of, tokenizer = token_texts(MODEL), load_tokenizer(MODEL)
    assert [text_of(i) for i in range(20)] == [tokenizer.decode([i]) for i in range(20)]
    ids = tokenizer.encode("hello")
    assert "".join(text_of(i) for i in ids) == "hello"
    assert text_of(tokenizer.vocab_size) is None
    assert text_of(-1) is None


def test_a_folder_without_one(tmp_path):
    with pytest.raises(InputError, match=r"no tokenizer\.json and no tiktoken\.model"):
        token_texts(tmp_path)
    with pytest.raises(InputError, match=r"--tokenizer .*: no such folder"):
        token_texts(tmp_path / "gone")


def test_a_token_that_can_not_be_decoded_has_no_text(monkeypatch):
    class Broken:
        vocab_size = 5

        def decode(self, ids):
            raise InputError("no")

    monkeypatch.setattr("kdtr_cli.workflows.token_text.load_tokenizer", lambda folder: Broken())
    assert token_texts(MODEL)(3) is None

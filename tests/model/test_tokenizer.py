"""Text ↔ token ids on the trained model's tokenizer, and one clear line where there is none."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr_cli.errors import InputError
from kdtr_cli.model.tokenizer import load_tokenizer

pytestmark = pytest.mark.quick
TINY_KIMI = Path(__file__).parents[2] / "fixtures" / "tiny-kimi"
TOKENIZER = load_tokenizer(TINY_KIMI)


@settings(deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="[")))
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= i < 1000 for i in ids)


def test_code_is_compressed_and_comes_back() -> None:
    text = "def main(argv=None):\n    return [x for x in argv if x is not None]\n"
    ids = TOKENIZER.encode(text)
    assert len(ids) < len(text) / 2
    assert TOKENIZER.decode(ids) == text


def test_no_special_token_is_added_but_written_ones_are_recognised() -> None:
    assert TOKENIZER.encode("") == []
    assert TOKENIZER.encode("[BOS]x[EOS]") == [1000, *TOKENIZER.encode("x"), 1002]
    assert TOKENIZER.decode([1000, *TOKENIZER.encode("x"), 1002]) == "[BOS]x[EOS]"
    assert TOKENIZER.vocab_size == 1024


def test_post_processor_of_the_file_is_obeyed_but_not_its_truncation(tmp_path: Path) -> None:
    spec = json.loads((TINY_KIMI / "tokenizer.json").read_text())
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[BOS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[BOS]": {"id": "[BOS]", "ids": [1000], "tokens": ["[BOS]"]}},
    }
    spec["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    text = "def main(argv=None): return argv"
    assert load_tokenizer(tmp_path).encode(text) == [1000, *TOKENIZER.encode(text)]


def test_missing_or_broken_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tokenizer\.json and no tiktoken\.model; give token ids"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="preset has no tokenizer"):
        load_tokenizer(None)
    for text in ("{", "[]", '{"version": "1.0"}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(InputError, match=r"tokenizer\.json: not a tokenizer") as caught:
            load_tokenizer(tmp_path)
        assert "\n" not in str(caught.value)


def test_folder_may_be_a_string(tmp_path: Path) -> None:
    shutil.copy(TINY_KIMI / "tokenizer.json", tmp_path)
    assert load_tokenizer(str(tmp_path)).encode("x") == TOKENIZER.encode("x")

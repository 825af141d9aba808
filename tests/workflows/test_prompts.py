"""Prompts from ids, text, files and seeds; every fault says where it stands."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr_cli.errors import InputError
from kdtr_cli.model.chat import ChatTemplate
from kdtr_cli.model.config import parse_config
from kdtr_cli.model.presets import PRESETS
from kdtr_cli.model.prompts import Decoding, Prompt, check_prompts
from kdtr_cli.model.tokenizer import load_tokenizer
from kdtr_cli.reference.sampling import PURPOSE_PROMPT, uniform_words
from kdtr_cli.workflows.prompts import PromptOptions, collect_prompts, random_prompt

pytestmark = pytest.mark.quick

TINY = parse_config(PRESETS["tiny"])
KIMI_FOLDER = Path(__file__).parents[2] / "fixtures" / "tiny-kimi"
KIMI = parse_config(json.loads((KIMI_FOLDER / "config.json").read_text()))


def collect(config=TINY, folder=None, **options) -> list[Prompt]:
    return collect_prompts(PromptOptions(**options), config, folder)


def shown(prompts: list[Prompt]) -> list[tuple[str, list[int], int]]:
    assert all(p.ids.dtype == np.int32 for p in prompts)
    return [(p.id, p.ids.tolist(), p.stream) for p in prompts]


class TestRandom:
    def test_are_pinned(self):
        # rule 15, purpose 1: a golden of the same command must hold the same prompts everywhere, for ever
        first = [91, 38, 505, 325, 466, 162, 198, 308, 48, 437, 91, 186, 317, 329, 415, 295]
        assert random_prompt(0, 16, 512, 0).tolist() == first
        assert random_prompt(1, 5, 512, 0).tolist() == [445, 286, 481, 226, 150]
        assert random_prompt(0, 5, 163840, 0).tolist() == [29316, 12342, 161902, 104019, 149328]
        assert random_prompt(0, 5, 257, 2**64 - 1).tolist() == [60, 52, 2, 204, 86]

    @given(
        st.integers(0, 1000),
        st.integers(1, 50),
        st.sampled_from([1, 2, 257, 163840, 2**31 - 1]),
        st.integers(0, 2**64 - 1),
    )
    def test_are_the_high_part_of_the_words(self, index, length, vocab, seed):
        words = uniform_words(length, 0, index, PURPOSE_PROMPT, seed).tolist()
        assert random_prompt(index, length, vocab, seed).tolist() == [w * vocab >> 32 for w in words]

    def test_a_shorter_one_is_the_beginning_of_a_longer_one(self):
        assert random_prompt(3, 9, 512, 1).tolist() == random_prompt(3, 100, 512, 1)[:9].tolist()

    def test_one_of_16_ids_by_default(self):
        assert shown(collect()) == [("0", random_prompt(0, 16, 512, 0).tolist(), 0)]
        assert shown(collect(count=3, length=2, seed=9)) == [
            (str(i), random_prompt(i, 2, 512, 9).tolist(), i) for i in range(3)
        ]
        assert len(collect(count=1)[0].ids) == 16

    def test_sizes_are_checked_before_anything_is_made(self):
        for options, words in (
            ({"count": 0}, "--num-prompts 0: 1 to 1000000"),
            ({"count": 10**15}, "--num-prompts 1000000000000000: 1 to"),
            ({"count": 1, "length": 0}, "--prompt-len 0: 1 to 2048"),
            ({"count": 1, "length": 10**15}, "--prompt-len 1000000000000000: 1 to 2048"),
            ({"length": 3}, "--prompt-len needs --num-prompts"),
        ):
            with pytest.raises(InputError, match=words):
                collect(**options)


class TestIds:
    @pytest.mark.parametrize("text", ["1 2 3", "1,2,3", " 1, 2\t3\n", "+1 02 3"])
    def test_are_whole_numbers(self, text):
        assert shown(collect(ids=(text,))) == [("0", [1, 2, 3], 0)]

    @pytest.mark.parametrize("text", ["1 x", "1.0", "0x10", "1_0", "1e2", "\u0661", "1;2", "nan"])
    def test_nothing_else_is_taken_for_one(self, text):
        with pytest.raises(InputError, match=r"--prompt-ids '.*': not a list of whole numbers"):
            collect(ids=(text,))

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "prompt '1' is empty; a sequence needs at least one token"),
            ("1 512 3", r"prompt '1': token 512 at place 1 is outside the vocabulary 0\.\.511"),
            ("-1", "prompt '1': token -1 at place 0"),
            (str(2**31), "a token id does not fit in 32 bits"),
            (str(-(2**31) - 1), "a token id does not fit in 32 bits"),
            ("9" * 30, "not a list of whole numbers"),
        ],
    )
    def test_which_prompt_is_wrong_and_why(self, text, words):
        with pytest.raises(InputError, match=rf"^--prompt-ids.*{words}") as caught:
            collect(ids=("1 2", text))
        assert "\n" not in str(caught.value)

    def test_a_prompt_longer_than_the_model(self):
        collect(ids=("7 " * 2048,))
        with pytest.raises(InputError, match=r"2049 tokens and 1 steps need position 2048; the model ends at 2047"):
            collect(ids=("7 " * 2049,))


class TestText:
    def test_is_encoded_by_the_folder_s_tokenizer(self):
        (prompt,) = collect(KIMI, KIMI_FOLDER, texts=("Once upon a time",))
        tokenizer = load_tokenizer(KIMI_FOLDER)
        assert prompt.ids.tolist() == tokenizer.encode("Once upon a time")
        assert tokenizer.decode(prompt.ids.tolist()) == "Once upon a time"

    def test_a_preset_has_no_tokenizer(self):
        with pytest.raises(InputError, match="a preset has no tokenizer"):
            collect(texts=("hello",))

    def test_text_that_becomes_no_token(self, tmp_path):
        spec = json.loads((KIMI_FOLDER / "tokenizer.json").read_text())
        spec["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        with pytest.raises(InputError, match=r"^--prompt-text '  ': prompt '0' is empty"):
            collect(KIMI, tmp_path, texts=("  ",))

    def test_empty_and_broken_text(self):
        with pytest.raises(InputError, match=r"^--prompt-text '': prompt '0' is empty"):
            collect(KIMI, KIMI_FOLDER, texts=("",))
        # what a shell passes for a byte that is no UTF-8
        with pytest.raises(InputError, match=r"^--prompt-text .*: half a surrogate pair"):
            collect(KIMI, KIMI_FOLDER, texts=("a\udcff",))


class TestChat:
    TEMPLATE = ChatTemplate(
        "t.jinja",
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'cook' %}{{ raise_exception('no ' ~ m.role) }}{% endif %}"
        "[reserved_3]{{ m.role }}[reserved_4]{{ m.content }}[EOS]{% endfor %}"
        "{% if add_generation_prompt %}[reserved_3]assistant{% endif %}",
        {"bos_token": "[BOS]"},
    )

    def chat(self, folder=KIMI_FOLDER, **options) -> list[Prompt]:
        return collect_prompts(PromptOptions(**options), KIMI, folder, self.TEMPLATE)

    def test_text_is_one_message_of_a_user(self):
        encode = load_tokenizer(KIMI_FOLDER).encode
        head, tail = [1000, 1003, *encode("user"), 1004], [1002, 1003, *encode("assistant")]
        assert shown(self.chat(texts=("Once [EOS]", ""))) == [
            ("0", [*head, *encode("Once "), 1002, *tail], 0),
            ("1", head + tail, 1),
        ]

    def test_messages_of_a_file(self, tmp_path):
        lines = [
            {"id": "a", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Once"}]},
            {"text": "Once"},
        ]
        (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
        prompts = self.chat(file=tmp_path / "p.jsonl")
        decode = load_tokenizer(KIMI_FOLDER).decode
        once = "[reserved_3]user[reserved_4]Once[EOS][reserved_3]assistant"
        assert [(p.id, decode(p.ids.tolist())) for p in prompts] == [
            ("a", f"[BOS][reserved_3]system[reserved_4]s[EOS]{once}"),
            ("1", f"[BOS]{once}"),
        ]

    def test_the_post_processor_adds_nothing_to_a_template_s_text(self, tmp_path):
        spec = json.loads((KIMI_FOLDER / "tokenizer.json").read_text())
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[BOS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"[BOS]": {"id": "[BOS]", "ids": [1000], "tokens": ["[BOS]"]}},
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        assert collect(KIMI, tmp_path, texts=("x",))[0].ids.tolist()[0] == 1000
        (prompt,) = self.chat(tmp_path, texts=("x",))
        assert prompt.ids.tolist().count(1000) == 1

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ('{"ids": [1]}', r"--chat takes text or messages \(--prompt-text, --prompts\), not token ids"),
            ('{"messages": []}', "at least one message"),
            ('{"messages": [{"role": "user"}]}', "message 0 has no content"),
            ('{"messages": [{"role": "user", "content": "x", "content": "y"}]}', "the key 'content' stands twice"),
            ('{"messages": [{"role": "user", "content": "x"}], "text": "x"}', r"must be \{"),
            ('{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}', "content as one text"),
            ('{"messages": [{"role": "cook", "content": "x"}]}', r"the chat template \(t\.jinja\) refuses .*: no cook"),
            ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "half a surrogate pair"),
            ('{"text": "%s"}' % ("x " * 3000), r"prompt '1': \d+ tokens and 1 steps need"),
        ],
    )
    def test_every_bad_line_names_file_and_line(self, tmp_path, line, words):
        path = tmp_path / "p.jsonl"
        path.write_text('{"text": "x"}\n' + line + "\n")
        with pytest.raises(InputError, match=words) as caught:
            self.chat(file=path)
        assert str(caught.value).startswith(f"--prompts {path} line 2: ")
        assert "\n" not in str(caught.value)

    def test_token_ids_and_random_prompts_are_no_chats(self):
        for options in ({"ids": ("1 2",), "texts": ("x",)}, {"count": 2}, {}):
            with pytest.raises(InputError, match=r"--chat takes text or messages .*, not token ids"):
                self.chat(**options)

    def test_messages_without_the_option(self, tmp_path):
        path = tmp_path / "p.jsonl"
        path.write_text('{"ids": [1]}\n{"messages": [{"role": "user", "content": "x"}]}\n')
        with pytest.raises(InputError, match=r"p\.jsonl line 2: messages need --chat"):
            collect(KIMI, KIMI_FOLDER, file=path)


class TestFiles:
    def write(self, tmp_path, text, name="p.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def test_jsonl(self, tmp_path):
        path = self.write(
            tmp_path, '{"id": "a", "ids": [1, 2]}\r\n{"ids": [3]}\n{"text": "Once", "id": 7}\n{"id": null, "ids": [4]}'
        )
        once = load_tokenizer(KIMI_FOLDER).encode("Once")
        assert shown(collect(KIMI, KIMI_FOLDER, file=path)) == [
            ("a", [1, 2], 0),
            ("1", [3], 1),
            ("7", once, 2),
            ("3", [4], 3),
        ]

    def test_txt_is_one_prompt_a_line(self, tmp_path):
        lines = ["Once upon", " a time\u2028there was", "dogs\x0bcats", "one\rline"]
        path = self.write(tmp_path, "\r\n".join(lines) + "\n", "p.txt")
        encode = load_tokenizer(KIMI_FOLDER).encode
        prompts = collect(KIMI, KIMI_FOLDER, file=path)
        assert [p.ids.tolist() for p in prompts] == [encode(line) for line in lines]
        assert [p.id for p in prompts] == ["0", "1", "2", "3"]

    def test_all_sources_in_order(self, tmp_path):
        path = self.write(tmp_path, '{"id": "f", "ids": [5]}\n')
        prompts = collect(KIMI, KIMI_FOLDER, ids=("1 2", "3"), texts=("Once",), file=path, count=2, length=4)
        assert [p.id for p in prompts] == ["0", "1", "2", "f", "4", "5"]
        assert [p.stream for p in prompts] == list(range(6))
        assert prompts[0].ids.tolist() == [1, 2]
        # a random prompt's ids depend on its number among the random ones
        assert prompts[5].ids.tolist() == random_prompt(1, 4, KIMI.vocab_size, 0).tolist()

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("", "empty; a prompt needs at least one token"),
            ("   ", "empty; a prompt needs at least one token"),
            ("{", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ("[1, 2]", r"must be \{"),
            ("3", r"must be \{"),
            ("null", r"must be \{"),
            ('{"id": "a"}', r"must be \{"),
            ('{"ids": [1], "text": "x"}', r"must be \{"),
            ('{"ids": [1], "stream": 3}', r"must be \{"),
            ('{"ids": [1], "ids": [2]}', "the key 'ids' stands twice"),
            ('{"id": true, "ids": [1]}', "id must be text or a whole number"),
            ('{"id": 1.5, "ids": [1]}', "id must be text or a whole number"),
            ('{"id": [1], "ids": [1]}', "id must be text or a whole number"),
            ('{"id": "", "ids": [1]}', "a sequence id must be non-empty text"),
            ('{"id": "a\\u0007", "ids": [1]}', "holds a control character"),
            ('{"id": "\\ud800", "ids": [1]}', "holds a control character"),
            ('{"id": "%s", "ids": [1]}' % ("x" * 257), "longer than 256 bytes"),
            ('{"ids": "1 2"}', "ids must be a list of whole numbers"),
            ('{"ids": [1.0]}', "ids must be a list of whole numbers"),
            ('{"ids": [true]}', "ids must be a list of whole numbers"),
            ('{"ids": [[1]]}', "ids must be a list of whole numbers"),
            ('{"ids": [NaN]}', "ids must be a list of whole numbers"),
            ('{"ids": [99999999999]}', "a token id does not fit in 32 bits"),
            ('{"ids": []}', "prompt '1' is empty"),
            ('{"id": "far", "ids": [1, 1024]}', "prompt 'far': token 1024 at place 1 is outside the vocabulary"),
            ('{"text": 3}', "text must be a string"),
            ('{"text": ""}', "prompt '1' is empty"),
            ('{"text": "\\udc00"}', "half a surrogate pair"),
        ],
    )
    def test_every_bad_line_names_file_and_line(self, tmp_path, line, words):
        path = self.write(tmp_path, '{"id": "good", "ids": [1]}\n' + line + "\n")
        with pytest.raises(InputError, match=words) as caught:
            collect(KIMI, KIMI_FOLDER, file=path)
        assert str(caught.value).startswith(f"--prompts {path} line 2: ")
        assert "\n" not in str(caught.value)

    def test_an_empty_line_of_text(self, tmp_path):
        path = self.write(tmp_path, "one\n\ntwo\n", "p.txt")
        with pytest.raises(InputError, match=r"p\.txt line 2: empty"):
            collect(KIMI, KIMI_FOLDER, file=path)

    def test_files_that_cannot_be_read(self, tmp_path):
        for name, content, words in (
            ("p.json", "{}", r"the name must end in \.jsonl or \.txt"),
            ("p", "{}", r"the name must end in \.jsonl or \.txt"),
            ("p.jsonl", "", "no prompts in it"),
            ("q.txt", "", "no prompts in it"),
            ("r.jsonl", b'{"ids": [1]}\n\xff', "not UTF-8 at byte 13"),
            ("none.jsonl", None, "No such file"),
        ):
            path = tmp_path / name if content is None else self.write(tmp_path, content, name)
            with pytest.raises(InputError, match=words) as caught:
                collect(KIMI, KIMI_FOLDER, file=path)
            assert str(caught.value).startswith(f"--prompts {path}")
        (tmp_path / "d.txt").mkdir()
        with pytest.raises(InputError, match=r"d\.txt: Is a directory"):
            collect(file=tmp_path / "d.txt")

    def test_a_file_that_is_too_large_is_not_read(self, tmp_path):
        path = tmp_path / "large.txt"
        with open(path, "wb") as file:
            file.truncate((1 << 30) + 1)
        with pytest.raises(InputError, match="larger than 1 GB"):
            collect(file=path)


class TestChecks:
    def prompt(self, *ids, name="p") -> Prompt:
        return Prompt(name, np.array(ids, np.int32), 0)

    def test_positions(self):
        # 2048 positions: the last token is drawn but never fed
        assert check_prompts([self.prompt(*[1] * 2046), self.prompt(1, name="q")], TINY, 3) == 2048
        with pytest.raises(
            InputError, match=r"prompt 'p': 2046 tokens and 4 steps need position 2048; the model ends at 2047"
        ):
            check_prompts([self.prompt(*[1] * 2046)], TINY, 4)

    def test_ids_must_differ_and_there_must_be_some(self):
        with pytest.raises(InputError, match="prompt id 'p' stands twice"):
            check_prompts([self.prompt(1), self.prompt(2)], TINY, 1)
        with pytest.raises(InputError, match="no prompts"):
            check_prompts([], TINY, 1)

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"steps": 0}, "--steps 0: at least 1"),
            ({"temperature": -0.5}, "--temperature -0.5: 0"),
            ({"temperature": float("nan")}, "--temperature nan: 0"),
            ({"temperature": float("inf")}, "--temperature inf: 0"),
            ({"temperature": 1e-46}, "--temperature 1e-46: 1e-30 to 1e30, or 0"),
            ({"temperature": 1e39}, r"--temperature 1e\+39: 1e-30 to 1e30, or 0"),
            ({"seed": -1}, "--seed -1: 0 to 2"),
            ({"seed": 2**64}, f"--seed {2**64}: 0 to 2"),
        ],
    )
    def test_settings(self, settings, words):
        with pytest.raises(InputError, match=words):
            Decoding(**{"steps": 1, **settings})

    def test_what_stops(self):
        decoding = Decoding(1, (5, 9))
        assert [decoding.stops(t) for t in (5, 6, 9)] == [True, False, True]
        assert not Decoding(1, (5,), ignore_eos=True).stops(5)
        assert Decoding(1, seed=2**64 - 1, temperature=1e-30).temperature == 1e-30

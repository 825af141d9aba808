"""Chat templates: found, rendered with transformers' settings, and never able to hang, grow or leave the sandbox."""

import hashlib
import importlib.metadata
import json
import re
from pathlib import Path

import pytest

from kdtr_cli.errors import InputError
from kdtr_cli.model import chat
from kdtr_cli.model.chat import ChatTemplate, check_messages, load_chat_template, render_chats

pytestmark = pytest.mark.quick

HI = [{"role": "user", "content": "hi"}]


def render(text: str, *chats: list[dict], **tokens: str) -> tuple[list[str], str | None]:
    return render_chats(ChatTemplate("x.jinja", text, tokens), list(chats) or [HI])


class TestLoad:
    def write(self, folder: Path, **config: object) -> Path:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    def test_the_file_wins_over_the_config(self, tmp_path):
        self.write(tmp_path, chat_template="old", bos_token="<s>")
        assert load_chat_template(tmp_path).text == "old"
        (tmp_path / "chat_template.jinja").write_bytes("a\r\n中".encode())
        found = load_chat_template(str(tmp_path))
        assert (found.text, found.tokens) == ("a\n中", {"bos_token": "<s>"})
        assert found.where == str(tmp_path / "chat_template.jinja")
        assert found.sha256 == hashlib.sha256("a\n中".encode()).hexdigest()

    def test_of_named_ones_the_default(self, tmp_path):
        named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
        assert load_chat_template(self.write(tmp_path, chat_template=named)).text == "d"

    def test_special_tokens_are_texts_or_objects(self, tmp_path):
        tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "unk_token": None}
        assert load_chat_template(self.write(tmp_path, chat_template="x", **tokens)).tokens == {
            "bos_token": "<s>",
            "eos_token": "</s>",
        }

    def test_special_tokens_map_counts_where_transformers_reads_it(self, tmp_path):
        (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<b>"}, "eos_token": "<e>"}')
        self.write(tmp_path, chat_template="x", bos_token="<s>")
        assert load_chat_template(tmp_path).tokens == {"bos_token": "<b>", "eos_token": "<e>"}
        self.write(tmp_path, chat_template="x", bos_token="<s>", added_tokens_decoder={})
        assert load_chat_template(tmp_path).tokens == {"bos_token": "<s>"}

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({}, r"--chat: .*: no chat_template\.jinja and no chat_template in tokenizer_config\.json"),
            ({"chat_template": None}, "no chat_template in"),
            ({"chat_template": 3}, "must be a text, or a list"),
            ({"chat_template": {"default": "x"}}, "must be a text, or a list"),
            ({"chat_template": ["x"]}, "each of the list must be"),
            ({"chat_template": [{"name": "default"}]}, "each of the list must be"),
            ({"chat_template": []}, r"none of the templates has the name default; there are \[\]"),
            ({"chat_template": [{"name": "rag", "template": "x"}]}, r'the name default; there are \["rag"\]'),
            ({"chat_template": [{"name": "rag", "template": "x"}] * 2}, 'two templates have the name "rag"'),
            ({"chat_template": "\udc00"}, "half a surrogate pair"),
            ({"chat_template": "x" * (1 << 20) + "y"}, "1048577 bytes is more than"),
            ({"chat_template": "x", "bos_token": 3}, "bos_token must be a text"),
            ({"chat_template": "x", "bos_token": {}}, None),
        ],
    )
    def test_a_folder_without_a_usable_one(self, tmp_path, config, words):
        self.write(tmp_path, **config)
        if words is None:
            assert load_chat_template(tmp_path).tokens == {}
            return
        with pytest.raises(InputError, match=words) as caught:
            load_chat_template(tmp_path)
        assert "\n" not in str(caught.value)

    def test_a_file_that_is_no_text_or_too_large(self, tmp_path):
        for data, words in ((b"\xff", "not UTF-8"), (b"x" * ((1 << 20) + 1), "1048577 bytes is more")):
            (tmp_path / "chat_template.jinja").write_bytes(data)
            with pytest.raises(InputError, match=words):
                load_chat_template(tmp_path)

    def test_a_preset_and_a_folder_with_nothing(self, tmp_path):
        for folder, words in ((None, "--chat: a preset has no chat template"), (tmp_path, r"no chat_template\.jinja")):
            with pytest.raises(InputError, match=words):
                load_chat_template(folder)


class TestMessages:
    def test_what_is_taken(self):
        parts = [{"type": "text", "text": "a"}]
        given = [
            {"role": "system", "content": "s", "name": None},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]},
            {"role": "anything", "content": ""},
        ]
        assert check_messages(given) == [
            {"role": "system", "content": "s"},
            {"role": "user", "content": parts},
            {"role": "assistant", "tool_calls": [{"id": 1}]},
            {"role": "anything", "content": ""},
        ]

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ([], "at least one message"),
            ({}, "must be a list"),
            ("hi", "must be a list"),
            (["hi"], "message 0 must be"),
            ([*HI, {"content": "x"}], "message 1 must be .* role a text"),
            ([{"role": 3, "content": "x"}], "message 0 must be"),
            ([{"role": "user"}], "message 0 has no content"),
            ([{"role": "user", "content": 3}], "message 0: content must be a text"),
            ([{"role": "user", "content": ["x"]}], "message 0: a part of content must be"),
            ([{"role": "user", "content": [{"type": "text"}]}], "a part of content must be"),
            ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], r'text": …\}, not \{"type": "image"'),
        ],
    )
    def test_what_is_not(self, value, words):
        with pytest.raises(InputError, match=words) as caught:
            check_messages(value)
        assert "\n" not in str(caught.value)


class TestRender:
    def test_settings_are_those_of_transformers(self):
        text = (
            "{% for m in messages %}\n"
            "    {% if loop.index0 == 3 %}{% break %}{% endif %}\n"
            "{{ m['role'] }}: {{ m.content | trim }}\n"
            "  {#- gone -#}\n"
            "{% endfor %}\n"
            "{% if add_generation_prompt %}[{{ bos_token }}{{ eos_token }}{{ none_such }}]{% endif %}\n"
            "{% generation %}{{ tools is none and documents is none }}{% endgeneration %}\n"
            "{{ {'b': '<&>é', 'a': 1} | tojson }}\n"
        )
        assert render(text, [{"role": str(i), "content": f" {i} "} for i in range(9)], bos_token="B") == (
            ['0: 01: 12: 2[B]True{"b": "<&>é", "a": 1}'],
            None,
        )

    def test_many_chats_in_order_and_odd_characters(self):
        chats = [[{"role": "user", "content": f"{i}\u2028\n\x00\udc80中"}] for i in range(50)]
        assert render("{{ messages[0].content }}", *chats) == ([c[0]["content"] for c in chats], None)
        assert render("{{ messages[0].content }}", [{"role": "u", "content": ""}]) == ([""], None)
        assert render("", HI) == ([""], None)

    def test_parts_reach_a_template_that_knows_them(self):
        text = (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{{ p['text'] }}|{{ p | tojson }}{% endfor %}{{ m.content | length }}"
            "{% endif %}{% endfor %}"
        )
        parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
        assert render(text, parts, HI) == (['a|{"type": "text", "text": "a"}1', "hi"], None)

    @pytest.mark.parametrize(
        "text",
        [
            "{{ messages[0].content }}",
            "{{ messages[0]['content'] | trim }}",
            "{{ 'User: ' ~ messages[0].content }}",
            "{{ messages[0].content[0] }}",
            "{{ messages }}",
            "{{ '%s' % messages[0].content }}",
            "{{ '{}'.format(messages[0].content) }}",
            "{{ messages[0].content | join }}",
        ],
    )
    def test_parts_are_never_written_as_python_writes_them(self, text):
        texts, problem = render(text, [{"role": "user", "content": [{"type": "text", "text": "a"}]}])
        assert texts == []
        assert problem == "the chat template (x.jinja) takes content as one text, not as a list of parts"

    def test_the_one_that_fails_is_known(self):
        text = "{% if messages[0].role != 'user' %}{{ raise_exception('Role\n ' ~ messages[0].role) }}{% endif %}x"
        texts, problem = render(text, HI, HI, [{"role": "cook", "content": ""}], HI)
        assert texts == ["x", "x"]
        assert problem == "the chat template (x.jinja) refuses these messages: Role cook"

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("{% if %}", "is no jinja2 template: line 1: Expected an expression"),
            ("\n{% for m in messages %}", "is no jinja2 template: line 2: Unexpected end of template"),
            ("{% include 'x' %}", "fails: TypeError: no loader for this environment"),
            ("{{ x.y }}", "fails: UndefinedError: 'x' is undefined"),
            ("{{ 1 + 'a' }}", "fails: TypeError"),
            ("{{ 1 / 0 }}", "fails: ZeroDivisionError"),
            ("{{ 'x' | no_such }}", "is no jinja2 template: line 1: No filter named 'no_such'"),
            ("{{ raise_exception() }}", "refuses these messages:"),
            ("{{ raise_exception('x' * 9999) }}", r"refuses these messages: x{297}\.\.\."),
            ("{{ strftime_now('%Y') }}", "asks for today's date .* can't be made again; write a fixed value"),
            ("{% set d = strftime_now %}{{ d('%Y') }}", "asks for today's date"),
            ("{{ [1, 2] | random }}", "asks for the filter random"),
            ("{{ lipsum() }}", r"asks for lipsum\(\)"),
        ],
    )
    def test_faults_are_one_line(self, text, words):
        texts, problem = render(text)
        assert texts == []
        assert problem is not None
        assert "\n" not in problem
        assert re.search(rf"^the chat template \(x\.jinja\) {words}", problem), problem

    def test_a_date_that_is_not_asked_for_is_no_fault(self):
        assert render("{% if strftime_now is not defined %}{{ x.y }}{% endif %}ok") == (["ok"], None)


class TestSandbox:
    @pytest.mark.parametrize(
        "text",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ ''['__class__']['__mro__'] }}",
            "{{ (''|attr('__class__')).__mro__ }}",
            "{{ raise_exception.__globals__['sys'].modules }}",
            "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
            "{{ self.__init__.__globals__ }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update(role='x') }}",
            "{{ '{0.__class__.__mro__[1]}'.format('').x.y }}",
            "{% set ns = namespace(__class__=1) %}",
            "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
            "{{ dict.mro().x }}",
            "{{ range.__class__.__base__ }}",
            "{% macro m() %}{% endmacro %}{{ m.__call__.__func__.__code__.co_consts }}",
        ],
    )
    def test_python_is_out_of_reach(self, text):
        texts, problem = render(text)
        assert texts == []
        assert "forbids" in (problem or "") or "is undefined" in problem or "has no attribute" in problem, problem

    def test_files_of_the_place_are_not_imported(self, tmp_path, monkeypatch):
        (tmp_path / "jinja2.py").write_text("raise SystemExit(7)")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        assert render("x") == (["x"], None)

    @pytest.mark.parametrize(
        "text",
        [
            "{{ 'a' * 10**10 }}",
            "{{ '%02000000000d' % 1 }}",
            "{{ 'a'.ljust(10**10) }}",
            "{{ '{:>4000000000}'.format(1) }}",
            "{{ [0] * 10**9 }}",
            "{{ 'x' | center(10**10) }}",
            "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        ],
    )
    def test_memory_is_bounded(self, text):
        texts, problem = render(text)
        assert texts == []
        assert problem == "the chat template (x.jinja) needs more than 512 MiB of memory"

    @pytest.mark.parametrize(
        "text",
        [
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{{ 3 ** (10 ** 9) }}",
        ],
    )
    def test_time_is_bounded(self, text, monkeypatch):
        monkeypatch.setattr(chat, "CPU_SECONDS", 1)
        texts, problem = render(text)
        assert texts == []
        assert problem == "the chat template (x.jinja) took more than 1 s, or more memory than there is"

    def test_waiting_is_bounded_too(self, tmp_path, monkeypatch):
        # a child that is not given the processor uses none
        (tmp_path / "child.py").write_text("import time\ntime.sleep(60)\n")
        monkeypatch.setattr(chat, "WALL_SECONDS", 0.5)
        monkeypatch.setattr(chat.chat_render, "__file__", str(tmp_path / "child.py"))
        assert render("x")[1] == "the chat template (x.jinja) took more than 0.5 s"

    def test_a_child_that_dies_is_one_line(self, tmp_path, monkeypatch):
        (tmp_path / "child.py").write_text('import sys\nprint(\'{"text": "a"}\')\nsys.exit("no\\nluck")\n')
        monkeypatch.setattr(chat.chat_render, "__file__", str(tmp_path / "child.py"))
        texts, problem = render("x", HI, HI)
        assert texts == ["a"]
        assert problem == "the chat template (x.jinja) ended the process that renders it, with code 1 luck"

    def test_output_is_bounded(self, monkeypatch):
        loop = "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}"
        assert render(loop)[1] == "the chat template (x.jinja) writes more than 16777216 characters for one chat"
        monkeypatch.setattr(chat, "MAX_TEXTS", 5)
        texts, problem = render("aa", HI, HI, HI)
        assert texts == ["aa", "aa"]
        assert problem == "the chat template (x.jinja) writes more than 5 characters in all; render fewer chats"

    @pytest.mark.parametrize(
        "text",
        ["{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"],
    )
    def test_depth_is_bounded(self, text):
        assert render(text)[1] == "the chat template (x.jinja) is nested too deeply, or calls itself without end"

    def test_messages_nested_too_deeply(self):
        deep: list = []
        for _ in range(100_000):
            deep = [deep]
        assert render("x", [{"role": "u", "content": "", "tools": deep}]) == ([], "the messages are nested too deeply")


class TestJinja:
    def test_missing_or_too_old(self, monkeypatch):
        def version(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError

        monkeypatch.setattr(importlib.metadata, "version", version)
        with pytest.raises(InputError, match=r"--chat needs the jinja2 package: pip install 'kdtr\[chat\]'"):
            render("x")
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.1.5")
        with pytest.raises(InputError, match=r"jinja2 3\.1\.5 has known holes"):
            render("x")
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.2")
        assert render("x") == (["x"], None)

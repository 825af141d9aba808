"""Text input against transformers: the same template and messages give the same token ids, and so does tiktoken.model.

Both witnesses are offline: a folder with fixtures/tiny-kimi's tokenizer and a template of this file, and transformers'
own conversion of a tiktoken.model (merges worked out from the ranks, words split by another regex engine).
"""

import base64
import json
import random
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import transformers
from transformers.convert_slow_tokenizer import TikTokenConverter

from kdtr_cli.model.chat import check_messages, load_chat_template, render_chats
from kdtr_cli.model.tiktoken_model import PATTERN, RESERVED
from kdtr_cli.model.tokenizer import load_tokenizer

pytestmark = pytest.mark.hf

FIXTURE = Path(__file__).parents[2] / "fixtures" / "tiny-kimi"

#: In the manner of Kimi-K2: a frame of special tokens around every message, a system message if there is none.
KIMI = """
{%- macro body(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content is not none and content is defined -%}
    {%- for part in content -%}{%- if part.type == 'text' -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools -%}[reserved_9]tools[reserved_5]{{ tools | tojson }}[EOS]{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and message.role != 'system' -%}
  [reserved_6]system[reserved_5]Answer in short words.[EOS]
  {%- endif -%}
  {%- set name = message.get('name') or message.role -%}
  {%- if message.role == 'user' -%}[reserved_3]{{ name }}[reserved_5]
  {%- elif message.role == 'assistant' -%}[reserved_4]{{ name }}[reserved_5]
  {%- else -%}[reserved_6]{{ name }}[reserved_5]
  {%- endif -%}
  {{ body(message.content) }}
  {%- for call in message.tool_calls or [] -%}[reserved_7]{{ call.function | tojson }}[reserved_8]{%- endfor -%}
  [EOS]
{%- endfor -%}
{%- if add_generation_prompt -%}[reserved_4]assistant[reserved_5]{%- endif -%}
"""

#: In the manner of DeepSeek-V3: what comes first in a namespace, thoughts cut from earlier answers, bos at the front.
DEEPSEEK = """{% set ns = namespace(system='', first=true, open=false) %}
{% for message in messages %}
    {% if message['role'] == 'system' %}
        {% if ns.first %}{% set ns.system = message['content'] | trim %}{% set ns.first = false %}
        {% else %}{% set ns.system = ns.system + '\\n\\n' + message['content'] %}{% endif %}
    {% endif %}
{% endfor %}
{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% continue %}{% endif %}
    {%- if message['role'] == 'user' %}
        {%- set ns.open = true -%}
        {{ '[reserved_3]' + message['content'] }}
    {%- elif message['role'] == 'assistant' %}
        {%- set ns.open = false %}
        {%- generation %}{{ '[reserved_4]' + message['content'].split('</think>')[-1] + eos_token }}{% endgeneration %}
    {%- else %}
        {{- raise_exception('Roles are user and assistant, not ' + message['role']) }}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt and ns.open %}{{ '[reserved_4]<think>\\n' }}{% endif %}
"""

#: Everything that depends on how the environment is set: white space, escapes, numbers, missing names.
SETTINGS = """
  {% for m in messages %}
    {% if loop.index0 == 2 %}{% break %}{% endif %}
  {{ m | tojson(indent=2) }}
    {#- a remark #}
  {{ m.content | upper }} {{ none_such }} {{ pad_token }} {{ unk_token }}
  {% endfor %}
{{ "<b>&'" }} {{ "<b>" | escape }} {{ 3 / 2 }} {{ 7 // 2 }} {{ dict(a=1) }} {{ true }} {{ none }} {{ [1, 'x'] }}

{{ ['b', 'a'] | sort | join('|') }}{{ messages | length }}{{ messages | map(attribute='role') | list }}

"""

CHATS = [
    [{"role": "user", "content": "def f(x):\n    return"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "<b>é & 'q'</b> 中文\r\n\t[EOS]", "name": "Ann"},
        {"role": "assistant", "content": "<think>hm</think>  done ", "name": None},
        {"role": "user", "content": ""},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "é<", "arguments": "{}"}}]},
    {"role": "tool", "content": "3"},
]


def folder(path: Path, template: object, as_file: bool) -> Path:
    """tiny-kimi's tokenizer, with a post-processor that begins every text with [BOS], and a chat template."""
    spec = json.loads((FIXTURE / "tokenizer.json").read_text())
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[BOS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[BOS]": {"id": "[BOS]", "ids": [1000], "tokens": ["[BOS]"]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(spec))
    config = json.loads((FIXTURE / "tokenizer_config.json").read_text())
    if as_file:
        (path / "chat_template.jinja").write_text(template)
    else:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("template", "as_file", "chats"),
    [
        (KIMI, True, [*CHATS, PARTS]),
        (DEEPSEEK, False, CHATS),
        (SETTINGS, True, CHATS),
        ([{"name": "rag", "template": "x"}, {"name": "default", "template": KIMI}], False, CHATS),
    ],
    ids=["kimi", "deepseek", "settings", "named"],
)
def test_a_template_gives_the_ids_that_transformers_gives(tmp_path, template, as_file, chats):
    place = folder(tmp_path, template, as_file)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(place)
    ours = load_tokenizer(place)
    texts, problem = render_chats(load_chat_template(place), [check_messages(chat) for chat in chats])
    assert problem is None
    for chat, text in zip(chats, texts, strict=True):
        assert text == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        expected = theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert ours.encode(text, rendered=True) == expected
        assert ours.encode(text) == [1000, *expected]


def test_a_role_that_a_template_refuses_is_refused_by_both(tmp_path):
    place = folder(tmp_path, DEEPSEEK, True)
    chat = [{"role": "cook", "content": "x"}]
    with pytest.raises(Exception, match="Roles are user and assistant, not cook"):
        transformers.PreTrainedTokenizerFast.from_pretrained(place).apply_chat_template(chat)
    texts, problem = render_chats(load_chat_template(place), [chat])
    assert texts == []
    assert problem is not None
    assert problem.endswith("refuses these messages: Roles are user and assistant, not cook")


def test_a_tiktoken_model_gives_the_ids_of_transformers_conversion(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    ranks = {bytes([byte]): byte for byte in range(256)}
    for word in ("the", " the", "ing", "'s", "    ", "\n\n", "中文", "é", "123", "Th", "!!", "aa", "العر"):
        data = word.encode()
        for size in range(2, len(data) + 1):
            ranks.setdefault(data[:size], len(ranks))
    base = len(ranks)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (tmp_path / "tiktoken.model").write_text("".join(lines))
    names = {0: "[BOS]", 1: "[EOS]", 9: "<think>", 255: "[PAD]"}
    added = {str(base + i): {"content": text} for i, text in names.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    special = [names.get(i, f"<|reserved_token_{base + i}|>") for i in range(RESERVED)]
    converter = TikTokenConverter(
        vocab_file=str(tmp_path / "tiktoken.model"), pattern=PATTERN, extra_special_tokens=special
    )
    theirs, ours = converter.converted(), load_tokenizer(tmp_path)
    alphabet = [
        *"theinga'sTHEäéЖǅʰ中文あ١123!.,-😀العر  \t\n\r\u3000\u0301",
        "[BOS]",
        "<think>",
        f"<|reserved_token_{base + 2}|>",
    ]
    dice = random.Random(0)
    for _ in range(2000):
        text = "".join(dice.choices(alphabet, k=dice.randrange(40)))
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text

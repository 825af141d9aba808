"""`kdtr golden` with text: through a chat template, and through Kimi's tiktoken.model."""

import base64
import hashlib
import json
import shutil
from pathlib import Path

import pytest
from invoke import kdtr

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.model.tokenizer import load_tokenizer

MODEL = Path(__file__).parents[2] / "fixtures" / "tiny-kimi"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ('user', 'system') %}"
    "{{ raise_exception('unknown role: ' ~ m.role) }}{% endif %}"
    "[reserved_3]{{ m.role }}[reserved_4]{{ m.content }}[EOS]{% endfor %}"
    "{% if add_generation_prompt %}[reserved_3]assistant[reserved_4]{% endif %}\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(MODEL, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def kimi(tmp_path_factory) -> Path:
    """The same model with a tiktoken.model of 768 tokens, so that the special ones end with its vocabulary."""
    path = tmp_path_factory.mktemp("tiktoken") / "model"
    shutil.copytree(MODEL, path)
    (path / "tokenizer.json").unlink()
    ranks = [bytes([byte]) for byte in range(256)] + [f"{i:03d}".encode() for i in range(512)]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    (path / "tiktoken.model").write_text("".join(lines))
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {"768": {"content": "[BOS]"}, "1023": {"content": "[PAD]"}},
        "bos_token": "[BOS]",
        "chat_template": "{{ bos_token }}{{ messages[-1].content }}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "tokenization_kimi.py").write_text("raise SystemExit('a model folder runs code')")
    return path


class TestChat:
    def test_the_bundle_holds_the_template_s_tokens_and_its_digest(self, folder, tmp_path):
        path = tmp_path / "g.h5"
        made = kdtr("golden", folder, "-o", path, "--chat", "--prompt-text", "Stack?", "--steps", 3)
        assert made.exit_code == 0, made.stderr
        text = "[BOS][reserved_3]user[reserved_4]Stack?[EOS][reserved_3]assistant[reserved_4]"
        assert f"    {text}\n" in made.stdout
        with open_bundle(path) as bundle:
            assert load_tokenizer(folder).decode(bundle.sequences[0].prompt.tolist()) == text
            digest = hashlib.sha256(TEMPLATE.encode()).hexdigest()
            assert bundle.manifest["prompts"] == {"chat_template_sha256": digest}
        assert kdtr("verify", path).exit_code == 0

    def test_without_the_option_nothing_is_different(self, folder, tmp_path):
        for name, model in (("a.h5", folder), ("b.h5", MODEL)):
            made = kdtr("golden", model, "-o", tmp_path / name, "--prompt-text", "Stack?", "--steps", 2)
            assert made.exit_code == 0, made.stderr
        with open_bundle(tmp_path / "a.h5") as a, open_bundle(tmp_path / "b.h5") as b:
            assert "prompts" not in a.manifest
            assert a.sequences[0].prompt.tolist() == b.sequences[0].prompt.tolist()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--prompt-ids", "1 2"], "--prompt-ids '1 2': --chat takes text or messages"),
            ([], "random prompt 0: --chat takes text or messages (--prompt-text, --prompts), not token ids"),
            (["--prompts", "cook.jsonl"], "--prompts cook.jsonl line 1: the chat template ("),
        ],
    )
    def test_prompts_that_do_not_fit(self, folder, tmp_path, monkeypatch, options, message):
        monkeypatch.chdir(tmp_path)
        Path("cook.jsonl").write_text('{"messages": [{"role": "cook", "content": "x"}]}')
        result = kdtr("golden", folder, "-o", "g.h5", "--chat", *options)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"kdtr: error: {message}")
        assert result.stderr.count("\n") == 1
        assert not Path("g.h5").exists()
        if "cook.jsonl" in options:
            assert result.stderr.endswith("chat_template.jinja) refuses these messages: unknown role: cook\n")

    @pytest.mark.parametrize("model", [MODEL, "tiny"])
    def test_no_template(self, model, tmp_path):
        result = kdtr("golden", model, "-o", tmp_path / "g.h5", "--chat", "--prompt-text", "x")
        assert result.exit_code == 2
        assert result.stderr.startswith("kdtr: error: --chat: ")
        assert result.stderr.count("\n") == 1


class TestTiktoken:
    def test_text_through_to_the_continuation(self, kimi, tmp_path):
        path = tmp_path / "g.h5"
        made = kdtr("golden", kimi, "-o", path, "--prompt-text", "[BOS]é 007", "--steps", 4, "--ignore-eos")
        assert made.exit_code == 0, made.stderr
        assert "    [BOS]é 007\n" in made.stdout
        with open_bundle(path) as bundle:
            assert bundle.sequences[0].prompt.tolist() == [768, 0xC3, 0xA9, 0x20, 256 + 7]

    def test_a_round_is_shown_with_texts(self, kimi, tmp_path):
        path = tmp_path / "g.h5"
        made = kdtr(
            "golden", kimi, "-o", path, "--chat", "--prompt-text", "\u00e9", "--steps", 4, "--ddtree", "--drafter",
            "synthetic:1", "--ignore-eos",
        )  # fmt: skip
        assert made.exit_code == 0, made.stderr
        result = kdtr("inspect", path, "--round", 0, "--tokenizer", kimi, "--format", "json")
        assert result.exit_code == 0, result.stderr
        tokenizer = load_tokenizer(kimi)
        for node in json.loads(result.stdout)["round"]["nodes"]:
            assert node["text"] == tokenizer.decode([node["token"]])

    def test_a_broken_file_is_one_line(self, kimi, tmp_path):
        shutil.copytree(kimi, tmp_path / "m")
        (tmp_path / "m" / "tiktoken.model").write_text("version https://git-lfs.github.com/spec/v1\n")
        result = kdtr("golden", tmp_path / "m", "-o", tmp_path / "g.h5", "--prompt-text", "x")
        assert result.exit_code == 2
        assert result.stderr.startswith(f"kdtr: error: {tmp_path}/m/tiktoken.model line 1: not a token in base64")
        assert result.stderr.count("\n") == 1


def test_ids_that_would_turn_or_hide_text_are_shown_as_escapes(tmp_path):
    prompts, path = tmp_path / "p.jsonl", tmp_path / "g.h5"
    prompts.write_text("".join(json.dumps({"id": id, "ids": [1]}) + "\n" for id in ("\u202eab", "\u200b", "##[error]")))
    made = kdtr("golden", "tiny", "-o", path, "--prompts", prompts, "--steps", 1)
    assert made.exit_code == 0, made.stderr
    names = [line.split(" ")[0] for line in made.stdout.splitlines()[:3]]
    assert names == ["[\\u202eab]", "[\\u200b]", "[#\\x23[error]]"]

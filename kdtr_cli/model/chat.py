"""Chat templates: read from a model folder, rendered as transformers does, in a process of their own that is bounded.

The template is a program of a stranger. jinja2's sandbox keeps it from Python's objects; that it ends, and with how
much memory, only the operating system can promise, so chat_render.py runs in a child with limits.
"""

import hashlib
import importlib.metadata
import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtr_cli.errors import InputError
from kdtr_cli.model import chat_render
from kdtr_cli.model.fields import read_json, read_text, shown

__all__ = ["ChatTemplate", "check_messages", "load_chat_template", "render_chats"]

CPU_SECONDS = 10  #: processor time of all chats together; a usual template takes well under a millisecond each
WALL_SECONDS = 60  #: of the clock, where others have the processor
MEMORY = 1 << 29  #: bytes of address space, beside what the chats themselves need
MAX_TEXT = 1 << 24  #: characters of one rendered chat
MAX_TEXTS = 1 << 26  #: characters of all of them
_TEMPLATE_LIMIT = 1 << 20
_JINJA = (3, 1, 6)  # older ones have known ways out of the sandbox
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatTemplate:
    """A template: where it stands (for messages), its text, and the special tokens by name that it may write."""

    where: str
    text: str
    tokens: dict[str, str]

    @property
    def sha256(self) -> str:
        """SHA-256 of the text in UTF-8, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def load_chat_template(folder: Path | str | None) -> ChatTemplate:
    """The template of a model folder: chat_template.jinja, else chat_template in tokenizer_config.json.

    Of several named ones the one named default. InputError where there is none.
    """
    if folder is None:
        raise InputError("--chat: a preset has no chat template; leave --chat out")
    file, path = Path(folder) / "chat_template.jinja", Path(folder) / "tokenizer_config.json"
    config = read_json(path)[0] if path.is_file() else {}
    tokens = _named_tokens(Path(folder), path, config)
    if file.is_file():
        # line ends as Python's text files have them, which is how transformers reads it
        text = read_text(file, _TEMPLATE_LIMIT).replace("\r\n", "\n").replace("\r", "\n")
        return ChatTemplate(str(file), text, tokens)
    where = f"{path}: chat_template"
    found = config.get("chat_template")
    if found is None:
        raise InputError(f"--chat: {folder}: no chat_template.jinja and no chat_template in tokenizer_config.json")
    if isinstance(found, list):
        found = _default(found, where)
    if not isinstance(found, str):
        raise InputError(f"{where} must be a text, or a list of {{name, template}}, not {shown(found)}")
    try:
        size = len(found.encode())
    except UnicodeEncodeError:
        raise InputError(f"{where}: half a surrogate pair, which no UTF-8 text holds") from None
    if size > _TEMPLATE_LIMIT:
        raise InputError(f"{where}: {size} bytes is more than the {_TEMPLATE_LIMIT} that kdtr reads")
    return ChatTemplate(where, found, tokens)


def _default(entries: list[Any], where: str) -> Any:
    named = {}
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise InputError(f"{where}: each of the list must be {{name, template}}, not {shown(entry)}")
        if entry["name"] in named:
            raise InputError(f"{where}: two templates have the name {shown(entry['name'])}")
        named[entry["name"]] = entry["template"]
    if "default" not in named:
        raise InputError(f"{where}: none of the templates has the name default; there are {shown(sorted(named))}")
    return named["default"]


def _named_tokens(folder: Path, path: Path, config: dict[str, Any]) -> dict[str, str]:
    legacy = folder / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and legacy.is_file():  # where transformers too still reads it
        path, config = legacy, {**config, **read_json(legacy)[0]}
    tokens = {}
    for name in _TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if value is None:
            continue
        if not isinstance(value, str):
            raise InputError(f"{path}: {name} must be a text, or an object with the text content")
        tokens[name] = value
    return tokens


def check_messages(value: Any) -> list[dict[str, Any]]:
    """Messages from JSON, each with a role and a text or text parts as content; keys that are null are left out.

    Further keys (name, tool_calls, reasoning_content, …) are the template's business. InputError for anything else.
    """
    if not isinstance(value, list) or not value:
        raise InputError("messages must be a list with at least one message")
    return [_message(message, f"message {i}") for i, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(f'{where} must be {{"role": …, "content": …}}, role a text')
    if "content" not in message:
        raise InputError(f"{where} has no content; null says that there is none")
    content = message["content"]
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise InputError(f'{where}: a part of content must be {{"type": "text", "text": …}}, not {shown(part)}')
    elif content is not None and not isinstance(content, str):
        raise InputError(f"{where}: content must be a text, a list of text parts, or null")
    return {key: item for key, item in message.items() if item is not None}


def render_chats(template: ChatTemplate, chats: list[list[dict[str, Any]]]) -> tuple[list[str], str | None]:
    """The texts of chats, each with the head of the answer (add_generation_prompt).

    Where one can't be rendered: the texts before it, and what went wrong in one line; else None. InputError where
    jinja2 is missing or too old.
    """
    _check_jinja()
    request = {
        "path": sys.path,
        "template": template.text,
        "tokens": template.tokens,
        "chats": chats,
        "max_text": MAX_TEXT,
        "max_texts": MAX_TEXTS,
        "cpu_seconds": CPU_SECONDS,
    }
    try:
        # the copies of a request as JSON, as text and as objects are not the template's doing
        size = len(json.dumps(chats))
        text = json.dumps({**request, "memory": MEMORY + 32 * size})
    except RecursionError:
        return [], "the messages are nested too deeply"
    try:
        done = subprocess.run(
            [sys.executable, "-I", chat_render.__file__], input=text.encode(), capture_output=True,
            timeout=WALL_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return _replies(template, error.stdout or b"", f"took more than {WALL_SECONDS} s")
    if done.returncode == -signal.SIGXCPU or done.returncode == -signal.SIGKILL:
        end = f"took more than {CPU_SECONDS} s, or more memory than there is"
    else:
        last = done.stderr.decode(errors="replace").split("\n")[-2:]
        end = f"ended the process that renders it, with code {done.returncode} {' '.join(last)}".strip()
    return _replies(template, done.stdout, end)


def _replies(template: ChatTemplate, output: bytes, end: str) -> tuple[list[str], str | None]:
    """The child's lines: the texts, up to a reply that says what went wrong, or to ``end`` where there is no reply."""
    texts = []
    *lines, _unfinished = output.split(b"\n")
    for line in lines:
        reply = json.loads(line)
        if "done" in reply:
            return texts, None
        if "error" in reply:
            end = reply["error"]
            break
        texts.append(reply["text"])
    return texts, f"the chat template ({template.where}) {' '.join(end.split())}"


def _check_jinja() -> None:
    try:
        version = importlib.metadata.version("jinja2")
    except importlib.metadata.PackageNotFoundError:
        raise InputError("--chat needs the jinja2 package: pip install 'kdtr[chat]'") from None
    if tuple(int(n) for n in re.findall(r"\d+", version)[:3]) < _JINJA:
        raise InputError(f"--chat: jinja2 {version} has known holes in its sandbox: pip install 'kdtr[chat]'")

"""Log-probabilities in the JSON of inference servers: that of vLLM, llama.cpp and SGLang.

Tokens are taken by id. A form that names them by their text alone is refused, since several ids may have one text. A
value that is null, "-inf" or the -9999 that stands for "not among the top" is no value: its id counts as not given.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdtr_cli.errors import EngineError
from kdtr_cli.model.fields import shown
from kdtr_cli.model.prompts import Decoding
from kdtr_cli.workflows.engines import AnswerSequence

__all__ = ["Listed", "as_sequences", "finish_of", "is_answer", "read_answers"]

#: At and below it a log-probability says "not given": vLLM and OpenAI write -9999.0, llama.cpp the lowest float32.
SENTINEL = -9999.0

_NAMED = re.compile(r"token_id:([0-9]{1,10})")
_CONSTANTS = {"nan": math.nan, "inf": math.inf, "infinity": math.inf, "-inf": -math.inf, "-infinity": -math.inf}

#: The least that tells the forms apart: a key at the top of the document.
_KEYS = ("choices", "completion_probabilities", "meta_info", "outputs")

Row = dict[int, float]


@dataclass(frozen=True)
class Listed:
    """What was generated for one prompt: ``tokens``, "length" or "stop", for each token the log-probabilities that were
    given (None: none for this token; the whole None: for no token), and what is said of the prompt, where it is.
    ``chosen``: what the server itself chose at each step, where it was fed other tokens."""

    tokens: list[int]
    finish: str
    rows: list[Row | None] | None
    prompt: list[int] | None = None
    prompt_length: int | None = None
    chosen: list[int] | None = None


def is_answer(document: object) -> bool:
    """Whether a JSON value looks like the answer of a server."""
    return isinstance(document, dict) and any(key in document for key in _KEYS)


def read_answers(document: Mapping[str, Any], where: str) -> list[Listed]:
    """The answers in one JSON object: several where a server was asked several prompts at once. EngineError: no form
    that is known, or one that breaks its own rules."""
    if "choices" in document:
        return _choices(document, where)
    if "completion_probabilities" in document:
        return [_llama(document, where)]
    if "meta_info" in document:
        return [_sglang(document, where)]
    if "outputs" in document:
        return [_request_output(document, where)]
    raise EngineError(f"{where}: it has none of {', '.join(_KEYS)}: no server's answer with log-probabilities")


def _choices(document: Mapping[str, Any], where: str) -> list[Listed]:
    """OpenAI's completions as vLLM and llama.cpp answer them, and chat completions with ids."""
    choices = _list(document["choices"], f"{where}: choices")
    found: dict[int, Listed] = {}
    usage = document.get("usage")
    length = usage.get("prompt_tokens") if isinstance(usage, dict) and len(choices) == 1 else None
    for place, choice in enumerate(choices):
        at = f"{where}: choices[{place}]"
        index = _object(choice, at).get("index", place)
        if type(index) is not int or index in found or not 0 <= index < len(choices):
            raise EngineError(f"{at}: its index is {shown(index)}, not one of 0..{len(choices) - 1} of its own")
        found[index] = _choice(choice, at, document, length)
    return [found[index] for index in range(len(choices))]


def _choice(choice: Mapping[str, Any], at: str, document: Mapping[str, Any], length: object) -> Listed:
    logprobs = _object(choice.get("logprobs"), f"{at}: logprobs")
    if "content" in logprobs:
        tokens, rows = _entries(_list(logprobs["content"], f"{at}: logprobs.content"), f"{at}: logprobs.content")
    else:
        names = _list(logprobs.get("tokens"), f"{at}: logprobs.tokens")
        tokens = [_named(name, f"{at}: logprobs.tokens[{i}]") for i, name in enumerate(names)]
        own = _list(logprobs.get("token_logprobs"), f"{at}: logprobs.token_logprobs")
        top = logprobs.get("top_logprobs") or [None] * len(tokens)
        _same_length(at, tokens, own, _list(top, f"{at}: logprobs.top_logprobs"))
        rows = [
            _row(
                [(_named(name, f"{at}: step {i}"), value) for name, value in _object(given, f"{at}: step {i}").items()]
                if given
                else [(tokens[i], own[i])],
                f"{at}: step {i}",
            )
            for i, given in enumerate(top)
        ]
    if (ids := choice.get("token_ids")) is not None and _ids(ids, f"{at}: token_ids") != tokens:
        raise EngineError(f"{at}: token_ids and logprobs name other tokens")
    prompt = choice.get("prompt_token_ids", document.get("prompt_token_ids"))
    return Listed(tokens, _finish(choice.get("finish_reason"), at), rows, _maybe_ids(prompt, at), _length(length))


def _llama(document: Mapping[str, Any], where: str) -> Listed:
    """llama.cpp's own /completion."""
    listed = _list(document["completion_probabilities"], f"{where}: completion_probabilities")
    tokens, rows = _entries(listed, f"{where}: completion_probabilities")
    if (ids := document.get("tokens")) and _ids(ids, f"{where}: tokens") != tokens:
        raise EngineError(
            f"{where}: tokens has {len(ids)} ids, completion_probabilities {len(tokens)}, and they are not the same"
        )
    if document.get("truncated") is True:
        raise EngineError(f"{where}: the server cut the prompt short (truncated); start it with a larger --ctx-size")
    reasons = {"eos": "stop", "word": "stop", "limit": "length"}
    finish = _finish(reasons.get(str(document.get("stop_type")), document.get("stop_type")), where)
    return Listed(tokens, finish, rows, None, _length(document.get("tokens_evaluated")))


def _entries(entries: Sequence[Any], at: str) -> tuple[list[int], list[Row | None]]:
    """A list with one object a token: {id, logprob, top_logprobs: [{id, logprob}, …]}."""
    tokens, rows = [], []
    for i, item in enumerate(entries):
        step = f"{at}[{i}]"
        entry = _object(item, step)
        if "top_probs" in entry or "probs" in entry:
            raise EngineError(f"{step}: it holds probabilities after sampling; ask for log-probabilities before it")
        tokens.append(_identified(entry, step))
        given = _list(entry.get("top_logprobs") or [entry], f"{step}.top_logprobs")
        pairs = [(_identified(_object(one, step), step), _object(one, step).get("logprob")) for one in given]
        rows.append(_row(pairs, step))
    return tokens, rows


def _sglang(document: Mapping[str, Any], where: str) -> Listed:
    """SGLang's own /generate: [logprob, id, text] for each token, and lists of them for the top."""
    meta = _object(document["meta_info"], f"{where}: meta_info")
    own = [_triple(t, where) for t in _list(meta.get("output_token_logprobs"), f"{where}: output_token_logprobs")]
    tokens = [token for token, _ in own]
    top = meta.get("output_top_logprobs") or [None] * len(own)
    _same_length(where, tokens, _list(top, f"{where}: output_top_logprobs"))
    rows = [
        _row([_triple(t, where) for t in _list(given, where)] if given else [own[i]], f"{where}: step {i}")
        for i, given in enumerate(top)
    ]
    reason = meta.get("finish_reason")
    reason = reason.get("type") if isinstance(reason, dict) else reason
    return Listed(tokens, _finish(reason, where), rows, None, _length(meta.get("prompt_tokens")))


def _triple(value: Any, where: str) -> tuple[int, Any]:
    if not isinstance(value, list) or len(value) < 2:
        raise EngineError(f"{where}: {shown(value)} is no [logprob, id, text]")
    return _id(value[1], where), value[0]


def _request_output(document: Mapping[str, Any], where: str) -> Listed:
    """vLLM's RequestOutput as JSON: outputs[0].token_ids, and for each token {id: {logprob, rank, …}}."""
    outputs = _list(document["outputs"], f"{where}: outputs")
    if len(outputs) != 1:
        raise EngineError(f"{where}: outputs has {len(outputs)} entries; one for each prompt is expected (n=1)")
    output = _object(outputs[0], f"{where}: outputs[0]")
    tokens = _ids(output.get("token_ids"), f"{where}: outputs[0].token_ids")
    rows: list[Row | None] | None = None
    if (given := output.get("logprobs")) is not None:
        _same_length(where, tokens, _list(given, f"{where}: outputs[0].logprobs"))
        rows = [None if row is None else _by_id(row, f"{where}: step {i}") for i, row in enumerate(given)]
    prompt = _maybe_ids(document.get("prompt_token_ids"), where)
    return Listed(tokens, _finish(output.get("finish_reason"), where), rows, prompt)


def _by_id(row: Any, where: str) -> Row:
    pairs = []
    for name, value in _object(row, where).items():
        if not name.isascii() or not name.isdigit() or len(name) > 10:
            raise EngineError(f"{where}: {shown(name)} is no token id")
        pairs.append((int(name), value.get("logprob") if isinstance(value, dict) else value))
    return _row(pairs, where)


def _row(pairs: Sequence[tuple[int, Any]], where: str) -> Row:
    """The values that are there, by id; two values for an id are a fault."""
    row: Row = {}
    seen = set()
    for token, item in pairs:
        if token in seen:
            raise EngineError(f"{where}: it holds the id {token} twice")
        seen.add(token)
        value = _CONSTANTS.get(item.lower()) if isinstance(item, str) else item
        if item is not None and (type(value) not in (int, float) or (type(value) is int and abs(value) > 2**62)):
            raise EngineError(f"{where}: the log-probability of {token} is {shown(item)}, which is no number")
        if item is not None and not value <= SENTINEL:  # a NaN stays, to be seen
            row[token] = float(value)
    return row


def _identified(entry: Mapping[str, Any], where: str) -> int:
    return _id(entry["id"], where) if "id" in entry else _named(entry.get("token"), where)


def _named(name: object, where: str) -> int:
    """The id in vLLM's ``token_id:5``; a token's text says which one it is only sometimes, and so never here."""
    if (found := _NAMED.fullmatch(name) if isinstance(name, str) else None) is None:
        raise EngineError(
            f"{where}: it names a token by its text ({shown(name)}), which need not be one id's alone: ids are needed "
            '("return_tokens_as_token_ids": true of vLLM; SGLang has them in /generate alone)'
        )
    return int(found[1])


def _id(value: object, where: str) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise EngineError(f"{where}: {shown(value)} is no token id")
    return value


def _ids(value: object, where: str) -> list[int]:
    return [_id(item, where) for item in _list(value, where)]


def _maybe_ids(value: object, where: str) -> list[int] | None:
    return None if value is None else _ids(value, f"{where}: prompt_token_ids")


def _length(value: object) -> int | None:
    return value if type(value) is int else None


def _finish(reason: object, where: str) -> str:
    if reason not in ("length", "stop"):
        raise EngineError(f"{where}: it ended by {shown(reason)}, not by length or stop")
    return str(reason)


def _same_length(where: str, tokens: Sequence[int], *lists: Sequence[Any]) -> None:
    for other in lists:
        if len(other) != len(tokens):
            raise EngineError(f"{where}: {len(tokens)} tokens, but log-probabilities of {len(other)}")


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EngineError(f"{where} is {shown(value)}, not an object")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise EngineError(f"{where} is {shown(value)}, not a list")
    return value


def finish_of(tokens: Sequence[int], decoding: Decoding) -> str:
    """How decoding ended that gave these tokens: "stop" where the last is a stop id that counts."""
    stopped = len(tokens) > 0 and not decoding.ignore_eos and int(tokens[-1]) in decoding.stop_ids
    return "stop" if stopped else "length"


def as_sequences(answers: Sequence[Listed], greedy: bool) -> list[AnswerSequence]:
    """The answers as sequences of top K, K that of the longest row; a row that is shorter has a count. ``greedy``: each
    token was chosen for the largest log-probability."""
    kept = [
        None if a.rows is None else [_top(r, t, greedy) for r, t in zip(a.rows, a.chosen or a.tokens, strict=True)]
        for a in answers
    ]
    width = max((len(row) for rows in kept for row in rows or ()), default=0)
    return [_sequence(a, rows, max(1, width)) for a, rows in zip(answers, kept, strict=True)]


def _top(row: Row | None, token: int, greedy: bool) -> list[tuple[int, float]]:
    """A row's ids and values, without the chosen token where that is there only because it was chosen: vLLM adds it to
    the top K, and then what is not in the row need not lie below it."""
    if row is None:
        return []
    items = list(row.items())
    own = row.get(token)
    others = [value for other, value in items if other != token]
    if own is not None and (all(value > own for value in others) if others else not greedy):
        items = [(other, value) for other, value in items if other != token]
    return items


def _sequence(answer: Listed, rows: list[list[tuple[int, float]]] | None, width: int) -> AnswerSequence:
    tokens = np.array(answer.tokens, np.int64)
    if rows is None:
        return AnswerSequence(tokens, answer.finish)
    ids = np.zeros((len(rows), width), np.int64)
    values = np.zeros((len(rows), width), np.float32)
    with np.errstate(over="ignore"):
        for t, row in enumerate(rows):
            ids[t, : len(row)] = [token for token, _ in row]
            values[t, : len(row)] = [value for _, value in row]
    counts = np.array([len(row) for row in rows], np.int32)
    return AnswerSequence(tokens, answer.finish, top_ids=ids, top_values=values, top_counts=counts)

"""An engine's answer, checked and made into what a bundle holds. Whatever engine it came from, the checks are these.

A fault in form is an EngineError and no bundle. What can be judged is kept as it is, so that the judge says what it
is: too few tokens, another finish reason, logits that are not finite.
"""

import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from kdtr_cli.bundle.schema import FINISH_REASONS
from kdtr_cli.errors import EngineError
from kdtr_cli.model.fields import shown
from kdtr_cli.model.prompts import Generated
from kdtr_cli.reference.arith import order
from kdtr_cli.workflows.engines import AnswerSequence, Question

__all__ = ["check_about", "check_sequence", "form_of"]

_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TEXTS = ("name", "version", "device", "driver", "compiler", "tier")
_MAX_TEXT = 200
_VALUES = ("logits", "logprobs")
_MOST_LOGPROB = 1e-3  # a log-probability is at most 0; this much is rounding


def check_about(about: Mapping[str, Any], tier: str) -> None:
    """What the engine says of itself: known keys, short printable texts, a digest, choices, and the tier asked for."""
    for key, value in about.items():
        if key in _TEXTS:
            if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= _MAX_TEXT:
                raise EngineError(f"about.{key} is {shown(value)}, not 1 to {_MAX_TEXT} printable characters")
        elif key == "weights_used_sha256":
            if not isinstance(value, str) or not _SHA256.fullmatch(value):
                raise EngineError(f"about.{key} is {shown(value)}, not 64 lower-case hexadecimal digits")
        elif key == "values":
            if value not in _VALUES:
                raise EngineError(f"about.{key} is {shown(value)}, not {' or '.join(_VALUES)}")
        elif key == "choices":
            if not isinstance(value, dict) or any(not isinstance(v, str) for v in value.values()):
                raise EngineError(f"about.{key} is {shown(value)}, not texts by name")
        else:
            known = ", ".join((*_TEXTS, "weights_used_sha256", "values", "choices"))
            raise EngineError(f"about has the key {shown(key)}, which is none of {known}")
    if about.get("tier", tier) != tier:
        raise EngineError(f"the engine says that its tier is {about['tier']}; run it with --tier {about['tier']}")


def form_of(sequence: AnswerSequence) -> str:
    """The manifest's word for the logits that a checked sequence has: full, top:K or none."""
    if sequence.logits is not None:
        return "full"
    return "none" if sequence.top_ids is None else f"top:{sequence.top_ids.shape[1]}"


def check_sequence(
    question: Question, index: int, answer: AnswerSequence, values: str = "logits"
) -> tuple[Generated, dict[str, np.ndarray]]:
    """One checked sequence: the tokens and the reason, and the arrays of a run bundle. ``values``: what the engine says
    that its logits are, "logits" or "logprobs". EngineError: a fault in form."""
    prompt = question.prompts[index]
    where = f"sequence {shown(prompt.id)}"
    tokens = _ids(where, "tokens", answer.tokens, question.vocab, 1)
    if answer.finish_reason not in FINISH_REASONS:
        reasons = " or ".join(FINISH_REASONS)
        raise EngineError(f"{where}: the finish reason is {shown(answer.finish_reason)}, not {reasons}")
    if question.forced is not None and not np.array_equal(tokens, question.forced[index]):
        raise EngineError(f"{where}: its tokens are not the {len(question.forced[index])} that the engine was fed")
    arrays = {}
    if answer.logits is not None:
        if answer.top_ids is not None or answer.top_values is not None:
            raise EngineError(f"{where}: logits and top_ids or top_values; give the one or the others")
        arrays["logits/engine"] = _floats(where, "logits", answer.logits, (len(tokens), question.vocab))
    elif answer.top_ids is not None or answer.top_values is not None:
        arrays |= _top(where, answer, len(tokens), question.vocab)
    if answer.prompt_logits is not None:
        shape = (len(prompt.ids), question.vocab)
        arrays["prompt_logits/engine"] = _floats(where, "prompt_logits", answer.prompt_logits, shape)
    if values == "logprobs":
        for name, array in arrays.items():
            if not name.endswith(("_ids", "_counts")) and (wrong := array[array > _MOST_LOGPROB].tolist()[:1]):
                raise EngineError(f"{where}: {name} holds {wrong[0]:g}, which is no log-probability")
    logits = arrays.get("logits/engine", np.zeros((0, question.vocab), np.float32))
    return Generated(tokens, logits, arrays.get("prompt_logits/engine"), answer.finish_reason), arrays


def _top(where: str, answer: AnswerSequence, rows: int, vocab: int) -> dict[str, np.ndarray]:
    """The K largest of each row, in the contract's order whatever order they came in."""
    if answer.top_ids is None or answer.top_values is None:
        given, other = ("top_ids", "top_values") if answer.top_values is None else ("top_values", "top_ids")
        raise EngineError(f"{where}: {given} without {other}")
    ids = _ids(where, "top_ids", answer.top_ids, vocab, 2)
    if len(ids) != rows or not 1 <= ids.shape[1] <= vocab:
        raise EngineError(f"{where}: top_ids has shape {list(ids.shape)}, not [{rows}, K] with K from 1 to {vocab}")
    values = _floats(where, "top_values", answer.top_values, ids.shape)
    counts = _counts(where, answer.top_counts, ids.shape)
    nothing = np.arange(ids.shape[1]) >= counts[:, None]
    # what is not there comes last, under ids that can't be taken for others and a value below all others
    key = np.where(nothing, vocab + np.arange(ids.shape[1]), ids.astype(np.int64))
    ascending = np.argsort(key, axis=1, kind="stable")
    key, ids, values = (np.take_along_axis(a, ascending, 1) for a in (key, ids, values))
    if np.any(key[:, 1:] == key[:, :-1]):
        row = int(np.flatnonzero((key[:, 1:] == key[:, :-1]).any(axis=1))[0])
        raise EngineError(f"{where}: top_ids holds an id twice, at step {row}")
    # ids ascend, so that a tie goes to the smaller one
    ranked = order(np.where(nothing, np.float32(-np.inf), values), ids.shape[1])
    ids, values = (np.take_along_axis(a, ranked, 1) for a in (ids, values))
    arrays = {
        "logits/engine_top_ids": np.ascontiguousarray(np.where(nothing, ids[:, :1], ids)),
        "logits/engine_top_values": np.ascontiguousarray(np.where(nothing, np.float32(0), values)),
    }
    if answer.top_counts is not None:
        arrays["logits/engine_top_counts"] = counts
    return arrays


def _counts(where: str, counts: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    if counts is None:
        return np.full(shape[0], shape[1], np.int32)
    fits = isinstance(counts, np.ndarray) and counts.dtype in (np.int32, np.int64) and counts.shape == shape[:1]
    if not fits or np.any((counts < 0) | (counts > shape[1])):
        raise EngineError(
            f"{where}: top_counts is {_what(counts)}, not int32 or int64 [{shape[0]}] from 0 to {shape[1]}"
        )
    return np.ascontiguousarray(counts, np.int32)


def _ids(where: str, name: str, array: object, vocab: int, dimensions: int) -> np.ndarray:
    if not isinstance(array, np.ndarray) or array.dtype not in (np.int32, np.int64) or array.ndim != dimensions:
        raise EngineError(f"{where}: {name} is {_what(array)}, not int32 or int64 of {dimensions} dimensions")
    if wrong := array[(array < 0) | (array >= vocab)].tolist()[:1]:
        raise EngineError(f"{where}: {name} holds the id {wrong[0]}, outside the vocabulary 0..{vocab - 1}")
    return np.ascontiguousarray(array, np.int32)


def _floats(where: str, name: str, array: object, shape: tuple[int, ...]) -> np.ndarray:
    """As float32, which holds every float16 and bfloat16: no bit is lost, not finite ones neither."""
    if not isinstance(array, np.ndarray) or array.dtype not in _FLOATS or array.shape != shape:
        message = f"{where}: {name} is {_what(array)}, not float32, float16 or bfloat16 {list(shape)}"
        wide = isinstance(array, np.ndarray) and array.dtype == np.float64
        raise EngineError(f"{message}; cast it to float32 yourself, kdtr rounds nothing" if wide else message)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return np.ascontiguousarray(array.astype(np.float32))


def _what(array: object) -> str:
    return f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"

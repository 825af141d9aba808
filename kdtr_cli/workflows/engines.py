"""Engines that are not kdtr's own: what one is asked, what it answers, and the table of those that there are.

An engine is a function of the argument behind its name (``--engine NAME:ARGUMENT``) and a `Question`, to an `Answer`::

    def engine(argument: str, question: Question) -> Answer: ...

Packages add theirs by an entry point of the group ``kdtr.engines``::

    [project.entry-points."kdtr.engines"]
    mine = "my_package.parity:engine"

and `kdtr run GOLDEN -o r.h5 --engine mine:ARGUMENT` calls it. It raises `EngineError` for an engine that failed and
`InputError` for an argument that is wrong; anything else that it raises is reported as a failure of the engine. What
it answers is checked (`engine_answer`), so that it may hand over arrays as they came.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.errors import EngineError, InputError, KdtrError
from kdtr_cli.model.prompts import Decoding, Prompt

__all__ = ["Answer", "AnswerSequence", "Engine", "Question", "ask", "engine_names", "find_engine"]
__all__ += ["sequences_of"]

GROUP = "kdtr.engines"

#: Engines that kdtr brings: name → "module:function", loaded when used. No package can take one of these names.
_BUILT_IN: Mapping[str, str] = {
    "command": "kdtr_cli.workflows.engine_command:command",
    "hf": "kdtr_cli.workflows.engine_hf:hf",
    "openai": "kdtr_cli.workflows.engine_openai:openai",
}


@dataclass(frozen=True)
class Question:
    """All that an engine is told. There is no answer in it: tokens only where it is to be teacher-forced.

    config_text: the model's config.json. model: a folder with config.json and *.safetensors, None where neither the
    golden nor the user has one. choices: where implementations differ (docs/bundle.md). vocab: V. forced: for each
    prompt the tokens int32 [T] to feed whatever the engine chooses, or None. score: the prompt's logits are wanted too.
    folder: an empty private folder that is removed afterwards. timeout: seconds that the engine may take, None: any.
    container: "safetensors" or "hdf5", for an engine that reads a file. tier: the arithmetic that is asked for.
    """

    config_text: str
    model: Path | None
    contract_version: int
    choices: Mapping[str, Any]
    decoding: Decoding
    prompts: tuple[Prompt, ...]
    vocab: int
    forced: tuple[np.ndarray, ...] | None
    score: bool
    folder: Path
    timeout: float | None = None
    container: str = "safetensors"
    tier: str = "exact"


@dataclass(frozen=True, eq=False)
class AnswerSequence:
    """What came out for one prompt.

    tokens: [T] of an integer dtype. finish_reason: "length" or "stop". Of logits either ``logits`` [T, V], or
    ``top_ids`` (integer) and ``top_values`` [T, K], or nothing; row t is what token t was chosen from.
    ``prompt_logits`` [P, V]: row p after the prompt's ids 0..p. Values are float32, float16 or bfloat16. ``top_counts``
    [T]: how many of a row's top K there are, where not all; the rest of the row is ignored.
    """

    tokens: np.ndarray
    finish_reason: str
    logits: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_values: np.ndarray | None = None
    prompt_logits: np.ndarray | None = None
    top_counts: np.ndarray | None = None


@dataclass(frozen=True)
class Answer:
    """``sequences`` in the order of the prompts (read once, one at a time); ``about``: what the engine says of itself,
    by the keys of docs/engines.md; ``name``: of the engine, without any path."""

    name: str
    sequences: Iterable[AnswerSequence]
    about: Mapping[str, Any] = field(default_factory=dict)


Engine = Callable[[str, Question], Answer]


def engine_names() -> list[str]:
    """Every engine there is, sorted."""
    return sorted({*_BUILT_IN, *(point.name for point in _points())})


def find_engine(spec: str) -> tuple[str, str, Engine]:
    """``NAME:ARGUMENT`` → name, argument, function. InputError: no such engine, or one that can't be loaded."""
    name, _, argument = spec.partition(":")
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return name, argument, getattr(importlib.import_module(module), attribute)
    found = [point for point in _points() if point.name == name]
    if not found:
        raise InputError(f"--engine {name!r}: no such engine; there are: {', '.join(engine_names())}")
    if len(found) > 1:
        sources = " and ".join(sorted(point.value for point in found))
        raise InputError(f"--engine {name}: two packages name an engine so ({sources}); remove one")
    try:
        engine = found[0].load()
    except Exception as error:
        raise InputError(f"--engine {name}: {found[0].value} can't be loaded: {_what(error)}") from error
    if not callable(engine):
        raise InputError(f"--engine {name}: {found[0].value} is no function")
    return name, argument, engine


def ask(name: str, argument: str, engine: Engine, question: Question) -> Answer:
    """Call an engine; whatever it raises is a KdtrError of one line."""
    try:
        answer = engine(argument, question)
    except KdtrError:
        raise
    except Exception as error:
        raise EngineError(f"engine {name} failed: {_what(error)}") from error
    if not isinstance(answer, Answer):
        raise EngineError(f"engine {name} returned a {type(answer).__name__} where an Answer is expected")
    return answer


def sequences_of(name: str, answer: Answer, count: int) -> Iterator[AnswerSequence]:
    """An answer's sequences, one at a time; EngineError where they are not ``count``, or where making one fails."""
    sequences = iter(answer.sequences)
    for index in range(count + 1):
        try:
            sequence = next(sequences, None)
        except KdtrError:
            raise
        except Exception as error:
            raise EngineError(f"engine {name} failed: {_what(error)}") from error
        if (sequence is None) != (index == count):
            found = index if sequence is None else f"more than {count}"
            raise EngineError(f"engine {name} answered {found} sequences for {count} prompts")
        if sequence is not None:
            yield sequence


def _points() -> list[EntryPoint]:
    return [point for point in entry_points(group=GROUP) if point.name not in _BUILT_IN]


def _what(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

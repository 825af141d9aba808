"""`kdtr import`: what an engine wrote some other time, as a run bundle against a golden.

The file is read by the rules for the output of `kdtr run --engine command:`, or it is a .npy array, or the JSON of a
server or of vLLM with log-probabilities. Here a fault in it is the user's input (exit 2), not an engine's failure.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kdtr_cli.errors import EngineError, InputError
from kdtr_cli.model.fields import parse_json, read_text, shown
from kdtr_cli.model.regular_file import open_regular
from kdtr_cli.workflows.engine_containers import Stored, open_npy
from kdtr_cli.workflows.engine_logprobs import Listed, as_sequences, finish_of, is_answer, read_answers
from kdtr_cli.workflows.engine_output import MAX_JSON_BYTES, MAX_JSON_VALUES, kind_of, read_output
from kdtr_cli.workflows.engine_run import EngineRunOptions, EngineRunSummary, run_engine
from kdtr_cli.workflows.engines import Answer, AnswerSequence, Question

__all__ = ["import_file"]


def import_file(options: EngineRunOptions, file: Path, values: str | None = None) -> EngineRunSummary:
    """Make a run bundle of a file, or raise InputError and write nothing. values: "logits" or "logprobs", where the
    file does not say what its numbers are (None: logits)."""

    def engine(argument: str, question: Question) -> Answer:
        return _read(file, question, values)

    if options.output.exists() and file.exists() and options.output.samefile(file):
        raise InputError(f"{options.output} is the file to import; give the run another name")
    try:
        return run_engine(options, "import", "", engine, with_model=False)
    except EngineError as error:
        raise InputError(str(error)) from error


def _read(path: Path, question: Question, values: str | None) -> Answer:
    with open(open_regular(path), "rb") as file:  # no FIFO is waited for
        listed = file.read(64).lstrip()[:1] == b"["
    kind = "json" if listed else kind_of(path)
    if kind == "npy":
        answer = Answer("npy", _of_array(path, open_npy(path), question))
    elif kind == "json":
        answer = _of_json(path, question)
    else:
        answer = dataclasses.replace(read_output(path, question), name=kind)
    said = answer.about.get("values")
    if values is not None and said is not None and values != said:
        raise InputError(f"--values {values}: {path.name} holds {said}")
    about = {**answer.about, "values": values} if values is not None else answer.about
    return dataclasses.replace(answer, about=about)


def _of_json(path: Path, question: Question) -> Answer:
    """kdtr's own form, or answers with log-probabilities: one, a list, or one a line (.jsonl)."""
    documents = _documents(path, read_text(path, MAX_JSON_BYTES))
    if len(documents) == 1 and not is_answer(documents[0][1]):
        return dataclasses.replace(read_output(path, question), name="json")
    listed = [answer for where, document in documents for answer in read_answers(document, where)]
    if len(listed) != len(question.prompts):
        raise InputError(f"{path.name}: {len(listed)} answers for the golden's {len(question.prompts)} prompts")
    for answer, prompt in zip(listed, question.prompts, strict=True):
        _check_prompt(path, answer, prompt.id, prompt.ids)
    sequences = as_sequences(listed, greedy=question.decoding.temperature == 0)
    return Answer("logprobs", sequences, {"values": "logprobs"})


def _documents(path: Path, text: str) -> list[tuple[str, Mapping[str, Any]]]:
    """(what to call it, JSON object) for each answer."""
    if text.lstrip()[:1] == "[":
        # parse_json takes an object; a text that closes the list and goes on is no list
        whole = parse_json(f'{{"answers":{text}}}', path.name, MAX_JSON_VALUES, infinities=True)
        if set(whole) != {"answers"}:
            raise InputError(f"{path.name}: not valid JSON")
        return [(f"{path.name}[{i}]", _object(path, item)) for i, item in enumerate(whole["answers"])]
    if path.suffix == ".jsonl":
        left = MAX_JSON_VALUES
        found = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                left -= line.count(",") + line.count("[") + line.count("{")
                found.append(
                    (f"{path.name}:{number}", parse_json(line, f"{path.name}:{number}", max(0, left), infinities=True))
                )
        return found
    return [(path.name, parse_json(text, path.name, MAX_JSON_VALUES, infinities=True))]


def _object(path: Path, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{path.name}: {shown(value)} stands where an answer is expected")
    return value


def _check_prompt(path: Path, answer: Listed, name: str, ids: np.ndarray) -> None:
    other = answer.prompt is not None and answer.prompt != ids.tolist()
    if other or answer.prompt_length not in (None, len(ids)):
        raise InputError(
            f"{path.name}: the prompt of sequence {shown(name)} is another than the golden's (answers stand in the "
            "order of the golden's sequences)"
        )


def _of_array(path: Path, stored: Stored, question: Question) -> list[AnswerSequence]:
    """Logits float [N, V] or tokens int [N], one sequence after another. Each goes to the steps' end or to its stop id,
    as the golden's decoding rules say: the chosen token is a row's argmax, or the golden's where that was fed."""
    numbers = stored.dtype.kind in "biufc" or stored.dtype == ml_dtypes.bfloat16
    logits = len(stored.shape) == 2 and stored.shape[1] > 0 and numbers
    if not logits and not (len(stored.shape) == 1 and stored.dtype in (np.int32, np.int64)):
        raise InputError(
            f"{path.name}: {stored.dtype} {list(stored.shape)} is neither logits [N, V] nor int token ids [N]"
        )
    if logits and question.forced is None and question.decoding.temperature > 0:
        raise InputError(f"{path.name}: the golden samples, so logits alone don't say which token was chosen")
    at, sequences = 0, []
    for index in range(len(question.prompts)):
        limit = question.decoding.steps if question.forced is None else len(question.forced[index])
        rows = stored.rows(at, min(at + limit, stored.shape[0]))
        tokens = np.argmax(rows, axis=1) if logits else rows
        if question.forced is not None:
            tokens = question.forced[index] if logits else tokens
        elif not question.decoding.ignore_eos:
            stops = np.flatnonzero(np.isin(tokens, question.decoding.stop_ids))
            tokens = tokens[: int(stops[0]) + 1 if len(stops) else None]
        reason = finish_of(tokens.tolist(), question.decoding)
        if len(tokens) < limit and (question.forced is not None or reason != "stop"):
            break
        sequences.append(AnswerSequence(tokens.astype(np.int64), reason, rows[: len(tokens)] if logits else None))
        at += len(tokens)
    if at != stored.shape[0] or len(sequences) != len(question.prompts):
        raise InputError(
            f"{path.name}: {stored.shape[0]} rows are not those of {len(question.prompts)} sequences of up to "
            f"{question.decoding.steps} tokens, each to its stop id or to the end"
        )
    return sequences

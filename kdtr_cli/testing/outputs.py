"""What an engine made, from memory: checked as every engine's answer is, and made into evidence or a run bundle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.bundle.reader import Bundle
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.writer import BundleWriter
from kdtr_cli.errors import EngineError
from kdtr_cli.model.fields import shown
from kdtr_cli.parity.evidence import Evidence, EvidenceSequence, Logits, logits_of
from kdtr_cli.testing.arrays import as_numpy
from kdtr_cli.testing.inputs import Inputs
from kdtr_cli.workflows.engine_answer import check_about, check_sequence, form_of
from kdtr_cli.workflows.engine_run import EngineRunOptions, engine_manifest
from kdtr_cli.workflows.engines import AnswerSequence

__all__ = ["MadeRun", "Output", "make_run", "save_run"]


@dataclass(frozen=True, eq=False)
class Output:
    """What an engine made of one prompt; arrays of any framework (kdtr_cli.testing.arrays).

    tokens: int [T], a stop id that ended it included. Of logits either ``logits`` float [T, V], row t what token t was
    chosen from (before temperature), or the K largest of each row, ``top_ids`` int and ``top_values`` float [T, K], or
    nothing. prompt_logits: float [P, V]. Floats are float32, float16 or bfloat16, judged as float32.
    finish_reason: "length" or "stop"; None: "stop" where the last token is a stop id.
    """

    tokens: Any
    logits: Any = None
    finish_reason: str | None = None
    top_ids: Any = None
    top_values: Any = None
    prompt_logits: Any = None


@dataclass(frozen=True, eq=False)
class MadeRun:
    """A run in memory: the manifest and the sequences that its bundle would hold."""

    manifest: Mapping[str, Any]
    sequences: tuple[SequenceData, ...]
    config_text: str
    vocab: int

    def evidence(self) -> Evidence:
        """What is judged, the same as of the bundle that `save_run` writes."""
        return Evidence("run", self.manifest, tuple(map(_evidence, self.sequences)), "memory", vocab_size=self.vocab)


def make_run(
    golden: Bundle,
    inputs: Inputs,
    outputs: Mapping[str, Output] | Sequence[Output],
    tier: str,
    about: Mapping[str, Any],
) -> MadeRun:
    """The run that ``outputs`` are: by sequence id, or one for each prompt in the golden's order.

    An id that is missing or that the golden lacks is left to the judge. EngineError: a fault in form, with its place.
    """
    check_about(about, tier)
    question = inputs.question()
    by_id = _by_id(outputs, inputs)
    sequences: list[SequenceData] = []
    forms: set[tuple[str, bool]] = set()
    for index, prompt in enumerate(inputs.prompts):
        if prompt.id not in by_id:
            continue
        answer = _answer(by_id[prompt.id], inputs, f"sequence {shown(prompt.id)}")
        made, arrays = check_sequence(question, index, answer)
        forms.add((form_of(answer), answer.prompt_logits is not None))
        if len(forms) > 1:
            raise EngineError(f"sequence {shown(prompt.id)} has other kinds of logits than the first")
        sequences.append(SequenceData(prompt.id, prompt.stream, prompt.ids, made.tokens, made.finish_reason, arrays))
    known = {prompt.id for prompt in inputs.prompts}
    nothing = np.zeros(0, np.int32)
    sequences += [
        SequenceData(name, 0, np.zeros(1, np.int32), nothing, "length") for name in by_id if name not in known
    ]
    form, scored = next(iter(forms), ("none", False))
    asked = EngineRunOptions(golden.path, Path(), "memory", tier=tier)
    manifest = engine_manifest(golden, asked, question, dict(about), "memory", form, scored)
    return MadeRun(manifest, tuple(sequences), inputs.config_text, inputs.vocab)


def save_run(run: MadeRun, path: Path) -> None:
    """Write the run as a bundle, over what is there. InputError, DeviceError: it can't be written."""
    with BundleWriter(path, "run", force=True) as writer:
        writer.add_config(run.config_text)
        for sequence in run.sequences:
            writer.add_sequence(sequence)
        writer.finish(run.manifest)


def _by_id(outputs: Mapping[str, Output] | Sequence[Output], inputs: Inputs) -> dict[str, Output]:
    if isinstance(outputs, Mapping):
        return {_name(name): output for name, output in outputs.items()}
    if len(outputs) != len(inputs.prompts):
        raise EngineError(f"{len(outputs)} outputs for the golden's {len(inputs.prompts)} prompts; name them by id")
    return {prompt.id: output for prompt, output in zip(inputs.prompts, outputs, strict=True)}


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise EngineError(f"{shown(name)} is no sequence id; the golden's are texts")
    return name


def _answer(output: Output, inputs: Inputs, where: str) -> AnswerSequence:
    if not isinstance(output, Output):
        raise EngineError(f"{where}: a {type(output).__name__}, not an Output")
    names = ("tokens", "logits", "top_ids", "top_values", "prompt_logits")
    given = {name: getattr(output, name) for name in names}
    arrays = {name: None if v is None else as_numpy(v, f"{where}: {name}") for name, v in given.items()}
    tokens = arrays["tokens"]
    if isinstance(tokens, np.ndarray) and tokens.size == 0 and tokens.ndim == 1:
        arrays["tokens"] = tokens = tokens.astype(np.int32)  # an empty list has no type of its own
    reason = output.finish_reason
    if reason is None:
        last = tokens[-1] if isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.size else -1
        reason = "stop" if last in inputs.stop_ids else "length"
    return AnswerSequence(finish_reason=reason, **arrays)


def _evidence(sequence: SequenceData) -> EvidenceSequence:
    groups = {}
    for group in ("logits", "prompt_logits"):
        path = f"{group}/engine"
        if path in sequence.arrays:
            groups[group] = {"engine": logits_of(sequence.arrays[path])}
        elif f"{path}_top_ids" in sequence.arrays:
            groups[group] = {"engine": _top(sequence.arrays[f"{path}_top_ids"], sequence.arrays[f"{path}_top_values"])}
    plain = EvidenceSequence(sequence.id, sequence.stream, sequence.prompt, sequence.tokens, sequence.finish_reason)
    return replace(plain, **groups)


def _top(ids: np.ndarray, values: np.ndarray) -> Logits:
    return Logits(
        len(ids),
        None,
        values.dtype,
        top_ids=lambda lo, hi: ids[lo:hi],
        top_values=lambda lo, hi: values[lo:hi],
        k=ids.shape[1],
    )

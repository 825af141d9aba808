"""`kdtr run --engine`: a golden's prompts through an engine that is not kdtr's own, as a bundle like any other.

The engine is asked what the golden's engine was asked, and sees no answer (`engines.Question`). What kdtr can't know of
it, weights above all, is null in the manifest, and a diff says "unverified"; what the engine says of itself is kept.
"""

import hashlib
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtr_cli import __version__
from kdtr_cli.bundle.reader import Bundle, open_bundle
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.writer import BundleWriter, check_target
from kdtr_cli.errors import EngineError, InputError
from kdtr_cli.model.config import ModelConfig, load_config
from kdtr_cli.model.fields import shown
from kdtr_cli.model.prompts import Generated, Prompt, check_prompts
from kdtr_cli.workflows.engine_answer import check_about, check_sequence, form_of
from kdtr_cli.workflows.engine_inputs import write_model
from kdtr_cli.workflows.engines import AnswerSequence, Engine, Question, ask, find_engine, sequences_of
from kdtr_cli.workflows.manifest import decoding_manifest
from kdtr_cli.workflows.run import check_golden, embedded_config, golden_decoding

__all__ = ["EngineRunOptions", "EngineRunSummary", "engine_manifest", "make_engine_run", "make_question", "run_engine"]

_MAX_TIMEOUT = 1e8  # seconds; sockets and timers can't count much further


@dataclass(frozen=True)
class EngineRunOptions:
    """The options of ``kdtr run --engine``; ``engine``: NAME:ARGUMENT, ``container``: safetensors or hdf5."""

    golden: Path
    output: Path
    engine: str
    model: str | None = None
    tier: str = "exact"
    teacher_force: bool = False
    steps: int | None = None
    timeout: float | None = None
    container: str = "safetensors"
    force: bool = False


@dataclass(frozen=True)
class EngineRunSummary:
    """What was run: each prompt with its result (no logits), in the golden's order."""

    path: Path
    engine: str
    model: str
    folder: Path | None
    logits: str
    sequences: list[tuple[Prompt, Generated]]
    seconds: float  #: that the engine took; in no bundle
    notes: tuple[str, ...] = ()
    values: str = "logits"  #: or "logprobs"


def make_engine_run(options: EngineRunOptions) -> EngineRunSummary:
    """Ask an engine for a golden's outputs and write the run bundle, or raise and write nothing."""
    return run_engine(options, *find_engine(options.engine))


def run_engine(
    options: EngineRunOptions, name: str, argument: str, engine: Engine, with_model: bool = True
) -> EngineRunSummary:
    """As `make_engine_run`, with an engine at hand. ``with_model``: it wants the weights that the golden embeds."""
    if options.timeout is not None and not 0 < options.timeout <= _MAX_TIMEOUT:  # a NaN would limit nothing
        raise InputError(f"--timeout {options.timeout:g}: give seconds up to {_MAX_TIMEOUT:g}, or leave it out")
    target = check_target(options.output, options.force)
    if target.exists() and options.golden.exists() and target.samefile(options.golden):
        raise InputError(f"{options.output} is the golden itself; give the run another name")
    with ExitStack() as stack:
        golden = stack.enter_context(open_bundle(options.golden))
        check_golden(golden)
        private = stack.enter_context(tempfile.TemporaryDirectory(prefix="kdtr-engine-"))
        question = make_question(golden, options, Path(private), with_model)
        return _run(golden, options, question, name, argument, engine)


def make_question(golden: Bundle, options: EngineRunOptions, private: Path, with_model: bool = True) -> Question:
    """What an engine is asked; ``private`` is a folder for its files and for the golden's weights."""
    folder, text, config = _model(golden, options, private, with_model)
    decoding = golden_decoding(golden.manifest["decoding"], options.steps)
    prompts = tuple(Prompt(s.id, s.prompt, s.stream) for s in golden.sequences)
    check_prompts(list(prompts), config, decoding.steps)
    forced = tuple(s.tokens[: decoding.steps] for s in golden.sequences) if options.teacher_force else None
    own = private / "engine"
    own.mkdir()
    return Question(
        config_text=text,
        model=folder,
        contract_version=golden.manifest["contract_version"],
        choices=golden.manifest["choices"],
        decoding=decoding,
        prompts=prompts,
        vocab=config.vocab_size,
        forced=forced,
        score=bool(golden.manifest.get("score", False)),
        folder=own,
        timeout=options.timeout,
        container=options.container,
        tier=options.tier,
    )


def _model(
    golden: Bundle, options: EngineRunOptions, private: Path, with_model: bool
) -> tuple[Path | None, str, ModelConfig]:
    if options.model is not None:
        folder = Path(options.model).absolute()
        if not folder.is_dir():
            raise InputError(f"--model {options.model}: not a folder; an engine is given one with config.json")
        config, text = load_config(folder)
        return folder, text, config
    return (
        write_model(golden, private) if with_model else None,
        golden.config_text,
        embedded_config(golden, options.golden),
    )


def _run(
    golden: Bundle, options: EngineRunOptions, question: Question, name: str, argument: str, engine: Engine
) -> EngineRunSummary:
    begin = time.monotonic()
    answer = ask(name, argument, engine, question)
    seconds = [time.monotonic() - begin]
    about, described = dict(answer.about), f"{name}:{answer.name}" if answer.name else name
    check_about(about, options.tier)
    values = about.get("values", "logits")
    sequences: list[tuple[Prompt, Generated]] = []
    forms: set[tuple[str, bool]] = set()
    with BundleWriter(options.output, "run", options.force) as bundle:
        bundle.add_config(question.config_text)
        answered = sequences_of(name, answer, len(question.prompts))
        for index, given in enumerate(_timed(answered, seconds)):
            prompt = question.prompts[index]
            result, arrays = check_sequence(question, index, given, values)
            forms.add((form_of(given), result.prompt_logits is not None))
            if len(forms) > 1:
                raise EngineError(
                    f"engine {name}: sequence {shown(prompt.id)} has other kinds of logits than the first"
                )
            tokens, reason = result.tokens, result.finish_reason
            bundle.add_sequence(SequenceData(prompt.id, prompt.stream, prompt.ids, tokens, reason, arrays))
            sequences.append((prompt, Generated(tokens, result.logits[:0], None, reason)))
        ((form, scored),) = forms
        bundle.finish(engine_manifest(golden, options, question, about, described, form, scored))
    folder = question.model if options.model is not None else None
    other = golden.manifest["model"]["config_sha256"] != _sha256(question.config_text)
    notes = ("the config is not the golden's; a diff will be INVALID",) if other else ()
    model = golden.manifest["model"].get("name", "model") if folder is None else folder.name
    return EngineRunSummary(options.output, described, model, folder, form, sequences, sum(seconds), notes, values)


def _timed(sequences: Iterator[AnswerSequence], seconds: list[float]) -> Iterator[AnswerSequence]:
    """The sequences; each may be computed only when it is asked for, and that time is the engine's too."""
    while True:
        begin = time.monotonic()
        given = next(sequences, None)
        seconds.append(time.monotonic() - begin)
        if given is None:
            return
        yield given


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def engine_manifest(
    golden: Bundle,
    options: EngineRunOptions,
    question: Question,
    about: dict[str, Any],
    described: str,
    form: str,
    scored: bool,
) -> dict[str, Any]:
    """What the engine was asked stands as asked; what only it can know, as it says, or null."""
    decoding = question.decoding
    name = golden.manifest["model"].get("name", "model") if options.model is None else Path(question.model).name
    return {
        "producer": {"name": "kdtr", "version": __version__},
        "contract_version": question.contract_version,
        "model": {
            "name": name,
            "config_sha256": _sha256(question.config_text),
            "weights": None,
            "weights_used_sha256": about.get("weights_used_sha256"),
            "rope_table_sha256": None,
            "embedded": False,
        },
        "choices": {**question.choices, **about.get("choices", {})},
        "decoding": decoding_manifest(decoding, question.forced is not None),
        "arithmetic": ["engine"],
        "tier": options.tier,
        "logits": form,
        "values": about.get("values", "logits"),
        "score": scored,
        "run": {
            "engine": described,
            "engine_name": about.get("name"),
            "engine_version": about.get("version"),
            "device": about.get("device"),
            "driver": about.get("driver"),
            "compiler": about.get("compiler"),
            "kernels_sha256": None,
            "batch": None,
            "golden_manifest_sha256": golden.manifest_sha256,
        },
    }

"""What a golden asks of an engine, for a test that drives its own: prompts and settings, and no answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.bundle.reader import Bundle, open_bundle
from kdtr_cli.errors import InputError
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.workflows.engine_inputs import write_model
from kdtr_cli.workflows.engines import Question
from kdtr_cli.workflows.run import check_golden, golden_decoding

__all__ = ["Inputs", "golden_inputs", "golden_model", "inputs_of"]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The question that a golden holds the answer to.

    prompts: in the golden's order, each with ``id``, ``ids`` int32 [P] and ``stream`` (it keys the draws).
    decoding: ``steps``, ``stop_ids``, ``ignore_eos``, ``temperature`` (0: greedy), ``seed``; decoding ends with a stop
    id, which is the last token of the output. config: the model's config.json, as it was read and parsed. vocab: V.
    choices: where implementations differ (docs/bundle.md). score: the golden has the prompts' logits too.
    forced: the tokens int32 [T] to feed to each prompt by its id, None unless they were asked for.
    """

    prompts: tuple[Prompt, ...]
    decoding: Decoding
    config: Mapping[str, Any]
    config_text: str
    vocab: int
    choices: Mapping[str, Any]
    contract_version: int
    score: bool
    forced: Mapping[str, np.ndarray] | None = None

    @property
    def steps(self) -> int:
        """Tokens to decode for each prompt, at most."""
        return self.decoding.steps

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an output; none where the golden ignores them."""
        return () if self.decoding.ignore_eos else self.decoding.stop_ids

    def question(self) -> Question:
        """The same for the checks that every engine's answer goes through; there is no folder in it."""
        return Question(
            config_text=self.config_text,
            model=None,
            contract_version=self.contract_version,
            choices=self.choices,
            decoding=self.decoding,
            prompts=self.prompts,
            vocab=self.vocab,
            forced=None if self.forced is None else tuple(self.forced[prompt.id] for prompt in self.prompts),
            score=self.score,
            folder=Path(),
        )


def golden_inputs(golden: str | Path, *, teacher_force: bool = False) -> Inputs:
    """The inputs of the golden bundle ``golden``; with ``teacher_force`` also the tokens to feed, never the logits.

    InputError: no such file, a broken bundle, or one that is no golden.
    """
    with open_bundle(golden) as bundle:
        check_golden(bundle)
        return inputs_of(bundle, teacher_force)


def inputs_of(golden: Bundle, teacher_force: bool) -> Inputs:
    """The same of an open golden."""
    try:
        config = json.loads(golden.config_text)
    except ValueError:
        raise InputError(f"{golden.path}: the config in it is not JSON") from None
    if golden.vocab is None:
        raise InputError(f"{golden.path}: neither its config nor its logits say how large the vocabulary is")
    return Inputs(
        prompts=tuple(Prompt(s.id, s.prompt, s.stream) for s in golden.sequences),
        decoding=golden_decoding(golden.manifest["decoding"], None),
        config=config,
        config_text=golden.config_text,
        vocab=golden.vocab,
        choices=golden.manifest["choices"],
        contract_version=golden.manifest["contract_version"],
        score=bool(golden.manifest.get("score", False)),
        forced={s.id: s.tokens for s in golden.sequences} if teacher_force else None,
    )


def golden_model(golden: str | Path, folder: Path) -> Path | None:
    """Write the model that a golden embeds (config.json, *.safetensors) into ``folder``/model, and return that path;
    None where the golden embeds no weights."""
    with open_bundle(golden) as bundle:
        check_golden(bundle)
        return write_model(bundle, Path(folder))

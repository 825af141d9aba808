"""A right answer to a small golden, as the arrays of the contract, and ways to have a program hand it over."""

import shlex
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.model.config import parse_config
from kdtr_cli.model.presets import PRESETS
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.workflows.engines import Question
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.prompts import PromptOptions

VOCAB = parse_config(PRESETS["tiny"], where="tiny").vocab_size
PROMPTS = PromptOptions(ids=("1 2 3", "7"))
STEPS = 3


def golden_of(path: Path, **options) -> Path:
    make_golden(GoldenOptions("tiny", path, PROMPTS, STEPS, **options))
    return path


def right_answer(golden: Path) -> dict[str, np.ndarray]:
    """The golden's own outputs, as an engine would write them."""
    with open_bundle(golden) as bundle:
        tokens = [s.tokens for s in bundle.sequences]
        logits = [s.array("logits/exact") for s in bundle.sequences]
        return {
            "tokens/ids": np.concatenate(tokens),
            "tokens/offsets": np.cumsum([0, *map(len, tokens)], dtype=np.int64),
            "finish": np.array([s.finish_reason == "stop" for s in bundle.sequences], np.int32),
            "logits": np.concatenate(logits),
        }


def saved(path: Path, arrays: dict[str, np.ndarray], about: str | None = None) -> Path:
    save_file(arrays, path, None if about is None else {"about": about})
    return path


def shell(script: str, *words: object) -> str:
    """The engine that is a shell script; $1 is the output, $2 the inputs, words are $3 and so on."""
    quoted = " ".join(shlex.quote(str(word)) for word in words)
    return f"command:sh -c {shlex.quote(script)} sh {{out}} {{inputs}} {quoted}"


def copier(file: Path, suffix: str = "") -> str:
    """The engine that answers with a file."""
    return shell(f'cp "$3" "$1{suffix}"', file)


def question(folder: Path, **changes) -> Question:
    prompts = (
        Prompt("0", np.array([1, 2, 3], np.int32), 0),
        Prompt("é 1", np.array([7], np.int32), 2**32 - 1),
    )
    folder.mkdir(exist_ok=True)
    fields = {
        "config_text": '{"vocab_size": 8}',
        "model": None,
        "contract_version": 1,
        "choices": {"tie_rule": "smallest-index"},
        "decoding": Decoding(2, (5, 6), seed=2**64 - 1),
        "prompts": prompts,
        "vocab": 8,
        "forced": None,
        "score": False,
        "folder": folder,
    }
    return Question(**{**fields, **changes})

"""The file of inputs that a foreign engine reads: prompts and settings, and no answer. docs/engines.md is its contract.

Arrays and a map of texts, as safetensors (the texts in ``__metadata__``) or HDF5 (as JSON in the dataset
``metadata``). Nothing but what a `Question` holds can get into it.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from kdtr_cli.bundle.reader import Bundle
from kdtr_cli.model.safetensors_file import NAMES
from kdtr_cli.model.safetensors_writer import SafetensorsWriter, write_tensors
from kdtr_cli.workflows.engines import Question

__all__ = ["INPUTS_SCHEMA", "write_inputs", "write_model"]

INPUTS_SCHEMA = "kdtr.inputs/1"


def write_inputs(question: Question) -> Path:
    """Write ``inputs.safetensors`` or ``inputs.h5`` into the question's folder; returns its path."""
    arrays = _ragged("prompts", [prompt.ids for prompt in question.prompts])
    arrays["streams"] = np.array([prompt.stream for prompt in question.prompts], np.int64)
    if question.forced is not None:
        arrays |= _ragged("tokens", question.forced)
    texts = _texts(question)
    if question.container == "hdf5":
        path = question.folder / "inputs.h5"
        with h5py.File(path, "x") as file:
            file["metadata"] = np.bytes_(json.dumps(texts))  # of fixed length: a reader in C needs no memory management
            for name, array in arrays.items():
                file[name] = array
        return path
    path = question.folder / "inputs.safetensors"
    plan = {name: (NAMES[array.dtype.name], array.dtype.itemsize, array.shape) for name, array in arrays.items()}
    with open(path, "xb") as file:
        write_tensors(file, texts, plan, lambda name: [arrays[name]])
    return path


def _ragged(name: str, rows: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Rows of different lengths, one after another: row i is ``ids[offsets[i]:offsets[i + 1]]``."""
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return {f"{name}/ids": np.concatenate(rows).astype(np.int32), f"{name}/offsets": offsets}


def _texts(question: Question) -> dict[str, str]:
    decoding = question.decoding
    return {
        "schema": INPUTS_SCHEMA,
        "config": question.config_text,
        "model": "" if question.model is None else str(question.model),
        "vocab_size": str(question.vocab),
        "steps": str(decoding.steps),
        "stop_ids": " ".join(map(str, decoding.stop_ids)),
        "ignore_eos": _flag(decoding.ignore_eos),
        "temperature": repr(float(decoding.temperature)),
        "seed": str(decoding.seed),
        "teacher_forced": _flag(question.forced is not None),
        "score": _flag(question.score),
        "sequence_ids": json.dumps([prompt.id for prompt in question.prompts]),
        "choices": json.dumps(dict(question.choices)),
        "contract_version": str(question.contract_version),
    }


def _flag(value: bool) -> str:
    return "true" if value else "false"


def write_model(golden: Bundle, folder: Path) -> Path | None:
    """The weights that a golden embeds as a model folder: the golden itself, which holds the answers, stays unseen.

    None where it embeds none. One tensor is in memory at a time.
    """
    names = golden.weight_names()
    if not names:
        return None
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(golden.config_text, encoding="utf-8")
    layouts = {name: golden.layout(f"model/weights/{name}") for name in names}
    plan = {name: (NAMES[layout.kind.name], layout.shape) for name, layout in layouts.items()}
    with SafetensorsWriter(model, plan) as writer:
        for name in names:
            writer.append(name, golden.weight(name))
    return model

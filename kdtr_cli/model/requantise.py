"""`kdtr model quantize`: a checkpoint written anew as INT4, FP8 or bf16, in the published layouts."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.model.checkpoint import open_checkpoint
from kdtr_cli.model.config import ModelConfig, parse_config
from kdtr_cli.model.encode import plan_tensors, write_tensors
from kdtr_cli.model.fields import parse_json
from kdtr_cli.model.folder import TOKENIZER_FILES, check_place, new_folder, write_synced
from kdtr_cli.model.published import published_quantisation
from kdtr_cli.model.source import open_model

__all__ = ["FORMATS", "quantise_model"]

FORMATS = ("int4", "fp8", "bf16")
_QUANTISATION = "quantization_config"


def quantise_model(
    source: Path | str,
    folder: Path,
    to: str,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Write the model folder ``source`` to ``folder`` in another format: 'int4', 'fp8' or 'bf16'.

    int4: routed experts, in groups of 32 inputs; fp8: every projection, in blocks of 128 × 128; bf16: everything but
    e_score_correction_bias. What is not quantised keeps its dtype; what was quantised and is no more becomes bf16. The
    source may be quantised itself. config.json says so; generation_config.json and tokenizer files are copied. The
    vision half and layers for multi-token prediction are left out: returns the notes on what was. One tensor is in
    memory at a time. progress: elements done, and of all.

    InputError: no such model, a tensor that is not finite, int4 without routed experts, a place that is taken.
    """
    source, folder = Path(source), Path(folder)
    if not source.is_dir():
        raise InputError(f"{source}: no such folder; give a model folder (`kdtr model new` makes one)")
    if folder.exists() and folder.samefile(source):
        raise InputError(f"{folder}: is the model itself; write to another folder")
    check_place(folder, force)
    model = open_model(source, cache=False)
    obj = _target_config(parse_json(model.config_text, source / "config.json"), to)
    target = parse_config(obj, where=f"{folder}/config.json", eos_token_ids=model.config.eos_token_ids)
    if to == "int4" and not target.n_routed_experts:
        raise InputError(f"{source}: has no routed experts, which int4 quantises; choose fp8 or bf16")
    plan = plan_tensors(target, lambda name: _float_dtype(model.config, name, to, model.weights.stored_dtype))

    def blocks(name: str, rows: int) -> Iterator[np.ndarray]:
        values = model.weights[name]
        for first in range(0, len(values), rows):
            yield values[first : first + rows]

    with new_folder(folder, force) as temporary:
        write_synced(temporary / "config.json", (json.dumps(obj, indent=2) + "\n").encode())
        for name in ("generation_config.json", *TOKENIZER_FILES):
            if (source / name).is_file():
                write_synced(temporary / name, (source / name).read_bytes())
        write_tensors(temporary, target, plan, blocks, progress)
        open_checkpoint(temporary, target)
    return [] if model.checkpoint is None else model.checkpoint.notes


def _float_dtype(config: ModelConfig, name: str, to: str, stored_dtype: Callable[[str], str]) -> str:
    if config.quantisation is not None and config.quantisation.covers(name, config.tensor_prefix):
        return "BF16"
    own = stored_dtype(name)
    return own if to != "bf16" or name.endswith("e_score_correction_bias") else "BF16"


def _target_config(obj: dict[str, Any], to: str) -> dict[str, Any]:
    """The config.json with another quantization_config, where the published checkpoints have it."""
    nested = "text_config" in obj
    out = {key: value for key, value in obj.items() if key != _QUANTISATION}
    inner = out
    if nested:
        inner = out["text_config"] = {k: v for k, v in obj["text_config"].items() if k != _QUANTISATION}
    if to == "bf16":
        for table in (out, inner):
            for key in ("torch_dtype", "dtype"):
                if table.get(key) is not None:
                    table[key] = "bfloat16"
    else:
        inner[_QUANTISATION] = published_quantisation(to, nested)
    return out

"""A whole checkpoint written from float32 values, tensor by tensor, in the layout that its config states."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.quant import part_names, quantise_fp8, quantise_int4
from kdtr_cli.model.safetensors_file import STORED_DTYPES
from kdtr_cli.model.safetensors_writer import SHARD_BYTES, SafetensorsWriter
from kdtr_cli.model.tensors import expected_tensors, stored_tensors

__all__ = ["ROWS", "Plan", "plan_tensors", "write_tensors"]

Plan = dict[str, tuple[str, tuple[int, ...]]]

ROWS = 1 << 21  #: elements of a block of rows, unless the rows of one fp8 block have more


def plan_tensors(config: ModelConfig, float_dtype: Callable[[str], str]) -> Plan:
    """Stored name without prefix → (dtype, shape); ``float_dtype`` gives the dtype of a weight that is not quantised.

    Quantised parts have the dtypes of the published checkpoints: int4 scales BF16 and shapes I32, fp8 scales F32.
    """
    plan: Plan = {}
    for name, parts in stored_tensors(config).items():
        for part, tensor in parts.items():
            plan[part] = (float_dtype(name) if len(parts) == 1 else tensor.dtypes[0], tensor.shape)
    return plan


def block_rows(config: ModelConfig, shape: tuple[int, ...]) -> int:
    """Rows to work on at a time: about ROWS elements, and whole blocks of scales."""
    step = config.quantisation.block[0] if config.quantisation and config.quantisation.method == "fp8" else 1
    return max(1, ROWS // max(1, math.prod(shape[1:])) // step) * step


def write_tensors(
    folder: Path,
    config: ModelConfig,
    plan: Plan,
    blocks: Callable[[str, int], Iterable[np.ndarray]],
    progress: Callable[[int, int], None] = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write every tensor of ``plan``. ``blocks(name, rows)`` gives a weight's float32 values, ``rows`` rows at a time.

    progress: elements done, and of all. Memory: a block and what is made of it.
    """
    how, prefix = config.quantisation, config.tensor_prefix
    shapes = expected_tensors(config)
    done, total = 0, sum(math.prod(shape) for shape in shapes.values())
    with SafetensorsWriter(folder, {prefix + name: entry for name, entry in plan.items()}, shard_bytes) as writer:
        for name, shape in shapes.items():
            quantised = how is not None and part_names(how.method, name)[1] in plan
            names = part_names(how.method, name) if quantised else (name,)
            for values in blocks(name, block_rows(config, shape)):
                if not quantised:
                    made = (round_to(values, plan[name][0]),)
                elif how.method == "int4":
                    made = quantise_int4(values, how.group_size)
                else:
                    made = quantise_fp8(values, how.block)
                for part, array in zip(names, made, strict=False):  # the shape, int4's third part, comes below
                    writer.append(prefix + part, array)
                done += values.size
                progress(done, total)
            if len(names) == 3:
                writer.append(prefix + names[2], np.array(shape, np.int32))


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values in another float dtype, rounded to nearest even."""
    if dtype == "BF16":
        return values.astype(ml_dtypes.bfloat16)
    with np.errstate(over="ignore"):
        return values.astype(STORED_DTYPES[dtype])

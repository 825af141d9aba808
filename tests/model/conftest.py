"""Small model folders for the tests of kdtr_cli.model, and a safetensors writer that can also write wrong files."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr_cli.model.config import ModelConfig, parse_config
from kdtr_cli.model.presets import PRESETS, new_weights

NAMES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int32": "I32", "int64": "I64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "uint8": "U8",
}  # fmt: skip

SMALL: dict[str, Any] = {
    **PRESETS["odd"],
    "hidden_size": 6,
    "intermediate_size": 5,
    "kv_lora_rank": 3,
    "moe_intermediate_size": 2,
    "n_routed_experts": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "q_lora_rank": 4,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "vocab_size": 11,
    "bos_token_id": 9,
    "eos_token_id": 10,
}


def _header_and_data(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    header, data = {}, b""
    for name, array in arrays.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return header, data


@pytest.fixture
def small() -> dict[str, Any]:
    """The config.json of a model of a few hundred weights, with a MoE layer and biases; free to change."""
    return json.loads(json.dumps(SMALL))


@pytest.fixture
def small_config() -> ModelConfig:
    return parse_config(SMALL)


@pytest.fixture
def small_arrays(small_config: ModelConfig) -> dict[str, np.ndarray]:
    """Its weights as stored, free to change."""
    return new_weights(small_config, 5)


@pytest.fixture
def save_raw() -> Callable[..., Path]:
    """Write a safetensors file from arrays, or from a header (dict or bytes) and data of one's own."""

    def save(path: Path, arrays: Mapping[str, np.ndarray] | None = None, header: Any = None, data: Any = None) -> Path:
        made, raw = _header_and_data(arrays or {})
        header = made if header is None else header
        blob = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(blob)) + blob + (raw if data is None else data))
        return path

    return save


@pytest.fixture
def save_folder(tmp_path: Path, save_raw: Callable[..., Path]) -> Callable[..., Path]:
    """Write a model folder: config, then one file a shard ({file name: arrays}, or arrays for one file)."""

    def save(config: Mapping[str, Any], arrays: Mapping[str, Any], name: str = "model", index: bool = False) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        sharded = all(isinstance(part, dict) for part in arrays.values())
        shards = arrays if sharded else {"model.safetensors": arrays}
        for shard, part in shards.items():
            save_raw(folder / shard, part)
        if index:
            mapping = {tensor: shard for shard, part in shards.items() for tensor in part}
            text = json.dumps({"metadata": {"total_size": 1}, "weight_map": mapping})
            (folder / "model.safetensors.index.json").write_text(text)
        return folder

    return save

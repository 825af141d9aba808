"""What `model show` tells is counted from the tensors themselves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr_cli.model.config import parse_config
from kdtr_cli.model.presets import PRESETS
from kdtr_cli.model.source import open_model
from kdtr_cli.model.summary import count_parameters, summary

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", list(PRESETS))
def test_totals_are_those_of_the_arrays(name: str) -> None:
    model = open_model(name)
    told = summary(model)
    assert told["parameters"]["total"] == sum(model.weights[tensor].size for tensor in model.weights)
    assert told["tensors"]["bytes"] == sum(model.weights.stored(tensor).nbytes for tensor in model.weights)
    assert sum(told["tensors"]["dtypes"].values()) == told["tensors"]["count"] == len(model.weights)
    json.dumps(told, allow_nan=False)


def test_active_parameters_by_hand() -> None:
    config = parse_config(PRESETS["tiny"])
    total, active = count_parameters(config)
    one_expert, unchosen, moe_layers = 3 * 128 * 64, 16 - 4, 3
    assert total - active == moe_layers * unchosen * one_expert + 511 * 128
    tied = parse_config({**PRESETS["tiny"], "tie_word_embeddings": True})
    assert count_parameters(tied) == (total - 512 * 128, active - 128)
    dense = parse_config({**PRESETS["tiny"], "n_routed_experts": 0})
    assert count_parameters(dense)[0] - count_parameters(dense)[1] == 511 * 128


def test_router_rope_and_notes(small: Any, small_arrays: Any, save_folder: Callable[..., Path]) -> None:
    told = summary(open_model("tiny-v2"))
    assert told["router"]["scoring"] == "softmax"
    assert told["router"]["normalised"] is False
    assert told["rope"]["yarn_factor"] == 4.0
    assert told["attention"]["softmax_scale"] == open_model("tiny-v2").config.softmax_scale()
    dense = {**small, "n_routed_experts": 0, "rope_scaling": None}
    arrays = {name: array for name, array in small_arrays.items() if "layers.1.mlp" not in name}
    for name in ("gate_proj", "up_proj", "down_proj"):
        arrays[f"model.layers.1.mlp.{name}.weight"] = small_arrays[f"model.layers.0.mlp.{name}.weight"]
    arrays["model.layers.9.x"] = np.zeros(1, np.float32)
    told = summary(open_model(save_folder(dense, arrays)))
    assert told["router"] is None
    assert told["rope"]["yarn_factor"] is None
    assert told["layers"] == {"dense": 2, "moe": 0}
    assert len(told["notes"]) == 1

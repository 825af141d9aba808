"""The engine over weights in every stored form, by every variant of the matrix kernels: the NumPy model's bits."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_matrices import quantised

from kdtr_cli.engine import launch, transformer
from kdtr_cli.engine.devices import open_device
from kdtr_cli.engine.generate import Request, generate
from kdtr_cli.engine.kernels import KERNELS, expert_matmul, matmul, sources
from kdtr_cli.engine.transformer import Transformer
from kdtr_cli.engine.weights import DeviceWeights, upload_weights
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import ModelConfig, parse_config
from kdtr_cli.model.presets import PRESETS, new_weights
from kdtr_cli.model.prompts import Decoding, Generated, Prompt
from kdtr_cli.model.quantisation import fp8_config, int4_config
from kdtr_cli.model.safetensors_file import STORED_DTYPES
from kdtr_cli.model.source import open_model
from kdtr_cli.model.weights import Weights
from kdtr_cli.reference import exact
from kdtr_cli.reference.generate import generate as reference_generate
from kdtr_cli.reference.transformer import Model
from kdtr_cli.workflows.prompts import random_prompt

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = ["tiny-kimi", "tiny-kimi-int4", "tiny-kimi-fp8"]
LENGTHS = (1, 2, 5, 19, 3, 8)
CAPACITY = 24


@pytest.fixture(scope="module")
def device():
    with open_device("cpu") as d:
        d.compile(sources("cpu"))
        yield d


def numpy_says(config: ModelConfig, weights: Weights, decoding: Decoding) -> tuple[list[Prompt], list[Generated]]:
    prompts = [Prompt(f"p{i}", random_prompt(i, n, config.vocab_size, 0), i) for i, n in enumerate(LENGTHS)]
    return prompts, reference_generate(Model(config, weights, Choices(), CAPACITY, exact), prompts, decoding)


def check(device, config: ModelConfig, weights: DeviceWeights, said, decoding: Decoding, batch: int) -> None:
    prompts, wanted = said
    engine = Transformer(device, config, weights, Choices(), rows=max(batch, 20), slots=batch, capacity=CAPACITY)
    got = dict(generate(engine, [Request(p) for p in prompts], decoding, batch=batch, prefill=20))
    device.check_guards()
    for i, result in enumerate(wanted):
        assert got[i].tokens.tolist() == result.tokens.tolist()
        assert got[i].logits.tobytes() == result.logits.tobytes()


def cut(name: str) -> tuple[ModelConfig, Weights]:
    """The first two layers of a fixture: a dense one, and one of experts."""
    model = open_model(FIXTURES / name)
    config = replace(model.config, num_hidden_layers=2)
    stored = {n for n in model.weights.stored_names if not re.match(r"model\.layers\.([2-9]|\d\d)", n)}
    return config, Weights.from_arrays({n: model.weights.stored(n) for n in stored}, config)


@pytest.fixture(scope="module", params=NAMES)
def small(request, device):
    config, weights = cut(request.param)
    decoding = Decoding(3, ignore_eos=True)
    return config, upload_weights(device, config, weights), numpy_says(config, weights, decoding), decoding


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_any_batch(device, small, batch):
    config, weights, said, decoding = small
    check(device, config, weights, said, decoding, batch)


@pytest.mark.parametrize("n", [1, 1 << 20])
def test_the_variants_that_a_gpu_takes(device, small, monkeypatch, n):
    """On the CPU device by the choice for a GPU, as if every matrix were narrow, or as wide as can be, and long."""
    config, weights, said, decoding = small
    used = set()

    def chosen(kind: str, rows: int, _n: int, _k: int, form: str) -> str:
        used.add(matmul("gpu", rows, n, 1 << 20, form))
        return matmul("gpu", rows, n, 1 << 20, form)

    def chosen_for_experts(kind: str, tile: int, _k: int, form: str) -> str:
        used.add(expert_matmul("gpu", tile, 1 << 20 if n > 1 else 1, form))
        return expert_matmul("gpu", tile, 1 << 20 if n > 1 else 1, form)

    monkeypatch.setattr(launch, "matmul", chosen)
    monkeypatch.setattr(transformer, "expert_matmul", chosen_for_experts)
    check(device, config, weights, said, decoding, 5)  # prefill passes have every number of rows
    matrices = [m for m in weights.layers[1].__dict__.values() if isinstance(m, launch.Matrix)]
    forms = {m.form for m in (*matrices, weights.lm_head)}
    variants = {re.search(r"w4_.*", name)[0] for name in used if not name.startswith("expert")}
    wide = {"w4_m1_r4", "w4_m4_r4", "w4_m8_r4", "w4_m16_r4_g2"}
    assert variants == (wide if n > 1 else {"w4_m1_r1", "w4_m4_r4", "w4_m8_r4"})
    end = {form: "" if form == "f32" else f"_{form}" for form in forms}
    assert {KERNELS[name].twin for name in used if not name.startswith("expert")} == {
        f"matmul{end[m.form]}" for m in weights.matrices()
    }
    assert {KERNELS[name].twin for name in used if name.startswith("expert")} == {
        f"expert_matmul{end[m.form]}" for m in weights.experts()
    }


@pytest.mark.parametrize(
    "dtypes", [{"": "F16"}, {"": "F32"}, {"up_proj.weight": "F32", "q_a_proj.weight": "F16", "lm_head.weight": "F16"}]
)
def test_other_dtypes_and_several(device, dtypes):
    config = replace(parse_config(PRESETS["odd"]), num_hidden_layers=2)
    arrays = new_weights(config, 0)
    for name in arrays:
        for end, dtype in dtypes.items():
            if name.endswith(end):
                arrays[name] = arrays[name].astype(np.float32).astype(STORED_DTYPES[dtype])
    weights = Weights.from_arrays(arrays, config)
    placed = upload_weights(device, config, weights)
    forms = {m.form for m in (*placed.matrices(), *placed.experts(), placed.embed)}
    assert forms == ({"f32", "bf16", "f16"} if len(dtypes) > 1 else {dtypes[""].lower()})
    decoding = Decoding(3)
    check(device, config, placed, numpy_says(config, weights, decoding), decoding, 3)


@pytest.mark.parametrize(
    "quantisation", [int4_config(()), int4_config((), 12), fp8_config((9, 16)), fp8_config((128, 128))]
)
def test_every_projection_packed(device, quantisation):
    # no width is a multiple of 8: words, groups and blocks end in the middle; int4 has lm_head too
    weights = quantised("odd", quantisation, num_hidden_layers=2)
    placed = upload_weights(device, weights.config, weights)
    packed = "int4" if "config_groups" in quantisation else "fp8"
    forms = {m.form for m in (*placed.matrices(), *placed.experts())}
    assert forms == {packed, "f32", "bf16"}  # kv_b, and the router
    assert placed.lm_head.form == ("int4" if packed == "int4" else "bf16")
    decoding = Decoding(3)
    check(device, weights.config, placed, numpy_says(weights.config, weights, decoding), decoding, 3)


@pytest.mark.parametrize("tied", ["BF16", "F16"])
def test_a_tied_head(device, tied):
    config = replace(parse_config({**PRESETS["tiny"], "tie_word_embeddings": True}), num_hidden_layers=2)
    arrays = new_weights(config, 0)
    arrays["model.embed_tokens.weight"] = arrays["model.embed_tokens.weight"].astype(STORED_DTYPES[tied])
    weights = Weights.from_arrays(arrays, config)
    placed = upload_weights(device, config, weights)
    assert placed.embed.form == placed.lm_head.form == tied.lower()
    decoding = Decoding(3)
    check(device, config, placed, numpy_says(config, weights, decoding), decoding, 4)

"""Quantised weights against the libraries of their formats, and quantised checkpoints against transformers.

compressed-tensors packs and unpacks INT4, torch converts e4m3; both are independent of kdtr. transformers gets the
dequantised float32 weights: whether it would dequantise them itself is not asked (it rounds to bf16 on the way).
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")  # pip install 'kdtr[hf]'
pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

import safetensors.numpy
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils.match import match_name
from hf_models import check_weights, decode, double, float64_everywhere, load, prefill
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Decoding, Prompt, check_prompts
from kdtr_cli.model.quant import (
    dequantise_fp8,
    dequantise_int4,
    pack_int4,
    quantise_fp8,
    quantise_int4,
    unpack_int4,
)
from kdtr_cli.model.quantisation import Quantisation
from kdtr_cli.model.source import open_model
from kdtr_cli.model.tensors import expected_tensors
from kdtr_cli.model.tokenizer import load_tokenizer
from kdtr_cli.reference import exact, float64
from kdtr_cli.reference import transformer as reference
from kdtr_cli.reference.generate import generate

pytestmark = pytest.mark.hf

FIXTURES = Path(__file__).parents[2] / "fixtures"
STEPS = 12
PLAIN, WIDENED, FLOAT32 = 1e-4, 1e-9, 1e-3  # the core's limits, see test_transformers_parity.py
SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 140), st.integers(0, 2**32 - 1))


def torch_of(array: np.ndarray) -> torch.Tensor:
    """A tensor of the same bits, bf16 and e4m3 included."""
    kinds = {"bfloat16": (np.int16, torch.bfloat16), "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn)}
    if array.dtype.name in kinds:
        bits, dtype = kinds[array.dtype.name]
        return torch.from_numpy(array.view(bits).copy()).view(dtype)
    return torch.from_numpy(array.copy())


@given(SHAPES)
@settings(deadline=None, max_examples=200)
def test_packing_is_compressed_tensors(shape: tuple[int, int, int]) -> None:
    rows, columns, seed = shape
    q = np.random.default_rng(seed).integers(-8, 8, (rows, columns)).astype(np.int8)
    theirs = pack_to_int32(torch.from_numpy(q), 4)
    ours = pack_int4(q)
    np.testing.assert_array_equal(ours, theirs.numpy())
    back = unpack_from_int32(torch.from_numpy(ours), 4, torch.Size((rows, columns)))
    np.testing.assert_array_equal(back.numpy(), q)


@given(SHAPES)
@settings(deadline=None, max_examples=200)
def test_unpacking_any_words_is_compressed_tensors(shape: tuple[int, int, int]) -> None:
    # also where the bits after the last element are not those of a packer
    rows, columns, seed = shape
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, (rows, -(-columns // 8))).astype(np.int32)
    theirs = unpack_from_int32(torch.from_numpy(words), 4, torch.Size((rows, columns)))
    np.testing.assert_array_equal(unpack_int4(words, columns), theirs.numpy())


@given(SHAPES, st.sampled_from([8, 32, 64, 128]))
@settings(deadline=None, max_examples=200)
def test_dequantised_int4_is_compressed_tensors_integers_times_scale(shape: tuple[int, int, int], group: int) -> None:
    rows, columns, seed = shape
    rng = np.random.default_rng(seed)
    words = rng.integers(-(2**31), 2**31, (rows, -(-columns // 8))).astype(np.int32)
    scale = torch.rand(rows, -(-columns // group), generator=torch.Generator().manual_seed(seed % 2**31)) + 1e-3
    scale = scale.to(torch.bfloat16)
    q = unpack_from_int32(torch.from_numpy(words), 4, torch.Size((rows, columns)))
    want = q.double() * scale.double().repeat_interleave(group, 1)[:, :columns]
    ours = dequantise_int4(words, scale.float().numpy(), columns, group)
    np.testing.assert_array_equal(ours.astype(np.float64), want.numpy())


@given(SHAPES, st.sampled_from([8, 32, 64]))
@settings(deadline=None, max_examples=100)
def test_quantised_int4_has_compressed_tensors_scales(shape: tuple[int, int, int], group: int) -> None:
    rows, columns, seed = shape
    w = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    packed, scale = quantise_int4(w, group)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group, dynamic=False)
    for g in range(scale.shape[1]):
        part = torch.from_numpy(w[:, g * group : (g + 1) * group])
        theirs, _ = calculate_qparams(part.amin(-1), part.amax(-1), args)
        assert torch.equal(torch_of(np.ascontiguousarray(scale[:, g])), theirs.to(torch.bfloat16))
        q = torch.clamp(torch.round(part / theirs.to(torch.bfloat16).float()[:, None]), -8, 7)
        assert np.array_equal(unpack_int4(packed, columns)[:, g * group : (g + 1) * group], q.numpy())


@given(SHAPES, st.tuples(st.sampled_from([2, 64, 128]), st.sampled_from([3, 64, 128])))
@settings(deadline=None, max_examples=100)
def test_fp8_is_torchs_e4m3(shape: tuple[int, int, int], block: tuple[int, int]) -> None:
    rows, columns, seed = shape
    w = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    w8, scale = quantise_fp8(w, block)
    spread = torch.from_numpy(scale).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
    theirs = (torch.from_numpy(w) / spread).to(torch.float8_e4m3fn)
    assert np.array_equal(w8.view(np.uint8), theirs.view(torch.uint8).numpy())
    ours = dequantise_fp8(w8, scale, block)
    np.testing.assert_array_equal(ours, (theirs.float() * spread).numpy())
    np.testing.assert_array_equal(ours, (theirs.double() * spread.double()).to(torch.float32).numpy())


def test_every_e4m3_code_is_torchs() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    ours = dequantise_fp8(codes.view(ml_dtypes.float8_e4m3fn), np.ones((1, 1), np.float32), (128, 128))
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["tiny-kimi-int4", "tiny-kimi"])
def test_the_ignore_list_matches_as_compressed_tensors_does(name: str) -> None:
    config = open_model(FIXTURES / "tiny-kimi-int4").config
    lists = [
        config.quantisation.ignore,
        ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"),
        ("re:.*layers\\.[0-2]\\..*", "model.layers.3.mlp.experts.0.up_proj"),
        (),
    ]
    prefix = "language_model." if name == "tiny-kimi-int4" else ""
    for ignore in lists:
        how = Quantisation("int4", group_size=32, ignore=tuple(ignore))
        for tensor in expected_tensors(config):
            if tensor.endswith(("_proj.weight", "mqa.weight", "lm_head.weight")):
                module = tensor.removesuffix(".weight")
                ignored = any(match_name(m, entry) for m in (module, prefix + module) for entry in ignore)
                assert how.covers(tensor, prefix) == (not ignored)


# ------------------------------------------------------------------------------------- the checkpoints, dequantised


@pytest.fixture(scope="module", params=["tiny-kimi-int4", "tiny-kimi-fp8"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, np.ndarray]:
    """(kdtr's model, transformers' float32 model of the dequantised values, a prompt)."""
    model = open_model(FIXTURES / request.param)
    obj = json.loads(model.config_text)
    obj = {key: value for key, value in obj.get("text_config", obj).items() if key != "quantization_config"}
    folder = tmp_path_factory.mktemp("dequantised")
    (folder / "config.json").write_text(json.dumps(obj))
    weights = {name: model.weights[name] for name in model.weights}
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    theirs, report = load(folder, "deepseek_v3")
    check_weights(theirs, report, weights)
    ids = np.array(load_tokenizer(model.folder).encode("def fibonacci(n):\n    if n < 2:\n"), np.int32)
    return model, theirs, ids


def apart(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a.astype(np.float64) - b).max())


@pytest.mark.parametrize("way", ["plain double", "widened double", "float32"])
def test_tokens_and_logits_are_transformers(opened: tuple[Any, Any, np.ndarray], way: str) -> None:
    model, theirs, ids = opened
    prompt = Prompt("prompt", ids, 0)
    positions = check_prompts([prompt], model.config, STEPS)
    ops, limit = {"plain double": (float64, PLAIN), "widened double": (float64, WIDENED), "float32": (exact, FLOAT32)}[
        way
    ]
    ours = reference.Model(model.config, model.weights, Choices(), positions, ops)
    golden = generate(ours, [prompt], Decoding(STEPS, model.config.eos_token_ids), keep_prompt_logits=True)[0]

    def check(other: Any) -> None:
        tokens, logits = decode(other, ids, STEPS)
        assert tokens.tolist() == golden.tokens.tolist()
        assert apart(prefill(other, ids), golden.prompt_logits) < limit
        assert apart(logits, golden.logits) < limit

    if way == "widened double":
        with float64_everywhere():
            check(double(theirs))
    else:
        check(theirs if way == "float32" else double(theirs))
    assert len(set(golden.tokens.tolist())) >= 3

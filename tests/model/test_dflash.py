"""Opening a DFlash drafter: every field that could change it is read or refused, and its weights are its identity."""

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from kdtr_cli.errors import InputError
from kdtr_cli.model.config import load_config, parse_config
from kdtr_cli.model.dflash import draft_rope_table, draft_tensors, open_drafter, parse_dflash
from kdtr_cli.model.presets import PRESETS
from kdtr_cli.model.rope import rope_table

pytestmark = pytest.mark.quick

FIXTURES = Path(__file__).parents[2] / "fixtures"
TARGET = parse_config(PRESETS["tiny"])
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 6,
    "dflash_config": {"mask_token_id": 500, "target_layer_ids": [0, 2]},
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": TARGET.hidden_size,
    "intermediate_size": 24,
    "layer_types": ["full_attention"],
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "num_target_layers": TARGET.num_hidden_layers,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": TARGET.vocab_size,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def changed(**change) -> dict:
    config = {**CONFIG, **change}
    return {name: value for name, value in config.items() if value != "absent"}


def inner(**change) -> dict:
    return changed(dflash_config={**CONFIG["dflash_config"], **change})


def write(folder: Path, config: dict = CONFIG, edit=None, files: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shapes = draft_tensors(parse_dflash(CONFIG, TARGET))
    tensors = {n: rng.normal(size=s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}
    if edit:
        edit(tensors)
    names = sorted(tensors)
    for i in range(files):
        part = {n: tensors[n] for n in names[i::files]}
        safetensors.numpy.save_file(part, folder / f"model-{i}.safetensors")
    return folder


class TestConfig:
    def test_the_trained_fixture(self):
        target, _ = load_config(FIXTURES / "tiny-kimi")
        drafter = open_drafter(FIXTURES / "tiny-kimi-dflash", target)
        config = drafter.config
        assert (config.block_size, config.horizon, config.mask_token_id) == (8, 7, 1022)
        assert config.target_layer_ids == (0, 1, 2)
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 48)
        assert config.rope_scaling.amplitude() == 1.0
        assert len(drafter.weights) == 25
        assert drafter.identity == f"dflash:{drafter.sha256}"

    def test_layouts_that_mean_the_same(self):
        want = parse_dflash(changed(rope_scaling=YARN), TARGET)
        deepseek = {**YARN, "rope_type": "deepseek_yarn"}  # as Kimi-K2.6's drafter spells it
        for same in (
            changed(rope_scaling=deepseek),
            changed(rope_scaling=None, rope_theta="absent", rope_parameters={**deepseek, "rope_theta": 10000.0}),
            changed(rope_scaling=YARN, layer_types="absent", sliding_window=4096, torch_dtype="bfloat16"),
        ):
            assert parse_dflash(same, TARGET) == want
        assert want.rope_scaling.factor == 4.0
        assert parse_dflash(changed(num_key_value_heads="absent"), TARGET).num_key_value_heads == 4

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (changed(hidden_size=64), "hidden_size is 64; allowed: 128, that of the target"),
            (changed(vocab_size=1000), "vocab_size is 1000"),
            (changed(num_target_layers=61), "num_target_layers is 61"),
            (changed(block_size=1), "block_size is 1; allowed: an integer from 2 to 33"),
            (changed(block_size=34), "block_size is 34"),
            (changed(block_size="absent"), "block_size is missing"),
            (changed(head_dim=7), "head_dim is 7; allowed: an even number"),
            (changed(num_key_value_heads=3), "num_key_value_heads is 3; allowed: a divisor"),
            (changed(attention_bias=True), "attention_bias is true"),
            (changed(hidden_act="gelu"), "hidden_act is"),
            (changed(layer_types=["sliding_attention"]), "layer_types is"),
            (changed(layer_types=["full_attention"] * 2), "layer_types is"),
            (changed(use_sliding_window=True), "use_sliding_window is true"),
            (changed(use_sliding_window="absent", sliding_window=64), "sliding_window is 64"),
            (changed(quantization_config={"bits": 4}), "quantised drafters are not supported"),
            (changed(rope_theta="absent"), "rope_theta is missing"),
            (changed(rope_scaling={"rope_type": "llama3", "factor": 8}), "rope_scaling.rope_type"),
            (changed(rms_norm_eps="absent"), "rms_norm_eps is missing"),
            (changed(attn_logit_softcapping=30), "attn_logit_softcapping is 30: unknown field"),
            (changed(dflash_config="absent"), "dflash_config is missing"),
            (inner(mask_token_id=512), "dflash_config.mask_token_id is 512; allowed: an integer from 0 to 511"),
            (inner(mask_token_id=None), "dflash_config.mask_token_id"),
            (inner(target_layer_ids=[0, 4]), "dflash_config.target_layer_ids is .*the target's layers, 0 to 3"),
            (inner(target_layer_ids=[]), "dflash_config.target_layer_ids"),
            (inner(target_layer_ids=[1, 1]), "each layer once"),
            (inner(target_layer_ids=[True]), "dflash_config.target_layer_ids"),
            (inner(causal=True), "dflash_config.causal is true: unknown field"),
        ],
    )
    def test_a_field_that_is_wrong_is_named(self, config, message):
        with pytest.raises(InputError, match=message):
            parse_dflash(config, TARGET)

    def test_tables_reach_a_block_past_the_last_position(self):
        config = parse_dflash(CONFIG, TARGET)
        cos, sin = draft_rope_table(config, 128 + 33)
        assert cos.shape == sin.shape == (161, 4)
        short = rope_table(config, 128)
        assert cos[:128].tobytes() == short[0].tobytes()
        with pytest.raises(InputError, match=r"162 positions, a block included: the drafter ends at 128"):
            draft_rope_table(config, 162)


class TestWeights:
    def test_are_read_as_float32_and_never_changed(self, tmp_path):
        drafter = open_drafter(write(tmp_path / "d", files=3), TARGET)
        assert drafter.config == parse_dflash(CONFIG, TARGET)
        assert sorted(drafter.weights) == sorted(draft_tensors(drafter.config))
        fc = drafter.weights["fc.weight"]
        assert (fc.dtype, fc.shape) == (np.float32, (128, 256))
        with pytest.raises(ValueError, match="read-only"):
            fc[0, 0] = 1
        with pytest.raises(KeyError):
            drafter.weights["lm_head.weight"]

    def test_identity_is_of_values_and_config(self, tmp_path):
        one = open_drafter(write(tmp_path / "a"), TARGET)
        assert open_drafter(write(tmp_path / "b", files=2), TARGET).sha256 == one.sha256  # however cut into files

        def bump(tensors):
            tensors["norm.weight"][3] += np.float32(0.5)

        def widen(tensors):
            tensors.update({name: values.astype(np.float32) for name, values in tensors.items()})

        others = {
            open_drafter(write(tmp_path / "c", edit=bump), TARGET).sha256,
            open_drafter(write(tmp_path / "d", {**CONFIG, "rms_norm_eps": 1e-5}), TARGET).sha256,
            one.sha256,
        }
        assert len(others) == 3
        assert open_drafter(write(tmp_path / "e", edit=widen), TARGET).sha256 == one.sha256  # the same values

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (lambda t: t.pop("layers.0.mlp.up_proj.weight"), "tensor layers.0.mlp.up_proj.weight is missing"),
            (lambda t: t.update({"lm_head.weight": t["norm.weight"]}), "lm_head.weight.* has no place"),
            (lambda t: t.update({"fc.weight": t["fc.weight"][:, 1:].copy()}), r"fc.weight has shape \[128, 255\]"),
            (lambda t: t.update({"norm.weight": t["norm.weight"].astype(np.int32)}), "norm.weight has dtype I32"),
            (lambda t: t["norm.weight"].__setitem__(1, np.inf), "norm.weight holds a value that is not finite"),
        ],
    )
    def test_a_tensor_that_is_wrong_is_named(self, tmp_path, edit, message):
        with pytest.raises(InputError, match=message):
            open_drafter(write(tmp_path / "d", edit=edit), TARGET)

    def test_a_tensor_in_two_files(self, tmp_path):
        folder = write(tmp_path / "d")
        safetensors.numpy.save_file({"norm.weight": np.ones(128, np.float32)}, folder / "more.safetensors")
        with pytest.raises(InputError, match=r"tensor norm.weight is in both model-0.safetensors and more.safetensors"):
            open_drafter(folder, TARGET)

    def test_folders_that_are_no_drafter(self, tmp_path):
        with pytest.raises(InputError, match=r"no config.json; a DFlash drafter is a folder"):
            open_drafter(tmp_path / "absent", TARGET)
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        with pytest.raises(InputError, match=r"no \*.safetensors file"):
            open_drafter(tmp_path, TARGET)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(InputError, match="not valid JSON"):
            open_drafter(tmp_path, TARGET)

    def test_a_drafter_of_another_target(self):
        target, _ = load_config(FIXTURES / "tiny-kimi")
        with pytest.raises(InputError, match="num_target_layers is 4; allowed: 5"):
            open_drafter(FIXTURES / "tiny-kimi-dflash", replace(target, num_hidden_layers=5))

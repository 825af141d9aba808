"""quantization_config: the two published layouts are read, everything else is one line that names the field."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kdtr_cli.errors import InputError
from kdtr_cli.model.config import load_config, parse_config
from kdtr_cli.model.presets import PRESETS
from kdtr_cli.model.quantisation import Quantisation, fp8_config, int4_config

pytestmark = pytest.mark.quick
FIXTURES = Path(__file__).parents[2] / "fixtures"
K25 = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
K26 = [
    "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
    "re:vision_tower.*", "re:mm_projector.*",
]  # fmt: skip
EXPERT = "model.layers.1.mlp.experts.3.{}_proj.weight"
OTHERS = [
    "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.mlp.shared_experts.up_proj.weight", "model.layers.1.self_attn.q_a_proj.weight",
    "model.layers.1.self_attn.kv_a_proj_with_mqa.weight", "lm_head.weight",
]  # fmt: skip
NEVER = [
    "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.gate.weight",
    "model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.self_attn.q_a_layernorm.weight",
    "model.layers.1.self_attn.q_a_proj.bias",
]  # fmt: skip


def plain(table: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(PRESETS["tiny"])), "quantization_config": table}


def packed(**changes: Any) -> dict[str, Any]:
    """The packed layout; a change of 'weights__x' or 'group__x' goes to the table inside."""
    table = json.loads(json.dumps(int4_config(tuple(K25))))
    group = table["config_groups"]["group_0"]
    for key, value in changes.items():
        place, _, name = key.rpartition("__")
        {"": table, "group": group, "weights": group["weights"]}[place][name] = value
    return table


def refused(obj: dict[str, Any], *words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_config(obj)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(("ignore", "prefix"), [(K25, ""), (K25, "language_model."), (K26, "language_model.")])
def test_both_spellings_of_the_ignore_list_leave_the_routed_experts(ignore: list[str], prefix: str) -> None:
    how = parse_config(plain(packed(ignore=ignore))).quantisation
    assert how == Quantisation("int4", group_size=32, ignore=tuple(ignore))
    assert all(how.covers(EXPERT.format(part), prefix) for part in ("gate", "up", "down"))
    assert not any(how.covers(name, prefix) for name in OTHERS + NEVER)


def test_without_an_ignore_list_every_linear_layer_is_packed() -> None:
    how = parse_config(plain(packed(ignore=[]))).quantisation
    assert all(how.covers(name) for name in [*OTHERS, EXPERT.format("up")])
    assert not any(how.covers(name) for name in NEVER)


def test_an_entry_may_name_the_module_with_or_without_the_prefix() -> None:
    for entry in ("lm_head", "language_model.lm_head", "re:language_model\\.lm_head", "re:lm_head"):
        how = Quantisation("int4", group_size=32, ignore=(entry,))
        assert not how.covers("lm_head.weight", "language_model.")
    assert Quantisation("int4", group_size=32, ignore=("language_model.lm_head",)).covers("lm_head.weight", "")
    # a plain entry is the whole name, a pattern begins at the start
    assert Quantisation("int4", ignore=("head", "re:head", "lm_head.weight")).covers("lm_head.weight")


def test_fp8_covers_all_projections_but_the_head() -> None:
    how = parse_config(plain(fp8_config())).quantisation
    assert how == Quantisation("fp8", block=(128, 128))
    assert all(how.covers(name) for name in [*OTHERS, EXPERT.format("up")] if name != "lm_head.weight")
    assert not any(how.covers(name) for name in [*NEVER, "lm_head.weight"])


@pytest.mark.parametrize(
    ("entry", "left"),
    [
        ("model.layers.1", ["model.layers.1.self_attn.o_proj.weight"]),
        ("model.layers.1.self_attn.o_proj", ["model.layers.1.self_attn.o_proj.weight"]),
        ("o_proj", ["model.layers.1.self_attn.o_proj.weight", "model.layers.11.self_attn.o_proj.weight"]),
        ("model.layers.11", ["model.layers.11.self_attn.o_proj.weight"]),
        ("proj", []),
        ("layers.1", []),
    ],
)
def test_fp8_leaves_modules_by_whole_components(entry: str, left: list[str]) -> None:
    how = parse_config(plain({**fp8_config(), "modules_to_not_convert": [entry]})).quantisation
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in (1, 11)]
    assert [name for name in names if not how.covers(name)] == left


def test_nested_and_outside_are_the_same_and_must_agree() -> None:
    def nested(inner: Any, outer: Any) -> dict[str, Any]:
        text = plain(inner)
        return {"model_type": "kimi_k25", "text_config": text, "quantization_config": outer}

    both = packed()
    for obj in (nested(both, None), nested(None, both), nested(both, both)):
        assert parse_config(obj).quantisation == Quantisation("int4", group_size=32, ignore=tuple(K25))
    refused(nested(both, packed(ignore=K26)), "quantization_config", "text_config.quantization_config", "contradict")
    refused(nested(None, {"quant_method": "awq"}), "quantization_config.quant_method", '"awq"')
    refused(nested({"quant_method": "awq"}, None), "text_config.quantization_config.quant_method", '"awq"')


def test_quantisation_is_part_of_the_config() -> None:
    configs = [
        parse_config(plain(table))
        for table in (None, {}, fp8_config(), fp8_config((64, 64)), packed(), packed(weights__group_size=64))
    ]
    assert configs[0] == configs[1] == parse_config(PRESETS["tiny"])
    assert len(set(configs)) == 5


def test_fixtures() -> None:
    int4, fp8 = (load_config(FIXTURES / name)[0] for name in ("tiny-kimi-int4", "tiny-kimi-fp8"))
    assert (int4.tensor_prefix, int4.quantisation) == (
        "language_model.",
        Quantisation("int4", group_size=32, ignore=tuple(K26)),
    )
    assert (fp8.tensor_prefix, fp8.quantisation) == ("", Quantisation("fp8", block=(128, 128)))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (3, ["quantization_config is 3"]),
        ("fp8", ['quantization_config is "fp8"']),
        ({"bits": 4}, ["quantization_config.quant_method is missing"]),
        *[
            ({"quant_method": method}, ["quantization_config.quant_method", json.dumps(method), '"fp8"'])
            for method in ("awq", "gptq", "bitsandbytes", "modelopt", "mxfp4", "fbgemm_fp8", "quark", 8)
        ],
        (packed(format="mxfp4-pack-quantized"), ["format", '"pack-quantized"']),
        (packed(format="marlin-24"), ["quantization_config.format", '"marlin-24"']),
        (packed(format=None), ["quantization_config.format"]),
        (packed(group__format="int-quantized"), ["config_groups.group_0.format"]),
        (packed(quantization_status="frozen"), ["quantization_status", '"compressed"']),
        (packed(weights__num_bits=8), ["group_0.weights.num_bits is 8", "4"]),
        (packed(weights__num_bits=None), ["weights.num_bits"]),
        (packed(weights__type="float"), ["weights.type", '"int"']),
        (packed(weights__strategy="channel"), ["weights.strategy", '"group"']),
        (packed(weights__strategy="tensor"), ["weights.strategy", '"tensor"']),
        (packed(weights__group_size=None), ["weights.group_size"]),
        (packed(weights__group_size=0), ["weights.group_size"]),
        (packed(weights__group_size=-1), ["weights.group_size"]),
        (packed(weights__symmetric=False), ["weights.symmetric is false", "zero points"]),
        (packed(weights__symmetric=None), ["weights.symmetric"]),
        (packed(weights__dynamic=True), ["weights.dynamic"]),
        (packed(weights__actorder="group"), ['weights.actorder is "group"', "null"]),
        (packed(weights__actorder=True), ["weights.actorder"]),
        (packed(weights__block_structure="2:4"), ["weights.block_structure"]),
        (packed(weights__scale_dtype="torch.uint8"), ["weights.scale_dtype", "uint8"]),
        (packed(weights__surprise=1), ["weights.surprise", "unknown"]),
        (packed(group__weights=None), ["group_0.weights"]),
        (packed(group__input_activations={"num_bits": 8}), ["group_0.input_activations", "weights alone"]),
        (packed(group__output_activations={"num_bits": 8}), ["group_0.output_activations"]),
        (packed(group__targets=["re:.*experts.*"]), ["group_0.targets", '["Linear"]']),
        (packed(group__targets=None), ["group_0.targets"]),
        (packed(group__surprise=1), ["group_0.surprise", "unknown"]),
        (packed(kv_cache_scheme={"num_bits": 8, "type": "float"}), ["kv_cache_scheme", "cache"]),
        (packed(sparsity_config={"format": "sparse-24-bitmask"}), ["sparsity_config"]),
        (packed(transform_config={"config_groups": {}}), ["transform_config"]),
        (packed(config_groups={}), ["config_groups", "one group"]),
        (packed(config_groups={"a": {}, "b": {}}), ["config_groups", "one group"]),
        (packed(config_groups={"a": 3}), ["config_groups"]),
        (packed(config_groups={"FP8_DYNAMIC": ["Linear"]}), ["config_groups"]),
        (packed(surprise=1), ["quantization_config.surprise", "unknown"]),
        (packed(ignore="lm_head"), ["quantization_config.ignore"]),
        (packed(ignore=["lm_head", 3]), ["quantization_config.ignore"]),
        (packed(ignore=["a"] * 1001), ["quantization_config.ignore"]),
        (packed(ignore=["re:("]), ['"re:("', "regular expression"]),
        (packed(ignore=["re:(a+)+$"]), ['"re:(a+)+$"', "repeated group"]),
        (packed(ignore=["re:(?=a)"]), ["lookaround"]),
        (packed(ignore=["re:.*.*.*.*#"]), ["3 repeats"]),
        (packed(ignore=["re:a"] * 33), ["ignore", "32 patterns"]),
        (packed(ignore=["re:" + "a" * 201]), ["200 characters"]),
        ({**fp8_config(), "fmt": "e5m2"}, ["quantization_config.fmt", '"e4m3"']),
        ({**fp8_config(), "activation_scheme": "static"}, ["activation_scheme", '"dynamic"']),
        ({**fp8_config(), "scale_fmt": "ue8m0"}, ["scale_fmt", '"ue8m0"', "float32"]),
        ({**fp8_config(), "weight_block_size": None}, ["weight_block_size"]),
        ({**fp8_config(), "weight_block_size": [128]}, ["weight_block_size"]),
        ({**fp8_config(), "weight_block_size": [128, 0]}, ["weight_block_size"]),
        ({**fp8_config(), "weight_block_size": [128, True]}, ["weight_block_size"]),
        ({**fp8_config(), "weight_block_size": 128}, ["weight_block_size"]),
        ({**fp8_config(), "modules_to_not_convert": "lm_head"}, ["modules_to_not_convert"]),
        ({**fp8_config(), "modules_to_not_convert": ["model.*"]}, ["modules_to_not_convert", '"model.*"']),
        ({**fp8_config(), "dequantize": True}, ["dequantize"]),
        ({**fp8_config(), "surprise": 1}, ["quantization_config.surprise", "unknown"]),
    ],
)
def test_everything_else_is_refused_by_the_fields_name(table: Any, words: list[str]) -> None:
    refused(plain(table), *words)


def test_compression_config_the_old_name_is_not_ignored() -> None:
    refused({**PRESETS["tiny"], "compression_config": packed()}, "compression_config", "unknown")


def test_what_says_nothing_of_the_stored_tensors_is_let_through() -> None:
    table = packed(
        version="0.12.2", global_compression_ratio=1.5, weights__observer="mse", weights__zp_dtype="torch.int8",
        weights__scale_dtype="torch.bfloat16", weights__observer_kwargs={"a": 1}, group__format="pack-quantized",
        sparsity_config={}, transform_config={}, quantization_status=None,
    )  # fmt: skip
    assert parse_config(plain(table)) == parse_config(plain(packed()))
    saved = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": None,
             "dequantize": False, "activation_scheme": "dynamic"}  # fmt: skip
    assert parse_config(plain(saved)) == parse_config(plain(fp8_config()))


def test_the_costliest_pattern_that_is_allowed_ends_soon() -> None:
    how = parse_config(plain(packed(ignore=["re:.*.*.*#"]))).quantisation
    start = time.perf_counter()
    assert how.covers("model.layers.60.mlp.experts.383.gate_proj.weight", "language_model.")
    assert time.perf_counter() - start < 0.5

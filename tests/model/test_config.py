"""Reading config.json: every wrong, missing, unknown or contradicting field is an error that names it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr_cli.errors import InputError
from kdtr_cli.model.config import load_config, parse_config
from kdtr_cli.model.presets import PRESETS

pytestmark = pytest.mark.quick

INTEGERS = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok", "n_group",
    "topk_group", "max_position_embeddings", "n_routed_experts", "n_shared_experts", "first_k_dense_replace",
    "moe_layer_freq", "q_lora_rank",
]  # fmt: skip
NUMBERS = ["rms_norm_eps", "rope_theta", "routed_scaling_factor"]
BOOLEANS = ["attention_bias", "tie_word_embeddings", "norm_topk_prob", "rope_interleave"]
YARN_NUMBERS = ["factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"]
REQUIRED = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size",
    "num_experts_per_tok", "n_group", "topk_group", "max_position_embeddings", "n_shared_experts",
    "first_k_dense_replace", "rms_norm_eps", "rope_theta", "routed_scaling_factor", "norm_topk_prob",
]  # fmt: skip

NOT_INTEGERS = st.one_of(
    st.booleans(), st.text(max_size=4), st.floats(), st.lists(st.integers(), max_size=2), st.integers(max_value=-1),
    st.integers(min_value=2**31), st.just({}), st.just(1.0),
)  # fmt: skip
NOT_NUMBERS = st.one_of(
    st.booleans(), st.text(max_size=4), st.lists(st.floats(), max_size=2), st.floats(max_value=-1e-9),
    st.sampled_from([math.nan, math.inf, -math.inf, 10**400, {}]),
)  # fmt: skip
NOT_BOOLEANS = st.one_of(st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}))


def copy_of(name: str = "tiny") -> dict[str, Any]:
    return json.loads(json.dumps(PRESETS[name]))


def refused(obj: dict[str, Any], *words: str) -> str:
    with pytest.raises(InputError) as caught:
        parse_config(obj)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


@settings(deadline=None)
@given(st.sampled_from(INTEGERS), NOT_INTEGERS)
def test_wrong_integer_names_the_field(name: str, value: Any) -> None:
    refused({**copy_of(), name: value}, name)


@settings(deadline=None)
@given(st.sampled_from(NUMBERS), NOT_NUMBERS)
def test_wrong_number_names_the_field(name: str, value: Any) -> None:
    refused({**copy_of(), name: value}, name)


@settings(deadline=None)
@given(st.sampled_from(BOOLEANS), NOT_BOOLEANS)
def test_wrong_boolean_names_the_field(name: str, value: Any) -> None:
    refused({**copy_of(), name: value}, name)


@settings(deadline=None)
@given(st.sampled_from(YARN_NUMBERS), NOT_NUMBERS)
def test_wrong_yarn_number_names_the_field(name: str, value: Any) -> None:
    obj = copy_of()
    obj["rope_scaling"][name] = value
    refused(obj, f"rope_scaling.{name}")


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_field_is_never_guessed(name: str) -> None:
    obj = copy_of()
    del obj[name]
    refused(obj, name, "missing")


@pytest.mark.parametrize("name", ["factor", "original_max_position_embeddings"])
def test_missing_yarn_field_is_never_guessed(name: str) -> None:
    obj = copy_of()
    del obj["rope_scaling"][name]
    refused(obj, f"rope_scaling.{name}", "missing")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("hidden_act", "gelu", '"silu"'),
        ("scoring_func", "foo", '"sigmoid"'),
        ("scoring_func", "softmax", '"sigmoid"'),
        ("topk_method", "foo", '"noaux_tc"'),
        ("topk_method", "greedy", '"noaux_tc"'),
        ("model_type", "llama", '"kimi_k2"'),
        ("num_key_value_heads", 2, "4"),
        ("pretraining_tp", 2, "1"),
        ("pretraining_tp", True, "1"),
        ("ep_size", 8, "1"),
        ("mlp_bias", True, "false"),
        ("is_encoder_decoder", True, "false"),
        ("pruned_heads", {"0": [1]}, "{}"),
        ("head_dim", 99, "8"),
        ("qk_head_dim", 99, "24"),
        ("num_experts", 99, "16"),
        ("n_group", 3, "divisor"),
        ("n_group", 16, "two best"),
        ("topk_group", 2, "at most n_group (1)"),
        ("num_experts_per_tok", 17, "at most 16"),
        ("qk_rope_head_dim", 7, "even"),
        ("eos_token_id", 512, "vocabulary"),
        ("eos_token_id", [1, True], "token ids"),
        ("eos_token_id", "x", "token ids"),
        ("bos_token_id", -1, "integer"),
        ("torch_dtype", "float64", '"bfloat16"'),
        ("dtype", "float16", "torch_dtype"),
        ("rms_norm_eps", 0, "above 0"),
        ("rope_theta", 1.0, "above 1"),
        ("routed_scaling_factor", 0.0, "above 0"),
        ("num_hidden_layers", 2_000_000_000, "1000"),
    ],
)
def test_unsupported_or_contradicting_value(name: str, value: Any, allowed: str) -> None:
    refused({**copy_of(), name: value}, name, allowed)


def test_experts_per_token_must_fit_into_the_kept_groups() -> None:
    refused({**copy_of("tiny-groups"), "num_experts_per_tok": 9}, "num_experts_per_tok", "at most 8")


@given(st.text(min_size=1, max_size=12).filter(lambda s: s not in PRESETS["tiny"]))
@settings(deadline=None, max_examples=50)
def test_unknown_field_is_refused_by_name(name: str) -> None:
    known = "sliding_window per_layer_config head_dim ep_size rope_interleave"  # read, so refused for the value
    if name in known.split() or len(json.dumps(name)) > 40:
        return
    key = f"x{name}"
    refused({**copy_of(), key: 3}, key if key.isprintable() else json.dumps(key), "unknown field")


def test_unknown_field_with_a_line_break_stays_on_one_line() -> None:
    refused({**copy_of(), "a\nb": 3}, r'"a\nb"', "unknown field")


@pytest.mark.parametrize("key", ["index_topk", "use_qk_norm", "alibi", "logit_scale", "expert_bias_scale"])
def test_field_that_could_change_the_numerics_is_not_ignored(key: str) -> None:
    refused({**copy_of(), key: 0}, key, "unknown field")


def test_irrelevant_fields_change_nothing() -> None:
    noise = {
        "transformers_version": "5.0", "auto_map": {"AutoConfig": "x"}, "initializer_range": 0.5, "use_cache": False,
        "_name_or_path": "x", "return_dict": True, "id2label": {"0": "a"}, "aux_loss_alpha": 0.1, "seq_aux": False,
        "attention_dropout": 0.5, "temperature": 9.0, "num_nextn_predict_layers": 1, "pad_token_id": 3,
    }  # fmt: skip
    assert parse_config({**copy_of(), **noise}) == parse_config(copy_of())


def test_defaults_are_those_of_deepseeks_own_classes() -> None:
    obj = copy_of()
    for name in (
        "attention_bias",
        "tie_word_embeddings",
        "scoring_func",
        "topk_method",
        "moe_layer_freq",
        "hidden_act",
    ):
        del obj[name]
    assert parse_config(obj) == parse_config(copy_of())
    v2 = copy_of("tiny-v2")
    for name in ("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "scoring_func", "topk_method"):
        del v2[name]
    assert parse_config(v2) == parse_config(copy_of("tiny-v2"))


def test_greedy_ignores_groups_and_group_limited_needs_them() -> None:
    greedy = parse_config({**copy_of("tiny-v2"), "n_group": 4, "topk_group": 2})
    assert (greedy.n_group, greedy.topk_group) == (1, 1)
    limited = {**copy_of("tiny-v2"), "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    assert (parse_config(limited).n_group, parse_config(limited).topk_group) == (4, 2)
    refused({**limited, "n_group": None}, "n_group", "null")


def test_v2_rotates_interleaved_pairs_only() -> None:
    assert parse_config(copy_of("tiny-v2")).rope_interleave
    refused({**copy_of("tiny-v2"), "rope_interleave": False}, "rope_interleave", "true")
    assert not parse_config({**copy_of(), "rope_interleave": False}).rope_interleave


@pytest.mark.parametrize("change", [{"n_routed_experts": None}, {"n_routed_experts": 0}, {"first_k_dense_replace": 4}])
def test_all_dense(change: dict[str, Any]) -> None:
    config = parse_config({**copy_of(), **change})
    assert config.n_routed_experts == 0
    assert not any(config.is_moe_layer(i) for i in range(4))


def test_moe_layers_follow_first_k_and_freq() -> None:
    config = parse_config({**copy_of(), "num_hidden_layers": 7, "first_k_dense_replace": 2, "moe_layer_freq": 2})
    assert [config.is_moe_layer(i) for i in range(7)] == [False, False, True, False, True, False, True]


# --- rope, both spellings


def with_rope(**fields: Any) -> dict[str, Any]:
    obj = copy_of()
    del obj["rope_scaling"], obj["rope_theta"]
    return {**obj, **fields}


YARN = {"factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0}  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 50000.0, "rope_scaling": {**YARN, "type": "yarn"}},
        {"rope_theta": 50000, "rope_scaling": {**YARN, "rope_type": "yarn"}},
        {"rope_scaling": {**YARN, "type": "yarn", "rope_type": "yarn", "rope_theta": 50000.0}},
        {"rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 50000.0}},
        {
            "rope_theta": 50000.0,
            "rope_scaling": {**YARN, "type": "yarn"},
            "rope_parameters": {**YARN, "rope_type": "yarn"},
        },
        {"rope_theta": 50000.0, "rope_scaling": None, "rope_parameters": {**YARN, "rope_type": "yarn"}},
    ],
)
def test_every_spelling_of_yarn_is_the_same_model(fields: dict[str, Any]) -> None:
    assert parse_config(with_rope(**fields)) == parse_config(copy_of())


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 50000.0},
        {"rope_theta": 50000.0, "rope_scaling": None},
        {"rope_theta": 50000.0, "rope_scaling": {}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 1.0}},
    ],
)
def test_every_spelling_of_no_scaling(fields: dict[str, Any]) -> None:
    config = parse_config(with_rope(**fields))
    assert config.rope_scaling is None
    assert config.rope_theta == 50000.0
    assert config.softmax_scale() == pytest.approx(24**-0.5, rel=1e-15)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"rope_theta": 5e4, "rope_scaling": {**YARN, "type": "deepseek_yarn"}}, "rope_scaling.type"),
        ({"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type"),
        ({"rope_theta": 5e4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_theta": 5e4, "rope_scaling": {**YARN, "type": "yarn", "rope_type": "default"}}, "rope_scaling.type"),
        ({"rope_theta": 5e4, "rope_scaling": YARN}, "rope_scaling.rope_type"),
        ({"rope_theta": 5e4, "rope_scaling": [1]}, "rope_scaling"),
        ({"rope_theta": 5e4, "rope_scaling": {**YARN, "type": "yarn", "alpha": 1}}, "rope_scaling.alpha"),
        ({"rope_theta": 5e4, "rope_scaling": {"type": "default", "factor": 4.0}}, "rope_scaling.factor"),
        ({"rope_theta": 5e4, "rope_scaling": {**YARN, "type": "yarn", "factor": 0.5}}, "rope_scaling.factor"),
        ({"rope_theta": 5e4, "rope_scaling": {**YARN, "type": "yarn", "beta_fast": 0.5}}, "rope_scaling.beta_fast"),
        ({"rope_theta": 5e4, "rope_scaling": {**YARN, "type": "yarn", "truncate": 1}}, "rope_scaling.truncate"),
        ({"rope_theta": 2, "rope_scaling": {**YARN, "type": "yarn", "original_max_position_embeddings": 1}}, "ramp"),
        (
            {"rope_theta": 5e4, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary",
        ),
        ({"rope_scaling": {**YARN, "type": "yarn"}}, "rope_theta"),
        ({"rope_theta": 1e4, "rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 5e4}}, "rope_theta"),
        (
            {"rope_theta": 5e4, "rope_scaling": {**YARN, "type": "yarn"}, "rope_parameters": {"rope_type": "default"}},
            "rope_parameters",
        ),
        (
            {
                "rope_theta": 5e4,
                "rope_scaling": {**YARN, "type": "yarn"},
                "rope_parameters": {**YARN, "rope_type": "yarn", "factor": 8.0},
            },
            "contradict",
        ),
    ],
)
def test_wrong_or_contradicting_rope(fields: dict[str, Any], word: str) -> None:
    refused(with_rope(**fields), word)


# --- the nested layout of K2.5


def nested(**outer: Any) -> dict[str, Any]:
    return {"model_type": "kimi_k25", "text_config": copy_of(), "vision_config": {"a": 1}, **outer}


def test_nesting_gives_the_same_model_under_a_prefix() -> None:
    config = parse_config(nested(tie_word_embeddings=False, eos_token_id=511, media_placeholder_token_id=3))
    assert config.tensor_prefix == "language_model."
    assert {**vars(config), "tensor_prefix": ""} == vars(parse_config(copy_of()))


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        (nested(tie_word_embeddings=True), ["tie_word_embeddings", "text_config.tie_word_embeddings"]),
        (nested(eos_token_id=3), ["eos_token_id", "text_config.eos_token_id"]),
        (nested(surprise=3), ["surprise", "unknown"]),
        ({**nested(), "text_config": {**copy_of(), "surprise": 3}}, ["text_config.surprise", "unknown"]),
        ({**nested(), "text_config": {**copy_of(), "hidden_size": "x"}}, ["text_config.hidden_size"]),
        ({**nested(), "text_config": {**copy_of(), "model_type": "llama"}}, ["text_config.model_type"]),
        ({**nested(), "text_config": None}, ["text_config"]),
        ({**nested(), "text_config": 3}, ["text_config"]),
    ],
)
def test_wrong_nesting_names_the_field(obj: dict[str, Any], words: list[str]) -> None:
    refused(obj, *words)


# --- files


def test_generation_config_wins_over_the_configs_stop_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(copy_of()))
    assert load_config(tmp_path)[0].eos_token_ids == (511,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3, 7]}))
    assert load_config(tmp_path)[0].eos_token_ids == (3, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 1.0}))
    config, text = load_config(tmp_path)
    assert config.eos_token_ids == (511,)
    assert text == json.dumps(copy_of())


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"{", "JSON"),
        (b"[1]", "object"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"model_type": "kimi_k2", "hidden_size": 1, "hidden_size": 2}', '"hidden_size" is given twice'),
        (b'{"model_type": "kimi_k2", "rms_norm_eps": NaN}', "NaN"),
        (b'{"rms_norm_eps": 1}', "model_type"),
        (b"[" * 100_000, "JSON"),
    ],
)
def test_broken_config_files(tmp_path: Path, text: bytes, word: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(InputError, match=r"config\.json") as caught:
        load_config(tmp_path)
    assert word in str(caught.value)


def test_broken_generation_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(copy_of()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "stop"}))
    with pytest.raises(InputError, match=r"generation_config\.json: eos_token_id"):
        load_config(tmp_path)


def test_missing_config_and_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        load_config(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        load_config(tmp_path / "none")

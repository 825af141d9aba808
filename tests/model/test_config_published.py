"""The published models' configs give the published shapes, softmax scales, YaRN ramps and parameter counts."""

from typing import Any

import pytest

from kdtr_cli.model.config import RopeScaling, parse_config
from kdtr_cli.model.summary import count_parameters
from kdtr_cli.model.tensors import expected_tensors
from kdtr_cli.model.yarn import yarn_ramp

pytestmark = pytest.mark.quick

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

# Kimi-K2.6's text_config; its quantization_config and vision half are left out
K26_TEXT: dict[str, Any] = {
    **{key: value for key, value in V3.items() if key != "torch_dtype"},
    "aux_loss_alpha": 0.001,
    "bad_words_ids": None,
    "bos_token_id": 163584,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "is_decoder": False,
    "max_length": 20,
    "max_position_embeddings": 262144,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_beams": 1,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 163839,
    "pruned_heads": {},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {**V3["rope_scaling"], "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "seq_aux": True,
    "tie_encoder_decoder": False,
    "topk_group": 1,
    "torchscript": False,
    "vocab_size": 163840,
}
K26: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k25",
    "pad_token_id": 163839,
    "text_config": K26_TEXT,
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": {"vt_num_hidden_layers": 27},
}
V2_LITE: dict[str, Any] = {
    **{key: value for key, value in V3.items() if key != "num_nextn_predict_layers"},
    "architectures": ["DeepseekV2ForCausalLM"],
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "rope_scaling": {**V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
MOONLIGHT: dict[str, Any] = {
    **{key: value for key, value in V3.items() if key != "rope_scaling"},
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}


@pytest.mark.parametrize(
    ("obj", "scale"),
    [(K26, 0.14467963), (V3, 0.13523378), (V2_LITE, 0.11472139), (MOONLIGHT, 0.07216878)],
    ids=["K2.6", "V3", "V2-Lite", "Moonlight"],
)
def test_softmax_scale(obj: dict[str, Any], scale: float) -> None:
    assert parse_config(obj).softmax_scale() == pytest.approx(scale, abs=5e-9)


def test_softmax_scale_of_kimi_k2_0711() -> None:
    text = {**K26_TEXT, "rope_scaling": {**K26_TEXT["rope_scaling"], "factor": 32.0, "beta_fast": 1.0}}
    assert parse_config(text).softmax_scale() == pytest.approx(0.1308608, abs=5e-8)


@pytest.mark.parametrize(
    ("obj", "ramp"), [(K26, (8, 20)), (V3, (10, 23)), (V2_LITE, (10, 23))], ids=["K2.6", "V3", "V2-Lite"]
)
def test_yarn_ramp(obj: dict[str, Any], ramp: tuple[int, int]) -> None:
    config = parse_config(obj)
    assert config.rope_scaling is not None
    assert yarn_ramp(config.rope_scaling, config.rope_theta, config.qk_rope_head_dim) == ramp


def test_yarn_ramp_where_both_betas_are_one() -> None:
    assert yarn_ramp(RopeScaling(32.0, 4096, 1.0, 1.0), 50000.0, 64) == (19, 20)


@pytest.mark.parametrize("obj", [K26, V3, V2_LITE], ids=["K2.6", "V3", "V2-Lite"])
def test_amplitude_of_cos_and_sin_is_one(obj: dict[str, Any]) -> None:
    config = parse_config(obj)
    assert config.rope_scaling is not None
    assert config.rope_scaling.amplitude() == 1.0


def test_kimi_k26_field_by_field() -> None:
    c = parse_config(K26)
    assert (c.vocab_size, c.hidden_size, c.num_hidden_layers, c.num_attention_heads) == (163840, 7168, 61, 64)
    assert (c.q_lora_rank, c.kv_lora_rank, c.qk_head_dim, c.latent_dim, c.v_head_dim) == (1536, 512, 192, 576, 128)
    assert (c.n_routed_experts, c.num_experts_per_tok, c.n_shared_experts) == (384, 8, 1)
    assert (c.scoring_func, c.topk_method, c.n_group, c.topk_group) == ("sigmoid", "noaux_tc", 1, 1)
    assert (c.norm_topk_prob, c.routed_scaling_factor, c.rms_norm_eps) == (True, 2.827, 1e-5)
    assert (c.eos_token_ids, c.bos_token_id, c.torch_dtype) == ((163586,), 163584, "bfloat16")
    assert (c.tensor_prefix, c.rope_interleave, c.is_v2) == ("language_model.", True, False)
    assert c.rope_scaling == RopeScaling(64.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert [i for i in range(61) if not c.is_moe_layer(i)] == [0]


def test_deepseek_v2_lite_router() -> None:
    c = parse_config(V2_LITE)
    assert (c.is_v2, c.scoring_func, c.topk_method, c.norm_topk_prob) == (True, "softmax", "greedy", False)
    assert c.q_lora_rank is None
    assert not any(name.endswith("e_score_correction_bias") for name in expected_tensors(c))


def test_kimi_k26_tensor_shapes() -> None:
    t = expected_tensors(parse_config(K26))
    attention = "model.layers.7.self_attn."
    assert t[f"{attention}q_a_proj.weight"] == (1536, 7168)
    assert t[f"{attention}q_b_proj.weight"] == (12288, 1536)
    assert t[f"{attention}kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert t[f"{attention}kv_b_proj.weight"] == (16384, 512)
    assert t[f"{attention}o_proj.weight"] == (7168, 8192)
    assert t["model.layers.7.mlp.experts.383.down_proj.weight"] == (7168, 2048)
    assert t["model.layers.7.mlp.gate.e_score_correction_bias"] == (384,)
    assert t["model.layers.0.mlp.gate_proj.weight"] == (18432, 7168)
    assert "model.layers.7.mlp.experts.384.gate_proj.weight" not in t


@pytest.mark.parametrize(
    ("obj", "total", "active"),
    [(V3, 671e9, 37e9), (K26, 1026e9, 32e9), (V2_LITE, 15.7e9, 2.4e9), (MOONLIGHT, 16e9, 2.6e9)],
    ids=["V3", "K2.6", "V2-Lite", "Moonlight"],
)
def test_parameter_counts_are_the_published_ones(obj: dict[str, Any], total: float, active: float) -> None:
    got_total, got_active = count_parameters(parse_config(obj))
    assert got_total == pytest.approx(total, rel=0.01)
    assert got_active == pytest.approx(active, rel=0.06)

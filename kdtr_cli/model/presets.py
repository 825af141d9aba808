"""Small models with seeded random weights, made from nothing: every mechanism of the family at a size for tests.

The weights depend on the preset and the seed alone: raw Philox words (a fixed algorithm), and from there additions,
one multiplication and one rounding to bf16. No library's normal distribution, logarithm or cosine takes part, so every
machine makes the same bytes.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from kdtr_cli.errors import InputError
from kdtr_cli.model.config import ModelConfig, parse_config
from kdtr_cli.model.folder import check_place, new_folder, write_synced
from kdtr_cli.model.tensors import expected_tensors

__all__ = ["PRESETS", "generation_text", "new_weights", "preset_text", "weight_blocks", "write_model"]

_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 512,
    "type": "yarn",
}

_TINY: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 510,
    "eos_token_id": 511,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "kv_lora_rank": 32,
    "max_position_embeddings": 2048,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": _YARN,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 16,
    "vocab_size": 512,
}

#: Hugging Face config dicts by name.
PRESETS: dict[str, dict[str, Any]] = {
    # every mechanism on: q_lora, YaRN with m², shared expert, one dense layer, negative expert bias; Kimi-K2's manner
    "tiny": _TINY,
    # DeepSeek-V3's manner: experts in 4 groups of which 2 are kept, two shared experts
    "tiny-groups": {
        **_TINY,
        "model_type": "deepseek_v3",
        "n_group": 4,
        "n_shared_experts": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.5,
        "topk_group": 2,
    },
    # DeepSeek-V2-Lite's manner: softmax router without bias or normalisation, no q_lora
    "tiny-v2": {
        **_TINY,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
    },
    # no size is a multiple of 8, most are odd: for kernels' tails and alignment; with attention biases
    "odd": {
        **_TINY,
        "attention_bias": True,
        "bos_token_id": 255,
        "eos_token_id": 256,
        "hidden_size": 75,
        "intermediate_size": 101,
        "kv_lora_rank": 29,
        "max_position_embeddings": 1023,
        "moe_intermediate_size": 27,
        "n_routed_experts": 7,
        "num_attention_heads": 3,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 37,
        "qk_nope_head_dim": 13,
        "qk_rope_head_dim": 6,
        "v_head_dim": 9,
        "vocab_size": 257,
    },
}

_LATENT_GAIN = 0.125  # of what the latent norms get: small latents let the choice of their eps show
_QUIET_STOP = 0.25  # the stop token's row of lm_head against the others': a random model rarely stops by itself
_FLOAT32 = "e_score_correction_bias"  # the one weight that is no bfloat16
_AT_ONCE = 1 << 16  # words: what is made of them stays in a processor's cache
_WORDS_STD = (4 * (65536**2 - 1) / 12) ** 0.5  # of the sum of four uniform 16-bit integers


def preset_text(name: str) -> str:
    """The config.json of a preset, as write_model writes it."""
    return json.dumps(_preset(name), indent=2, sort_keys=True) + "\n"


def new_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """name → random weight, ml_dtypes.bfloat16 (float32 for e_score_correction_bias), in the order of expected_tensors.

    The embedding is near-normal (a sum of four uniform integers) with standard deviation 1, other matrices with
    fan_in^-1/2, biases with 0.1; norms are uniform in [0.5, 1.5), expert biases in [−1.1, −0.6): with them most
    choices are negative, so that an engine that masks with 0 where −∞ is due shows. What goes into the latent norms is
    8 times smaller, and so is the stop token's row of lm_head 4 times. With this, logits reach ±4, float32 stays within
    5e-6 of float64 on `tiny` (sharper attention amplifies rounding: twice the deviation on q gave 3e-5), and greedy
    continuations of random prompts wander: about 50 different tokens in 64. A tensor's values depend on the seed, its
    name and its shape only. InputError for a seed outside 0 … 2^64 − 1.
    """
    out: dict[str, np.ndarray] = {}
    for name, shape in expected_tensors(config).items():
        (values,) = weight_blocks(config, seed, name, shape, shape[0])
        out[name] = values if name.endswith(_FLOAT32) else values.astype(ml_dtypes.bfloat16)
    return out


def weight_blocks(config: ModelConfig, seed: int, name: str, shape: tuple[int, ...], rows: int) -> Iterator[np.ndarray]:
    """The float32 values of one weight of new_weights, before they are rounded to bfloat16, ``rows`` rows at a time."""
    if not 0 <= seed < 2**64:
        raise InputError(f"seed {seed}: allowed are integers from 0 to 2^64 - 1")
    stream = _stream(seed, name)
    width = math.prod(shape[1:])
    for first in range(0, shape[0], rows):
        count = min(rows, shape[0] - first)
        block = np.empty((count, *shape[1:]), np.float32)
        flat = block.reshape(-1)
        for at in range(0, count * width, _AT_ONCE):
            part = flat[at : at + _AT_ONCE]
            part[:] = _values(stream.random_raw(len(part)), name, shape)
        # powers of two: exact, before or after rounding
        if "q_a_proj" in name:
            block *= _LATENT_GAIN
        if "kv_a_proj" in name:
            block[: max(0, config.kv_lora_rank - first)] *= _LATENT_GAIN
        if name == "lm_head.weight":
            for token in config.eos_token_ids:
                if first <= token < first + count:
                    block[token - first] *= _QUIET_STOP
        yield block


def _values(words: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 values from random words, one each."""
    if name.endswith(_FLOAT32):
        return -0.6 - 0.5 * _uniform(words)
    if name.endswith("norm.weight"):
        return 0.5 + _uniform(words)
    if name.endswith(".bias"):
        return _near_normal(words, 0.1)
    return _near_normal(words, 1.0 if "embed_tokens" in name else 1.0 / math.sqrt(shape[-1]))


def _stream(seed: int, name: str) -> np.random.Philox:
    """The Philox stream of raw 64-bit words that belongs to (seed, name)."""
    key = int.from_bytes(hashlib.sha256(f"kdtr preset weights {seed} {name}".encode()).digest()[:16], "little")
    return np.random.Philox(key=key)


def _uniform(words: np.ndarray) -> np.ndarray:
    """float64 in [0, 1), multiples of 2^-24."""
    return (words >> np.uint64(40)).astype(np.float64) * 2.0**-24


def _near_normal(words: np.ndarray, std: float) -> np.ndarray:
    """float64 with mean 0: the sum of a word's four 16-bit parts, centred exactly, times one factor."""
    parts = words.astype("<u8", copy=False).view("<u2").reshape(-1, 4)
    total = np.add(parts[:, 0], parts[:, 1], dtype=np.int32)
    total += parts[:, 2]
    total += parts[:, 3]
    total -= 2 * 65535
    return total * (std / _WORDS_STD)


def _preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        raise InputError(f"{name}: no such preset; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def write_model(folder: Path | str, preset: str, seed: int = 0, force: bool = False) -> None:
    """Write a preset as a Hugging Face folder: config.json, generation_config.json, model.safetensors.

    The folder appears complete or not at all; see folder.new_folder for what ``force`` replaces. InputError for every
    refusal and for a place that cannot be written.
    """
    folder = Path(folder)
    obj = _preset(preset)
    check_place(folder, force)
    weights = new_weights(parse_config(obj, where=f"preset {preset}"), seed)
    files = {
        "config.json": preset_text(preset).encode(),
        "generation_config.json": generation_text(obj).encode(),
        # one metadata key only: the library writes several in a random order
        "model.safetensors": safetensors.numpy.save(weights, metadata={"format": "pt"}),
    }
    with new_folder(folder, force) as temporary:
        for name, data in files.items():
            write_synced(temporary / name, data)


def generation_text(obj: dict[str, Any]) -> str:
    """The generation_config.json of a preset."""
    generation = {"bos_token_id": obj["bos_token_id"], "do_sample": False, "eos_token_id": obj["eos_token_id"]}
    return json.dumps(generation, indent=2) + "\n"

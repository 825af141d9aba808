"""Small models with seeded random weights, made from nothing: every mechanism of the family at a size for tests.

The weights depend on the preset and the seed alone: raw Philox words (a fixed algorithm), and from there additions,
one multiplication and one rounding to bf16. No library's normal distribution, logarithm or cosine takes part, so every
machine makes the same bytes.
"""

import hashlib
import json
import math
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from kdtr_cli.errors import InputError
from kdtr_cli.model.config import ModelConfig, parse_config
from kdtr_cli.model.tensors import expected_tensors

__all__ = ["PRESETS", "new_weights", "preset_text", "write_model"]

FILES = ("config.json", "generation_config.json", "model.safetensors")

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
    if not 0 <= seed < 2**64:
        raise InputError(f"seed {seed}: allowed are integers from 0 to 2^64 - 1")
    out: dict[str, np.ndarray] = {}
    for name, shape in expected_tensors(config).items():
        words = _words(seed, name, int(np.prod(shape)))
        if name.endswith("e_score_correction_bias"):
            out[name] = (-0.6 - 0.5 * _uniform(words)).astype(np.float32).reshape(shape)
            continue
        if name.endswith("norm.weight"):
            values = 0.5 + _uniform(words)
        elif name.endswith(".bias"):
            values = _near_normal(words, 0.1)
        else:
            values = _near_normal(words, 1.0 if "embed_tokens" in name else 1.0 / math.sqrt(shape[-1]))
        values = values.reshape(shape)
        if "q_a_proj" in name:
            values *= _LATENT_GAIN
        if "kv_a_proj" in name:
            values[: config.kv_lora_rank] *= _LATENT_GAIN
        if name == "lm_head.weight":
            for token in config.eos_token_ids:
                values[token] *= _QUIET_STOP
        out[name] = values.astype(np.float32).astype(ml_dtypes.bfloat16)
    return out


def _words(seed: int, name: str, n: int) -> np.ndarray:
    """n raw 64-bit words of a Philox stream that belongs to (seed, name)."""
    key = int.from_bytes(hashlib.sha256(f"kdtr preset weights {seed} {name}".encode()).digest()[:16], "little")
    return np.random.Philox(key=key).random_raw(n)


def _uniform(words: np.ndarray) -> np.ndarray:
    """float64 in [0, 1), multiples of 2^-24."""
    return (words >> np.uint64(40)).astype(np.float64) * 2.0**-24


def _near_normal(words: np.ndarray, std: float) -> np.ndarray:
    """float64 with mean 0: the sum of a word's four 16-bit parts, centred exactly, times one factor."""
    parts = sum(((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32, 48))
    return (parts - 2 * 65535).astype(np.float64) * (std / _WORDS_STD)


def _preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        raise InputError(f"{name}: no such preset; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def write_model(folder: Path | str, preset: str, seed: int = 0, force: bool = False) -> None:
    """Write a preset as a Hugging Face folder: config.json, generation_config.json, model.safetensors.

    The folder appears complete or not at all: it is written under a temporary name beside its place and renamed. An
    existing path is refused without ``force``; with it, only a folder that holds nothing but these three files (or
    nothing at all) is replaced. InputError for every refusal and for a place that cannot be written.
    """
    folder = Path(folder)
    obj = _preset(preset)
    _check_place(folder, force)
    weights = new_weights(parse_config(obj, where=f"preset {preset}"), seed)
    generation = {"bos_token_id": obj["bos_token_id"], "do_sample": False, "eos_token_id": obj["eos_token_id"]}
    files = {
        "config.json": preset_text(preset).encode(),
        "generation_config.json": (json.dumps(generation, indent=2) + "\n").encode(),
        # one metadata key only: the library writes several in a random order
        "model.safetensors": safetensors.numpy.save(weights, metadata={"format": "pt"}),
    }
    temporary = folder.absolute().parent / f".{folder.name}.{secrets.token_hex(4)}.tmp"
    try:
        temporary.mkdir()
        for name, data in files.items():
            _write_synced(temporary / name, data)
        _sync(temporary)
        if folder.is_dir():
            _replace(folder, temporary)
        else:
            temporary.rename(folder)
        _sync(folder.absolute().parent)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(folder: Path, new: Path) -> None:
    """Two renames: for a moment nothing stands under the name, but never something half-written."""
    old = new.with_suffix(".old")
    folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    shutil.rmtree(old)


def _check_place(folder: Path, force: bool) -> None:
    if folder.name in ("", ".."):
        raise InputError(f"{folder}: name a new folder for the model")
    if not folder.absolute().parent.is_dir():
        raise InputError(f"{folder}: the folder above it does not exist; create it first")
    if not folder.is_symlink() and not folder.exists():
        return
    if not force:
        raise InputError(f"{folder}: already exists; pass --force to replace it")
    if folder.is_symlink() or not folder.is_dir():
        raise InputError(f"{folder}: not a folder; remove it or choose another name")
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in FILES or not entry.is_file())
    if foreign:
        raise InputError(
            f"{folder}: holds {foreign[0]}, which `kdtr model new` did not write; remove the folder yourself"
        )


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

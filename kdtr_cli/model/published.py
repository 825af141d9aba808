"""Presets of real shape: the configs of published models, cut to fewer layers and experts where asked, random weights.

The configs are those of the published config.json files, field by field where the field is known (docs/models.md says
which are not). Weights are written tensor by tensor, quantised as published, or in bf16.
"""

import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdtr_cli.errors import InputError
from kdtr_cli.model.config import parse_config
from kdtr_cli.model.encode import plan_tensors, write_tensors
from kdtr_cli.model.folder import check_place, new_folder, write_synced
from kdtr_cli.model.presets import generation_text, weight_blocks
from kdtr_cli.model.quantisation import fp8_config, int4_config
from kdtr_cli.model.safetensors_file import STORED_DTYPES
from kdtr_cli.model.tensors import expected_tensors

__all__ = [
    "DTYPES",
    "EXPERTS_ONLY",
    "EXPERTS_ONLY_K26",
    "PUBLISHED",
    "cut",
    "published_quantisation",
    "write_published",
]

DTYPES = ("published", "bf16", "int4", "fp8")
#: what leaves the routed experts alone to be quantised, as Kimi-K2-Thinking and K2.5 spell it, and as K2.6 does
EXPERTS_ONLY = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*")
EXPERTS_ONLY_K26 = (*EXPERTS_ONLY[1:], "re:.*lm_head.*", "re:vision_tower.*", "re:mm_projector.*")

_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
_DEEPSEEK_V3: dict[str, Any] = {
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
    "quantization_config": fp8_config(),
    "rms_norm_eps": 1e-06,
    "rope_scaling": _YARN,
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
_KIMI: dict[str, Any] = {
    **_DEEPSEEK_V3,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 262144,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 163839,
    "quantization_config": int4_config(EXPERTS_ONLY),
    "rms_norm_eps": 1e-05,
    "rope_scaling": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "seq_aux": True,
    "topk_group": 1,
    "vocab_size": 163840,
}
_SMALL: dict[str, Any] = {  # V2-Lite and Moonlight: what they share
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "seq_aux": True,
    "topk_group": 1,
}


def _without(obj: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in obj.items() if key not in names}


#: config.json by name.
PUBLISHED: dict[str, dict[str, Any]] = {
    "kimi-k2.6": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": 163586,
        "ignore_index": -100,
        "media_placeholder_token_id": 163605,
        "model_type": "kimi_k25",
        "pad_token_id": 163839,
        "text_config": {
            **_without(_KIMI, "torch_dtype"),
            "dtype": "bfloat16",
            "quantization_config": int4_config(EXPERTS_ONLY_K26),
        },
        "tie_word_embeddings": False,
        "vision_config": {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27},
    },
    "kimi-k2-thinking": {**_KIMI, "rope_scaling": {**_KIMI["rope_scaling"], "beta_fast": 1.0}},
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v2-lite": {
        **_without(_DEEPSEEK_V3, "num_nextn_predict_layers", "quantization_config"),
        **_SMALL,
        "architectures": ["DeepseekV2ForCausalLM"],
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "intermediate_size": 10944,
        "model_type": "deepseek_v2",
        "norm_topk_prob": False,
        "pretraining_tp": 1,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
    "moonlight": {
        **_without(_DEEPSEEK_V3, "rope_scaling", "quantization_config"),
        **_SMALL,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "intermediate_size": 11264,
        "max_position_embeddings": 8192,
        "num_nextn_predict_layers": 0,
        "pad_token_id": 163839,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "vocab_size": 163840,
    },
}


def published_quantisation(method: str, nested: bool) -> dict[str, Any]:
    """The quantization_config that published checkpoints have: 'int4' Kimi's, K2.6's if nested, 'fp8' DeepSeek-V3's."""
    return fp8_config() if method == "fp8" else int4_config(EXPERTS_ONLY_K26 if nested else EXPERTS_ONLY)


def cut(
    name: str,
    layers: int | None = None,
    experts: int | None = None,
    dtype: str = "published",
    dense: int | None = None,
) -> dict[str, Any]:
    """The config.json of a published model with its first ``layers`` layers and ``experts`` routed experts a layer.

    The dense layers at the start stay as they are, or their first ``dense``, so there must be more layers than those;
    groups stay, and must have room for the experts of a token. dtype 'bf16' takes quantization_config out, 'int4' and
    'fp8' put that of published checkpoints in its place. InputError names the option.
    """
    if name not in PUBLISHED:
        raise InputError(f"{name}: no such preset of real shape; there are {', '.join(PUBLISHED)}")
    obj = copy.deepcopy(PUBLISHED[name])
    text = obj.get("text_config", obj)
    if dense is not None:
        most = text["first_k_dense_replace"]
        if not 0 <= dense <= most:
            raise InputError(f"--dense-layers {dense}: {name} has {most} at its start; allowed: 0 to {most}")
        text["first_k_dense_replace"] = dense
    if layers is not None:
        dense, most = text["first_k_dense_replace"], text["num_hidden_layers"]
        if not dense < layers <= most:
            raise InputError(
                f"--layers {layers}: {name} has {most}, of which {dense} dense; allowed: {dense + 1} to {most}"
            )
        text["num_hidden_layers"] = layers
    if experts is not None:
        most, groups, kept, chosen = (
            text[key] for key in ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")
        )
        least = -(-chosen // kept) * groups  # so many in each group that the kept ones have room
        if not least <= experts <= most or experts % groups:
            multiples = f", in multiples of {groups}" if groups > 1 else ""
            raise InputError(
                f"--experts {experts}: {name} has {most} in {groups} group{'s' * (groups > 1)}, {chosen} chosen for a "
                f"token from {kept}; allowed: {least} to {most}{multiples}"
            )
        text["n_routed_experts"] = experts
    if dtype != "published":
        text.pop("quantization_config", None)
    if dtype in ("int4", "fp8"):
        text["quantization_config"] = published_quantisation(dtype, nested="text_config" in obj)
    return obj


def write_published(
    folder: Path | str,
    obj: dict[str, Any],
    seed: int = 0,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write a model of this config (see cut) with the random weights of presets.new_weights as a Hugging Face folder.

    A few million values are in memory at a time. The folder appears complete or not at all, see folder.new_folder.
    Vision tensors and layers for multi-token prediction are not written. progress: elements done, and of all.
    InputError for a place that is taken, can't be written or is too small.
    """
    folder = Path(folder)
    check_place(folder, force)
    config = parse_config(obj, where=f"{folder}/config.json")
    plan = plan_tensors(config, lambda name: "F32" if name.endswith("e_score_correction_bias") else "BF16")
    needed = sum(math.prod(shape) * STORED_DTYPES[dtype].itemsize for dtype, shape in plan.values())
    free = shutil.disk_usage(folder.absolute().parent).free
    if needed > free:
        raise InputError(
            f"{folder}: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free; cut with --layers and --experts"
        )
    shapes = expected_tensors(config)
    with new_folder(folder, force) as temporary:
        write_synced(temporary / "config.json", (json.dumps(obj, indent=2, sort_keys=True) + "\n").encode())
        write_synced(temporary / "generation_config.json", generation_text(obj).encode())
        write_tensors(
            temporary,
            config,
            plan,
            lambda name, rows: weight_blocks(config, seed, name, shapes[name], rows),
            progress,
        )

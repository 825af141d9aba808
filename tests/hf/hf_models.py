"""Hugging Face transformers beside kdtr: the same folder opened by both, and transformers made float64 throughout.

Nothing here computes a model: transformers' code is run as installed, either as it stands or with the float32 that it
asks for replaced by float64. The folders are written by kdtr, so each side reads weights and config by its own code.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers import modeling_rope_utils as rope_utils
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from kdtr_cli.model.config import parse_config
from kdtr_cli.model.presets import new_weights

__all__ = ["CASES", "check_weights", "decode", "double", "float64_everywhere", "freeze_rotary", "load", "prefill"]
__all__ += ["rotary_tables", "write_folder"]

_YARN = {  # original context 32: the prompts of the tests are longer; pairs 0 to 5 of 8 lie in the ramp
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

_BASE_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 129,
    "eos_token_id": 130,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_lora_rank": 24,
    "max_position_embeddings": 2048,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "rope_scaling": _YARN,
    "rope_theta": 100.0,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 20,
    "vocab_size": 131,
}

_BASE_V2: dict[str, Any] = {
    **{key: value for key, value in _BASE_V3.items() if key != "rope_interleave"},
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "q_lora_rank": None,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "scoring_func": "softmax",
    "topk_method": "greedy",
}

#: What differs from the base, by name; a name that starts with v2 builds on _BASE_V2.
_DIFFERENCES: dict[str, dict[str, Any]] = {
    "v3": {},
    "v3-no-q-lora": {"q_lora_rank": None},
    "v3-no-yarn": {"rope_scaling": None, "rope_theta": 10000.0},
    "v3-no-q-lora-no-yarn": {"q_lora_rank": None, "rope_scaling": None},
    "v3-groups": {"n_group": 4, "topk_group": 2},
    "v3-groups-two-shared": {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "q_lora_rank": None},
    "v3-rope-halves": {"rope_interleave": False},
    "v3-rope-halves-no-q-lora": {"rope_interleave": False, "q_lora_rank": None, "rope_scaling": None},
    "v3-attention-bias": {"attention_bias": True},
    "v3-attention-bias-no-q-lora": {"attention_bias": True, "q_lora_rank": None, "rope_interleave": False},
    "v3-all-dense": {"first_k_dense_replace": 3},
    "v3-all-moe": {"first_k_dense_replace": 0, "n_shared_experts": 2},
    "v3-weights-not-normalised": {"norm_topk_prob": False, "routed_scaling_factor": 1.25},
    "v3-tied": {"tie_word_embeddings": True},
    "v3-eps-1e-5": {"rms_norm_eps": 1e-5},
    # cos and sin are multiplied by 1.1386/1.0693; the ramp's ends are not whole numbers
    "v3-amplitude": {"rope_scaling": {**_YARN, "mscale_all_dim": 0.5, "truncate": False}},
    # the amplitude is 0.1 ln 4 + 1 and the scale has no m²; betas by default
    "v3-no-mscale": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "v3-rope-parameters": {
        "rope_scaling": None,
        "rope_theta": None,
        "rope_parameters": {("rope_type" if k == "type" else k): v for k, v in _YARN.items()} | {"rope_theta": 100.0},
    },
    "v2-greedy": {"routed_scaling_factor": 1.7},
    "v2-greedy-norm-topk-prob": {"norm_topk_prob": True, "q_lora_rank": 40},
    "v2-groups": {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
        "q_lora_rank": 40,
    },
    "v2-no-yarn-attention-bias": {"rope_scaling": None, "attention_bias": True, "first_k_dense_replace": 0},
    "v2-all-dense-tied": {"first_k_dense_replace": 3, "tie_word_embeddings": True},
}


def _config(name: str) -> dict[str, Any]:
    merged = {**(_BASE_V2 if name.startswith("v2") else _BASE_V3), **_DIFFERENCES[name]}
    return {key: value for key, value in merged.items() if value is not None or key == "q_lora_rank"}


#: config.json by name: small models that differ from a base in one or a few mechanisms.
CASES: dict[str, dict[str, Any]] = {name: _config(name) for name in _DIFFERENCES}


def write_folder(folder: Path, obj: dict[str, Any], seed: int = 0) -> Path:
    """A Hugging Face folder of this config.json with kdtr's seeded random weights, one tensor per expert."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(obj))
    config = parse_config(obj)
    weights = new_weights(config, seed)
    if config.tie_word_embeddings:  # else the last token's own embedding outweighs all that the layers add
        name = "model.embed_tokens.weight"
        weights[name] = weights[name] * weights[name].dtype.type(2.0**-4)
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# --------------------------------------------------------------------------------------------------------- loading


def load(folder: Path, model_type: str | None = None) -> tuple[torch.nn.Module, dict[str, Any]]:
    """(model in float32, transformers' loading report). ``model_type`` overrides what the config says.

    transformers 5 finds the rule that stacks single experts by config.model_type, and has none for kimi_k2: without
    the override it leaves all routed experts random, which the report says and no exception does.
    """
    is_v2 = json.loads((folder / "config.json").read_text())["model_type"] == "deepseek_v2"
    config = (DeepseekV2Config if is_v2 else DeepseekV3Config).from_pretrained(folder)
    if model_type is not None:
        config.model_type = model_type
    model, report = (DeepseekV2ForCausalLM if is_v2 else DeepseekV3ForCausalLM).from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # the default, grouped_mm, refuses float64
        local_files_only=True,
        output_loading_info=True,
    )
    return model.eval(), report


def check_weights(model: torch.nn.Module, report: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> None:
    """AssertionError unless the model holds exactly kdtr's weights, bit for bit, and nothing else."""
    for kind, names in report.items():
        assert not names, f"{kind}: {sorted(map(str, names))[:3]}"
    held = {name: value.numpy() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        head = held.pop("lm_head.weight")
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert np.array_equal(head, weights["model.embed_tokens.weight"])
    for name in [name for name in held if ".experts." in name]:  # [E, 2I, H] with gate first, [E, H, I]
        stack, prefix = held.pop(name), name.rpartition(".")[0]
        for e, matrix in enumerate(stack):
            if name.endswith("gate_up_proj"):
                gate, up = np.split(matrix, 2)
                held |= {f"{prefix}.{e}.gate_proj.weight": gate, f"{prefix}.{e}.up_proj.weight": up}
            else:
                held[f"{prefix}.{e}.down_proj.weight"] = matrix
    assert sorted(held) == sorted(weights)
    for name, values in held.items():
        assert values.dtype == np.float32, name
        assert values.shape == weights[name].shape, name
        assert np.array_equal(values.view(np.uint32), weights[name].view(np.uint32)), name


# --------------------------------------------------------------------------------------------------------- precision


class _Torch64(ModuleType):
    """torch, but whoever asks it for float32 gets float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def float64_everywhere() -> Iterator[None]:
    """Within it, the float32 casts in transformers' DeepSeek code and rotary tables are float64 casts.

    Norms, softmax, router, rotary frequencies and angles keep transformers' formulas and their order; only the dtype
    that they name changes (and Tensor.float). A model must be made by ``double`` inside, so that its tables are too.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (v2, v3, rope_utils):
            patch.setattr(module, "torch", _Torch64("torch64"))
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def double(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model under ``.double()``, its rotary frequencies computed anew (in float32, or see above)."""
    out = copy.deepcopy(model).double()
    out.model.rotary_emb = type(out.model.rotary_emb)(out.config)
    return out


class _Frozen(torch.nn.Module):
    """Rotary tables looked up instead of computed."""

    def __init__(self, tables: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        rows = tuple(table[position_ids] for table in self.tables)
        return rows if len(rows) > 1 else rows[0]


def _rotary(model: torch.nn.Module, positions: int) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        out = model.model.rotary_emb(torch.zeros(1, dtype=model.dtype), torch.arange(positions)[None])
    return tuple(t[0] for t in (out if isinstance(out, tuple) else (out,)))


def freeze_rotary(model: torch.nn.Module, positions: int) -> torch.nn.Module:
    """A float64 model (see ``double``) that keeps the rotary tables which this float32 one computes."""
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    tables = tuple(t.to(wide[t.dtype]) for t in _rotary(model, positions))
    out = double(model)
    out.model.rotary_emb = _Frozen(tables)
    return out


def rotary_tables(model: torch.nn.Module, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) [positions, rope/2] as the model computes them: V3 gives both halves twice, V2 complex numbers."""
    tables = [t.numpy() for t in _rotary(model, positions)]
    if len(tables) == 1:
        return tables[0].real, tables[0].imag
    half = tables[0].shape[-1] // 2
    assert all(np.array_equal(t[:, :half], t[:, half:]) for t in tables)
    return tables[0][:, :half], tables[1][:, :half]


# ---------------------------------------------------------------------------------------------------------- running


def prefill(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """Logits [P, V] of one pass over the prompt without a cache."""
    with torch.no_grad():
        return model(torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0].numpy()


def decode(model: torch.nn.Module, ids: np.ndarray, steps: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [T], logits [T, V]) of transformers' greedy generate with its cache; T < steps after a stop id.

    The logits are caught at lm_head: those that generate returns are rounded to float32.
    """
    caught: list[np.ndarray] = []
    hook = model.lm_head.register_forward_hook(lambda module, args, out: caught.append(out[0, -1].numpy().copy()))
    try:
        with torch.no_grad():
            prompt = torch.tensor(ids[None].astype(np.int64))
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=steps,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
                **options,
            )
    finally:
        hook.remove()
    tokens = out[0, len(ids) :].numpy().astype(np.int32)
    assert len(caught) == len(tokens)
    return tokens, np.stack(caught)

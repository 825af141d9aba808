"""A model's shape and conventions, read from a Hugging Face config.json of the DeepSeek-V2/V3 and Kimi-K2 families.

Accepted model types: deepseek_v2, deepseek_v3, kimi_k2, and kimi_k25 (K2.5, K2.6: the language model stands under
``text_config`` and its tensors under ``language_model.``). Nothing that could change a result is guessed: sizes must be
given, every value is checked, and a key that is neither used here nor in the list of keys known not to matter is an
error. Where a switch may be left out, the default is that of DeepSeek's own configuration classes.

Sources: configuration_deepseek.py of the published checkpoints; transformers 5.24 configuration_deepseek_v2/v3.py,
modeling_deepseek_v2/v3.py (yarn_apply_mscale).
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kdtr_cli.errors import InputError
from kdtr_cli.model.fields import Fields, read_json, shown
from kdtr_cli.model.quantisation import Quantisation, parse_quantisation
from kdtr_cli.model.yarn import RopeScaling, get_mscale, parse_rope

__all__ = ["ModelConfig", "Quantisation", "RopeScaling", "get_mscale", "load_config", "parse_config"]

V3_TYPES = ("deepseek_v3", "kimi_k2")
NESTED_TYPE = "kimi_k25"
MODEL_TYPES = ("deepseek_v2", *V3_TYPES, NESTED_TYPE)

# Keys that cannot change a logit of this architecture at inference: bookkeeping, initialisation, training losses,
# generation defaults (kdtr takes its own from the command line) and what old PretrainedConfig classes wrote out.
_IRRELEVANT = """
    architectures auto_map model_type transformers_version _name_or_path name_or_path _commit_hash use_cache
    initializer_range attention_dropout aux_loss_alpha seq_aux router_aux_loss_coef output_router_logits
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate torchscript use_bfloat16
    id2label label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix tf_legacy_loss
    num_nextn_predict_layers num_mtp_layers pad_token_id sep_token_id decoder_start_token_id ignore_index
    remove_invalid_values _attn_implementation _attn_implementation_autoset _experts_implementation max_length
    min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens is_decoder
"""
# The vision half of a kimi_k25 checkpoint: kdtr runs the language model on token ids.
_VISION = """
    vision_config media_placeholder_token_id image_token_id video_token_id vision_start_token_id vision_end_token_id
    video_placeholder use_unified_vision_chunk projection_hidden_size projection_layer_norm_eps
"""
# Keys that would change the network; kdtr has the network of this value only.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "ep_size": (1,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({},),
    "per_layer_config": ({},),
    "sliding_window": (),
    "partial_rotary_factor": (1, 1.0),
}
# Ten times what exists: a damaged file must not make kdtr list a billion tensor names.
MAX_LAYERS, MAX_EXPERTS, MAX_ALL_EXPERTS = 1000, 10_000, 300_000
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides the function which a checkpoint computes. Widths are in elements.

    ``n_routed_experts`` is 0 when no layer is a mixture of experts; then the other expert fields are 0, the groups 1.
    For topk_method 'greedy' groups play no part, and n_group = topk_group = 1 whatever the file says.
    ``norm_topk_prob`` is kept as given, but the V2 router ignores it (numerics.md rule 13; see ``is_v2``).
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    moe_layer_freq: int
    scoring_func: str
    topk_method: str
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rope_interleave: bool
    attention_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    torch_dtype: str
    tensor_prefix: str
    is_v2: bool
    quantisation: Quantisation | None = None

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer (from 0) has routed experts; the others have one dense MLP of intermediate_size."""
        past_dense = layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
        return self.n_routed_experts > 0 and past_dense

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of one cached row: kv_lora_rank + rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def router(self) -> dict[str, Any]:
        """The router's settings by the names that the NumPy model and the kernel share (numerics.md rule 13)."""
        return {
            "slots": self.num_experts_per_tok,
            "groups": self.n_group,
            "kept_groups": self.topk_group,
            "softmax": self.scoring_func == "softmax",
            "best_two": self.topk_method == "noaux_tc",
            "normalise": self.norm_topk_prob and not self.is_v2,
            "factor": self.routed_scaling_factor,
        }

    def softmax_scale(self) -> float:
        """qk_head_dim^-1/2 · m², m = get_mscale(factor, mscale_all_dim) with YaRN and mscale_all_dim ≠ 0, else m = 1.

        V2 and V3 alike (transformers 5.24, yarn_apply_mscale). float64; the contract rounds it to float32.
        """
        scale = 1.0 / math.sqrt(self.qk_head_dim)
        yarn = self.rope_scaling
        if yarn is not None and yarn.mscale_all_dim:
            m = get_mscale(yarn.factor, yarn.mscale_all_dim)
            scale = scale * m * m
        return scale


def load_config(folder: Path | str) -> tuple[ModelConfig, str]:
    """Read folder/config.json; returns the config and the file's text.

    The stop ids are those of generation_config.json where it has an eos_token_id (it wins, as in transformers'
    generate), else those of config.json. InputError names the file and the field.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise InputError(
            f"{folder}: no such folder; a model is a Hugging Face folder with config.json and *.safetensors"
        )
    if not os.path.lexists(path):
        raise InputError(
            f"{folder}: no config.json; a model is a Hugging Face folder with config.json and *.safetensors"
        )
    obj, text = read_json(path)
    stops = None
    generation = folder / "generation_config.json"
    if os.path.lexists(generation):
        stops = Fields(read_json(generation)[0], generation).token_ids("eos_token_id")
    return parse_config(obj, where=path, eos_token_ids=stops), text


def parse_config(
    obj: dict[str, Any], where: object = "config.json", eos_token_ids: tuple[int, ...] | None = None
) -> ModelConfig:
    """A ModelConfig from a parsed config.json. ``eos_token_ids``, when given, stand in place of the config's own.

    InputError names the field, its value and what is allowed; ``where`` heads the message.
    """
    if not isinstance(obj, dict):
        raise InputError(f"{where}: holds {shown(obj)} where a JSON object is expected")
    f = Fields(obj, where)
    f.asked.update(_IRRELEVANT.split())
    if "model_type" not in obj and "text_config" not in obj:
        raise InputError(f"{where}: model_type is missing; needed: {' or '.join(MODEL_TYPES)}")
    if f.choice("model_type", MODEL_TYPES, NESTED_TYPE) == NESTED_TYPE:
        return _parse_nested(f, eos_token_ids)
    config = _parse_text(f, "", eos_token_ids)
    f.refuse_unknown()
    return config


def _parse_nested(outer: Fields, stops: tuple[int, ...] | None) -> ModelConfig:
    """The Kimi-K2.5 layout: text_config inside, a few keys repeated outside, which must agree."""
    outer.asked.update(_VISION.split())
    text = outer.table("text_config")
    if text is None:
        raise outer.fail("text_config", "the language model's config as a JSON object")
    inner = Fields(text, outer.where, "text_config.")
    inner.asked.update(_IRRELEVANT.split())
    inner.choice("model_type", V3_TYPES)
    merged = dict(text)
    repeated = ["tie_word_embeddings", "bos_token_id", "torch_dtype", "dtype", "vocab_size"]
    if stops is None:
        repeated.append("eos_token_id")
    else:
        outer.asked.add("eos_token_id")
    for name in repeated:
        if not outer.has(name):
            continue
        if inner.has(name) and inner.obj[name] != outer.obj[name]:
            outside, inside = shown(outer.obj[name]), shown(inner.obj[name])
            raise InputError(f"{outer.where}: {name} is {outside} but text_config.{name} is {inside}; they must agree")
        merged[name] = outer.obj[name]
    inner.obj = merged
    config = _parse_text(inner, "language_model.", stops)
    inner.refuse_unknown()
    outside = parse_quantisation(outer)
    if outside and config.quantisation and outside != config.quantisation:
        name = "quantization_config"
        raise InputError(f"{outer.where}: {name} and text_config.{name} contradict each other; keep one")
    config = replace(config, quantisation=config.quantisation or outside)
    for name in ("is_encoder_decoder", "chunk_size_feed_forward"):
        outer.only(name, *FIXED[name])
    outer.refuse_unknown()
    return config


def _parse_text(f: Fields, tensor_prefix: str, stops: tuple[int, ...] | None) -> ModelConfig:
    is_v2 = f.raw("model_type") == "deepseek_v2"
    for name, values in FIXED.items():
        f.only(name, *values)
    heads = f.integer("num_attention_heads")
    f.only("num_key_value_heads", heads)
    layers = f.integer("num_hidden_layers", high=MAX_LAYERS)
    nope, rope = f.integer("qk_nope_head_dim"), f.integer("qk_rope_head_dim", low=2)
    if rope % 2:
        raise f.fail("qk_rope_head_dim", "an even number (rotary pairs)")
    f.only("qk_head_dim", nope + rope)
    f.only("head_dim", rope, nope + rope)  # transformers writes the rotary width under this name
    if "q_lora_rank" not in f.obj:
        raise InputError(f"{f.where}: {f.prefix}q_lora_rank is missing; needed: an integer, or null for a plain q_proj")
    vocabulary = f.integer("vocab_size", low=2)
    bos = f.integer("bos_token_id", low=0, default=None)
    if stops is None:
        stops = f.token_ids("eos_token_id") or ()
    f.asked.add("eos_token_id")
    for token in stops:
        if token >= vocabulary:
            raise InputError(f"{f.where}: eos_token_id {token} is outside the vocabulary of {vocabulary}")
    theta, scaling = parse_rope(f, rope)
    if is_v2:
        f.only("rope_interleave", True)
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=f.integer("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        q_lora_rank=f.integer("q_lora_rank", default=None),
        kv_lora_rank=f.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=f.integer("v_head_dim"),
        intermediate_size=f.integer("intermediate_size"),
        **_parse_experts(f, layers, is_v2),
        rms_norm_eps=f.number("rms_norm_eps", above=0),
        max_position_embeddings=f.integer("max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        rope_interleave=True if is_v2 else f.boolean("rope_interleave", True),
        attention_bias=f.boolean("attention_bias", False),
        tie_word_embeddings=f.boolean("tie_word_embeddings", False),
        eos_token_ids=stops,
        bos_token_id=bos,
        torch_dtype=_parse_dtype(f),
        tensor_prefix=tensor_prefix,
        is_v2=is_v2,
        quantisation=parse_quantisation(f),
    )


def _parse_experts(f: Fields, layers: int, is_v2: bool) -> dict[str, Any]:
    """The mixture's fields. The router's kind belongs to the model type: softmax for V2, sigmoid + noaux_tc for V3."""
    methods = ("greedy", "group_limited_greedy") if is_v2 else ("noaux_tc",)
    kind = {
        "scoring_func": f.choice(
            "scoring_func", ("softmax",) if is_v2 else ("sigmoid",), "softmax" if is_v2 else "sigmoid"
        ),
        "topk_method": f.choice("topk_method", methods, methods[0]),
    }
    experts = f.integer("n_routed_experts", low=0, default=0, high=MAX_EXPERTS)
    for alias in ("num_experts", "num_local_experts"):
        f.only(alias, experts)
    dense_first = f.integer("first_k_dense_replace", low=0, default=None)
    freq = f.integer("moe_layer_freq", default=1)
    width = f.integer("moe_intermediate_size", default=None)
    shared = f.integer("n_shared_experts", low=0, default=None)
    chosen = f.integer("num_experts_per_tok", low=0, default=None)
    groups, kept = f.integer("n_group", low=0, default=None), f.integer("topk_group", low=0, default=None)
    normed, factor = f.boolean("norm_topk_prob", None), f.number("routed_scaling_factor", None, above=0)
    if experts and dense_first is None:
        f.integer("first_k_dense_replace", low=0)
    if not experts or not any(i >= dense_first and i % freq == 0 for i in range(layers)):
        return {
            **kind,
            "moe_intermediate_size": 0, "n_routed_experts": 0, "n_shared_experts": 0, "num_experts_per_tok": 0,
            "first_k_dense_replace": layers, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
            "norm_topk_prob": bool(normed), "routed_scaling_factor": 1.0 if factor is None else factor,
        }  # fmt: skip
    if experts * layers > MAX_ALL_EXPERTS:
        raise f.fail("n_routed_experts", f"at most {MAX_ALL_EXPERTS} in all {layers} layers together")
    needed = ["moe_intermediate_size", "num_experts_per_tok"]
    if "n_shared_experts" not in f.obj:
        raise InputError(f"{f.where}: {f.prefix}n_shared_experts is missing; needed: an integer, or null for none")
    if not is_v2:
        f.boolean("norm_topk_prob")
        f.number("routed_scaling_factor")
    if kind["topk_method"] == "greedy":
        groups = kept = 1
    else:
        needed += ["n_group", "topk_group"]
    for name in needed:  # now they must be there, and positive
        f.integer(name)
    _check_groups(f, experts, groups, kept, chosen, need_two=not is_v2)
    return {
        **kind,
        "moe_intermediate_size": width,
        "n_routed_experts": experts,
        "n_shared_experts": shared or 0,
        "num_experts_per_tok": chosen,
        "first_k_dense_replace": dense_first,
        "moe_layer_freq": freq,
        "n_group": groups,
        "topk_group": kept,
        "norm_topk_prob": bool(normed),
        "routed_scaling_factor": 1.0 if factor is None else factor,
    }


def _check_groups(f: Fields, experts: int, groups: int, kept: int, chosen: int, need_two: bool) -> None:
    if experts % groups:
        raise f.fail("n_group", f"a divisor of n_routed_experts ({experts})")
    if kept > groups:
        raise f.fail("topk_group", f"at most n_group ({groups})")
    size = experts // groups
    if need_two and groups > 1 and size < 2:
        raise f.fail(
            "n_group", f"at most {experts // 2}: a group's score is the sum of its two best of {experts} experts"
        )
    if chosen > kept * size:
        raise f.fail("num_experts_per_tok", f"at most {kept * size}, the experts in the {kept} groups kept")


def _parse_dtype(f: Fields) -> str:
    old, new = f.choice("torch_dtype", DTYPES, None), f.choice("dtype", DTYPES, None)
    if old and new and old != new:
        raise InputError(f"{f.where}: {f.prefix}torch_dtype is {shown(old)} but dtype is {shown(new)}; they must agree")
    return new or old or "float32"

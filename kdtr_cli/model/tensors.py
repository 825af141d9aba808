"""Which tensors a model has, and which ones a checkpoint stores them in: Hugging Face names, shapes and dtypes.

One tensor per expert and projection; a projection is [out, in]. Names: modeling_deepseek_v2/v3.py of transformers and
of the published checkpoints; of quantised weights, compressed-tensors' PackedQuantizationCompressor and DeepSeek-V3's
README_WEIGHTS.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.quant import part_names
from kdtr_cli.model.quantisation import Quantisation

__all__ = ["StoredTensor", "each_stored", "expected_tensors", "stored_tensors"]

_FLOATS = ("F32", "F16", "BF16")
# compressed-tensors itself writes the shape as I64, the published checkpoints have I32
_INT4_DTYPES = (("I32",), ("BF16", "F16", "F32"), ("I32", "I64"))
_FP8_DTYPES = (("F8_E4M3",), ("F32", "BF16"))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its shape, and the dtypes (safetensors' names) that it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


def stored_tensors(config: ModelConfig) -> dict[str, dict[str, StoredTensor]]:
    """Weight name → the stored tensors that make it: itself, or the parts of a quantised one, the values first."""
    return dict(each_stored(config))


def each_stored(config: ModelConfig) -> Iterator[tuple[str, dict[str, StoredTensor]]]:
    """The items of stored_tensors, one after another: nobody has to hold those of a config that asks for too many."""
    how = config.quantisation
    for name, shape in _each_tensor(config):
        if how is None or not how.covers(name, config.tensor_prefix):
            yield name, {name: StoredTensor(shape, _FLOATS)}
        else:
            dtypes = _INT4_DTYPES if how.method == "int4" else _FP8_DTYPES
            parts = zip(part_names(how.method, name), _part_shapes(how, *shape), dtypes, strict=True)
            yield name, {part: StoredTensor(size, allowed) for part, size, allowed in parts}


def _part_shapes(how: Quantisation, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    if how.method == "int4":
        return (rows, -(-columns // 8)), (rows, -(-columns // how.group_size)), (2,)
    return (rows, columns), (-(-rows // how.block[0]), -(-columns // how.block[1]))


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """name → shape of every weight, in the order of the forward pass. With tied embeddings there is no lm_head.weight.

    attention_bias gives biases to q_a_proj, kv_a_proj_with_mqa and o_proj only; q_b_proj, kv_b_proj and (without
    q_lora) q_proj never have one, as in transformers and DeepSeek's own code.
    """
    return dict(_each_tensor(config))


def _each_tensor(c: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
    for i in range(c.num_hidden_layers):
        layer = f"model.layers.{i}."
        yield f"{layer}input_layernorm.weight", (c.hidden_size,)
        for name, shape in _attention(c).items():
            yield f"{layer}self_attn.{name}", shape
        yield f"{layer}post_attention_layernorm.weight", (c.hidden_size,)
        mlp = _experts(c) if c.is_moe_layer(i) else _mlp("", c.hidden_size, c.intermediate_size)
        for name, shape in mlp.items():
            yield f"{layer}mlp.{name}", shape
    yield "model.norm.weight", (c.hidden_size,)
    if not c.tie_word_embeddings:
        yield "lm_head.weight", (c.vocab_size, c.hidden_size)


def _attention(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    heads, hidden = c.num_attention_heads, c.hidden_size
    out: dict[str, tuple[int, ...]] = {}
    if c.q_lora_rank is None:
        out["q_proj.weight"] = (heads * c.qk_head_dim, hidden)
    else:
        out["q_a_proj.weight"] = (c.q_lora_rank, hidden)
        if c.attention_bias:
            out["q_a_proj.bias"] = (c.q_lora_rank,)
        out["q_a_layernorm.weight"] = (c.q_lora_rank,)
        out["q_b_proj.weight"] = (heads * c.qk_head_dim, c.q_lora_rank)
    out["kv_a_proj_with_mqa.weight"] = (c.latent_dim, hidden)
    if c.attention_bias:
        out["kv_a_proj_with_mqa.bias"] = (c.latent_dim,)
    out["kv_a_layernorm.weight"] = (c.kv_lora_rank,)
    out["kv_b_proj.weight"] = (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    out["o_proj.weight"] = (hidden, heads * c.v_head_dim)
    if c.attention_bias:
        out["o_proj.bias"] = (hidden,)
    return out


def _mlp(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


def _experts(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {"gate.weight": (c.n_routed_experts, c.hidden_size)}
    if c.topk_method == "noaux_tc":
        out["gate.e_score_correction_bias"] = (c.n_routed_experts,)
    for e in range(c.n_routed_experts):
        out |= _mlp(f"experts.{e}.", c.hidden_size, c.moe_intermediate_size)
    if c.n_shared_experts:
        out |= _mlp("shared_experts.", c.hidden_size, c.n_shared_experts * c.moe_intermediate_size)
    return out

"""What `kdtr model show` tells: a model's sizes, parameters, bytes, router, rope and scale, as plain values."""

import math
import re
from typing import Any

from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.source import Model
from kdtr_cli.model.tensors import expected_tensors

__all__ = ["count_parameters", "summary"]

_ROUTED = re.compile(r"\.mlp\.experts\.\d+\.")


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """(total, active): all weights, and those that one token's step reads.

    Of the routed experts only num_experts_per_tok count as active, of the embedding one row (with tied embeddings the
    whole matrix, which is then the head too).
    """
    total = routed = 0
    for name, shape in expected_tensors(config).items():
        n = math.prod(shape)
        total += n
        routed += n if _ROUTED.search(name) else 0
    active = total - routed
    if config.n_routed_experts:
        active += routed * config.num_experts_per_tok // config.n_routed_experts
    if not config.tie_word_embeddings:
        active -= (config.vocab_size - 1) * config.hidden_size
    return total, active


def summary(model: Model) -> dict[str, Any]:
    """JSON-able description (schema kdtr.model/1). Bytes are those of the tensors as stored.

    Reads headers only for a folder. ``tensors`` counts stored tensors by dtype, one per expert also where they are
    fused, and each part of a quantised weight.
    """
    c = model.config
    total, active = count_parameters(c)
    dtypes: dict[str, int] = {}
    stored_bytes = 0
    for name in model.weights.stored_names:
        dtype = model.weights.stored_dtype(name)
        dtypes[dtype] = dtypes.get(dtype, 0) + 1
        stored_bytes += model.weights.stored_nbytes(name)
    moe_layers = sum(c.is_moe_layer(i) for i in range(c.num_hidden_layers))
    router = None
    if moe_layers:
        router = {
            "experts": c.n_routed_experts,
            "experts_per_token": c.num_experts_per_tok,
            "shared_experts": c.n_shared_experts,
            "scoring": c.scoring_func,
            "method": c.topk_method,
            "groups": c.n_group,
            "groups_kept": c.topk_group,
            "normalised": c.norm_topk_prob and not c.is_v2,
            "scaling_factor": c.routed_scaling_factor,
        }
    yarn = c.rope_scaling
    return {
        "schema": "kdtr.model/1",
        "name": model.name,
        "parameters": {"total": total, "active": active},
        "tensors": {
            "count": len(model.weights.stored_names),
            "bytes": stored_bytes,
            "dtypes": dict(sorted(dtypes.items())),
        },
        "quantisation": None if c.quantisation is None else c.quantisation.described(),
        "layers": {"dense": c.num_hidden_layers - moe_layers, "moe": moe_layers},
        "sizes": {
            "vocabulary": c.vocab_size,
            "hidden": c.hidden_size,
            "heads": c.num_attention_heads,
            "q_lora": c.q_lora_rank,
            "kv_lora": c.kv_lora_rank,
            "qk_nope_head": c.qk_nope_head_dim,
            "qk_rope_head": c.qk_rope_head_dim,
            "v_head": c.v_head_dim,
            "intermediate": c.intermediate_size,
            "moe_intermediate": c.moe_intermediate_size if moe_layers else None,
            "positions": c.max_position_embeddings,
        },
        "router": router,
        "rope": {
            "theta": c.rope_theta,
            "interleaved": c.rope_interleave,
            "yarn_factor": None if yarn is None else yarn.factor,
            "yarn_original_positions": None if yarn is None else yarn.original_max_position_embeddings,
            "amplitude": 1.0 if yarn is None else yarn.amplitude(),
        },
        "attention": {
            "softmax_scale": c.softmax_scale(),
            "bias": c.attention_bias,
            "cache_float32_bytes_per_token": 4 * c.latent_dim * c.num_hidden_layers,
        },
        "rms_norm_eps": c.rms_norm_eps,
        "tied_embeddings": c.tie_word_embeddings,
        "stop_ids": list(c.eos_token_ids),
        "notes": [] if model.checkpoint is None else model.checkpoint.notes,
    }

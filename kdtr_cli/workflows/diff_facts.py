"""What a diagnosis may know of a bundle's model: numbers of its config, and how fast its rotary pairs turn."""

import json
import math

import numpy as np

from kdtr_cli.bundle.reader import Bundle
from kdtr_cli.errors import InputError
from kdtr_cli.model.config import ModelConfig, parse_config
from kdtr_cli.model.rope import inv_freq
from kdtr_cli.model.yarn import get_mscale
from kdtr_cli.parity.evidence import ModelFacts

__all__ = ["facts_of", "model_facts"]


def model_facts(bundle: Bundle) -> ModelFacts | None:
    """None where the config is not one that kdtr knows: a diagnosis says less then."""
    try:
        return facts_of(parse_config(json.loads(bundle.config_text), where=f"{bundle.path} /model/config"))
    except (InputError, ValueError, ArithmeticError):
        return None


def facts_of(config: ModelConfig) -> ModelFacts:
    """The facts of a config."""
    return ModelFacts(_constants(config), np.asarray(inv_freq(config), np.float64))


def _constants(c: ModelConfig) -> dict[str, float]:
    """The numbers that a factor gone wrong is likely to be, the likeliest first."""
    found = {"routed_scaling_factor": c.routed_scaling_factor if c.n_routed_experts else None}
    if c.rope_scaling is not None:
        found |= {
            "YaRN's mscale": get_mscale(c.rope_scaling.factor, c.rope_scaling.mscale_all_dim or 1.0),
            "YaRN's amplitude of cos and sin": c.rope_scaling.amplitude(),
            "YaRN's factor": c.rope_scaling.factor,
        }
    found |= {name: getattr(c, name) for name in ("qk_head_dim", "hidden_size", "kv_lora_rank", "q_lora_rank")}
    found |= {"num_experts_per_tok": c.num_experts_per_tok, "n_shared_experts": c.n_shared_experts}
    return {name: float(value) for name, value in found.items() if value and not math.isclose(value, 1.0)}

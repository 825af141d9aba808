"""A model's weights on a device, in the layouts that the kernels read.

Matrices that see the same input lie one under the other (q_a over kv_a, gate over up), so that one launch serves both:
an output's bits depend on its own row alone. W_UK is transposed, so that absorbing is a product over the nope width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kdtr_cli.engine.devices import Device, DeviceArray
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.weights import Weights

__all__ = ["DeviceWeights", "LayerWeights", "place_weights", "upload_weights"]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer, float32. H hidden, R kv_lora, D = R + rope, Q q_lora, heads h, I expert and F dense width."""

    input_norm: DeviceArray  #: [H]
    qkv_a: DeviceArray  #: [Q + D, H]: q_a over kv_a; without q_lora [h * (nope + rope) + D, H]: q over kv_a
    qkv_a_bias: DeviceArray | None  #: [Q + D]
    q_norm: DeviceArray | None  #: [Q]
    q_b: DeviceArray | None  #: [h * (nope + rope), Q]
    kv_norm: DeviceArray  #: [R]
    w_uk: DeviceArray  #: [h, R, nope], each head transposed
    w_uv: DeviceArray  #: [h, v, R]
    o: DeviceArray  #: [H, h * v]
    o_bias: DeviceArray | None  #: [H]
    post_norm: DeviceArray  #: [H]
    gate_up: DeviceArray | None  #: [2 F, H] of a dense layer, [2 S, H] of the shared experts
    down: DeviceArray | None  #: [H, F] or [H, S]
    router: DeviceArray | None  #: [E, H]
    router_bias: DeviceArray | None  #: [E]
    experts_gate_up: DeviceArray | None  #: [E, 2 I, H]
    experts_down: DeviceArray | None  #: [E, H, I]


@dataclass(frozen=True)
class DeviceWeights:
    """A whole model."""

    embed: DeviceArray  #: [V, H]
    layers: tuple[LayerWeights, ...]
    norm: DeviceArray  #: [H]
    lm_head: DeviceArray  #: [V, H]


#: Makes one device array: (name, shape, parts) where the parts, stacked in order, are what it holds.
Place = Callable[[str, tuple[int, ...], list[Callable[[], np.ndarray]]], DeviceArray]


def upload_weights(device: Device, config: ModelConfig, weights: Weights) -> DeviceWeights:
    """Upload a model, one tensor of the checkpoint in host memory at a time."""

    def place(name: str, shape: tuple[int, ...], parts: list[Callable[[], np.ndarray]]) -> DeviceArray:
        array = device.alloc(name, shape, np.float32)
        first = 0
        for part in parts:
            values = np.ascontiguousarray(part(), np.float32)
            device.write(array.view(first, values.shape), values)
            first += values.size
        if first != array.size:
            raise ValueError(f"{name}: {first} elements for {array.size}")
        return array

    return place_weights(config, weights, place)


def place_weights(config: ModelConfig, weights: Weights, place: Place) -> DeviceWeights:
    """Build a model's arrays with ``place``; the shapes and what each array holds stand here alone."""
    c = config

    def one(name: str, shape: tuple[int, ...], *tensors: str) -> DeviceArray:
        return place(name, shape, [lambda t=t: weights[t] for t in tensors])

    def layer(i: int) -> LayerWeights:
        p = f"model.layers.{i}."
        a, m = f"{p}self_attn.", f"{p}mlp."
        heads, nope, latent = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank
        first = "q_a_proj" if c.q_lora_rank else "q_proj"
        q_width = c.q_lora_rank or heads * c.qk_head_dim
        kv_b = f"{a}kv_b_proj.weight"

        def by_head() -> np.ndarray:
            return weights[kv_b].reshape(heads, nope + c.v_head_dim, latent)

        bias = None
        if c.attention_bias:
            q_bias = (
                (lambda: weights[f"{a}q_a_proj.bias"]) if c.q_lora_rank else (lambda: np.zeros(q_width, np.float32))
            )
            kv_bias = f"{a}kv_a_proj_with_mqa.bias"
            bias = place(f"{a}qkv_a_bias", (q_width + c.latent_dim,), [q_bias, lambda: weights[kv_bias]])
        moe = c.is_moe_layer(i)
        width = c.n_shared_experts * c.moe_intermediate_size if moe else c.intermediate_size
        mlp = f"{m}shared_experts." if moe else m
        experts = c.n_routed_experts
        each = c.moe_intermediate_size
        correction = f"{m}gate.e_score_correction_bias"
        return LayerWeights(
            input_norm=one(f"{p}input_layernorm", (c.hidden_size,), f"{p}input_layernorm.weight"),
            qkv_a=one(
                f"{a}qkv_a",
                (q_width + c.latent_dim, c.hidden_size),
                f"{a}{first}.weight",
                f"{a}kv_a_proj_with_mqa.weight",
            ),
            qkv_a_bias=bias,
            q_norm=one(f"{a}q_norm", (q_width,), f"{a}q_a_layernorm.weight") if c.q_lora_rank else None,
            q_b=one(f"{a}q_b", (heads * c.qk_head_dim, q_width), f"{a}q_b_proj.weight") if c.q_lora_rank else None,
            kv_norm=one(f"{a}kv_norm", (latent,), f"{a}kv_a_layernorm.weight"),
            w_uk=place(f"{a}w_uk", (heads, latent, nope), [lambda: by_head()[:, :nope].transpose(0, 2, 1)]),
            w_uv=place(f"{a}w_uv", (heads, c.v_head_dim, latent), [lambda: by_head()[:, nope:]]),
            o=one(f"{a}o", (c.hidden_size, heads * c.v_head_dim), f"{a}o_proj.weight"),
            o_bias=one(f"{a}o_bias", (c.hidden_size,), f"{a}o_proj.bias") if c.attention_bias else None,
            post_norm=one(f"{p}post_norm", (c.hidden_size,), f"{p}post_attention_layernorm.weight"),
            gate_up=one(f"{mlp}gate_up", (2 * width, c.hidden_size), f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight")
            if width
            else None,
            down=one(f"{mlp}down", (c.hidden_size, width), f"{mlp}down_proj.weight") if width else None,
            router=one(f"{m}router", (experts, c.hidden_size), f"{m}gate.weight") if moe else None,
            router_bias=one(f"{m}router_bias", (experts,), correction) if moe and correction in weights else None,
            experts_gate_up=one(
                f"{m}experts.gate_up",
                (experts, 2 * each, c.hidden_size),
                *(f"{m}experts.{e}.{x}_proj.weight" for e in range(experts) for x in ("gate", "up")),
            )
            if moe
            else None,
            experts_down=one(
                f"{m}experts.down",
                (experts, c.hidden_size, each),
                *(f"{m}experts.{e}.down_proj.weight" for e in range(experts)),
            )
            if moe
            else None,
        )

    return DeviceWeights(
        embed=one("embed", (c.vocab_size, c.hidden_size), "model.embed_tokens.weight"),
        layers=tuple(layer(i) for i in range(c.num_hidden_layers)),
        norm=one("norm", (c.hidden_size,), "model.norm.weight"),
        lm_head=one("lm_head", (c.vocab_size, c.hidden_size), "lm_head.weight"),
    )

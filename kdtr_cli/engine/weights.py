"""A model's weights on a device, in the layouts that the kernels read.

Matrices that see the same input lie one under the other (q_a over kv_a, gate over up), so that one launch serves both:
an output's bits depend on its own row alone. W_UK is transposed, so that absorbing is a product over the nope width.
Matrices are in the form in which the checkpoint stores them (engine/matrices.py); norms and biases are float32.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from kdtr_cli.engine.devices import Device, DeviceArray
from kdtr_cli.engine.matrices import Matrix, upload_matrix
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.weights import Weights

__all__ = ["DeviceWeights", "LayerWeights", "Placing", "place_weights", "upload_vector", "upload_weights"]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. H hidden, R kv_lora, D = R + rope, Q q_lora, heads h, I expert and F dense width."""

    input_norm: DeviceArray  #: [H]
    qkv_a: Matrix  #: [Q + D, H]: q_a over kv_a; without q_lora [h * (nope + rope) + D, H]: q over kv_a
    qkv_a_bias: DeviceArray | None  #: [Q + D]
    q_norm: DeviceArray | None  #: [Q]
    q_b: Matrix | None  #: [h * (nope + rope), Q]
    kv_norm: DeviceArray  #: [R]
    w_uk: Matrix  #: [h, R, nope], each head transposed
    w_uv: Matrix  #: [h, v, R]
    o: Matrix  #: [H, h * v]
    o_bias: DeviceArray | None  #: [H]
    post_norm: DeviceArray  #: [H]
    gate_up: Matrix | None  #: [2 F, H] of a dense layer, [2 S, H] of the shared experts
    down: Matrix | None  #: [H, F] or [H, S]
    router: Matrix | None  #: [E, H]
    router_bias: DeviceArray | None  #: [E]
    experts_gate_up: Matrix | None  #: [E, 2 I, H]
    experts_down: Matrix | None  #: [E, H, I]


@dataclass(frozen=True)
class DeviceWeights:
    """A whole model."""

    embed: Matrix  #: [V, H]
    layers: tuple[LayerWeights, ...]
    norm: DeviceArray  #: [H]
    lm_head: Matrix  #: [V, H]

    def matrices(self) -> list[Matrix]:
        """Every matrix but those of the routed experts and the embedding."""
        found = [getattr(layer, f.name) for layer in self.layers for f in fields(layer) if "experts" not in f.name]
        return [m for m in (*found, self.lm_head) if isinstance(m, Matrix)]

    def experts(self) -> list[Matrix]:
        """The matrices of the routed experts."""
        found = [m for layer in self.layers for m in (layer.experts_gate_up, layer.experts_down)]
        return [m for m in found if m is not None]


class Placing(Protocol):
    """Makes the device arrays of a model."""

    def vector(self, name: str, size: int, values: Callable[[], np.ndarray]) -> DeviceArray:
        """float32 [size]: what ``values`` gives."""

    def matrix(
        self,
        name: str,
        shape: tuple[int, ...],
        *tensors: str,
        cut: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Matrix:
        """[n, k] or [count, n, k]: these tensors of the checkpoint one after the other, each as ``cut`` cuts it."""


def upload_vector(device: Device, name: str, size: int, values: np.ndarray) -> DeviceArray:
    """float32 [size] on the device."""
    array = device.upload(name, np.ascontiguousarray(values, np.float32))
    if array.shape != (size,):
        raise ValueError(f"{name}: {array.shape} for [{size}]")
    return array


@dataclass(frozen=True)
class _Upload:
    """Placing of a checkpoint's weights."""

    device: Device
    weights: Weights

    def vector(self, name: str, size: int, values: Callable[[], np.ndarray]) -> DeviceArray:
        return upload_vector(self.device, name, size, values())

    def matrix(
        self,
        name: str,
        shape: tuple[int, ...],
        *tensors: str,
        cut: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Matrix:
        return upload_matrix(self.device, name, shape, self.weights, tensors, cut)


def upload_weights(device: Device, config: ModelConfig, weights: Weights) -> DeviceWeights:
    """Upload a model, one tensor of the checkpoint in host memory at a time."""
    return place_weights(config, weights, _Upload(device, weights))


def place_weights(config: ModelConfig, weights: Weights, placing: Placing) -> DeviceWeights:
    """Build a model's arrays with ``placing``; the shapes and what each array holds stand here alone."""
    c = config

    def vector(name: str, size: int, *tensors: str) -> DeviceArray:
        return placing.vector(name, size, lambda: np.concatenate([weights[t] for t in tensors]))

    matrix = placing.matrix

    def layer(i: int) -> LayerWeights:
        p = f"model.layers.{i}."
        a, m = f"{p}self_attn.", f"{p}mlp."
        heads, nope, latent = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank
        first = "q_a_proj" if c.q_lora_rank else "q_proj"
        q_width = c.q_lora_rank or heads * c.qk_head_dim
        kv_b = f"{a}kv_b_proj.weight"

        def by_head(values: np.ndarray) -> np.ndarray:
            return values.reshape(heads, nope + c.v_head_dim, latent)

        def biases() -> np.ndarray:
            first = weights[f"{a}q_a_proj.bias"] if c.q_lora_rank else np.zeros(q_width, np.float32)
            return np.concatenate([first, weights[f"{a}kv_a_proj_with_mqa.bias"]])

        moe = c.is_moe_layer(i)
        width = c.n_shared_experts * c.moe_intermediate_size if moe else c.intermediate_size
        mlp = f"{m}shared_experts." if moe else m
        experts = c.n_routed_experts
        each = c.moe_intermediate_size
        correction = f"{m}gate.e_score_correction_bias"
        return LayerWeights(
            input_norm=vector(f"{p}input_layernorm", c.hidden_size, f"{p}input_layernorm.weight"),
            qkv_a=matrix(
                f"{a}qkv_a",
                (q_width + c.latent_dim, c.hidden_size),
                f"{a}{first}.weight",
                f"{a}kv_a_proj_with_mqa.weight",
            ),
            qkv_a_bias=placing.vector(f"{a}qkv_a_bias", q_width + c.latent_dim, biases) if c.attention_bias else None,
            q_norm=vector(f"{a}q_norm", q_width, f"{a}q_a_layernorm.weight") if c.q_lora_rank else None,
            q_b=matrix(f"{a}q_b", (heads * c.qk_head_dim, q_width), f"{a}q_b_proj.weight") if c.q_lora_rank else None,
            kv_norm=vector(f"{a}kv_norm", latent, f"{a}kv_a_layernorm.weight"),
            w_uk=matrix(f"{a}w_uk", (heads, latent, nope), kv_b, cut=lambda w: by_head(w)[:, :nope].transpose(0, 2, 1)),
            w_uv=matrix(f"{a}w_uv", (heads, c.v_head_dim, latent), kv_b, cut=lambda w: by_head(w)[:, nope:]),
            o=matrix(f"{a}o", (c.hidden_size, heads * c.v_head_dim), f"{a}o_proj.weight"),
            o_bias=vector(f"{a}o_bias", c.hidden_size, f"{a}o_proj.bias") if c.attention_bias else None,
            post_norm=vector(f"{p}post_norm", c.hidden_size, f"{p}post_attention_layernorm.weight"),
            gate_up=matrix(
                f"{mlp}gate_up", (2 * width, c.hidden_size), f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"
            )
            if width
            else None,
            down=matrix(f"{mlp}down", (c.hidden_size, width), f"{mlp}down_proj.weight") if width else None,
            router=matrix(f"{m}router", (experts, c.hidden_size), f"{m}gate.weight") if moe else None,
            router_bias=vector(f"{m}router_bias", experts, correction) if moe and correction in weights else None,
            experts_gate_up=matrix(
                f"{m}experts.gate_up",
                (experts, 2 * each, c.hidden_size),
                *(f"{m}experts.{e}.{x}_proj.weight" for e in range(experts) for x in ("gate", "up")),
            )
            if moe
            else None,
            experts_down=matrix(
                f"{m}experts.down",
                (experts, c.hidden_size, each),
                *(f"{m}experts.{e}.down_proj.weight" for e in range(experts)),
            )
            if moe
            else None,
        )

    return DeviceWeights(
        embed=matrix("embed", (c.vocab_size, c.hidden_size), "model.embed_tokens.weight"),
        layers=tuple(layer(i) for i in range(c.num_hidden_layers)),
        norm=vector("norm", c.hidden_size, "model.norm.weight"),
        lm_head=matrix("lm_head", (c.vocab_size, c.hidden_size), "lm_head.weight"),
    )

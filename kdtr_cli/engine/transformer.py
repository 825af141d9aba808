"""The engine's forward pass, tier `exact`: the kernels of the table over fixed buffers on one device.

Everything is allocated here at the start, filled with NaN. A pass takes rows, as the NumPy model does: tokens of any
sequences at any positions; prefill, chunked prefill and a decode step differ only in their rows.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kdtr_cli.engine.devices import Device, DeviceArray
from kdtr_cli.engine.kernels import (
    CHUNK,
    KERNELS,
    SEGMENT,
    SPAN,
    embed,
    expert_matmul,
    expert_tile,
    matmuls,
    most_tiles,
)
from kdtr_cli.engine.kernels_ddtree import DDTREE
from kdtr_cli.engine.launch import Launcher
from kdtr_cli.engine.matrices import Matrix
from kdtr_cli.engine.weights import DeviceWeights, LayerWeights
from kdtr_cli.errors import InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.rope import rope_table

__all__ = ["Observe", "Rows", "Transformer", "TreeRows", "prefill_rows", "unobserved"]

#: Called with the name and the device array of each intermediate tensor, the names of the NumPy model (those of its
#: ``inner`` among them), after the launch that made it, or the few that read nothing of each other.
Observe = Callable[[str, DeviceArray], None]

_MAX_EXPERTS, _MAX_SLOTS, _MAX_GROUPS = 2048, 128, 1024  # what router.cu and group_experts.cu hold in shared memory
_PREFILL_ROWS = 64
_PREFILL_SCRATCH = 1 << 29  # bytes of attention scratch that decide how many rows a prefill pass takes


def unobserved(name: str, value: DeviceArray) -> None:
    """The observer that looks at nothing."""


def prefill_rows(config: ModelConfig, capacity: int) -> int:
    """Rows of one prefill pass: at most 64, fewer when the attention scratch of long contexts would pass 512 MB."""
    chunks = -(-capacity // CHUNK)
    row = 4 * config.num_attention_heads * chunks * (CHUNK + config.kv_lora_rank + 2)
    return max(1, min(_PREFILL_ROWS, _PREFILL_SCRATCH // row))


@dataclass(frozen=True)
class Rows:
    """Rows of a pass, on the device: int32 [M] each. Row i feeds tokens[i] of sequence slots[i] at positions[i]."""

    tokens: DeviceArray
    positions: DeviceArray
    slots: DeviceArray

    def part(self, first: int, count: int) -> "Rows":
        """Rows first .. first + count - 1."""
        return Rows(*(a.view(first, (count,)) for a in (self.tokens, self.positions, self.slots)))


@dataclass(frozen=True)
class TreeRows:
    """Where the rows of draft trees lie, on the device (docs/numerics.md rule 19), int32.

    Row i writes cache row places[i]; it sees positions before tree_starts[i] in the rows of the same number, and from
    there on in rows paths[i, 0], paths[i, 1], …
    """

    places: DeviceArray  #: [M]
    tree_starts: DeviceArray  #: [M]
    paths: DeviceArray  #: [M, L + 1]


class Transformer:
    """Weights, caches and scratch of one model on one device.

    ``rows`` is the most rows of a pass, ``slots`` the number of sequences held, ``capacity`` the positions of each.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        weights: DeviceWeights,
        choices: Choices,
        *,
        rows: int,
        slots: int,
        capacity: int,
    ) -> None:
        _check_limits(config)
        self.device, self.config, self.weights = device, config, weights
        self.launch = Launcher(device)
        self.rows, self.slots = rows, slots
        self.chunks = -(-capacity // CHUNK)
        self.capacity = capacity
        self.latent_eps = choices.latent_eps(config.rms_norm_eps)
        # rows of a draft tree may lie past the last position; no row stands there
        cos, sin = rope_table(config, min(capacity, config.max_position_embeddings), choices.rope_angles)
        self.cos, self.sin = device.upload("rope.cos", cos), device.upload("rope.sin", sin)
        self._allocate()
        self.launch.load(self.kernel_names())

    def kernel_names(self) -> list[str]:
        """The kernels that a pass of this model may launch."""
        kind = self.device.kind
        drafts = {k.name for k in DDTREE}
        names = {n for n, k in KERNELS.items() if n not in drafts and k.tier == "exact"}
        names = {n for n in names if not n.startswith(("matmul_", "expert_matmul_", "embed"))}
        names |= {embed(self.weights.embed.form)}
        for form in {m.form for m in self.weights.matrices()}:
            names |= matmuls(kind, self.rows, form)
        names |= {expert_matmul(kind, tile, m.shape[-1], m.form) for m in self.weights.experts() for tile in (1, 4)}
        return sorted(names)

    def _allocate(self) -> None:
        c, m, chunks = self.config, self.rows, self.chunks
        heads, latent, width = c.num_attention_heads, c.kv_lora_rank, c.latent_dim
        f32, i32 = np.float32, np.int32

        def new(name: str, *shape: int, dtype: type = f32) -> DeviceArray:
            return self.device.alloc(name, shape, dtype)

        self.cache = new("cache", c.num_hidden_layers, self.slots, self.capacity, width)
        layer = (self.slots, self.capacity, width)
        self.caches = [self.cache.view(i * math.prod(layer), layer) for i in range(c.num_hidden_layers)]
        self.hidden, self.normed = new("hidden", m, c.hidden_size), new("normed", m, c.hidden_size)
        q_width = c.q_lora_rank or heads * c.qk_head_dim
        self.qkv = new("qkv_a", m, q_width + width)
        self.q_latent = new("q_latent", m, q_width) if c.q_lora_rank else None
        self.q = new("q", m, heads * c.qk_head_dim) if c.q_lora_rank else None
        self.query = new("query", m, heads, width)
        self.scores = new("scores", m, heads, chunks * CHUNK)
        self.peaks, self.sums = new("peaks", m, heads, chunks * CHUNK // SEGMENT), new("sums", m, heads, chunks)
        self.vectors = new("vectors", m, heads, chunks, latent)
        self.latent_out = new("latent_out", m, heads, latent)
        self.values = new("values", m, heads * c.v_head_dim)
        shared = c.n_shared_experts * c.moe_intermediate_size
        dense = any(not c.is_moe_layer(i) for i in range(c.num_hidden_layers))
        wide = max(shared, c.intermediate_size if dense else 0)
        self.gate_up, self.mlp_hidden = new("gate_up", m, 2 * wide), new("mlp_hidden", m, wide)
        if c.n_routed_experts:
            items = m * c.num_experts_per_tok
            self.router_logits = new("router_logits", m, c.n_routed_experts)
            # every layer keeps its choice, so that it can be read after a pass
            self.ids = new("expert_ids", c.num_hidden_layers, items, dtype=i32)
            self.expert_weights = new("expert_weights", items)
            self.items = new("items", items, dtype=i32)
            self.tiles = new("tiles", most_tiles(items, c.n_routed_experts, 1), 3, dtype=i32)
            self.tile_count = new("tile_count", 1, dtype=i32)
            self.items_gate_up = new("items_gate_up", items, 2 * c.moe_intermediate_size)
            self.items_hidden = new("items_hidden", items, c.moe_intermediate_size)
            self.items_out = new("items_out", items, c.hidden_size)
            self.shared_out = new("shared_out", m, c.hidden_size) if shared else None
        parts = -(-c.vocab_size // SPAN)
        self.logits = new("logits", m, c.vocab_size)
        self.part_values, self.part_indices = new("part_values", m, parts), new("part_indices", m, parts, dtype=i32)

    # ------------------------------------------------------------------------------------------------ operations

    def _mlp(
        self, layer: LayerWeights, m: int, y: DeviceArray, residual: DeviceArray | None, name: str, observe: Observe
    ) -> None:
        width = layer.down.shape[1]
        self.launch.matmul(self.normed, layer.gate_up, self.gate_up, m)
        # the buffers are as wide as the widest layer needs them, their rows as this one does
        observe(f"{name}gate_up", self.gate_up.view(0, (self.rows, 2 * width)))
        self.launch("swiglu", gate_up=self.gate_up, h=self.mlp_hidden, rows=m, n=width)
        observe(f"{name}swiglu", self.mlp_hidden.view(0, (self.rows, width)))
        self.launch.matmul(self.mlp_hidden, layer.down, y, m, residual=residual)

    def _attention(self, i: int, m: int, rows: Rows, tree: TreeRows | None, chunks: int, observe: Observe) -> None:
        c, layer, cache = self.config, self.weights.layers[i], self.caches[i]
        name = f"model.layers.{i}.self_attn."
        heads, latent, nope, half = c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim // 2
        width, qk, row = c.latent_dim, c.qk_head_dim, self.qkv.shape[1]
        at = {"positions": rows.positions, "slots": rows.slots, "rows": m}
        rope = {"cos": self.cos, "sin": self.sin, "half": half, "interleaved": c.rope_interleave}
        self.launch.matmul(self.normed, layer.qkv_a, self.qkv, m, bias=layer.qkv_a_bias)
        observe(f"{name}qkv_a", self.qkv)
        if layer.q_b is None:
            q, q_row = self.qkv, row
        else:
            self.launch.norm(self.qkv, layer.q_norm, self.q_latent, m, self.latent_eps, x_row=row)
            observe(f"{name}q_latent", self.q_latent)
            self.launch.matmul(self.q_latent, layer.q_b, self.q, m)
            q, q_row = self.q, heads * qk
            observe(f"{name}q", q)
        self.launch(
            "kv_append",
            kv=self.qkv.view(row - width, (self.qkv.size - row + width,)),
            weight=layer.kv_norm,
            places=rows.positions if tree is None else tree.places,
            cache=cache,
            latent=latent,
            capacity=self.capacity,
            eps=self.latent_eps,
            kv_row=row,
            **rope,
            **at,
        )
        # the absorbed query: W_UK^T q_nope of each head, then its rotated part behind it
        self.launch.matmul(
            q, layer.w_uk, self.query, m, heads=heads, x_row=q_row, x_head=qk, y_row=heads * width, y_head=width
        )
        self.launch(
            "rope_query", q=q, query=self.query, heads=heads, nope=nope, latent=latent, q_row=q_row, **rope, **at
        )
        observe(f"{name}query", self.query)
        size = {"heads": heads, "kv_heads": 1, "n": latent, "capacity": self.capacity, "chunks": chunks}
        size |= {"width": width, "key_row": width, "key_head": 0}
        if tree is None:
            at |= {"tree_starts": None, "paths": None, "path_row": 0}
        else:
            at |= {"tree_starts": tree.tree_starts, "paths": tree.paths, "path_row": tree.paths.shape[-1]}
        self.launch(
            "attn_scores",
            query=self.query,
            cache=cache,
            scores=self.scores,
            peaks=self.peaks,
            scale=c.softmax_scale(),
            **size,
            **at,
        )
        scratch = {"sums": self.sums, "vectors": self.vectors}
        self.launch("attn_chunks", scores=self.scores, peaks=self.peaks, cache=cache, **scratch, **size, **at)
        self.launch("attn_combine", o=self.latent_out, **scratch, **size, **at)
        observe(f"{name}latent_out", self.latent_out)
        v = c.v_head_dim
        steps = {"x_row": heads * latent, "x_head": latent, "y_row": heads * v, "y_head": v}
        self.launch.matmul(self.latent_out, layer.w_uv, self.values, m, heads=heads, **steps)
        observe(f"{name}values", self.values)
        self.launch.matmul(self.values, layer.o, self.hidden, m, bias=layer.o_bias, residual=self.hidden)

    def _route(self, i: int, m: int, x: DeviceArray, tile: int, observe: Observe) -> dict:
        """x [M, hidden] -> layer i's choice of experts; returns the arguments that list its items in tiles."""
        c, layer, name = self.config, self.weights.layers[i], f"model.layers.{i}.mlp"
        experts, items = c.n_routed_experts, m * c.num_experts_per_tok
        ids = self.ids.view(i * self.ids.shape[1], (self.ids.shape[1],))
        self.launch.matmul(x, layer.router, self.router_logits, m)
        observe(f"{name}.router_logits", self.router_logits)
        choice = {"ids": ids, "weights": self.expert_weights, **c.router()}
        self.launch("router", logits=self.router_logits, bias=layer.router_bias, rows=m, experts=experts, **choice)
        observe(f"{name}.expert_weights", self.expert_weights)
        lists = {"items": self.items, "tiles": self.tiles, "tile_count": self.tile_count}
        self.launch("group_experts", ids=ids, item_count=items, experts=experts, tile=tile, **lists)
        observe(f"{name}.expert_items", self.items)
        return {**lists, "tile_places": most_tiles(items, experts, tile)}

    def _combine(self, m: int, shared: DeviceArray | None) -> None:
        """hidden += the weighted experts (+ shared)."""
        sums = {"expert": self.items_out, "weights": self.expert_weights, "shared": shared}
        size = {"rows": m, "slots": self.config.num_experts_per_tok, "n": self.config.hidden_size}
        self.launch("combine", residual=self.hidden, y=self.hidden, **sums, **size)

    def _experts(self, i: int, m: int, observe: Observe) -> None:
        c, layer = self.config, self.weights.layers[i]
        name, tile = f"model.layers.{i}.mlp", expert_tile(m)
        items = m * c.num_experts_per_tok
        lists = self._route(i, m, self.normed, tile, observe)

        def product(x: DeviceArray, w: Matrix, y: DeviceArray, items_a_row: int) -> None:
            n, k = w.shape[1:]
            kernel = expert_matmul(self.device.kind, tile, k, w.form)
            size = {"n": n, "k": k, "items_a_row": items_a_row}
            self.launch(kernel, x=x, y=y, **w.arguments, **size, **lists)

        product(self.normed, layer.experts_gate_up, self.items_gate_up, c.num_experts_per_tok)
        observe(f"{name}.experts_gate_up", self.items_gate_up)
        self.launch("swiglu", gate_up=self.items_gate_up, h=self.items_hidden, rows=items, n=c.moe_intermediate_size)
        observe(f"{name}.experts_swiglu", self.items_hidden)
        product(self.items_hidden, layer.experts_down, self.items_out, 1)
        observe(f"{name}.experts_out", self.items_out)
        shared = None
        if layer.down is not None:
            shared = self.shared_out
            self._mlp(layer, m, shared, None, f"{name}.shared_", observe)
            observe(f"{name}.shared_out", shared)
        self._combine(m, shared)

    def forward(self, rows: Rows, positions: int, observe: Observe = unobserved, tree: TreeRows | None = None) -> None:
        """Feed rows; leaves the final norm's output in ``normed`` [M, hidden].

        ``positions`` bounds the number of positions that any row of this pass sees; it sizes the attention grids, and
        bits do not depend on it.
        """
        c, m = self.config, rows.tokens.size
        chunks = min(self.chunks, -(-positions // CHUNK))
        self.launch.embed(rows.tokens, self.weights.embed, self.hidden, m)
        observe("embed", self.hidden)
        for i, layer in enumerate(self.weights.layers):
            name = f"model.layers.{i}"
            self.launch.norm(self.hidden, layer.input_norm, self.normed, m, c.rms_norm_eps)
            observe(f"{name}.input_norm", self.normed)
            self._attention(i, m, rows, tree, chunks, observe)
            observe(f"{name}.self_attn.hidden", self.hidden)
            self.launch.norm(self.hidden, layer.post_norm, self.normed, m, c.rms_norm_eps)
            observe(f"{name}.post_norm", self.normed)
            if c.is_moe_layer(i):
                self._experts(i, m, observe)
            else:
                self._mlp(layer, m, self.hidden, self.hidden, f"{name}.mlp.", observe)
            observe(f"{name}.hidden", self.hidden)
        self.launch.norm(self.hidden, self.weights.norm, self.normed, m, c.rms_norm_eps)
        observe("final_norm", self.normed)

    def chosen_experts(self, rows: int) -> np.ndarray | None:
        """Experts int32 [MoE layers, rows, slots] that the last pass of this many rows chose; None without experts."""
        c = self.config
        layers = [i for i in range(c.num_hidden_layers) if c.is_moe_layer(i)]
        if not layers:
            return None
        ids = self.device.read(self.ids)[layers, : rows * c.num_experts_per_tok]
        return ids.reshape(len(layers), rows, c.num_experts_per_tok)

    def cache_digest(self, slot: int, first: int, count: int) -> bytes:
        """SHA-256 over cache rows first .. first + count - 1 of a slot, layer by layer, float32 little endian."""
        digest = hashlib.sha256()
        width = self.config.latent_dim
        for cache in self.caches:
            rows = cache.view((slot * self.capacity + first) * width, (count, width))
            digest.update(np.ascontiguousarray(self.device.read(rows), "<f4").data)
        return digest.digest()

    def head(self, first: int, count: int) -> DeviceArray:
        """Logits of rows first .. first + count - 1 of the last pass, in ``logits`` [count, vocab]."""
        c = self.config
        x = self.normed.view(first * c.hidden_size, (count, c.hidden_size))
        self.launch.matmul(x, self.weights.lm_head, self.logits, count)
        return self.logits.view(0, (count, c.vocab_size))

    def project(self, x: DeviceArray, logits: DeviceArray, count: int) -> None:
        """Logits [count, vocab] of another's final rows: x float32 [count, hidden], count at most ``rows``."""
        self.launch.matmul(x, self.weights.lm_head, logits, count)

    def choose(
        self,
        rows: Rows,
        streams: DeviceArray,
        bad: DeviceArray,
        chosen: DeviceArray,
        *,
        temperature: float,
        seed: int,
        active: DeviceArray | None = None,
    ) -> None:
        """Tokens of the rows whose logits ``head`` left -> chosen int32 [M]; with ``active`` the rows advance."""
        m, vocab = rows.tokens.size, self.config.vocab_size
        parts = -(-vocab // SPAN)
        lists = {"values": self.part_values, "indices": self.part_indices, "rows": m, "parts": parts}
        self.launch(
            "sample_parts",
            logits=self.logits,
            positions=rows.positions,
            streams=streams,
            bad=bad,
            vocab=vocab,
            temperature=temperature,
            seed_low=seed & 0xFFFFFFFF,
            seed_high=seed >> 32,
            **lists,
        )
        advance = active is not None
        self.launch(
            "sample_final",
            chosen=chosen,
            tokens=rows.tokens if advance else None,
            positions=rows.positions if advance else None,
            active=active,
            **lists,
        )


def _check_limits(c: ModelConfig) -> None:
    for field, value, limit in (
        ("n_routed_experts", c.n_routed_experts, _MAX_EXPERTS),
        ("num_experts_per_tok", c.num_experts_per_tok, _MAX_SLOTS),
        ("n_group", c.n_group, _MAX_GROUPS),
    ):
        if value > limit:
            raise InputError(f"{field} is {value}: the engine's kernels hold at most {limit}")

"""The engine's forward pass, tier `bf16`: products on matrix units over bf16 rows and weights.

What a product reads is bf16: normalised rows, queries, cached latents, attention's and the MLPs' inner vectors. The
residual stream, what goes into a norm, the router and all sums are float32, so the kernels of tier exact serve for the
router, the weighted sum of experts and the choice of tokens. Rows and trees are as in ``Transformer``.
"""

import hashlib

import numpy as np

from kdtr_cli.engine.devices import DeviceArray
from kdtr_cli.engine.kernels import SPAN, most_tiles
from kdtr_cli.engine.kernels_mma import MMA, RANGE, has_mla, mla_decode, mla_ranges, mma_expert, mma_gate_up, mma_matmul
from kdtr_cli.engine.transformer import Observe, Rows, Transformer, TreeRows, unobserved
from kdtr_cli.engine.weights_bf16 import Fragments

__all__ = ["Bf16Transformer"]

_EXPERT_ROWS = 8  # of a tile of an expert's list: the columns of one instruction
_SHARED_WITH_EXACT = ("router", "group_experts", "combine", "sample_parts", "sample_final", "nonfinite", "embed_bf16")


class Bf16Transformer(Transformer):
    """``weights`` are those of ``weights_bf16.upload_bf16``; all else as in ``Transformer``."""

    def kernel_names(self) -> list[str]:
        names = {k.name for k in MMA if not k.name.startswith(("mma_", "attn16", "mla_"))} | set(_SHARED_WITH_EXACT)
        if self.mla:
            heads, shared = self.config.num_attention_heads, self.device.shared_bytes
            names |= {mla_decode(m, n, heads, shared) for m in (1, 2) for n in (1, self.capacity)} | {"mla_combine"}
        else:
            names |= {"attn16", "attn16_combine"}
        rows = range(1, self.rows + 1)
        for matrix in self._fragments():
            n, k = matrix.shape[-2:]
            names |= {mma_matmul(m, n, k) for m in rows}
        for layer in self.weights.layers:
            if layer.gate_up is not None:
                names |= {mma_gate_up(m, layer.gate_up.shape[-1]) for m in rows}
            if layer.experts_gate_up is not None:
                names |= {mma_expert("gate_up", layer.experts_gate_up.shape[-1])}
                names |= {mma_expert("down", layer.experts_down.shape[-1])}
            if layer.router is not None:
                names |= self.launch.matmul_names(layer.router, self.rows)
        return sorted(names)

    def _fragments(self) -> list[Fragments]:
        """The matrices that ``_product`` takes."""
        found = [self.weights.lm_head]
        for layer in self.weights.layers:
            found += [layer.qkv_a, layer.q_b, layer.w_uk, layer.w_uv, layer.o, layer.down]
        return [m for m in found if m is not None]

    def _allocate(self) -> None:
        c, m = self.config, self.rows
        heads, latent, width = c.num_attention_heads, c.kv_lora_rank, c.latent_dim
        self.mla = has_mla(self.device.kind, heads, latent, c.qk_rope_head_dim)
        ranges = self._ranges(self.capacity)
        f32, i32, b16 = np.float32, np.int32, np.uint16

        def new(name: str, *shape: int, dtype: type = f32) -> DeviceArray:
            return self.device.alloc(name, shape, dtype)

        self.cache = new("cache", c.num_hidden_layers, self.slots, self.capacity, width, dtype=b16)
        layer = (self.slots, self.capacity, width)
        size = self.slots * self.capacity * width
        self.caches = [self.cache.view(i * size, layer) for i in range(c.num_hidden_layers)]
        self.hidden = new("hidden", m, c.hidden_size)
        self.normed = new("normed", m, c.hidden_size, dtype=b16)
        self.router_rows = new("router_rows", m, c.hidden_size) if c.n_routed_experts else None
        q_width = c.q_lora_rank or heads * c.qk_head_dim
        self.qkv = new("qkv_a", m, q_width + width)
        self.q_latent = new("q_latent", m, q_width, dtype=b16) if c.q_lora_rank else None
        self.q = new("q", m, heads * c.qk_head_dim if c.q_lora_rank else q_width + width, dtype=b16)
        self.query = new("query", m, heads, width, dtype=b16)
        self.states, self.vectors = (
            new("states", m, heads, ranges, 2),
            new("vectors", m, heads, ranges, latent),
        )
        self.latent_out = new("latent_out", m, heads, latent, dtype=b16)
        self.values = new("values", m, heads * c.v_head_dim, dtype=b16)
        shared = c.n_shared_experts * c.moe_intermediate_size
        dense = any(not c.is_moe_layer(i) for i in range(c.num_hidden_layers))
        self.mlp_hidden = new("mlp_hidden", m, max(shared, c.intermediate_size if dense else 0), dtype=b16)
        if c.n_routed_experts:
            items = m * c.num_experts_per_tok
            self.router_logits = new("router_logits", m, c.n_routed_experts)
            self.ids = new("expert_ids", c.num_hidden_layers, items, dtype=i32)
            self.expert_weights = new("expert_weights", items)
            self.items = new("items", items, dtype=i32)
            self.tiles = new("tiles", most_tiles(items, c.n_routed_experts, _EXPERT_ROWS), 3, dtype=i32)
            self.tile_count = new("tile_count", 1, dtype=i32)
            self.items_hidden = new("items_hidden", items, c.moe_intermediate_size, dtype=b16)
            self.items_out = new("items_out", items, c.hidden_size)
            self.shared_out = new("shared_out", m, c.hidden_size) if shared else None
        parts = -(-c.vocab_size // SPAN)
        self.head_rows = new("head_rows", m, c.hidden_size, dtype=b16)
        self.logits = new("logits", m, c.vocab_size)
        self.part_values, self.part_indices = new("part_values", m, parts), new("part_indices", m, parts, dtype=i32)

    def _ranges(self, positions: int) -> int:
        return mla_ranges(positions) if self.mla else -(-positions // RANGE)

    # ------------------------------------------------------------------------------------------------ operations

    def _product(
        self,
        x: DeviceArray,
        w: Fragments,
        m: int,
        *,
        y32: DeviceArray | None = None,
        y16: DeviceArray | None = None,
        bias: DeviceArray | None = None,
        residual: DeviceArray | None = None,
        heads: int = 1,
        x_row: int | None = None,
        y_row: int | None = None,
        x_head: int = 0,
        y_head: int = 0,
    ) -> None:
        """y = x w^T (+ bias) (+ residual) for w [n, k], or [heads, n, k] with a step between heads in x and y."""
        n, k = w.shape[-2:]
        self.launch(
            mma_matmul(m, n, k),
            x=x,
            w=w.w,
            bias=bias,
            residual=residual,
            y32=y32,
            y16=y16,
            rows=m,
            n=n,
            k=k,
            heads=heads,
            x_row=x_row or k,
            y_row=y_row or n,
            x_head=x_head,
            y_head=y_head,
        )

    def _norm(
        self, x: DeviceArray, weight: DeviceArray, y16: DeviceArray, m: int, eps: float, *, x_row: int | None = None,
        y32: DeviceArray | None = None,
    ) -> None:  # fmt: skip
        n = weight.size
        self.launch("norm16", x=x, weight=weight, y16=y16, y32=y32, rows=m, n=n, eps=eps, x_row=x_row or n)

    def _dense(self, layer, m: int, y: DeviceArray, residual: DeviceArray | None) -> None:
        n, k = layer.gate_up.shape
        sizes = {"rows": m, "n": n, "k": k, "x_row": k}
        self.launch(mma_gate_up(m, k), x=self.normed, w=layer.gate_up.w, h=self.mlp_hidden, **sizes)
        self._product(self.mlp_hidden, layer.down, m, y32=y, residual=residual)

    def _attention(self, i: int, m: int, rows: Rows, tree: TreeRows | None, positions: int, observe: Observe) -> None:
        c, layer, cache = self.config, self.weights.layers[i], self.caches[i]
        name = f"model.layers.{i}.self_attn."
        heads, latent, nope, half = c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim // 2
        width, qk, v, row = c.latent_dim, c.qk_head_dim, c.v_head_dim, self.qkv.shape[1]
        at = {"positions": rows.positions, "slots": rows.slots, "rows": m}
        rope = {"cos": self.cos, "sin": self.sin, "half": half, "interleaved": c.rope_interleave}
        direct = layer.q_b is None
        self._product(self.normed, layer.qkv_a, m, bias=layer.qkv_a_bias, y32=self.qkv, y16=self.q if direct else None)
        if not direct:
            self._norm(self.qkv, layer.q_norm, self.q_latent, m, self.latent_eps, x_row=row)
            observe(f"{name}q_latent", self.q_latent)
            self._product(self.q_latent, layer.q_b, m, y16=self.q)
            observe(f"{name}q", self.q)
        q_row = self.q.shape[1]
        self.launch(
            "kv_append16",
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
        to_latent = {"x_row": q_row, "x_head": qk, "y_row": heads * width, "y_head": width}
        self._product(self.q, layer.w_uk, m, y16=self.query, heads=heads, **to_latent)
        query = {"q": self.q, "query": self.query, "heads": heads, "nope": nope, "latent": latent, "q_row": q_row}
        self.launch("rope_query16", **query, **rope, **at)
        if tree is None:
            at |= {"tree_starts": None, "paths": None, "path_row": 0}
        else:
            at |= {"tree_starts": tree.tree_starts, "paths": tree.paths, "path_row": tree.paths.shape[-1]}
        self._attend(i, m, positions, at)
        to_values = {"x_row": heads * latent, "x_head": latent, "y_row": heads * v, "y_head": v}
        self._product(self.latent_out, layer.w_uv, m, y16=self.values, heads=heads, **to_values)
        observe(f"{name}values", self.values)
        self._product(self.values, layer.o, m, bias=layer.o_bias, y32=self.hidden, residual=self.hidden)

    def _attend(self, i: int, m: int, positions: int, at: dict) -> None:
        """The absorbed queries over layer i's cache -> ``latent_out``."""
        c, ranges = self.config, self._ranges(positions)
        parts = {"states": self.states, "vectors": self.vectors, "heads": c.num_attention_heads, "ranges": ranges}
        cached = {"query": self.query, "cache": self.caches[i], "capacity": self.capacity}
        end = {"positions": at["positions"], "o": self.latent_out, "rows": m}
        scale = c.softmax_scale()
        if self.mla:
            kernel = mla_decode(m, positions, c.num_attention_heads, self.device.shared_bytes)
            self.launch(kernel, scale=np.float64(scale) * np.log2(np.e), **cached, **parts, **at)
            self.launch("mla_combine", **end, **parts)
        else:
            self.launch("attn16", n=c.kv_lora_rank, width=c.latent_dim, scale=scale, **cached, **parts, **at)
            self.launch("attn16_combine", n=c.kv_lora_rank, **end, **parts)

    def _experts(self, i: int, m: int, observe: Observe) -> None:
        c, layer, name = self.config, self.weights.layers[i], f"model.layers.{i}.mlp"
        slots = c.num_experts_per_tok
        lists = self._route(i, m, self.router_rows, _EXPERT_ROWS, observe)
        for part, x, w, out, items_a_row in (
            ("gate_up", self.normed, layer.experts_gate_up, {"h": self.items_hidden}, slots),
            ("down", self.items_hidden, layer.experts_down, {"y": self.items_out}, 1),
        ):
            n, k = w.shape[-2:]
            size = {"n": n, "k": k, "items_a_row": items_a_row}
            self.launch(mma_expert(part, k), x=x, w=w.w, **out, **size, **lists)
        observe(f"{name}.experts_out", self.items_out)
        shared = None
        if layer.down is not None:
            shared = self.shared_out
            self._dense(layer, m, shared, None)
            observe(f"{name}.shared_out", shared)
        self._combine(m, shared)

    def forward(self, rows: Rows, positions: int, observe: Observe = unobserved, tree: TreeRows | None = None) -> None:
        c, m = self.config, rows.tokens.size
        positions = min(positions, self.capacity)
        self.launch.embed(rows.tokens, self.weights.embed, self.hidden, m)
        observe("embed", self.hidden)
        for i, layer in enumerate(self.weights.layers):
            name = f"model.layers.{i}"
            self._norm(self.hidden, layer.input_norm, self.normed, m, c.rms_norm_eps)
            self._attention(i, m, rows, tree, positions, observe)
            observe(f"{name}.self_attn.hidden", self.hidden)
            moe = c.is_moe_layer(i)
            y32 = self.router_rows if moe else None
            self._norm(self.hidden, layer.post_norm, self.normed, m, c.rms_norm_eps, y32=y32)
            if moe:
                self._experts(i, m, observe)
            else:
                self._dense(layer, m, self.hidden, self.hidden)
            observe(f"{name}.hidden", self.hidden)
        self._norm(self.hidden, self.weights.norm, self.normed, m, c.rms_norm_eps)
        observe("final_norm", self.normed)

    def cache_digest(self, slot: int, first: int, count: int) -> bytes:
        """As tier exact takes it, over the float32 values of the bf16 rows."""
        digest = hashlib.sha256()
        width = self.config.latent_dim
        for cache in self.caches:
            rows = self.device.read(cache.view((slot * self.capacity + first) * width, (count, width)))
            digest.update((rows.astype("<u4") << 16).data)
        return digest.digest()

    def head(self, first: int, count: int) -> DeviceArray:
        c = self.config
        x = self.normed.view(first * c.hidden_size, (count, c.hidden_size))
        self._product(x, self.weights.lm_head, count, y32=self.logits)
        return self.logits.view(0, (count, c.vocab_size))

    def project(self, x: DeviceArray, logits: DeviceArray, count: int) -> None:
        size = count * self.config.hidden_size
        self.launch("round16", x=x, y=self.head_rows, n=size)
        self._product(self.head_rows, self.weights.lm_head, count, y32=logits)

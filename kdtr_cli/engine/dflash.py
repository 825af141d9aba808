"""The DFlash drafter on the device (rule 21): features of committed positions in, marginals of a block out."""

from dataclasses import dataclass

import numpy as np

from kdtr_cli.engine.devices import Device, DeviceArray
from kdtr_cli.engine.drafters import RoundState, Sequence
from kdtr_cli.engine.kernels import CHUNK, SEGMENT, matmuls
from kdtr_cli.engine.kernels_ddtree import PART
from kdtr_cli.engine.matrices import Matrix
from kdtr_cli.engine.transformer import Rows, Transformer
from kdtr_cli.model.dflash import Drafter, draft_rope_table

__all__ = ["DFlashDrafter"]


@dataclass(frozen=True)
class _Layer:
    """One draft layer, float32: H hidden, Q = heads * head_dim, E = kv heads * head_dim, F MLP width."""

    input_norm: DeviceArray  #: [H]
    qkv: Matrix  #: [Q + 2 E, H]: q over k over v
    q_norm: DeviceArray  #: [head_dim]
    k_norm: DeviceArray  #: [head_dim]
    o: Matrix  #: [H, Q]
    post_norm: DeviceArray  #: [H]
    gate_up: Matrix  #: [2 F, H]
    down: Matrix  #: [H, F]


class DFlashDrafter:
    """A DFlash drafter for B requests; it shares the target's embedding and lm_head."""

    def __init__(
        self, device: Device, target: Transformer, drafter: Drafter, batch: int, horizon: int, k: int, verify_rows: int
    ) -> None:
        c = drafter.config
        self.device, self.target, self.config = device, target, c
        self.batch, self.horizon, self.k, self.verify_rows = batch, horizon, k, verify_rows
        self.launch = target.launch
        self.capacity = target.capacity
        self.chunks = -(-self.capacity // CHUNK)
        self.kv_width = c.num_key_value_heads * c.head_dim
        self.q_width = c.num_attention_heads * c.head_dim
        self._upload(drafter)
        self._allocate()

    def _upload(self, drafter: Drafter) -> None:
        c, w = self.config, drafter.weights

        def up(name: str, *tensors: str) -> DeviceArray:
            return self.device.upload(f"draft.{name}", np.concatenate([w[t] for t in tensors]))

        def matrix(name: str, *tensors: str) -> Matrix:
            return Matrix.plain("f32", up(name, *tensors))

        cos, sin = draft_rope_table(c, min(self.capacity, c.max_position_embeddings + c.block_size))
        self.cos, self.sin = self.device.upload("draft.cos", cos), self.device.upload("draft.sin", sin)
        self.fc, self.hidden_norm = matrix("fc", "fc.weight"), up("hidden_norm", "hidden_norm.weight")
        self.norm = up("norm", "norm.weight")
        self.layers = []
        for i in range(c.num_hidden_layers):
            p = f"layers.{i}"
            a, m = f"{p}.self_attn", f"{p}.mlp"
            qkv = (f"{a}.q_proj.weight", f"{a}.k_proj.weight", f"{a}.v_proj.weight")
            layer = _Layer(
                input_norm=up(f"{i}.input_norm", f"{p}.input_layernorm.weight"),
                qkv=matrix(f"{i}.qkv", *qkv),
                q_norm=up(f"{i}.q_norm", f"{a}.q_norm.weight"),
                k_norm=up(f"{i}.k_norm", f"{a}.k_norm.weight"),
                o=matrix(f"{i}.o", f"{a}.o_proj.weight"),
                post_norm=up(f"{i}.post_norm", f"{p}.post_attention_layernorm.weight"),
                gate_up=matrix(f"{i}.gate_up", f"{m}.gate_proj.weight", f"{m}.up_proj.weight"),
                down=matrix(f"{i}.down", f"{m}.down_proj.weight"),
            )
            self.layers.append(layer)

    def _allocate(self) -> None:
        c, b, block = self.config, self.batch, self.horizon + 1
        rows = b * block
        f32, i32 = np.float32, np.int32
        wide = max(rows, self.target.rows)  # a prefill pass brings as many feature rows as the target takes

        def new(name: str, *shape: int, dtype: type = f32) -> DeviceArray:
            return self.device.alloc(f"draft.{name}", shape, dtype)

        heads, width = c.num_attention_heads, c.hidden_size
        self.features = len(c.target_layer_ids) * width
        self.caches = [new(f"cache.{i}", b, self.capacity, 2 * self.kv_width) for i in range(c.num_hidden_layers)]
        self.taps = new("taps", self.target.rows, self.features)
        self.accepted_taps = new("accepted_taps", wide, self.features)
        self.context, self.context_kv = new("context", wide, width), new("context_kv", wide, 2 * self.kv_width)
        self.context_positions, self.context_slots = (
            new("context_positions", rows, dtype=i32),
            new("context_slots", rows, dtype=i32),
        )
        self.tokens, self.positions = new("tokens", rows, dtype=i32), new("positions", rows, dtype=i32)
        self.slots, self.last = new("slots", rows, dtype=i32), new("last", rows, dtype=i32)
        self.hidden, self.normed = new("hidden", rows, width), new("normed", rows, width)
        self.qkv, self.query = new("qkv", rows, self.q_width + 2 * self.kv_width), new("query", rows, heads, c.head_dim)
        self.scores = new("scores", rows, heads, self.chunks * CHUNK)
        self.peaks = new("peaks", rows, heads, self.chunks * CHUNK // SEGMENT)
        self.sums, self.vectors = (
            new("sums", rows, heads, self.chunks),
            new("vectors", rows, heads, self.chunks, c.head_dim),
        )
        self.values = new("values", rows, self.q_width)
        self.gate_up, self.mlp_hidden = (
            new("gate_up", rows, 2 * c.intermediate_size),
            new("mlp_hidden", rows, c.intermediate_size),
        )
        self.drafted = new("drafted", b * self.horizon, width)
        # the block's rows 1..L are the ones that draft
        masks = np.tile(np.arange(1, block, dtype=i32), (b, 1))
        self.mask_rows = self.device.upload("draft.mask_rows", masks)
        vocab = self.target.config.vocab_size
        self.logits = new("logits", b * self.horizon, vocab)
        self.bad = self.device.upload("draft.bad", np.zeros(b * self.horizon, i32))
        parts = -(-vocab // PART)
        self.keys = new("keys", b * self.horizon, parts, self.k, dtype=np.uint64)
        self.part_sums = new("part_sums", b * self.horizon, parts)
        self.arrived = self.device.upload("draft.arrived", np.zeros(b * self.horizon, i32))
        self.ids, self.logps = new("ids", b, self.horizon, self.k, dtype=i32), new("logps", b, self.horizon, self.k)
        self.counts = None

    def load(self) -> None:
        """Compile and load the drafter's own kernels: a capture can load nothing."""
        # drafter and target may store their weights in different forms
        most = max(self.batch * (self.horizon + 1), self.target.rows)
        self.launch.load(sorted(matmuls(self.device.kind, most, "f32")))
        names = ["tap_rows", "gather_rows", "draft_qkv", "draft_rows", "topk_parts", "topk_final"]
        names += ["rmsnorm", "swiglu", "attn_scores", "attn_chunks", "attn_combine"]  # a target of tier bf16 has none
        self.launch.load(names)

    def admit(self, slot: int, sequence: Sequence) -> None:
        """The prompt's features come by ``extend``."""

    # ------------------------------------------------------------------------------------------------ features

    def tap(self, name: str, value: DeviceArray) -> None:
        """Observer of the target's passes: keeps the outputs of the tapped layers, side by side."""
        parts = name.split(".")
        if parts[0] != "model" or parts[-1] != "hidden" or len(parts) != 4:
            return
        layer = int(parts[2])
        if layer in self.config.target_layer_ids:
            n = self.config.hidden_size
            self.launch(
                "tap_rows",
                hidden=value,
                taps=self.taps,
                rows=self.target.rows,
                n=n,
                column=self.config.target_layer_ids.index(layer) * n,
                taps_row=self.features,
            )

    def _append(self, features: DeviceArray, rows: int, positions: DeviceArray, slots: DeviceArray) -> None:
        """Context features [rows, taps * H] -> keys and values of every layer at their positions."""
        c, launch = self.config, self.launch
        launch.matmul(features, self.fc, self.context, rows)
        launch.norm(self.context, self.hidden_norm, self.context, rows, c.rms_norm_eps)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            kv = layer.qkv.rows(self.q_width, 2 * self.kv_width)
            launch.matmul(self.context, kv, self.context_kv, rows)
            self._qkv(layer, cache, self.context_kv, None, rows, positions, slots)

    def _qkv(
        self,
        layer: _Layer,
        cache: DeviceArray,
        qkv: DeviceArray,
        query: DeviceArray | None,
        rows: int,
        positions: DeviceArray,
        slots: DeviceArray,
    ) -> None:
        c = self.config
        self.launch(
            "draft_qkv",
            qkv=qkv,
            q_weight=None if query is None else layer.q_norm,
            k_weight=layer.k_norm,
            positions=positions,
            slots=slots,
            places=positions,
            cos=self.cos,
            sin=self.sin,
            query=query,
            cache=cache,
            rows=rows,
            heads=0 if query is None else c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            capacity=self.capacity,
            eps=c.rms_norm_eps,
            qkv_row=qkv.shape[1],
        )

    def extend(self, rows: Rows) -> None:
        """After a prefill pass: its rows' features join the context."""
        self._append(self.taps, rows.tokens.size, rows.positions, rows.slots)

    def commit(self, state: RoundState, accepted: DeviceArray) -> None:
        """After a verify pass: the accepted rows' features, gathered by node, join the context.

        Past the accepted ones the last is repeated; those rows lie behind the next root and are written over.
        """
        block = self.horizon + 1
        rows = self.batch * block
        self.launch(
            "gather_rows",
            src=self.taps,
            index=accepted,
            out=self.accepted_taps,
            batch=self.batch,
            rows_in=self.verify_rows,
            rows_out=block,
            n=self.features,
        )
        self._append(self.accepted_taps, rows, self.positions, self.slots)

    # ------------------------------------------------------------------------------------------------ the block

    def draft(self, state: RoundState) -> None:
        """One pass over [root, MASK x L] of every request -> ids, logps."""
        c, launch, block = self.config, self.launch, self.horizon + 1
        rows, target = self.batch * block, self.target
        launch(
            "draft_rows",
            starts=state.starts,
            roots=state.roots,
            tokens=self.tokens,
            positions=self.positions,
            slots=self.slots,
            last=self.last,
            batch=self.batch,
            block=block,
            mask_id=c.mask_token_id,
        )
        launch.embed(self.tokens, target.weights.embed, self.hidden, rows)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            launch.norm(self.hidden, layer.input_norm, self.normed, rows, c.rms_norm_eps)
            launch.matmul(self.normed, layer.qkv, self.qkv, rows)
            self._qkv(layer, cache, self.qkv, self.query, rows, self.positions, self.slots)
            self._attention(cache, rows)
            launch.matmul(self.values, layer.o, self.hidden, rows, residual=self.hidden)
            launch.norm(self.hidden, layer.post_norm, self.normed, rows, c.rms_norm_eps)
            launch.matmul(self.normed, layer.gate_up, self.gate_up, rows)
            launch("swiglu", gate_up=self.gate_up, h=self.mlp_hidden, rows=rows, n=c.intermediate_size)
            launch.matmul(self.mlp_hidden, layer.down, self.hidden, rows, residual=self.hidden)
        launch.norm(self.hidden, self.norm, self.normed, rows, c.rms_norm_eps)
        launch(
            "gather_rows",
            src=self.normed,
            index=self.mask_rows,
            out=self.drafted,
            batch=self.batch,
            rows_in=block,
            rows_out=self.horizon,
            n=c.hidden_size,
        )
        target.project(self.drafted, self.logits, self.batch * self.horizon)
        self._top_k()

    def _attention(self, cache: DeviceArray, rows: int) -> None:
        c = self.config
        at = {
            "positions": self.last,
            "slots": self.slots,
            "rows": rows,
            "tree_starts": None,
            "paths": None,
            "path_row": 0,
        }
        size = {"heads": c.num_attention_heads, "kv_heads": c.num_key_value_heads, "capacity": self.capacity}
        size |= {"chunks": self.chunks, "key_row": 2 * self.kv_width, "key_head": c.head_dim}
        values = cache.view(self.kv_width, (cache.size - self.kv_width,))
        scale = np.float32(c.head_dim**-0.5)
        scratch = {"sums": self.sums, "vectors": self.vectors}
        width = c.head_dim
        self.launch(
            "attn_scores",
            query=self.query,
            cache=cache,
            scores=self.scores,
            peaks=self.peaks,
            width=width,
            scale=scale,
            **size,
            **at,
        )
        self.launch("attn_chunks", scores=self.scores, peaks=self.peaks, cache=values, n=width, **scratch, **size, **at)
        self.launch("attn_combine", o=self.values, n=width, **scratch, **size, **at)

    def _top_k(self) -> None:
        """Marginals of the drafted rows: log-probabilities and the first K ids of each (rule 17)."""
        rows, vocab = self.batch * self.horizon, self.target.config.vocab_size
        size = {"rows": rows, "vocab": vocab, "k": self.k}
        self.launch("topk_parts", logits=self.logits, keys=self.keys, bad=self.bad, **size)
        found = {"sums": self.part_sums, "arrived": self.arrived, "ids": self.ids, "logps": self.logps}
        self.launch("topk_final", logits=self.logits, keys=self.keys, **found, **size)

"""The NumPy model: DeepSeek-V2/V3 and Kimi-K2 decoders over rows of tokens, in any of four arithmetics.

The model is written once; the arithmetic is a module: ``exact``, ``float64``, ``float32`` or ``bf16`` of
``kdtr_cli.reference``. What an engine keeps as an activation passes through its ``stored``.
A forward pass takes rows: any tokens of any sequences at any positions, so that prefill, chunked prefill and batched
decoding are the same call. The bits of a row depend on its own sequence alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.rope import rope_table, rope_table64
from kdtr_cli.model.weights import Weights
from kdtr_cli.reference.attention import Branches
from kdtr_cli.reference.packed import PackedWeights

__all__ = ["Cache", "Model", "Observe", "Rows", "route"]

#: Called with the name and the value of each intermediate tensor of a forward pass, rows first.
Observe = Callable[[str, np.ndarray], None]

Parts = list[np.ndarray]  #: one array for each part of a pass, rows first

_WAVE_BYTES = 1 << 28  # outputs of single experts that are in memory together


def _ignore(name: str, value: np.ndarray) -> None:
    pass


@dataclass(frozen=True)
class Rows:
    """Tokens to feed: ids, their sequences and their positions, int32 [M] each.

    Rows of one sequence stand together, in ascending and consecutive positions, right after what its cache holds.
    Rows of a draft tree (rule 19) may have any positions and also say: ``places`` int32 [M], the cache row that each
    is written to (else its position); ``paths``, for each row the cache rows of the last positions that it sees, its
    own the last, or None where every position lies in its own row. Before them position p lies in row p.
    """

    tokens: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    places: np.ndarray | None = None
    paths: Sequence[np.ndarray | None] | None = None

    def runs(self) -> Iterator[tuple[int, slice]]:
        """(slot, rows) of each run of rows that belong to one sequence."""
        edges = [0, *(np.flatnonzero(np.diff(self.slots)) + 1).tolist(), len(self.slots)]
        for first, last in pairwise(edges):
            yield int(self.slots[first]), slice(first, last)

    def branches(self, run: slice) -> Branches | None:
        """Where the rows of one run find their keys, None when every position lies in its own row."""
        paths = [] if self.paths is None else list(self.paths[run])
        if all(path is None for path in paths):
            return None
        last = self.positions[run]
        own = [at if path is None else at + 1 - len(path) for path, at in zip(paths, last, strict=True)]
        start = min(own)
        rows = np.empty((len(own), last.max() + 1 - start), np.int64)
        for m, (path, first) in enumerate(zip(paths, own, strict=True)):
            rows[m] = start if path is None else path[0]  # past the end: a row that is written, and not seen
            rows[m, : last[m] + 1 - start] = np.arange(start, last[m] + 1)
            if path is not None:
                rows[m, first - start : last[m] + 1 - start] = path
        return Branches(int(start), rows)


class Cache:
    """Cached rows [latent | rotated key] of every layer and sequence, in order of position."""

    def __init__(self, config: ModelConfig, capacities: list[int], ops: ModuleType) -> None:
        dtype = ops.cast(0).dtype
        self.rows = [
            [np.full((n, config.latent_dim), np.nan, dtype) for n in capacities]
            for _ in range(config.num_hidden_layers)
        ]


def route(
    ops: ModuleType,
    logits: np.ndarray,
    bias: np.ndarray | None,
    *,
    slots: int,
    groups: int,
    kept_groups: int,
    softmax: bool,
    best_two: bool,
    normalise: bool,
    factor: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The router (rule 13): logits [M, E], bias [E] or None -> ids int32 [M, slots], weights [M, slots].

    Slots are ordered by choice = score + bias; the bias never enters a weight. ``best_two``: a group's score is the sum
    of its two best choices and other groups' experts get -inf (V3), else its best choice, and 0 (V2).
    """
    scores = ops.softmax(logits) if softmax else ops.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if kept_groups < groups:
        split = choice.reshape(len(choice), groups, -1)
        top = np.take_along_axis(split, ops.order(split, 2 if best_two else 1), -1)
        kept = ops.order(top[..., 0] + top[..., 1] if best_two else top[..., 0], kept_groups)
        mask = np.zeros(split.shape[:2], bool)
        np.put_along_axis(mask, kept, True, -1)
        choice = np.where(mask[..., None], split, ops.cast(-np.inf if best_two else 0.0)).reshape(choice.shape)
    ids = ops.order(choice, slots)
    weights = np.take_along_axis(scores, ids, -1)
    if normalise:
        weights = weights / (ops.total(weights) + ops.cast(1e-20))[:, None]
    return ids, weights * ops.cast(factor)


class Model:
    """A decoder ready to run: weights, rotary tables for ``positions`` positions, one arithmetic.

    ``ops`` is an arithmetic of ``kdtr_cli.reference``. Weights are packed when first used; of them ``weights_limit``
    bytes are kept (None: all, about the memory of the weights in that arithmetic).

    A pass takes its rows in parts, and every part goes through a layer before the next layer's weights are touched: a
    weight that is not kept is read once a pass. Parts share weights and nothing else; each product is made for one
    part alone, so that the bits of a part, in float64 too, do not depend on the parts that it travels with.

    ``inner``: observers are also told what stands between the tensors of a trace, so that the input and the output of
    every operation are seen: of norms, of products as the engine groups them, of attention, of each routed expert.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        choices: Choices,
        positions: int,
        ops: ModuleType,
        weights_limit: int | None = None,
        inner: bool = False,
    ) -> None:
        self.config, self.weights, self.ops, self.positions = config, weights, ops, positions
        self.inner = inner
        self.packed = PackedWeights(weights, ops, weights_limit)
        self.latent_eps = choices.latent_eps(config.rms_norm_eps)
        if choices.rope_angles == "f64" and ops.cast(0).dtype == np.float64:
            tables = rope_table64(config, positions)
        else:
            tables = rope_table(config, positions, choices.rope_angles)
        self.cos, self.sin = (ops.cast(t) for t in tables)

    def cache(self, capacities: list[int]) -> Cache:
        """An empty cache for sequences of these lengths."""
        return Cache(self.config, capacities, self.ops)

    def _linear(self, xs: Parts, name: str) -> Parts:
        return [self.ops.stored(y) for y in self._product(xs, name)]

    def _product(self, xs: Parts, name: str, as_read: bool = False) -> Parts:
        """A linear layer's sums as they are; ``as_read``: its weights too."""
        blocks: list[Parts] = [[] for _ in xs]
        for block in self.packed.blocks(f"{name}.weight", as_read):
            for x, out in zip(xs, blocks, strict=True):
                out.append(self.ops.linear(x, block))
        ys = [out[0] if len(out) == 1 else np.concatenate(out, -1) for out in blocks]
        if f"{name}.bias" not in self.packed:
            return ys
        bias = self.packed.vector(f"{name}.bias")
        return [y + bias for y in ys]

    def _norm(self, xs: Parts, name: str, eps: float) -> Parts:
        weight = self.packed.vector(f"{name}.weight")
        return [self.ops.rms_norm(x, weight, eps) for x in xs]

    def _sums(self, xs: Parts, ys: Parts) -> Parts:
        return [self.ops.stored(x + y) for x, y in zip(xs, ys, strict=True)]

    def _mlp(self, xs: Parts, name: str, keep: Callable[[Parts, Parts], None] | None = None) -> Parts:
        """``keep`` is given gate and up side by side, [M, 2 I] of each part, and what swiglu makes of them, [M, I]."""
        gates, ups = self._linear(xs, f"{name}.gate_proj"), self._linear(xs, f"{name}.up_proj")
        hidden = [self.ops.swiglu(gate, up) for gate, up in zip(gates, ups, strict=True)]
        if keep is not None:
            keep([np.concatenate(pair, -1) for pair in zip(gates, ups, strict=True)], hidden)
        return self._linear(hidden, f"{name}.down_proj")

    def _told_mlp(self, xs: Parts, name: str, tensors: str, observe: list[Observe]) -> Parts:
        """``_mlp`` of a dense layer or of the shared experts; its inner tensors' names begin with ``tensors``."""

        def keep(gate_ups: Parts, hidden: Parts) -> None:
            _tell(observe, f"{tensors}gate_up", gate_ups)
            _tell(observe, f"{tensors}swiglu", hidden)

        return self._mlp(xs, name, keep if self.inner else None)

    def _tell_inner(self, observe: list[Observe], name: str, values: Parts) -> None:
        if self.inner:
            _tell(observe, name, values)

    def _attention(
        self, xs: Parts, parts: list[Rows], cached: list[np.ndarray], name: str, observe: list[Observe]
    ) -> Parts:
        c = self.config
        if c.q_lora_rank is None:
            firsts = qs = self._linear(xs, f"{name}q_proj")
        else:
            firsts = self._linear(xs, f"{name}q_a_proj")
            latents = self._norm(firsts, f"{name}q_a_layernorm", self.latent_eps)
            _tell(observe, f"{name}q_latent", latents)
            qs = self._linear(latents, f"{name}q_b_proj")
        _tell(observe, f"{name}q", qs)
        kvs = self._linear(xs, f"{name}kv_a_proj_with_mqa")
        if self.inner:
            _tell(observe, f"{name}qkv_a", [np.concatenate(pair, -1) for pair in zip(firsts, kvs, strict=True)])
        latents = self._norm([kv[:, : c.kv_lora_rank] for kv in kvs], f"{name}kv_a_layernorm", self.latent_eps)
        heads = self.packed.heads(f"{name}kv_b_proj.weight", c.num_attention_heads, c.qk_nope_head_dim)
        values = []
        for i, rows in enumerate(parts):
            k_rope = self._rotated(kvs[i][:, c.kv_lora_rank :], rows)
            observe[i](f"{name}kv_latent", latents[i])
            observe[i](f"{name}k_rope", k_rope)
            queries = self._queries(qs[i], rows, heads)
            observe[i](f"{name}q_rope", queries[..., c.kv_lora_rank :].reshape(len(queries), -1))
            outs = self._attend(queries, latents[i], k_rope, rows, cached)
            if self.inner:
                observe[i](f"{name}query", queries)
                observe[i](f"{name}latent_out", outs)
            per_head = [self.ops.stored(self.ops.linear(outs[:, h], w)) for h, (_, w) in enumerate(heads)]
            values.append(np.concatenate(per_head, -1))
        self._tell_inner(observe, f"{name}values", values)
        ys = self._linear(values, f"{name}o_proj")
        _tell(observe, f"{name}attn_out", ys)
        return ys

    def _rotated(self, x: np.ndarray, rows: Rows) -> np.ndarray:
        """x [M, …, rope] by the angles of the rows' positions."""
        cos, sin = (table[rows.positions].reshape(len(x), *[1] * (x.ndim - 2), -1) for table in (self.cos, self.sin))
        return self.ops.rotate(x, cos, sin, self.config.rope_interleave)

    def _queries(self, q: np.ndarray, rows: Rows, heads: list[tuple[Any, Any]]) -> np.ndarray:
        """The absorbed queries [M, heads, latent_dim] of q [M, heads * qk_head_dim]: W_UK^T q_nope, then q rotated."""
        c = self.config
        m, nope = len(q), c.qk_nope_head_dim
        q = q.reshape(m, c.num_attention_heads, c.qk_head_dim)
        query = np.empty((m, c.num_attention_heads, c.latent_dim), q.dtype)
        for h, (w_uk, _) in enumerate(heads):
            query[:, h, : c.kv_lora_rank] = self.ops.stored(self.ops.linear(q[:, h, :nope], w_uk))
        query[..., c.kv_lora_rank :] = self._rotated(q[..., nope:], rows)
        return query

    def _attend(
        self,
        query: np.ndarray,
        kv_latent: np.ndarray,
        k_rope: np.ndarray,
        rows: Rows,
        cached: list[np.ndarray],
    ) -> np.ndarray:
        """One part's attention over the latents, its keys written to the cache -> [M, heads, latent]."""
        c, ops = self.config, self.ops
        out = np.empty((len(query), c.num_attention_heads, c.kv_lora_rank), query.dtype)
        places = rows.positions if rows.places is None else rows.places
        for slot, run in rows.runs():
            position, keys = rows.positions[run], cached[slot]
            keys[places[run], : c.kv_lora_rank] = kv_latent[run]
            keys[places[run], c.kv_lora_rank :] = k_rope[run]
            branches = rows.branches(run)
            seen = keys if branches else keys[: position[-1] + 1]
            out[run] = ops.attend(query[run], seen, position + 1, c.softmax_scale(), c.kv_lora_rank, branches)
        return out

    def _experts(self, xs: Parts, name: str, observe: list[Observe]) -> Parts:
        c, ops = self.config, self.ops
        bias_name = f"{name}.gate.e_score_correction_bias"
        bias = self.packed.vector(bias_name) if bias_name in self.packed else None
        logits = self._product(xs, f"{name}.gate", as_read=True)
        _tell(observe, f"{name}.router_logits", logits)
        routed = [route(ops, rows, bias, **c.router()) for rows in logits]
        _tell(observe, f"{name}.expert_ids", [ids for ids, _ in routed])
        _tell(observe, f"{name}.expert_weights", [weights for _, weights in routed])
        ys: Parts = []
        for wave in self._waves(xs):
            ys += self._routed(xs[wave], routed[wave], name, observe[wave])
        if c.n_shared_experts:
            outs = self._told_mlp(xs, f"{name}.shared_experts", f"{name}.shared_", observe)
            _tell(observe, f"{name}.shared_out", outs)
            ys = self._sums(ys, outs)
        _tell(observe, f"{name}.moe_out", ys)
        return ys

    def _waves(self, xs: Parts) -> Iterator[slice]:
        """Parts whose experts' outputs are in memory together: as many as fit in _WAVE_BYTES, at least one."""
        row = self.config.num_experts_per_tok * self.config.hidden_size * xs[0].itemsize
        first, size = 0, 0
        for i, x in enumerate(xs):
            if size and size + len(x) * row > _WAVE_BYTES:
                yield slice(first, i)
                first, size = i, 0
            size += len(x) * row
        yield slice(first, len(xs))

    def _routed(
        self, xs: Parts, routed: list[tuple[np.ndarray, np.ndarray]], name: str, observe: list[Observe]
    ) -> Parts:
        """The weighted sum of the routed experts; each expert's weights serve all parts."""

        def items(width: int) -> Parts:
            return [np.empty((*ids.shape, width), x.dtype) for x, (ids, _) in zip(xs, routed, strict=True)]

        each, width = items(self.config.hidden_size), self.config.moe_intermediate_size
        gate_ups, products = (items(2 * width), items(width)) if self.inner else ([], [])
        for e in np.unique(np.concatenate([ids.reshape(-1) for ids, _ in routed])):
            where = [(i, *np.nonzero(ids == e)) for i, (ids, _) in enumerate(routed)]
            where = [(i, row, slot) for i, row, slot in where if len(row)]

            def keep(wide: Parts, hidden: Parts, where: list = where) -> None:
                for (i, row, slot), gate_up, product in zip(where, wide, hidden, strict=True):
                    gate_ups[i][row, slot], products[i][row, slot] = gate_up, product

            outs = self._mlp([xs[i][row] for i, row, _ in where], f"{name}.experts.{e}", keep if self.inner else None)
            for (i, row, slot), out in zip(where, outs, strict=True):
                each[i][row, slot] = out
        self._tell_inner(observe, f"{name}.experts_gate_up", gate_ups)
        self._tell_inner(observe, f"{name}.experts_swiglu", products)
        self._tell_inner(observe, f"{name}.experts_out", each)
        ys = []
        for x, (_, weights), outs in zip(xs, routed, each, strict=True):
            y = np.zeros_like(x)
            for slot in range(weights.shape[1]):
                y = y + weights[:, slot, None] * outs[:, slot]
            ys.append(self.ops.stored(y))
        return ys

    def forward(self, rows: Rows, cache: Cache, observe: Observe = _ignore) -> np.ndarray:
        """Feed rows: writes their cache rows and returns the final norm's output [M, hidden]."""
        hidden = [self.embed(rows.tokens)]
        observe("embed", hidden[0])
        for i in range(self.config.num_hidden_layers):
            hidden = self.layer(i, hidden, [rows], cache.rows[i], [observe])
        return self.final_norm(hidden, [observe])[0]

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Rows [M, hidden] of the embedding."""
        return self.ops.stored(self.packed.rows("model.embed_tokens.weight", tokens))

    def layer(
        self, i: int, hidden: Parts, parts: list[Rows], cached: list[np.ndarray], observe: list[Observe]
    ) -> Parts:
        """Layer i over all parts; cached: its rows of each sequence (``Cache.rows[i]``), read and written."""
        c, name = self.config, f"model.layers.{i}"
        with np.errstate(all="ignore"):  # a value that is not finite is found by the observer, not by a warning
            xs = self._norm(hidden, f"{name}.input_layernorm", c.rms_norm_eps)
            self._tell_inner(observe, f"{name}.input_norm", xs)
            ys = self._attention(xs, parts, cached, f"{name}.self_attn.", observe)
            hidden = self._sums(hidden, ys)
            self._tell_inner(observe, f"{name}.self_attn.hidden", hidden)
            xs = self._norm(hidden, f"{name}.post_attention_layernorm", c.rms_norm_eps)
            self._tell_inner(observe, f"{name}.post_norm", xs)
            if c.is_moe_layer(i):
                ys = self._experts(xs, f"{name}.mlp", observe)
            else:
                ys = self._told_mlp(xs, f"{name}.mlp", f"{name}.mlp.", observe)
                _tell(observe, f"{name}.mlp.mlp_out", ys)
            hidden = self._sums(hidden, ys)
            _tell(observe, f"{name}.hidden", hidden)
            return hidden

    def final_norm(self, hidden: Parts, observe: list[Observe]) -> Parts:
        """The norm before lm_head."""
        with np.errstate(all="ignore"):
            hidden = self._norm(hidden, "model.norm", self.config.rms_norm_eps)
            _tell(observe, "final_norm", hidden)
            return hidden

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """lm_head of final hidden states [M, hidden] -> [M, vocab]."""
        return self.logits_of([hidden])[0]

    def logits_of(self, hidden: Parts) -> Parts:
        """The same of several parts, each by itself."""
        with np.errstate(all="ignore"):
            return self._product(hidden, "lm_head")


def _tell(observe: list[Observe], name: str, values: Parts) -> None:
    for one, value in zip(observe, values, strict=True):
        one(name, value)

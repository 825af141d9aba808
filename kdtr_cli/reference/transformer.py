"""The NumPy model: DeepSeek-V2/V3 and Kimi-K2 decoders over rows of tokens, in exact, float64 or float32 arithmetic.

The model is written once; the arithmetic is a module: ``exact``, ``float64`` or ``float32`` of ``kdtr_cli.reference``.
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

__all__ = ["Cache", "Model", "Observe", "Rows", "route"]

#: Called with the name and the value of each intermediate tensor of a forward pass, rows first.
Observe = Callable[[str, np.ndarray], None]


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
    """A decoder ready to run: packed weights, rotary tables for ``positions`` positions, one arithmetic.

    ``ops`` is ``exact``, ``float64`` or ``float32`` of ``kdtr_cli.reference``. Weights are packed when first used and
    kept: a model takes about the memory of its weights in its arithmetic.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, choices: Choices, positions: int, ops: ModuleType
    ) -> None:
        self.config, self.weights, self.ops, self.positions = config, weights, ops, positions
        self.latent_eps = choices.latent_eps(config.rms_norm_eps)
        if choices.rope_angles == "f64" and ops.cast(0).dtype == np.float64:
            tables = rope_table64(config, positions)
        else:
            tables = rope_table(config, positions, choices.rope_angles)
        self.cos, self.sin = (ops.cast(t) for t in tables)
        self._packed: dict[str, Any] = {}

    def cache(self, capacities: list[int]) -> Cache:
        """An empty cache for sequences of these lengths."""
        return Cache(self.config, capacities, self.ops)

    def _matrix(self, name: str) -> Any:
        if name not in self._packed:
            self._packed[name] = self.ops.pack(self.weights[name])
        return self._packed[name]

    def _vector(self, name: str) -> np.ndarray:
        if name not in self._packed:
            self._packed[name] = self.ops.cast(self.weights[name])
        return self._packed[name]

    def _heads(self, name: str) -> list[tuple[Any, Any]]:
        """Each head's packed (W_UK transposed [latent, nope], W_UV [v, latent]) out of kv_b_proj."""
        if name not in self._packed:
            c = self.config
            kv_b = self.weights[name].reshape(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
            self._packed[name] = [
                (self.ops.pack(h[: c.qk_nope_head_dim].T), self.ops.pack(h[c.qk_nope_head_dim :])) for h in kv_b
            ]
        return self._packed[name]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        bias = f"{name}.bias"
        return self.ops.linear(x, self._matrix(f"{name}.weight"), self._vector(bias) if bias in self.weights else None)

    def _norm(self, x: np.ndarray, name: str, eps: float) -> np.ndarray:
        return self.ops.rms_norm(x, self._vector(f"{name}.weight"), eps)

    def _mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        hidden = self.ops.swiglu(self._linear(x, f"{name}.gate_proj"), self._linear(x, f"{name}.up_proj"))
        return self._linear(hidden, f"{name}.down_proj")

    def _attention(
        self, x: np.ndarray, rows: Rows, cached: list[np.ndarray], name: str, observe: Observe
    ) -> np.ndarray:
        c, ops = self.config, self.ops
        m, heads, nope = len(x), c.num_attention_heads, c.qk_nope_head_dim
        if c.q_lora_rank is None:
            q = self._linear(x, f"{name}q_proj")
        else:
            latent = self._norm(self._linear(x, f"{name}q_a_proj"), f"{name}q_a_layernorm", self.latent_eps)
            observe(f"{name}q_latent", latent)
            q = self._linear(latent, f"{name}q_b_proj")
        observe(f"{name}q", q)
        q = q.reshape(m, heads, c.qk_head_dim)
        kv = self._linear(x, f"{name}kv_a_proj_with_mqa")
        cos, sin = self.cos[rows.positions], self.sin[rows.positions]
        kv_latent = self._norm(kv[:, : c.kv_lora_rank], f"{name}kv_a_layernorm", self.latent_eps)
        k_rope = ops.rotate(kv[:, c.kv_lora_rank :], cos, sin, c.rope_interleave)
        observe(f"{name}kv_latent", kv_latent)
        observe(f"{name}k_rope", k_rope)
        per_head = self._heads(f"{name}kv_b_proj.weight")
        query = np.empty((m, heads, c.latent_dim), x.dtype)
        for h, (w_uk, _) in enumerate(per_head):
            query[:, h, : c.kv_lora_rank] = ops.linear(q[:, h, :nope], w_uk)
        query[..., c.kv_lora_rank :] = ops.rotate(q[..., nope:], cos[:, None], sin[:, None], c.rope_interleave)
        out = np.empty((m, heads, c.kv_lora_rank), x.dtype)
        places = rows.positions if rows.places is None else rows.places
        for slot, run in rows.runs():
            position, keys = rows.positions[run], cached[slot]
            keys[places[run], : c.kv_lora_rank] = kv_latent[run]
            keys[places[run], c.kv_lora_rank :] = k_rope[run]
            branches = rows.branches(run)
            seen = keys if branches else keys[: position[-1] + 1]
            out[run] = ops.attend(query[run], seen, position + 1, c.softmax_scale(), c.kv_lora_rank, branches)
        values = [ops.linear(out[:, h], w_uv) for h, (_, w_uv) in enumerate(per_head)]
        y = self._linear(np.concatenate(values, -1), f"{name}o_proj")
        observe(f"{name}attn_out", y)
        return y

    def _experts(self, x: np.ndarray, name: str, observe: Observe) -> np.ndarray:
        c, ops = self.config, self.ops
        bias_name = f"{name}.gate.e_score_correction_bias"
        bias = self._vector(bias_name) if bias_name in self.weights else None
        logits = ops.linear(x, self._matrix(f"{name}.gate.weight"))
        observe(f"{name}.router_logits", logits)
        ids, weights = route(ops, logits, bias, **c.router())
        observe(f"{name}.expert_ids", ids)
        observe(f"{name}.expert_weights", weights)
        each = np.empty((*ids.shape, c.hidden_size), x.dtype)
        for e in np.unique(ids):
            row, slot = np.nonzero(ids == e)
            each[row, slot] = self._mlp(x[row], f"{name}.experts.{e}")
        y = np.zeros_like(x)
        for slot in range(c.num_experts_per_tok):
            y = y + weights[:, slot, None] * each[:, slot]
        if c.n_shared_experts:
            y = y + self._mlp(x, f"{name}.shared_experts")
        observe(f"{name}.moe_out", y)
        return y

    def forward(self, rows: Rows, cache: Cache, observe: Observe = _ignore) -> np.ndarray:
        """Feed rows: writes their cache rows and returns the final norm's output [M, hidden]."""
        with np.errstate(all="ignore"):  # a value that is not finite is found by the observer, not by a warning
            return self._forward(rows, cache, observe)

    def _forward(self, rows: Rows, cache: Cache, observe: Observe) -> np.ndarray:
        c = self.config
        h = self.embed(rows.tokens)
        observe("embed", h)
        for i in range(c.num_hidden_layers):
            name = f"model.layers.{i}"
            x = self._norm(h, f"{name}.input_layernorm", c.rms_norm_eps)
            h = h + self._attention(x, rows, cache.rows[i], f"{name}.self_attn.", observe)
            x = self._norm(h, f"{name}.post_attention_layernorm", c.rms_norm_eps)
            mlp = self._experts(x, f"{name}.mlp", observe) if c.is_moe_layer(i) else self._mlp(x, f"{name}.mlp")
            h = h + mlp
            observe(f"{name}.hidden", h)
        h = self._norm(h, "model.norm", c.rms_norm_eps)
        observe("final_norm", h)
        return h

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Rows [M, hidden] of the embedding."""
        return self._vector("model.embed_tokens.weight")[tokens]

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """lm_head of final hidden states [M, hidden] -> [M, vocab]."""
        with np.errstate(all="ignore"):
            return self.ops.linear(hidden, self._matrix("lm_head.weight"))

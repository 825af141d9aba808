"""The named intermediate tensors of a forward pass that a trace keeps: the one table of names, widths and dtypes.

The NumPy model and the engine tell them by these names; `kdtr_cli.bundle.schema` has the rule of what a file may hold,
and a test holds the two together. A trace has one row for each position that was fed, 0 … P + T - 2.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kdtr_cli.model.config import ModelConfig

__all__ = ["TRACE_LEVELS", "Trace", "TraceTensor", "execution_order", "trace_bytes", "trace_tensors"]

TRACE_LEVELS = ("layers", "full")

#: Inside a layer, in order of execution.
_ORDER = ("q_latent", "q", "kv_latent", "k_rope", "q_rope", "attn_out")
_ORDER += ("router_logits", "expert_ids", "expert_weights", "shared_out", "moe_out", "mlp_out", "hidden")


@dataclass(frozen=True)
class TraceTensor:
    """One tensor: [rows, width], int32 where ``integer``, else of the arithmetic. ``layer`` None: of no layer."""

    name: str
    layer: int | None
    width: int
    integer: bool = False

    @property
    def kind(self) -> str:
        """The name without its layer: ``embed``, ``q_latent``, ``hidden``, …"""
        return self.name.rpartition(".")[2]


def trace_tensors(config: ModelConfig, level: str) -> tuple[TraceTensor, ...]:
    """The tensors of a level, in order of execution: ``layers`` are the residual stream's, ``full`` all."""
    return tuple(t for t in _all(config) if level == "full" or t.kind in ("embed", "hidden", "final_norm"))


def _all(c: ModelConfig) -> Iterator[TraceTensor]:
    hidden, heads = c.hidden_size, c.num_attention_heads
    yield TraceTensor("embed", None, hidden)
    for i in range(c.num_hidden_layers):
        name = f"model.layers.{i}."
        if c.q_lora_rank is not None:
            yield TraceTensor(f"{name}self_attn.q_latent", i, c.q_lora_rank)
        yield TraceTensor(f"{name}self_attn.q", i, heads * c.qk_head_dim)
        yield TraceTensor(f"{name}self_attn.kv_latent", i, c.kv_lora_rank)
        yield TraceTensor(f"{name}self_attn.k_rope", i, c.qk_rope_head_dim)
        yield TraceTensor(f"{name}self_attn.q_rope", i, heads * c.qk_rope_head_dim)
        yield TraceTensor(f"{name}self_attn.attn_out", i, hidden)
        if c.is_moe_layer(i):
            yield TraceTensor(f"{name}mlp.router_logits", i, c.n_routed_experts)
            yield TraceTensor(f"{name}mlp.expert_ids", i, c.num_experts_per_tok, True)
            yield TraceTensor(f"{name}mlp.expert_weights", i, c.num_experts_per_tok)
            if c.n_shared_experts:
                yield TraceTensor(f"{name}mlp.shared_out", i, hidden)
            yield TraceTensor(f"{name}mlp.moe_out", i, hidden)
        else:
            yield TraceTensor(f"{name}mlp.mlp_out", i, hidden)
        yield TraceTensor(f"{name}hidden", i, hidden)
    yield TraceTensor("final_norm", None, hidden)


def execution_order(names: Iterable[str]) -> list[str]:
    """Names of the table, of any model, in order of execution."""

    def key(name: str) -> tuple[int, int]:
        if not name.startswith("model.layers."):
            return (-1, 0) if name == "embed" else (1 << 30, 0)
        return int(name.split(".")[2]), _ORDER.index(name.rpartition(".")[2])

    return sorted(names, key=key)


def trace_bytes(config: ModelConfig, level: str | None, itemsize: int = 4) -> int:
    """Bytes of one row of a trace; 0 without a level."""
    if level is None:
        return 0
    return sum(t.width * (4 if t.integer else itemsize) for t in trace_tensors(config, level))


class Trace:
    """One sequence's trace while it is made: ``arrays`` has [rows, width] by name, ``rows`` the most that it may have.

    Of what is told, names that are not of the level and positions past the last row are left out.
    """

    def __init__(self, config: ModelConfig, level: str, rows: int, dtype: np.typing.DTypeLike = np.float32) -> None:
        tensors = trace_tensors(config, level)
        self.arrays = {t.name: np.empty((rows, t.width), np.int32 if t.integer else dtype) for t in tensors}
        self._told = {t.name: np.zeros(rows, bool) for t in tensors}

    def put(self, name: str, positions: np.ndarray, values: np.ndarray) -> None:
        """Keep values [M, width] of the rows at these positions [M]."""
        if name in self.arrays:
            inside = positions < len(self.arrays[name])
            self.arrays[name][positions[inside]] = values[inside]
            self._told[name][positions[inside]] = True

    def pack(self) -> dict[str, np.ndarray]:
        """All there is by now, for `unpack`."""
        return self.arrays | {f"{name}.told": told for name, told in self._told.items()}

    def unpack(self, arrays: dict[str, np.ndarray]) -> None:
        """Take over what another one packed. KeyError or ValueError where that was of another kind."""
        for name, array in self.arrays.items():
            array[:] = arrays[name]
            self._told[name][:] = arrays[f"{name}.told"]

    def finished(self, rows: int) -> dict[str, np.ndarray]:
        """The bundle's arrays trace/NAME of the first ``rows`` positions. RuntimeError: one of them was never told."""
        for name, told in self._told.items():
            if not told[:rows].all():
                raise RuntimeError(f"trace: {name} has no row {int(np.argmin(told[:rows]))} of {rows}")
        return {f"trace/{name}": array[:rows] for name, array in self.arrays.items()}

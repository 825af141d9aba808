"""Reads the tensors of a trace from the device, pass by pass, as the engine's kernels left them.

Where the engine has no array of its own for one, this is where it comes from: ``kv_latent`` and ``k_rope`` are read
from the cache rows that the pass wrote; ``q`` of a model without a query latent and ``q_rope`` are columns of wider
arrays; ``attn_out``, ``moe_out`` and ``mlp_out``, which the engine adds to the residual stream in the same kernel that
makes them, are made by that kernel once more, from the same inputs, with a residual of −0 or none.
"""

import numpy as np

from kdtr_cli.engine.devices import DeviceArray
from kdtr_cli.engine.transformer import Observe, Rows, Transformer, TreeRows
from kdtr_cli.model.traces import Trace, trace_tensors

__all__ = ["Recorder", "watching"]


class Recorder:
    """Watches passes of one model; after each pass `keep` gives rows of it to traces.

    Passes that are watched are not captured: every tensor is read when it has been made.
    """

    def __init__(self, model: Transformer, level: str) -> None:
        self.model, self.level = model, level
        self._widths = {t.name: t.width for t in trace_tensors(model.config, level)}
        shape = (model.rows, model.config.hidden_size)
        self._out = model.device.alloc("trace.out", shape, np.float32)
        # −0 + x is x, whatever x is
        self._none = model.device.upload("trace.none", np.full(shape, -0.0, np.float32)) if level == "full" else None
        self._pass: dict[str, np.ndarray] = {}
        self._slots = self._places = np.zeros(0, np.int32)
        self._rows = 0

    def trace(self, rows: int) -> Trace:
        """An empty trace of at most this many rows."""
        return Trace(self.model.config, self.level, rows)

    def watch(self, rows: Rows, tree: TreeRows | None = None) -> Observe:
        """The observer of the next pass, which must feed these rows."""
        read = self.model.device.read
        self._pass, self._rows = {}, rows.tokens.size
        self._slots = read(rows.slots)[: self._rows]
        self._places = read(rows.positions if tree is None else tree.places)[: self._rows]
        return self._observe

    def keep(self, trace: Trace, rows: np.ndarray, first: int) -> None:
        """Give rows [n] of the last pass to a trace, as its positions first .. first + n - 1."""
        positions = first + np.arange(len(rows))
        for name, values in self._pass.items():
            trace.put(name, positions, values[rows])

    def _observe(self, name: str, array: DeviceArray) -> None:
        if name in self._widths:
            self._read(name, array)
        if self.level != "full" or not name.startswith("model.layers."):
            return
        i, part = int(name.split(".")[2]), name.split(".", 3)[3]
        if part == "self_attn.values":
            self._attention(i, f"model.layers.{i}.self_attn.")
        elif part == "mlp.expert_weights":
            ids = self.model.ids
            self._read(f"model.layers.{i}.mlp.expert_ids", ids.view(i * ids.shape[1], (ids.shape[1],)))
        elif part == "hidden":
            self._mlp(i, f"model.layers.{i}.mlp.")

    def _read(self, name: str, array: DeviceArray) -> None:
        """Keep the first rows of an array, of each its first elements."""
        width, m = array.size // self.model.rows, self._rows
        values = self.model.device.read(array.view(0, (m, width)))
        self._pass[name] = np.ascontiguousarray(values[:, : self._widths[name]])

    def _attention(self, i: int, name: str) -> None:
        model, c, m = self.model, self.model.config, self._rows
        if c.q_lora_rank is None:
            self._read(f"{name}q", model.qkv)
        width, latent = c.latent_dim, c.kv_lora_rank
        rows = [
            model.device.read(model.caches[i].view((int(slot) * model.capacity + int(place)) * width, (width,)))
            for slot, place in zip(self._slots, self._places, strict=True)
        ]
        cached = np.stack(rows)
        self._pass[f"{name}kv_latent"], self._pass[f"{name}k_rope"] = cached[:, :latent], cached[:, latent:]
        query = model.device.read(model.query.view(0, (m, c.num_attention_heads, width)))
        self._pass[f"{name}q_rope"] = query[..., latent:].reshape(m, -1)
        layer = model.weights.layers[i]
        model.launch.matmul(model.values, layer.o, self._out, m, bias=layer.o_bias)
        self._read(f"{name}attn_out", self._out)

    def _mlp(self, i: int, name: str) -> None:
        model, c, layer, m = self.model, self.model.config, self.model.weights.layers[i], self._rows
        if not c.is_moe_layer(i):
            model.launch.matmul(model.mlp_hidden, layer.down, self._out, m)
            self._read(f"{name}mlp_out", self._out)
            return
        model.launch(
            "combine",
            expert=model.items_out,
            weights=model.expert_weights,
            shared=None if layer.down is None else model.shared_out,
            residual=self._none,
            y=self._out,
            rows=m,
            slots=c.num_experts_per_tok,
            n=c.hidden_size,
        )
        self._read(f"{name}moe_out", self._out)


def watching(first: Observe, recorder: Recorder | None, rows: Rows, tree: TreeRows | None = None) -> Observe:
    """An observer that a recorder shares with another one; the other one alone where there is no recorder."""
    if recorder is None:
        return first
    second = recorder.watch(rows, tree)

    def observe(name: str, array: DeviceArray) -> None:
        first(name, array)
        second(name, array)

    return observe

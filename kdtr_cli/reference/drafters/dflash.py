"""The DFlash drafter, tier `exact` (docs/numerics.md rule 21).

A committed position is remembered by its key and value in each draft layer, made once from the target's layer outputs.
A block [root, MASK … MASK] is one pass: its rows see all of the context before it and all of the block.
"""

from dataclasses import dataclass

import numpy as np

from kdtr_cli.model.dflash import Drafter as Checkpoint
from kdtr_cli.model.dflash import draft_rope_table
from kdtr_cli.model.prompts import Prompt
from kdtr_cli.reference.arith import Packed, linear, log_softmax, order, pack, rms_norm, swiglu
from kdtr_cli.reference.attention import rotate, weigh
from kdtr_cli.reference.drafters import Marginals
from kdtr_cli.reference.transformer import Model

__all__ = ["DFlashDrafter"]

f32 = np.float32


@dataclass
class _Context:
    """Keys and values of the committed positions of one sequence, float32 [layers, capacity, kv heads, head_dim]."""

    keys: np.ndarray
    values: np.ndarray
    length: int = 0


class DFlashDrafter:
    """A DFlash checkpoint with the target whose embedding and output head it uses; contexts up to ``positions`` long.

    horizon: L, at most the checkpoint's; a smaller one drafts shorter blocks.
    """

    def __init__(self, checkpoint: Checkpoint, target: Model, horizon: int, positions: int) -> None:
        self.config, self.weights, self.target = checkpoint.config, checkpoint.weights, target
        self.taps = checkpoint.config.target_layer_ids
        self.horizon, self.positions = horizon, positions
        self.cos, self.sin = draft_rope_table(checkpoint.config, positions + horizon + 1)
        self._packed: dict[str, Packed] = {}
        self._contexts: dict[int, _Context] = {}

    def reset(self, slot: int, prompt: Prompt) -> None:
        c = self.config
        shape = (c.num_hidden_layers, self.positions, c.num_key_value_heads, c.head_dim)
        self._contexts[slot] = _Context(np.full(shape, np.nan, f32), np.full(shape, np.nan, f32))

    def extend(self, slot: int, tokens: np.ndarray, features: np.ndarray | None) -> None:
        context = self._contexts[slot]
        here = slice(context.length, context.length + len(tokens))
        with np.errstate(all="ignore"):  # what is not finite comes to the tree's check
            x = self._norm(self._linear(features, "fc"), "hidden_norm")
            for i in range(self.config.num_hidden_layers):
                context.keys[i, here], context.values[i, here] = self._keys_values(x, i, here)
        context.length = here.stop

    def marginals(self, slot: int, start: int, root: int, k: int) -> Marginals:
        logps, ids = self._draft(slot, start, root, k)
        return ids, logps, np.full(self.horizon, ids.shape[1], np.int32)

    def _draft(self, slot: int, start: int, root: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(all="ignore"):  # a value that is not finite is found by the tree's check, not by a warning
            logits = self.logits(slot, start, root)
            # the order is that of the logits: two of them may share a rounded log-probability
            ids = order(logits, k)
            return np.take_along_axis(log_softmax(logits), ids, -1), ids

    def logits(self, slot: int, start: int, root: int) -> np.ndarray:
        """float32 [L, V]: the drafter's logits for positions start + 1 … start + L."""
        c, context = self.config, self._contexts[slot]
        block = np.full(self.horizon + 1, c.mask_token_id, np.int32)
        block[0] = root
        here = slice(start, start + len(block))
        h = self.target.embed(block)
        for i in range(c.num_hidden_layers):
            x = self._norm(h, f"layers.{i}.input_layernorm")
            h = h + self._attention(x, i, here, context.keys[i, :start], context.values[i, :start])
            x = self._norm(h, f"layers.{i}.post_attention_layernorm")
            gate, up = (self._linear(x, f"layers.{i}.mlp.{name}_proj") for name in ("gate", "up"))
            h = h + self._linear(swiglu(gate, up), f"layers.{i}.mlp.down_proj")
        return self.target.logits(self._norm(h, "norm")[1:])

    def _attention(self, x: np.ndarray, layer: int, here: slice, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Attention of the block's rows x over context keys and values [start, kv heads, head_dim] and the block."""
        c = self.config
        own_keys, own_values = self._keys_values(x, layer, here)
        keys, values = np.concatenate([keys, own_keys]), np.concatenate([values, own_values])
        name = f"layers.{layer}.self_attn"
        query = self._heads(self._linear(x, f"{name}.q_proj"), f"{name}.q_norm", here)
        group = c.num_attention_heads // c.num_key_value_heads
        visible = np.full(len(x), len(keys))
        out = [
            weigh(query[:, h * group : (h + 1) * group], keys[:, h], values[:, h], visible, c.head_dim**-0.5)
            for h in range(c.num_key_value_heads)
        ]
        return self._linear(np.concatenate(out, 1).reshape(len(x), -1), f"{name}.o_proj")

    def _keys_values(self, x: np.ndarray, layer: int, here: slice) -> tuple[np.ndarray, np.ndarray]:
        name = f"layers.{layer}.self_attn"
        values = self._linear(x, f"{name}.v_proj").reshape(len(x), -1, self.config.head_dim)
        return self._heads(self._linear(x, f"{name}.k_proj"), f"{name}.k_norm", here), values

    def _heads(self, x: np.ndarray, norm: str, here: slice) -> np.ndarray:
        """x [M, heads * head_dim] as heads, each normalised and rotated for positions ``here``."""
        heads = self._norm(x.reshape(len(x), -1, self.config.head_dim), norm)
        return rotate(heads, self.cos[here, None], self.sin[here, None], interleaved=False)

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        if name not in self._packed:
            self._packed[name] = pack(self.weights[f"{name}.weight"])
        return linear(x, self._packed[name])

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

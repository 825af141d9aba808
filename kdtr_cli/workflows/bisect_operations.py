"""What the engine launches, as operations that can be judged one by one: the table of names, and the sizes of passes
that bring every variant of a kernel to light."""

from collections.abc import Iterator
from dataclasses import dataclass

from kdtr_cli.engine.kernels import embed, expert_matmul, expert_tile, matmul
from kdtr_cli.engine.transformer import Transformer

__all__ = ["OPERATIONS", "Operation", "operations_of", "pass_sizes", "reachable_kernels"]


@dataclass(frozen=True)
class Operation:
    """``tensor``: the observed name that shows its output, without the layer; ``launches``: of how many kernels it is.

    ``blocks``: the layers that have it, "moe", "dense" or all.
    """

    name: str
    tensor: str
    launches: int = 1
    blocks: str = ""


#: In order of execution. Operations of one tensor were launched one after the other and read nothing of each other.
OPERATIONS = (
    Operation("embed", "embed"),
    Operation("input_norm", "input_norm"),
    Operation("qkv_a", "self_attn.qkv_a"),
    Operation("q_norm", "self_attn.q_latent"),
    Operation("q_b", "self_attn.q"),
    Operation("kv_append", "self_attn.query"),
    Operation("w_uk", "self_attn.query"),
    Operation("rope_query", "self_attn.query"),
    Operation("attention", "self_attn.latent_out", 3),
    Operation("w_uv", "self_attn.values"),
    Operation("o", "self_attn.hidden"),
    Operation("post_norm", "post_norm"),
    Operation("router_logits", "mlp.router_logits"),
    Operation("router", "mlp.expert_weights"),
    Operation("group_experts", "mlp.expert_items"),
    Operation("experts_gate_up", "mlp.experts_gate_up"),
    Operation("experts_swiglu", "mlp.experts_swiglu"),
    Operation("experts_down", "mlp.experts_out"),
    Operation("shared_gate_up", "mlp.shared_gate_up"),
    Operation("shared_swiglu", "mlp.shared_swiglu"),
    Operation("shared_down", "mlp.shared_out"),
    Operation("moe_combine", "hidden", blocks="moe"),
    Operation("mlp_gate_up", "mlp.gate_up"),
    Operation("mlp_swiglu", "mlp.swiglu"),
    Operation("mlp_down", "hidden", blocks="dense"),
    Operation("final_norm", "final_norm"),
    Operation("lm_head", "logits"),
    Operation("token_choice", "chosen", 2),
)


def operations_of(tensor: str, moe: bool) -> tuple[Operation, ...]:
    """The operations that a tensor (its name without the layer) shows in a MoE layer or another one."""
    other = "dense" if moe else "moe"
    return tuple(op for op in OPERATIONS if op.tensor == tensor and op.blocks != other)


def reachable_kernels(model: Transformer, rows: int) -> frozenset[str]:
    """The kernels that read weights in a pass of this many rows."""
    kind, weights = model.device.kind, model.weights
    products = {matmul(kind, rows, *m.shape[-2:], m.form) for m in weights.matrices()}
    experts = {expert_matmul(kind, expert_tile(rows), m.shape[-1], m.form) for m in weights.experts()}
    return frozenset({embed(weights.embed.form)} | products | experts)


def pass_sizes(model: Transformer, most: int) -> list[int]:
    """The fewest sizes of passes, at most ``most`` rows each, that launch every variant of every kernel: each set of
    variants at its smallest size. The first is 1, a step of one sequence."""
    return list(_first_of_each(model, most))


def _first_of_each(model: Transformer, most: int) -> Iterator[int]:
    seen: set[frozenset[str]] = set()
    for rows in range(1, most + 1):
        kernels = reachable_kernels(model, rows)
        if kernels not in seen:
            seen.add(kernels)
            yield rows

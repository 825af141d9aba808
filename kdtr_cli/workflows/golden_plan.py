"""What a golden will read, compute and take, before it is made: `kdtr golden --plan`, and its progress bar's scale.

A pass takes rows through all layers. Its time is counted matrix by matrix: ``load`` for each weight that is not kept
(read, dequantised, packed), ``touch`` for each weight used, ``row`` for each weight and row. The rates are measured on
the model's own weights on this machine; the bar takes nominal ones, as only their proportions matter to it.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.tensors import expected_tensors
from kdtr_cli.model.weights import BLOCK_ELEMENTS, Weights, block_rows
from kdtr_cli.reference import exact, float64
from kdtr_cli.workflows.golden_memory import Budget

__all__ = ["NOMINAL", "Costs", "PlanLine", "Rates", "calibrate", "plan_lines", "shown_time"]


@dataclass(frozen=True)
class ArithmeticRates:
    """Seconds for one weight: to load one of a dense matrix and of an expert, to use it once, for each row; and for one
    key of one head and row in attention."""

    load_dense: float
    load_expert: float
    touch: float
    row: float
    key: float


@dataclass(frozen=True)
class Rates:
    """Seconds a weight of the digests, and those of both arithmetics."""

    digest: float
    exact: ArithmeticRates
    float64: ArithmeticRates


NOMINAL = Rates(
    3e-9,
    ArithmeticRates(5e-9, 8e-9, 3e-10, 4e-10, 1e-6),
    ArithmeticRates(4e-9, 7e-9, 3e-10, 5e-11, 2e-7),
)


class Costs:
    """Expected seconds of the parts of a golden.

    ``kept``: bytes of packed weights that stay in memory, None: all. ``main``: the arithmetic that decodes, 'exact' or
    the only one; it is the one that keeps them.
    """

    def __init__(self, config: ModelConfig, rates: Rates, kept: int | None, main: str) -> None:
        self.config, self.rates, self.main = config, rates, main
        self.dense = [0] * config.num_hidden_layers  # weights of a layer outside its routed experts
        self.expert = 0  # of one expert
        self.total = self.head = 0
        for name, shape in expected_tensors(config).items():
            size = int(np.prod(shape))
            self.total += size
            if ".mlp.experts." in name:
                self.expert += size if ".experts.0." in name else 0
            elif name.startswith("model.layers."):
                self.dense[int(name.split(".")[2])] += size
            elif name == "model.embed_tokens.weight":
                self.head = size
        moe = [i for i in range(config.num_hidden_layers) if config.is_moe_layer(i)]
        self.expert //= max(1, len(moe))
        self.read_again = 0.0 if kept is None else max(0.0, 1 - kept / ((8 if main == "float64" else 4) * self.total))

    def touched(self, rows: int) -> float:
        """Experts of a layer that some row is routed to, if routing were even."""
        c = self.config
        return c.n_routed_experts * (1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** rows)

    def loaded(self, i: int, rows: int) -> tuple[float, float]:
        """Weights of layer i that a pass uses: dense, and of experts."""
        return self.dense[i], self.touched(rows) * self.expert if self.config.is_moe_layer(i) else 0.0

    def layer(self, arithmetic: str, i: int, rows: int, context: float, first: bool) -> float:
        """Seconds of layer i for rows that see ``context`` keys each; ``first``: no weight is in memory yet."""
        rates = self.of(arithmetic)
        again = self.again(arithmetic, first)
        dense, experts = self.loaded(i, rows)
        routed = self.expert * self.config.num_experts_per_tok if experts else 0
        seconds = again * (dense * rates.load_dense + experts * rates.load_expert)
        seconds += (dense + experts) * rates.touch + rows * (dense + routed) * rates.row
        return seconds + rows * self.config.num_attention_heads * context * rates.key

    def logits(self, arithmetic: str, rows: int, first: bool) -> float:
        """Seconds of lm_head."""
        rates = self.of(arithmetic)
        again = self.again(arithmetic, first)
        return self.head * (again * rates.load_dense + rates.touch + rows * rates.row)

    def of(self, arithmetic: str) -> ArithmeticRates:
        """Its rates; float32 and bf16 have those of float64, of which they take half or less."""
        return self.rates.exact if arithmetic == "exact" else self.rates.float64

    def again(self, arithmetic: str, first: bool) -> float:
        """The share of the weights that a pass reads."""
        return 1.0 if first or arithmetic != self.main else self.read_again

    def digests(self) -> float:
        """Seconds of reading every weight once."""
        return self.total * self.rates.digest


@dataclass(frozen=True)
class PlanLine:
    """Passes of one kind: how many, rows of one, bytes of weights (as float32) read by all, multiply-adds, seconds."""

    what: str
    passes: int
    rows: int
    read: float
    products: float
    seconds: float


def plan_lines(costs: Costs, budget: Budget, steps: int, bf16: bool = False) -> Iterator[PlanLine]:
    """The passes of all groups, in the order in which they are made; ``bf16``: with the emulated engine's."""
    c = costs.config
    layers = range(c.num_hidden_layers)
    yield PlanLine("digests", 1, 0, 4.0 * costs.total, 0.0, costs.digests())
    main = costs.main
    kinds: dict[str, list[PlanLine]] = {}
    for number, group in enumerate(budget.groups):
        prompt_rows, count = sum(len(p.ids) for p in group), len(group)
        length = prompt_rows / count
        passes = [(f"prompts, {main}", main, 1, prompt_rows, count, length / 2, number == 0)]
        if steps > 1:
            passes.append((f"steps, {main}", main, steps - 1, count, count, length + steps / 2, False))
        rows = prompt_rows + count * (steps - 1)
        for name in (["float64"] if main == "exact" else []) + (["bf16"] if bf16 else []):
            passes.append((f"all tokens, {name}", name, 1, rows, count * steps, (length + steps) / 2, True))
        for what, arithmetic, times, rows, outputs, context, first in passes:
            again = costs.again(arithmetic, first)
            loaded = sum(sum(costs.loaded(i, rows)) for i in layers) + costs.head
            each = sum(costs.dense) + sum(costs.expert * c.num_experts_per_tok for i in layers if c.is_moe_layer(i))
            seconds = sum(costs.layer(arithmetic, i, rows, context, first) for i in layers)
            seconds += costs.logits(arithmetic, outputs, first)
            line = PlanLine(what, times, rows, 4 * again * loaded * times, 0.0, seconds * times)
            products = float(times) * (rows * each + outputs * costs.head)
            kinds.setdefault(what, []).append(PlanLine(what, times, rows, line.read, products, line.seconds))
    for what, lines in kinds.items():
        yield PlanLine(
            what,
            sum(line.passes for line in lines),
            max(line.rows for line in lines),
            sum(line.read for line in lines),
            sum(line.products for line in lines),
            sum(line.seconds for line in lines),
        )


def calibrate(config: ModelConfig, weights: Weights) -> Rates:
    """Measure the rates on some of the model's own weights; a few seconds."""
    shapes = expected_tensors(config)
    matrices = sorted((n for n, s in shapes.items() if len(s) == 2), key=lambda n: -shapes[n][0] * shapes[n][1])
    dense = [n for n in matrices if ".mlp.experts." not in n]
    experts = [n for n in matrices if ".mlp.experts." in n] or dense
    samples = {"dense": dense[len(dense) // 4], "expert": experts[len(experts) // 2]}
    reads, packs = {}, {"exact": {}, "float64": {}}
    blocks = {}
    for kind, name in samples.items():
        last = min(block_rows(shapes[name]), shapes[name][0])
        size = last * shapes[name][1]
        values = weights.rows(name, 0, last)
        reads[kind] = _seconds(lambda n=name, b=last: weights.rows(n, 0, b)) / size
        for label, ops in (("exact", exact), ("float64", float64)):
            packs[label][kind] = _seconds(lambda v=values, o=ops: o.pack(v)) / size
        blocks[kind] = values
    hashed = blocks["dense"].reshape(-1)[:BLOCK_ELEMENTS]
    digest = max(_seconds(lambda: hashlib.sha256(hashed.data)) / hashed.size, *reads.values())
    both = {}
    for label, ops in (("exact", exact), ("float64", float64)):
        touch, row = _product_rates(ops, blocks["dense"])
        load = {kind: reads[kind] + packs[label][kind] for kind in samples}
        both[label] = ArithmeticRates(load["dense"], load["expert"], touch, row, _key_rate(ops, config))
    return Rates(digest, both["exact"], both["float64"])


def shown_time(seconds: float) -> str:
    """Seconds for people: '0.3 s', '112 s', '5.2 min', '3.4 h', '12 d'."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{1 if seconds < 10 * size else 0}f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _product_rates(ops: ModuleType, values: np.ndarray) -> tuple[float, float]:
    """Seconds a weight: of a product whatever the rows, and of each row."""
    packed = ops.pack(values)
    x = np.full((16, values.shape[1]), 0.5, ops.cast(0).dtype)
    one, many = (_seconds(lambda m=m: ops.linear(x[:m], packed)) / values.size for m in (1, 16))
    row = max((many - one) / 15, one / 100)
    return max(one - row, 0.0), row


def _key_rate(ops: ModuleType, c: ModelConfig) -> float:
    keys, heads = 256, c.num_attention_heads
    query = np.full((4, heads, c.latent_dim), 0.5, ops.cast(0).dtype)
    cache = np.full((keys, c.latent_dim), 0.5, query.dtype)
    visible = np.full(4, keys)
    return _seconds(lambda: ops.attend(query, cache, visible, 0.1, c.kv_lora_rank)) / (4 * heads * keys)


def _seconds(work: Callable[[], object]) -> float:
    """The median of three."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return sorted(times)[1]

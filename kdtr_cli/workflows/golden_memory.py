"""What a golden needs in memory, and how its sequences and weights fit under --memory-limit.

The sizes are upper bounds of what the NumPy model holds at once (kdtr_cli.reference): they are sums of array sizes, in
bytes, and a tenth of the limit is left for what the allocator keeps.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from kdtr_cli.errors import InputError
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.prompts import Prompt
from kdtr_cli.model.tensors import expected_tensors
from kdtr_cli.model.traces import trace_bytes
from kdtr_cli.model.weights import BLOCK_ELEMENTS

__all__ = ["BATCH", "Budget", "available", "check_trace", "make_budget", "parse_size", "shown_size"]

BATCH = 32  #: sequences decoded together
_GROUP_TOKENS = 8192  # and their prompts' tokens: bounds memory where no limit is given
_PART = 256  # rows of a part of a pass
_WAVE = 1 << 28  # outputs of single experts (transformer._WAVE_BYTES)
_SCORES = 1 << 24  # attention scores of one tile in float64
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


@dataclass(frozen=True)
class Budget:
    """Sequences that are decoded together, group by group, and the bytes of packed weights to keep (None: all).

    ``working``: what the process holds beside the kept weights, at most.
    """

    groups: list[list[Prompt]]
    weights_limit: int | None
    working: int

    def regrouped(self, sizes: list[int]) -> "Budget":
        """The same prompts in groups of these sizes, as work that goes on has them."""
        prompts = [prompt for group in self.groups for prompt in group]
        edges = [0, *accumulate(sizes)]
        return replace(self, groups=[prompts[a:b] for a, b in pairwise(edges)])


def parse_size(text: str) -> int:
    """Bytes of '8G', '512M', '2.5GiB', '1000000'; K, M, G, T are powers of 1000, Ki, Mi, Gi, Ti of 1024."""
    m = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]i?)?b?\s*", text.lower())
    if not m:
        raise InputError(f"--memory-limit {text!r}: a size such as 8G, 512M or 2.5GiB")
    return int(float(m[1]) * _UNITS[m[2] or ""])


def shown_size(size: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def make_budget(
    limit: int | None,
    config: ModelConfig,
    prompts: list[Prompt],
    steps: int,
    *,
    score: bool,
    exact: bool,
    trace: str | None = None,
    bf16: bool = False,
) -> Budget:
    """Groups and kept weights under ``limit`` bytes for the whole process (None: as much as it takes).

    InputError where not even one sequence fits. As many sequences as fit into half of the memory go together, as every
    group reads the weights that are not kept once more; what is left keeps weights.
    """
    fixed = _resident() + _pass_bytes(config, max(len(p.ids) for p in prompts) + steps)

    def size(prompt: Prompt) -> int:
        # a trace is held until its group ends
        traced = (len(prompt.ids) + steps) * trace_bytes(config, trace, 4 if exact else 8)
        return _sequence_bytes(config, len(prompt.ids), steps, score, exact, bf16) + traced

    if limit is None:
        # without exact the count alone decides: the last bits of float64 depend on who decodes together
        groups = _split(prompts, lambda p: len(p.ids), _GROUP_TOKENS if exact else None, BATCH)
        return Budget(groups, None, fixed + max(sum(map(size, group)) for group in groups))
    usable = limit * 9 // 10 - fixed
    groups = _split(prompts, size, usable // 2) if exact else _split(prompts, size, None, BATCH)
    largest = max(sum(map(size, group)) for group in groups)
    if largest > usable:
        need, always = shown_size((fixed + largest) * 10 // 9 + 5 * 10**6), shown_size(fixed * 10 // 9)
        raise InputError(
            f"--memory-limit {shown_size(limit)}: {'a sequence' if exact else 'a group of sequences'} of this model "
            f"needs about {need} ({always} whatever the sequence); give more, or fewer --steps, or shorter prompts"
        )
    return Budget(groups, usable - largest, fixed + largest)


def available() -> int | None:
    """Bytes of memory that new work can have on this machine, where it says so."""
    try:
        with open("/proc/meminfo") as file:
            return int(re.search(r"MemAvailable:\s+(\d+)", file.read())[1]) * 1024
    except (OSError, TypeError):
        return None


def check_trace(config: ModelConfig, level: str | None, rows: int, itemsize: int = 4) -> int:
    """Bytes of a trace of this many positions, held until it is written; InputError where they are not free."""
    size, free = rows * trace_bytes(config, level, itemsize), available()
    if free is not None and size > free:
        raise InputError(
            f"--trace {level}: {rows} positions of this model take {shown_size(size)} of memory, and "
            f"{shown_size(free)} are free; trace fewer prompts or --steps, or --trace layers"
        )
    return size


def _split(
    prompts: list[Prompt], size: Callable[[Prompt], int], limit: int | None, count: int | None = None
) -> list[list[Prompt]]:
    """Groups in order, none larger than limit and count unless it is a single prompt."""
    groups: list[list[Prompt]] = []
    filled = 0
    for prompt in prompts:
        own = size(prompt)
        full = not groups or (limit is not None and filled + own > limit) or len(groups[-1]) == count
        if full:
            groups.append([])
            filled = 0
        groups[-1].append(prompt)
        filled += own
    return groups


def _sequence_bytes(c: ModelConfig, prompt: int, steps: int, score: bool, exact: bool, bf16: bool) -> int:
    """What one sequence holds during its group: cache, activations of all its rows, logits."""
    rows, item = prompt + steps, 8
    cache = rows * c.latent_dim * c.num_hidden_layers * (4 if exact else 8)
    heads = c.num_attention_heads
    attention = heads * (c.qk_head_dim + c.v_head_dim) + (c.q_lora_rank or 0) + 2 * c.latent_dim
    mlp = 3 * max(c.intermediate_size, (c.n_shared_experts or 0) * (c.moe_intermediate_size or 0))
    activations = rows * item * (4 * c.hidden_size + c.latent_dim + max(attention, mlp, 2 * (c.n_routed_experts or 0)))
    # exact ones, those in float64, in bf16, and the blocks that they are put together from
    logits = (steps + (prompt if score else 0)) * c.vocab_size * (4 + 2 * item + (8 if bf16 else 0))
    return cache + activations + logits


def _pass_bytes(c: ModelConfig, longest: int) -> int:
    """What a pass holds whatever the number of sequences: one block of weights, one part's attention, one wave."""
    item, rows, heads = 8, min(_PART, longest), c.num_attention_heads
    largest = max(shape[0] * shape[1] for shape in expected_tensors(c).values() if len(shape) == 2)
    kv_b = heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    # as stored, in float32, cut into lanes, packed
    weights = max(min(largest, BLOCK_ELEMENTS), kv_b) * (4 + 4 + 2 * item)
    attention = rows * heads * item * (2 * c.latent_dim + 3 * c.kv_lora_rank + 2 * c.v_head_dim)
    attention += min(rows * heads * longest, max(_SCORES, heads * longest)) * item * 3
    wave = max(_WAVE, rows * (c.num_experts_per_tok or 0) * c.hidden_size * item) if c.n_routed_experts else 0
    wave = min(wave, longest * (c.num_experts_per_tok or 0) * c.hidden_size * item * BATCH)
    return weights + attention + wave


def _resident() -> int:
    """Bytes that the process has now."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:  # no /proc: what Python with NumPy and h5py takes
        return 150 * 10**6

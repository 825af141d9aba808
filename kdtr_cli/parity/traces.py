"""Two traces of one sequence: which tensor parts first, in order of execution, and by how much each is off.

The prompt is one step, as it is fed in one pass (or in pieces, which changes nothing), and every token after it is one
more. The first tensor that parts is the first in order of execution among those of the first step where any parts:
nothing that it was made from differs, so the fault lies between it and the tensor before it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kdtr_cli.parity.evidence import Tensor
from kdtr_cli.parity.metrics import abs_difference, equal_rows, ulp_distance
from kdtr_cli.parity.tolerances import Tolerance

__all__ = ["Masks", "TensorResult", "TraceResult", "compare_traces", "step_of"]

_BLOCK_VALUES = 1 << 19


@dataclass(frozen=True)
class TensorResult:
    """One tensor: of `rows` compared rows `rows_identical` are equal bit for bit, `rows_out` out of tolerance.

    layer: None where it is of none. max_abs, nmse (squared error over the golden's squares): None for integers;
    `nan` where a value is not finite. first_row: the first row (position) that is out of tolerance, else the first that
    is not identical. decides: a bound holds for this tensor (tolerance 0, or a rule of its own), else a row that is out
    is a warning.
    """

    name: str
    layer: int | None
    rows: int
    rows_identical: int
    rows_out: int
    max_abs: float | None
    nmse: float | None
    first_row: int | None
    decides: bool = True

    @property
    def kind(self) -> str:
        """The name without its layer."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class TraceResult:
    """`tensors` in order of execution; `first`: the first that is out of tolerance, as the module's text says. `hint`:
    a code of `hints.HINTS`, `message` one sentence. `step`: the output step that the first row belongs to, 0 for the
    prompt. `only_golden` and `only_run`: tensors that one side alone has. Of `compared` tensors `identical` ones are
    equal bit for bit; the report of a sweep has fewer in `tensors`."""

    tensors: tuple[TensorResult, ...]
    first: TensorResult | None = None
    hint: str | None = None
    message: str | None = None
    step: int | None = None
    only_golden: tuple[str, ...] = ()
    only_run: tuple[str, ...] = ()
    golden_nonfinite: str | None = None
    compared: int = 0
    identical: int = 0

    @property
    def all_bits(self) -> bool:
        """Whether every row of every compared tensor is equal bit for bit."""
        return self.identical == self.compared

    @property
    def fails(self) -> bool:
        """Whether a tensor is out of a bound that holds for it."""
        return any(t.rows_out and t.decides for t in self.tensors)


@dataclass(frozen=True, eq=False)
class Masks:
    """Which rows of each tensor are out, bool [rows] by name; what is not there has none."""

    rows: int
    out: Mapping[str, np.ndarray]

    def of(self, name: str) -> np.ndarray:
        packed = self.out.get(name)
        if packed is None:
            return np.zeros(self.rows, bool)
        return np.unpackbits(packed, count=self.rows).astype(bool)


def step_of(row: int, prompt: int) -> int:
    """The step that a row is fed in: 0 for the prompt's, then one a token. It makes that output token."""
    return max(0, row - prompt + 1)


def compare_traces(
    golden: Mapping[str, Tensor],
    run: Mapping[str, Tensor],
    rows: int,
    prompt: int,
    tolerance: Callable[[str], tuple[Tolerance, bool]],
) -> tuple[TraceResult, Masks]:
    """Compare the first `rows` rows of the tensors that both sides have, in the golden's order, which is that of
    execution. `tolerance`: the bounds of a tensor by its name, and whether they decide."""
    results, masks = [], {}
    nonfinite = None
    for name, g in golden.items():
        if name not in run:
            continue
        bounds, decides = tolerance(name)
        result, out, finite = _compare(name, g, run[name], min(rows, g.n_rows, run[name].n_rows), bounds, decides)
        results.append(result)
        nonfinite = nonfinite or (None if finite else name)
        if result.rows_out:
            masks[name] = np.packbits(out)
    parted = [t for t in results if t.rows_out]
    # min is stable: of the earliest step the first in order of execution
    first = min(parted, key=lambda t: step_of(t.first_row, prompt), default=None)
    found = TraceResult(
        tuple(results),
        first,
        step=None if first is None else step_of(first.first_row, prompt),
        only_golden=tuple(n for n in golden if n not in run),
        only_run=tuple(n for n in run if n not in golden),
        golden_nonfinite=nonfinite,
        compared=len(results),
        identical=sum(t.rows_identical == t.rows for t in results),
    )
    return found, Masks(rows, masks)


def _compare(
    name: str, golden: Tensor, run: Tensor, rows: int, tolerance: Tolerance, decides: bool
) -> tuple[TensorResult, np.ndarray, bool]:
    """The result, which rows are out, and whether the golden is finite."""
    alike = (golden.n_rows, golden.width, golden.dtype) == (run.n_rows, run.width, run.dtype)
    equal_digests = alike and golden.digest and run.digest and golden.digest() == run.digest()
    same, out = np.zeros(rows, bool), np.zeros(rows, bool)
    worst, error, square, finite = 0.0, 0.0, 0.0, True
    step = max(1, _BLOCK_VALUES // max(1, golden.width))
    for lo in range(0, rows, step):
        hi = min(lo + step, rows)
        g = golden.rows(lo, hi)
        r = g if equal_digests else run.rows(lo, hi)
        finite = finite and bool(np.isfinite(g).all())
        equal = equal_rows(r, g) if r.dtype == g.dtype else np.zeros(hi - lo, bool)
        same[lo:hi] = equal
        if g.dtype.kind == "i":
            out[lo:hi] = ~equal
            continue
        difference = abs_difference(r, g)
        worst = max(worst, float(difference.max(initial=0.0)), key=lambda x: math.inf if math.isnan(x) else x)
        with np.errstate(invalid="ignore", over="ignore"):
            error += float(np.square(difference).sum())
            square += float(np.square(g.astype(np.float64)).sum())
        out[lo:hi] = ~equal & ~_within(r, g, difference, tolerance).all(axis=1)
    nmse = error / square if square else 0.0 if error == 0 else math.inf
    figures = (None, None) if golden.dtype.kind == "i" else (worst, nmse)
    first = next((int(np.argmax(mask)) for mask in (out, ~same) if mask.any()), None)
    layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
    counts = int(same.sum()), int(out.sum())
    return TensorResult(name, layer, rows, *counts, *figures, first, decides), out, finite


def _within(run: np.ndarray, golden: np.ndarray, difference: np.ndarray, tolerance: Tolerance) -> np.ndarray:
    if not tolerance.has_values:  # nothing bounds a single value; one that is not finite is still out
        return np.isfinite(difference)
    ulps = None if tolerance.max_ulp is None else ulp_distance(run, golden, run.dtype)
    return tolerance.values_within(difference, golden, ulps)

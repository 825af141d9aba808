"""A close look at one step: margins, both tokens' logits, the top five, and whether it is a tie."""

import numpy as np

from kdtr_cli.parity.evidence import Logits
from kdtr_cli.parity.metrics import top_k
from kdtr_cli.parity.results import StepDetail
from kdtr_cli.parity.tolerances import Tolerance

__all__ = ["describe_step", "is_tie"]

TOP = 5


def is_tie(golden: Logits | None, step: int, token: int, tolerance: Tolerance, dtype: np.dtype) -> bool:
    """Whether the golden's logit of `token` is within tolerance of the row's maximum (`dtype`: the type the run stores,
    for ULPs). False where it is not shown: no values, or the token is outside the top K. Without a bound on single
    values (KL alone) only an equal logit ties."""
    if golden is None:
        return False
    ids, values = _row(golden, step)
    at = np.flatnonzero(ids == token)
    if len(at) == 0 or not np.isfinite(values).all():
        return False
    candidate, largest = values[at[:1]], values.max(keepdims=True)
    if not tolerance.has_values:
        return bool(candidate[0] == largest[0])
    return bool(tolerance.values_pass(candidate, largest, dtype)[0])


def describe_step(
    golden: Logits | None,
    run: Logits | None,
    step: int,
    golden_token: int | None,
    run_token: int | None,
    *,
    recorded_tie: bool = False,
    tolerance: Tolerance | None = None,
) -> StepDetail:
    """What both sides say at `step`. Without `tolerance` no tie is looked for."""
    g_ids, g_values = _row(golden, step)
    r_ids, r_values = _row(run, step)
    g_top, r_top = _top(g_ids, g_values), _top(r_ids, r_values)
    tokens = (golden_token, run_token)
    tie = (
        tolerance is not None
        and golden is not None
        and run_token is not None
        and is_tie(golden, step, run_token, tolerance, golden.dtype if run is None else run.dtype)
    )
    return StepDetail(
        step=step,
        golden_token=golden_token,
        run_token=run_token,
        golden_margin=_margin(g_top),
        run_margin=_margin(r_top),
        golden_logits=tuple(_logit(g_ids, g_values, t) for t in tokens),
        run_logits=tuple(_logit(r_ids, r_values, t) for t in tokens),
        golden_top=g_top,
        run_top=r_top,
        tie=tie,
        recorded_tie=recorded_tie,
        own_argmax=r_top[0][0] == run_token if r_top and run_token is not None else None,
    )


def _row(logits: Logits | None, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and values of one row, as far as they are held; empty where they are not."""
    if logits is not None and step < logits.n_rows:
        if logits.rows is not None:
            values = logits.rows(step, step + 1)[0]
            return np.arange(len(values)), values
        if logits.top_ids is not None and logits.top_values is not None:
            ids, values = logits.top_ids(step, step + 1)[0], logits.top_values(step, step + 1)[0]
            if logits.top_counts is not None:
                count = int(logits.top_counts(step, step + 1)[0])
                ids, values = ids[:count], values[:count]
            order = np.argsort(ids)  # so that equal values come in the order of their ids
            return ids[order], values[order]
    return np.empty(0, np.int64), np.empty(0)


def _top(ids: np.ndarray, values: np.ndarray) -> tuple[tuple[int, float], ...]:
    places, top = top_k(values, TOP) if len(values) else (np.empty(0, np.int64), np.empty(0))
    return tuple((int(ids[p]), float(v)) for p, v in zip(places, top, strict=True))


def _margin(top: tuple[tuple[int, float], ...]) -> float | None:
    return top[0][1] - top[1][1] if len(top) > 1 else None


def _logit(ids: np.ndarray, values: np.ndarray, token: int | None) -> float | None:
    at = np.flatnonzero(ids == token) if token is not None else ()
    return float(values[at[0]]) if len(at) else None

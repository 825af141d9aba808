"""What the page's script draws from, as plain values for JSON: arrays are base64 of little-endian bytes.

The size is bounded: so many sequences, so many entries a curve, so many nodes of trees.
"""

import base64
from collections.abc import Callable, Mapping

import numpy as np

from kdtr_cli.parity.results import Report, RoundsResult, SequenceResult
from kdtr_cli.parity.tally import LogitsResult
from kdtr_cli.parity.traces import TraceResult
from kdtr_cli.report.series import MAX_ENTRIES, Series, pooled, series_of
from kdtr_cli.report.steps import marks
from kdtr_cli.report.visible import visible

__all__ = ["MAX_NODES", "MAX_TEXTS", "TextOf", "bfloat16_codes", "payload"]

#: Text of a token id, None where there is none.
TextOf = Callable[[int], str | None]

#: Nodes of all trees of a page, and tokens that are shown as text.
MAX_NODES = 60_000
MAX_TEXTS = 8_000
_MAX_TEXT = 24


def payload(report: Report, shown: list[SequenceResult], text_of: TextOf | None) -> dict[str, object]:
    """All that is drawn of the sequences `shown`."""
    nodes = MAX_NODES // max(1, len(shown))
    sequences = [_sequence(result, report.teacher_forced, nodes) for result in shown]
    return {"sequences": sequences, "texts": {} if text_of is None else _texts(shown, text_of)}


def _sequence(result: SequenceResult, teacher_forced: bool, nodes: int) -> dict[str, object]:
    state = marks(result, teacher_forced)
    series = series_of(result.logits.curves, result.logits.rows_compared)
    # one scale of steps for all pictures of a sequence
    per = max(-(-len(state) // MAX_ENTRIES), 1) if series is None else series.per
    run = np.empty(0, np.int32) if result.run_tokens is None else result.run_tokens
    return {
        "index": result.index,
        "steps": len(state),
        "per": per,
        "marks": _packed(pooled(state, per, np.maximum), "u1"),
        "divergence": None if result.divergence is None else result.divergence.step,
        "golden": _packed(result.golden_tokens, "<i4") if per == 1 else None,
        "run": _packed(run, "<i4") if per == 1 else None,
        "prompt": _prompt(result.prompt_logits),
        "trace": _trace(result.trace),
        "rounds": None if result.rounds is None else _rounds(result.rounds, nodes),
        "full": result.logits.form == "full",
        "left_out": result.logits.curves is None and result.logits.rows_compared > 0,
    } | _curves(series)


def _curves(series: Series | None) -> dict[str, object]:
    if series is None:
        return {"curves": None, "blocks": None}
    names = ("max_abs", "max_ulp", "kl", "golden_margin", "run_margin")
    wide = series.blocks.shape[1] > 0
    return {
        "curves": {name: _packed(getattr(series, name), "<f4") for name in names},
        "blocks": {
            "count": series.blocks.shape[1],
            "size": series.block_size,
            "values": _packed(bfloat16_codes(series.blocks), "<u2"),
        }
        if wide
        else None,
    }


def _prompt(result: LogitsResult | None) -> dict[str, object] | None:
    """The logits of the prompt, drawn by position."""
    series = None if result is None else series_of(result.curves, result.rows_compared)
    return (
        None
        if series is None
        else {"steps": series.rows, "per": series.per, "full": result.form == "full", **_curves(series)}
    )


def _trace(trace: TraceResult | None) -> list[dict[str, object]] | None:
    if trace is None or not trace.tensors:
        return None
    return [
        {
            "name": visible(t.name, 120),
            "layer": t.layer,
            "error": None if t.max_abs is None else _number(t.max_abs),
            "state": "same" if t.rows_identical == t.rows else "out" if t.rows_out else "within",
            "first": t is trace.first,
        }
        for t in trace.tensors
    ]


def _number(value: float) -> float | str:
    return float(value) if np.isfinite(value) else str(float(value))


def _rounds(result: RoundsResult, nodes: int) -> dict[str, object] | None:
    golden, run = result.golden_arrays, result.run_arrays
    first = result.first_difference or result.first_open
    sides = [_cut(a, nodes, None if first is None else first.round) for a in (golden, run) if a is not None]
    if not sides or not any(len(side["start"]) for side in sides):
        return None
    same = golden is not None and run is not None and all(np.array_equal(golden[k], run[k]) for k in golden)
    return {
        "golden": None if golden is None else sides[0],
        "run": None if run is None or same else sides[-1],
        "same": same,
        "compared": result.compared,
        "difference": None if first is None else {"round": first.round, "where": visible(first.where, 400)},
    }


def _cut(arrays: Mapping[str, np.ndarray], nodes: int, wanted: int | None) -> dict[str, object]:
    """Rounds from `from` on, one after another, of at most `nodes` nodes (but three rounds at least), `wanted` among
    them."""
    ends = np.cumsum(arrays["n_nodes"], dtype=np.int64)
    total = len(ends)
    start = 0
    if wanted is not None and total and ends[min(wanted, total - 1)] > nodes:
        start = max(0, min(wanted, total - 1) - 2)
    node = int(ends[start - 1]) if start else 0
    stop = max(int(np.searchsorted(ends, node + nodes, side="right")), min(start + 3, total))
    last = int(ends[stop - 1]) if stop else 0
    taken = np.cumsum(arrays["n_accepted"], dtype=np.int64)
    lo, hi = (int(taken[i - 1]) if i else 0 for i in (start, stop))
    each = {k: arrays[k][start:stop].tolist() for k in ("start", "root", "bonus", "n_nodes", "n_accepted")}
    return each | {
        "from": start,
        "total": total,
        "tokens": _packed(arrays["tokens"][node:last], "<i4"),
        "parents": _packed(arrays["parents"][node:last], "<i4"),
        "scores": _packed(arrays["scores"][node:last], "<f4"),
        "accepted": _packed(arrays["accepted"][lo:hi], "<i4"),
    }


def _texts(shown: list[SequenceResult], text_of: TextOf) -> dict[str, str]:
    """Text of the tokens that the pictures name, the earliest sequences' first."""
    texts: dict[str, str] = {}
    for result in shown:
        ids = [*result.golden_tokens.tolist(), *([] if result.run_tokens is None else result.run_tokens.tolist())]
        for arrays in () if result.rounds is None else (result.rounds.golden_arrays, result.rounds.run_arrays):
            ids += [] if arrays is None else [int(i) for k in ("root", "tokens", "bonus") for i in arrays[k]]
        for token in dict.fromkeys(ids):
            if len(texts) >= MAX_TEXTS:
                return texts
            if str(token) not in texts and (text := text_of(token)) is not None:
                texts[str(token)] = visible(text, _MAX_TEXT)
    return texts


def bfloat16_codes(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16, the nearest bfloat16 (three digits are enough for a colour); NaN stays NaN, and what is not
    zero does not become zero."""
    single = np.ascontiguousarray(values, np.float32)
    bits = single.view(np.uint32)
    codes = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    codes[np.isnan(single)] = 0x7FC0
    codes[(codes & 0x7FFF == 0) & (single != 0)] = 1
    return codes


def _packed(values: np.ndarray, dtype: str) -> str:
    with np.errstate(over="ignore"):  # what float32 can't hold is infinite
        return base64.b64encode(np.ascontiguousarray(values).astype(dtype).tobytes()).decode()

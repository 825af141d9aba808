"""Logits that one side alone holds: nothing to compare them with, but a value that is not finite never passes."""

import numpy as np

from kdtr_cli.parity.evidence import EvidenceSequence, Logits
from kdtr_cli.parity.findings import SequenceFindings
from kdtr_cli.parity.verdicts import Verdict

__all__ = ["judge_alone"]

#: Values that are looked at together.
BLOCK_VALUES = 1 << 19


def judge_alone(
    findings: SequenceFindings,
    golden: EvidenceSequence,
    run: EvidenceSequence | None,
    names: tuple[str, str],
    steps: int | None,
) -> None:
    """Look through the logits and prompt logits that only one of the two has, under its name of `names`: in a golden a
    value that is not finite is INVALID, in a run DIVERGED. `steps` cuts the logits of steps to the judged part."""
    for what, name, row in (("logits", "logits", "step"), ("prompt_logits", "prompt logits", "position")):
        g = getattr(golden, what).get(names[0])
        r = None if run is None else getattr(run, what).get(names[1])
        if (g is None) == (r is None):
            continue
        side, held = ("golden", g) if r is None else ("run", r)
        limit = held.n_rows if steps is None or what == "prompt_logits" else min(steps, held.n_rows)
        found = _first_nonfinite(held, limit)
        if found is None:
            continue
        place, token, value = found
        code, verdict = ("golden_nonfinite", Verdict.INVALID) if side == "golden" else ("nonfinite", Verdict.DIVERGED)
        message = f"the {side}'s {name} are not finite, first at {row} {place}, id {token}: {value}"
        findings.add(f"{what}.{code}", message, verdict, step=place, token=token, **{side: value})


def _first_nonfinite(logits: Logits, n_rows: int) -> tuple[int, int, float] | None:
    """Row, id and value of the first that is not finite; None: there is none, or only digests are held."""
    values = logits.rows if logits.rows is not None else logits.top_values
    if values is None:
        return None
    step = max(1, BLOCK_VALUES // max(1, logits.vocab if logits.rows is not None else logits.k))
    for lo in range(0, n_rows, step):
        hi = min(lo + step, n_rows)
        block = values(lo, hi)
        bad = ~np.isfinite(block)
        if bad.any():
            row, at = (int(i) for i in np.argwhere(bad)[0])
            token = at if logits.rows is not None else int(logits.top_ids(lo, hi)[row, at])
            return lo + row, token, float(block[row, at])
    return None

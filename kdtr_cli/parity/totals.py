"""Adding up what the sequences say. Counts are sums, extremes are the worst of all; NaN is the worst there is."""

import math
from collections.abc import Iterable, Sequence

from kdtr_cli.parity.evidence import EvidenceSequence
from kdtr_cli.parity.results import SequenceResult, Totals
from kdtr_cli.parity.tally import LogitsResult
from kdtr_cli.parity.verdicts import Verdict

__all__ = ["sum_up"]


def sum_up(results: Sequence[SequenceResult], golden: Sequence[EvidenceSequence], n_extra: int = 0) -> Totals:
    """The totals of the judged sequences, of those that the golden has, and of `n_extra` that only the run has."""
    met = [r for r in results if r.run_tokens is not None]
    every = [part for r in met for part in (r.logits, r.prompt_logits) if part is not None]
    parted = next((r for r in results if r.divergence is not None), None)
    missing = len(results) - len(met)
    fault = next(((r.index, p.row) for r in met if (p := r.logits.first_fault) is not None), None)
    rounds = [(r.index, r.rounds) for r in results if r.rounds is not None and r.rounds.compared]
    prompts = [r.prompt_logits for r in met if r.prompt_logits is not None]
    return Totals(
        tokens_equal=sum(r.tokens_equal for r in results),
        tokens=sum(len(r.golden_tokens) for r in results),
        exact=bool(results) and not n_extra and all(r.all_tokens for r in results),
        steps=sum(len(r.golden_tokens) for r in results),
        steps_available=sum(r.golden_length for r in results),
        sequences=len(results),
        sequences_available=len(golden),
        missing=missing,
        extra=n_extra,
        rows=sum(r.logits.rows_total for r in results),
        rows_compared=sum(r.logits.rows_compared for r in met),
        rows_identical=sum(r.logits.rows_identical for r in met),
        rows_out=sum(r.logits.rows_out for r in met),
        values_compared=sum(part.values_compared for part in every),
        values_out=sum(part.values_out for part in every),
        max_abs=_worst(part.max_abs for part in every),
        max_ulp=_worst(part.max_ulp for part in every),
        max_kl=_worst(part.max_kl for part in every),
        first_divergence=None if parted is None else (parted.index, parted.divergence.step),
        margin=None if parted is None else parted.divergence.golden_margin,
        first_logit_failure=fault,
        logits=_poorest(r.logits for r in met if r.logits.rows_total),
        prompt_logits=_poorest(prompts) if prompts else None,
        rounds_judged=sum(one.judged for _, one in rounds),
        rounds_equal=sum(one.equal for _, one in rounds),
        first_round_difference=next(
            ((i, d.round) for i, one in rounds if (d := one.first_difference) is not None), None
        ),
        verdicts={v.value: n for v in Verdict if (n := sum(r.verdict is v for r in results))},
    )


def _worst(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    if any(math.isnan(v) for v in known):
        return math.nan
    return max(known, default=None)


def _poorest(parts: Iterable[LogitsResult]) -> str:
    """The poorest form that was compared: none, digest, the smallest top K, full."""
    forms = {part.form for part in parts}
    tops = sorted((form for form in forms if form.startswith("top")), key=lambda form: int(form[3:]))
    return next((form for form in ("none", "digest", *tops) if form in forms), "full" if forms else "none")

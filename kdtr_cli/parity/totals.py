"""Adding up what the sequences say. Counts are sums, extremes are the worst of all; NaN is the worst there is."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce

from kdtr_cli.parity.distribution import merged
from kdtr_cli.parity.evidence import EvidenceSequence
from kdtr_cli.parity.ranks import TOP_KS
from kdtr_cli.parity.results import SequenceResult, Totals
from kdtr_cli.parity.tally import TopAgreement
from kdtr_cli.parity.verdicts import Verdict

__all__ = ["add_totals", "logits_forms", "poorest", "sum_up"]


def sum_up(results: Sequence[SequenceResult], golden: Sequence[EvidenceSequence], n_extra: int = 0) -> Totals:
    """The totals of the judged sequences, of those that the golden has, and of `n_extra` that only the run has."""
    met = [r for r in results if r.run_tokens is not None]
    every = [part for r in met for part in (r.logits, r.prompt_logits) if part is not None]
    parted = next((r for r in results if r.divergence is not None), None)
    missing = len(results) - len(met)
    fault = next(((r.index, p.row) for r in met if (p := r.logits.first_fault) is not None), None)
    rounds = [(r.index, r.rounds) for r in results if r.rounds is not None and r.rounds.compared]
    forms, prompt_forms = logits_forms(results)
    kl = reduce(merged, (part.kl for part in every), None)
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
        logits=poorest(forms),
        prompt_logits=poorest(prompt_forms) if prompt_forms else None,
        rounds_judged=sum(one.judged for _, one in rounds),
        rounds_equal=sum(one.equal for _, one in rounds),
        first_round_difference=next(
            ((i, d.round) for i, one in rounds if (d := one.first_difference) is not None), None
        ),
        verdicts={v.value: n for v in Verdict if (n := sum(r.verdict is v for r in results))},
        first_tensor=next(
            ((r.index, t.first_row, t.name) for r in met if r.trace is not None and (t := r.trace.first) is not None),
            None,
        ),
        mean_kl=None if kl is None else kl.mean,
        p99_kl=None if kl is None else kl.percentile(99),
        top=_together(part.top for part in every),
        min_golden_margin=min((m for part in every if (m := part.min_golden_margin) is not None), default=None),
        min_run_margin=min((m for part in every if (m := part.min_run_margin) is not None), default=None),
        rows_shifted=sum(part.rows_shifted for part in every),
        kl=kl,
        max_share=_worst(part.max_share for part in every),
    )


def add_totals(one: Totals, other: Totals, first: int, begun: bool = True) -> Totals:
    """The totals of two parts together; the other's sequences begin at place ``first`` of the whole. The two forms of
    logits are the other's: they follow from all sequences (`logits_forms`). Not ``begun``: one is of nothing yet."""
    sums = {name: getattr(one, name) + getattr(other, name) for name in _SUMS}
    worst = {name: _worst([getattr(one, name), getattr(other, name)]) for name in _EXTREMES}
    places = {}
    for name in ("first_divergence", "first_logit_failure", "first_round_difference", "first_tensor"):
        place = getattr(other, name)
        moved = None if place is None else (place[0] + first, *place[1:])
        places[name] = moved if getattr(one, name) is None else getattr(one, name)
    verdicts = {v.value: n for v in Verdict if (n := one.verdicts.get(v.value, 0) + other.verdicts.get(v.value, 0))}
    kl = merged(one.kl, other.kl)
    margins = {
        name: min((m for t in (one, other) if (m := getattr(t, name)) is not None), default=None)
        for name in ("min_golden_margin", "min_run_margin")
    }
    return replace(
        other,
        **sums,
        **worst,
        **places,
        exact=other.exact and (one.exact or not begun),
        margin=other.margin if one.first_divergence is None else one.margin,
        verdicts=verdicts,
        **margins,
        kl=kl,
        mean_kl=None if kl is None else kl.mean,
        p99_kl=None if kl is None else kl.percentile(99),
        top=_together((one.top, other.top)),
    )


_EXTREMES = ("max_abs", "max_ulp", "max_kl", "max_share")

_SUMS = (
    "tokens_equal",
    "tokens",
    "steps",
    "steps_available",
    "sequences",
    "sequences_available",
    "missing",
    "extra",
    "rows",
    "rows_compared",
    "rows_identical",
    "rows_out",
    "values_compared",
    "values_out",
    "rounds_judged",
    "rounds_equal",
    "rows_shifted",
)


def _together(parts: Iterable[tuple[TopAgreement, ...]]) -> tuple[TopAgreement, ...]:
    """The agreement of parts, each with the same k in the same order, as a whole."""
    whole = tuple(TopAgreement(k) for k in TOP_KS)
    for part in parts:
        whole = tuple(
            TopAgreement(a.k, a.rows + b.rows, a.equal + b.equal, a.ids + b.ids, a.shared + b.shared)
            for a, b in zip(whole, part, strict=True)
        )
    return whole


def logits_forms(results: Sequence[SequenceResult]) -> tuple[set[str], set[str]]:
    """The forms in which logits were compared, and prompt logits, in sequences that both sides have."""
    met = [r for r in results if r.run_tokens is not None]
    logits = {r.logits.form for r in met if r.logits.rows_total}
    return logits, {r.prompt_logits.form for r in met if r.prompt_logits is not None}


def _worst(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    if any(math.isnan(v) for v in known):
        return math.nan
    return max(known, default=None)


def poorest(forms: set[str]) -> str:
    """The poorest form that was compared: none, digest, the smallest top K, full."""
    tops = sorted((form for form in forms if form.startswith("top")), key=lambda form: int(form[3:]))
    return next((form for form in ("none", "digest", *tops) if form in forms), "full" if forms else "none")

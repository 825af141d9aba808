"""`kdtr diff --suggest`: the tightest tolerance that a run passes, each rule by itself, and what else would pass it.

It changes no verdict. Where no tolerance can make a run pass (other tokens, a NaN, something missing), there is none to
suggest, and the first such fault is named instead.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kdtr_cli.parity.baselines import BASELINES
from kdtr_cli.parity.needs import RTOLS, Needed, RuleNeeds, least_of, most_of
from kdtr_cli.parity.tally import LogitsResult
from kdtr_cli.parity.verdicts import Finding, Verdict

__all__ = ["SuggestedRule", "Suggestion", "add_suggestions", "suggest"]

#: What a tolerance can mend.
_MENDED = ("logits.out_of_tolerance", "prompt_logits.out_of_tolerance", "tolerance.too_loose")

#: A pair is worth a line when its atol is at most this part of the one before.
_WORTH = 0.9


@dataclass(frozen=True)
class SuggestedRule:
    """Bounds that let the run pass, as the options of ``kdtr diff`` name them (None: not part of this rule), and the
    baselines that they would let pass too."""

    atol: float | None = None
    rtol: float | None = None
    max_ulp: int | None = None
    max_kl: float | None = None
    too_loose: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suggestion:
    """``reason``: why there is nothing to suggest. Else ``needed`` is what all sequences need together, and for each
    baseline what at least one of them would let it pass with."""

    reason: str | None = None
    needed: Needed = field(default_factory=lambda: Needed(RuleNeeds(), {}))

    @property
    def rules(self) -> tuple[SuggestedRule, ...]:
        """Each rule by itself: atol, rtol, pairs of both where each is worth its place, ULPs, KL."""
        if self.reason is not None:
            return ()
        run = self.needed.run
        rules = [SuggestedRule(atol=run.atol, too_loose=self._loose("atol", run.atol))]
        if math.isfinite(run.rtol):
            rules.append(SuggestedRule(rtol=run.rtol, too_loose=self._loose("rtol", run.rtol)))
        last = run.atol
        for k, (rtol, atol) in enumerate(zip(RTOLS, run.atols, strict=True)):
            if 0 < atol <= _WORTH * last:
                loose = tuple(n for n in BASELINES if n in self._known and self._known[n].atols[k] <= atol)
                rules.append(SuggestedRule(atol=atol, rtol=rtol, too_loose=loose))
                last = atol
        if math.isfinite(run.max_ulp):
            rules.append(SuggestedRule(max_ulp=int(run.max_ulp), too_loose=self._loose("max_ulp", run.max_ulp)))
        if run.max_kl is not None and math.isfinite(run.max_kl):
            rules.append(SuggestedRule(max_kl=run.max_kl, too_loose=self._loose("max_kl", run.max_kl)))
        return tuple(rules)

    @property
    def _known(self) -> dict[str, RuleNeeds]:
        return dict(self.needed.baselines)

    def _loose(self, rule: str, bound: float) -> tuple[str, ...]:
        if bound == 0 and rule != "max_kl":
            return ()  # equal logits alone pass
        return tuple(n for n in BASELINES if n in self._known and getattr(self._known[n], rule) <= bound)


def suggest(
    results: Sequence[tuple[str, LogitsResult]], findings: Iterable[Finding], allow_partial: bool
) -> Suggestion:
    """The suggestion for what was compared: (sequence, its logits or prompt logits), and all that was found."""
    for finding in findings:
        if finding.verdict not in (None, Verdict.IDENTICAL, Verdict.PASS) and finding.code not in _MENDED:
            return Suggestion(finding.message)
    asked = [(name, r) for name, r in results if not r.all_bits]
    for name, r in asked:
        if r.needed is None or r.rows_compared < r.rows_total or r.rows_unmeasured:
            return Suggestion(f"sequence {name!r}: not all logits were measured ({r.form})")
        if r.form != "full" and not allow_partial:
            return Suggestion(f"sequence {name!r}: only part of the logits was compared ({r.form}): --allow-partial")
        if math.isinf(r.needed.run.atol):
            return Suggestion(f"sequence {name!r}: no tolerance lets a row pass that can't be measured")
    return Suggestion(None, _together(r.needed for _, r in asked))


def add_suggestions(one: Suggestion | None, other: Suggestion | None) -> Suggestion | None:
    """That of two parts together; None: it was not asked for, or is of nothing yet."""
    if one is None or other is None:
        return one or other
    if one.reason is not None or other.reason is not None:
        return Suggestion(one.reason or other.reason)
    return Suggestion(None, _together([one.needed, other.needed]))


def _together(parts: Iterable[Needed]) -> Needed:
    every = list(parts)
    if not every:
        return Needed(RuleNeeds(), {})
    held = {name: [p.baselines[name] for p in every if name in p.baselines] for name in BASELINES}
    return Needed(most_of(p.run for p in every), {name: least_of(needs) for name, needs in held.items() if needs})

"""How much of the given tolerance a run used, and what a suggestion says, as reports show it."""

import math
from collections.abc import Iterator

from kdtr_cli.parity.results import Report
from kdtr_cli.parity.suggest import SuggestedRule, Suggestion

__all__ = ["suggestion_lines", "used_line", "used_shares"]


def used_shares(report: Report) -> dict[str, float | None]:
    """The largest part of each bound that was used, 1 is all of it: of "values" (atol + rtol * |golden|), "max_ulp" and
    "max_kl". None: there is no such bound, it is 0, or nothing was measured."""
    t, bounds = report.totals, report.tolerance
    shares: dict[str, float | None] = {"values": t.max_share, "max_ulp": None, "max_kl": None}
    for name in ("max_ulp", "max_kl"):
        most, bound = getattr(t, name), None if bounds is None else getattr(bounds, name)
        if most is not None and bound:
            shares[name] = math.inf if math.isnan(most) else most / bound
    return shares


def used_line(report: Report) -> str | None:
    """For people: "3.1 % of atol, 0.2 % of max_kl"; None where there is no bound above 0."""
    bounds = report.tolerance
    if bounds is None:
        return None
    values = "atol" if not bounds.rtol else "rtol" if not bounds.atol else "atol + rtol * |golden|"
    names = {"values": values, "max_ulp": "max_ulp", "max_kl": "max_kl"}
    shares = used_shares(report)
    return ", ".join(f"{_percent(s)} of {names[n]}" for n, s in shares.items() if s is not None) or None


def suggestion_lines(suggestion: Suggestion) -> Iterator[str]:
    """Each rule as the options that say it, to the last digit, so that it can be given back."""
    if suggestion.reason is not None:
        yield f"nothing: {suggestion.reason}"
        return
    yield "the tightest that passes, each line by itself:"
    for rule in suggestion.rules:
        loose = f" (too loose: {' and '.join(rule.too_loose)} would pass too)" if rule.too_loose else ""
        yield f"{_options(rule)}{loose}"


def _options(rule: SuggestedRule) -> str:
    bounds = {name: getattr(rule, name) for name in ("atol", "rtol", "max_ulp", "max_kl")}
    return " ".join(f"--{name.replace('_', '-')} {value!r}" for name, value in bounds.items() if value is not None)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if math.isfinite(share) else "more than all"

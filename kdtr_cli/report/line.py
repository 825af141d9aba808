"""The one stable line that CI jobs grep for: the last line on standard output.

    PASS ar tokens=24/24 exact max_abs_logit_diff=0.000e+00 verdict=IDENTICAL
    FAIL ar tokens=17/24 first_divergence=0:17 margin=3.1e-01 max_abs_logit_diff=2.441e-01 verdict=DIVERGED
    FAIL ddtree tokens=64/64 exact max_abs_logit_diff=0.000e+00 rounds=3/21 first_round_difference=0:3 verdict=DIVERGED
    ERROR ar tokens=0/24 max_abs_logit_diff=none verdict=INVALID reason="other stop ids: golden [2], run [3]"

The order of what stands in it never changes; docs/judging.md is its reference.
"""

from kdtr_cli.parity.results import Report
from kdtr_cli.parity.verdicts import Finding, first_word

__all__ = ["hinted", "safe", "verdict_line"]


def verdict_line(report: Report) -> str:
    """The line, ASCII, without a newline."""
    t = report.totals
    words = [first_word(report.exit_code), safe(report.mode), f"tokens={t.tokens_equal}/{t.tokens}"]
    if t.exact:
        words.append("exact")
    if t.first_divergence is not None:
        words.append(f"first_divergence={t.first_divergence[0]}:{t.first_divergence[1]}")
    if t.margin is not None:
        words.append(f"margin={t.margin:.1e}")
    words.append("max_abs_logit_diff=" + ("none" if t.max_abs is None else f"{t.max_abs:.3e}"))
    words += [f"{key}={value}" for key, value in _further(report)]
    words.append(f"verdict={report.verdict.value}")
    if report.reason is not None:
        words.append('reason="' + safe(report.reason).replace("\\", "\\\\").replace('"', '\\"') + '"')
    return " ".join(words)


def _further(report: Report) -> list[tuple[str, object]]:
    """The pairs that are there only where they say something."""
    t = report.totals
    pairs: list[tuple[str, object]] = []
    if t.first_logit_failure is not None:
        pairs.append(("first_logit_failure", f"{t.first_logit_failure[0]}:{t.first_logit_failure[1]}"))
    if report.sequences and t.logits != "full":
        pairs.append(("logits", t.logits))
    if t.prompt_logits not in (None, "full"):
        pairs.append(("prompt_logits", "not-compared" if t.prompt_logits == "none" else t.prompt_logits))
    if report.values != "logits":
        pairs.append(("values", report.values))
    if report.reference not in (None, "exact"):
        pairs.append(("reference", report.reference))
    if report.teacher_forced:
        pairs.append(("teacher_forced", "yes"))
    if report.rounds is not None:
        compared = report.rounds == "compared"
        pairs.append(("rounds", f"{t.rounds_equal}/{t.rounds_judged}" if compared else report.rounds))
    if report.run is not None and ("drafter", "replay") in report.run.details:
        pairs.append(("drafts", "replayed"))  # the golden's own: no drafter was run
    if t.first_round_difference is not None:
        pairs.append(("first_round_difference", f"{t.first_round_difference[0]}:{t.first_round_difference[1]}"))
    pairs += [(what, "unverified") for what in report.unverified]
    if report.options.steps is not None:
        pairs.append(("steps", f"{t.steps}/{t.steps_available}"))
    if report.options.select is not None:
        pairs.append(("sequences", f"{t.sequences}/{t.sequences_available}"))
    if t.missing:
        pairs.append(("missing", t.missing))
    if t.extra:
        pairs.append(("extra", t.extra))
    if t.first_tensor is not None:
        pairs.append(("first_tensor", safe(":".join(map(str, t.first_tensor)))))
    if any(f.code == "tolerance.too_loose" and f.verdict is None for f in report.findings):
        pairs.append(("tolerance", "loose"))  # --allow-loose: zeros or shuffled logits would pass too
    return pairs


def hinted(finding: Finding) -> str:
    """What stands behind a finding's text in every report that is read as text: its hint, or nothing."""
    return f" (hint: {safe(finding.hint)})" if finding.hint else ""


def safe(text: str) -> str:
    """`text` on one line of printable ASCII; white space runs become one space, anything else an escape. So does
    ``##[``, which a GitHub runner takes for a command wherever it stands in a log."""
    shown = " ".join(text.split()).encode("ascii", "backslashreplace").decode().translate(_CONTROLS)
    return shown.replace("##[", "#\\x23[")


_CONTROLS = {code: f"\\x{code:02x}" for code in [*range(0x20), 0x7F]}

"""The judgement of one sequence's trace. It can add a fault to what tokens and logits say, never take one away.

At tolerance 0 every value of a trace counts, whatever the logits say. With a tolerance, which is made for logits, a
tensor that is out of it is a warning, unless a rule of its own bounds it; one that is not finite never passes.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from kdtr_cli.parity.evidence import EvidenceSequence, ModelFacts
from kdtr_cli.parity.findings import SequenceFindings
from kdtr_cli.parity.hints import diagnose
from kdtr_cli.parity.tolerances import Tolerance
from kdtr_cli.parity.traces import TensorResult, TraceResult, compare_traces
from kdtr_cli.parity.verdicts import Level, Verdict

__all__ = ["judge_traces"]


def judge_traces(
    findings: SequenceFindings,
    golden: EvidenceSequence,
    run: EvidenceSequence,
    rows: int,
    tolerance: Callable[[str], tuple[Tolerance, bool]],
    facts: ModelFacts | None,
) -> TraceResult | None:
    """Compare the first `rows` positions, to which both sides fed the same tokens; None where not both have a trace."""
    if not golden.trace or not run.trace:
        _missing(findings, golden, run)
        return None
    prompt = len(golden.prompt)
    found, masks = compare_traces(golden.trace, run.trace, rows, prompt, tolerance)
    for side, names in (("golden", found.only_golden), ("run", found.only_run)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            findings.add("trace.partial", f"the {side} alone has traced {names[0]}{more}: not compared", None)
    if found.golden_nonfinite is not None:
        message = f"the golden's {found.golden_nonfinite} is not finite"
        findings.add("trace.golden_nonfinite", message, Verdict.INVALID)
        return found
    first = found.first
    if first is None:
        if not found.all_bits:
            other = next(t for t in found.tensors if t.rows_identical < t.rows)
            message = f"{other.name} differs within tolerance first, at position {other.first_row}"
            findings.add("trace.other_bits", message, None)
        return found
    hint, message = diagnose(found, masks, golden.trace, run.trace, prompt, facts)
    found = replace(found, hint=hint, message=message)
    place = {"step": found.step, "hint": hint}
    decisive = first if first.decides else next((t for t in found.tensors if t.rows_out and t.decides), None)
    broken = next((t for t in found.tensors if t.max_abs is not None and not math.isfinite(t.max_abs)), None)
    if broken is not None and decisive is None:
        # no tolerance is made for it, and none lets it pass
        also = "" if broken is first else f"; the run's {broken.name} is not finite"
        findings.add("trace.nonfinite", message + also, Verdict.DIVERGED, **{**place, "hint": "nonfinite"})
    elif decisive is not None:
        also = "" if decisive is first else f"; {_out(decisive)}, which a rule bounds"
        findings.add("trace.parted", message + also, Verdict.DIVERGED, **place)
    else:
        no_rule = "; no rule bounds it, so this decides nothing"
        findings.add("trace.parted", message + no_rule, None, Level.WARNING, **place)
    return found


def _out(tensor: TensorResult) -> str:
    return f"{tensor.name} is out of tolerance at {tensor.rows_out} of {tensor.rows} positions"


def _missing(findings: SequenceFindings, golden: EvidenceSequence, run: EvidenceSequence) -> None:
    for side, other, own in (("golden", "run", golden), ("run", "golden", run)):
        if own.trace:
            message = f"the {side} has a trace, the {other} has none (kdtr {other} --trace): it is not compared"
            findings.add("trace.not_compared", message, None)

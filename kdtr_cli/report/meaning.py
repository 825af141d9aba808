"""What a verdict says, in one sentence for people."""

from kdtr_cli.parity.verdicts import Verdict

__all__ = ["MEANS"]

MEANS = {
    Verdict.IDENTICAL: "All tokens and all bits of all logits are the same.",
    Verdict.PASS: "All tokens are the same, and the logits are within tolerance at every step.",
    Verdict.TIE_BREAK: "Tokens part, but only where the golden itself is a tie within tolerance.",
    Verdict.INCONCLUSIVE: "Too little was compared to say.",
    Verdict.DIVERGED: "The run differs from the golden.",
    Verdict.INVALID: "This evidence can't be judged.",
}

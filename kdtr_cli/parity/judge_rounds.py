"""The judgement of one sequence's DDTree or chain rounds: are they rounds, do they keep the rules, do they agree?

A golden's must keep every rule: where they don't, nothing can be judged by them. A run's that are no rounds at all
can't be judged either; a run's that are rounds but break a rule are what its engine did, and that differs.
"""

from dataclasses import dataclass

import numpy as np

from kdtr_cli.parity.evidence import EvidenceSequence, Rounds
from kdtr_cli.parity.findings import SequenceFindings
from kdtr_cli.parity.hints import round_hint
from kdtr_cli.parity.results import RoundsResult
from kdtr_cli.parity.rounds import RoundDifference, RoundsComparison, compare_rounds, fault, judged_rounds, tau
from kdtr_cli.parity.verdicts import Verdict

__all__ = ["DRAWN", "RoundTerms", "judge_rounds"]

#: The arrays of rounds that are kept for a drawing, without their folder.
DRAWN = ("start", "root", "bonus", "n_nodes", "n_accepted", "tokens", "parents", "scores", "accepted")


@dataclass(frozen=True)
class RoundTerms:
    """`compared`: both sides drafted alike. `strict`: every bit decides. `steps`: how many output steps are judged,
    None: all. `parted`: the first of them where the tokens differ. `whole`: as many tokens on both sides, all
    judged. `keep`: keep the rounds in the result."""

    compared: bool
    strict: bool
    steps: int | None
    parted: int | None
    whole: bool
    keep: bool = False


def judge_rounds(
    findings: SequenceFindings, golden: EvidenceSequence, run: EvidenceSequence | None, terms: RoundTerms
) -> RoundsResult | None:
    """Judge the rounds of a sequence, of which the run may lack all; None where nobody recorded any."""
    g = _read(golden, "golden", findings, terms)
    r = None if run is None else _read(run, "run", findings, terms)
    if golden.rounds is None and (run is None or run.rounds is None):
        if terms.compared and run is not None:
            _missing(findings, "golden")
        return None
    if terms.compared:
        for side, sequence in (("golden", golden), ("run", run)):
            if sequence is not None and sequence.rounds is None:
                _missing(findings, side)
    comparison = None
    prompt = len(golden.prompt)
    if terms.compared and g is not None and r is not None:
        comparison = compare_rounds(
            g.arrays,
            r.arrays,
            prompt,
            strict=terms.strict,
            steps=terms.steps,
            parted=terms.parted,
            whole=terms.whole,
        )
        _add(findings, comparison, prompt)
    judged = judged_rounds(g.arrays, prompt, terms.steps) if g is not None else 0
    return RoundsResult(
        compared=terms.compared,
        golden_rounds=None if g is None else len(g.arrays["rounds/start"]),
        run_rounds=None if r is None else len(r.arrays["rounds/start"]),
        golden_tau=None if g is None else tau(g.arrays),
        run_tau=None if r is None else tau(r.arrays),
        judged=judged if terms.compared else 0,
        equal=0 if comparison is None else comparison.equal,
        first_difference=None if comparison is None else comparison.difference,
        first_open=None if comparison is None else comparison.open,
        all_bits=comparison is not None and comparison.all_bits,
        golden_arrays=_kept(g, terms),
        run_arrays=_kept(r, terms),
    )


def _kept(rounds: Rounds | None, terms: RoundTerms) -> dict[str, np.ndarray] | None:
    """What a drawing shows: marginals and digests, the bulk of the bytes, are left out."""
    if rounds is None or not terms.keep:
        return None
    return {name: rounds.arrays[f"rounds/{name}"] for name in DRAWN}


def _read(sequence: EvidenceSequence, side: str, findings: SequenceFindings, terms: RoundTerms) -> Rounds | None:
    """The rounds of one side, None where there are none or where they can't be read; with findings of what is wrong."""
    if sequence.rounds is None:
        return None
    rounds = sequence.rounds()
    hint = None if side == "golden" else "tree"
    text = next((p.text for p in rounds.problems if p.malformed), None) or fault(rounds.arrays)
    if text is not None:
        findings.add("rounds.malformed", f"the {side}'s rounds are malformed: {text}", Verdict.INVALID, hint=hint)
        return None
    last = judged_rounds(rounds.arrays, len(sequence.prompt), terms.steps)
    for problem in rounds.problems:
        if side == "golden":
            verdict = Verdict.INVALID
        elif problem.round is None or problem.round < last:
            verdict = Verdict.DIVERGED
        else:
            continue  # beyond --steps
        findings.add("rounds.invariant", f"the {side}'s rounds break a rule: {problem.text}", verdict, hint=hint)
        break  # what follows only repeats it
    return rounds


def _missing(findings: SequenceFindings, side: str) -> None:
    findings.add("rounds.missing", f"the {side} holds no rounds of it, though of others", Verdict.INVALID)


def _add(findings: SequenceFindings, comparison: RoundsComparison, prompt_length: int) -> None:
    if (found := comparison.difference) is not None:
        because = "; it follows from the tokens, which part there or before" if found.follows else ""
        verdict = None if found.follows else Verdict.DIVERGED
        hint = None if found.follows else round_hint(found.part)
        findings.add(f"rounds.{found.part}", found.where + because, verdict, **_place(found, prompt_length), hint=hint)
    if (found := comparison.open) is not None:
        many = f" (so in {comparison.open_rounds} rounds; with a tolerance this decides nothing)"
        findings.add(f"rounds.{found.part}", found.where + many, None, **_place(found, prompt_length))
    if comparison.digests in ("golden", "run"):
        message = f"the {comparison.digests} alone has digests of the cache: they were not compared"
        findings.add("rounds.digests", message, None)


def _place(found: RoundDifference, prompt_length: int) -> dict[str, object]:
    """`step` is the first output step that the round emits."""
    step = None if found.position is None else found.position - prompt_length + 1
    return {"step": step, "golden": found.golden, "run": found.run}

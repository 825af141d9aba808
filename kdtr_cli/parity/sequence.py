"""The judgement of one sequence: its tokens, its logits, its rounds, and what they amount to.

Tokens are compared by id and place, lengths and finish reasons included. Logits are comparable as long as both sides
saw the same tokens before: up to and with the first differing step in a free run, everywhere in a teacher-forced one.
"""

from dataclasses import dataclass

import numpy as np

from kdtr_cli.parity.alone import judge_alone
from kdtr_cli.parity.detail import describe_step, is_tie
from kdtr_cli.parity.evidence import EvidenceSequence, Logits, ModelFacts
from kdtr_cli.parity.findings import SequenceFindings
from kdtr_cli.parity.hints import ROUND_HINTS, diagnose_logits
from kdtr_cli.parity.judge_rounds import RoundTerms, judge_rounds
from kdtr_cli.parity.judge_traces import judge_traces
from kdtr_cli.parity.logits import compare_logits, missing_logits
from kdtr_cli.parity.results import SequenceResult, StepDetail
from kdtr_cli.parity.rows import Place
from kdtr_cli.parity.tally import LogitsResult
from kdtr_cli.parity.tolerances import JudgeOptions, Tolerance, tolerance_for
from kdtr_cli.parity.verdicts import Level, Verdict, combine

__all__ = ["BIT_REFERENCE", "RUN_LOGITS", "Terms", "judge_sequence"]

#: The name of a run's logits.
RUN_LOGITS = "engine"

#: The golden's arithmetic whose bits a run can have.
BIT_REFERENCE = "exact"


@dataclass(frozen=True)
class Terms:
    """What holds for all sequences of a judgement. `sampled`: the temperature is above 0, so a token need not be the
    argmax and no tie can explain another one. `rounds`: both sides drafted alike, so their rounds are compared.
    `base`: the options' bounds, which hold where no rule of a tensor does."""

    options: JudgeOptions
    base: Tolerance
    reference: str | None
    teacher_forced: bool
    sampled: bool
    rounds: bool = False
    facts: ModelFacts | None = None

    @property
    def tolerance(self) -> Tolerance:
        """The bounds of the logits that tokens are chosen from."""
        return self.of("logits")[0]

    def of(self, name: str) -> tuple[Tolerance, bool]:
        """The bounds of `logits`, `prompt_logits` or a trace's tensor, and whether they decide."""
        return tolerance_for(name, self.options.rules, self.base)


def judge_sequence(index: int, golden: EvidenceSequence, run: EvidenceSequence | None, terms: Terms) -> SequenceResult:
    """Judge the golden's sequence `index` against the run's of the same id and prompt (None: the run lacks it)."""
    limit = terms.options.steps
    g = np.asarray(golden.tokens)[:limit]
    r = None if run is None else np.asarray(run.tokens)[:limit]
    g_logits = golden.logits.get(terms.reference or "")
    r_logits = None if run is None else run.logits.get(RUN_LOGITS)
    findings = SequenceFindings(golden.id)
    divergence, logits, prompt_logits, equal = None, missing_logits(len(g)), None, 0
    first_difference, whole, trace = None, False, None
    if r is None:
        if len(g):
            divergence = describe_step(g_logits, None, 0, int(g[0]), None)
        findings.add("sequence.missing", "the run has no such sequence", Verdict.DIVERGED, hint="output")
    else:
        common = min(len(g), len(r))
        parted = np.flatnonzero(g[:common] != r[:common])
        first = int(parted[0]) if len(parted) else common
        equal = common - len(parted) if terms.teacher_forced else first
        comparable = common if terms.teacher_forced else min(first + 1, common)
        if g_logits is not None and r_logits is not None:
            logits = compare_logits(
                g_logits, r_logits, comparable, len(g), terms.tolerance, terms.options.threads, terms.options.suggest
            )
        prompt_logits = _compare_prompt(golden, run, terms)
        whole = _whole(g, golden) and _whole(r, run) and len(g) == len(r)
        if len(parted) or len(g) != len(r):
            first_difference = first
            divergence = _detail(golden, g_logits, r_logits, first, g, r, terms)
        fed = len(golden.prompt) + max(0, min(common - 1, common if terms.teacher_forced else first))
        trace = judge_traces(findings, golden, run, fed, terms.of, terms.facts)
        hint = diagnose_logits(g_logits, r_logits, logits) if trace is None or trace.first is None else None
        _judge_tokens(findings, g, r, parted, divergence, (g_logits, r_logits), logits, terms)
        if whole and (len(g) == 0 or g[-1] == r[-1]):
            _judge_finish(findings, golden, run)
        _judge_logits(findings, logits, terms, "logits", bool(len(parted)), hint)
        if prompt_logits is not None:
            _judge_logits(findings, prompt_logits, terms, "prompt_logits", False)
        if len(g) == 0 and len(r) == 0:
            findings.add("sequence.empty", "there is no token to compare", Verdict.INCONCLUSIVE)
    judge_alone(findings, golden, run, (terms.reference or "", RUN_LOGITS), limit)
    strict = terms.tolerance.is_zero
    keep = terms.options.keep_rounds
    round_terms = RoundTerms(terms.rounds, strict, limit, first_difference, whole, keep)
    rounds = judge_rounds(findings, golden, run, round_terms)
    if any(f.hint in ROUND_HINTS for f in findings.items):
        findings.drop_hint("sampler")  # the logits agree with another path's
    # float64 and BLAS logits can't have the bits of an engine: where they chose the tokens, IDENTICAL is not to be had
    every_bit = (
        terms.reference == BIT_REFERENCE
        and logits.all_bits
        and (prompt_logits is None or prompt_logits.all_bits)
        and (rounds is None or not rounds.compared or rounds.all_bits)
        and (trace is None or trace.all_bits)
    )
    verdict = combine([*findings.verdicts, Verdict.IDENTICAL if every_bit else Verdict.PASS])
    return SequenceResult(
        index=index,
        id=golden.id,
        verdict=verdict,
        prompt_length=len(golden.prompt),
        golden_tokens=g,
        run_tokens=r,
        golden_length=len(golden.tokens),
        run_length=None if run is None else len(run.tokens),
        golden_finish=golden.finish_reason,
        run_finish=None if run is None else run.finish_reason,
        tokens_equal=equal,
        divergence=divergence,
        logits=logits,
        prompt_logits=prompt_logits,
        rounds=rounds,
        findings=tuple(findings.items),
        trace=trace,
    )


def _whole(judged: np.ndarray, sequence: EvidenceSequence) -> bool:
    return len(judged) == len(sequence.tokens)


def _compare_prompt(golden: EvidenceSequence, run: EvidenceSequence, terms: Terms) -> LogitsResult | None:
    """None where the golden has none to compare with."""
    g = golden.prompt_logits.get(terms.reference or "")
    r = run.prompt_logits.get(RUN_LOGITS)
    if g is None:
        return None
    n = len(golden.prompt)
    if r is None:
        return missing_logits(n)
    asked = terms.options
    return compare_logits(g, r, n, n, terms.of("prompt_logits")[0], asked.threads, asked.suggest)


def _detail(
    golden: EvidenceSequence,
    g_logits: Logits | None,
    r_logits: Logits | None,
    step: int,
    g: np.ndarray,
    r: np.ndarray,
    terms: Terms,
) -> StepDetail:
    return describe_step(
        g_logits if step < len(g) else None,
        r_logits if step < len(r) else None,
        step,
        int(g[step]) if step < len(g) else None,
        int(r[step]) if step < len(r) else None,
        recorded_tie=step in golden.ties,
        tolerance=None if terms.sampled else terms.tolerance,
    )


def _judge_tokens(
    findings: SequenceFindings,
    g: np.ndarray,
    r: np.ndarray,
    parted: np.ndarray,
    detail: StepDetail | None,
    both: tuple[Logits | None, Logits | None],
    logits: LogitsResult,
    terms: Terms,
) -> None:
    if len(g) != len(r):
        word = "shorter" if len(r) < len(g) else "longer"
        message = f"the run is {word}: {len(r)} tokens, the golden has {len(g)}"
        if len(r) < len(g) and not len(parted) and len(r):
            message += f" (kdtr diff --steps {len(r)} judges the part that both have)"
        place = {"step": min(len(g), len(r)), "golden": len(g), "run": len(r)}
        hint = "output" if word == "shorter" else "stop"
        findings.add(f"tokens.{word}", message, Verdict.DIVERGED, **place, hint=None if len(parted) else hint)
    if not len(parted):
        return
    step, expected, got = int(parted[0]), int(g[parted[0]]), int(r[parted[0]])
    place = {"step": step, "golden": expected, "run": got}
    where = f"tokens part at step {step}: golden {expected}, run {got}"
    if detail is not None and detail.own_argmax is False and not terms.sampled:
        message = f"the run's token {got} at step {step} is not the argmax of the run's own logits: look at its sampler"
        findings.add("tokens.not_argmax", message, None, **place, hint="sampler")
    if terms.sampled:
        message = f"{where} (the temperature is not 0: no tie can explain it)"
    elif None in both or not all(is_tie(both[0], int(s), int(r[s]), terms.tolerance, both[1].dtype) for s in parted):
        message = where
    elif not logits.within:
        message = f"{where}; a tie, but logits are out of tolerance"
    elif logits.rows_compared < len(g):
        message = (
            f"{where}; it is a tie, but {len(g) - logits.rows_compared} later steps were not compared"
            " (kdtr run --teacher-force compares them)"
        )
    else:
        steps = f"{len(parted)} steps" if len(parted) > 1 else f"step {step}"
        message = (
            f"tokens part only where the golden is a tie within tolerance, at {steps}: golden {expected}, run {got}"
        )
        level = {"fail": Level.ERROR, "warn": Level.WARNING, "pass": Level.NOTE}[terms.options.on_tie]
        findings.add("tokens.tie", message, Verdict.TIE_BREAK, level, **place)
        return
    agreed = None not in both and logits.rows_compared > step and logits.within and logits.rows_unmeasured == 0
    findings.add("tokens.diverged", message, Verdict.DIVERGED, **place, hint="sampler" if agreed else None)


def _judge_finish(findings: SequenceFindings, golden: EvidenceSequence, run: EvidenceSequence) -> None:
    g, r = golden.finish_reason, run.finish_reason
    if g != r:
        message = f"the golden ended by {g!r}, the run by {r!r}"
        findings.add("finish_reason", message, Verdict.DIVERGED, golden=g, run=r, hint="stop")


def _judge_logits(
    findings: SequenceFindings, result: LogitsResult, terms: Terms, what: str, parted: bool, hint: str | None = None
) -> None:
    """What the logits add: `what` is "logits" (rows are steps) or "prompt_logits" (rows are positions)."""
    tolerance = terms.of(what)[0]
    name = "logits" if what == "logits" else "prompt logits"
    row = "step" if what == "logits" else "position"

    def at(place: Place) -> dict[str, object]:
        return {"step": place.row, "token": place.token, "golden": place.golden, "run": place.run}

    if (place := result.golden_nonfinite) is not None:
        message = f"the golden's {name} are not finite at {row} {place.row}, id {place.token}: {place.golden}"
        findings.add(f"{what}.golden_nonfinite", message, Verdict.INVALID, **at(place))
        return
    if (place := result.run_nonfinite) is not None:
        message = f"the run's {name} are not finite, first at {row} {place.row}, id {place.token}: {place.run}"
        findings.add(f"{what}.nonfinite", message, Verdict.DIVERGED, **at(place), hint="nonfinite")
    if (place := result.first_out) is not None:
        message = f"{_out_of(result, place, name, row)} ({result.rows_out} of {result.rows_compared} rows are out)"
        own = None if result.run_nonfinite is not None else hint
        findings.add(f"{what}.out_of_tolerance", message, Verdict.DIVERGED, **at(place), hint=own)
    elif result.rows_other_bits and tolerance.is_zero:
        message = f"{result.rows_other_bits} rows of {name} have other bits by their digests, and the tolerance is 0"
        findings.add(f"{what}.other_bits", message, Verdict.DIVERGED)
    if result.rows_shifted:
        message = (
            f"{result.rows_shifted} of {result.rows_compared} rows of {name} are the golden's moved by one constant"
        )
        findings.add(f"{what}.shift", f"{message}, up to {result.shift:.6g}", None, hint="shift")
    if combine([Verdict.IDENTICAL, *findings.verdicts]) in (Verdict.DIVERGED, Verdict.INVALID):
        return
    if not result.all_bits:
        _judge_completeness(findings, result, terms, what, name)
        if result.form == "full" and tolerance.is_zero and result.max_abs == 0:
            rows = result.rows_compared - result.rows_identical
            findings.add(f"{what}.signed_zero", f"{rows} rows of {name} differ in the sign of a zero only", None)
    if result.too_loose and (parted or not result.all_bits):
        also = " and ".join(result.too_loose)
        message = f"the tolerance is too loose for the {name}: {also} would pass too"
        if terms.options.allow_loose:
            findings.add("tolerance.too_loose", message, None, Level.WARNING)
        else:
            message += " (--allow-loose judges by it all the same)"
            findings.add("tolerance.too_loose", message, Verdict.INCONCLUSIVE)


def _out_of(result: LogitsResult, place: Place, name: str, row: str) -> str:
    where = f"{name} out of tolerance, first at {row} {place.row}"
    if result.first_out_rule == "kl":
        return f"{where}: KL over the bound"
    where += f", id {place.token}"
    if result.first_out_rule == "hidden":
        side, value = ("golden", place.golden) if place.golden is not None else ("run", place.run)
        return f"{where}: {side} {value:.9g}, and the other side has it below its top K"
    return f"{where}: golden {place.golden:.9g}, run {place.run:.9g}"


def _judge_completeness(findings: SequenceFindings, result: LogitsResult, terms: Terms, what: str, name: str) -> None:
    """Was enough compared? `result` is not equal bit for bit."""
    partial = result.form != "full"
    if result.rows_unmeasured:
        message = f"{result.rows_unmeasured} rows of {name} can't be measured: a side holds no values of them"
        findings.add(f"{what}.unmeasured", message, Verdict.INCONCLUSIVE)
    elif partial and terms.of(what)[0].max_kl is not None:
        message = f"--max-kl needs full {name}; they are {result.form}"
        findings.add(f"{what}.no_kl", message, Verdict.INCONCLUSIVE)
    elif partial and not terms.options.allow_partial:
        if result.form == "none":
            message = f"there are no {name} to compare"
        else:
            message = f"only part of the {name} was compared ({result.form})"
        findings.add(f"{what}.partial", f"{message} (--allow-partial lets that do)", Verdict.INCONCLUSIVE)

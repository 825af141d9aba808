"""golden + run -> Report. Provenance first, then tokens, logits and rounds, sequence by sequence; nothing is ever
skipped in silence, and what is not shown to agree does not pass."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.parity.auto import auto_tolerance
from kdtr_cli.parity.drawn import lightened
from kdtr_cli.parity.evidence import Evidence, EvidenceSequence, Logits
from kdtr_cli.parity.log_probabilities import LOGPROBS, as_log_probabilities, values_of
from kdtr_cli.parity.provenance import check_kinds, compare_drafting, compare_manifests, compare_prompts, provenance_of
from kdtr_cli.parity.results import Report, SequenceResult, Side
from kdtr_cli.parity.sequence import BIT_REFERENCE, RUN_LOGITS, Terms, judge_sequence
from kdtr_cli.parity.suggest import Suggestion, suggest
from kdtr_cli.parity.tolerances import (
    EXACT_TIER,
    JudgeOptions,
    TensorRule,
    Tolerance,
    check_rules,
    effective_tolerance,
)
from kdtr_cli.parity.totals import sum_up
from kdtr_cli.parity.traces import TraceResult
from kdtr_cli.parity.verdicts import Finding, Level, Verdict, combine, exit_code, ordered

__all__ = ["invalid", "judge"]


def judge(golden: Evidence, run: Evidence, options: JudgeOptions | None = None) -> Report:
    """Judge a run against a golden.

    Whatever the evidence holds ends as a Report. InputError: the options name a sequence that the golden lacks.
    """
    options = options or JudgeOptions()
    if (finding := check_kinds(golden, run)) is not None:
        return invalid([finding], options, golden, run)
    findings = [*_check_ids(golden), *_check_ids(run), *compare_manifests(golden, run)]
    if (twice := _errors(findings)) is not None:
        return invalid(findings, options, golden, run, twice)
    if values_of(run) == LOGPROBS:
        golden = as_log_probabilities(golden)
    chosen = _select(golden, options)
    by_id = {s.id: s for s in run.sequences}
    pairs = [(index, g, by_id.get(g.id)) for index, g in chosen]
    findings += compare_prompts((g, r) for _, g, r in pairs if r is not None)
    tier = _text(run.manifest, "tier")
    found = auto_tolerance(options, tier, golden.manifest) if options.tolerance else effective_tolerance(options, tier)
    tolerance = found if isinstance(found, Tolerance) else None
    reference = _reference([g for _, g, _ in pairs], tier)
    if isinstance(found, str):
        findings.append(Finding(Level.ERROR, "tolerance.auto", found, Verdict.INVALID))
    else:
        findings += _check_tolerance(options, tolerance, tier, reference, values_of(run))
    for _, g, r in pairs:
        findings += _check_shapes(g, reference, golden.vocab_size, None)
        if r is not None:
            findings += _check_shapes(r, RUN_LOGITS, run.vocab_size, g.logits.get(reference or ""))
            findings += _check_has(g, r, reference)
            findings += _check_traces(g, r)
    if (reason := _errors(findings)) is not None or tolerance is None:
        report = invalid(findings, options, golden, run, reason, tolerance, reference)
        faults = {f.code.split(".")[0] for f in findings if f.verdict is Verdict.INVALID}
        if options.suggest and faults == {"tolerance"}:  # all that is missing is what is asked for
            none = dict.fromkeys(("tolerance", "tolerance_factor", "max_ulp", "max_kl"))
            zero = judge(golden, run, replace(options, **none, atol=0.0, rtol=0.0))
            return replace(report, suggestion=zero.suggestion)
        return report

    check_rules(options.rules, _tensors(pairs, reference))
    drafting = compare_drafting(golden, run)
    if drafting.finding is not None:
        findings.append(drafting.finding)
    decoding = run.manifest.get("decoding")
    decoding = decoding if isinstance(decoding, Mapping) else {}
    temperature = decoding.get("temperature")
    forced = decoding.get("teacher_forced") is True
    terms = Terms(options, tolerance, reference, forced, temperature != 0, drafting.alike, golden.facts)
    results = tuple(lightened(judge_sequence(index, g, r, terms) for index, g, r in pairs))
    extra = _extra(golden, run, options)
    findings += extra
    if not results:
        message = "the golden holds no sequence: nothing was compared"
        findings.append(Finding(Level.ERROR, "nothing", message, Verdict.INCONCLUSIVE))
    return _report(golden, run, terms, results, findings, len(extra), drafting.rounds)


def invalid(
    findings: Sequence[Finding],
    options: JudgeOptions,
    golden: Evidence | None = None,
    run: Evidence | None = None,
    reason: str | None = None,
    tolerance: Tolerance | None = None,
    reference: str | None = None,
) -> Report:
    """The report of evidence that can't be judged; a side that could not even be opened is None."""
    sequences = [] if golden is None or golden.kind != "golden" else golden.sequences
    if options.select is not None:
        sequences = [s for s in sequences if s.id in options.select]
    tokens = sum(len(s.tokens[: options.steps]) for s in sequences)
    totals = sum_up((), ())
    in_order = ordered(findings)
    reason = reason or (in_order[0].message if in_order else "the evidence can't be judged")
    return Report(
        verdict=Verdict.INVALID,
        exit_code=exit_code(Verdict.INVALID, options.on_tie),
        mode="unknown" if run is None else _mode(run),
        golden=_side(golden),
        run=_side(run),
        options=options,
        tolerance=tolerance,
        reference=reference,
        totals=replace(totals, tokens=tokens, logits="none"),
        sequences=(),
        findings=in_order,
        reason=reason,
        suggestion=Suggestion(reason) if options.suggest else None,
    )


def _report(
    golden: Evidence,
    run: Evidence,
    terms: Terms,
    results: tuple[SequenceResult, ...],
    findings: list[Finding],
    n_extra: int,
    rounds: str | None,
) -> Report:
    everything = ordered([*findings, *(f for result in results for f in result.findings)])
    verdict = combine([*(r.verdict for r in results), *(f.verdict for f in findings if f.verdict is not None)])
    unverified = [f.code.split(".")[2] for f in findings if f.code.startswith("unverified.")]
    unjudged = verdict in (Verdict.INVALID, Verdict.INCONCLUSIVE)
    return Report(
        verdict=verdict,
        exit_code=exit_code(verdict, terms.options.on_tie),
        mode=_mode(run),
        golden=_side(golden),
        run=_side(run),
        options=terms.options,
        tolerance=terms.base,
        reference=terms.reference,
        totals=sum_up(results, golden.sequences, n_extra),
        sequences=results,
        findings=everything,
        reason=next((f.message for f in everything if f.verdict is verdict), None) if unjudged else None,
        teacher_forced=terms.teacher_forced,
        rounds=rounds,
        values=values_of(run),
        unverified=tuple("weights" if name.startswith("weights") else "rope" for name in unverified),
        suggestion=_suggestion(results, everything, terms.options) if terms.options.suggest else None,
    )


def _suggestion(results: Sequence[SequenceResult], findings: Iterable[Finding], options: JudgeOptions) -> Suggestion:
    for name in ("logits", "prompt_logits"):
        if (rule := next((rule for rule in options.rules if rule.matches(name)), None)) is not None:
            return Suggestion(f"the rule for {rule.tensor!r} bounds {name}, not an option: leave it out")
    # of a trace a tolerance decides nothing, but for the tensors that a rule bounds
    ruled = {r.id for r in results if r.trace is not None and _parts_by_rule(r.trace, options.rules)}
    findings = [f for f in findings if f.code != "trace.parted" or f.sequence in ruled]
    compared = [(r.id, part) for r in results for part in (r.logits, r.prompt_logits) if part is not None]
    found = suggest(compared, findings, options.allow_partial)
    rounds = any(r.rounds is not None and r.rounds.compared and not r.rounds.all_bits for r in results)
    digests = any(part.rows_other_bits for _, part in compared)
    if found.reason is None and (rounds or digests) and 0 in (found.needed.run.atol, found.needed.run.max_ulp):
        what = "rounds" if rounds else "digests"
        return Suggestion(
            f"what was compared of the logits is equal, and the {what} are not: any tolerance above 0 passes"
        )
    return found


def _parts_by_rule(trace: TraceResult, rules: tuple[TensorRule, ...]) -> bool:
    return any(t.rows_out and any(rule.matches(t.name) for rule in rules) for t in trace.tensors)


def _errors(findings: Iterable[Finding]) -> str | None:
    return next((f.message for f in findings if f.verdict is Verdict.INVALID), None)


def _text(manifest: Mapping[str, object], key: str) -> str:
    value = manifest.get(key)
    return value if isinstance(value, str) else "unknown"


def _mode(evidence: Evidence) -> str:
    decoding = evidence.manifest.get("decoding")
    return _text(decoding, "mode") if isinstance(decoding, Mapping) else "unknown"


def _side(evidence: Evidence | None) -> Side | None:
    if evidence is None:
        return None
    arithmetic = evidence.manifest.get("arithmetic")
    made = evidence.manifest.get("run")
    made = made if isinstance(made, Mapping) else {}
    details = [(k, made[k]) for k in ("device", "driver", "compiler", "batch") if k in made]
    drafting = evidence.manifest.get("drafting")
    if isinstance(drafting, Mapping):
        details += [(k, drafting[k]) for k in ("drafter", "budget") if k in drafting]
    return Side(
        evidence.name,
        evidence.kind,
        _mode(evidence),
        _text(evidence.manifest, "tier"),
        tuple(str(a) for a in arithmetic) if isinstance(arithmetic, list) else (),
        tuple((k, str(v)) for k, v in details if v is not None),
        provenance_of(evidence),
    )


def _check_ids(evidence: Evidence) -> list[Finding]:
    seen: set[str] = set()
    for sequence in evidence.sequences:
        if sequence.id in seen:
            message = f"the {evidence.kind} has two sequences with the id {sequence.id!r}"
            return [Finding(Level.ERROR, "ids", message, Verdict.INVALID, sequence.id)]
        seen.add(sequence.id)
    return []


def _select(golden: Evidence, options: JudgeOptions) -> list[tuple[int, EvidenceSequence]]:
    if options.select is None:
        return list(enumerate(golden.sequences))
    known = {s.id for s in golden.sequences}
    if unknown := [name for name in options.select if name not in known]:
        some = ", ".join(sorted(known)[:8]) + (", ..." if len(known) > 8 else "")
        raise InputError(f"--select {unknown[0]!r}: the golden has no such sequence; it has: {some or 'none'}")
    return [(i, s) for i, s in enumerate(golden.sequences) if s.id in options.select]


def _extra(golden: Evidence, run: Evidence, options: JudgeOptions) -> list[Finding]:
    known = {s.id for s in golden.sequences}
    if options.select is not None:
        return []
    return [
        Finding(
            Level.ERROR,
            "sequence.extra",
            f"sequence {s.id!r}: the golden has no such sequence",
            Verdict.DIVERGED,
            s.id,
            hint="output",
        )
        for s in run.sequences
        if s.id not in known
    ]


def _tensors(pairs: Iterable[tuple[int, EvidenceSequence, EvidenceSequence | None]], reference: str | None) -> set[str]:
    """The names of all that is compared, as rules name it."""
    names: set[str] = set()
    for _, g, r in pairs:
        if r is not None:
            names |= {n for n in g.trace if n in r.trace}
            for name, held in (("logits", (g.logits, r.logits)), ("prompt_logits", (g.prompt_logits, r.prompt_logits))):
                if (reference or "") in held[0] and RUN_LOGITS in held[1]:
                    names.add(name)
    return names


#: The references that have no run's bits, and the option that leaves a golden with them alone.
_MADE_WITH = {"float64": "--no-exact", "float32": "--arith float32"}


def _reference(goldens: Sequence[EvidenceSequence], tier: str) -> str | None:
    """The golden's logits to compare with: an exact run's twin is `exact`, any other tier's truth is `float64`.

    `float32` (BLAS) is neither, and taken only where there is nothing else.
    """
    order = (BIT_REFERENCE, "float64") if tier == EXACT_TIER else ("float64", BIT_REFERENCE)
    held = {name for s in goldens for name in s.logits}
    return next((name for name in (*order, "float32") if name in held), None)


def _check_tolerance(
    options: JudgeOptions, tolerance: Tolerance | None, tier: str, reference: str | None, values: str
) -> list[Finding]:
    how = "give --atol/--rtol, --max-ulp or --max-kl"
    if tolerance is None:
        message = f"a run of tier {tier} is judged by a tolerance: {how}"
    elif reference in _MADE_WITH and tier == EXACT_TIER and not _told(options):
        made = _MADE_WITH[reference]
        message = f"the golden holds no exact logits (made with {made}), so tolerance 0 says nothing: {how}"
    elif values == LOGPROBS and not _told(options):
        message = f"the run holds log-probabilities, whose bits no golden has, so tolerance 0 says nothing: {how}"
    else:
        return []
    return [Finding(Level.ERROR, "tolerance.missing", message, Verdict.INVALID)]


def _told(options: JudgeOptions) -> bool:
    return any(v is not None for v in (options.tolerance, options.atol, options.rtol, options.max_ulp, options.max_kl))


def _check_has(golden: EvidenceSequence, run: EvidenceSequence, reference: str | None) -> list[Finding]:
    """Logits must be of the reference in every golden sequence or in none."""
    if reference is not None and len(golden.tokens) and reference not in golden.logits:
        message = f"sequence {golden.id!r}: the golden holds no {reference} logits of it, though of others"
        return [Finding(Level.ERROR, "shape", message, Verdict.INVALID, golden.id)]
    if not golden.prompt_logits and run.prompt_logits:
        message = f"sequence {golden.id!r}: the run's prompt logits are not judged, the golden holds none"
        return [Finding(Level.NOTE, "prompt_logits.extra", message, None, golden.id)]
    return []


def _check_shapes(
    sequence: EvidenceSequence, name: str | None, vocab: int | None, other: Logits | None
) -> list[Finding]:
    """Do the logits `name` of a sequence fit its tokens, its vocabulary and the golden's logits `other`?"""
    findings = []
    side = "run" if name == RUN_LOGITS else "golden"
    sets = ((sequence.logits, "logits", len(sequence.tokens)), (sequence.prompt_logits, "prompt logits", None))
    for held, what, rows in sets:
        logits = held.get(name or "")
        if logits is None:
            continue
        rows = len(sequence.prompt) if rows is None else rows
        width = vocab if other is None or other.vocab is None else other.vocab
        message = None
        if logits.n_rows != rows:
            message = f"the {side} has {logits.n_rows} rows of {what} for {rows} ids"
        elif width is not None and logits.vocab is not None and logits.vocab != width:
            message = f"the {side}'s {what} have {logits.vocab} values a row, not {width}"
        elif logits.top_ids is not None and rows:
            message = _check_top_ids(logits, side, what, width if width is not None else logits.vocab)
        if message is not None:
            message = f"sequence {sequence.id!r}: {message}"
            findings.append(Finding(Level.ERROR, "shape", message, Verdict.INVALID, sequence.id))
    return findings


def _check_traces(golden: EvidenceSequence, run: EvidenceSequence) -> list[Finding]:
    """Are tensors of one name of one width, and has every one a row for each position that was fed?"""
    findings = []
    for name, tensor in golden.trace.items():
        other, message = run.trace.get(name), None
        if other is not None and (tensor.width, tensor.dtype.kind) != (other.width, other.dtype.kind):
            kinds = [f"{t.dtype} [{t.width}]" for t in (other, tensor)]
            message = f"{name} is {kinds[0]} in the run, {kinds[1]} in the golden"
        for side, sequence in (("golden", golden), ("run", run)):
            held, due = sequence.trace.get(name), len(sequence.prompt) + max(1, len(sequence.tokens)) - 1
            if held is not None and held.n_rows != due:
                message = f"{name} of the {side} has {held.n_rows} rows for {due} fed positions"
        if message is not None:
            message = f"sequence {golden.id!r}: {message}"
            findings.append(Finding(Level.ERROR, "shape", message, Verdict.INVALID, golden.id))
    return findings


def _check_top_ids(logits: Logits, side: str, what: str, vocab: int | None) -> str | None:
    ids = logits.top_ids(0, logits.n_rows).astype(np.int64)
    if logits.top_counts is not None:
        counts = logits.top_counts(0, logits.n_rows)
        if (counts < 0).any() or (counts > ids.shape[1]).any():
            return f"the {side}'s top {what} hold a count outside 0..{ids.shape[1]}"
        # beyond its count a row holds nothing: any ids that are none and not twice will do here
        nothing = np.arange(ids.shape[1]) >= counts[:, None]
        held = ids[~nothing]
        if held.size and (held.min() < 0 or (vocab is not None and held.max() >= vocab)):
            return f"the {side}'s top {what} hold an id outside the vocabulary"
        ids = np.sort(np.where(nothing, -1 - np.arange(ids.shape[1]), ids), axis=1)
        return f"the {side}'s top {what} hold an id twice" if (ids[:, 1:] == ids[:, :-1]).any() else None
    ids = np.sort(ids, axis=1)
    if ids.size and (ids.min() < 0 or (vocab is not None and ids.max() >= vocab)):
        return f"the {side}'s top {what} hold an id outside the vocabulary"
    if (ids[:, 1:] == ids[:, :-1]).any():
        return f"the {side}'s top {what} hold an id twice"
    return None

"""Are golden and run about the same thing? Asked before any number is looked at.

Model config, weights as used, rotary table, contract version, numerical choices, decoding settings, and for each
sequence its prompt and sampling stream must be the same on both sides. One that differs makes the pair INVALID: to
call such a run DIVERGED would blame an engine that was asked another question. How rounds were drafted may differ: they
must emit what plain decoding emits, however they come about; then the rounds themselves can't be compared.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kdtr_cli.parity.evidence import Evidence, EvidenceSequence
from kdtr_cli.parity.verdicts import Finding, Level, Verdict

__all__ = ["Drafting", "check_kinds", "compare_drafting", "compare_manifests", "compare_prompts", "provenance_of"]

_MISSING = object()

#: The drafter that plays what another one drafted. A golden's own rounds are drafted at first hand.
_REPLAY = "replay"

#: What must agree for rounds to be comparable: key of the manifest's `drafting`, what it is to the user.
_DRAFTING = {"mode": "modes", "drafter": "drafters", "budget": "budgets", "block_size": "block sizes"}

#: Manifest path, what it is to the user, whether null (not known) is allowed and makes it "unverified".
_FIELDS: tuple[tuple[str, str, bool], ...] = (
    ("contract_version", "numerics contract versions", False),
    ("model.config_sha256", "model configs", False),
    ("model.weights_used_sha256", "weights as used", True),
    ("model.rope_table_sha256", "rotary tables", True),
    ("decoding.stop_ids", "stop ids", False),
    ("decoding.temperature", "temperatures", False),
    ("decoding.seed", "seeds", False),
    ("decoding.ignore_eos", "ignore-eos settings", False),
)


def check_kinds(golden: Evidence, run: Evidence) -> Finding | None:
    """A golden first, then a run; any other pair is INVALID. (A bundle with itself is such a pair.)"""
    if (golden.kind, run.kind) == ("golden", "run"):
        return None
    if (golden.kind, run.kind) == ("run", "golden"):
        message = "the arguments are the wrong way round: the golden comes first, then the run"
    elif golden.kind == run.kind:
        message = f"two {golden.kind}s were given; a golden and a run are needed (make a run with 'kdtr run GOLDEN')"
    else:
        message = f"a golden and a run are needed, not a {golden.kind} and a {run.kind}"
    return Finding(Level.ERROR, "kinds", message, Verdict.INVALID, golden=golden.kind, run=run.kind)


def provenance_of(evidence: Evidence) -> tuple[tuple[str, str], ...]:
    """What a manifest says of who made this evidence, of what and how: (path, value) pairs, a value that is not there
    left out, and so are counts of what a run did (`run.statistics`). Whatever the manifest holds, strings come out."""
    pairs = []
    for path in ("producer.name", "producer.version", *(path for path, _, _ in _FIELDS)):
        pairs.append((path, _look_up(evidence.manifest, path)))
    for group in ("choices", "drafting", "run"):
        held = evidence.manifest.get(group)
        if isinstance(held, Mapping):
            pairs += sorted(
                ((f"{group}.{key}", value) for key, value in held.items() if key != "statistics"),
                key=lambda pair: pair[0],
            )
    pairs.append(("manifest_sha256", evidence.manifest_sha256))
    return tuple((path, str(value)) for path, value in pairs if value is not _MISSING and value is not None)


def compare_manifests(golden: Evidence, run: Evidence) -> list[Finding]:
    """What differs between the two manifests: errors (INVALID), warnings for what could not be verified, notes."""
    findings = []
    for path, what, nullable in _FIELDS:
        g, r = _look_up(golden.manifest, path), _look_up(run.manifest, path)
        if nullable and (why := _unknown(golden, run, path)) is not None:
            message = f"the {what} could not be verified: {why} ({path})"
            findings.append(Finding(Level.WARNING, f"unverified.{path}", message))
        else:
            findings += _compare(path, what, g, r)
    findings += _compare_choices(golden, run)
    findings += _explain_weights(golden, run, findings)
    findings += _compare_origin(golden, run)
    return findings


def compare_prompts(pairs: Iterable[tuple[EvidenceSequence, EvidenceSequence]]) -> list[Finding]:
    """INVALID for each pair of sequences (of one id) whose prompts or sampling streams differ."""
    findings = []
    for golden, run in pairs:
        if golden.stream != run.stream:
            message = f"sequence {golden.id!r}: other sampling streams: golden {golden.stream}, run {run.stream}"
            findings.append(
                Finding(
                    Level.ERROR,
                    "provenance.stream",
                    message,
                    Verdict.INVALID,
                    golden.id,
                    golden=golden.stream,
                    run=run.stream,
                )
            )
        g, r = np.asarray(golden.prompt), np.asarray(run.prompt)
        if np.array_equal(g, r):
            continue
        if len(g) != len(r):
            values, where = (len(g), len(r)), "prompts of other lengths"
        else:
            at = int(np.flatnonzero(g != r)[0])
            values, where = (int(g[at]), int(r[at])), f"other prompts, first at id {at}"
        message = f"sequence {golden.id!r}: {where}: golden {values[0]}, run {values[1]}"
        findings.append(
            Finding(
                Level.ERROR, "provenance.prompt", message, Verdict.INVALID, golden.id, golden=values[0], run=values[1]
            )
        )
    return findings


@dataclass(frozen=True)
class Drafting:
    """Whether two sides drafted alike, so that their rounds can be compared. `rounds` is the word for it, "compared" or
    "not-compared", None where nobody has rounds; `finding` a note that says why not."""

    rounds: str | None
    finding: Finding | None = None

    @property
    def alike(self) -> bool:
        return self.rounds == "compared"


def compare_drafting(golden: Evidence, run: Evidence) -> Drafting:
    """Do mode, drafter, budget and block size agree, and do both sides hold rounds? The drafter of a run that replays
    is the one whose drafts it replays, as long as the golden keeps enough of them."""
    modes = [_known(e, "decoding.mode") for e in (golden, run)]
    held = [any(s.rounds is not None for s in e.sequences) for e in (golden, run)]
    if modes == ["ar", "ar"] and not any(held):
        return Drafting(None)
    for evidence, has, mode in zip((golden, run), held, modes, strict=True):
        if not has:
            message = f"the {evidence.kind} holds no rounds (its mode is {_short(mode)})"
            return _not_compared(message, *modes)
    replayed = _known(run, "drafting.drafter") == _REPLAY
    for name, what in _DRAFTING.items():
        source = "of" if name == "drafter" and replayed else name
        g, r = _known(golden, f"drafting.{name}"), _known(run, f"drafting.{source}")
        for side, key, value in (("golden", name, g), ("run", source, r)):
            if value is None:
                return _not_compared(f"the {side}'s manifest does not say drafting.{key}", g, r)
        if not _equal(g, r):
            return _not_compared(f"other {what}: golden {_short(g)}, run {_short(r)} (drafting.{source})", g, r)
    few = _other_candidates(golden) if replayed else None
    return Drafting("compared") if few is None else few


def _known(evidence: Evidence, path: str) -> object:
    value = _look_up(evidence.manifest, path)
    return None if value is _MISSING else value


def _other_candidates(golden: Evidence) -> Drafting | None:
    """A replay has the candidates that the golden kept. Where a round takes more, it drafts another tree by right;
    a synthetic drafter's draw depends on how many it is asked for."""
    wanted, kept = _known(golden, "drafting.budget"), golden.drafts_kept or 0
    if _known(golden, "drafting.mode") == "chain" or not isinstance(wanted, int):
        wanted = 1
    if golden.vocab_size is not None:
        wanted = min(wanted, golden.vocab_size)
    if kept > wanted and str(_known(golden, "drafting.drafter")).startswith("synthetic:"):
        message = f"the run replays {kept} candidates a depth, and a synthetic drafter asked for {wanted} draws others"
        return _not_compared(message, wanted, kept)
    if kept >= wanted:
        return None
    return _not_compared(
        f"the run replays the {kept} candidates a depth that the golden keeps of {wanted}", wanted, kept
    )


def _not_compared(message: str, golden: object, run: object) -> Drafting:
    finding = Finding(Level.NOTE, "rounds.not_compared", f"rounds are not compared: {message}", golden=golden, run=run)
    return Drafting("not-compared", finding)


def _unknown(golden: Evidence, run: Evidence, path: str) -> str | None:
    """Why two digests can't be compared; None: they can."""
    for evidence in (golden, run):
        if _look_up(evidence.manifest, path) in (None, _MISSING):
            says = evidence.kind == "run" and path == "model.weights_used_sha256"
            how = '; an engine may, in "about"' if says else ""
            return f"the {evidence.kind} does not say{how}"
    if path == "model.rope_table_sha256":
        # a digest over more positions is another digest of the same table
        lengths = [_look_up(e.manifest, "model.rope_positions") for e in (golden, run)]
        if all(isinstance(n, int) for n in lengths) and lengths[0] != lengths[1]:
            return f"the golden's digest covers {lengths[0]} positions, the run's {lengths[1]}"
    return None


def _compare(path: str, what: str, g: object, r: object) -> list[Finding]:
    if g is _MISSING or r is _MISSING:
        side = "golden" if g is _MISSING else "run"
        message = f"the {side}'s manifest does not say {path}"
    elif _equal(g, r):
        return []
    else:
        message = f"other {what}: golden {_short(g)}, run {_short(r)} ({path})"
    g, r = (None if v is _MISSING else v for v in (g, r))
    hint = "weights" if path == "model.weights_used_sha256" and None not in (g, r) else None
    return [Finding(Level.ERROR, f"provenance.{path}", message, Verdict.INVALID, golden=g, run=r, hint=hint)]


def _compare_choices(golden: Evidence, run: Evidence) -> list[Finding]:
    g, r = _look_up(golden.manifest, "choices"), _look_up(run.manifest, "choices")
    if not isinstance(g, Mapping) or not isinstance(r, Mapping):
        return _compare("choices", "choices", g, r)
    findings = []
    for name in sorted({*g, *r}):
        findings += _compare(f"choices.{name}", f"choices of {name}", g.get(name, _MISSING), r.get(name, _MISSING))
    return findings


def _explain_weights(golden: Evidence, run: Evidence, so_far: list[Finding]) -> list[Finding]:
    """Where the weights as used differ, which tensors: from the digests of their stored bytes."""
    g, r = _look_up(golden.manifest, "model.weights"), _look_up(run.manifest, "model.weights")
    if not isinstance(g, Mapping) or not isinstance(r, Mapping):
        return []
    other = sorted(name for name in {*g, *r} if g.get(name) != r.get(name))
    if not other:
        return []
    names = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
    if any(f.code == "provenance.model.weights_used_sha256" for f in so_far):
        message = f"stored bytes of {len(other)} of {len({*g, *r})} weight tensors differ: {names}"
    else:
        message = f"stored bytes of {len(other)} weight tensors differ though the weights as used do not: {names}"
    return [Finding(Level.NOTE, "weights.stored", message, hint="weights")]


def _compare_origin(golden: Evidence, run: Evidence) -> list[Finding]:
    recorded = _look_up(run.manifest, "run.golden_manifest_sha256")
    if recorded in (None, _MISSING) or golden.manifest_sha256 in (None, recorded):
        return []
    message = "the run was made from another golden file than this one, which alone is no fault"
    return [Finding(Level.NOTE, "origin", message, golden=golden.manifest_sha256, run=recorded)]


def _look_up(manifest: Mapping[str, object], path: str) -> object:
    node: object = manifest
    for key in path.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return _MISSING
        node = node[key]
    return node


def _equal(g: object, r: object) -> bool:
    if isinstance(g, bool) or isinstance(r, bool):
        return g is r
    if isinstance(g, list) and isinstance(r, list) and all(isinstance(x, int) for x in [*g, *r]):
        return sorted(set(g)) == sorted(set(r))  # ids are a set
    return g == r


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 40 else f"{text[:16]}..."

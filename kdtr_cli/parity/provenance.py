"""Are golden and run about the same thing? Asked before any number is looked at.

Model config, weights as used, rotary table, contract version, numerical choices, decoding settings, and for each
sequence its prompt and sampling stream must be the same on both sides. One that differs makes the pair INVALID: to
call such a run DIVERGED would blame an engine that was asked another question.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from kdtr_cli.parity.evidence import Evidence, EvidenceSequence
from kdtr_cli.parity.verdicts import Finding, Level, Verdict

__all__ = ["check_kinds", "compare_manifests", "compare_prompts"]

_MISSING = object()

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


def _unknown(golden: Evidence, run: Evidence, path: str) -> str | None:
    """Why two digests can't be compared; None: they can."""
    for evidence in (golden, run):
        if _look_up(evidence.manifest, path) in (None, _MISSING):
            return f"the {evidence.kind} does not say"
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
    return [Finding(Level.ERROR, f"provenance.{path}", message, Verdict.INVALID, golden=g, run=r)]


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
    return [Finding(Level.NOTE, "weights.stored", message)]


def _compare_origin(golden: Evidence, run: Evidence) -> list[Finding]:
    recorded = _look_up(run.manifest, "run.golden_manifest_sha256")
    if recorded in (None, _MISSING) or golden.manifest_sha256 in (None, recorded):
        return []
    message = "the run was made from another golden file than this one; all that matters in it is the same"
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

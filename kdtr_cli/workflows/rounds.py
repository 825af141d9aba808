"""The rounds that a bundle stores: read, checked against every invariant, and as documents for `kdtr inspect`."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.bundle.reader import Bundle, BundleSequence
from kdtr_cli.ddtree.rounds import DraftSettings, Round, check_marginals, check_rounds, statistics, unpack_rounds
from kdtr_cli.errors import InputError
from kdtr_cli.model.tokenizer import load_tokenizer

__all__ = ["broken_rounds", "describe_round", "describe_rounds", "stored_rounds", "stored_settings"]


def stored_rounds(bundle: Bundle, sequence: BundleSequence) -> list[Round] | None:
    """A sequence's rounds, taken as they are; None where it stores none. InputError where they can't be cut apart."""
    names = [name for name in sequence.array_names() if name.startswith("rounds/")]
    if not names:
        return None
    try:
        return unpack_rounds({name: sequence.array(name) for name in names})
    except InputError as error:
        raise InputError(f"{bundle.path}: sequence {sequence.id!r}: {error}") from None


def stored_settings(bundle: Bundle) -> DraftSettings:
    """How the bundle's rounds were drafted; InputError where the manifest does not say."""
    drafting = bundle.manifest.get("drafting", {})
    missing = [key for key in ("mode", "drafter", "budget", "block_size") if key not in drafting]
    if missing:
        raise InputError(f"{bundle.path}: it has rounds, but its manifest lacks 'drafting/{missing[0]}'")
    return DraftSettings(drafting["mode"], drafting["drafter"], drafting["budget"], drafting["block_size"])


def broken_rounds(bundle: Bundle, sequence: BundleSequence) -> list[str]:
    """Every invariant that a sequence's rounds/ and drafts/ break, as 'round 3: invariant: what'; [] without rounds.

    InputError where they can't be read.
    """
    found = []
    names = sequence.array_names()
    if bundle.vocab is not None and {"drafts/top_ids", "drafts/top_logps", "drafts/counts"} <= set(names):
        parts = (sequence.array(f"drafts/{name}") for name in ("top_ids", "top_logps", "counts"))
        for t, marginals in enumerate(zip(*parts, strict=True)):
            found += [f"drafts of position {t}: {problem}" for problem in check_marginals(*marginals, bundle.vocab)]
    rounds = stored_rounds(bundle, sequence)
    if rounds is None:
        return found
    decoding = bundle.manifest["decoding"]
    return found + check_rounds(
        rounds,
        stored_settings(bundle),
        len(sequence.prompt),
        sequence.tokens,
        steps=decoding["steps"],
        stop_ids=[] if decoding["ignore_eos"] else decoding["stop_ids"],
        vocab_size=2**31 if bundle.vocab is None else bundle.vocab,
        max_positions=_max_positions(bundle.config_text),
    )


def _max_positions(config_text: str) -> int:
    config = json.loads(config_text)
    nested = config.get("text_config")
    value = {**config, **nested}.get("max_position_embeddings") if isinstance(nested, dict) else None
    value = config.get("max_position_embeddings") if value is None else value
    return value if isinstance(value, int) and not isinstance(value, bool) else 2**31


def describe_rounds(bundle: Bundle) -> dict[str, Any] | None:
    """Statistics of all rounds of a bundle, JSON-ready; None where it has none. InputError where they can't be read."""
    each = [rounds for s in bundle.sequences if (rounds := stored_rounds(bundle, s)) is not None]
    if not each:
        return None
    figures = statistics([one for rounds in each for one in rounds], len(each))
    return {**figures, "histogram": {str(length): count for length, count in figures["histogram"].items()}}


def describe_round(
    bundle: Bundle, sequence: BundleSequence, number: int, tokenizer_folder: Path | None = None
) -> dict[str, Any]:
    """One round of a sequence, JSON-ready, its tree as a list of nodes; token texts where a tokenizer is given.

    InputError: no such round, or one that is no sound round, by the name of the invariant that it breaks.
    """
    rounds = stored_rounds(bundle, sequence)
    if rounds is None:
        raise InputError(f"{bundle.path}: sequence {sequence.id!r} has no rounds; it was decoded without a drafter")
    if not 0 <= number < len(rounds):
        has = f"{len(rounds)} rounds, 0 to {len(rounds) - 1}" if rounds else "no rounds"
        raise InputError(f"{bundle.path}: no round {number} in sequence {sequence.id!r}; it has {has}")
    broken = broken_rounds(bundle, sequence)
    if broken:
        raise InputError(f"{bundle.path}: sequence {sequence.id!r}: {broken[0]}")
    tokenizer = load_tokenizer(tokenizer_folder) if tokenizer_folder is not None else None

    def text(token: int) -> str | None:
        return tokenizer.decode([token]) if tokenizer is not None else None

    one = rounds[number]
    accepted = set(one.accepted.tolist())
    nodes = [
        {
            "node": i,
            "token": int(one.tree.tokens[i]),
            "text": text(int(one.tree.tokens[i])),
            "parent": int(one.tree.parents[i]),
            "position": one.start + int(one.tree.depths[i]),
            "score": float(one.tree.scores[i]),
            "accepted": i in accepted,
            "posterior": int(one.posterior[i]),
        }
        for i in range(one.tree.n + 1)
    ]
    return {
        "sequence": sequence.id,
        "number": number,
        "of": len(rounds),
        "start": one.start,
        "accepted": one.accepted.tolist(),
        "bonus": one.bonus,
        "bonus_text": text(one.bonus),
        "candidates": np.asarray(one.draft_counts).tolist(),
        "nodes": nodes,
    }

"""A bundle's rounds as evidence for `kdtr diff`: are they rounds at all, and do they keep the rules?

Whatever a file holds comes out as rounds or as a problem with a name. What would make later checks slow or wild (trees
beyond the budget, numbers out of range) is looked for first, so that nothing here walks an unsound tree.
"""

import re
from collections.abc import Iterator

import numpy as np

from kdtr_cli.bundle.reader import Bundle, BundleSequence
from kdtr_cli.ddtree.accept import check_walk
from kdtr_cli.ddtree.rounds import DraftSettings, Round, unpack_rounds
from kdtr_cli.ddtree.tree import check_tree
from kdtr_cli.errors import InputError
from kdtr_cli.parity.evidence import RoundProblem, Rounds
from kdtr_cli.parity.rounds import fault
from kdtr_cli.workflows.rounds import broken_rounds, stored_settings

__all__ = ["drafts_kept", "has_rounds", "read_rounds"]

_ANY_ID = 2**31  #: the bound of token ids where the vocabulary is not known
_NUMBER = re.compile(r"round ([0-9]+): ")


def has_rounds(sequence: BundleSequence) -> bool:
    """Whether a sequence stores any part of rounds."""
    return any(name.startswith("rounds/") for name in sequence.array_names())


def drafts_kept(bundle: Bundle) -> int | None:
    """How many candidates a depth every sequence of a golden keeps for a replay; None where one keeps none."""
    path = "drafts/top_ids"
    kept = [s.shape(path)[2] if path in s.array_names() else None for s in bundle.sequences]
    return None if not kept or None in kept else min(kept)


def read_rounds(bundle: Bundle, sequence: BundleSequence) -> Rounds:
    """A sequence's rounds with every problem that they have. InputError: the arrays are damaged."""
    try:
        settings = stored_settings(bundle)
    except InputError as error:
        return _malformed(f"their settings in the manifest: {error}")
    mode = bundle.manifest["decoding"]["mode"]
    if settings.mode != mode:
        return _malformed(f"the manifest says mode {mode!r}, and {settings.mode!r} of the drafting")
    vocab = _ANY_ID if bundle.vocab is None else bundle.vocab
    if (problem := _check_sizes(sequence, settings, vocab)) is not None:
        return _malformed(problem)
    arrays = {name: sequence.array(name) for name in sequence.array_names() if name.startswith("rounds/")}
    if (problem := fault(arrays)) is not None:
        return _malformed(problem)
    for number, one in enumerate(unpack_rounds(arrays)):
        if (problem := next(_unsound(one, settings, vocab), None)) is not None:
            return Rounds(arrays, (RoundProblem(f"round {number}: {problem}", malformed=True, round=number),))
    return Rounds(arrays, tuple(_problem(text) for text in broken_rounds(bundle, sequence)))


def _malformed(text: str) -> Rounds:
    return Rounds({}, (RoundProblem(text, malformed=True),))


def _problem(text: str) -> RoundProblem:
    match = _NUMBER.match(text)
    return RoundProblem(text, round=None if match is None else int(match[1]))


def _check_sizes(sequence: BundleSequence, settings: DraftSettings, vocab: int) -> str | None:
    """What is wrong with the sizes, from shapes and the nodes a round alone."""
    names = sequence.array_names()
    for name in ("rounds/start", "rounds/n_nodes", "rounds/draft_top_ids"):
        if name not in names:
            return f"{name} is missing"
    count = sequence.shape("rounds/start")[0]
    if count > len(sequence.tokens):
        return f"{count} rounds for {len(sequence.tokens)} tokens; each round emits one at least"
    shape, due = sequence.shape("rounds/draft_top_ids"), (count, settings.horizon, settings.width(vocab))
    if shape != due:
        return f"marginals: rounds/draft_top_ids has shape {list(shape)}; block size and budget give {list(due)}"
    nodes = sequence.array("rounds/n_nodes")
    if len(large := np.flatnonzero(nodes > settings.nodes)):
        return f"round {large[0]}: budget: {nodes[large[0]]} nodes; the budget is {settings.nodes}"
    return None


def _unsound(one: Round, settings: DraftSettings, vocab: int) -> Iterator[str]:
    """In what way this is no round: a tree that is none, ids outside the vocabulary, a path that is none."""
    tree, width = one.tree, settings.width(vocab)
    outside = np.flatnonzero((tree.depths[1:] < 1) | (tree.depths[1:] > settings.horizon)) + 1
    for node in outside:
        yield f"horizon: node {node} has depth {tree.depths[node]}; 1 to {settings.horizon} are possible"
    yield from check_tree(tree.tokens, tree.parents, tree.depths, settings.nodes, vocab_size=vocab)
    for depth in np.flatnonzero((one.draft_counts < 0) | (one.draft_counts > width)):
        yield f"marginals: depth {depth + 1} counts {one.draft_counts[depth]} candidates; 0 to {width} are possible"
    for row in np.flatnonzero((one.posterior < 0) | (one.posterior >= vocab)):
        yield f"token: posterior {row} is {one.posterior[row]}; the vocabulary is 0 to {vocab - 1}"
    walk = check_walk(tree, one.posterior, one.accepted, one.bonus)
    yield from (problem for problem in walk if problem.startswith("accepted path rooted"))

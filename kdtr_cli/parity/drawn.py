"""Which sequences reports draw: a bounded number, the worst first. Of the others the bulky parts of the results, which
nothing else looks at, are let go."""

from collections.abc import Iterable
from dataclasses import replace

from kdtr_cli.parity.curves import MAX_ENTRIES
from kdtr_cli.parity.results import SequenceResult
from kdtr_cli.parity.verdicts import Verdict

__all__ = ["MAX_DRAWN", "curve_entries", "drawn_sequences", "lightened"]

#: So many sequences are drawn.
MAX_DRAWN = 16

_RANK = {verdict: rank for rank, verdict in enumerate(Verdict)}


def drawn_sequences(sequences: Iterable[SequenceResult]) -> list[SequenceResult]:
    """The sequences that are drawn, the worst first, among equals the earlier ones."""
    return sorted(sequences, key=lambda s: (-_RANK[s.verdict], s.index))[:MAX_DRAWN]


def curve_entries(result: SequenceResult) -> int:
    """How many entries the curves of a sequence have."""
    parts = (result.logits, result.prompt_logits)
    return sum(0 if part is None or part.curves is None else len(part.curves) for part in parts)


def lightened(sequences: Iterable[SequenceResult]) -> list[SequenceResult]:
    """The same sequences in the same order; curves and rounds are kept of those alone that are drawn, the worst first,
    and of these no more curves than MAX_ENTRIES entries have room for (but those of the worst one). They are let go
    while the sequences come in, so that memory is that of a few, however many there are."""
    kept: list[SequenceResult] = []
    heavy: list[int] = []  # where in `kept` those are that still have everything
    entries = 0
    for result in sequences:
        heavy.append(len(kept))
        kept.append(result)
        entries += curve_entries(result)
        if len(heavy) > 2 * MAX_DRAWN or entries > 2 * MAX_ENTRIES:
            heavy, entries = _let_go(kept, heavy)
    _let_go(kept, heavy)
    return kept


def _let_go(kept: list[SequenceResult], heavy: list[int]) -> tuple[list[int], int]:
    """Those of `heavy` that are left, and how many entries they have."""
    order = sorted(heavy, key=lambda i: (-_RANK[kept[i].verdict], kept[i].index))
    left, entries = 0, 0
    for i in order[:MAX_DRAWN]:
        more = curve_entries(kept[i])
        if left and entries + more > MAX_ENTRIES:
            break
        left, entries = left + 1, entries + more
    for i in order[left:]:
        kept[i] = _light(kept[i])
    return order[:left], entries


def _light(result: SequenceResult) -> SequenceResult:
    prompt, rounds = result.prompt_logits, result.rounds
    return replace(
        result,
        logits=replace(result.logits, curves=None),
        prompt_logits=None if prompt is None else replace(prompt, curves=None),
        rounds=None if rounds is None else replace(rounds, golden_arrays=None, run_arrays=None),
    )

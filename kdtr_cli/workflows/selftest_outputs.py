"""Sabotages of a run's output, and the writer that makes a bundle of what is left."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from kdtr_cli.bundle.manifest import OWN_KEYS
from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.writer import BundleWriter

__all__ = ["dropped", "one_nan", "one_step_late", "rewrite", "shifted", "truncated"]

_LOGITS = "logits/engine"

Sequences = list[SequenceData]


def rewrite(source: Path, target: Path, change: Callable[[Sequences], Sequences]) -> None:
    """Write the run bundle ``source`` to ``target`` with what ``change`` makes of its sequences."""
    with open_bundle(source) as bundle, BundleWriter(target, bundle.kind) as writer:
        sequences = [
            SequenceData(s.id, s.stream, s.prompt, s.tokens, s.finish_reason, {n: s.array(n) for n in s.array_names()})
            for s in bundle.sequences
        ]
        writer.add_config(bundle.config_text)
        for sequence in change(sequences):
            writer.add_sequence(sequence)
        writer.finish({key: value for key, value in bundle.manifest.items() if key not in OWN_KEYS})


def _last(sequences: Sequences, change: Callable[[np.ndarray], np.ndarray]) -> Sequences:
    """The last sequence with other logits: a judge that looks at the first alone sees nothing."""
    *others, last = sequences
    return [*others, replace(last, arrays={**last.arrays, _LOGITS: change(last.arrays[_LOGITS].copy())})]


def one_nan(sequences: Sequences) -> Sequences:
    """NaN in the last row, at an id that nobody chose."""

    def change(logits: np.ndarray) -> np.ndarray:
        logits[-1, int(logits[-1].argmin())] = np.nan
        return logits

    return _last(sequences, change)


def shifted(sequences: Sequences) -> Sequences:
    """Half a unit on every logit: no token and no probability changes."""
    return _last(sequences, lambda logits: logits + np.float32(0.5))


def one_step_late(sequences: Sequences) -> Sequences:
    """The logits of each step but the first are those of the step before."""
    return _last(sequences, lambda logits: np.concatenate([logits[:1], logits[:-1]]))


def truncated(sequences: Sequences) -> Sequences:
    """The last sequence without its last token, of which everything else is whole."""
    *others, last = sequences
    shorter = {name: a[:-1] for name, a in last.arrays.items() if name == _LOGITS or name.startswith("trace/")}
    return [*others, replace(last, tokens=last.tokens[:-1], arrays={**last.arrays, **shorter})]


def dropped(sequences: Sequences) -> Sequences:
    """All but the last sequence."""
    return sequences[:-1]

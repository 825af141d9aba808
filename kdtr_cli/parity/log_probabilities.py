"""A golden's logits as log-probabilities, for a run that has nothing else.

Servers hand out log-probabilities. Of the logits behind them a constant a row is lost, so the two are compared as what
the run's are: the golden's log-softmax, in float64 over its full rows. Where the golden keeps less than full rows their
sum is not known, and so none of their log-probabilities.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kdtr_cli.parity.evidence import Evidence, Logits

__all__ = ["LOGPROBS", "as_log_probabilities", "log_softmax", "values_of"]

#: The manifest's word for a run whose values are log-probabilities.
LOGPROBS = "logprobs"


def values_of(evidence: Evidence) -> str:
    """What a side's values are: "logits" or "logprobs"."""
    return LOGPROBS if evidence.manifest.get("values") == LOGPROBS else "logits"


def log_softmax(rows: np.ndarray) -> np.ndarray:
    """The log-probabilities of rows of logits [n, V]: float64 [n, V]. A row that is not finite comes out so."""
    with np.errstate(invalid="ignore", over="ignore"):
        wide = rows.astype(np.float64)
        shifted = wide - wide.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def as_log_probabilities(golden: Evidence) -> Evidence:
    """The golden with all its logits as log-probabilities."""
    return replace(
        golden,
        sequences=tuple(
            replace(s, logits=_all(s.logits), prompt_logits=_all(s.prompt_logits)) for s in golden.sequences
        ),
    )


def _all(held: Mapping[str, Logits]) -> dict[str, Logits]:
    return {name: _one(logits) for name, logits in held.items()}


def _one(logits: Logits) -> Logits:
    wide = np.dtype(np.float64)
    if logits.rows is None or logits.vocab is None:
        return Logits(logits.n_rows, logits.vocab, wide)
    rows = logits.rows
    return Logits(
        logits.n_rows,
        logits.vocab,
        wide,
        rows=lambda lo, hi: log_softmax(rows(lo, hi)),
        uniform=-math.log(logits.vocab),
    )

"""What a judgement is made of: the tokens and logits of a golden or a run, in memory or read block by block.

Nothing here knows of files. A bundle, a foreign engine's answer and a test all become an `Evidence`; logits stay
behind functions that return a block of rows, so that an 80 GB bundle is judged in a few megabytes.

Logits come in three forms, the richest first:

* **full**: every value, `rows(lo, hi)` -> float [hi - lo, V];
* **top:K**: the K largest values of a row with their ids, `top_ids` int32 [n, K] and `top_values` float [n, K];
* **digest**: the SHA-256 of a row's bytes, `row_sha256` uint8 [n, 32]; it says whether two rows are equal, no more.

A top:K set may have the digests too.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

__all__ = [
    "Evidence",
    "EvidenceSequence",
    "Logits",
    "ModelFacts",
    "RoundProblem",
    "Rounds",
    "Rows",
    "Scan",
    "Tensor",
    "logits_of",
    "sha256_rows",
]

#: A function from a half-open range of rows to an array of these rows.
Rows = Callable[[int, int], np.ndarray]


class Scan(Protocol):
    """One pass over rows that are verified by it. `sha256` is the digest that they claim; `rows` reads a range of rows,
    unverified, on any thread, and may put them into the bytes `memory` (uint8, as many or more). `feed` must be given
    all rows in order, by one thread at a time; then `finish` raises unless they have the digest. What was drawn from
    the rows may not be used before."""

    sha256: str

    def rows(self, lo: int, hi: int, memory: np.ndarray | None = None) -> np.ndarray: ...

    def feed(self, rows: np.ndarray) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class Logits:
    """One named set of logits of a sequence: `n_rows` rows over a vocabulary of `vocab` (None: not known).

    `dtype` is the type the values are stored in (float16, float32, float64 or ml_dtypes.bfloat16); `k` is the K of
    top:K. `dataset_sha256` gives the *verified* SHA-256 of all rows (C order, little endian), where it is known:
    two sets of the same shape and dtype with equal digests are the same bits. `scan` begins one pass over the full rows
    that verifies them on the way, so that a file is read once. `top_counts` int32 [n]: how many of a row's top K are
    there (None: all); what lies past a count is nothing. `uniform` is the value that an engine which knows nothing
    gives every id.
    """

    n_rows: int
    vocab: int | None
    dtype: np.dtype
    rows: Rows | None = None
    top_ids: Rows | None = None
    top_values: Rows | None = None
    k: int = 0
    row_sha256: Rows | None = None
    dataset_sha256: Callable[[], str] | None = None
    scan: Callable[[], Scan] | None = None
    top_counts: Rows | None = None
    uniform: float = 0.0

    @property
    def form(self) -> str:
        """``full``, ``topK`` (with the number: ``top20``) or ``digest``."""
        if self.rows is not None:
            return "full"
        return f"top{self.k}" if self.top_values is not None else "digest"


@dataclass(frozen=True)
class Tensor:
    """One tensor of a trace: rows [n_rows, width] of a float dtype, or int32. `digest`: the *verified* one of all rows,
    where it is known."""

    n_rows: int
    width: int
    dtype: np.dtype
    rows: Rows
    digest: Callable[[], str] | None = None


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """What a diagnosis may know of the model. `constants`: numbers of its config by name ("routed_scaling_factor").
    `rotary`: radians a position of each rotary pair, float64 [rope / 2], of which pair i is (i, i + rope / 2)."""

    constants: Mapping[str, float]
    rotary: np.ndarray


@dataclass(frozen=True)
class RoundProblem:
    """A broken invariant of a sequence's rounds: `text` names it, what and where ("round 3: no cycle: node 5 is its own
    ancestor"). `malformed`: these are no rounds at all, whoever recorded them; else they are rounds that do not follow
    the rules, which the engine that made them has to answer for. `round`: which one, None: the sequence as a whole."""

    text: str
    malformed: bool = False
    round: int | None = None


@dataclass(frozen=True, eq=False)
class Rounds:
    """The DDTree or chain rounds of a sequence: the arrays of a bundle's rounds/ by path (docs/bundle.md), and what is
    wrong with them. Where a problem is `malformed` there may be no arrays."""

    arrays: Mapping[str, np.ndarray]
    problems: tuple[RoundProblem, ...] = ()


@dataclass(frozen=True)
class EvidenceSequence:
    """One prompt and what came out. `prompt` int32 [P], `tokens` int32 [T], `finish_reason` "length" or "stop".

    `logits` and `prompt_logits` map the arithmetic (golden: "exact", "float64"; run: "engine") to its logits: T rows,
    row t the logits that token t was chosen from; P rows, row p the logits after the prompt's ids 0..p.
    `ties` are the steps where the golden recorded that its float64 argmax is another token than its own. `rounds` reads
    what was recorded of the rounds; None: nothing was. `trace` has its tensors by name, in order of execution; row p is
    of the token that was fed at position p.
    """

    id: str
    stream: int
    prompt: np.ndarray
    tokens: np.ndarray
    finish_reason: str
    logits: Mapping[str, Logits] = field(default_factory=dict)
    prompt_logits: Mapping[str, Logits] = field(default_factory=dict)
    ties: tuple[int, ...] = ()
    rounds: Callable[[], Rounds] | None = None
    trace: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """All that one side brings. `kind` is "golden" or "run", `manifest` the bundle's (docs/bundle.md), `name` what to
    call it in a report, `manifest_sha256` the digest that a run records of the golden it was made from, `vocab_size`
    the model's, where the config says; `drafts_kept` how many candidates a depth a golden keeps for a replay, where it
    keeps any; `facts` of the model, for a diagnosis."""

    kind: str
    manifest: Mapping[str, object]
    sequences: tuple[EvidenceSequence, ...]
    name: str = ""
    manifest_sha256: str | None = None
    vocab_size: int | None = None
    drafts_kept: int | None = None
    facts: ModelFacts | None = None


def sha256_rows(rows: np.ndarray) -> np.ndarray:
    """The SHA-256 of each row's bytes (little endian, as stored): [n, V] of any dtype -> uint8 [n, 32]."""
    block = np.ascontiguousarray(rows)
    block = block.astype(block.dtype.newbyteorder("<"), copy=False) if block.dtype.byteorder == ">" else block
    out = np.empty((len(block), 32), np.uint8)
    for i, row in enumerate(block):
        out[i] = np.frombuffer(hashlib.sha256(row.view(np.uint8)).digest(), np.uint8)
    return out


def logits_of(values: np.ndarray, form: str = "full", *, digest: bool = False) -> Logits:
    """`Logits` of an array [n, V], reduced to `form`: "full", "top:K" or "digest". `digest`: with the digest of the
    whole, which lets equal sets be recognised without looking at their values."""
    n, vocab = values.shape
    if form == "full":
        whole = (lambda: hashlib.sha256(np.ascontiguousarray(values).view(np.uint8)).hexdigest()) if digest else None
        return Logits(n, vocab, values.dtype, rows=lambda lo, hi: values[lo:hi], dataset_sha256=whole)
    row_digests = sha256_rows(values)
    if form == "digest":
        return Logits(n, None, values.dtype, row_sha256=lambda lo, hi: row_digests[lo:hi])
    k = min(int(form.removeprefix("top:")), vocab)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        wide = values.astype(np.float64)
    key = np.where(np.isnan(values), np.inf, wide)  # NaN first, so that it can't hide (rule 6)
    order = np.argsort(-key, axis=1, kind="stable")[:, :k].astype(np.int32)
    top = np.take_along_axis(values, order, axis=1)
    return Logits(
        n,
        vocab,
        values.dtype,
        top_ids=lambda lo, hi: order[lo:hi],
        top_values=lambda lo, hi: top[lo:hi],
        k=k,
        row_sha256=lambda lo, hi: row_digests[lo:hi],
    )

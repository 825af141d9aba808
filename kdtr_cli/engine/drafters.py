"""Drafters on the device: each leaves a round's marginals in `ids`, `logps` and `counts`, by launches alone.

A drafter is told of a sequence when it takes a slot (``admit``), sees every prefill pass (``extend``), drafts from the
round's state (``draft``) and is told which verify rows were accepted (``commit``). The last two are captured in the
round's graph. Definitions: docs/numerics.md rules 17 and 21 to 24; NumPy twins in kdtr_cli/reference/drafters.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kdtr_cli.engine.devices import Device, DeviceArray
from kdtr_cli.engine.launch import Launcher
from kdtr_cli.engine.transformer import Observe, Rows, unobserved

__all__ = ["Drafter", "NgramDrafter", "ReplayDrafter", "RoundState", "Sequence", "SyntheticDrafter"]


@dataclass(frozen=True)
class RoundState:
    """The state of B requests on the device, int32: what a round begins with and leaves for the next."""

    starts: DeviceArray  #: [B] committed positions = the position of the root
    roots: DeviceArray  #: [B] the token chosen last, not fed yet
    history: DeviceArray  #: [B, capacity] tokens by position, the root included
    streams: DeviceArray  #: [B]
    active: DeviceArray  #: [B] 0: the request rests, its round changes nothing


@dataclass(frozen=True)
class Sequence:
    """What a drafter may know of a sequence: its prompt, stream, and, for synthetic and replay, a golden's output."""

    prompt: np.ndarray  #: int32 [P]
    stream: int
    known: np.ndarray | None = None  #: int32 [T]: the golden's tokens
    top_ids: np.ndarray | None = None  #: int32 [T, L, K]: a golden's marginals at every output position
    top_logps: np.ndarray | None = None  #: float32 [T, L, K]
    counts: np.ndarray | None = None  #: int32 [T, L]


class Drafter(Protocol):
    """The one interface of all drafters; arrays for B requests, horizon L, K candidates a depth."""

    horizon: int
    k: int
    ids: DeviceArray  #: int32 [B, L, K], best first
    logps: DeviceArray  #: float32 [B, L, K]
    counts: DeviceArray | None  #: int32 [B, L]: how many candidates a depth has; None: K everywhere
    tap: Observe  #: observer of the target's forward passes, captured with them

    def load(self) -> None: ...

    def admit(self, slot: int, sequence: Sequence) -> None: ...

    def extend(self, rows: Rows) -> None: ...

    def draft(self, state: RoundState) -> None: ...

    def commit(self, state: RoundState, accepted: DeviceArray) -> None: ...


class _Marginals:
    """The arrays that every drafter fills."""

    tap = staticmethod(unobserved)

    kernel = ""  #: the one kernel that drafts

    def __init__(self, device: Device, batch: int, horizon: int, k: int) -> None:
        self.device, self.batch, self.horizon, self.k = device, batch, horizon, k
        self.launch = Launcher(device)
        self.ids = device.alloc("draft.ids", (batch, horizon, k), np.int32)
        self.logps = device.alloc("draft.logps", (batch, horizon, k), np.float32)
        self.counts = device.alloc("draft.counts", (batch, horizon), np.int32)

    def load(self) -> None:
        """Compile and load what ``draft`` launches: a capture can load nothing."""
        self.launch.load([self.kernel])

    def out(self) -> dict[str, object]:
        return {"ids": self.ids, "logps": self.logps, "counts": self.counts, "batch": self.batch, "k": self.k}

    def extend(self, rows: Rows) -> None:
        """A prefill pass tells a drafter without features nothing."""

    def commit(self, state: RoundState, accepted: DeviceArray) -> None:
        """Nor does a round: what was accepted stands in the history."""


class NgramDrafter(_Marginals):
    """Prompt look-up: what followed the last 3, 2 or 1 tokens before (rule 22)."""

    kernel = "draft_ngram"

    def admit(self, slot: int, sequence: Sequence) -> None:
        """The round's history holds all that this drafter needs."""

    def draft(self, state: RoundState) -> None:
        self.launch(
            self.kernel,
            history=state.history,
            starts=state.starts,
            horizon=self.horizon,
            history_row=state.history.shape[1],
            **self.out(),
        )


class SyntheticDrafter(_Marginals):
    """Seeded marginals around a known continuation that hit with a given rate (rule 23)."""

    kernel = "draft_synthetic"

    def __init__(
        self, device: Device, batch: int, horizon: int, k: int, *, rate: float, seed: int, vocab: int, known: int
    ) -> None:
        super().__init__(device, batch, horizon, k)
        self.rate, self.seed, self.vocab = rate, seed, vocab
        self.known = device.alloc("draft.known", (batch, max(1, known)), np.int32)
        self.known_from = device.upload("draft.known_from", np.zeros(batch, np.int32))
        self.known_count = device.upload("draft.known_count", np.zeros(batch, np.int32))

    def admit(self, slot: int, sequence: Sequence) -> None:
        tokens = np.zeros(0, np.int32) if sequence.known is None else sequence.known
        row = self.known.shape[1]
        self.device.write(self.known.view(slot * row, (len(tokens),)), tokens.astype(np.int32))
        self.device.write(self.known_from.view(slot, (1,)), np.array([len(sequence.prompt)], np.int32))
        self.device.write(self.known_count.view(slot, (1,)), np.array([len(tokens)], np.int32))

    def draft(self, state: RoundState) -> None:
        self.launch(
            self.kernel,
            known=self.known,
            known_from=self.known_from,
            known_count=self.known_count,
            streams=state.streams,
            starts=state.starts,
            horizon=self.horizon,
            known_row=self.known.shape[1],
            vocab=self.vocab,
            rate=self.rate,
            seed_low=self.seed & 0xFFFFFFFF,
            seed_high=self.seed >> 32,
            **self.out(),
        )


class ReplayDrafter(_Marginals):
    """Marginals stored in a golden at every output position (rule 24)."""

    kernel = "draft_replay"

    def __init__(self, device: Device, batch: int, horizon: int, k: int, *, positions: int, kept: int) -> None:
        super().__init__(device, batch, horizon, k)
        self.positions, self.kept = max(1, positions), kept
        shape = (batch, self.positions, horizon)
        self.top_ids = device.alloc("draft.top_ids", (*shape, kept), np.int32)
        self.top_logps = device.alloc("draft.top_logps", (*shape, kept), np.float32)
        self.top_counts = device.alloc("draft.top_counts", shape, np.int32)
        self.prompt_lengths = device.upload("draft.prompt_lengths", np.zeros(batch, np.int32))
        self.limits = device.upload("draft.limits", np.zeros(batch, np.int32))

    def admit(self, slot: int, sequence: Sequence) -> None:
        stored = len(sequence.counts)
        for array, values in (
            (self.top_ids, sequence.top_ids),
            (self.top_logps, sequence.top_logps),
            (self.top_counts, sequence.counts),
        ):
            first = array.size // self.batch * slot
            self.device.write(array.view(first, values.shape), values)
        self.device.write(self.prompt_lengths.view(slot, (1,)), np.array([len(sequence.prompt)], np.int32))
        self.device.write(self.limits.view(slot, (1,)), np.array([stored], np.int32))

    def draft(self, state: RoundState) -> None:
        self.launch(
            self.kernel,
            top_ids=self.top_ids,
            top_logps=self.top_logps,
            top_counts=self.top_counts,
            prompt_lengths=self.prompt_lengths,
            limits=self.limits,
            starts=state.starts,
            positions=self.positions,
            horizon=self.horizon,
            kept=self.kept,
            **self.out(),
        )

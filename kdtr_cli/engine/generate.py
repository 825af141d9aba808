"""Autoregressive decoding on a device: chunked prefill, then one graph a step, sequences joining and leaving."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kdtr_cli.engine.devices import Device, DeviceArray
from kdtr_cli.engine.recorder import Recorder, watching
from kdtr_cli.engine.statistics import Statistics
from kdtr_cli.engine.transformer import Observe, Rows, Transformer, unobserved
from kdtr_cli.errors import DeviceError
from kdtr_cli.model.prompts import Decoding, Generated, Prompt
from kdtr_cli.model.traces import Trace

__all__ = ["Request", "blame", "generate", "prompt_rows"]


@dataclass(frozen=True)
class Request:
    """A prompt to continue; with ``forced`` int32 [T] those tokens are fed, whatever the engine chooses."""

    prompt: Prompt
    forced: np.ndarray | None = None


class _Running:
    """A sequence that holds a slot."""

    def __init__(self, index: int, request: Request, steps: int, vocab: int) -> None:
        self.index, self.request = index, request
        self.steps = steps if request.forced is None else min(steps, len(request.forced))
        self.tokens: list[int] = []
        self.logits = np.empty((self.steps, vocab), np.float32)
        self.prompt_logits: np.ndarray | None = None
        self.trace: Trace | None = None

    def take(self, token: int, logits: np.ndarray, decoding: Decoding) -> str | None:
        """Record a chosen token; the reason to finish, if this was the last one."""
        self.logits[len(self.tokens)] = logits
        self.tokens.append(token)
        forced = self.request.forced
        if forced is None and decoding.stops(token):
            return "stop"
        if len(self.tokens) < self.steps:
            return None
        return "stop" if decoding.stops(token if forced is None else int(forced[-1])) else "length"

    def next_token(self) -> int:
        forced = self.request.forced
        return self.tokens[-1] if forced is None else int(forced[len(self.tokens) - 1])

    def finished(self, reason: str) -> Generated:
        n = len(self.tokens)
        trace = None if self.trace is None else self.trace.finished(len(self.request.prompt.ids) + n - 1)
        return Generated(np.array(self.tokens, np.int32), self.logits[:n], self.prompt_logits, reason, trace)


class _Session:
    """Device state of a decoding session and its mirror on the host."""

    def __init__(
        self,
        model: Transformer,
        decoding: Decoding,
        batch: int,
        prefill: int,
        statistics: Statistics | None,
        recorder: Recorder | None,
    ) -> None:
        self.model, self.decoding, self.statistics = model, decoding, statistics
        self.device, self.recorder = model.device, recorder

        def ints(name: str, n: int) -> DeviceArray:
            return self.device.upload(name, np.zeros(n, np.int32))

        rows = max(batch, prefill)
        self.prefill_rows = Rows(
            ints("prefill.tokens", rows), ints("prefill.positions", rows), ints("prefill.slots", rows)
        )
        self.rows = Rows(
            ints("step.tokens", batch),
            ints("step.positions", batch),
            self.device.upload("step.slots", np.arange(batch, dtype=np.int32)),
        )
        self.prefill, self.batch = prefill, batch
        self.streams, self.active = ints("step.streams", batch), ints("step.active", batch)
        self.stream = ints("prefill.stream", 1)
        self.bad, self.chosen = ints("bad", batch), ints("chosen", batch)
        self.tokens, self.positions = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        self.slot_streams, self.is_active = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        self.running: list[_Running | None] = [None] * batch
        self.graph = None
        self.stale = True  # the host's state has changed since it was last written to the device

    # -------------------------------------------------------------------------------------------------- prefill

    def start(self, slot: int, sequence: _Running, keep_prompt_logits: bool) -> str | None:
        """Feed a prompt into a slot and draw its first token; the reason to finish, if that was all."""
        ids, vocab = sequence.request.prompt.ids, self.model.config.vocab_size
        if keep_prompt_logits:
            sequence.prompt_logits = np.empty((len(ids), vocab), np.float32)
        if self.recorder is not None:
            sequence.trace = self.recorder.trace(len(ids) + sequence.steps - 1)
        for first in range(0, len(ids), self.prefill):
            rows = prompt_rows(self.device, self.prefill_rows, slot, ids, first, self.prefill)
            self.model.forward(rows, first + rows.tokens.size, watching(unobserved, self.recorder, rows))
            if self.recorder is not None:
                self.recorder.keep(sequence.trace, np.arange(rows.tokens.size), first)
            if self.statistics is not None:
                self.statistics.prefill_passes += 1
            if keep_prompt_logits:
                part = self.model.head(0, rows.tokens.size)
                sequence.prompt_logits[first : first + rows.tokens.size] = self.device.read(part)
        last = rows.part(rows.tokens.size - 1, 1)
        logits = self.model.head(rows.tokens.size - 1, 1)
        self.device.write(self.stream, np.array([sequence.request.prompt.stream], np.int32))
        self.device.write(self.bad, np.zeros(self.batch, np.int32))
        chosen, bad = self.chosen.view(0, (1,)), self.bad.view(0, (1,))
        self.model.choose(
            last, self.stream, bad, chosen, temperature=self.decoding.temperature, seed=self.decoding.seed
        )
        if self.device.read(bad)[0]:
            self._blame_prefill(slot, ids, sequence)
        self.running[slot] = sequence
        reason = sequence.take(int(self.device.read(chosen)[0]), self.device.read(logits)[0], self.decoding)
        self.positions[slot] = len(ids)
        self.slot_streams[slot], self.is_active[slot] = sequence.request.prompt.stream, 1
        self.tokens[slot] = sequence.next_token()
        self.stale = True
        return reason

    # -------------------------------------------------------------------------------------------------- decoding

    def write_state(self) -> None:
        """Bring the device's step state to the host's: after a sequence joined, left or was forced."""
        self.stale = False
        for array, values in (
            (self.rows.tokens, self.tokens),
            (self.rows.positions, self.positions),
            (self.streams, self.slot_streams),
            (self.active, self.is_active),
        ):
            self.device.write(array, values)

    def _step(self) -> None:
        self.model.forward(self.rows, self.model.capacity, watching(unobserved, self.recorder, self.rows))
        self.model.head(0, self.batch)
        self.model.choose(
            self.rows,
            self.streams,
            self.bad,
            self.chosen,
            temperature=self.decoding.temperature,
            seed=self.decoding.seed,
            active=self.active,
        )

    def step(self) -> list[tuple[int, str | None]]:
        """One replay for all slots; (slot, reason to finish or None) of each running sequence."""
        if self.stale:
            self.write_state()
        if self.recorder is not None:
            self._step()
        else:
            self.graph = self.graph or self.device.capture(self._step)
            self.graph.replay()
        chosen, bad = self.device.read(self.chosen), self.device.read(self.bad)
        logits = self.device.read(self.model.logits.view(0, (self.batch, self.model.config.vocab_size)))
        for slot, sequence in enumerate(self.running):
            if sequence is not None and bad[slot]:
                self._blame_step(sequence)
        if self.statistics is not None:
            busy = np.array([sequence is not None for sequence in self.running])
            self.statistics.count(self.model.chosen_experts(self.batch), busy)
        results = []
        for slot, sequence in enumerate(self.running):
            if sequence is None:
                continue
            if self.recorder is not None:
                self.recorder.keep(sequence.trace, np.array([slot]), int(self.positions[slot]))
            reason = sequence.take(int(chosen[slot]), logits[slot], self.decoding)
            self.positions[slot] += 1
            self.tokens[slot] = sequence.next_token()
            self.stale |= sequence.request.forced is not None
            results.append((slot, reason))
        return results

    def leave(self, slot: int) -> _Running:
        """Free a slot. Its row stays in the graph and repeats its last step, unread."""
        sequence, self.running[slot] = self.running[slot], None
        self.is_active[slot] = 0
        self.stale = True
        self.positions[slot] = min(self.positions[slot], self.model.capacity - 1)
        return sequence

    # -------------------------------------------------------------------------------------------------- failures

    def _blame_prefill(self, slot: int, ids: np.ndarray, sequence: _Running) -> None:
        for first in range(0, len(ids), self.prefill):
            rows = prompt_rows(self.device, self.prefill_rows, slot, ids, first, self.prefill)
            where = f"the prompt from position {first} on"
            observe = blame(self.model, rows.tokens.size, sequence.request.prompt.id, where)
            self.model.forward(rows, first + rows.tokens.size, observe)
        raise DeviceError(f"logits of sequence {sequence.request.prompt.id!r} are not finite after the prompt")

    def _blame_step(self, sequence: _Running) -> None:
        # the failed step again, from the host's state, looking at every tensor
        self.write_state()
        observe = blame(self.model, self.batch, sequence.request.prompt.id, f"step {len(sequence.tokens)}")
        self.model.forward(self.rows, self.model.capacity, observe)
        raise DeviceError(
            f"logits of sequence {sequence.request.prompt.id!r} are not finite at step {len(sequence.tokens)}"
        )


def prompt_rows(device: Device, rows: Rows, slot: int, ids: np.ndarray, first: int, most: int) -> Rows:
    """Rows that feed prompt tokens first .. of a slot, at most ``most``, written into the leading part of ``rows``."""
    part = ids[first : first + most].astype(np.int32)
    used = rows.part(0, len(part))
    device.write(used.tokens, part)
    device.write(used.positions, np.arange(first, first + len(part), dtype=np.int32))
    device.write(used.slots, np.full(len(part), slot, np.int32))
    return used


def blame(model: Transformer, rows: int, name: str, where: str) -> Observe:
    """An observer that looks at every tensor of a pass of this many rows; DeviceError naming the first not finite.

    For a pass that is run once more, outside a capture, after its logits were found not to be finite.
    """
    device = model.device
    first = device.upload("first_nonfinite", np.zeros(1, np.uint64))

    def observe(tensor: str, array: DeviceArray) -> None:
        if array.dtype != np.float32:
            return
        n = array.size // model.rows * rows
        if array.dtype == np.uint16:  # bf16
            found = np.flatnonzero((device.read(array.view(0, (n,))) & 0x7F80) == 0x7F80)
            at = int(found[0]) if len(found) else n
        else:
            device.write(first, np.array([np.iinfo(np.uint64).max], np.uint64))
            model.launch("nonfinite", x=array, first=first, n=n)
            at = int(device.read(first)[0])
        if at < n:
            row = at // (array.size // model.rows)
            raise DeviceError(
                f"{tensor} is not finite in row {row} of {where} (seen in sequence {name!r}): "
                "the engine overflows or reads unwritten memory there"
            )

    return observe


def generate(
    model: Transformer,
    requests: list[Request],
    decoding: Decoding,
    *,
    batch: int,
    prefill: int,
    keep_prompt_logits: bool = False,
    statistics: Statistics | None = None,
    trace: str | None = None,
) -> Iterator[tuple[int, Generated]]:
    """Decode all requests, ``batch`` at a time; yields (index, result) as sequences end.

    A waiting prompt takes a slot as soon as one is free. ``prefill`` rows of a prompt are fed at a time. Neither number
    changes a bit of any result. ``statistics`` counts along; with a ``trace`` level results carry their trace, and the
    steps are not captured. DeviceError, naming the first tensor, when something is not finite.
    """
    recorder = None if trace is None else Recorder(model, trace)
    session = _Session(model, decoding, batch, prefill, statistics, recorder)
    waiting = list(enumerate(requests))[::-1]
    while waiting or any(session.running):
        ended = []
        for slot in range(batch):
            while waiting and session.running[slot] is None:
                index, request = waiting.pop()
                sequence = _Running(index, request, decoding.steps, model.config.vocab_size)
                reason = session.start(slot, sequence, keep_prompt_logits)
                if reason is not None:
                    session.leave(slot)
                    ended.append((sequence, reason))
        if any(session.running):
            for slot, reason in session.step():
                if reason is not None:
                    ended.append((session.leave(slot), reason))
        for sequence, reason in ended:
            yield sequence.index, sequence.finished(reason)

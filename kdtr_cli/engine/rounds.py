"""Speculative decoding on a device: draft, tree, verify, accept, compact, all of one round in one graph replay.

A request's state (committed length, root token, history) lives on the device. In a round nothing is read back; after it
the host takes the accepted nodes and the bonus, and, where the caller wants records, logits and the tree.
Definitions: docs/numerics.md rules 18 to 20.
"""

from collections.abc import Callable, Iterator

import numpy as np

from kdtr_cli.ddtree.rounds import Round
from kdtr_cli.ddtree.tree import Tree
from kdtr_cli.engine.devices import DeviceArray
from kdtr_cli.engine.drafters import Drafter, RoundState, Sequence
from kdtr_cli.engine.generate import Request, blame, prompt_rows
from kdtr_cli.engine.launch import Launcher
from kdtr_cli.engine.recorder import Recorder, watching
from kdtr_cli.engine.statistics import Statistics
from kdtr_cli.engine.transformer import Rows, Transformer, TreeRows
from kdtr_cli.errors import DeviceError
from kdtr_cli.model.prompts import Decoding, Generated
from kdtr_cli.model.traces import Trace

__all__ = ["generate_rounds"]


class _Running:
    """A sequence that holds a slot: its output so far, cut at the stop id and at the limit."""

    def __init__(self, index: int, request: Request, steps: int, vocab: int) -> None:
        self.index, self.request, self.steps = index, request, steps
        self.tokens: list[int] = []
        self.logits = np.empty((steps, vocab), np.float32)
        self.prompt_logits: np.ndarray | None = None
        self.trace: Trace | None = None
        self.rounds: list[Round] = []
        self.reason: str | None = None

    def take(self, tokens: list[int], logits: np.ndarray, decoding: Decoding) -> None:
        """Append output tokens with the logits that chose them, up to the stop id or the limit."""
        for token, row in zip(tokens, logits, strict=True):
            if self.reason is not None:
                return
            self.logits[len(self.tokens)] = row
            self.tokens.append(token)
            if decoding.stops(token):
                self.reason = "stop"
            elif len(self.tokens) == self.steps:
                self.reason = "length"

    def finished(self) -> Generated:
        n, reason = len(self.tokens), self.reason or "length"
        trace = None if self.trace is None else self.trace.finished(len(self.request.prompt.ids) + n - 1)
        return Generated(np.array(self.tokens, np.int32), self.logits[:n], self.prompt_logits, reason, trace)


class _Session:
    """Device state of B requests, and the captured round."""

    def __init__(
        self,
        model: Transformer,
        drafter: Drafter,
        decoding: Decoding,
        *,
        batch: int,
        budget: int,
        prefill: int,
        statistics: Statistics | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.recorder = recorder
        self.model, self.drafter, self.decoding, self.statistics = model, drafter, decoding, statistics
        self.device, self.launch = model.device, Launcher(model.device)
        self.batch, self.budget, self.prefill = batch, budget, prefill
        self.nodes, self.block = budget + 1, drafter.horizon + 1
        rows = batch * self.nodes
        i32 = np.int32

        def zeros(name: str, *shape: int) -> DeviceArray:
            return self.device.upload(name, np.zeros(shape, i32))

        def new(name: str, *shape: int, dtype: type = i32) -> DeviceArray:
            return self.device.alloc(name, shape, dtype)

        self.state = RoundState(
            starts=zeros("round.starts", batch),
            roots=zeros("round.roots", batch),
            history=zeros("round.history", batch, model.capacity),
            streams=zeros("round.streams", batch),
            active=zeros("round.active", batch),
        )
        # what the host takes after a round lies side by side, so that one copy brings it
        sizes = {"tokens": rows, "bad": rows, "bad_draft": batch, "accepted": batch * self.block}
        self.report_sizes = {**sizes, "n_accepted": batch, "bonus": batch}
        self.report = zeros("round.report", sum(self.report_sizes.values()))
        places = np.cumsum([0, *self.report_sizes.values()])[:-1]
        part = {
            name: self.report.view(int(at), (size,))
            for at, (name, size) in zip(places, self.report_sizes.items(), strict=True)
        }
        self.bad, self.bad_draft, self.bonus = part["bad"], part["bad_draft"], part["bonus"]
        self.accepted, self.n_accepted = part["accepted"], part["n_accepted"]
        self.rows = Rows(part["tokens"], new("tree.positions", rows), new("tree.slots", rows))
        self.places, self.tree_starts = new("tree.places", rows), new("tree.starts", rows)
        self.paths = new("tree.paths", rows, self.block)
        self.parents, self.depths = new("tree.parents", batch, self.nodes), new("tree.depths", batch, self.nodes)
        self.scores = new("tree.scores", batch, self.nodes, dtype=np.float64)
        self.visible = new("tree.visible", batch, self.nodes, -(-self.nodes // 32), dtype=np.uint32)
        self.n_nodes = new("tree.n_nodes", batch)
        self.row_streams = zeros("tree.streams", rows)
        self.posterior = new("posterior", rows)
        self.prefill_rows = Rows(
            zeros("prefill.tokens", prefill), zeros("prefill.positions", prefill), zeros("prefill.slots", prefill)
        )
        self.prefill_stream, self.prefill_bad = zeros("prefill.stream", 1), zeros("prefill.bad", 1)
        self.prefill_chosen = new("prefill.chosen", 1)
        self.running: list[_Running | None] = [None] * batch
        self.starts, self.roots = np.zeros(batch, i32), np.zeros(batch, i32)
        self.graph = None
        self.launch.load(["build_tree", "accept", "compact_cache", "advance_round"])
        drafter.load()

    # -------------------------------------------------------------------------------------------------- a sequence

    def start(self, slot: int, sequence: _Running, known: Sequence, keep_prompt_logits: bool) -> None:
        """Feed a prompt into a slot, draw its first token, and make that the root of its first round."""
        prompt = sequence.request.prompt
        ids, vocab = prompt.ids, self.model.config.vocab_size
        self.drafter.admit(slot, known)
        if keep_prompt_logits:
            sequence.prompt_logits = np.empty((len(ids), vocab), np.float32)
        if self.recorder is not None:
            sequence.trace = self.recorder.trace(len(ids) + sequence.steps - 1)
        for first in range(0, len(ids), self.prefill):
            rows = prompt_rows(self.device, self.prefill_rows, slot, ids, first, self.prefill)
            self.model.forward(rows, first + rows.tokens.size, watching(self.drafter.tap, self.recorder, rows))
            if self.recorder is not None:
                self.recorder.keep(sequence.trace, np.arange(rows.tokens.size), first)
            self.drafter.extend(rows)
            if self.statistics is not None:
                self.statistics.prefill_passes += 1
            if keep_prompt_logits:
                part = self.device.read(self.model.head(0, rows.tokens.size))
                sequence.prompt_logits[first : first + len(part)] = part
        logits = self.model.head(rows.tokens.size - 1, 1)
        self.device.write(self.prefill_stream, np.array([prompt.stream], np.int32))
        self.device.write(self.prefill_bad, np.zeros(1, np.int32))
        self.model.choose(
            rows.part(rows.tokens.size - 1, 1),
            self.prefill_stream,
            self.prefill_bad,
            self.prefill_chosen,
            temperature=self.decoding.temperature,
            seed=self.decoding.seed,
        )
        if self.device.read(self.prefill_bad)[0]:
            for first in range(0, len(ids), self.prefill):
                rows = prompt_rows(self.device, self.prefill_rows, slot, ids, first, self.prefill)
                self.model.forward(
                    rows, first + rows.tokens.size, blame(self.model, rows.tokens.size, prompt.id, "the prompt")
                )
            raise DeviceError(f"logits of sequence {prompt.id!r} are not finite after the prompt")
        root = int(self.device.read(self.prefill_chosen)[0])
        sequence.take([root], self.device.read(logits), self.decoding)
        if sequence.reason is not None:
            return
        self.running[slot] = sequence
        self.starts[slot], self.roots[slot] = len(ids), root
        history = np.concatenate([ids, [root]]).astype(np.int32)
        self._write_slot(slot, prompt.stream, history, active=1)

    def _write_slot(self, slot: int, stream: int, history: np.ndarray, active: int) -> None:
        state, i32 = self.state, np.int32
        for array, value in (
            (state.starts, self.starts[slot]),
            (state.roots, self.roots[slot]),
            (state.streams, stream),
            (state.active, active),
        ):
            self.device.write(array.view(slot, (1,)), np.array([value], i32))
        self.device.write(state.history.view(slot * self.model.capacity, (len(history),)), history)
        streams = np.full(self.nodes, stream, i32)
        self.device.write(self.row_streams.view(slot * self.nodes, (self.nodes,)), streams)

    def leave(self, slot: int) -> None:
        """Free a slot: its round goes on from position 0, unread, and changes nothing."""
        self.running[slot] = None
        self.starts[slot] = self.roots[slot] = 0
        self._write_slot(slot, 0, np.zeros(1, np.int32), active=0)
        self.device.write(self.bad, np.zeros(self.bad.size, np.int32))

    # -------------------------------------------------------------------------------------------------- a round

    def _verify_rows(self) -> TreeRows:
        return TreeRows(self.places, self.tree_starts, self.paths)

    def _round(self) -> None:
        model, drafter, state, launch = self.model, self.drafter, self.state, self.launch
        shape = {"batch": self.batch, "budget": self.budget, "horizon": drafter.horizon}
        tree = {"tokens": self.rows.tokens, "parents": self.parents, "n_nodes": self.n_nodes}
        drafter.draft(state)
        launch(
            "build_tree",
            ids=drafter.ids,
            logps=drafter.logps,
            counts=drafter.counts,
            starts=state.starts,
            roots=state.roots,
            depths=self.depths,
            scores=self.scores,
            positions=self.rows.positions,
            places=self.places,
            slots=self.rows.slots,
            tree_starts=self.tree_starts,
            paths=self.paths,
            visible=self.visible,
            bad=self.bad_draft,
            k=drafter.k,
            last_position=model.config.max_position_embeddings - 1,
            **tree,
            **shape,
        )
        verify = self._verify_rows()
        model.forward(self.rows, model.capacity, watching(drafter.tap, self.recorder, self.rows, verify), tree=verify)
        model.head(0, self.rows.tokens.size)
        model.choose(
            self.rows,
            self.row_streams,
            self.bad,
            self.posterior,
            temperature=self.decoding.temperature,
            seed=self.decoding.seed,
        )
        walk = {"accepted": self.accepted, "n_accepted": self.n_accepted}
        launch("accept", posterior=self.posterior, bonus=self.bonus, **walk, **tree, **shape)
        cache = model.cache.as_dtype(np.float32)  # a copy: bf16 rows go by two elements
        launch(
            "compact_cache",
            cache=cache,
            starts=state.starts,
            layers=model.config.num_hidden_layers,
            sequences=model.slots,
            capacity=model.capacity,
            width=cache.shape[-1],
            **walk,
            **shape,
        )
        drafter.commit(state, self.accepted)
        launch(
            "advance_round",
            starts=state.starts,
            roots=state.roots,
            bonus=self.bonus,
            tokens=self.rows.tokens,
            history=state.history,
            active=state.active,
            history_row=model.capacity,
            **walk,
            **shape,
        )

    def step(self, record: Callable[["_Session", int, int, np.ndarray, int], Round] | None) -> list[int]:
        """One round of all slots; the slots whose sequences ended."""
        if self.recorder is not None:
            self._round()
        else:
            self.graph = self.graph or self.device.capture(self._round)
            self.graph.replay()
        seen = self._read_report()
        if self.statistics is not None:
            self.statistics.count(self.model.chosen_experts(self.rows.tokens.size), self._busy_rows())
        tokens, accepted, bonus = seen["tokens"], seen["accepted"], seen["bonus"][:, 0]
        ended = []
        for slot, sequence in enumerate(self.running):
            if sequence is None:
                continue
            name = sequence.request.prompt.id
            if seen["bad_draft"][slot, 0]:
                raise DeviceError(
                    f"the drafter's log-probabilities are not finite in sequence {name!r}, round {len(sequence.rounds)}"
                )
            if seen["bad"][slot].any():
                self._blame(name)
            way = accepted[slot, : seen["n_accepted"][slot, 0]]
            logits = self._accepted_logits(slot, way)
            if self.recorder is not None:  # the committed rows only, each at its position
                self.recorder.keep(sequence.trace, slot * self.nodes + way, int(self.starts[slot]))
            if record is not None:
                sequence.rounds.append(record(self, slot, int(self.starts[slot]), way, int(bonus[slot])))
            sequence.take([*tokens[slot, way[1:]].tolist(), int(bonus[slot])], logits, self.decoding)
            self.starts[slot] += len(way)
            self.roots[slot] = bonus[slot]
            if sequence.reason is not None:
                ended.append(slot)
        return ended

    def _busy_rows(self) -> np.ndarray:
        """Which verify rows are a running sequence's root or node, bool [M]."""
        nodes = self.device.read(self.n_nodes)
        used = np.where([sequence is not None for sequence in self.running], nodes + 1, 0)
        return (np.arange(self.nodes) < used[:, None]).reshape(-1)

    def _read_report(self) -> dict[str, np.ndarray]:
        """What a round leaves for the host, int32 [B, ...] by name."""
        values, at, out = self.device.read(self.report), 0, {}
        for name, size in self.report_sizes.items():
            out[name] = values[at : at + size].reshape(self.batch, -1)
            at += size
        return out

    def _accepted_logits(self, slot: int, way: np.ndarray) -> np.ndarray:
        """Logits [n_accepted, V] of the accepted rows: row by row, as accepted rows are few and scattered."""
        vocab = self.model.config.vocab_size
        rows = [slot * self.nodes + int(node) for node in way]
        return np.stack([self.device.read(self.model.logits.view(row * vocab, (vocab,))) for row in rows])

    def _blame(self, name: str) -> None:
        # the verify pass again: its rows still stand on the device
        count = self.rows.tokens.size
        self.model.forward(
            self.rows, self.model.capacity, blame(self.model, count, name, "a round"), tree=self._verify_rows()
        )
        raise DeviceError(f"logits of sequence {name!r} are not finite in a verify pass")

    def record(self, slot: int, start: int, way: np.ndarray, bonus: int) -> Round:
        """What the last round did in a slot, read from the device."""
        read, nodes = self.device.read, self.nodes
        n = int(read(self.n_nodes)[slot])

        def part(array: DeviceArray) -> np.ndarray:
            return read(array).reshape(self.batch, nodes)[slot, : n + 1]

        tree = Tree(part(self.rows.tokens), part(self.parents), part(self.depths), part(self.scores))
        drafter = self.drafter
        horizon = np.full(drafter.horizon, drafter.k, np.int32)
        counts = horizon if drafter.counts is None else read(drafter.counts)[slot]
        return Round(
            start=start,
            root=int(tree.tokens[0]),
            bonus=bonus,
            tree=tree,
            accepted=way.astype(np.int32),
            posterior=part(self.posterior),
            draft_ids=read(drafter.ids)[slot],
            draft_logps=read(drafter.logps)[slot],
            draft_counts=counts,
            cache_digest=self.model.cache_digest(slot, start, len(way)),
        )


def generate_rounds(
    model: Transformer,
    drafter: Drafter,
    requests: list[tuple[Request, Sequence]],
    decoding: Decoding,
    *,
    batch: int,
    budget: int,
    prefill: int,
    record: bool = True,
    keep_prompt_logits: bool = False,
    statistics: Statistics | None = None,
    trace: str | None = None,
) -> Iterator[tuple[int, Generated, list[Round], bytes | None]]:
    """Decode all requests by draft trees, ``batch`` at a time; yields (index, result, rounds, digest of the cache).

    The tokens and logits are those of autoregressive decoding, bit for bit, whatever the drafter proposes. Rounds and
    the digest of the committed cache (positions 0 .. P + T - 2) are taken only where ``record`` asks for them;
    ``statistics`` counts along. With a ``trace`` level results carry their trace, and the rounds are not captured.
    """
    size = {"batch": batch, "budget": budget, "prefill": prefill}
    watch = None if trace is None else Recorder(model, trace)
    session = _Session(model, drafter, decoding, statistics=statistics, recorder=watch, **size)
    waiting = list(enumerate(requests))[::-1]
    recorder = _Session.record if record else None
    while waiting or any(session.running):
        for slot in range(batch):
            while waiting and session.running[slot] is None:
                index, (request, known) = waiting.pop()
                sequence = _Running(index, request, decoding.steps, model.config.vocab_size)
                session.start(slot, sequence, known, keep_prompt_logits)
                if sequence.reason is not None:
                    yield index, sequence.finished(), [], _final_digest(model, slot, sequence, record)
        if not any(session.running):
            continue
        for slot in session.step(recorder):
            sequence = session.running[slot]
            digest = _final_digest(model, slot, sequence, record)
            session.leave(slot)
            yield sequence.index, sequence.finished(), sequence.rounds, digest


def _final_digest(model: Transformer, slot: int, sequence: _Running, record: bool) -> bytes | None:
    if not record:
        return None
    return model.cache_digest(slot, 0, len(sequence.request.prompt.ids) + len(sequence.tokens) - 1)

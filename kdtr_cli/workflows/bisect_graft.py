"""The engine and the NumPy model side by side through a pass: each operation's output is read and compared, then
overwritten with what it should have been, so that the next operation starts from right inputs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kdtr_cli.engine.devices import DeviceArray
from kdtr_cli.engine.kernels import expert_tile
from kdtr_cli.engine.transformer import Rows, Transformer
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.rope import inv_freq
from kdtr_cli.parity.operation_hints import Look
from kdtr_cli.parity.operations import OperationResult, OperationTally
from kdtr_cli.parity.tolerances import Tolerance
from kdtr_cli.reference.generate import FiniteCheck
from kdtr_cli.reference.sampling import choose
from kdtr_cli.reference.transformer import Cache, Observe
from kdtr_cli.reference.transformer import Model as NumpyModel
from kdtr_cli.reference.transformer import Rows as NumpyRows
from kdtr_cli.reference.twins import TWINS
from kdtr_cli.workflows.bisect_operations import OPERATIONS, Operation, operations_of

__all__ = ["BATCH", "DECODE", "FORMS", "PREFILL", "SLOTS", "Grafting", "Pass"]

#: Forms of a pass: a piece of a sequence, as a prompt is fed; a few rows together; one row alone, as a step feeds it.
FORMS = PREFILL, BATCH, DECODE = "prefill", "batch", "decode"

SLOTS = 2  #: that the engine needs
_SLOT = 1  # the sequence lies in the second slot: a kernel that forgets which one finds no keys

Got = Wanted = np.ndarray


@dataclass(frozen=True)
class Pass:
    """Positions first … first + count - 1 of a sequence, fed in one form."""

    form: str
    first: int
    count: int

    @property
    def positions(self) -> np.ndarray:
        """int32 [count]."""
        return np.arange(self.first, self.first + self.count, dtype=np.int32)


class _Reference:
    """The reference's tensors of one pass by name, made when they are asked for; a layer's are there together."""

    def __init__(self, model: NumpyModel, cache: Cache, rows: NumpyRows, see: Observe) -> None:
        self.model, self.cache, self.rows, self.see = model, cache, rows, see
        self.layer: int | None = None
        self.told: dict[str, np.ndarray] = {}
        self.hidden = [model.embed(rows.tokens)]
        self._tell("embed", self.hidden[0])

    def __call__(self, name: str, layer: int | None) -> np.ndarray:
        if layer != self.layer:
            self.told.clear()
            self.layer = layer
            if layer is not None:
                self.hidden = self.model.layer(layer, self.hidden, [self.rows], self.cache.rows[layer], [self._tell])
            else:
                self.hidden = self.model.final_norm(self.hidden, [self._tell])
                self._tell("logits", self.model.logits(self.hidden[0]))
        return self.told[name]

    def _tell(self, name: str, value: np.ndarray) -> None:
        self.see(name, value)
        self.told[name] = value


class Grafting:
    """An engine of SLOTS slots, the reference, which tells its inner tensors, and what was found of each operation.

    ``rows``: the most of a pass.
    """

    def __init__(
        self, engine: Transformer, reference: NumpyModel, decoding: Decoding, tolerance: Tolerance, rows: int
    ) -> None:
        self.engine, self.reference, self.decoding, self.tolerance = engine, reference, decoding, tolerance
        self.device = engine.device
        self._rotary = np.asarray(inv_freq(engine.config), np.float64)
        self.kernels: set[str] = set()  #: all that were launched
        self._tallies: dict[tuple, OperationTally] = {}  # by place, in order of execution
        self._launched: list[str] = []
        engine.launch.launched = self._launched.append

        def ints(name: str) -> DeviceArray:
            return self.device.upload(name, np.zeros(rows, np.int32))

        self._rows = Rows(ints("tokens"), ints("positions"), ints("slots"))
        self._streams, self._active = ints("streams"), ints("active")
        self._bad, self._chosen = ints("bad"), ints("chosen")

    def results(self) -> tuple[OperationResult, ...]:
        """What was found by now, in order of execution."""
        return tuple(self._tallies[key].result() for key in sorted(self._tallies))

    def start(self, prompt: Prompt, ids: np.ndarray) -> None:
        """Take up a sequence; ids int32 [N] are all that it feeds. Its passes begin at its first position."""
        self.prompt, self.ids = prompt, ids
        self._cache = self.reference.cache([len(ids)])

    def feed(self, one: Pass, see: Observe) -> None:
        """One pass. ``see`` is told every tensor of the reference, and ``logits``, before the engine is compared with
        it. InputError where the reference is not finite."""
        self._pass = one
        tokens, zeros = self.ids[one.first : one.first + one.count], np.zeros(one.count, np.int32)
        fed = NumpyRows(tokens, zeros, one.positions)
        check = FiniteCheck([self.prompt], fed)

        def watch(name: str, value: np.ndarray) -> None:
            check(name, value)
            see(name, value)

        self._wanted = _Reference(self.reference, self._cache, fed, watch)
        for layer in range(self.engine.config.num_hidden_layers):
            self._write_keys(layer, one.first)
        rows = self._rows.part(0, one.count)
        for array, values in (
            (rows.tokens, tokens),
            (rows.positions, one.positions),
            (rows.slots, zeros + _SLOT),
        ):
            self.device.write(array, values)
        self._launched.clear()
        self.engine.forward(rows, self._bound(), self._observe)
        self._head(rows)

    def _bound(self) -> int:
        """The bound on positions as the engine's own passes have it: pieces of a prompt know, steps are captured."""
        one = self._pass
        return one.first + one.count if one.form == PREFILL else self.engine.capacity

    # ------------------------------------------------------------------------------------------------ one operation

    def _tally(self, operation: Operation, layer: int | None) -> Callable[..., None]:
        """What adds a comparison of this operation in the pass under way; the next kernels launched are its own."""
        form, config = self._pass.form, self.engine.config
        place = layer if layer is not None else -1 if operation.name == "embed" else config.num_hidden_layers
        kernels = tuple(self._launched[: operation.launches])
        del self._launched[: operation.launches]
        self.kernels.update(kernels)
        key = (place, OPERATIONS.index(operation), FORMS.index(form), kernels)
        if key not in self._tallies:
            self._tallies[key] = OperationTally(operation.name, layer, form, kernels, self.tolerance)

        def add(
            floats: tuple[Got, Wanted] | None,
            integers: tuple[Got, Wanted] | None = None,
            look: Look | None = None,
        ) -> None:
            self._tallies[key].add(self.prompt.id, self._pass.positions, floats, integers, look)

        return add

    def _observe(self, name: str, array: DeviceArray) -> None:
        layer, tensor = _parts(name)
        operations = operations_of(tensor, layer is not None and self.engine.config.is_moe_layer(layer))
        if not operations:
            return
        match tensor:
            case "self_attn.query":
                self._query(operations, name, layer, array)
            case "mlp.expert_weights":
                self._router(operations[0], name, layer, array)
            case "mlp.expert_items":
                self._lists(operations[0], name, layer)
            case _:
                wanted = self._wanted(name, layer)
                got, look = self._read(array, wanted), None
                if tensor.startswith("mlp.experts_"):
                    look = Look("experts", got, wanted, self._wanted(f"{_stem(name)}.expert_ids", layer))
                self._tally(operations[0], layer)((got, wanted), look=look)
                self._write(array, wanted)
        self._all_told(name)

    def _all_told(self, name: str) -> None:
        if self._launched:
            raise RuntimeError(f"{', '.join(self._launched)} before {name} belong to no operation")

    def _read(self, array: DeviceArray, like: np.ndarray) -> np.ndarray:
        """The leading part of a buffer, in the shape of the rows of this pass."""
        return self.device.read(array.view(0, like.shape))

    def _write(self, array: DeviceArray, values: np.ndarray) -> None:
        self.device.write(array.view(0, values.shape), np.ascontiguousarray(values, array.dtype))

    def _query(self, operations: tuple[Operation, ...], name: str, layer: int, array: DeviceArray) -> None:
        """Keys and queries: the new rows of the cache, and the two parts of each head's query."""
        append, absorb, rotate = operations
        wanted = self._wanted(name, layer)
        keys, new = self._keys(layer, self._pass.first + self._pass.count), self._pass.positions
        cache = self.device.read(self.engine.caches[layer])
        add = self._tally(append, layer)
        got, right = cache[_SLOT, new], keys[_SLOT, new]
        cache[_SLOT, new] = right
        # whatever else it wrote is wrong in every row of the pass
        strays = int((cache.view(np.uint32) != keys.view(np.uint32)).sum())
        latent = self.engine.config.kv_lora_rank
        look = None
        if np.array_equal(got[:, :latent], right[:, :latent]):
            look = Look("rope", got[:, latent:], right[:, latent:], rotary=self._rotary)
        add((got, right), (np.full(len(new), strays), np.zeros(len(new), int)), look)
        self.device.write(self.engine.caches[layer], keys)
        got = self._read(array, wanted)
        self._tally(absorb, layer)((got[..., :latent], wanted[..., :latent]))
        turned = got[..., latent:], wanted[..., latent:]
        self._tally(rotate, layer)(turned, look=Look("rope", *turned, rotary=self._rotary))
        self._write(array, wanted)

    def _keys(self, layer: int, count: int) -> np.ndarray:
        """A layer's cache [slots, capacity, width] after ``count`` positions: what is not written yet is NaN."""
        keys = np.full((SLOTS, self.engine.capacity, self.engine.config.latent_dim), np.nan, np.float32)
        keys[_SLOT, :count] = self._cache.rows[layer][0][:count]
        return keys

    def _write_keys(self, layer: int, count: int) -> None:
        self.device.write(self.engine.caches[layer], self._keys(layer, count))

    def _router(self, operation: Operation, name: str, layer: int, array: DeviceArray) -> None:
        weights, ids = self._wanted(name, layer), self._wanted(f"{_stem(name)}.expert_ids", layer)
        place = self.engine.ids.view(layer * self.engine.ids.shape[1], ids.shape)
        got, got_ids = self._read(array, weights), self.device.read(place)
        look = Look("router", got, weights, ids, got_ids)
        self._tally(operation, layer)((got, weights), (got_ids, ids), look)
        self._write(array, weights)
        self._write(place, ids)

    def _lists(self, operation: Operation, name: str, layer: int) -> None:
        """The lists that the experts' kernels work by. They hang on the ids alone, and no golden has them: the twin."""
        engine, m = self.engine, self._pass.count
        ids = self._wanted(f"{_stem(name)}.expert_ids", layer).reshape(-1)
        items, count = np.empty(len(ids), np.int32), np.empty(1, np.int32)
        tiles = np.empty((engine.tiles.shape[0], 3), np.int32)
        TWINS["group_experts"](ids, items, tiles, count, engine.config.n_routed_experts, expert_tile(m))
        made = int(count[0])
        pairs = ((engine.items, items), (engine.tile_count, count), (engine.tiles, tiles[:made]))
        wrong = sum(int((self._read(array, wanted) != wanted).sum()) for array, wanted in pairs)
        # one list serves all rows: a wrong one is wrong for each of them
        self._tally(operation, layer)(None, (np.full(m, wrong), np.zeros(m, int)))
        for array, wanted in pairs:
            self._write(array, wanted)

    # ------------------------------------------------------------------------------------------------ logits, tokens

    def _head(self, rows: Rows) -> None:
        m, vocab = self._pass.count, self.engine.config.vocab_size
        lm_head, token_choice = OPERATIONS[-2:]
        logits = self._wanted("logits", None)
        self._write(self.engine.logits, np.full((m, vocab), np.nan, np.float32))
        got = self.engine.head(0, m)
        got = self.device.read(got)
        self._tally(lm_head, None)((got, logits), look=Look("logits", got, logits))
        self._all_told("logits")
        self._write(self.engine.logits, logits)
        positions, decoding = self._pass.positions + 1, self.decoding
        streams = np.full(m, self.prompt.stream)
        wanted = choose(logits, positions, streams, temperature=decoding.temperature, seed=decoding.seed)
        chosen, bad, stream = (a.view(0, (m,)) for a in (self._chosen, self._bad, self._streams))
        self.device.write(stream, streams.astype(np.uint32).view(np.int32))
        self.device.write(bad, np.zeros(m, np.int32))
        self.device.write(chosen, np.full(m, -1, np.int32))
        step = self._pass.form != PREFILL
        active = self._active.view(0, (m,))
        self.device.write(active, np.ones(m, np.int32))
        self.engine.choose(
            rows,
            stream,
            bad,
            chosen,
            temperature=decoding.temperature,
            seed=decoding.seed,
            active=active if step else None,
        )
        seen = [self.device.read(a) for a in (chosen, bad, *((rows.tokens, rows.positions) if step else ()))]
        right = [wanted, np.zeros(m, np.int32), *((wanted, positions) if step else ())]
        self._tally(token_choice, None)(None, (np.stack(seen, -1), np.stack(right, -1)))
        self._all_told("chosen")


def _parts(name: str) -> tuple[int | None, str]:
    """Layer and the rest of an observed name."""
    if not name.startswith("model.layers."):
        return None, name
    layer, _, tensor = name.removeprefix("model.layers.").partition(".")
    return int(layer), tensor


def _stem(name: str) -> str:
    return name.rpartition(".")[0]

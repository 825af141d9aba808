"""Weights in blocks under a limit: the same bits whatever is kept, and no more kept than allowed."""

import numpy as np
import pytest

from kdtr_cli.model import weights as weights_module
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Prompt
from kdtr_cli.model.source import open_model
from kdtr_cli.reference import exact, float64, packed, transformer
from kdtr_cli.reference.generate import score_group
from kdtr_cli.reference.packed import PackedWeights, block_ranges, packed_bytes
from kdtr_cli.reference.transformer import Model, Rows

pytestmark = pytest.mark.quick
IDS = np.arange(3, 40, dtype=np.int32)


def logits(ops, limit=None, preset="tiny"):
    opened = open_model(preset, cache=False)
    model = Model(opened.config, opened.weights, Choices(), len(IDS), ops, limit)
    rows = Rows(IDS, np.zeros_like(IDS), np.arange(len(IDS), dtype=np.int32))
    return model, model.logits(model.forward(rows, model.cache([len(IDS)])))


def test_blocks_cover_a_matrix_in_order(monkeypatch):
    monkeypatch.setattr(weights_module, "BLOCK_ELEMENTS", 256 * 64)
    weights = open_model("tiny", cache=False).weights
    ranges = list(block_ranges(weights.shapes["lm_head.weight"]))
    assert [first for first, _ in ranges] == list(range(0, 512, 256))
    assert ranges[-1][1] == 512
    blocks = list(PackedWeights(weights, float64).blocks("lm_head.weight"))
    assert np.concatenate(blocks).tobytes() == weights["lm_head.weight"].astype(np.float64).tobytes()


@pytest.mark.parametrize("ops", [exact, float64], ids=["exact", "float64"])
@pytest.mark.parametrize("preset", ["tiny", "odd", "tiny-v2"])
def test_what_is_kept_changes_no_bit(ops, preset):
    _, whole = logits(ops, preset=preset)
    for limit in (0, 100_000, 1_000_000):
        model, some = logits(ops, limit, preset)
        assert some.tobytes() == whole.tobytes()
        assert model.packed.kept <= limit
    model, _ = logits(ops, None, preset)
    assert model.packed.kept > 1_000_000


def test_exact_bits_do_not_depend_on_the_blocks(monkeypatch):
    _, whole = logits(exact)
    monkeypatch.setattr(weights_module, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(packed, "BLOCK_ELEMENTS", 1)
    _, cut = logits(exact)
    assert cut.tobytes() == whole.tobytes()


def test_of_a_large_table_only_the_rows_asked_for_are_read(monkeypatch):
    weights = open_model("tiny", cache=False).weights
    table = weights["model.embed_tokens.weight"]
    monkeypatch.setattr(packed, "BLOCK_ELEMENTS", 1)
    held = PackedWeights(weights, float64)
    read = []
    real = weights.rows
    monkeypatch.setattr(weights, "rows", lambda name, a, b: read.append((a, b)) or real(name, a, b))
    index = np.array([7, 3, 7, 511])
    assert held.rows("model.embed_tokens.weight", index).tobytes() == table[index].astype(np.float64).tobytes()
    assert read == [(3, 4), (7, 8), (511, 512)]


def test_a_lower_limit_drops_what_is_kept():
    model, whole = logits(exact)
    held = model.packed
    held.keep_at_most(held.kept)
    assert held.kept
    held.keep_at_most(held.kept - 1)
    assert held.kept == 0
    rows = Rows(IDS, np.zeros_like(IDS), np.arange(len(IDS), dtype=np.int32))
    assert model.logits(model.forward(rows, model.cache([len(IDS)]))).tobytes() == whole.tobytes()


def test_sizes_are_those_of_the_arrays():
    one = exact.pack(np.ones((300, 70), np.float32))
    assert packed_bytes(one) == sum(chunk.nbytes for chunk in one.chunks)
    assert packed_bytes([(one, np.zeros(5)), (np.zeros(3),)]) == packed_bytes(one) + 64


def test_parts_of_a_pass_are_themselves_in_float64_too():
    opened = open_model("tiny-groups", cache=False)
    model = Model(opened.config, opened.weights, Choices(), 40, float64)
    sequences = [IDS[:9], IDS[5:30], IDS[:1]]
    parts = [
        Rows(ids, np.full(len(ids), slot, np.int32), np.arange(len(ids), dtype=np.int32))
        for slot, ids in enumerate(sequences)
    ]
    cache = model.cache([len(ids) for ids in sequences])
    silent = [lambda name, value: None] * 3
    hidden = [model.embed(rows.tokens) for rows in parts]
    for i in range(model.config.num_hidden_layers):
        hidden = model.layer(i, hidden, parts, cache.rows[i], silent)
    together = model.logits_of(model.final_norm(hidden, silent))
    for ids, logits_of in zip(sequences, together, strict=True):
        rows = Rows(ids, np.zeros_like(ids), np.arange(len(ids), dtype=np.int32))
        alone = model.logits(model.forward(rows, model.cache([len(ids)])))
        assert alone.tobytes() == logits_of.tobytes()


def test_experts_in_waves_give_the_same_bits(monkeypatch):
    opened = open_model("tiny", cache=False)
    xs = [np.zeros((n, opened.config.hidden_size), np.float32) for n in (3, 5, 1)]
    outputs, waves = [], []
    for size in (transformer._WAVE_BYTES, 1):
        monkeypatch.setattr(transformer, "_WAVE_BYTES", size)
        model = Model(opened.config, opened.weights, Choices(), 40, exact)
        waves.append([(wave.start, wave.stop) for wave in model._waves(xs)])
        prompts = [Prompt(str(i), IDS[: n + 1], i) for i, n in enumerate((2, 7, 20))]
        outputs.append(score_group(model, prompts, [IDS[:3]] * 3))
    assert waves == [[(0, 3)], [(0, 1), (1, 2), (2, 3)]]
    for (_, one), (_, other) in zip(*outputs, strict=True):
        assert one.tobytes() == other.tobytes()

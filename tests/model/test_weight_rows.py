"""Rows of a weight by themselves, and the digests that are made block by block."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from kdtr_cli.errors import InputError
from kdtr_cli.model import weights as weights_module
from kdtr_cli.model.source import open_model

pytestmark = pytest.mark.quick
FIXTURES = Path(__file__).parents[2] / "fixtures"
MODELS = ["tiny", str(FIXTURES / "tiny-kimi"), str(FIXTURES / "tiny-kimi-int4"), str(FIXTURES / "tiny-kimi-fp8")]


@pytest.mark.parametrize("spec", MODELS, ids=["preset", "bf16", "int4", "fp8"])
def test_rows_are_those_of_the_whole_weight(spec):
    weights = open_model(spec, cache=False).weights
    for name in weights.names[:: max(1, len(weights) // 60)]:
        whole, n = weights[name], weights.shapes[name][0]
        for first, last in {
            (0, n),
            (0, 1),
            (n - 1, n),
            (n // 3, n // 2 + 1),
            (min(127, n - 1), n),
            (min(129, n - 1), n),
        }:
            assert weights.rows(name, first, last).tobytes() == whole[first:last].tobytes(), (name, first, last)


@pytest.mark.parametrize("spec", MODELS, ids=["preset", "bf16", "int4", "fp8"])
def test_digests_do_not_depend_on_the_blocks(spec, monkeypatch):
    weights = open_model(spec, cache=False).weights
    monkeypatch.setattr(weights_module, "block_rows", lambda shape: 128)  # several blocks, whole blocks of fp8
    assert any(len(shape) == 2 and shape[0] > 128 for shape in weights.shapes.values())
    digests = weights.digests()
    assert digests.stored == {name: weights.stored_sha256(name) for name in weights.stored_names}
    used = hashlib.sha256()
    for name in weights.names:
        values = weights[name]
        used.update(f"{name} float32 {','.join(map(str, values.shape))}\n".encode() + values.astype("<f4").tobytes())
    assert digests.used == used.hexdigest()


def test_the_progress_of_the_digests_counts_what_is_stored():
    weights = open_model(MODELS[3], cache=False).weights
    read = []
    weights.digests(read.append)
    assert sum(read) == sum(weights.stored_nbytes(name) for name in weights.stored_names)
    assert weights.digests(lambda size: pytest.fail("read twice")) is weights.digests()


def test_a_value_that_is_not_finite_is_named_by_its_place_in_the_whole(monkeypatch):
    monkeypatch.setattr(weights_module, "BLOCK_ELEMENTS", 1)
    model = open_model("tiny", cache=False)
    stored = model.weights._source._arrays["lm_head.weight"].copy()
    stored[300, 2] = np.nan
    model.weights._source._arrays["lm_head.weight"] = stored
    with pytest.raises(InputError, match=r"lm_head\.weight\[300, 2\] is nan"):
        model.weights.digests()
    with pytest.raises(InputError, match=r"lm_head\.weight\[300, 2\] is nan"):
        model.weights.rows("lm_head.weight", 299, 301)

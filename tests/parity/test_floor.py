"""The noise floor: measured block by block, added up over parts, read back from a manifest that says it."""

import math

import ml_dtypes
import numpy as np
import pytest
from scipy.special import rel_entr, softmax

from kdtr_cli.parity import floor as module
from kdtr_cli.parity.floor import NoiseFloor, add_floors, floor_entries, floors_of, measure_floor, shared_floors

pytestmark = pytest.mark.quick


def noisy(rows: int = 9, vocab: int = 37, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = rng.normal(0, 3, (rows, vocab))
    return (truth + rng.normal(0, 1e-4, truth.shape)).astype(np.float32), truth


def test_the_three_extremes_are_those_of_other_libraries():
    logits, truth = noisy()
    found = measure_floor(logits, truth)
    assert (found.rows, found.values) == (9, 9 * 37)
    assert found.max_abs == np.abs(logits.astype(np.float64) - truth).max()
    p, q = softmax(truth, axis=1), softmax(logits.astype(np.float64), axis=1)
    assert found.max_kl == pytest.approx(rel_entr(p, q).sum(axis=1).max(), rel=1e-6)
    near = truth.astype(np.float32)
    places = [v.view(np.int32).astype(np.int64) for v in (logits, near)]
    same_sign = np.sign(logits) == np.sign(near)
    assert same_sign.all()
    assert found.max_ulp == np.abs(places[0] - places[1]).max()


def test_ulps_are_those_of_the_type_that_is_stored():
    logits, _ = noisy()
    stored = logits.astype(ml_dtypes.bfloat16)
    one = np.nextafter(stored, stored.dtype.type(100))
    assert measure_floor(one, stored.astype(np.float64)).max_ulp == 1


@pytest.mark.parametrize("values", [1, 36, 37, 75, 10**6])
def test_blocks_change_nothing(monkeypatch, values):
    logits, truth = noisy()
    want = measure_floor(logits, truth)
    monkeypatch.setattr(module, "_BLOCK_VALUES", values)
    assert measure_floor(logits, truth) == want


@pytest.mark.parametrize("cuts", [(1,), (4,), (8,), (2, 3, 7)])
def test_the_floor_of_a_whole_is_that_of_its_parts(cuts):
    logits, truth = noisy()
    parts = [{"exact": measure_floor(a, b)} for a, b in zip(np.split(logits, cuts), np.split(truth, cuts), strict=True)]
    assert shared_floors(parts) == {"exact": measure_floor(logits, truth)}
    assert shared_floors(parts[::-1]) == shared_floors(parts)


def test_a_part_without_a_floor_leaves_the_whole_without_one():
    one = NoiseFloor(1, 4, 0.5, 3, 0.25)
    assert shared_floors([{"exact": one, "bf16": one}, {"exact": one}]) == {"exact": add_floors(one, one)}
    assert shared_floors([{"exact": one}, {}]) == {}
    assert shared_floors([]) == {}


def test_a_manifest_gives_back_what_it_was_given_and_nothing_that_is_no_floor():
    one = NoiseFloor(2, 8, 0.1, 7, math.pi)
    entries = floor_entries({"exact": one, "bf16": one})
    assert list(entries) == ["bf16", "exact"]
    assert floors_of({"noise_floor": entries}) == {"exact": one, "bf16": one}
    for spoilt in ({**entries["bf16"], "max_abs": "inf"}, {**entries["bf16"], "max_abs": True}, {"max_abs": 1.0}, 3):
        assert floors_of({"noise_floor": {**entries, "bf16": spoilt}}) == {"exact": one}
    for manifest in ({}, {"noise_floor": None}, {"noise_floor": [1]}):
        assert floors_of(manifest) == {}

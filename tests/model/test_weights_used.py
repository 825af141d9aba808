"""Weights as used: exact float32 values, read-only, refused when not finite, with digests that see every change."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as hypothesis_arrays

from kdtr_cli.errors import InputError
from kdtr_cli.model.checkpoint import open_checkpoint, to_float32
from kdtr_cli.model.config import ModelConfig, parse_config
from kdtr_cli.model.weights import Weights

pytestmark = pytest.mark.quick
Arrays = dict[str, np.ndarray]
NORM = "model.norm.weight"


def test_every_bf16_value_is_exact() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    got = to_float32(bits.view(ml_dtypes.bfloat16))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), bits.astype(np.uint32) << 16)


def test_every_fp16_value_is_exact() -> None:
    bits = np.arange(65536, dtype=np.uint16).view(np.float16)
    got = to_float32(bits)
    finite = np.isfinite(bits)
    np.testing.assert_array_equal(got[finite].astype(np.float64), bits[finite].astype(np.float64))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(bits))


@given(hypothesis_arrays(np.float32, st.tuples(st.integers(0, 5), st.integers(1, 5))))
def test_fp32_values_stay(x: np.ndarray) -> None:
    assert to_float32(x).tobytes() == x.tobytes()
    assert to_float32(x.T).flags.c_contiguous


def test_values_are_contiguous_and_read_only(small_config: ModelConfig, small_arrays: Arrays) -> None:
    small_arrays["lm_head.weight"] = np.asfortranarray(small_arrays["lm_head.weight"])
    weights = Weights.from_arrays(small_arrays, small_config)
    for name in weights:
        value = weights[name]
        assert value.dtype == np.float32
        assert value.flags.c_contiguous
        assert not value.flags.writeable
        assert not weights.stored(name).flags.writeable
        np.testing.assert_array_equal(value, small_arrays[name].astype(np.float32))
    with pytest.raises(ValueError, match="read-only"):
        weights[NORM][0] = 1
    small_arrays[NORM][0] = 3  # the caller's own array stays writeable


def test_cache_keeps_or_does_not_keep(small_config: ModelConfig, small_arrays: Arrays) -> None:
    kept = Weights.from_arrays(small_arrays, small_config)
    assert kept[NORM] is kept[NORM]
    fresh = Weights.from_arrays(small_arrays, small_config, cache=False)
    assert fresh[NORM] is not fresh[NORM]
    assert kept.used_sha256() == fresh.used_sha256()


def test_names_and_membership(small_config: ModelConfig, small_arrays: Arrays) -> None:
    weights = Weights.from_arrays(small_arrays, small_config)
    assert weights.names == tuple(sorted(small_arrays))
    assert list(weights) == sorted(small_arrays)
    assert len(weights) == len(small_arrays)
    assert NORM in weights
    assert "nothing" not in weights
    for read in (weights.__getitem__, weights.stored, weights.stored_sha256, weights.stored_dtype):
        with pytest.raises(KeyError):
            read("nothing")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weight_that_is_not_finite_is_named_with_its_place(
    small_config: ModelConfig, small_arrays: Arrays, bad: float, dtype: Any
) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    small_arrays[name] = small_arrays[name].astype(np.float32).astype(dtype)
    small_arrays[name][1, 4] = bad
    for cache in (True, False):
        weights = Weights.from_arrays(small_arrays, small_config, cache)
        weights[NORM]
        with pytest.raises(InputError, match=r"experts\.2\.up_proj\.weight\[1, 4\] is -?(nan|inf)"):
            weights[name]
        with pytest.raises(InputError, match=r"experts\.2\.up_proj\.weight"):
            weights.used_sha256()


def test_from_arrays_names_what_is_wrong(small_config: ModelConfig, small_arrays: Arrays) -> None:
    def refused(changes: Arrays, gone: str = "") -> str:
        changed = {name: array for name, array in {**small_arrays, **changes}.items() if name != gone}
        with pytest.raises(InputError) as caught:
            Weights.from_arrays(changed, small_config)
        return str(caught.value)

    assert NORM in refused({}, gone=NORM)
    assert "[1, 6]" in refused({NORM: np.zeros((1, 6), np.float32)})
    assert "float64" in refused({NORM: np.zeros(6)})
    assert "extra" in refused({"extra": np.zeros(6, np.float32)})


def test_used_digest_is_the_documented_one(small_config: ModelConfig, small_arrays: Arrays) -> None:
    digest = hashlib.sha256()
    for name in sorted(small_arrays):
        value = small_arrays[name].astype("<f4")
        digest.update(f"{name} float32 {','.join(map(str, value.shape))}\n".encode() + value.tobytes())
    assert Weights.from_arrays(small_arrays, small_config).used_sha256() == digest.hexdigest()


@pytest.mark.parametrize("cache", [True, False])
def test_tensors_are_digested_and_checked_piece_by_piece(
    small_config: ModelConfig, small_arrays: Arrays, monkeypatch: pytest.MonkeyPatch, cache: bool
) -> None:
    whole = Weights.from_arrays(small_arrays, small_config).used_sha256()
    monkeypatch.setattr("kdtr_cli.model.weights._BLOCK", 7)
    assert Weights.from_arrays(small_arrays, small_config, cache).used_sha256() == whole
    name = "lm_head.weight"
    rows, columns = small_arrays[name].shape
    small_arrays[name][rows - 1, columns - 2] = np.nan
    weights = Weights.from_arrays(small_arrays, small_config, cache)
    for read in (weights.used_sha256, lambda: weights.checked(name), lambda: weights[name]):
        with pytest.raises(InputError, match=rf"tensor lm_head\.weight\[{rows - 1}, {columns - 2}\] is nan"):
            read()


def test_the_parts_of_a_weight(small_config: ModelConfig, small_arrays: Arrays) -> None:
    weights = Weights.from_arrays(small_arrays, small_config)
    assert weights.parts(NORM) == (NORM,)
    (stored,) = weights.checked(NORM).values()
    assert stored.dtype == small_arrays[NORM].dtype
    with pytest.raises(KeyError):
        weights.parts("model.norm.bias")


def test_used_digest_is_of_values_not_of_storage(small_config: ModelConfig, small_arrays: Arrays) -> None:
    wide = {name: array.astype(np.float32) for name, array in small_arrays.items()}
    one, two = Weights.from_arrays(small_arrays, small_config), Weights.from_arrays(wide, small_config)
    assert one.used_sha256() == two.used_sha256()
    assert one.stored_sha256(NORM) != two.stored_sha256(NORM)
    assert (one.stored_dtype(NORM), two.stored_dtype(NORM)) == ("BF16", "F32")
    assert (one.stored_nbytes(NORM), two.stored_nbytes(NORM)) == (12, 24)


@pytest.mark.parametrize("name", [NORM, "lm_head.weight", "model.layers.1.mlp.gate.e_score_correction_bias"])
def test_used_digest_sees_one_bit(small_config: ModelConfig, small_arrays: Arrays, name: str) -> None:
    before = Weights.from_arrays(small_arrays, small_config).used_sha256()
    flat = small_arrays[name].view(np.uint8).reshape(-1)
    flat[-2] ^= 1
    assert Weights.from_arrays(small_arrays, small_config).used_sha256() != before


def test_used_digest_tells_swapped_tensors_apart(small_config: ModelConfig, small_arrays: Arrays) -> None:
    before = Weights.from_arrays(small_arrays, small_config).used_sha256()
    base = "model.layers.1.mlp.experts.0."
    up, gate = small_arrays[f"{base}up_proj.weight"], small_arrays[f"{base}gate_proj.weight"]
    swapped = {**small_arrays, f"{base}up_proj.weight": gate, f"{base}gate_proj.weight": up}
    assert Weights.from_arrays(swapped, small_config).used_sha256() != before


def test_stored_digest_is_of_the_bytes(
    small: Any, small_config: ModelConfig, small_arrays: Arrays, save_folder: Callable[..., Path]
) -> None:
    in_memory = Weights.from_arrays(small_arrays, small_config)
    on_disk = Weights.from_checkpoint(open_checkpoint(save_folder(small, small_arrays)), small_config)
    for name, array in small_arrays.items():
        want = hashlib.sha256(array.tobytes()).hexdigest()
        assert in_memory.stored_sha256(name) == on_disk.stored_sha256(name) == want


def test_tied_head_is_the_embedding(small: Any, small_arrays: Arrays) -> None:
    config = parse_config({**small, "tie_word_embeddings": True})
    del small_arrays["lm_head.weight"]
    weights = Weights.from_arrays(small_arrays, config)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    assert "lm_head.weight" in weights
    assert "lm_head.weight" not in weights.names
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    with pytest.raises(InputError, match=r"lm_head\.weight is missing"):
        Weights.from_arrays(small_arrays, untied)

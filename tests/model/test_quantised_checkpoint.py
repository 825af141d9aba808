"""Quantised checkpoints: the fixtures' values, and one line with the tensor's name for whatever is wrong with one."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors

from kdtr_cli.errors import InputError
from kdtr_cli.model.checkpoint import open_checkpoint
from kdtr_cli.model.config import load_config, parse_config
from kdtr_cli.model.presets import new_weights
from kdtr_cli.model.quant import quantise_fp8, quantise_int4
from kdtr_cli.model.quantisation import fp8_config, int4_config
from kdtr_cli.model.source import open_model
from kdtr_cli.model.summary import summary
from kdtr_cli.model.weights import Weights

pytestmark = pytest.mark.quick
FIXTURES = Path(__file__).parents[2] / "fixtures"
IGNORE = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*")
NUMPY = {
    "BF16": ml_dtypes.bfloat16, "F32": np.float32, "I32": np.int32, "F8_E4M3": ml_dtypes.float8_e4m3fn,
}  # fmt: skip
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
Arrays = dict[str, np.ndarray]
Save = Callable[..., Path]


def library_arrays(folder: Path) -> Arrays:
    """All tensors of a folder's one file, read by the safetensors library."""
    held = safetensors.deserialize((folder / "model.safetensors").read_bytes())
    return {n: np.frombuffer(t["data"], NUMPY[t["dtype"]]).reshape(t["shape"]) for n, t in held}


def by_hand(arrays: Arrays) -> Arrays:
    """The formulas of fixtures/train's packer in float64: integers times scale, e4m3 times scale_inv."""
    out = {}
    for name, array in arrays.items():
        if name.endswith(".weight_packed"):
            rest = name.removesuffix("_packed")
            rows, columns = arrays[f"{rest}_shape"].tolist()
            words = array.astype(np.int64) & 0xFFFFFFFF
            q = np.stack([(words >> (4 * j)) & 15 for j in range(8)], -1).reshape(rows, -1)[:, :columns] - 8
            scale = arrays[f"{rest}_scale"].astype(np.float64)
            out[rest] = q * np.repeat(scale, 32, 1)[:, :columns]
        elif name.endswith(("_scale", "_shape", "_scale_inv")):
            continue
        elif f"{name}_scale_inv" in arrays:
            scale = np.repeat(np.repeat(arrays[f"{name}_scale_inv"].astype(np.float64), 128, 0), 128, 1)
            out[name] = array.astype(np.float64) * scale[: array.shape[0], : array.shape[1]]
        else:
            out[name] = array.astype(np.float64)
    return {name.removeprefix("language_model."): values for name, values in out.items()}


@pytest.mark.parametrize(("name", "exact"), [("tiny-kimi-int4", True), ("tiny-kimi-fp8", False)])
def test_fixture_holds_the_values_of_its_packer(name: str, exact: bool) -> None:
    model = open_model(FIXTURES / name)
    want = by_hand(library_arrays(FIXTURES / name))
    assert set(want) == set(model.weights.names)
    for tensor, values in want.items():
        assert model.weights[tensor].dtype == np.float32
        np.testing.assert_array_equal(model.weights[tensor], values.astype(np.float32))
        if exact:  # int4: no rounding at all
            np.testing.assert_array_equal(model.weights[tensor].astype(np.float64), values)


@pytest.mark.parametrize(("name", "relative"), [("tiny-kimi-int4", 0.12), ("tiny-kimi-fp8", 0.03)])
def test_fixture_is_near_the_model_it_was_made_of(name: str, relative: float) -> None:
    true, model = open_model(FIXTURES / "tiny-kimi"), open_model(FIXTURES / name)
    changed = 0
    for tensor in true.weights:
        gap = np.linalg.norm(model.weights[tensor] - true.weights[tensor]) / np.linalg.norm(true.weights[tensor])
        assert gap < relative, tensor
        changed += gap > 0
    assert changed == {"tiny-kimi-int4": 3 * 16 * 3, "tiny-kimi-fp8": 176}[name]


def test_stored_names_cover_every_byte_of_the_file() -> None:
    for name in ("tiny-kimi-int4", "tiny-kimi-fp8", "tiny-kimi"):
        model, held = open_model(FIXTURES / name), library_arrays(FIXTURES / name)
        prefix = model.config.tensor_prefix
        assert [prefix + stored for stored in model.weights.stored_names] == sorted(held)
        for stored in model.weights.stored_names:
            array = held[prefix + stored]
            assert model.weights.stored(stored).tobytes() == array.tobytes()
            assert model.weights.stored(stored).dtype == array.dtype
            assert model.weights.stored_sha256(stored) == hashlib.sha256(array.tobytes()).hexdigest()
            assert model.weights.stored_nbytes(stored) == array.nbytes


def test_a_packed_weight_is_stored_under_its_parts_names_alone() -> None:
    weights = open_model(FIXTURES / "tiny-kimi-int4").weights
    assert EXPERT in weights
    assert EXPERT not in weights.stored_names
    for read in (weights.stored, weights.stored_sha256, weights.stored_dtype, weights.stored_nbytes):
        with pytest.raises(KeyError):
            read(EXPERT)
    with pytest.raises(KeyError):
        weights[f"{EXPERT}_packed"]
    assert weights.stored_dtype(f"{EXPERT}_packed") == "I32"


def test_summary_says_how_it_is_quantised() -> None:
    int4, fp8, plain = (summary(open_model(FIXTURES / f"tiny-kimi{n}")) for n in ("-int4", "-fp8", ""))
    assert int4["quantisation"]["method"] == "int4"
    assert int4["quantisation"]["group_size"] == 32
    assert fp8["quantisation"] == {"method": "fp8", "block": [128, 128], "ignore": []}
    assert plain["quantisation"] is None
    assert int4["tensors"]["dtypes"] == {"BF16": 198, "F32": 3, "I32": 288}
    assert fp8["tensors"]["dtypes"] == {"BF16": 22, "F32": 179, "F8_E4M3": 176}
    assert int4["parameters"] == fp8["parameters"] == plain["parameters"]


# --- small checkpoints made here, to be broken


def quantised(obj: dict[str, Any], how: str) -> tuple[dict[str, Any], Arrays]:
    """config.json and stored tensors of the small model as int4 (groups of 4: the last is cut) or fp8 (2 × 4)."""
    table = int4_config(IGNORE, group_size=4) if how == "int4" else fp8_config((2, 4))
    config = parse_config(obj)
    out: Arrays = {}
    for name, array in new_weights(config, 5).items():
        wide = array.astype(np.float32)
        if how == "int4" and ".experts." in name:
            out[f"{name}_packed"], out[f"{name}_scale"] = quantise_int4(wide, 4)
            out[f"{name}_shape"] = np.array(array.shape, np.int32)
        elif how == "fp8" and (name.endswith("_proj.weight") or "mqa.weight" in name):
            out[name], out[f"{name}_scale_inv"] = quantise_fp8(wide, (2, 4))
        else:
            out[name] = array
    return {**obj, "quantization_config": table}, out


@pytest.mark.parametrize("how", ["int4", "fp8"])
def test_arrays_and_folders_give_the_same_weights(small: Any, save_folder: Save, how: str) -> None:
    obj, arrays = quantised(small, how)
    config = parse_config(obj)
    memory = Weights.from_arrays(arrays, config)
    folder = open_model(save_folder(obj, arrays))
    assert memory.used_sha256() == folder.weights.used_sha256()
    assert {n: memory.stored_sha256(n) for n in memory.stored_names} == {
        n: folder.weights.stored_sha256(n) for n in folder.weights.stored_names
    }
    value = memory[EXPERT]
    assert value.flags.c_contiguous
    assert not value.flags.writeable
    plain = Weights.from_arrays(new_weights(parse_config(small), 5), parse_config(small))
    assert all(np.abs(memory[n] - plain[n]).max() < 0.5 for n in plain)
    assert memory.used_sha256() != plain.used_sha256()
    assert Weights.from_arrays(arrays, config, cache=False).used_sha256() == memory.used_sha256()


def test_nested_sharded_with_vision_and_extra_layers(small: Any, save_folder: Save) -> None:
    text, arrays = quantised(small, "int4")
    obj = {"model_type": "kimi_k25", "text_config": text, "vision_config": {"vt_num_hidden_layers": 27}}
    inside = {f"language_model.{name}": array for name, array in arrays.items()}
    inside["vision_tower.encoder.blocks.0.wqkv.weight"] = np.zeros((3, 3), ml_dtypes.bfloat16)
    inside["mm_projector.proj.0.weight"] = np.zeros((3, 3), ml_dtypes.bfloat16)
    inside["language_model.model.layers.2.mlp.experts.0.up_proj.weight_packed"] = np.zeros((1, 1), np.int32)
    names = sorted(inside)
    shards = {
        "model-00001-of-00002.safetensors": {n: inside[n] for n in names[::2]},
        "model-00002-of-00002.safetensors": {n: inside[n] for n in names[1::2]},
    }
    model = open_model(save_folder(obj, shards, index=True))
    assert model.weights.used_sha256() == Weights.from_arrays(arrays, parse_config(text)).used_sha256()
    assert any("vision" in note and "2 tensors" in note for note in model.checkpoint.notes)
    assert any("multi-token" in note for note in model.checkpoint.notes)


def test_deepseeks_layer_for_multi_token_prediction_is_skipped(small: Any, save_folder: Save) -> None:
    obj, arrays = quantised(small, "fp8")
    arrays["model.layers.2.eh_proj.weight"] = np.zeros((2, 4), ml_dtypes.float8_e4m3fn)
    arrays["model.layers.2.eh_proj.weight_scale_inv"] = np.ones((1, 1), np.float32)
    (note,) = open_model(save_folder({**obj, "num_nextn_predict_layers": 1}, arrays)).checkpoint.notes
    assert "2 tensors skipped" in note


DOWN = EXPERT.replace("up_proj", "down_proj")  # [6, 2]: one word, one cut group of scales
Q_A = "model.layers.1.self_attn.q_a_proj.weight"
E5M2, E8M0 = ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu


@pytest.mark.parametrize(
    ("how", "changes", "words"),
    [
        ("int4", {f"{DOWN}_packed": None}, [f"{DOWN}_packed is missing"]),
        ("int4", {f"{DOWN}_scale": None}, [f"{DOWN}_scale is missing"]),
        ("int4", {f"{DOWN}_shape": None}, [f"{DOWN}_shape is missing"]),
        ("int4", {f"{DOWN}_packed": np.zeros((6, 2), np.int32)}, [f"{DOWN}_packed", "[6, 2]", "[6, 1]"]),
        ("int4", {f"{DOWN}_packed": np.zeros((1, 6), np.int32)}, [f"{DOWN}_packed", "[1, 6]", "[6, 1]"]),
        ("int4", {f"{DOWN}_packed": np.zeros((6, 1), np.float32)}, [f"{DOWN}_packed", "F32", "I32"]),
        ("int4", {f"{DOWN}_packed": np.zeros((6, 4), np.uint8)}, [f"{DOWN}_packed", "[6, 4]"]),
        ("int4", {f"{DOWN}_scale": np.ones((6, 2), np.float32)}, [f"{DOWN}_scale", "[6, 2]", "[6, 1]"]),
        ("int4", {f"{DOWN}_scale": np.ones((6, 1), E8M0)}, [f"{DOWN}_scale", "F8_E8M0"]),
        ("int4", {f"{DOWN}_scale": np.ones((6, 1), np.uint8)}, [f"{DOWN}_scale", "U8"]),
        ("int4", {f"{DOWN}_shape": np.zeros(3, np.int32)}, [f"{DOWN}_shape", "[3]"]),
        ("int4", {f"{DOWN}_shape": np.zeros(2, np.float32)}, [f"{DOWN}_shape", "F32"]),
        ("int4", {f"{DOWN}_zero_point": np.zeros((6, 1), np.int32)}, [f"{DOWN}_zero_point has no place"]),
        ("int4", {f"{DOWN}_g_idx": np.zeros(2, np.int32)}, [f"{DOWN}_g_idx has no place"]),
        ("int4", {DOWN: np.zeros((6, 2), np.float32)}, [f"{DOWN} has no place"]),
        ("int4", {f"{DOWN}_packed": None, DOWN: np.zeros((6, 2), np.float32)}, [f"{DOWN}_packed", "quantises it"]),
        ("int4", {Q_A: None, f"{Q_A}_packed": np.zeros((4, 1), np.int32)}, [f"{Q_A} is missing", "stored packed"]),
        ("fp8", {Q_A: None}, [f"{Q_A} is missing"]),
        ("fp8", {f"{Q_A}_scale_inv": None}, [f"{Q_A}_scale_inv is missing"]),
        ("fp8", {Q_A: np.zeros((4, 6), ml_dtypes.bfloat16)}, [Q_A, "BF16", "F8_E4M3"]),
        ("fp8", {Q_A: np.zeros((4, 6), E5M2)}, [Q_A, "F8_E5M2", "F8_E4M3"]),
        ("fp8", {Q_A: np.zeros((6, 4), ml_dtypes.float8_e4m3fn)}, [Q_A, "[6, 4]", "[4, 6]"]),
        ("fp8", {f"{Q_A}_scale_inv": np.ones((2, 1), np.float32)}, [f"{Q_A}_scale_inv", "[2, 1]", "[2, 2]"]),
        ("fp8", {f"{Q_A}_scale_inv": np.ones((2, 2), E8M0)}, [f"{Q_A}_scale_inv", "F8_E8M0", "F32"]),
        ("fp8", {f"{Q_A}_scale_inv": np.ones((2, 2), np.uint8)}, [f"{Q_A}_scale_inv", "U8", "F32"]),
        ("fp8", {f"{Q_A}_scale": np.ones((2, 2), np.float32)}, [f"{Q_A}_scale has no place"]),
        ("fp8", {"lm_head.weight": np.zeros((11, 6), ml_dtypes.float8_e4m3fn)}, ["lm_head.weight", "F8_E4M3"]),
    ],
)
def test_broken_checkpoint_names_the_tensor(
    small: Any, save_folder: Save, how: str, changes: dict[str, Any], words: list[str]
) -> None:
    obj, arrays = quantised(small, how)
    arrays |= changes
    with pytest.raises(InputError) as caught:
        open_model(save_folder(obj, {name: array for name, array in arrays.items() if array is not None}))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("how", "name", "at", "bad", "words"),
    [
        ("int4", f"{DOWN}_scale", (2, 0), math.nan, [f"{DOWN}_scale[2, 0] is nan", "above 0"]),
        ("int4", f"{DOWN}_scale", (2, 0), -0.5, [f"{DOWN}_scale[2, 0] is -0.5"]),
        ("int4", f"{DOWN}_scale", (2, 0), 0.0, [f"{DOWN}_scale[2, 0] is 0.0"]),
        ("int4", f"{DOWN}_shape", 0, 5, [f"{DOWN}_shape holds [5, 2]"]),
        ("fp8", f"{Q_A}_scale_inv", (1, 1), math.inf, [f"{Q_A}_scale_inv[1, 1] is inf"]),
        ("fp8", f"{Q_A}_scale_inv", (1, 1), -1e-3, [f"{Q_A}_scale_inv[1, 1] is -0.001"]),
        ("fp8", Q_A, (3, 5), math.nan, [f"{Q_A}[3, 5] is nan"]),
        ("fp8", f"{Q_A}_scale_inv", (0, 0), 3e38, [f"{Q_A}[", "is ", "inf"]),
    ],
)
def test_bad_values_are_named_when_the_weight_is_read(
    small: Any, save_folder: Save, how: str, name: str, at: Any, bad: float, words: list[str]
) -> None:
    obj, arrays = quantised(small, how)
    arrays[name][at] = bad
    weights = [Weights.from_arrays(arrays, parse_config(obj)), open_model(save_folder(obj, arrays)).weights]
    for held in weights:
        with pytest.raises(InputError) as caught:
            held.used_sha256()
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize(
    ("how", "changes", "word"),
    [
        ("int4", {f"{DOWN}_scale": None}, f"{DOWN}_scale is missing"),
        ("int4", {f"{DOWN}_packed": np.zeros((6, 2), np.int32)}, "[6, 2]"),
        ("int4", {f"{DOWN}_packed": np.zeros((6, 1), np.int64)}, "int64"),
        ("int4", {DOWN: np.zeros((6, 2), np.float32)}, "no place"),
        ("fp8", {Q_A: np.zeros((4, 6), np.uint8)}, "uint8"),
        ("fp8", {f"{Q_A}_scale_inv": np.ones((2, 2), E8M0)}, "float8_e8m0fnu"),
    ],
)
def test_from_arrays_names_what_is_wrong(small: Any, how: str, changes: dict[str, Any], word: str) -> None:
    obj, arrays = quantised(small, how)
    arrays |= changes
    with pytest.raises(InputError) as caught:
        Weights.from_arrays({n: a for n, a in arrays.items() if a is not None}, parse_config(obj))
    assert word in str(caught.value)


def test_scales_and_shapes_in_their_other_dtypes(small: Any, save_folder: Save) -> None:
    obj, arrays = quantised(small, "int4")
    want = Weights.from_arrays(arrays, parse_config(obj)).used_sha256()
    other = {n: a.astype(np.int64) if n.endswith("_shape") else a for n, a in arrays.items()}
    other = {n: a.astype(np.float32) if n.endswith("_scale") else a for n, a in other.items()}
    assert open_model(save_folder(obj, other)).weights.used_sha256() == want


def test_a_config_that_quantises_a_plain_checkpoint_and_the_other_way_round(
    small: Any, small_arrays: Arrays, save_folder: Save
) -> None:
    obj, arrays = quantised(small, "int4")
    with pytest.raises(InputError, match=r"experts\.0\.gate_proj\.weight_packed is missing; .* quantises it"):
        open_model(save_folder(obj, small_arrays, "a"))
    with pytest.raises(InputError, match=r"experts\.0\.gate_proj\.weight is missing; it is stored packed"):
        open_model(save_folder(small, arrays, "b"))
    obj, arrays = quantised(small, "fp8")
    with pytest.raises(InputError, match=r"BF16; kdtr takes F8_E4M3 \(quantization_config quantises it"):
        open_model(save_folder(obj, small_arrays, "c"))
    with pytest.raises(InputError, match="F8_E4M3; kdtr takes F32, F16 and BF16"):
        open_model(save_folder(small, arrays, "d"))


def test_the_wrong_group_or_block_size_does_not_fit_the_scales(small: Any, save_folder: Save) -> None:
    for how, change in (("int4", {"group_size": 2}), ("fp8", {"weight_block_size": [4, 4]})):
        obj, arrays = quantised(small, how)
        table = json.loads(json.dumps(obj["quantization_config"]))
        (table["config_groups"]["group_0"]["weights"] if how == "int4" else table).update(change)
        with pytest.raises(InputError, match=r"_scale(_inv)? has shape"):
            open_model(save_folder({**obj, "quantization_config": table}, arrays, how))


def test_notes_and_names_of_the_checkpoint() -> None:
    config, _ = load_config(FIXTURES / "tiny-kimi-int4")
    checkpoint = open_checkpoint(FIXTURES / "tiny-kimi-int4", config)
    assert checkpoint.notes == []
    assert len(checkpoint.names()) == 489
    assert checkpoint.dtype(f"{EXPERT}_packed") == "I32"
    assert checkpoint.shape(f"{EXPERT}_packed") == (96, 24)

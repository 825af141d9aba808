"""Checkpoints: each fault is one line that names the tensor, and every layout gives the same weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr_cli.errors import InputError
from kdtr_cli.model.checkpoint import open_checkpoint
from kdtr_cli.model.config import ModelConfig, load_config, parse_config
from kdtr_cli.model.presets import new_weights
from kdtr_cli.model.tensors import expected_tensors
from kdtr_cli.model.weights import Weights

pytestmark = pytest.mark.quick
FIXTURES = Path(__file__).parents[2] / "fixtures"
Arrays = dict[str, np.ndarray]
Save = Callable[..., Path]


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def digest(folder: Path) -> str:
    config, _ = load_config(folder)
    return Weights.from_checkpoint(open_checkpoint(folder, config), config).used_sha256()


def test_values_are_those_written(small: Any, small_arrays: Arrays, save_folder: Save) -> None:
    checkpoint = open_checkpoint(save_folder(small, small_arrays))
    assert checkpoint.names() == sorted(small_arrays)
    assert checkpoint.notes == []
    for name, want in small_arrays.items():
        assert checkpoint.shape(name) == want.shape
        assert checkpoint.dtype(name) == {"bfloat16": "BF16", "float32": "F32"}[want.dtype.name]
        assert checkpoint.nbytes(name) == want.nbytes
        assert checkpoint.read_bytes(name) == want.tobytes()
        assert checkpoint.stored(name).tobytes() == want.tobytes()
        got = checkpoint.read(name)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want.astype(np.float32))


def split(arrays: Arrays, n: int) -> dict[str, Arrays]:
    names = sorted(arrays)
    return {f"model-{i:05d}-of-{n:05d}.safetensors": {k: arrays[k] for k in names[i::n]} for i in range(n)}


def fuse(arrays: Arrays, config: ModelConfig) -> Arrays:
    out = {name: array for name, array in arrays.items() if ".mlp.experts." not in name}
    for i in filter(config.is_moe_layer, range(config.num_hidden_layers)):
        base = f"model.layers.{i}.mlp.experts."
        part = {
            kind: [arrays[f"{base}{e}.{kind}_proj.weight"] for e in range(config.n_routed_experts)]
            for kind in ("gate", "up", "down")
        }
        pairs = [np.concatenate(pair) for pair in zip(part["gate"], part["up"], strict=True)]
        out[f"{base}gate_up_proj"] = np.stack(pairs)
        out[f"{base}down_proj"] = np.stack(part["down"])
    return out


def test_single_sharded_indexed_fused_and_nested_are_the_same_weights(
    small: Any, small_config: ModelConfig, small_arrays: Arrays, save_folder: Save
) -> None:
    single = save_folder(small, small_arrays, "single")
    fused = fuse(small_arrays, small_config)
    assert fused["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 4, 6)
    nested = {"model_type": "kimi_k25", "text_config": {**small, "model_type": "kimi_k2"}}
    prefixed = {f"language_model.{name}": array for name, array in small_arrays.items()}
    vision = {"vision_tower.x": np.zeros(3, np.float32), "mm_projector.y": np.zeros(3, np.float32)}
    others = [
        save_folder(small, split(small_arrays, 3), "sharded", index=True),
        save_folder(small, split(small_arrays, 2), "unindexed"),
        save_folder(small, fused, "fused"),
        save_folder(small, split(fused, 4), "fused-sharded", index=True),
        save_folder(nested, {**prefixed, **vision}, "nested"),
        save_folder(nested, {f"language_model.{name}": array for name, array in fused.items()}, "nested-fused"),
    ]
    assert [digest(folder) for folder in others] == [digest(single)] * len(others)
    for folder in others:
        one, two = open_checkpoint(single), open_checkpoint(folder)
        assert one.names() == two.names()
        assert all(one.sha256(name) == two.sha256(name) for name in one.names())
    assert open_checkpoint(others[4]).notes == ["2 tensors skipped: the vision tower"]


@pytest.mark.parametrize("seed", range(3))
def test_each_missing_tensor_is_named(small: Any, small_arrays: Arrays, save_folder: Save, seed: int) -> None:
    gone = sorted(small_arrays)[seed * 7]
    del small_arrays[gone]
    refused(save_folder(small, small_arrays), gone, "missing")


def test_every_expected_tensor_is_needed(small: Any, small_config: ModelConfig, small_arrays: Arrays) -> None:
    assert set(expected_tensors(small_config)) == set(small_arrays)
    names = " ".join(small_arrays)
    for piece in (
        "q_a_proj.bias",
        "kv_a_proj_with_mqa.bias",
        "o_proj.bias",
        "shared_experts.up_proj",
        "correction_bias",
    ):
        assert piece in names
    for piece in ("q_b_proj.bias", "kv_b_proj.bias", "gate_proj.bias"):
        assert piece not in names
    plain = expected_tensors(parse_config({**small, "q_lora_rank": None}))
    assert plain["model.layers.0.self_attn.q_proj.weight"] == (10, 6)
    assert not any("q_a" in name or "q_b" in name or "q_proj.bias" in name for name in plain)
    no_shared = expected_tensors(parse_config({**small, "n_shared_experts": None}))
    assert not any("shared" in name for name in no_shared)


def test_wrong_shape_is_named(small: Any, small_arrays: Arrays, save_folder: Save) -> None:
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    small_arrays[name] = small_arrays[name].T.copy()
    refused(save_folder(small, small_arrays), name, "[3, 12]", "[12, 3]")


def test_wrong_fused_shape_is_named(
    small: Any, small_config: ModelConfig, small_arrays: Arrays, save_folder: Save
) -> None:
    fused = fuse(small_arrays, small_config)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    fused[name] = np.ascontiguousarray(fused[name].transpose(0, 2, 1))
    refused(save_folder(small, fused), name, "[4, 6, 4]", "[4, 4, 6]")


def test_left_over_tensor_is_named(small: Any, small_arrays: Arrays, save_folder: Save) -> None:
    small_arrays["model.layers.1.mlp.experts.4.up_proj.weight"] = np.zeros((2, 6), np.float32)
    refused(save_folder(small, small_arrays), "experts.4.up_proj.weight", "no place")


def test_prefix_without_nesting_is_named(small: Any, small_arrays: Arrays, save_folder: Save) -> None:
    prefixed = {f"language_model.{name}": array for name, array in small_arrays.items()}
    refused(save_folder(small, prefixed), "model.embed_tokens.weight", "missing")
    nested = {"model_type": "kimi_k25", "text_config": small}
    refused(save_folder(nested, small_arrays, "other"), "language_model.")


@pytest.mark.parametrize("dtype", [np.float64, np.int32])
def test_dtype_that_kdtr_does_not_compute_with(
    small: Any, small_arrays: Arrays, save_folder: Save, dtype: type
) -> None:
    small_arrays["model.norm.weight"] = small_arrays["model.norm.weight"].astype(np.float32).astype(dtype)
    refused(save_folder(small, small_arrays), "model.norm.weight", {np.float64: "F64", np.int32: "I32"}[dtype])


def test_fused_and_single_experts_together(
    small: Any, small_config: ModelConfig, small_arrays: Arrays, save_folder: Save
) -> None:
    refused(save_folder(small, {**small_arrays, **fuse(small_arrays, small_config)}), "experts.0.", "twice")


def test_what_is_not_the_models_is_skipped_with_a_note(small: Any, small_arrays: Arrays, save_folder: Save) -> None:
    one = np.zeros(1, np.int32)
    extra = {
        "model.layers.2.eh_proj.weight": one,
        "model.layers.2.mlp.experts.0.up_proj.weight": one,
        "model.layers.0.self_attn.rotary_emb.inv_freq": one,
    }
    checkpoint = open_checkpoint(save_folder(small, {**small_arrays, **extra}))
    assert checkpoint.names() == sorted(small_arrays)
    assert len(checkpoint.notes) == 2
    assert any("layer 2" in note and "2 tensors" in note for note in checkpoint.notes)
    assert any("rotary" in note for note in checkpoint.notes)


# --- shards and the index


def test_tensor_in_two_shards(small: Any, small_arrays: Arrays, save_folder: Save) -> None:
    shards = split(small_arrays, 2)
    first, second = shards.values()
    second[next(iter(first))] = next(iter(first.values()))
    refused(save_folder(small, shards), next(iter(first)), "is in both", *shards)


def edited_index(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))
    return folder


def test_missing_shard(small: Any, small_arrays: Arrays, save_folder: Save) -> None:
    folder = save_folder(small, split(small_arrays, 3), index=True)
    (folder / "model-00001-of-00003.safetensors").unlink()
    refused(folder, "model-00001-of-00003.safetensors is missing")


@pytest.mark.parametrize(
    "shard", ["../other.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "x.bin", 3, ""]
)
def test_shard_outside_the_folder_is_refused(
    small: Any, small_arrays: Arrays, save_folder: Save, save_raw: Save, shard: Any
) -> None:
    folder = save_folder(small, split(small_arrays, 2), index=True)
    save_raw(folder.parent / "other.safetensors", small_arrays)
    edited_index(folder, lambda index: index["weight_map"].update({"model.norm.weight": shard}))
    refused(folder, "model.norm.weight", "beside it")


def test_index_and_shards_must_tell_the_same(small: Any, small_arrays: Arrays, save_folder: Save) -> None:
    shard = "model-00000-of-00002.safetensors"
    one = save_folder(small, split(small_arrays, 2), "one", index=True)
    refused(edited_index(one, lambda index: index["weight_map"].update({"ghost": shard})), "ghost", "does not hold it")
    two = save_folder(small, split(small_arrays, 2), "two", index=True)
    edited_index(two, lambda index: index["weight_map"].pop("model.norm.weight"))
    refused(two, "model.norm.weight", "does not name")
    four = save_folder(small, split(small_arrays, 2), "four", index=True)
    refused(edited_index(four, lambda index: index["weight_map"].update({"a\nb": shard})), r'"a\nb"')
    three = save_folder(small, split(small_arrays, 2), "three", index=True)
    refused(edited_index(three, lambda index: index.pop("weight_map")), "weight_map")


def test_files_that_the_index_does_not_name(
    small: Any, small_arrays: Arrays, save_folder: Save, save_raw: Save
) -> None:
    folder = save_folder(small, split(small_arrays, 2), index=True)
    save_raw(folder / "mtp.safetensors", {"x": np.zeros(3, np.float32)})
    assert open_checkpoint(folder).notes == ["not read, because the index does not name it: mtp.safetensors"]
    save_raw(folder / "model.safetensors", small_arrays)
    refused(folder, "model.safetensors and an index")


def test_hub_caches_with_linked_files_open(small: Any, small_arrays: Arrays, save_folder: Save) -> None:
    folder = save_folder(small, small_arrays)
    blob = folder.parent / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    assert open_checkpoint(folder).names() == sorted(small_arrays)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_never_opened(small: Any, save_folder: Save, name: str) -> None:
    folder = save_folder(small, {})
    (folder / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    refused(folder, name, "pickled", "convert to safetensors")


def test_folder_without_weights(small: Any, save_folder: Save) -> None:
    folder = save_folder(small, {})
    refused(folder, "no *.safetensors")


# --- tied embeddings


def test_tied_head_is_the_embedding_and_may_be_absent(small: Any, small_arrays: Arrays, save_folder: Save) -> None:
    tied = {**small, "tie_word_embeddings": True}
    arrays = {name: array for name, array in small_arrays.items() if name != "lm_head.weight"}
    absent = save_folder(tied, arrays, "absent")
    embedding = arrays["model.embed_tokens.weight"]
    present = save_folder(tied, {**arrays, "lm_head.weight": embedding}, "present")
    assert digest(absent) == digest(present)
    assert open_checkpoint(present).names() == sorted(arrays)
    refused(save_folder(tied, small_arrays, "differs"), "lm_head.weight", "tie_word_embeddings")


# --- the real one


def test_tiny_kimi_loads_with_every_tensor_used() -> None:
    config, _ = load_config(FIXTURES / "tiny-kimi")
    checkpoint = open_checkpoint(FIXTURES / "tiny-kimi", config)
    assert checkpoint.notes == []
    assert checkpoint.names() == sorted(expected_tensors(config))
    weights = Weights.from_checkpoint(checkpoint, config)
    assert sum(weights[name].size for name in weights) == 3_818_864
    assert weights.used_sha256() == "c52d84e110f1874c9079a602ea37ddcc9e4aba42d77fd3c67a46e57917e97255"


def test_presets_weights_open_from_any_layout(save_folder: Save, small: Any, small_config: ModelConfig) -> None:
    arrays = new_weights(small_config, 9)
    assert digest(save_folder(small, arrays)) == Weights.from_arrays(arrays, small_config).used_sha256()

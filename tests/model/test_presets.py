"""Presets: their shapes, their pinned weights, and folders that appear whole or not at all."""

import hashlib
import json
import os
import stat
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from kdtr_cli.errors import InputError
from kdtr_cli.model import presets
from kdtr_cli.model.checkpoint import open_checkpoint
from kdtr_cli.model.config import load_config, parse_config
from kdtr_cli.model.presets import PRESETS, new_weights, preset_text, write_model
from kdtr_cli.model.tensors import expected_tensors
from kdtr_cli.model.weights import Weights

pytestmark = pytest.mark.quick

# used_sha256 with seed 0. Goldens made from presets depend on it: another value is another model.
DIGESTS = {
    "tiny": "53f9886303a61e42190e168e94b97c4f548c34189f2af2642df14c6bb7b98282",
    "tiny-groups": "6bd643bdec2e630ecc42607e9b95c43de5b10848c65b796db92f3ff3678ea1e1",
    "tiny-v2": "5630e34410b1e295889b2084d05808db8d1985e1593f5b2b1864796733eed122",
    "odd": "e0ef8bb80dffc0cf3ae59939000584e6aa7ed59c2d3baa319c32f97bf8041d64",
}


@pytest.mark.parametrize("name", list(PRESETS))
def test_weights_are_pinned(name: str) -> None:
    config = parse_config(PRESETS[name])
    assert Weights.from_arrays(new_weights(config, 0), config).used_sha256() == DIGESTS[name]


def test_tiny_has_every_mechanism_on() -> None:
    c = parse_config(PRESETS["tiny"])
    assert c.vocab_size == 512
    assert [c.is_moe_layer(i) for i in range(c.num_hidden_layers)] == [False, True, True, True]
    assert (c.q_lora_rank, c.n_shared_experts, c.scoring_func, c.norm_topk_prob) == (48, 1, "sigmoid", True)
    assert c.rope_scaling is not None
    assert c.rope_scaling.mscale_all_dim == 1
    assert c.softmax_scale() > 1.2 * c.qk_head_dim**-0.5
    assert c.rms_norm_eps == 1e-5
    assert c.eos_token_ids == (511,)


def test_groups_and_v2() -> None:
    groups, v2 = parse_config(PRESETS["tiny-groups"]), parse_config(PRESETS["tiny-v2"])
    assert (groups.n_group, groups.topk_group, groups.n_shared_experts) == (4, 2, 2)
    assert (v2.is_v2, v2.scoring_func, v2.topk_method, v2.q_lora_rank) == (True, "softmax", "greedy", None)
    assert v2.rope_scaling is not None
    assert v2.rope_scaling.mscale_all_dim == 0.707
    assert not v2.norm_topk_prob


def test_odd_has_no_size_that_is_a_multiple_of_8() -> None:
    c = parse_config(PRESETS["odd"])
    assert c.vocab_size == 257
    sizes = {
        size
        for name, shape in expected_tensors(c).items()
        for size in shape
    } | {c.qk_head_dim, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.latent_dim, c.max_position_embeddings,
         c.num_attention_heads, c.num_experts_per_tok, c.num_hidden_layers}  # fmt: skip
    assert not [size for size in sizes if size % 8 == 0]
    assert sum(size % 2 for size in sizes) > 0.8 * len(sizes)
    assert c.attention_bias


@pytest.mark.parametrize("name", list(PRESETS))
def test_weights_are_of_the_stated_kinds(name: str) -> None:
    config = parse_config(PRESETS[name])
    for tensor, array in new_weights(config, 0).items():
        values = array.astype(np.float64)
        if tensor.endswith("e_score_correction_bias"):
            assert array.dtype == np.float32
            assert -1.1 <= values.min() < values.max() < -0.6
            continue
        assert array.dtype == ml_dtypes.bfloat16
        assert np.isfinite(values).all()
        if tensor.endswith("norm.weight"):
            assert 0.5 <= values.min() < 0.7
            assert 1.3 < values.max() <= 1.5
        elif array.ndim == 2 and array.size > 2000 and "_a_proj" not in tensor:
            want = 1.0 if "embed" in tensor else array.shape[1] ** -0.5
            assert values.std() == pytest.approx(want, rel=0.06)
            assert abs(values.mean()) < 5 * want / array.size**0.5


def test_seeds_and_tensors_are_independent() -> None:
    config = parse_config(PRESETS["odd"])
    zero, one = new_weights(config, 0), new_weights(config, 1)
    assert all(not np.array_equal(zero[name], one[name]) for name in zero)
    matrices = [array.tobytes() for array in zero.values() if array.ndim == 2]
    assert len(set(matrices)) == len(matrices)
    pair = [zero[f"model.layers.1.mlp.experts.{e}.up_proj.weight"].astype(float).ravel() for e in (0, 1)]
    assert abs(np.corrcoef(*pair)[0, 1]) < 0.1


def test_values_are_exact_operations_on_philox_words() -> None:
    config = parse_config(PRESETS["odd"])
    key = hashlib.sha256(b"kdtr preset weights 3 model.norm.weight").digest()[:16]
    words = [int(w) for w in np.random.Philox(key=int.from_bytes(key, "little")).random_raw(75)]
    want = np.array([0.5 + (w >> 40) / 2**24 for w in words]).astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(new_weights(config, 3)["model.norm.weight"], want)


def test_philox_words_are_the_published_algorithm() -> None:
    # Random123's known answer for philox4x64-10: key and counter all ones
    ones = 2**64 - 1
    generator = np.random.Philox(key=ones + (ones << 64), counter=[ones] * 4)
    state = generator.state
    state["state"]["counter"] = np.array([ones - 1, ones, ones, ones], dtype=np.uint64)
    generator.state = state
    assert [f"{int(word):016x}" for word in generator.random_raw(4)] == [
        "87b092c3013fe90b", "438c3c67be8d0224", "9cc7d7c69cd777b6", "a09caebf594f0ba0",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_out_of_range(seed: int) -> None:
    with pytest.raises(InputError, match=f"seed {seed}"):
        new_weights(parse_config(PRESETS["odd"]), seed)


# --- folders


@pytest.mark.parametrize("name", list(PRESETS))
def test_written_model_opens_as_the_preset(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / "m", name, seed=4)
    config, text = load_config(tmp_path / "m")
    assert text == preset_text(name)
    assert config == parse_config(PRESETS[name])
    read = Weights.from_checkpoint(open_checkpoint(tmp_path / "m"), config)
    made = Weights.from_arrays(new_weights(config, 4), config)
    assert read.used_sha256() == made.used_sha256()
    assert all(read.stored_sha256(tensor) == made.stored_sha256(tensor) for tensor in made)
    library = safetensors.numpy.load_file(tmp_path / "m" / "model.safetensors")
    assert set(library) == set(made)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_model(tmp_path / name, "odd", seed)
    assert content(tmp_path / "a") == content(tmp_path / "b") != content(tmp_path / "c")
    assert set(content(tmp_path / "a")) == {"config.json", "generation_config.json", "model.safetensors"}
    assert json.loads((tmp_path / "a" / "generation_config.json").read_text())["eos_token_id"] == 256


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_model(tmp_path / "m", "odd")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "m" / "config.json").stat().st_mode) == 0o640


def test_existing_path_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "odd", 1)
    before = content(tmp_path / "m")
    with pytest.raises(InputError, match="--force"):
        write_model(tmp_path / "m", "odd", 2)
    assert content(tmp_path / "m") == before
    write_model(tmp_path / "m", "odd", 2, force=True)
    assert content(tmp_path / "m")["model.safetensors"] != before["model.safetensors"]
    assert sorted(os.listdir(tmp_path)) == ["m"]


def test_force_never_removes_what_is_no_such_model(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "odd")
    (tmp_path / "m" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"thesis\.txt"):
        write_model(tmp_path / "m", "odd", force=True)
    assert (tmp_path / "m" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="not a folder"):
        write_model(tmp_path / "file", "odd", force=True)
    (tmp_path / "link").symlink_to(tmp_path / "m")
    with pytest.raises(InputError, match="not a folder"):
        write_model(tmp_path / "link", "odd", force=True)
    (tmp_path / "empty").mkdir()
    write_model(tmp_path / "empty", "odd", force=True)
    assert load_config(tmp_path / "empty")


@pytest.mark.parametrize("place", ["none/m", "file/m"])
def test_place_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="folder above"):
        write_model(tmp_path / place, "odd")
    for unnamed in (".", "..", "/"):
        with pytest.raises(InputError, match="name a new folder"):
            write_model(unnamed, "odd", force=True)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("force", [False, True])
def test_interrupted_writing_leaves_the_old_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, force: bool
) -> None:
    if force:
        write_model(tmp_path / "m", "odd", 1)
        before = content(tmp_path / "m")
    real, calls = presets.write_synced, []

    def failing(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(data[:100])
            raise error
        real(path, data)

    monkeypatch.setattr(presets, "write_synced", failing)
    with pytest.raises(InputError if isinstance(error, OSError) else KeyboardInterrupt):
        write_model(tmp_path / "m", "odd", 2, force=force)
    assert len(calls) == 3
    assert os.listdir(tmp_path) == (["m"] if force else [])
    if force:
        assert content(tmp_path / "m") == before


def test_failed_replacement_puts_the_old_model_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m", "odd", 1)
    before = content(tmp_path / "m")
    real = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.suffix == ".tmp":
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(InputError, match="Input/output error"):
        write_model(tmp_path / "m", "odd", 2, force=True)
    assert content(tmp_path / "m") == before
    assert os.listdir(tmp_path) == ["m"]


def test_unknown_preset(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tiny-groups"):
        write_model(tmp_path / "m", "huge")

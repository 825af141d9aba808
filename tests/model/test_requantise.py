"""`kdtr model quantize`: the independent packer's bytes, and folders that appear whole or not at all."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from kdtr_cli.cli.model import model as command
from kdtr_cli.errors import InputError
from kdtr_cli.model import requantise
from kdtr_cli.model.presets import write_model
from kdtr_cli.model.published import EXPERTS_ONLY, EXPERTS_ONLY_K26
from kdtr_cli.model.quantisation import Quantisation
from kdtr_cli.model.requantise import quantise_model
from kdtr_cli.model.safetensors_file import SafetensorsFile
from kdtr_cli.model.source import open_model

pytestmark = pytest.mark.quick
FIXTURES = Path(__file__).parents[2] / "fixtures"
KIMI = FIXTURES / "tiny-kimi"
Save = Callable[..., Path]


def tensors(folder: Path, prefix: str = "") -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    file = SafetensorsFile(folder / "model.safetensors")
    return {
        prefix + name: (region.dtype, region.shape, b"".join(file.blocks(name, region)))
        for name, region in file.regions.items()
    }


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_int4_is_what_compressed_tensors_packed(tmp_path: Path) -> None:
    quantise_model(KIMI, tmp_path / "q", "int4")
    assert tensors(tmp_path / "q", "language_model.") == tensors(FIXTURES / "tiny-kimi-int4")
    config = open_model(tmp_path / "q").config
    assert config.quantisation == Quantisation("int4", group_size=32, ignore=EXPERTS_ONLY)


def test_fp8_is_what_the_packer_in_deepseeks_layout_wrote(tmp_path: Path) -> None:
    quantise_model(KIMI, tmp_path / "q", "fp8")
    theirs = FIXTURES / "tiny-kimi-fp8"
    assert (tmp_path / "q" / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    written = json.loads((tmp_path / "q" / "config.json").read_text())
    assert written == json.loads((theirs / "config.json").read_text())


def test_bf16_of_a_bf16_model_is_the_model(tmp_path: Path) -> None:
    quantise_model(KIMI, tmp_path / "q", "bf16")
    assert content(tmp_path / "q")["model.safetensors"] == (KIMI / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["tiny-kimi-int4", "tiny-kimi-fp8"])
def test_bf16_of_a_quantised_model_rounds_its_values(tmp_path: Path, name: str) -> None:
    quantise_model(FIXTURES / name, tmp_path / "q", "bf16")
    source, out = open_model(FIXTURES / name), open_model(tmp_path / "q")
    assert out.config.quantisation is None
    assert out.config.tensor_prefix == source.config.tensor_prefix
    for tensor in source.weights:
        want = source.weights[tensor]
        if not tensor.endswith("e_score_correction_bias"):
            want = want.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(out.weights[tensor], want)


def test_a_nested_model_stays_nested_in_k26s_spelling(tmp_path: Path) -> None:
    quantise_model(FIXTURES / "tiny-kimi-int4", tmp_path / "plain", "bf16")
    quantise_model(tmp_path / "plain", tmp_path / "q", "int4")
    assert json.loads((tmp_path / "q" / "config.json").read_text()) == json.loads(
        (FIXTURES / "tiny-kimi-int4" / "config.json").read_text()
    )
    assert open_model(tmp_path / "q").config.quantisation.ignore == EXPERTS_ONLY_K26
    assert tensors(tmp_path / "q").keys() == tensors(FIXTURES / "tiny-kimi-int4").keys()


@pytest.mark.parametrize("first", ["int4", "fp8"])
@pytest.mark.parametrize("to", ["int4", "fp8"])
def test_from_one_format_to_another(tmp_path: Path, first: str, to: str) -> None:
    source = FIXTURES / f"tiny-kimi-{first}"
    quantise_model(source, tmp_path / "q", to)
    a, b = open_model(source), open_model(tmp_path / "q")
    assert b.config.quantisation.method == to
    for tensor in a.weights:
        assert np.linalg.norm(a.weights[tensor] - b.weights[tensor]) < 0.13 * np.linalg.norm(a.weights[tensor])
    if first == "fp8" == to:  # the values are on the grid and the highest is kept: nothing is rounded anew
        gap = [np.abs(a.weights[t] - b.weights[t]).max() / np.abs(a.weights[t]).max() for t in a.weights]
        assert max(gap) < 1e-6


def test_tokenizer_and_stop_ids_come_along_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(KIMI, source)
    for name in ("chat_template.jinja", "modeling_deepseek.py", "README.md"):
        (source / name).write_text("x")
    quantise_model(source, tmp_path / "q", "int4")
    made = content(tmp_path / "q")
    assert sorted(made) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert made[name] == (KIMI / name).read_bytes()


def test_other_dtypes_stay_and_cut_groups_work(
    small: Any, small_arrays: Any, save_folder: Save, tmp_path: Path
) -> None:
    wide = {n: a.astype(np.float16 if n.startswith("lm") else np.float32) for n, a in small_arrays.items()}
    folder = save_folder(small, wide)
    for to in ("int4", "fp8", "bf16"):
        quantise_model(folder, tmp_path / to, to)
    int4, fp8, bf16 = (open_model(tmp_path / to) for to in ("int4", "fp8", "bf16"))
    assert int4.weights.stored_dtype("lm_head.weight") == "F16"
    assert int4.weights.stored_dtype("model.norm.weight") == "F32"
    assert fp8.weights.stored_dtype("model.embed_tokens.weight") == "F32"
    assert {bf16.weights.stored_dtype(n) for n in bf16.weights if "e_score" not in n} == {"BF16"}
    assert bf16.weights.stored_dtype("model.layers.1.mlp.gate.e_score_correction_bias") == "F32"
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    base = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert int4.weights.stored(f"{base}_scale").shape == (2, 1)
    assert int4.weights.stored(f"{base}_shape").tolist() == [2, 6]
    for made in (int4, fp8, bf16):
        assert np.abs(made.weights[base] - wide[base]).max() < 0.2


def test_blocks_of_rows_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for to in ("int4", "fp8"):
        quantise_model(KIMI, tmp_path / f"{to}-whole", to)
        monkeypatch.setattr("kdtr_cli.model.encode.ROWS", 1000)  # five rows; of fp8 one block of 128
        quantise_model(KIMI, tmp_path / f"{to}-rows", to)
        monkeypatch.undo()
        assert content(tmp_path / f"{to}-whole") == content(tmp_path / f"{to}-rows")


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = requantise.write_tensors
    monkeypatch.setattr(requantise, "write_tensors", lambda *args: real(*args, shard_bytes=10**6))
    quantise_model(KIMI, tmp_path / "q", "fp8")
    names = sorted(p.name for p in (tmp_path / "q").glob("*.safetensors"))
    assert len(names) > 3
    assert (
        open_model(tmp_path / "q").weights.used_sha256() == open_model(FIXTURES / "tiny-kimi-fp8").weights.used_sha256()
    )
    quantise_model(KIMI, tmp_path / "q", "int4", force=True)  # shards and index are files of ours


def test_places_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        quantise_model("tiny", tmp_path / "q", "int4")
    write_model(tmp_path / "m", "tiny")
    with pytest.raises(InputError, match="is the model itself"):
        quantise_model(tmp_path / "m", tmp_path / "m", "int4", force=True)
    (tmp_path / "q").mkdir()
    with pytest.raises(InputError, match="--force"):
        quantise_model(tmp_path / "m", tmp_path / "q", "int4")
    (tmp_path / "q" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"thesis\.txt"):
        quantise_model(tmp_path / "m", tmp_path / "q", "int4", force=True)
    assert os.listdir(tmp_path / "q") == ["thesis.txt"]


def test_dense_models_have_nothing_for_int4(small: Any, small_arrays: Any, save_folder: Save, tmp_path: Path) -> None:
    arrays = {n: a for n, a in small_arrays.items() if "layers.1.mlp" not in n}
    for name in ("gate_proj", "up_proj", "down_proj"):
        arrays[f"model.layers.1.mlp.{name}.weight"] = small_arrays[f"model.layers.0.mlp.{name}.weight"]
    folder = save_folder({**small, "n_routed_experts": 0}, arrays)
    with pytest.raises(InputError, match="no routed experts"):
        quantise_model(folder, tmp_path / "q", "int4")
    quantise_model(folder, tmp_path / "q", "fp8")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_interrupted_work_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    calls: list[int] = []

    def failing(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 20:
            raise error

    with pytest.raises(InputError if isinstance(error, OSError) else KeyboardInterrupt):
        quantise_model(KIMI, tmp_path / "q", "int4", progress=failing)
    assert len(calls) == 20
    assert os.listdir(tmp_path) == []


def test_a_weight_that_is_not_finite_is_named(small: Any, small_arrays: Any, save_folder: Save, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    small_arrays[name][0, 0] = np.inf
    with pytest.raises(InputError, match=r"experts\.2\.up_proj\.weight\[0, 0\] is inf"):
        quantise_model(save_folder(small, small_arrays), tmp_path / "q", "int4")
    assert not (tmp_path / "q").exists()


def test_the_command(tmp_path: Path) -> None:
    def run(*args: Any) -> Any:
        return CliRunner().invoke(command, ["quantize", *map(str, args)])

    done = run(KIMI, "--to", "int4", "-o", tmp_path / "q")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path / 'q'}: {KIMI} as int4\n"
    assert run(KIMI, "--to", "int3", "-o", tmp_path / "r").exit_code == 2
    assert run(KIMI, "-o", tmp_path / "r").exit_code == 2
    assert isinstance(run(KIMI, "--to", "fp8", "-o", tmp_path / "q").exception, InputError)
    assert run(KIMI, "--to", "fp8", "-o", tmp_path / "q", "--force").exit_code == 0
    shown = CliRunner().invoke(command, ["show", str(tmp_path / "q")])
    assert "quantisation.method" in shown.stdout
    assert "fp8" in shown.stdout


def test_what_is_left_out_is_told(small: Any, small_arrays: Any, save_folder: Save, tmp_path: Path) -> None:
    small_arrays["model.layers.2.eh_proj.weight"] = np.zeros(1, np.float32)
    folder = save_folder(small, small_arrays)
    done = CliRunner().invoke(command, ["quantize", str(folder), "--to", "bf16", "-o", str(tmp_path / "q")])
    assert "kdtr: note: 1 tensor skipped" in done.stderr

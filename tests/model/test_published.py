"""Presets of real shape: the published configs field by field, cut to size, and written piece by piece."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from test_config_published import K26, K26_TEXT, MOONLIGHT, V2_LITE, V3

from kdtr_cli.cli.model import model as command
from kdtr_cli.errors import InputError
from kdtr_cli.model.config import RopeScaling, parse_config
from kdtr_cli.model.presets import PRESETS, new_weights
from kdtr_cli.model.published import PUBLISHED, cut, write_published
from kdtr_cli.model.quant import quantise_fp8, quantise_int4
from kdtr_cli.model.quantisation import Quantisation
from kdtr_cli.model.requantise import quantise_model
from kdtr_cli.model.source import open_model
from kdtr_cli.model.summary import count_parameters

FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
FIXTURE = Path(__file__).parents[2] / "fixtures" / "tiny-kimi-int4" / "config.json"
K26_QUANTISATION = json.loads(FIXTURE.read_text())["text_config"]["quantization_config"]
K2_IGNORE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
# what old PretrainedConfig classes wrote out, and the names of the vision half's switches: no part of a model
NOISE = {
    "bad_words_ids", "chunk_size_feed_forward", "cross_attention_hidden_size", "is_decoder", "max_length", "num_beams",
    "pruned_heads", "tie_encoder_decoder", "torchscript", "use_unified_vision_chunk", "video_placeholder",
    "vision_config", "text_config", "transformers_version",
}  # fmt: skip


def fields(obj: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in obj.items() if key not in NOISE}


@pytest.mark.quick
class TestConfigs:
    @pytest.mark.parametrize(
        ("name", "want"),
        [
            ("deepseek-v3", {**V3, "quantization_config": FP8}),
            ("deepseek-v2-lite", V2_LITE),
            ("moonlight", {**MOONLIGHT, "seq_aux": True, "aux_loss_alpha": 0.001}),
            ("kimi-k2.6", K26),
        ],
    )
    def test_every_field_is_the_published_one(self, name, want):
        assert fields(PUBLISHED[name]) == fields(want)

    def test_kimi_k26_text_config(self):
        want = {**K26_TEXT, "quantization_config": K26_QUANTISATION}
        assert fields(PUBLISHED["kimi-k2.6"]["text_config"]) == fields(want)
        assert parse_config(PUBLISHED["kimi-k2.6"]).tensor_prefix == "language_model."

    def test_kimi_k2_thinking_differs_from_k26_in_beta_fast_and_the_layout(self):
        thinking, k26 = parse_config(PUBLISHED["kimi-k2-thinking"]), parse_config(PUBLISHED["kimi-k2.6"])
        assert thinking.rope_scaling == RopeScaling(64.0, 4096, 1.0, 1.0, 1.0, 1.0)
        assert thinking.quantisation == Quantisation("int4", group_size=32, ignore=tuple(K2_IGNORE))
        assert thinking.tensor_prefix == ""
        same = {"rope_scaling": None, "quantisation": None, "tensor_prefix": ""}
        assert {**vars(thinking), **same} == {**vars(k26), **same}

    @pytest.mark.parametrize(
        ("name", "total"),
        [
            ("kimi-k2.6", 1026e9),
            ("kimi-k2-thinking", 1026e9),
            ("deepseek-v3", 671e9),
            ("deepseek-v2-lite", 15.7e9),
            ("moonlight", 16e9),
        ],
    )
    def test_parameters(self, name, total):
        assert count_parameters(parse_config(PUBLISHED[name]))[0] == pytest.approx(total, rel=0.01)

    def test_quantised_as_published_or_bf16(self):
        methods = {}
        for name in PUBLISHED:
            how = parse_config(cut(name)).quantisation
            methods[name] = how.method if how else None
            assert parse_config(cut(name, dtype="bf16")).quantisation is None
        assert methods == {
            "kimi-k2.6": "int4",
            "kimi-k2-thinking": "int4",
            "deepseek-v3": "fp8",
            "deepseek-v2-lite": None,
            "moonlight": None,
        }

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_quantised_as_another_is(self, name):
        nested = "text_config" in PUBLISHED[name]
        for to, like in (("int4", "kimi-k2.6" if nested else "kimi-k2-thinking"), ("fp8", "deepseek-v3")):
            obj, whole = cut(name, dtype=to), cut(like)
            assert parse_config(obj).quantisation == parse_config(whole).quantisation
            assert {**obj, **dict.fromkeys(("text_config", "quantization_config"))} == {
                **cut(name),
                **dict.fromkeys(("text_config", "quantization_config")),
            }


@pytest.mark.quick
class TestCut:
    @pytest.mark.parametrize(
        ("name", "layers", "experts"),
        [("kimi-k2.6", 2, 16), ("kimi-k2.6", 61, 384), ("deepseek-v3", 4, 16), ("deepseek-v2-lite", 2, 6)],
    )
    def test_only_two_fields_change(self, name, layers, experts):
        made, whole = cut(name, layers, experts), cut(name)
        text, before = made.get("text_config", made), whole.get("text_config", whole)
        assert (text["num_hidden_layers"], text["n_routed_experts"]) == (layers, experts)
        text |= {key: before[key] for key in ("num_hidden_layers", "n_routed_experts")}
        assert made == whole == PUBLISHED[name]
        assert parse_config(cut(name, layers, experts)).n_routed_experts == experts

    def test_a_layer_of_experts_alone(self):
        made, whole = cut("kimi-k2.6", 1, dense=0), cut("kimi-k2.6")
        config = parse_config(made)
        assert (config.num_hidden_layers, config.n_routed_experts, config.is_moe_layer(0)) == (1, 384, True)
        made["text_config"] |= {"num_hidden_layers": 61, "first_k_dense_replace": 1}
        assert made == whole
        assert cut("deepseek-v3", 2, dense=1)["first_k_dense_replace"] == 1

    @pytest.mark.parametrize(
        ("name", "options", "words"),
        [
            ("kimi-k2.6", {"layers": 1}, ["--layers 1", "61", "2 to 61"]),
            ("kimi-k2.6", {"layers": 62}, ["--layers 62", "2 to 61"]),
            ("deepseek-v3", {"layers": 3}, ["--layers 3", "3 dense", "4 to 61"]),
            ("kimi-k2.6", {"experts": 7}, ["--experts 7", "8 to 384"]),
            ("kimi-k2.6", {"experts": 385}, ["--experts 385", "8 to 384"]),
            ("deepseek-v3", {"experts": 20}, ["--experts 20", "8 groups", "16 to 256, in multiples of 8"]),
            ("deepseek-v3", {"experts": 8}, ["--experts 8", "16 to 256"]),
            ("deepseek-v2-lite", {"experts": 5}, ["--experts 5", "6 to 64"]),
            ("tiny", {}, ["tiny", "kimi-k2.6"]),
        ],
    )
    def test_what_does_not_fit_names_the_option(self, name, options, words):
        with pytest.raises(InputError) as caught:
            cut(name, **options)
        for word in words:
            assert word in str(caught.value)

    @pytest.mark.parametrize("name", list(PUBLISHED))
    def test_all_that_is_allowed_is_a_model(self, name):
        text = PUBLISHED[name].get("text_config", PUBLISHED[name])
        for experts in range(1, text["n_routed_experts"] + 1):
            try:
                obj = cut(name, None, experts)
            except InputError:
                with pytest.raises(InputError):
                    parse_config({**text, "n_routed_experts": experts, "num_hidden_layers": 5})
            else:
                assert parse_config(obj).n_routed_experts == experts


def shrunk(name: str) -> dict[str, Any]:
    """The preset with small widths: what is written does not depend on them."""
    obj = cut(name, 4 if name == "deepseek-v3" else 3, 16)
    sizes = {
        "hidden_size": 72, "intermediate_size": 136, "kv_lora_rank": 16, "moe_intermediate_size": 40,
        "num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "vocab_size": 300, "bos_token_id": 298, "eos_token_id": 299,
    }  # fmt: skip
    text = obj.get("text_config", obj)
    text |= sizes | ({"q_lora_rank": 24} if text["q_lora_rank"] else {})
    obj |= {key: sizes[key] for key in ("bos_token_id", "eos_token_id")}
    return obj


@pytest.mark.quick
class TestWriting:
    @pytest.mark.parametrize("name", list(PUBLISHED))
    def test_a_folder_holds_the_seeds_weights_quantised(self, name, tmp_path):
        obj = shrunk(name)
        write_published(tmp_path / "m", obj, seed=3)
        assert json.loads((tmp_path / "m" / "config.json").read_text()) == obj
        model = open_model(tmp_path / "m")
        assert model.checkpoint.notes == []
        assert model.config == parse_config(obj)
        made, how = new_weights(model.config, 3), model.config.quantisation
        for tensor, array in made.items():
            if how is None or not how.covers(tensor, model.config.tensor_prefix):
                assert model.weights.stored(tensor).dtype == array.dtype
                assert model.weights.stored(tensor).tobytes() == array.tobytes()
        expert = f"model.layers.{3 if name == 'deepseek-v3' else 2}.mlp.experts.1.down_proj.weight"
        if how is not None:
            assert how.covers(expert)
            # quantised from the values before they are rounded to bf16: within one step of the rounded ones'
            near = made[expert].astype(np.float32)
            again = quantise_int4(near, 32)[1] if how.method == "int4" else quantise_fp8(near, (128, 128))[1]
            part = f"{expert}_scale" if how.method == "int4" else f"{expert}_scale_inv"
            np.testing.assert_allclose(model.weights.stored(part).astype(float), again.astype(float), rtol=0.01)
            assert np.abs(model.weights[expert] - near).max() < 0.15 * np.abs(near).max()

    @pytest.mark.parametrize("name", ["kimi-k2.6", "deepseek-v3", "moonlight"])
    def test_int4_at_once_is_int4_from_bf16_but_for_the_rounding_between(self, name, tmp_path):
        obj = shrunk(name)
        text = obj.get("text_config", obj)
        text["quantization_config"] = cut(name, dtype="int4").get("text_config", cut(name, dtype="int4"))[
            "quantization_config"
        ]
        write_published(tmp_path / "int4", obj)
        text.pop("quantization_config")
        write_published(tmp_path / "bf16", obj)
        quantise_model(tmp_path / "bf16", tmp_path / "by_bf16", "int4")
        one, two = open_model(tmp_path / "int4"), open_model(tmp_path / "by_bf16")
        assert one.config == two.config
        assert one.weights.stored_names == two.weights.stored_names
        packed = [n for n in one.weights.stored_names if n.endswith("_packed")]
        assert len(packed) == 3 * 16 * (one.config.num_hidden_layers - text["first_k_dense_replace"])
        for tensor in one.weights:
            gap = np.abs(one.weights[tensor] - two.weights[tensor]).max()
            assert gap == 0 if ".experts." not in tensor else gap < 0.15 * np.abs(two.weights[tensor]).max()

    def test_the_same_seed_gives_the_same_bytes_and_blocks_change_none(self, tmp_path, monkeypatch):
        for name in ("kimi-k2.6", "deepseek-v3", "moonlight"):
            obj = shrunk(name)
            write_published(tmp_path / "a", obj, 1, force=True)
            monkeypatch.setattr("kdtr_cli.model.encode.ROWS", 500)
            monkeypatch.setattr("kdtr_cli.model.presets._AT_ONCE", 1000)
            write_published(tmp_path / "b", obj, 1, force=True)
            monkeypatch.undo()
            write_published(tmp_path / "c", obj, 2, force=True)
            a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
            assert a == b != c

    def test_a_place_that_is_too_small_is_refused_before_work(self, tmp_path, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 10**6))
        with pytest.raises(InputError, match=r"needs 1\.. GB, 0\.0 are free; cut with --layers and --experts"):
            write_published(tmp_path / "m", cut("moonlight", 2, 6))
        assert list(tmp_path.iterdir()) == []

    def test_taken_places_bad_seeds_and_interruptions(self, tmp_path):
        obj = shrunk("moonlight")
        with pytest.raises(InputError, match="seed -1"):
            write_published(tmp_path / "m", obj, seed=-1)
        write_published(tmp_path / "m", obj)
        with pytest.raises(InputError, match="--force"):
            write_published(tmp_path / "m", obj)

        def stop(done: int, total: int) -> None:
            if 2 * done > total:
                raise KeyboardInterrupt

        before = (tmp_path / "m" / "model.safetensors").read_bytes()
        with pytest.raises(KeyboardInterrupt):
            write_published(tmp_path / "m", obj, 5, True, stop)
        assert (tmp_path / "m" / "model.safetensors").read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["m"]

    def test_the_command_refuses_what_makes_no_sense(self, tmp_path):
        def run(*args: Any) -> Any:
            return CliRunner().invoke(command, ["new", *map(str, args), "-o", str(tmp_path / "m")])

        for args, word in (
            (("tiny", "--layers", 2), "--dense-layers and --experts"),
            (("tiny", "--dense-layers", 0), "--dense-layers and --experts"),
            (("tiny", "--dtype", "int4"), "kdtr model quantize DIR --to int4"),
            (("kimi-k2.6", "--dense-layers", 2), "--dense-layers 2: kimi-k2.6 has 1 at its start; allowed: 0 to 1"),
            (("kimi-k2.6", "--layers", 1), "--layers 1"),
            (("kimi-k2.6", "--layers", 1, "--dense-layers", 1), "--layers 1"),
            (("kimi-k2.6", "--experts", 3), "--experts 3"),
        ):
            got = run(*args)
            assert isinstance(got.exception, InputError)
            assert word in str(got.exception)
        assert run("tiny", "--dtype", "fp4").exit_code == 2
        assert run("tiny", "--dtype", "bf16").exit_code == 0
        assert [p.name for p in tmp_path.iterdir()] == ["m"]

    def test_a_name_of_real_shape_is_no_model_by_itself(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name in PUBLISHED:
            with pytest.raises(InputError, match=f"kdtr model new {name} --layers N --experts M -o DIR"):
                open_model(name)
        write_published(tmp_path / "moonlight", shrunk("moonlight"))
        assert open_model("./moonlight").config.vocab_size == 300
        assert not set(PUBLISHED) & set(PRESETS)


@pytest.mark.slow
def test_a_real_layer_in_bounded_memory(tmp_path):
    # V2-Lite: real widths; 1.3 GB are written, of which a few MB may be in memory.
    # VmHWM, since ru_maxrss of a child starts at what its parent held
    script = (
        "import re, sys; from kdtr_cli.model.published import cut, write_published; "
        "write_published(sys.argv[1], cut('deepseek-v2-lite', 2, 8)); "
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    command_line = [sys.executable, "-c", script, str(tmp_path / "m")]
    out = subprocess.run(command_line, capture_output=True, text=True, check=True)
    assert int(out.stdout) < 200 * 1024
    model = open_model(tmp_path / "m", cache=False)
    assert (model.config.hidden_size, model.config.n_routed_experts) == (2048, 8)
    name = "model.layers.1.mlp.experts.7.gate_proj.weight"
    assert model.weights.stored(name).dtype == ml_dtypes.bfloat16
    assert model.weights[name].std() == pytest.approx(2048**-0.5, rel=0.01)

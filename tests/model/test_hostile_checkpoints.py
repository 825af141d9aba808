"""Broken model folders on the command line: exit 2, one line that names the tensor or the file, and nothing written.

``kdtr model show DIR`` finds what the headers and the config tell; a bad value is found by ``kdtr golden DIR``, which
reads every weight. What is left to chance is in fuzz_checkpoints.py, of which a part runs here.
"""

import json
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr_cli.cli import main as entry
from kdtr_cli.errors import InputError
from kdtr_cli.model import tokenizer as tokenizer_module
from kdtr_cli.model.presets import write_model
from kdtr_cli.model.safetensors_file import SafetensorsFile

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
FUZZER = ROOT / "tests" / "model" / "fuzz_checkpoints.py"
NORM = "model.norm.weight"
Arrays = dict[str, np.ndarray]
Save = Callable[..., Path]
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Run a command on a folder; the one line that it must end in, which has to hold these words."""
    monkeypatch.setattr(entry, "_handle_signals", lambda: None)
    out = tmp_path / "out"
    out.mkdir()

    def run(
        folder: Path, *words: str, commands: tuple[str, ...] = ("show", "golden"), more: tuple[str, ...] = ()
    ) -> str:
        line = ""
        for command in commands:
            before = sorted(folder.iterdir())
            args = ["model", "show"] if command == "show" else ["golden", "-o", str(out / "g.h5"), *more]
            begun = time.monotonic()
            assert entry.main([*args, str(folder)]) == 2
            assert time.monotonic() - begun < 5
            told = capfd.readouterr()
            assert told.out == ""
            assert told.err.startswith("kdtr: error: ")
            assert told.err.count("\n") == 1
            line = told.err[len("kdtr: error: ") : -1]
            assert len(line) <= 300 + len(str(folder))
            for word in words:
                assert word in line
            assert list(out.iterdir()) == []
            assert sorted(folder.iterdir()) == before
        return line

    return run


@pytest.fixture
def sharded(small: Any, small_arrays: Arrays, save_folder: Save) -> Path:
    names = sorted(small_arrays)
    parts = {f"model-{i}-of-2.safetensors": {n: small_arrays[n] for n in names[i - 1 :: 2]} for i in (1, 2)}
    return save_folder(small, parts, "sharded", index=True)


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    obj = json.loads(path.read_text())
    change(obj)
    path.write_text(json.dumps(obj))


def test_a_good_folder_passes(small: Any, small_arrays: Arrays, save_folder: Save, tmp_path: Path, capfd: Any) -> None:
    """What the other tests break does work."""
    folder = str(save_folder(small, small_arrays))
    assert entry.main(["model", "show", folder]) == 0
    assert entry.main(["golden", folder, "-o", str(tmp_path / "g.h5"), "--steps", "2"]) == 0


# --- the list


def test_missing_shard(sharded: Path, refused: Refused) -> None:
    (sharded / "model-2-of-2.safetensors").unlink()
    refused(sharded, "shard model-2-of-2.safetensors is missing")


def test_index_naming_a_missing_tensor(sharded: Path, refused: Refused) -> None:
    index = sharded / "model.safetensors.index.json"
    edit_json(index, lambda obj: obj["weight_map"].update(ghost="model-1-of-2.safetensors"))
    refused(sharded, "ghost", "does not hold it")


def test_wrong_shape(small: Any, small_arrays: Arrays, save_folder: Save, refused: Refused) -> None:
    small_arrays[NORM] = np.zeros(7, np.float32)
    refused(save_folder(small, small_arrays), NORM, "[7]", "[6]")


def test_duplicate_key(tmp_path: Path, small: Any, save_folder: Save, save_raw: Save, refused: Refused) -> None:
    folder = save_folder(small, {})
    entry_ = '{"dtype":"F32","shape":[],"data_offsets":[0,4]}'
    header = f'{{"{NORM}":{entry_},"{NORM}":{entry_}}}'.encode()
    save_raw(folder / "model.safetensors", None, header, b"\0" * 4)
    refused(folder, "model.safetensors", NORM, "given twice")


def test_duplicate_tensor_in_two_files(
    small: Any, small_arrays: Arrays, save_folder: Save, save_raw: Save, refused: Refused
) -> None:
    folder = save_folder(small, small_arrays)
    save_raw(folder / "other.safetensors", {NORM: small_arrays[NORM]})
    refused(folder, NORM, "model.safetensors", "other.safetensors")


@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_truncated_file(small: Any, small_arrays: Arrays, save_folder: Save, refused: Refused, left: int) -> None:
    folder = save_folder(small, small_arrays)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    line = refused(folder, "model.safetensors")
    assert left != -1 or "tensor lm_head.weight: ends at byte" in line


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0])
@pytest.mark.parametrize("fixture", ["tiny-kimi-int4", "tiny-kimi-fp8"])
def test_bad_scale(tmp_path: Path, refused: Refused, fixture: str, value: float) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (FIXTURES / fixture).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    file = SafetensorsFile(folder / "model.safetensors")
    name = next(name for name in file.regions if "_scale" in name)
    region = file.regions[name]
    array = np.array(file.array(name, region))
    array.reshape(-1)[-1] = value
    with open(folder / "model.safetensors", "r+b") as out:
        out.seek(region.start)
        out.write(array.tobytes())
    refused(
        folder,
        f"tensor {name.removeprefix('language_model.')}[",
        "a scale must be finite and above 0",
        commands=("golden",),
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weight_that_is_not_finite(
    small: Any, small_arrays: Arrays, save_folder: Save, refused: Refused, value: float
) -> None:
    small_arrays[NORM] = small_arrays[NORM].astype(ml_dtypes.bfloat16)
    small_arrays[NORM][3] = value
    refused(save_folder(small, small_arrays), f"tensor {NORM}[3] is", commands=("golden",))


def test_huge_header(small: Any, save_folder: Save, refused: Refused) -> None:
    folder = save_folder(small, {})
    for length, word in ((2**63, "header of"), ((100 << 20) + 1, "header of"), (100 << 20, "cut short")):
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
        refused(folder, "model.safetensors", word)


def test_header_of_millions_of_values_is_refused_before_it_is_parsed(
    small: Any, save_folder: Save, refused: Refused
) -> None:
    folder = save_folder(small, {})
    blob = b'{"a":[' + b"[]," * 33_000_000 + b"[]]}"
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(blob)) + blob)
    del blob
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(folder, "model.safetensors", "more than 3000000 values", commands=("show",))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "a\nb.safetensors", 7])
def test_shard_outside_the_folder(sharded: Path, refused: Refused, shard: Any) -> None:
    edit_json(sharded / "model.safetensors.index.json", lambda obj: obj["weight_map"].update({NORM: shard}))
    refused(sharded, NORM, "a *.safetensors file beside it")


@pytest.mark.parametrize("target", ["nowhere", "model.safetensors", "/dev/zero", "/", "/proc/self/mem"])
def test_link_that_leads_to_no_file(
    small: Any, small_arrays: Arrays, save_folder: Save, refused: Refused, target: str
) -> None:
    """Links are followed, as the hub's cache needs, but only to a file."""
    folder = save_folder(small, small_arrays)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(target)
    refused(folder, "model.safetensors")


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json", "model-1-of-2.safetensors"]
)
@pytest.mark.parametrize("what", ["fifo", "folder", "dangling"])
def test_no_file_under_a_name_that_kdtr_reads(sharded: Path, refused: Refused, name: str, what: str) -> None:
    """A FIFO would never answer; a dangling index or generation config must not count as absent."""
    path = sharded / name
    path.unlink(missing_ok=True)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    refused(sharded, name, "cannot be read" if what == "dangling" else "not a regular file")


def test_left_over_tensor(small: Any, small_arrays: Arrays, save_folder: Save, refused: Refused) -> None:
    small_arrays["model.layers.0.extra"] = np.zeros(1, np.float32)
    refused(save_folder(small, small_arrays), "model.layers.0.extra", "no place")


def test_missing_tensor(small: Any, small_arrays: Arrays, save_folder: Save, refused: Refused) -> None:
    del small_arrays[NORM]
    refused(save_folder(small, small_arrays), NORM, "missing")


# --- a config that asks for more than there is: found before anything is allocated


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": 10**9}, "embed_tokens.weight has shape [11, 6]; the config needs [11, 1000000000]"),
        ({"vocab_size": 2**31 - 1}, "embed_tokens.weight has shape"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        ({"num_hidden_layers": 1000}, "model.layers.2.input_layernorm.weight is missing"),
        ({"n_routed_experts": 10_000, "num_hidden_layers": 1000}, "n_routed_experts is 10000"),
        ({"n_routed_experts": 10_000}, "mlp.gate.weight has shape"),
        ({"num_attention_heads": 2**31 - 1, "num_key_value_heads": 2**31 - 1}, "q_b_proj.weight has shape"),
        ({"qk_rope_head_dim": 2**31 - 2}, "q_b_proj.weight has shape"),
        ({"moe_intermediate_size": 2**31 - 1}, "experts.0.gate_proj.weight has shape"),
        ({"intermediate_size": 2**31 - 1}, "mlp.gate_proj.weight has shape"),
        ({"eos_token_id": list(range(10**6))}, "more than 1000000 values"),
        ({"rms_norm_eps": 1e-320}, "rms_norm_eps is"),
        ({"routed_scaling_factor": 1e39}, "routed_scaling_factor is 1e+39"),
    ],
)  # fmt: skip
def test_config_bombs(
    small: Any, small_arrays: Arrays, save_folder: Save, refused: Refused, changes: dict[str, Any], word: str
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(save_folder({**small, **changes}, small_arrays), word)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize(
    ("key", "value"),
    [("beta_slow", 1e-320), ("beta_fast", 1e300), ("mscale", 1e300), ("attention_factor", 1e300), ("factor", 1e300)],
)
def test_yarn_numbers_that_overflow(
    small: Any, small_arrays: Arrays, save_folder: Save, refused: Refused, key: str, value: float
) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, key: value}
    refused(save_folder({**small, "rope_scaling": yarn}, small_arrays), f"rope_scaling.{key} is {value!r}; allowed: ")


def test_prompts_longer_than_any_table(small: Any, small_arrays: Arrays, save_folder: Save, refused: Refused) -> None:
    folder = save_folder({**small, "max_position_embeddings": 2**31 - 1}, small_arrays)
    for more, word in (
        (("--num-prompts", "1", "--prompt-len", "2000000000"), "--prompt-len 2000000000: 1 to 800000"),
        (("--steps", "2000000000"), "rotary tables reach 800000"),
    ):
        refused(folder, word, commands=("golden",), more=more)


# --- names and numbers that would break the line, or the message itself


@pytest.mark.parametrize("name", ["a\nb", "", "x" * 5000, "\ud800", f"model.layers.{'9' * 5000}.x"])
def test_names_that_are_none(
    tmp_path: Path, small: Any, save_folder: Save, save_raw: Save, refused: Refused, name: str
) -> None:
    folder = save_folder(small, {})
    header = {name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}
    save_raw(folder / "model.safetensors", None, header, b"")
    refused(folder, "is no name for a tensor")
    other = save_folder({**small, name: {"a": [1] * 10_000}}, {}, "unknown-key")
    refused(other, "unknown field")


@pytest.mark.parametrize(
    ("shape", "word"),
    [([2**62 - 1] * 400, "is not a list of sizes"), ([2**62 - 1] * 64, "needs"), ([1] * 65, "not a list")],
)
def test_shapes_whose_size_has_thousands_of_digits(
    small: Any, save_folder: Save, save_raw: Save, refused: Refused, shape: list[int], word: str
) -> None:
    folder = save_folder(small, {})
    save_raw(folder / "model.safetensors", None, {"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, 1]}}, b"x")
    refused(folder, "tensor a", word)


@pytest.mark.parametrize(
    "value", ["[" * 900 + "]" * 900, "[" * 100_000 + "]" * 100_000, "9" * 4000, "9" * 5000, "1e999", "NaN"]
)
def test_json_values_that_no_message_could_show(
    tmp_path: Path, small: Any, save_folder: Save, refused: Refused, value: str
) -> None:
    folder = save_folder(small, {})
    text = json.dumps({**small, "hidden_size": "HERE"}).replace('"HERE"', value)
    (folder / "config.json").write_text(text)
    refused(folder, "config.json")


def test_layers_beyond_the_model_give_few_notes(
    small: Any, small_arrays: Arrays, save_folder: Save, capfd: pytest.CaptureFixture[str]
) -> None:
    extra = {f"model.layers.{i}.x": np.zeros(1, np.float32) for i in range(2, 2000)}
    assert entry.main(["model", "show", str(save_folder(small, {**small_arrays, **extra}))]) == 0
    notes = capfd.readouterr().err.splitlines()
    assert len(notes) == 9
    assert any("1990 tensors skipped: layers further up" in note for note in notes)


# --- tokenizers


def tokenizer(tmp_path: Path, **changes: Any) -> Path:
    write_model(tmp_path / "model", "tiny")
    spec = json.loads((FIXTURES / "tiny-kimi" / "tokenizer.json").read_text())
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({**spec, **changes}))
    return tmp_path / "model"


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
IDS = {"SpecialToken": {"id": "x", "type_id": 0}}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}, "cannot encode text (WordLevel error"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "not a tokenizer"),  # a panic
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "cannot encode text (chunk size"),  # another
        ({"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 4}}, "more than 1000 times as long"),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [IDS],
                    "pair": [],
                    "special_tokens": {"x": {"id": "x", "ids": [2**32 - 1], "tokens": ["x"]}},
                }
            },
            "does not fit in 32 bits",
        ),
    ],
)
def test_tokenizers_that_fail_later(tmp_path: Path, refused: Refused, changes: dict[str, Any], word: str) -> None:
    more = ("--prompt-text", "The cat")
    refused(tokenizer(tmp_path, **changes), "tokenizer.json", word, commands=("golden",), more=more)


def test_a_tokenizer_that_cannot_decode_loses_no_golden(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, bundle = tokenizer(tmp_path), tmp_path / "g.h5"

    def broken(self: object, ids: list[int]) -> str:
        raise InputError("cannot decode")

    monkeypatch.setattr(tokenizer_module._JsonTokenizer, "decode", broken)
    monkeypatch.setattr(entry, "_handle_signals", lambda: None)
    assert entry.main(["golden", str(folder), "-o", str(bundle), "--prompt-ids", "51 281", "--steps", "2"]) == 0
    assert bundle.exists()
    assert "[0] 51 281 -> " in capfd.readouterr().out


@pytest.mark.parametrize("what", ["fifo", "folder"])
def test_a_tokenizer_that_is_no_file(tmp_path: Path, refused: Refused, what: str) -> None:
    folder = tokenizer(tmp_path)
    (folder / "tokenizer.json").unlink()
    (os.mkfifo if what == "fifo" else os.mkdir)(folder / "tokenizer.json")
    refused(folder, "tokenizer.json: not a regular file", commands=("golden",), more=("--prompt-text", "x"))


# --- by chance


def fuzzed(files: int, seed: int, *more: str) -> subprocess.CompletedProcess[str]:
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(
        [sys.executable, str(FUZZER), "--files", str(files), "--seed", str(seed), *more],
        env={**os.environ, **threads, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.parametrize(("files", "seed"), [(150, 0), pytest.param(2000, 1, marks=pytest.mark.slow)])
def test_mutants_work_or_are_refused_in_one_line(files: int, seed: int) -> None:
    done = fuzzed(files, seed)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(part.split("=") for part in done.stdout.split() if part.count("=") == 1)
    assert int(counts["files"]) == files
    # were nearly all refused at the first byte, or nearly none, the mutants would prove little
    assert int(counts["ok"]) > files // 20
    assert int(counts["refused"]) > files // 2


def test_the_fuzzer_sees_what_it_looks_for() -> None:
    done = fuzzed(7, 0, "--sabotage", "--seconds", "1")
    assert done.returncode == 1
    assert "find=7" in done.stdout
    for word in (
        "Traceback",
        "no end after",
        "the process died",
        "on standard error",
        "left behind",
        "a line of",
        "MemoryError",
    ):
        assert word in done.stdout

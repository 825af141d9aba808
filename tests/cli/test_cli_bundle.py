"""`kdtr inspect` and `kdtr verify`: what they print, and with what they leave."""

import json
from pathlib import Path

import numpy as np
import pytest
from invoke import kdtr

from kdtr_cli.bundle import BundleWriter, SequenceData
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.inspect import largest

pytestmark = pytest.mark.quick

ZERO = "0" * 64
CONFIG = {
    "model_type": "kimi_k2",
    "vocab_size": 8,
    "hidden_size": 4,
    "q_lora_rank": None,
    "rope_theta": 50000.0,
    "architectures": ["X"],
}

LOGITS = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [1, 1, 1, 1, 1, 1, 1, 1],
        [0, np.nan, -np.inf, np.inf, 0.1, -0.0, 0.0, 9],
    ],
    dtype=np.float32,
)


def write(path: Path, kind: str = "golden", **more) -> Path:
    manifest = {
        "producer": {"name": "kdtr", "version": "0.1.0"},
        "contract_version": 1,
        "model": {"config_sha256": ZERO, "weights": {"a": ZERO, "b": ZERO}, "weights_used_sha256": None},
        "choices": {"rope_angles": "f64"},
        "decoding": {
            "mode": "ar",
            "temperature": 0.0,
            "seed": 0,
            "steps": 3,
            "ignore_eos": False,
            "stop_ids": [7],
            "teacher_forced": False,
        },
        "arithmetic": ["exact"] if kind == "golden" else ["engine"],
        "tier": "exact",
        "logits": "full",
        "score": True,
        **more,
    }
    name = "exact" if kind == "golden" else "engine"
    kept_ids = np.array([[1, 0, 2]] * 3, dtype=np.int32)
    kept = {
        f"logits/{name}_top_ids": kept_ids,
        f"logits/{name}_top_values": np.array([[0.5, 0.5, 2.0]] * 3, dtype=np.float32),
    }
    with BundleWriter(path, kind) as writer:
        writer.add_config(json.dumps(CONFIG))
        for index, arrays in enumerate(({f"logits/{name}": LOGITS, "ties": np.array([1], np.int32)}, kept)):
            writer.add_sequence(
                SequenceData(
                    id=("first", "zwei [b]ü")[index],
                    stream=index + 3,
                    prompt=np.array([1, 2], np.int32),
                    tokens=np.array([7, 0, 3], np.int32),
                    finish_reason="length",
                    arrays=arrays,
                )
            )
        writer.finish(manifest)
    return path


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return write(tmp_path / "g.h5")


def flip(path: Path, pattern: bytes) -> None:
    """Flip one bit at a place that occurs once."""
    data = bytearray(path.read_bytes())
    assert data.count(pattern) == 1
    data[data.index(pattern)] ^= 1
    path.write_bytes(data)


def test_inspect_text(golden):
    result = kdtr("inspect", golden)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == f"bundle         {golden}: golden, kdtr/1, {golden.stat().st_size} bytes"
    assert "producer       kdtr 0.1.0, numerics contract 1" in lines
    assert "config         model_type=kimi_k2 vocab_size=8 hidden_size=4 q_lora_rank=null rope_theta=50000.0" in lines
    assert "weights        2 tensors, 0 embedded, as used sha256 unknown" in lines
    assert "choices        rope_angles=f64" in lines
    assert "arithmetic     exact (tier exact)" in lines
    assert "logits         full, prompt scored" in lines
    assert not any(line.startswith("run ") for line in lines)
    table = [line.split() for line in lines[lines.index("") + 1 :]]
    assert table[0] == ["id", "stream", "prompt", "tokens", "finish", "arrays"]
    assert table[1] == ["first", "3", "2", "3", "length", "logits/exact", "float32[3,", "8],", "ties", "int32[1]"]
    assert table[2][:3] == ["zwei", "[b]ü", "4"]
    assert not any(line.endswith(" ") for line in lines)
    assert "\x1b" not in result.stdout
    assert result.stdout == kdtr("inspect", golden).stdout


def test_inspect_counts_the_tensors_of_a_trace(tmp_path):
    make_golden(GoldenOptions("tiny", tmp_path / "g.h5", steps=1, trace="layers"))
    line = kdtr("inspect", tmp_path / "g.h5").stdout.splitlines()[-1]
    assert line.endswith("logits/exact float32[1, 512], logits/float64 float64[1, 512], trace: 6 tensors")


def test_inspect_json(golden):
    result = kdtr("inspect", golden, "--format", "json")
    assert result.exit_code == 0
    document = json.loads(result.stdout, parse_constant=pytest.fail)
    assert document["schema"] == "kdtr.inspect/1"
    assert document["kind"] == "golden"
    assert document["model"]["config"] == {k: v for k, v in CONFIG.items() if k != "architectures"}
    assert document["run"] is None
    assert document["sequence"] is None
    assert document["sequences"][1] == {
        "id": "zwei [b]ü",
        "stream": 4,
        "prompt_length": 2,
        "n_tokens": 3,
        "finish_reason": "length",
        "arrays": [
            {"name": "logits/exact_top_ids", "dtype": "int32", "shape": [3, 3]},
            {"name": "logits/exact_top_values", "dtype": "float32", "shape": [3, 3]},
        ],
    }


def test_inspect_of_a_run_shows_the_device(tmp_path):
    path = write(tmp_path / "r.h5", "run", run={"device": "cpu", "driver": None, "batch": 2})
    result = kdtr("inspect", path)
    assert result.exit_code == 0, result.stderr
    assert "run            batch=2 device=cpu driver=null" in result.stdout.splitlines()
    assert json.loads(kdtr("inspect", path, "--format", "json").stdout)["run"]["device"] == "cpu"


def test_inspect_one_sequence(golden):
    result = kdtr("inspect", golden, "--sequence", "first")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "tokens    7 0 3  (ended by length)" in lines
    assert "ties      float64 would choose another token at steps 1" in lines
    at = lines.index("largest logits, exact")
    assert [line.split() for line in lines[at + 2 : at + 5]] == [
        ["0", "7", "7:7.0", "6:6.0", "5:5.0", "4:4.0", "3:3.0"],
        ["1", "0", "0:1.0", "1:1.0", "2:1.0", "3:1.0", "4:1.0"],
        ["2", "3", "1:nan", "3:inf", "7:9.0", "4:0.1", "0:0.0"],
    ]
    detail = json.loads(
        kdtr("inspect", golden, "--sequence", "first", "--format", "json").stdout, parse_constant=pytest.fail
    )["sequence"]
    assert detail["top_logits"]["exact"][2][:3] == [
        {"id": 1, "logit": "nan"},
        {"id": 3, "logit": "inf"},
        {"id": 7, "logit": 9.0},
    ]
    assert (detail["prompt"], detail["tokens"], detail["ties"]) == ([1, 2], [7, 0, 3], [1])


def test_inspect_kept_logits_are_put_in_order(golden):
    detail = json.loads(kdtr("inspect", golden, "--sequence", "zwei [b]ü", "--format", "json").stdout)["sequence"]
    assert [entry["id"] for entry in detail["top_logits"]["exact"][0]] == [2, 0, 1]


def test_inspect_unknown_sequence(golden):
    result = kdtr("inspect", golden, "--sequence", "third")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"kdtr: error: {golden}: no sequence 'third'; it has 'first', 'zwei [b]ü'\n"


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_no_bundle(tmp_path, command):
    (tmp_path / "text.h5").write_text("hello\n")
    for path in (tmp_path / "absent.h5", tmp_path / "text.h5", tmp_path, "/dev/zero"):
        result = kdtr(command, path)
        assert result.exit_code == 2
        line = result.stderr if command == "inspect" else result.stdout
        assert line.count("\n") == 1
        assert str(path) in line
    assert kdtr(command).exit_code == 2


def test_names_from_files_can_not_steer_the_terminal(tmp_path):
    """Text in a manifest is somebody else's."""
    path = write(tmp_path / "g.h5", choices={"\x1b[2J": "a\nPASS ar tokens=24/24"})
    result = kdtr("inspect", path)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert not any(line.startswith("PASS") for line in result.stdout.splitlines())


def test_verify_good_bundles(golden, tmp_path):
    run = write(tmp_path / "r.h5", "run")
    result = kdtr("verify", golden, run)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"OK {golden}: golden sequences=2 arrays=8 bytes=")
    assert lines[1].startswith(f"OK {run}: run ")
    document = json.loads(kdtr("verify", golden, run, "--format", "json").stdout)
    assert (document["schema"], document["exit_code"]) == ("kdtr.verify/1", 0)
    assert [(b["ok"], b["kind"], b["problems"]) for b in document["bundles"]] == [
        (True, "golden", []),
        (True, "run", []),
    ]
    assert lines[0].endswith(document["bundles"][0]["manifest_sha256"])


def test_verify_tells_every_bundle_and_leaves_with_2(golden, tmp_path):
    other = write(tmp_path / "other.h5")
    flip(golden, LOGITS.tobytes())
    result = kdtr("verify", golden, tmp_path / "absent.h5", other)
    assert result.exit_code == 2
    lines = result.stdout.splitlines()
    damaged = "sequences/000000/logits/exact does not match its digest; the file was changed or damaged"
    assert lines[0] == f"BAD {golden}: {damaged}"
    assert lines[1] == f"BAD {tmp_path / 'absent.h5'}: no such file"
    assert lines[2].startswith(f"OK {other}: ")
    document = json.loads(kdtr("verify", golden, other, "--format", "json").stdout)
    assert document["exit_code"] == 2
    assert [b["ok"] for b in document["bundles"]] == [False, True]
    assert document["bundles"][0]["problems"] == [f"{golden}: {damaged}"]


def test_verify_counts_further_problems(golden):
    flip(golden, LOGITS.tobytes())
    flip(golden, np.array([[0.5, 0.5, 2.0]] * 3, dtype=np.float32).tobytes())
    result = kdtr("verify", golden)
    assert result.stdout.rstrip().endswith("damaged (and 1 more)")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_largest_is_the_order_of_the_contract(dtype):
    """Larger values first, then smaller ids, against a plain sort; many equal values, zeros of both signs."""
    rng = np.random.default_rng(3)
    rows = rng.integers(-3, 4, (50, 23)).astype(dtype) * rng.choice([-1, 1], (50, 23))
    for count in (1, 5, 23, 40):
        ids, values = largest(rows, count)
        want = np.array([sorted(range(23), key=lambda i, row=row: (-row[i], i))[:count] for row in rows])
        assert np.array_equal(ids, want)
        assert np.array_equal(values, np.take_along_axis(rows, want, axis=1))

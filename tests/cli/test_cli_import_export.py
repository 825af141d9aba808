"""`kdtr export` and `kdtr import` as a user meets them: away to another machine, and back."""

import json
from pathlib import Path

import numpy as np
import pytest
from invoke import kdtr
from safetensors import safe_open
from safetensors.numpy import load_file


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("there and back") / "golden.h5"
    done = kdtr("golden", "tiny", "-o", path, "--prompt-ids", "1 2 3", "--prompt-ids", "7", "--steps", 3)
    assert done.exit_code == 0, done.output
    return path


def test_there_and_back(golden, tmp_path):
    """Inputs go, an answer comes; the golden's own one, taken from its export."""
    inputs = tmp_path / "in.safetensors"
    done = kdtr("export", golden, "--inputs", "-o", inputs)
    assert done.stdout == f"export {inputs}: arrays=3 bytes={inputs.stat().st_size}\n"
    with safe_open(inputs, "np") as file:
        assert file.metadata()["schema"] == "kdtr.inputs/1"
        assert file.get_tensor("prompts/ids").tolist() == [1, 2, 3, 7]
    assert kdtr("export", golden).exit_code == 0
    held = load_file(golden.with_suffix(".safetensors"))
    names = ("sequences/000000", "sequences/000001")
    answer = {
        "tokens/ids": np.concatenate([held[f"{name}/tokens"] for name in names]),
        "tokens/offsets": np.array([0, 3, 6]),
        "finish": np.zeros(2, np.int32),
        "logits": np.concatenate([held[f"{name}/logits/exact"] for name in names]),
    }
    np.savez(tmp_path / "answer.npz", **answer)
    run = tmp_path / "run.h5"
    done = kdtr("import", golden, tmp_path / "answer.npz", "-o", run)
    assert done.stdout == f"import {run}: tiny by import:npz sequences=2 tokens=6 logits=full\n"
    judged = kdtr("diff", golden, run)
    assert (judged.exit_code, judged.stdout.splitlines()[-1]) == (
        0,
        "PASS ar tokens=6/6 exact max_abs_logit_diff=0.000e+00 weights=unverified rope=unverified verdict=IDENTICAL",
    )


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("import", "{golden}", "{tmp}/none", "-o", "{tmp}/r.h5"), "none"),
        (("import", "{golden}", "{tmp}/bad", "-o", "{tmp}/r.h5"), "neither npz nor safetensors nor JSON"),
        (("import", "{tmp}/bad", "{tmp}/bad", "-o", "{tmp}/r.h5"), "bad"),
        (("export", "{tmp}/bad"), "bad"),
        (("export", "{golden}", "--format", "hdf5"), "--format hdf5"),
        (("export", "{golden}", "-o", "{golden}", "--force"), "is the bundle itself"),
        (("export", "{golden}", "-o", "{tmp}/none/x"), "does not exist"),
    ],
)
def test_what_can_t_be_done_is_one_line_and_exit_2(golden, tmp_path, args, word):
    (tmp_path / "bad").write_bytes(b"\x00garbage")
    before = golden.read_bytes()
    done = kdtr(*(a.format(golden=golden, tmp=tmp_path) for a in args))
    assert (done.exit_code, done.stdout) == (2, "")
    assert word in done.stderr
    assert done.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]
    assert golden.read_bytes() == before


def test_log_probabilities_by_a_note_of_the_user(golden, tmp_path):
    assert kdtr("export", golden, "--format", "npz", "-o", tmp_path / "g.npz").exit_code == 0
    with np.load(tmp_path / "g.npz") as held:
        assert json.loads(str(held["manifest"]))["schema"] == "kdtr/1"
        rows = np.concatenate([held[f"sequences/00000{i}/logits/float64"] for i in (0, 1)])
    shifted = rows - rows.max(axis=1, keepdims=True)
    np.save(tmp_path / "p.npy", (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).astype(np.float32))
    run = tmp_path / "run.h5"
    done = kdtr("import", golden, tmp_path / "p.npy", "-o", run, "--values", "logprobs")
    assert done.stdout.endswith("sequences=2 tokens=6 logits=full values=logprobs\n")
    assert "logits         full, log-probabilities\n" in kdtr("inspect", run).stdout
    assert json.loads(kdtr("inspect", run, "--format", "json").stdout)["values"] == "logprobs"
    judged = kdtr("diff", golden, run, "--atol", "1e-5")
    assert judged.exit_code == 0, judged.output
    assert " values=logprobs " in judged.stdout.splitlines()[-1]

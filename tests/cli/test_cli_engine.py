"""`kdtr run --engine` as a user meets it: the examples of the documentation, signals, settings, options."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import kdtr_cli
from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.cli.main import cli
from kdtr_cli.model.presets import write_model

ROOT = Path(kdtr_cli.__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def kdtr(*args: object, config: bool = False) -> Result:
    return CliRunner().invoke(cli, [*([] if config else ["--no-config"]), *map(str, args)])


def kdtr_alone(*args: object, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "kdtr_cli", "--no-config", *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**ENVIRONMENT, **options.pop("env", {})}, **pipes, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("with space")


@pytest.fixture(scope="module")
def golden(folder):
    path = folder / "golden.h5"
    done = kdtr("golden", "tiny", "-o", path, "--prompt-ids", "1 2 3", "--prompt-ids", "7", "--steps", 5, "--score")
    assert done.exit_code == 0, done.output
    return path


@pytest.fixture(scope="module")
def compiled(folder):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = folder / "example engine"
    source = EXAMPLES / "example_engine.cpp"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(program), str(source)], check=True, timeout=120)
    return program


def hashed(token: int, position: int, vocab: int) -> np.ndarray:
    """A row of logits of the C++ example, once more in NumPy."""
    ids = np.arange(vocab, dtype=np.uint32)
    with np.errstate(over="ignore"):
        h = np.uint32(token) * np.uint32(2654435761) ^ np.uint32(position) * np.uint32(2246822519)
        h = h ^ ids * np.uint32(3266489917)
        h = (h ^ h >> np.uint32(15)) * np.uint32(2246822519)
        h = (h ^ h >> np.uint32(13)) * np.uint32(3266489917)
        h ^= h >> np.uint32(16)
    return (h >> np.uint32(8)).astype(np.float32) * np.float32(1 / 8388608) - np.float32(1)


class TestExamples:
    def test_the_cpp_engine_takes_part_and_diverges(self, golden, compiled, folder):
        run = folder / "cpp run.h5"
        line = f"command:{shlex.quote(str(compiled))} {{inputs}} {{out}}"
        done = kdtr("run", golden, "-o", run, "--engine", line)
        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines()[-1].startswith(
            f"run {run}: tiny by command:example engine sequences=2 tokens=10 logits=full seconds="
        )
        assert kdtr("verify", run).exit_code == 0
        judged = kdtr("diff", golden, run)
        assert judged.exit_code == 1
        assert judged.stdout.splitlines()[-1].endswith("weights=unverified rope=unverified verdict=DIVERGED")
        with open_bundle(run) as bundle:
            assert bundle.manifest["run"]["engine_name"] == "hash"
            for sequence in bundle.sequences:
                last, position = int(sequence.prompt[-1]), len(sequence.prompt) - 1
                for token, row in zip(sequence.tokens, sequence.array("logits/engine"), strict=True):
                    wanted = hashed(last, position, bundle.vocab)
                    assert row.tobytes() == wanted.tobytes()
                    assert token == wanted.argmax()
                    last, position = int(token), position + 1

    def test_the_cpp_engine_feeds_what_it_is_told_and_stops_where_it_is_told(self, golden, compiled, folder):
        line = f"command:{shlex.quote(str(compiled))} {{inputs}} {{out}}"
        done = kdtr("run", golden, "-o", folder / "forced.h5", "--engine", line, "--teacher-force", "--steps", 4)
        assert done.exit_code == 0, done.output
        with open_bundle(golden) as wanted, open_bundle(folder / "forced.h5") as got:
            for a, b in zip(got.sequences, wanted.sequences, strict=True):
                assert a.tokens.tolist() == b.tokens[:4].tolist()
                fed = [int(a.prompt[-1]), *a.tokens[:3].tolist()]
                rows = [hashed(t, len(a.prompt) - 1 + i, got.vocab) for i, t in enumerate(fed)]
                assert a.array("logits/engine").tobytes() == np.stack(rows).tobytes()
        with open_bundle(folder / "cpp run.h5") as bundle:
            token = int(bundle.sequences[0].tokens[1])
        model = folder / "stops"
        write_model(model, "tiny")
        config = model / "generation_config.json"
        config.write_text(re.sub(r'"eos_token_id": \d+', f'"eos_token_id": {token}', config.read_text()))
        stopping = folder / "stopping.h5"
        assert kdtr("golden", model, "-o", stopping, "--prompt-ids", "1 2 3", "--steps", 5).exit_code == 0
        assert kdtr("run", stopping, "-o", folder / "stopped.h5", "--engine", line).exit_code == 0
        with open_bundle(folder / "stopped.h5") as bundle:
            assert bundle.manifest["decoding"]["stop_ids"] == [token]
            assert (len(bundle.sequences[0].tokens), bundle.sequences[0].finish_reason) == (2, "stop")

    def test_the_python_engine_is_identical(self, golden, folder):
        run = folder / "python run.h5"
        words = [sys.executable, str(EXAMPLES / "numpy_engine.py"), "{inputs}", "{out}.safetensors", "{model}"]
        process = kdtr_alone("run", golden, "-o", run, "--engine", f"command:{shlex.join(words)}")
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "by command:python" in out.splitlines()[-1]
        judged = kdtr("diff", golden, run)
        assert judged.exit_code == 0, judged.output
        assert judged.stdout.splitlines()[-1] == (
            "PASS ar tokens=10/10 exact max_abs_logit_diff=0.000e+00 rope=unverified verdict=IDENTICAL"
        )


class TestPackages:
    def test_an_installed_package_adds_its_engine(self, golden, tmp_path):
        info = tmp_path / "site" / "their_engine-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-engine\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[kdtr.engines]\ntheirs = their_engine:engine\n")
        (tmp_path / "site" / "their_engine.py").write_text(
            "import numpy as np\n"
            "from kdtr_cli.workflows.engines import Answer, AnswerSequence\n"
            "def engine(argument, question):\n"
            "    tokens = np.full(question.decoding.steps, int(argument))\n"
            "    return Answer('t', [AnswerSequence(tokens, 'length') for _ in question.prompts])\n"
        )
        path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'site'}"}
        for engine, code, word in (
            ("theirs:9", 0, "by theirs:t sequences=2 tokens=10 logits=none"),
            ("theirs:512", 3, 'sequence "0": tokens holds the id 512, outside the vocabulary 0..511'),
            ("theirs:x", 3, "engine theirs failed: ValueError: invalid literal"),
            ("other", 2, "there are: command, theirs"),
        ):
            process = kdtr_alone("run", golden, "-o", tmp_path / "r.h5", "--engine", engine, "--force", env=path)
            out, err = process.communicate(timeout=60)
            assert process.returncode == code, err
            assert word in (out if code == 0 else err)
            assert err.count("\n") == (code != 0)


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_kills_the_engine_and_leaves_nothing(self, golden, folder, tmp_path, number):
        temporary = tmp_path / "tmp"
        temporary.mkdir()
        script = f"sleep 60 & echo $$ $! > {shlex.quote(str(tmp_path / 'new'))}"
        script += f"; mv {shlex.quote(str(tmp_path / 'new'))} {shlex.quote(str(tmp_path / 'pids'))}; wait"
        line = f"command:sh -c {shlex.quote(script)} sh {{inputs}} {{out}}"
        process = kdtr_alone("run", golden, "-o", tmp_path / "r.h5", "--engine", line, env={"TMPDIR": str(temporary)})
        end = time.monotonic() + 60
        while not (tmp_path / "pids").exists():
            assert time.monotonic() < end
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (3, "")
        assert err.count("\n") == 1
        assert err.startswith("kdtr: error: ")
        for pid in (tmp_path / "pids").read_text().split():
            status = Path(f"/proc/{pid}/stat")
            assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
        assert list(temporary.iterdir()) == []
        assert sorted(os.listdir(tmp_path)) == ["pids", "tmp"]


class TestRefused:
    @pytest.mark.parametrize(
        ("args", "word"),
        [
            (("--engine", "other:x"), "'other': no such engine; there are: command"),
            (("--engine", "command:./e {inputs}"), "{out} is missing"),
            (("--engine", "command:./no-such-engine {inputs} {out}"), "can't be started: No such file"),
            (("--engine", "command:x", "--mode", "ddtree"), "--mode is for kdtr's own engine"),
            (("--engine", "command:x", "--device", "cpu"), "--device is"),
            (("--engine", "command:x", "--batch", 2), "--batch is"),
            (("--engine", "command:x", "--block-size", 4), "--block-size is"),
            (("--engine", "command:x", "--jobs", 2), "--jobs is"),
            (("--engine", "command:x", "--trace", "full"), "--trace is"),
            (("--timeout", 3), "--timeout goes with --engine"),
            (("--inputs", "hdf5"), "--inputs goes with --engine"),
            (("--tier", "bf16"), "--tier bf16"),
            (("--engine", "command:x", "--timeout", 0), "--timeout"),
        ],
    )
    def test_options_that_can_t_go_together(self, golden, tmp_path, args, word):
        done = kdtr("run", golden, "-o", tmp_path / "r.h5", *args)
        assert done.exit_code == 2
        assert word in done.stderr
        assert done.stderr.count("\n") == 1
        assert list(tmp_path.iterdir()) == []

    def test_a_sweep(self, golden, tmp_path):
        done = kdtr("run", golden, "-o", f"{tmp_path}/many/", "--engine", "command:x")
        assert done.exit_code == 2
        assert "kdtr merge" in done.stderr

    def test_a_failure_is_one_line_and_exit_3(self, golden, tmp_path):
        done = kdtr("run", golden, "-o", tmp_path / "r.h5", "--engine", "command:sh -c 'exit 7' {inputs} {out}")
        assert done.exit_code == 3
        assert done.stderr == "kdtr: error: engine sh ended with exit code 7\n"
        assert done.stdout == ""

    @pytest.mark.parametrize("text", ["[tool.kdtr.run]\nengine = '{}'", "[tool.kdtr.engine]\ncommand = '{}'"])
    def test_a_file_can_t_name_a_command_to_run(self, golden, tmp_path, monkeypatch, text):
        """A pyproject.toml comes with a repository that one may not trust."""
        (tmp_path / ".git").mkdir()
        (tmp_path / "pyproject.toml").write_text(text.format(f"command:touch {tmp_path}/ran {{inputs}} {{out}}"))
        monkeypatch.chdir(tmp_path)
        done = kdtr("run", golden, "-o", tmp_path / "r.h5", config=True)
        assert done.exit_code == 2
        assert "give it on the command line" in done.stderr
        assert not (tmp_path / "ran").exists()
        assert not (tmp_path / "r.h5").exists()

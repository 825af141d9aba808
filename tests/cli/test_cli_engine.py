"""`kdtr run --engine` as a user meets it: the examples of the documentation, signals, settings, options."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pytest
from invoke import kdtr

import kdtr_cli
from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.model.presets import write_model

ROOT = Path(kdtr_cli.__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


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


@dataclass(frozen=True)
class Example:
    """A compiled example: what to give --engine, and the options that go with it."""

    name: str
    line: str
    options: tuple[str, ...]


def hdf5_flags(compiler: str, folder: Path) -> list[str]:
    """What to compile and link libhdf5 with; skips where there is none."""
    flags = ["-lhdf5"]
    for name in ("hdf5", "hdf5-serial"):
        if shutil.which("pkg-config") and subprocess.run(["pkg-config", "--exists", name]).returncode == 0:
            asked = ["pkg-config", "--cflags", "--libs", name]
            flags = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
            break
    flags = [re.sub("^-I", "-isystem", flag) for flag in flags]  # whose warnings are not ours
    (folder / "probe.cpp").write_text("#include <hdf5.h>\nint main() { return H5open() < 0; }\n")
    command = [compiler, str(folder / "probe.cpp"), *flags, "-o", str(folder / "probe")]
    if subprocess.run(command, capture_output=True, timeout=120).returncode:
        pytest.skip("no libhdf5 to compile with (Debian: apt-get install libhdf5-dev)")
    return flags


@pytest.fixture(scope="module", params=["example_engine", "hdf5_engine"])
def compiled(request, folder):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    hdf5 = request.param == "hdf5_engine"
    libraries = hdf5_flags(compiler, folder) if hdf5 else []
    program = folder / request.param.replace("_", " ")
    source = EXAMPLES / f"{request.param}.cpp"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(program), str(source), *libraries], check=True, timeout=120)
    line = f"command:{shlex.quote(str(program))} {{inputs}} {{out}}"
    return Example(program.name, line + ".npz" * hdf5, ("--inputs", "hdf5") if hdf5 else ())


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
        run = folder / f"{compiled.name}.h5"
        done = kdtr("run", golden, "-o", run, "--engine", compiled.line, *compiled.options)
        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines()[-1].startswith(
            f"run {run}: tiny by command:{compiled.name} sequences=2 tokens=10 logits=full seconds="
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
        engine = ("--engine", compiled.line, *compiled.options, "--force")
        done = kdtr("run", golden, "-o", folder / "forced.h5", *engine, "--teacher-force", "--steps", 4)
        assert done.exit_code == 0, done.output
        with open_bundle(golden) as wanted, open_bundle(folder / "forced.h5") as got:
            for a, b in zip(got.sequences, wanted.sequences, strict=True):
                assert a.tokens.tolist() == b.tokens[:4].tolist()
                fed = [int(a.prompt[-1]), *a.tokens[:3].tolist()]
                rows = [hashed(t, len(a.prompt) - 1 + i, got.vocab) for i, t in enumerate(fed)]
                assert a.array("logits/engine").tobytes() == np.stack(rows).tobytes()
        with open_bundle(folder / f"{compiled.name}.h5") as bundle:
            token = int(bundle.sequences[0].tokens[1])
        model = folder / f"stops of {compiled.name}"
        write_model(model, "tiny")
        config = model / "generation_config.json"
        config.write_text(re.sub(r'"eos_token_id": \d+', f'"eos_token_id": {token}', config.read_text()))
        stopping = folder / f"stopping {compiled.name}.h5"
        assert kdtr("golden", model, "-o", stopping, "--prompt-ids", "1 2 3", "--steps", 5).exit_code == 0
        assert kdtr("run", stopping, "-o", folder / "stopped.h5", *engine).exit_code == 0
        with open_bundle(folder / "stopped.h5") as bundle:
            assert bundle.manifest["decoding"]["stop_ids"] == [token]
            assert (len(bundle.sequences[0].tokens), bundle.sequences[0].finish_reason) == (2, "stop")

    def test_the_hdf5_example_reads_texts_as_json_does(self, folder, tmp_path):
        """Escapes and all planes of Unicode, through the part of it that reads metadata."""
        compiler = shutil.which("g++") or shutil.which("clang++") or pytest.skip("no C++ compiler")
        flags = hdf5_flags(compiler, tmp_path)
        source = (EXAMPLES / "hdf5_engine.cpp").read_text()
        main = "int main(int, char** argv) { std::fputs(Inputs(argv[1]).text(argv[2]).c_str(), stdout); }"
        (tmp_path / "show.cpp").write_text(source[: source.index("int main(")] + main)
        show = [compiler, "-std=c++17", str(tmp_path / "show.cpp"), *flags, "-o", str(tmp_path / "show")]
        subprocess.run(show, check=True, timeout=120)
        texts = {"config": '{"a": "\\"é\u20ac\U0001f600\\n"}\n\t/\x01', "two": "2", "": "", "last": "\\"}
        with h5py.File(tmp_path / "in.h5", "w") as file:
            file["metadata"] = np.bytes_(json.dumps(texts))
        for key, text in texts.items():
            said = subprocess.run([tmp_path / "show", tmp_path / "in.h5", key], capture_output=True, timeout=60)
            assert said.stdout.decode() == text

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
            ("other", 2, "there are: command, hf, openai, theirs"),
        ):
            process = kdtr_alone("run", golden, "-o", tmp_path / "r.h5", "--engine", engine, "--force", env=path)
            out, err = process.communicate(timeout=60)
            assert process.returncode == code, err
            assert word in (out if code == 0 else err)
            assert err.count("\n") == (code != 0)


class TestServers:
    def test_one_that_dies_in_its_answer_is_one_line_and_exit_3(self, golden, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"openai:http://127.0.0.1:{server.getsockname()[1]}/completion"
            process = kdtr_alone("run", golden, "-o", tmp_path / "r.h5", "--engine", url)
            server.settimeout(60)
            with server.accept()[0] as client:
                client.recv(65536)
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (3, "")
        assert re.fullmatch(r"kdtr: error: server 127.0.0.1:\d+ ended the connection before .*\n", err)
        assert list(tmp_path.iterdir()) == []

    def test_a_signal_while_it_is_waited_for_leaves_nothing(self, golden, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"openai:http://127.0.0.1:{server.getsockname()[1]}/completion"
            process = kdtr_alone("run", golden, "-o", tmp_path / "r.h5", "--engine", url)
            server.settimeout(60)
            with server.accept()[0] as client:
                client.recv(65536)
                process.send_signal(signal.SIGTERM)
                out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err.count("\n")) == (3, "", 1)
        assert list(tmp_path.iterdir()) == []


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
            (("--engine", "other:x"), "'other': no such engine; there are: command, hf, openai"),
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
            (("--tier", "fp16"), "--tier fp16"),
            (("--tier", "bf16", "--trace", "full"), "--trace goes with --tier exact"),
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

"""Starting a foreign engine: what it is told, how it may end, and that nothing of it stays behind."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from engine_cases import question
from safetensors import safe_open

from kdtr_cli.errors import EngineError, Exit, InputError, KdtrError
from kdtr_cli.workflows import engine_command
from kdtr_cli.workflows.engine_command import arguments, command, output_file, run_program
from kdtr_cli.workflows.engine_inputs import write_inputs

pytestmark = pytest.mark.quick

VALUES = {"inputs": "/a b/in", "out": "/a b/out", "model": "/m'x"}


def gone(pid: int) -> bool:
    """No such process, or one that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(found):
    end = time.monotonic() + 20
    while not (result := found()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
    return result


def datasets(group: h5py.Group):
    for item in group.values():
        yield from datasets(item) if isinstance(item, h5py.Group) else [item]


class TestInputs:
    #: Everything that an engine is told; the names of arrays are the whole of what a file may hold.
    ARRAYS = frozenset({"prompts/ids", "prompts/offsets", "streams"})

    def test_hold_prompts_and_settings_and_no_answer(self, tmp_path):
        with safe_open(write_inputs(question(tmp_path)), "np") as file:
            assert set(file.keys()) == self.ARRAYS
            arrays, texts = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        assert arrays["prompts/ids"].tolist() == [1, 2, 3, 7]
        assert arrays["prompts/offsets"].tolist() == [0, 3, 4]
        assert arrays["streams"].tolist() == [0, 2**32 - 1]
        assert [arrays[name].dtype for name in ("prompts/ids", "prompts/offsets", "streams")] == ["i4", "i8", "i8"]
        assert texts == {
            "schema": "kdtr.inputs/1",
            "config": '{"vocab_size": 8}',
            "model": "",
            "vocab_size": "8",
            "steps": "2",
            "stop_ids": "5 6",
            "ignore_eos": "false",
            "temperature": "0.0",
            "seed": "18446744073709551615",
            "teacher_forced": "false",
            "score": "false",
            "sequence_ids": json.dumps(["0", "é 1"]),
            "choices": '{"tie_rule": "smallest-index"}',
            "contract_version": "1",
        }

    def test_tokens_are_told_only_to_be_fed(self, tmp_path):
        forced = (np.array([4, 5], np.int32), np.zeros(0, np.int32))
        with safe_open(write_inputs(question(tmp_path, forced=forced)), "np") as file:
            assert set(file.keys()) == self.ARRAYS | {"tokens/ids", "tokens/offsets"}
            assert file.get_tensor("tokens/ids").tolist() == [4, 5]
            assert file.get_tensor("tokens/offsets").tolist() == [0, 2, 2]
            assert file.metadata()["teacher_forced"] == "true"

    def test_hdf5_holds_the_same(self, tmp_path):
        for name, forced in (("free", None), ("forced", (np.array([4], np.int32), np.array([5], np.int32)))):
            one = question(tmp_path / name, forced=forced)
            two = question(tmp_path / f"{name} hdf5", forced=forced, container="hdf5")
            with safe_open(write_inputs(one), "np") as a, h5py.File(write_inputs(two)) as b:
                held = []
                b.visititems(
                    lambda path, item, held=held: held.append(path) if isinstance(item, h5py.Dataset) else None
                )
                assert set(held) == {*a.keys(), "metadata"}
                assert json.loads(b["metadata"][()]) == a.metadata()
                for key in a.keys():  # noqa: SIM118
                    assert b[key].dtype == a.get_tensor(key).dtype
                    assert b[key][()].tolist() == a.get_tensor(key).tolist()


class TestArguments:
    def test_a_path_with_spaces_and_quotes_stays_one_word(self):
        assert arguments("./e --in={inputs} '{out}.npz' {model} \"a b\" {{}", VALUES) == [
            "./e",
            "--in=/a b/in",
            "/a b/out.npz",
            "/m'x",
            "a b",
            "{{}",
        ]

    @pytest.mark.parametrize(
        ("line", "word"),
        [
            ("./e {out}", "{inputs} is missing"),
            ("./e {inputs}", "{out} is missing"),
            ("./e {inputs} {output}", "no placeholder {output}"),
            ("", "names no program"),
            ("  ", "names no program"),
            ("./e '{inputs} {out}", "No closing quotation"),
        ],
    )
    def test_a_line_that_can_t_work(self, line, word):
        with pytest.raises(InputError, match=word) as caught:
            arguments(line, VALUES)
        assert "\n" not in str(caught.value)

    def test_a_model_that_nobody_has(self, tmp_path):
        with pytest.raises(InputError, match="--model DIR"):
            command("./e {inputs} {out} {model}", question(tmp_path))
        assert list(tmp_path.iterdir()) == []


class TestEnds:
    @pytest.mark.parametrize(
        ("script", "word"),
        [
            ("exit 1", "exit code 1"),
            ("exit 3", "exit code 3"),
            ("kill -9 $$", "killed by SIGKILL"),
            ("kill -SEGV $$", "killed by SIGSEGV"),
        ],
    )
    def test_a_failure(self, script, word):
        with pytest.raises(EngineError, match=word) as caught:
            run_program(["sh", "-c", script], None)
        assert caught.value.exit_code is Exit.FAILED

    @pytest.mark.parametrize("program", ["./no-such-engine", "/", "", "a\0b"])
    def test_a_program_that_can_t_be_started(self, program):
        with pytest.raises(InputError, match="can't be started"):
            run_program([program], None)

    def test_a_timeout_kills_everything_that_was_started(self, tmp_path, monkeypatch):
        monkeypatch.setattr(engine_command, "_GRACE_S", 0.2)
        pids = tmp_path / "pids"
        script = f"trap '' TERM; sleep 60 & echo $$ $! > {shlex.quote(str(pids))}; wait"
        begin = time.monotonic()
        with pytest.raises(EngineError, match=r"within 0\.3 s"):
            run_program(["sh", "-c", script], 0.3)
        assert time.monotonic() - begin < 10
        assert all(gone(int(pid)) for pid in pids.read_text().split())

    def test_a_program_that_listens_to_sigterm_may_clean_up(self, tmp_path):
        script = f"trap 'echo bye > {shlex.quote(str(tmp_path / 'bye'))}; exit 0' TERM; while :; do sleep 0.01; done"
        with pytest.raises(EngineError, match="did not end"):
            run_program(["sh", "-c", script], 0.3)
        assert (tmp_path / "bye").read_text() == "bye\n"

    def test_what_it_left_running_is_killed(self, tmp_path):
        pid = tmp_path / "pid"
        run_program(["sh", "-c", f"sleep 60 >/dev/null 2>&1 & echo $! > {shlex.quote(str(pid))}"], None)
        wait_for(lambda: gone(int(pid.read_text())))

    def test_an_interrupt_kills_it(self, tmp_path):
        """The signal comes while kdtr waits; it goes on as an exception, and nothing runs any more."""
        pid = tmp_path / "pid"

        def interrupt():
            wait_for(lambda: pid.exists() and pid.read_text())
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run_program(["sh", "-c", f"echo $$ > {shlex.quote(str(pid))}; exec sleep 60"], None)
        thread.join()
        assert gone(int(pid.read_text()))

    def test_its_standard_output_is_not_ours(self):
        own = "from kdtr_cli.workflows.engine_command import run_program"
        code = f"{own}; run_program(['sh', '-c', 'echo o; echo e >&2; cat'], 9)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, input="x", check=True)
        assert done.stdout == ""
        assert done.stderr == "o\ne\n"


class TestOutput:
    def test_none_several_and_links(self, tmp_path):
        out = tmp_path / "out"
        with pytest.raises(EngineError, match="wrote nothing"):
            output_file(out, "e")
        (tmp_path / "out.npz").write_bytes(b"")
        assert output_file(out, "e") == tmp_path / "out.npz"
        out.write_bytes(b"")
        with pytest.raises(EngineError, match=r"out and out\.npz"):
            output_file(out, "e")
        (tmp_path / "out.npz").unlink()
        out.unlink()
        out.symlink_to("/etc/passwd")
        with pytest.raises(EngineError, match="no regular file"):
            output_file(out, "e")
        out.unlink()
        out.symlink_to("nowhere")
        with pytest.raises(EngineError, match="no regular file"):
            output_file(out, "e")
        out.unlink()
        out.mkdir()
        with pytest.raises(EngineError, match="no regular file"):
            output_file(out, "e")

    @pytest.mark.parametrize("name", ["out", "out.npz", "out.safetensors", "out.json"])
    def test_an_output_that_was_there_before_is_no_answer(self, tmp_path, name):
        asked = question(tmp_path / "private")
        (asked.folder / name).write_bytes(b"left over")
        with pytest.raises(KdtrError, match="before the engine ran") as caught:
            command(f"touch {tmp_path}/ran {{inputs}} {{out}}", asked)
        assert caught.value.exit_code is Exit.FAILED
        assert not (tmp_path / "ran").exists()

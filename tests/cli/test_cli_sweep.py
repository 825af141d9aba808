"""Sweeps from the command line: processes, Dask and MPI, and whatever stops them at whatever moment."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from invoke import kdtr

import kdtr_cli

ROOT = Path(kdtr_cli.__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}

#: 5 shards of 8 prompts: a shard takes long enough to be met in the middle.
SWEEP = ("golden", "tiny", "--num-prompts", "40", "--prompt-len", "6", "--steps", "4", "--shard-size", "8")

#: A kdtr that kills itself, and nobody else, at a moment of its own.
SUICIDE = """
import os, signal, sys
from kdtr_cli.workflows import sweep
from kdtr_cli.cli.main import main

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    setattr(sweep, sys.argv.pop(1), die)
    main()
"""


def start(*args: object, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "kdtr_cli", "--no-config", *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=ENVIRONMENT, **pipes, **options)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def wait_for(found, process: subprocess.Popen | None = None):
    end = time.monotonic() + 60
    while not (result := found()):
        assert time.monotonic() < end, "it never came"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.005)
    return result


def shards(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("undisturbed") / "d"
    code, out, err = finish(start(*SWEEP, "-o", f"{folder}/", "--jobs", 2))
    assert (code, err) == (0, "")
    assert out.startswith(f"golden {folder}: tiny sequences=40 tokens=160 shards=5 max_abs_exact_minus_float64=")
    assert out.endswith(" weights=embedded\n")
    return shards(folder)


class TestCommands:
    def test_golden_run_diff_merge_verify_inspect(self, tmp_path, undisturbed):
        goldens, runs = tmp_path / "g", tmp_path / "r"
        few = ("golden", "tiny", "--num-prompts", 5, "--prompt-len", 3, "--steps", 2, "--shard-size", 2)
        assert kdtr(*few, "-o", f"{goldens}/").exit_code == 0
        made = kdtr("run", goldens, "-o", f"{runs}/", "--device", "cpu", "--jobs", 2)
        assert made.exit_code == 0, made.stderr
        assert made.stdout.startswith(f"run {runs}: tiny sequences=5 tokens=10 shards=3 on=cpu_")
        judged = kdtr("diff", goldens, runs)
        assert judged.exit_code == 0
        line = "PASS ar tokens=10/10 exact max_abs_logit_diff=0.000e+00 verdict=IDENTICAL"
        assert judged.stdout.splitlines()[-1] == line
        again = kdtr(*few, "-o", goldens)
        assert " shards=3 resumed=3 weights=embedded" in again.stdout
        merged = kdtr("merge", goldens, "-o", tmp_path / "g.h5")
        assert merged.stdout.startswith(f"golden {tmp_path / 'g.h5'}: merged shards=3 sequences=5 manifest_sha256=")
        checked = kdtr("verify", goldens, runs, tmp_path / "g.h5")
        assert checked.exit_code == 0
        assert checked.stdout.startswith(f"OK {goldens}: sweep of goldens shards=3 sequences=5 arrays=")
        assert "shards      3 of 3, complete" in kdtr("inspect", goldens).stdout
        assert json.loads(kdtr("inspect", goldens, "--format", "json").stdout)["schema"] == "kdtr.inspect-sweep/1"
        assert "sequence  3" in kdtr("inspect", runs, "--sequence", "3").stdout
        (runs / "shard-000001.h5").unlink()
        judged = kdtr("diff", goldens, runs)
        assert judged.exit_code == 2
        assert judged.stdout.splitlines()[-1].startswith("ERROR ar tokens=0/0 ")
        assert kdtr("verify", runs).exit_code == 2

    @pytest.mark.quick
    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (
                ("golden", "-o", "g.h5", "--jobs", "2"),
                "--jobs goes with a sweep; to make one end the output with a slash",
            ),
            (("golden", "-o", "g.h5", "--shard-size", "2"), "--shard-size goes with a sweep"),
            (("golden", "-o", "g.h5", "--executor", "mpi"), "--executor goes with a sweep"),
            (("golden", "-o", "d/", "--executor", "slurm"), "--executor slurm: processes, dask:ADDRESS"),
            (("golden", "-o", "d/", "--executor", "dask:x", "--jobs", "2"), "--jobs goes with --executor processes"),
            (("run", "g.h5", "-o", "d/"), "-o d/: a sweep is run into a sweep (-o DIR/), a bundle into a bundle"),
            (("run", ".", "-o", "r.h5"), "-o r.h5: a sweep is run into a sweep"),
            (("run", ".", "-o", "r/"), ".: no sweep in it (it has no sweep.json)"),
            (("merge", "d", "-o", "m.h5"), "d: no such directory"),
        ],
    )
    def test_options_that_do_not_fit(self, tmp_path, monkeypatch, args, said):
        monkeypatch.chdir(tmp_path)
        result = kdtr(*args)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"kdtr: error: {said}")
        assert result.stderr.count("\n") == 1
        assert not list(tmp_path.iterdir())


class TestKill:
    @pytest.mark.parametrize(
        ("moment", "left"),
        [("write_sweep", 0), ("_arrived", 2)],
        ids=["before sweep.json", "between shards"],
    )
    def test_kill_9_of_the_command(self, tmp_path, undisturbed, moment, left):
        script = tmp_path / "suicide.py"
        script.write_text(SUICIDE)
        folder = tmp_path / "d"
        done = subprocess.run(
            [sys.executable, script, moment, "--no-config", *SWEEP, "-o", f"{folder}/", "--jobs", "2"],
            env=ENVIRONMENT,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
        whole = [name for name in os.listdir(folder) if not name.startswith(".")]
        # a worker that was in the middle of a shard leaves: it finishes at most that one
        assert left <= len(whole) <= (left if left < 2 else left + 2)
        wait_for(lambda: not list(folder.glob(".*")))
        self.resume(folder, undisturbed)

    def test_kill_9_of_all_of_it_amid_a_shard(self, tmp_path, undisturbed):
        folder = tmp_path / "d"
        process = start(*SWEEP, "-o", f"{folder}/", "--jobs", 2, start_new_session=True)
        # one shard is there and another one is being written
        wait_for(lambda: list(folder.glob("shard-*")) and list(folder.glob(".shard-*")), process)
        os.killpg(process.pid, signal.SIGKILL)
        finish(process)
        assert 0 < len(list(folder.glob("shard-*"))) < 5
        self.resume(folder, undisturbed)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_keeps_finished_shards_and_leaves_nothing_half(self, tmp_path, undisturbed, number):
        folder = tmp_path / "d"
        process = start(*SWEEP, "-o", f"{folder}/", "--jobs", 2, start_new_session=True)
        wait_for(lambda: list(folder.glob("shard-*")) and list(folder.glob(".shard-*")), process)
        # as a terminal does for Ctrl-C: to everybody
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        code, out, err = finish(process)
        assert (code, out) == (3, "")
        assert err.count("\n") == 1
        assert ("interrupted" if number == signal.SIGINT else "SIGTERM") in err
        held = shards(folder)
        assert held.items() <= undisturbed.items()
        assert 2 <= len(held) < 6
        wait_for(lambda: not there(process.pid))

    def resume(self, folder: Path, undisturbed: dict[str, str]) -> None:
        result = kdtr(*SWEEP, "-o", f"{folder}/")
        assert result.exit_code == 0, result.stderr
        assert shards(folder) == undisturbed


def installed_too() -> bool:
    """Whether a worker's Python has kdtr by itself."""
    found = subprocess.run(
        [sys.executable, "-c", "import kdtr_cli"],
        env={**ENVIRONMENT, "PYTHONPATH": ""},
        cwd="/",
        capture_output=True,
        check=False,
    )
    return found.returncode == 0


def there(group: int) -> bool:
    """Whether a process group has any process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def dask(folder: Path, workers: int = 2, environment: dict[str, str] = ENVIRONMENT):
    """A real scheduler and workers of one thread, each a process of its own, on loopback: (address, the workers)."""
    file = folder / "scheduler.json"
    quiet = {"env": ENVIRONMENT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--no-nanny", "--nthreads", "1", "--no-dashboard"]
    started = [subprocess.Popen([*scheduler, "--no-dashboard", "--scheduler-file", file], **quiet)]
    try:
        wait_for(lambda: file.exists() and file.stat().st_size, started[0])
        address = json.loads(file.read_text())["address"]
        quiet["env"] = environment
        started += [subprocess.Popen([*worker, address], **quiet) for _ in range(workers)]
        yield address, started[1:]
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()


class TestDask:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("distributed")

    def test_with_a_worker_killed_the_bytes_are_the_same(self, tmp_path, undisturbed):
        folder = tmp_path / "d"
        with dask(tmp_path) as (address, workers):
            process = start(*SWEEP, "-o", f"{folder}/", "--executor", f"dask:{address}")
            wait_for(lambda: list(folder.glob("shard-*")) and list(folder.glob(".shard-*")), process)
            workers[0].kill()
            code, out, err = finish(process)
        assert (code, err) == (0, "")
        assert " shards=5 " in out
        assert shards(folder) == undisturbed

    def test_no_scheduler_no_worker_and_an_error_in_a_worker(self, tmp_path, monkeypatch):
        monkeypatch.setattr("kdtr_cli.workflows.executors._DASK_WAIT_S", 1.0)
        for address, said in (
            ("tcp://127.0.0.1:9", "no scheduler answers there"),
            ("nonsense:1", "no scheduler answers"),
        ):
            result = kdtr(*SWEEP, "-o", f"{tmp_path / 'd'}/", "--executor", f"dask:{address}")
            assert result.exit_code == 2, result.stderr
            assert f"--executor dask:{address}: {said}" in result.stderr
            assert result.stderr.count("\n") == 1
        with dask(tmp_path, workers=0) as (address, _):
            result = kdtr(*SWEEP, "-o", f"{tmp_path / 'd'}/", "--executor", f"dask:{address}")
            assert "the scheduler has no worker; start some" in result.stderr
        assert os.listdir(tmp_path / "d") == ["sweep.json"]

    def test_a_worker_without_kdtr_and_the_loss_of_all_workers(self, tmp_path, monkeypatch):
        folder = tmp_path / "d"
        with dask(tmp_path, workers=1, environment={**ENVIRONMENT, "PYTHONPATH": ""}) as (address, _):
            if not installed_too():
                code, _, err = finish(start(*SWEEP, "-o", f"{folder}/", "--executor", f"dask:{address}"))
                assert code == 2
                assert "can't load kdtr (No module named 'kdtr_cli')" in err
                assert err.count("\n") == 1
        (tmp_path / "scheduler.json").unlink()
        monkeypatch.setattr("kdtr_cli.workflows.executors._DASK_LOOK_S", 0.1)
        monkeypatch.setattr("kdtr_cli.workflows.executors._DASK_ALONE_S", 0.5)
        with dask(tmp_path, workers=1) as (address, workers):
            killer = threading.Thread(
                target=lambda: (wait_for(lambda: list(folder.glob("shard-*"))), workers[0].kill())
            )
            killer.start()
            result = kdtr(*SWEEP, "-o", f"{folder}/", "--executor", f"dask:{address}")
            killer.join()
        assert result.exit_code == 3
        assert "its scheduler or all of its workers are gone; finished shards stay" in result.stderr
        assert result.stderr.count("\n") == 1


class TestMPI:
    def test_under_its_launcher_the_bytes_are_the_same(self, tmp_path, undisturbed):
        pytest.importorskip("mpi4py")
        launcher = shutil.which("mpiexec", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
        if launcher is None:
            pytest.skip("there is no mpiexec")
        folder = tmp_path / "d"
        launched = [launcher, "-n", "3", sys.executable, "-m", "mpi4py.futures", "-m", "kdtr_cli", "--no-config"]
        done = subprocess.run(
            [*launched, *SWEEP, "-o", f"{folder}/", "--executor", "mpi"],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert " shards=5 " in done.stdout
        assert shards(folder) == undisturbed

    def test_without_its_launcher_it_is_one_line(self, tmp_path):
        pytest.importorskip("mpi4py")
        code, _, err = finish(start(*SWEEP, "-o", f"{tmp_path / 'd'}/", "--executor", "mpi"))
        assert code == 2
        assert "--executor mpi works under mpi4py's launcher with two processes at least" in err
        assert err.count("\n") == 1

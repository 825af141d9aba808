"""The executors: few tasks ahead, failures in one line, workers that leave when they are told to or left alone."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import pytest

from kdtr_cli.errors import DeviceError, InputError
from kdtr_cli.workflows.executors import BLAS_VARIABLES, _call, check_executor, map_shards, open_executor


def square(n):
    return n * n


def environment(_):
    return {name: os.environ.get(name) for name in BLAS_VARIABLES}


def blocked(_):
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])


def die(n):
    if n == 3:
        os._exit(1)
    return n


def refuse(n):
    raise InputError(f"no {n}")


def hold(path):
    """Work that is in the middle of a file when the worker is stopped."""
    with open(path, "w"):
        pass
    try:
        time.sleep(60)
    finally:
        os.unlink(path)


class Instant(Executor):
    """Does the work when it is given, or fails as told."""

    def __init__(self, error=None):
        self.error = error

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(fn(*args, **kwargs))
        return future


@pytest.mark.quick
class TestMapShards:
    def test_every_result_comes_once(self):
        with ThreadPoolExecutor(3) as pool:
            assert sorted(map_shards(pool, square, range(50), 3)) == [n * n for n in range(50)]
            assert list(map_shards(pool, square, [], 3)) == []

    @pytest.mark.parametrize("workers", [1, 4])
    def test_tasks_are_drawn_as_results_are_taken(self, workers):
        drawn = 0

        def tasks():
            nonlocal drawn
            for n in range(100):
                drawn += 1
                yield n

        ahead = 0
        for taken, _ in enumerate(map_shards(Instant(), square, tasks(), workers)):
            ahead = max(ahead, drawn - taken)
        assert drawn == 100
        assert ahead <= 2 * workers

    def test_the_first_failure_ends_it_and_what_waits_is_given_up(self):
        begun = []

        def work(n):
            begun.append(n)
            if n == 1:
                raise InputError("no 1")
            time.sleep(0.01)

        with ThreadPoolExecutor(1) as pool, pytest.raises(InputError, match="no 1"):
            list(map_shards(pool, work, range(100), 4))
        assert len(begun) < 15

    def test_what_dask_gives_up_is_told(self):
        killed = type("KilledWorker", (Exception,), {})("task", None, 3)
        with pytest.raises(DeviceError, match="Dask gave up on a shard: every worker that took it died"):
            list(map_shards(Instant(killed), square, [1], 1))

    def test_another_error_stays_what_it_is(self):
        with pytest.raises(ZeroDivisionError):
            list(map_shards(Instant(ZeroDivisionError()), square, [1], 1))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("spec", "jobs", "said"),
    [
        ("threads", None, "--executor threads: processes, dask:ADDRESS"),
        ("dask", None, "--executor dask: processes, dask:ADDRESS"),
        ("dask:", None, "--executor dask:: processes"),
        ("mpi:3", None, "--executor mpi:3: processes"),
        ("dask:tcp://127.0.0.1:1", 3, "--jobs goes with --executor processes"),
        ("mpi", 3, "--jobs goes with --executor processes"),
    ],
)
def test_options_that_do_not_fit(spec, jobs, said):
    with pytest.raises(InputError) as error:
        check_executor(spec, jobs)
    assert str(error.value).startswith(said)


@pytest.mark.quick
@pytest.mark.parametrize(("name", "package", "extra"), [("dask:x", "distributed", "dask"), ("mpi", "mpi4py", "mpi")])
def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch, name, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        InputError, match=rf"--executor {name.partition(':')[0]} needs {package}: pip install 'kdtr\[{extra}\]'"
    ):
        check_executor(name, None)


class TestProcesses:
    def test_workers_hold_to_one_blas_thread_and_this_process_does_not(self, monkeypatch):
        monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        with open_executor(None, 1) as (pool, workers):
            assert workers == 1
            assert pool.submit(environment, 0).result() == {
                "OMP_NUM_THREADS": "7",
                "OPENBLAS_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
            }
        assert "OPENBLAS_NUM_THREADS" not in os.environ

    def test_workers_do_not_hear_what_a_terminal_sends_to_all_but_they_hear_their_parent(self):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        with open_executor(None, 1) as (pool, _):
            heard_not = pool.submit(blocked, 0).result()
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
        assert {signal.SIGINT, signal.SIGHUP} <= heard_not
        assert signal.SIGTERM not in heard_not

    def test_a_worker_that_dies_is_one_line_and_what_was_done_is_there(self):
        done = []
        with (
            pytest.raises(DeviceError, match="a worker process died"),
            open_executor("processes", 1) as (pool, workers),
        ):
            done += map_shards(pool, die, range(10), workers)
        assert not multiprocessing.active_children()

    def test_an_error_ends_work_at_once_and_its_files_go(self, tmp_path):
        path = tmp_path / "half"
        begin = time.monotonic()

        def interrupted():
            with open_executor(None, 2) as (pool, _):
                pool.submit(_call, hold, path)
                while not path.exists():
                    time.sleep(0.02)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert time.monotonic() - begin < 20
        assert not path.exists()
        assert not multiprocessing.active_children()

    def test_workers_do_not_outlive_a_parent_that_is_killed(self, tmp_path):
        path = tmp_path / "half"
        text = (
            "import sys, time, test_executors as t\n"
            "from kdtr_cli.workflows.executors import open_executor\n"
            "if __name__ == '__main__':\n"
            "    with open_executor(None, 2) as (pool, _):\n"
            "        pids = [c.pid for c in __import__('multiprocessing').active_children()]\n"
            "        pool.submit(t._call, t.hold, sys.argv[1])\n"
            "        print(*pids, flush=True)\n"
            "        time.sleep(60)\n"
        )
        script = tmp_path / "parent.py"
        script.write_text(text)
        paths = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
        parent = subprocess.Popen(
            [sys.executable, script, path], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
        )
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        end = time.monotonic() + 30
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.02)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        end = time.monotonic() + 30
        while any(map(alive, workers)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(map(alive, workers))
        assert not path.exists()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

"""Where the shards of a sweep are made: any `concurrent.futures.Executor`.

`processes` is the standard library's pool, `dask:ADDRESS` is `distributed`'s own executor over a running scheduler, and
`mpi` is `mpi4py.futures` under its own launcher. Who schedules, restarts and moves work is theirs to say.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing.connection import wait as wait_for
from types import FrameType
from typing import Any, TypeVar

from kdtr_cli.errors import DeviceError, InputError, KdtrError

__all__ = ["BLAS_VARIABLES", "check_executor", "map_shards", "open_executor"]

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

#: One BLAS thread a worker: N workers fill N cores, and float64 bits do not depend on N. What the user sets stays.
BLAS_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_STOP_S = 10.0  # a worker that is told to stop may finish its NumPy call and remove its file; then it is killed
_DASK_WAIT_S = 10.0
_DASK_LOOK_S = 2.0
_DASK_ALONE_S = 60.0  # without any worker before the work is given up: a cluster may be replacing them
_in_pool = False  # this is a process of the pool below …
_busy = False  # … and has a task

_AHEAD = 2  # tasks under way for each worker: the next one lies ready, and memory stays bounded


def map_shards(
    executor: Executor, work: Callable[[_Task], _Result], tasks: Iterable[_Task], workers: int
) -> Iterator[_Result]:
    """The results of ``work`` for all tasks as they come, in any order; few tasks are drawn ahead of the results.

    The first task that fails ends it: KdtrError as it was raised, DeviceError for workers that died. Work that is
    resubmitted (Dask does so when a worker dies) may run twice.
    """
    tasks = iter(tasks)
    waiting = set()
    try:
        while True:
            waiting |= {executor.submit(_call, work, task) for task in islice(tasks, _AHEAD * workers - len(waiting))}
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except (KdtrError, GeneratorExit):
        raise
    except BrokenExecutor as error:
        raise DeviceError(
            "a worker process died (killed, or out of memory: fewer --jobs need less); "
            "finished shards stay, the same command goes on"
        ) from error
    except CancelledError as error:
        raise DeviceError(
            "the executor gave the work up: its scheduler or all of its workers are gone; "
            "finished shards stay, the same command goes on"
        ) from error
    except Exception as error:
        if type(error).__name__ != "KilledWorker":  # distributed's, which need not be installed
            raise
        raise DeviceError(
            "Dask gave up on a shard: every worker that took it died (out of memory? see their logs); "
            "finished shards stay, the same command goes on"
        ) from error
    finally:
        for future in waiting:
            future.cancel()


def _call(work: Callable[[_Task], _Result], task: _Task) -> _Result:
    """What a worker runs. A pool's process that is told to stop unwinds from here, and takes no further task."""
    global _busy
    if not _in_pool:
        return work(task)
    _busy = True
    try:
        return work(task)
    except SystemExit as stop:
        os._exit(int(stop.code or 0))
    finally:
        _busy = False


def check_executor(spec: str | None, jobs: int | None) -> None:
    """InputError for a name that is none of the three, for --jobs beside another one, for what isn't installed."""
    name, _, address = (spec or "processes").partition(":")
    if name not in ("processes", "dask", "mpi") or bool(address) != (name == "dask"):
        raise InputError(f"--executor {spec}: processes, dask:ADDRESS (such as dask:tcp://host:8786) or mpi")
    if jobs is not None and name != "processes":
        raise InputError(f"--jobs goes with --executor processes: {name} itself says how many workers there are")
    needs = {"dask": ("distributed", "dask"), "mpi": ("mpi4py", "mpi")}.get(name)
    if needs is not None:
        try:
            __import__(needs[0])
        except ImportError:
            raise InputError(f"--executor {name} needs {needs[0]}: pip install 'kdtr[{needs[1]}]'") from None


@contextlib.contextmanager
def open_executor(spec: str | None, jobs: int | None) -> Iterator[tuple[Executor, int]]:
    """The executor and how many workers it has by now. InputError as `check_executor`, and where nothing answers."""
    check_executor(spec, jobs)
    name, _, address = (spec or "processes").partition(":")
    opened = {"processes": lambda: _processes(jobs or 1), "dask": lambda: _dask(address), "mpi": _mpi}[name]
    with opened() as (executor, workers):
        yield executor, workers


# ---- processes -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _processes(jobs: int) -> Iterator[tuple[Executor, int]]:
    before = {child.pid for child in multiprocessing.active_children()}
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_start_worker)
    try:
        with _environment(BLAS_VARIABLES), _deaf():
            # a pool starts a process when work comes and none is idle: all of them start here, and inherit all this
            for _ in range(jobs):
                pool.submit(os.getpid)
        yield pool, jobs
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        _stop([child for child in multiprocessing.active_children() if child.pid not in before])
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _environment(names: Iterable[str]) -> Iterator[None]:
    added = [name for name in names if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Children started here do not hear Ctrl-C, which a terminal sends to all: their parent stops them in order."""
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)


def _stop(children: list[Any]) -> None:
    """SIGTERM until they are gone: one that is idle, or starts, goes at once, another when its file is removed."""
    end = time.monotonic() + _STOP_S
    while children and time.monotonic() < end:
        for child in children:
            child.terminate()
        wait_for([child.sentinel for child in children], timeout=0.25)
        children = [child for child in children if child.is_alive()]
    for child in children:
        child.kill()


def _start_worker() -> None:
    """First in a worker process: SIGTERM removes temporary files on its way out, and so does the parent's death."""
    global _in_pool
    _in_pool = True
    signal.signal(signal.SIGTERM, _leave)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()


def _leave(number: int, frame: FrameType | None) -> None:
    if not _busy:
        os._exit(128 + number)
    sys.exit(128 + number)


def _follow(parent: int) -> None:
    """A parent that was killed says nothing: its workers would wait for work for ever."""
    wait_for([parent])
    end = time.monotonic() + _STOP_S
    while time.monotonic() < end:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.25)
    os._exit(128 + signal.SIGTERM)


# ---- clusters --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _dask(address: str) -> Iterator[tuple[Executor, int]]:
    from distributed import Client

    for name in list(logging.root.manager.loggerDict):  # what they log is told here, in one line
        if name.partition(".")[0] in ("distributed", "tornado"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        client = Client(address, timeout=_DASK_WAIT_S, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:  # TimeoutError is an OSError
        raise InputError(f"--executor dask:{address}: no scheduler answers there ({_first_line(error)})") from None
    with client:
        try:
            client.wait_for_workers(1, timeout=_DASK_WAIT_S)
        except TimeoutError:
            raise InputError(
                f"--executor dask:{address}: the scheduler has no worker; start some ('dask worker {address}')"
            ) from None
        _check_dask_workers(client, address)
        executor = client.get_executor(pure=False)  # impure: a shard's file may be gone though its result is known
        left = threading.Event()
        threading.Thread(target=_watch_dask, args=(client, executor, left), daemon=True).start()
        try:
            yield executor, sum(client.nthreads().values())
        finally:
            left.set()
            executor.shutdown(wait=False)


def _check_dask_workers(client: Any, address: str) -> None:
    """A worker without this package dies of the first task that it is given, and the next one after it."""
    found = client.run(exec, "import kdtr_cli", on_error="return")
    for worker, error in found.items():
        if isinstance(error, Exception):
            raise InputError(
                f"--executor dask:{address}: the worker {worker} can't load kdtr ({_first_line(error)}); "
                "install it where the workers run"
            )


def _watch_dask(client: Any, executor: Executor, left: threading.Event) -> None:
    """Without any worker Dask waits for ever for new ones; a gate must end."""
    alone_since = None
    while not left.wait(_DASK_LOOK_S):
        try:
            workers = client.nthreads()
        except Exception:  # the scheduler is gone, which the futures say
            return
        now = time.monotonic()
        alone_since = None if workers else alone_since or now
        if alone_since is not None and now - alone_since >= _DASK_ALONE_S:
            executor.shutdown(wait=False)
            return


@contextlib.contextmanager
def _mpi() -> Iterator[tuple[Executor, int]]:
    from mpi4py import MPI
    from mpi4py.futures import MPIPoolExecutor

    # outside its launcher the pool would start processes of its own, or every rank would lead
    if "mpi4py.run" not in sys.modules or MPI.COMM_WORLD.Get_size() < 2:
        raise InputError(
            "--executor mpi works under mpi4py's launcher with two processes at least (one leads, the others work): "
            "mpiexec -n 5 python -m mpi4py.futures -m kdtr_cli …"
        )
    with MPIPoolExecutor() as executor:
        yield executor, executor.num_workers


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

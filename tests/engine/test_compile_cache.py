"""The compile cache: whose folder it may be, when an entry is loaded, and what a damaged one does."""

import hashlib
import multiprocessing
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr_cli.engine.compile_cache import CompileCache, cache_folder, cache_key, open_cache
from kdtr_cli.engine.devices.cpu import CpuDevice
from kdtr_cli.errors import DeviceError, InputError

CU = Path(__file__).parent / "cu"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KDTR_CACHE_DIR", str(tmp_path / "cache"))
    return open_cache()


def count(payload, calls):
    def make():
        calls.append(1)
        return payload

    return make


# ---- entries ---------------------------------------------------------------------------------------------------------


def test_an_entry_is_built_once_and_comes_back_as_it_went(cache):
    calls = []
    paths = {cache.build("k", ".so", count(b"payload", calls)) for _ in range(3)}
    assert len(calls) == len(paths) == 1
    assert paths.pop().read_bytes().startswith(b"payload")
    assert cache.payload("k", ".so") == b"payload"
    assert cache.payload("k", ".cubin") is None
    assert cache.payload("other", ".so") is None


def damages():
    yield "a bit flipped", lambda b: bytes([b[0] ^ 1]) + b[1:]
    yield "a bit of the digest flipped", lambda b: b[:-1] + bytes([b[-1] ^ 1])
    yield "cut short", lambda b: b[:-1]
    yield "cut to half", lambda b: b[: len(b) // 2]
    yield "empty", lambda b: b""
    yield "no trailer", lambda b: b[:-40]
    yield "grown", lambda b: b + b"x"


@pytest.mark.parametrize("damage", [d for _, d in damages()], ids=[n for n, _ in damages()])
def test_a_damaged_entry_is_not_loaded_but_built_again(cache, damage):
    calls = []
    path = cache.build("k", ".so", count(b"payload" * 9, calls))
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get("k", ".so") is None
    assert cache.payload("k", ".so") is None
    assert cache.build("k", ".so", count(b"payload" * 9, calls)) == path
    assert len(calls) == 2
    assert cache.payload("k", ".so") == b"payload" * 9


def test_an_entry_under_another_entrys_name_is_not_loaded(cache):
    path = cache.put("mine", ".so", b"payload")
    path.rename(cache.path("yours", ".so"))
    assert cache.get("yours", ".so") is None
    cache.path("yours", ".so").rename(cache.path("mine", ".cubin"))
    assert cache.get("mine", ".cubin") is None


def test_a_build_that_fails_leaves_nothing(cache):
    def broken():
        raise DeviceError("no")

    with pytest.raises(DeviceError):
        cache.build("k", ".so", broken)
    assert cache.get("k", ".so") is None
    assert cache.stats().entries == 0


def test_a_write_that_fails_leaves_no_temporary_file(cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        DeviceError, match=r"cannot write the compile cache .*: No space left on device; set KDTR_CACHE_DIR"
    ):
        cache.put("k", ".so", b"payload")
    assert not [p for p in cache.folder.iterdir() if not p.name.startswith("lock-")]


def test_statistics_count_entries_and_bytes(cache):
    assert (cache.stats().entries, cache.stats().bytes) == (0, 0)
    cache.build("a", ".so", lambda: b"x" * 100)
    cache.build("b", ".cubin", lambda: b"x" * 50)
    stats = cache.stats()
    assert (stats.folder, stats.entries, stats.bytes) == (cache.folder, 2, 150 + 2 * 40)


@given(st.lists(st.text() | st.binary(), max_size=4), st.lists(st.text() | st.binary(), max_size=4))
def test_keys_differ_whenever_their_parts_differ(a, b):
    as_bytes = [[p.encode("utf-8", "surrogatepass") if isinstance(p, str) else p for p in parts] for parts in (a, b)]
    keys = [cache_key(*parts) for parts in as_bytes]
    assert (keys[0] == keys[1]) == (as_bytes[0] == as_bytes[1])
    assert len(keys[0]) == 64
    assert cache_key("ab", "c") != cache_key("a", "bc") != cache_key("abc")


# ---- several processes -----------------------------------------------------------------------------------------------


def _build_slowly(folder, results):
    import time

    def make():
        time.sleep(0.3)
        results.put("built")
        return b"payload"

    path = CompileCache(folder).build("k", ".so", make)
    results.put(hashlib.sha256(path.read_bytes()).hexdigest())


def test_processes_that_want_the_same_entry_build_it_once(cache):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_build_slowly, args=(cache.folder, results)) for _ in range(3)]
    for w in workers:
        w.start()
    got = [results.get(timeout=60) for _ in range(4)]
    for w in workers:
        w.join(60)
    assert got.count("built") == 1
    assert len(set(got)) == 2


def test_without_file_locks_the_entry_is_built_all_the_same(cache, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert cache.build("k", ".so", lambda: b"x").exists()


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_the_folder_is_chosen_by_kdtr_cache_dir_then_xdg_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("KDTR_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("KDTR_CACHE_DIR")
    assert cache_folder() == tmp_path / "xdg" / "kdtr"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_folder() == tmp_path / "home" / ".cache" / "kdtr"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "kdtr"


def test_the_folder_is_made_for_its_owner_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("KDTR_CACHE_DIR", str(tmp_path / "a" / "b"))
    old = os.umask(0)
    try:
        cache = open_cache()
    finally:
        os.umask(old)
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert cache.note is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o720, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(monkeypatch, tmp_path, mode):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("KDTR_CACHE_DIR", str(folder))
    with pytest.raises(InputError) as e:
        open_cache()
    assert str(e.value) == f"others may write to the compile cache {folder}; run: chmod go-w {folder}"
    folder.chmod(0o755)  # readable by others is no danger
    assert open_cache().folder == folder


def test_a_folder_of_somebody_else_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("KDTR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InputError, match=rf"belongs to user {os.getuid()}, not to you; set KDTR_CACHE_DIR"):
        open_cache()


def test_a_cache_that_is_a_file_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        monkeypatch.setenv("KDTR_CACHE_DIR", str(tmp_path / name))
        with pytest.raises(InputError, match="KDTR_CACHE_DIR"):
            open_cache()


def test_a_home_that_cannot_be_written_gives_a_private_folder_and_a_note(monkeypatch, tmp_path):
    (tmp_path / "home").write_text("no folder")  # works for root too, whom no mode bit stops
    monkeypatch.delenv("KDTR_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cache = open_cache()
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert "\n" not in cache.note
    assert "for this run only" in cache.note
    assert "KDTR_CACHE_DIR" in cache.note
    assert cache.build("k", ".so", lambda: b"x").exists()
    with CpuDevice(threads=1) as d:
        assert d.notes == (d.cache.note,)
    # what it holds goes with the process
    script = (
        "from kdtr_cli.engine.compile_cache import open_cache\n"
        "cache = open_cache()\ncache.put('k', '.so', b'x')\nprint(cache.folder)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not Path(done.stdout.strip()).exists()


def test_an_unwritable_folder_falls_back_or_is_refused_if_it_was_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KDTR_CACHE_DIR", raising=False)
    assert "not writable" in open_cache().note
    monkeypatch.setenv("KDTR_CACHE_DIR", str(tmp_path))
    with pytest.raises(InputError, match="can't be written"):
        open_cache()


# ---- with a compiler -------------------------------------------------------------------------------------------------


def test_a_corrupted_kernel_is_compiled_again_not_loaded(monkeypatch, tmp_path):
    monkeypatch.setenv("KDTR_CACHE_DIR", str(tmp_path))
    with CpuDevice(threads=1) as d:
        path = d._build(CU / "intrinsics.cu")
    good = path.read_bytes()
    path.write_bytes(good[:100] + b"\xff" * 64 + good[164:])
    # in a process that has not loaded it
    script = (
        "import sys; from pathlib import Path; from kdtr_cli.engine.devices.cpu import CpuDevice\n"
        "print(CpuDevice(threads=1).kernel(Path(sys.argv[1]), 'fill').entry)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, CU / "intrinsics.cu"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "fill\n"
    assert path.read_bytes()[:164] == good[:164]


def test_the_key_of_a_kernel_changes_with_everything_that_its_code_depends_on(monkeypatch, tmp_path):
    monkeypatch.setenv("KDTR_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "k.cu"
    text = 'extern "C" __global__ void k(int* x) { x[0] = 1; }\n'
    file.write_text(text)
    from kdtr_cli.engine import host_compiler

    paths = []

    def build():
        host_compiler._find.cache_clear()
        with CpuDevice(threads=1) as d:
            paths.append(d._build(file))

    build()
    build()
    assert paths[0] == paths[1]
    file.write_text(text + "\n")
    build()
    file.write_text(text)
    for name, value in (("_EXACT", ("-O1", *host_compiler._EXACT[1:])), ("_LIBRARY", (*host_compiler._LIBRARY, "-g"))):
        with monkeypatch.context() as m:
            m.setattr(host_compiler, name, value)
            build()
    original = host_compiler.source_text
    with monkeypatch.context() as m:  # a changed header of the runtime
        m.setattr("kdtr_cli.engine.host_compiler.source_text", lambda *f: original(*f) + "\n// changed\n")
        build()
    with monkeypatch.context() as m:  # a changed builder
        m.setattr("kdtr_cli.engine.devices.cpu.builder_text", lambda: "changed")
        build()
    with monkeypatch.context() as m:  # a changed runtime
        m.setattr("kdtr_cli.engine.devices.cpu.source_text", lambda *f: original(*f) + "\n// changed\n")
        build()
    host_compiler._find.cache_clear()
    assert len(set(paths)) == len(paths) - 1

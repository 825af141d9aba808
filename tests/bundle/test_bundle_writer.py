"""All or nothing: what stands under the final name is a whole bundle, or what was there before."""

import errno
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kdtr_cli.bundle import BundleWriter, check_target, open_bundle
from kdtr_cli.errors import DeviceError, InputError

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]

#: A process that writes into the file named by its argument: one sequence, then it says so and acts on its orders.
CHILD = """
import importlib.util, os, pathlib, resource, signal, sys, time
spec = importlib.util.spec_from_file_location("forge", "tests/bundle/conftest.py")
forge = importlib.util.module_from_spec(spec)
spec.loader.exec_module(forge)
from kdtr_cli.bundle import BundleWriter
from kdtr_cli.errors import KdtrError
path, order = sys.argv[1:3]
if order.startswith("limit"):
    size = int(order.removeprefix("limit"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
try:
    with BundleWriter(path, "golden", force=True) as writer:
        writer.add_config("{}")
        for sequence in forge.make_sequences(3, n_tokens=40):
            writer.add_sequence(sequence)
        if order == "wait":
            print("ready", flush=True)
            time.sleep(60)
        writer.finish(forge.make_manifest())
except KdtrError as error:
    print(error, flush=True)
    sys.exit(int(error.exit_code))
"""


def start(path: Path, order: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), order], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def write_some(writer: BundleWriter, make) -> None:
    writer.add_config("{}")
    for sequence in make.sequences():
        writer.add_sequence(sequence)


def write(path: Path, make, before_finish: Callable[[], object], force: bool = False) -> None:
    """Write a bundle; call `before_finish` when the sequences are in."""
    with BundleWriter(path, "golden", force) as writer:
        write_some(writer, make)
        before_finish()
        writer.finish(make.manifest())


def stop(error: type[BaseException] = KeyboardInterrupt) -> None:
    raise error


def test_existing_file_without_force(bundle_path):
    before = bundle_path.read_bytes()
    with pytest.raises(InputError, match="exists; use --force"):
        BundleWriter(bundle_path, "golden")
    assert bundle_path.read_bytes() == before


def test_force_keeps_the_old_file_until_the_end(bundle_path, make, leftovers):
    old = bundle_path.read_bytes()
    with open_bundle(bundle_path) as reader, BundleWriter(bundle_path, "golden", force=True) as writer:
        write_some(writer, make)
        assert bundle_path.read_bytes() == old
        assert len(leftovers(bundle_path.parent)) == 2
        digest = writer.finish(make.manifest())
        assert bundle_path.read_bytes() != old
        assert reader.sequences[0].array("logits/exact").shape == (3, 37)  # whoever has it open keeps the old one
    with open_bundle(bundle_path) as bundle:
        assert bundle.manifest_sha256 == digest
    assert leftovers(bundle_path.parent) == ["golden.h5"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError, MemoryError])
def test_any_exception_leaves_nothing(tmp_path, make, leftovers, error):
    def look_and_stop():
        (temporary,) = leftovers(tmp_path)
        assert temporary.startswith(".b.h5.")
        assert temporary.endswith(".partial")
        raise error

    with pytest.raises(error):
        write(tmp_path / "b.h5", make, look_and_stop)
    assert leftovers(tmp_path) == []


def test_a_block_without_finish_leaves_nothing(tmp_path, make, leftovers):
    with BundleWriter(tmp_path / "b.h5", "golden") as writer:
        write_some(writer, make)
    assert leftovers(tmp_path) == []


def test_failed_force_keeps_the_old_file(bundle_path, make, leftovers):
    old = bundle_path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write(bundle_path, make, stop, force=True)
    assert bundle_path.read_bytes() == old
    assert leftovers(bundle_path.parent) == ["golden.h5"]


@pytest.mark.parametrize("at", ["fsync", "link", "unlink"])
def test_interrupt_while_finishing(tmp_path, make, leftovers, monkeypatch, at):
    """Ctrl-C in the last steps: a whole bundle or none, and never a temporary file."""
    original = getattr(os, at)

    def interrupted(*args, **kwargs):
        monkeypatch.setattr(os, at, original)
        raise KeyboardInterrupt

    path = tmp_path / "b.h5"
    with pytest.raises(KeyboardInterrupt):
        write(path, make, lambda: monkeypatch.setattr(os, at, interrupted))
    assert leftovers(tmp_path) == (["b.h5"] if at == "unlink" else [])
    if path.exists():
        with open_bundle(path) as bundle:
            assert len(bundle.sequences) == 2


def test_kill_leaves_no_final_file(tmp_path, leftovers):
    path = tmp_path / "b.h5"
    child = start(path, "wait")
    try:
        assert child.stdout.readline() == b"ready\n"
    finally:
        child.kill()
        child.communicate()
    assert not path.exists()
    (temporary,) = leftovers(tmp_path)
    with pytest.raises(InputError, match="interrupted kdtr left behind"):
        open_bundle(tmp_path / temporary)
    # under another name its content is no bundle either
    (tmp_path / temporary).rename(tmp_path / "renamed.h5")
    with pytest.raises(InputError, match=r"renamed\.h5"):
        open_bundle(tmp_path / "renamed.h5")


def test_kill_while_forcing_keeps_the_old_file(bundle_path):
    old = bundle_path.read_bytes()
    child = start(bundle_path, "wait")
    try:
        assert child.stdout.readline() == b"ready\n"
    finally:
        child.kill()
        child.communicate()
    assert bundle_path.read_bytes() == old


def test_sigint_removes_the_temporary_file(tmp_path, leftovers):
    child = start(tmp_path / "b.h5", "wait")
    assert child.stdout.readline() == b"ready\n"
    time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    assert child.returncode != 0
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("room", [0, 100, 2500, 9_000, 40_000, -100, -1])
def test_no_space_left(tmp_path, make, leftovers, room):
    """A file that can't grow (the limit is on its size: EFBIG; a full disk is ENOSPC and goes the same way).

    room: bytes there are, or where negative, that are missing to the whole.
    """
    if room < 0:
        with BundleWriter(tmp_path / "whole.h5", "golden") as writer:
            writer.add_config("{}")
            for sequence in make.sequences(3, n_tokens=40):
                writer.add_sequence(sequence)
            writer.finish(make.manifest())
        room += (tmp_path / "whole.h5").stat().st_size
        (tmp_path / "whole.h5").unlink()
    child = start(tmp_path / "b.h5", f"limit{room}")
    out, err = child.communicate(timeout=30)
    assert child.returncode == 3, (out, err)  # and no crash of libhdf5 at exit
    assert out.decode().count("\n") == 1
    assert "b.h5: cannot write the bundle: File too large" in out.decode()
    assert err == b""
    assert leftovers(tmp_path) == []


def test_a_disk_that_fails_to_sync(tmp_path, make, leftovers, monkeypatch):
    def fail(fd):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DeviceError, match="cannot write the bundle: Input/output error"):
        write(tmp_path / "b.h5", make, lambda: None)
    assert leftovers(tmp_path) == []


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path, make, leftovers):
    path = tmp_path / "b.h5"
    with pytest.raises(InputError, match="exists; use --force"):
        write(path, make, lambda: path.write_text("somebody else's"))
    assert path.read_text() == "somebody else's"
    assert leftovers(tmp_path) == ["b.h5"]


def test_the_race_for_the_name_has_one_winner(tmp_path, make, monkeypatch, leftovers):
    """Even between the last look and the naming itself."""
    path = tmp_path / "b.h5"
    original = os.link

    def late(*args, **kwargs):
        path.write_text("somebody else's")
        return original(*args, **kwargs)

    with pytest.raises(InputError, match="exists; use --force"):
        write(path, make, lambda: monkeypatch.setattr(os, "link", late))
    assert path.read_text() == "somebody else's"
    assert leftovers(tmp_path) == ["b.h5"]


def test_file_systems_without_hard_links(tmp_path, make, monkeypatch, leftovers):
    def no_links(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with BundleWriter(tmp_path / "b.h5", "golden") as writer:
        write_some(writer, make)
        writer.finish(make.manifest())
    assert leftovers(tmp_path) == ["b.h5"]


def test_without_hard_links_the_last_look_still_counts(tmp_path, make, monkeypatch):
    def no_links(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "b.h5"
    with pytest.raises(InputError, match="exists; use --force"):
        write(path, make, lambda: path.write_text("somebody else's"))
    assert path.read_text() == "somebody else's"


def test_a_temporary_file_of_the_same_name_is_somebody_elses(tmp_path, make, monkeypatch):
    monkeypatch.setattr(secrets, "token_hex", lambda size: "00" * size)
    other = tmp_path / ".b.h5.00000000.partial"
    other.write_text("being written")
    with pytest.raises(InputError, match="File exists"):
        write(tmp_path / "b.h5", make, stop)
    assert other.read_text() == "being written"


def test_targets_that_are_refused_before_any_work(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "fifo")
    cases = {
        folder: "is a folder",
        tmp_path / "link": "is a symbolic link",
        tmp_path / "dangling": "is a symbolic link",
        tmp_path / "fifo": "is a special file",
        Path("/dev/null"): "is a special file",
        tmp_path / "absent" / "b.h5": "does not exist; create it first",
        tmp_path / "file" / "b.h5": "Not a directory",
        tmp_path / ("x" * 300): "File name too long",
        f"{folder}/new/": "not a file name",
        "": "not a file name",
        tmp_path / "nul\0byte": "null byte",
    }
    for path, message in cases.items():
        with pytest.raises(InputError, match=message) as caught:
            BundleWriter(path, "golden", force=True)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(os, "access", lambda *args, **kwargs: False)
    with pytest.raises(InputError, match="no permission"):
        check_target(folder / "b.h5", force=True)


def test_a_folder_that_refuses_at_the_last_moment(tmp_path, monkeypatch):
    """Access said yes, opening says no (a read-only mount, an ACL)."""

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InputError, match="Permission denied"), BundleWriter(tmp_path / "b.h5", "golden"):
        pass


def test_long_names_are_possible(tmp_path, make, leftovers):
    name = "é" * 125 + ".h5"  # 253 bytes of 255
    with BundleWriter(tmp_path / name, "golden") as writer:
        write_some(writer, make)
        writer.finish(make.manifest())
    assert leftovers(tmp_path) == [name]


def test_the_file_gets_the_users_mode(tmp_path, make):
    mask = os.umask(0o027)
    try:
        path = make.bundle(tmp_path / "b.h5")
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_bundle_named_in_the_current_folder(tmp_path, make, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make.bundle(Path("b.h5"))
    with open_bundle("b.h5") as bundle:
        assert bundle.kind == "golden"

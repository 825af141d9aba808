"""The compile cache: built kernels in the user's cache folder, verified before they are loaded.

An entry is one file: what the compiler made, then a trailer of 40 bytes (``kdtrcc01`` and the SHA-256 of key, suffix
and payload). A loader of ELF files does not look past the sections, so a shared library is loaded from its entry as it
lies. Writing goes through a temporary name in the same folder and a rename: a reader sees a whole entry or none, a torn
or altered one does not match its digest and is built again. Two processes that want the same entry wait for each other
by a file lock, where the file system has locks, so that a test run over several workers compiles once.
"""

import atexit
import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kdtr_cli.errors import DeviceError, InputError

__all__ = ["CacheStats", "CompileCache", "cache_folder", "cache_key", "open_cache"]

_MAGIC = b"kdtrcc01"
_TRAILER = len(_MAGIC) + 32
_ENTRY = "entry-"


@dataclass(frozen=True)
class CacheStats:
    """What ``kdtr doctor`` shows: the folder, the number of entries and their bytes on disk."""

    folder: Path
    entries: int
    bytes: int


def cache_key(*parts: str | bytes) -> str:
    """SHA-256 (hex) over the parts, each preceded by its length, so that no two lists of parts collide."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def cache_folder() -> Path:
    """$KDTR_CACHE_DIR, else $XDG_CACHE_HOME/kdtr, else ~/.cache/kdtr. Nothing is created."""
    if named := os.environ.get("KDTR_CACHE_DIR"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG rule: a relative path there is to be ignored
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kdtr"


class CompileCache:
    """A folder of entries named by key and suffix (".so", ".cubin").

    ``note`` is None, or one line for the user when the folder is not the usual one.
    """

    def __init__(self, folder: Path, note: str | None = None) -> None:
        self.folder = folder
        self.note = note

    def path(self, key: str, suffix: str) -> Path:
        """Where the entry lies, or would lie."""
        return self.folder / f"{_ENTRY}{key}{suffix}"

    def get(self, key: str, suffix: str) -> Path | None:
        """The path of a verified entry; None if there is none or its digest does not match."""
        path = self.path(key, suffix)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        payload, trailer = data[:-_TRAILER], data[-_TRAILER:]
        return path if trailer == _trailer(key, suffix, payload) else None

    def payload(self, key: str, suffix: str) -> bytes | None:
        """What the compiler made, verified; None if there is no such entry or its digest does not match."""
        try:
            data = self.path(key, suffix).read_bytes()
        except OSError:
            return None
        payload, trailer = data[:-_TRAILER], data[-_TRAILER:]
        return payload if trailer == _trailer(key, suffix, payload) else None

    def put(self, key: str, suffix: str, payload: bytes) -> Path:
        """Writes an entry: whole, or not at all. DeviceError if the folder does not take it."""
        path = self.path(key, suffix)
        try:
            handle, temporary = tempfile.mkstemp(prefix=".writing-", dir=self.folder)
            try:
                with os.fdopen(handle, "wb") as f:
                    f.write(payload)
                    f.write(_trailer(key, suffix, payload))
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as e:
            raise DeviceError(
                f"cannot write the compile cache {self.folder}: {e.strerror}; set KDTR_CACHE_DIR to a folder with room"
            ) from e
        return path

    def build(self, key: str, suffix: str, make: Callable[[], bytes]) -> Path:
        """The entry's path; ``make`` is called for its payload if there is no good entry."""
        if found := self.get(key, suffix):
            return found
        with self._lock(key):
            # somebody else may have built it while we waited
            return self.get(key, suffix) or self.put(key, suffix, make())

    def stats(self) -> CacheStats:
        sizes = []
        with contextlib.suppress(OSError):
            sizes = [e.stat().st_size for e in os.scandir(self.folder) if e.name.startswith(_ENTRY)]
        return CacheStats(self.folder, len(sizes), sum(sizes))

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """One builder at a time for keys that share a lock file; where there are no locks (NFS) both build."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                f = stack.enter_context(open(self.folder / f"lock-{key[:2]}", "a"))
                fcntl.flock(f, fcntl.LOCK_EX)
            yield


def open_cache() -> CompileCache:
    """The user's cache, created with mode 0700 if need be.

    A folder that is not ours, or that others may write to, is an InputError: somebody else could put code there that we
    would run. A home that can't be written falls back to a private temporary folder, removed at exit, with a note; a
    KDTR_CACHE_DIR that can't be written is an InputError, since it was asked for.
    """
    folder = cache_folder()
    asked = "KDTR_CACHE_DIR" in os.environ
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.stat(folder)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as e:
        if asked:
            raise InputError(
                f"KDTR_CACHE_DIR={folder} can't be used: {e.strerror}; name a folder that you can write to"
            ) from e
        return _temporary(f"{folder}: {e.strerror}")
    if not stat.S_ISDIR(found.st_mode):
        raise InputError(f"the compile cache {folder} is not a folder; set KDTR_CACHE_DIR to one of your own")
    if found.st_uid != os.geteuid():
        raise InputError(
            f"the compile cache {folder} belongs to user {found.st_uid}, not to you; "
            "set KDTR_CACHE_DIR to a folder of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InputError(f"others may write to the compile cache {folder}; run: chmod go-w {folder}")
    if not writable:
        if asked:
            raise InputError(f"KDTR_CACHE_DIR={folder} can't be written; name a folder that you can write to")
        return _temporary(f"{folder}: not writable")
    return CompileCache(folder)


def _temporary(why: str) -> CompileCache:
    folder = tempfile.mkdtemp(prefix="kdtr-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return CompileCache(
        Path(folder), f"compiled kernels are kept for this run only ({why}); set KDTR_CACHE_DIR to keep them"
    )


def _trailer(key: str, suffix: str, payload: bytes) -> bytes:
    # key and suffix are in it: an entry copied to another key's name does not verify
    return _MAGIC + hashlib.sha256(f"{key}{suffix}\n".encode() + payload).digest()

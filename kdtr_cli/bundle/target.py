"""The place that a bundle is written to: is it free, what went wrong there, and the last step, its final name."""

import contextlib
import errno
import os
import re
import stat
from pathlib import Path

from kdtr_cli.errors import DeviceError, InputError, KdtrError

__all__ = ["cannot_write", "check_target", "publish", "sync_folder"]

#: What the path that the user gave causes (exit 2, as docs/cli.md says); a full or broken disk is a failure (exit 3).
_PATH_ERRORS = (
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


def cannot_write(path: Path, error: Exception) -> KdtrError:
    """The one line for what h5py or the system raised while `path` was written: InputError where the path is at fault,
    DeviceError where the disk is."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        found = re.search(r"errno = (\d+)", str(error))  # how HDF5 words what the system told it
        number = int(found[1]) if found else None
    if isinstance(error, ValueError):
        return InputError(f"{path}: cannot write the bundle: {error}")
    if number is None:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return DeviceError(f"{path}: cannot write the bundle: {reason}")
    if number in _PATH_ERRORS:
        return InputError(f"{path}: cannot write the bundle: {os.strerror(number)}; choose another place")
    remedy = {
        errno.ENOSPC: "free some space or choose another folder",
        errno.EDQUOT: "free some space or choose another folder",
        errno.EFBIG: "the system or 'ulimit -f' allows no larger file here",
    }.get(number, "choose another folder")
    return DeviceError(f"{path}: cannot write the bundle: {os.strerror(number)}; {remedy}")


def check_target(path: str | Path, force: bool) -> Path:
    """Say whether a bundle could be written to `path`, before any work; returns the path.

    InputError: it exists and `force` is off, is no regular file (or a symbolic link), its folder is missing or
    can't be written to.
    """
    ends_open = str(path).endswith(os.sep)
    path = Path(path)
    folder = path.parent
    if ends_open or path.name in ("", ".", ".."):
        raise InputError(f"{path}: not a file name; name the bundle to write")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        mode = None
    except (OSError, ValueError) as error:
        raise cannot_write(path, error) from error
    if mode is not None:
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a symbolic link" if stat.S_ISLNK(mode) else "a special file"
            raise InputError(f"{path} is {kind}; a bundle is written to a regular file")
        if not force:
            raise InputError(f"{path} exists; use --force to overwrite it")
    if not folder.is_dir():
        raise InputError(f"{path}: the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{path}: no permission to write in the folder {folder}")
    return path


def publish(temporary: Path, path: Path, force: bool) -> None:
    """Give a finished, synced file its final name and sync the folder. Without force never over a file that appeared
    in the meantime. When this returns, `temporary` is gone; if it raises, the caller removes it where it still is."""
    check_target(path, force)
    linked = False
    if not force:
        try:
            os.link(temporary, path)
            linked = True
        except FileExistsError:
            raise InputError(f"{path} exists; use --force to overwrite it") from None
        except OSError:
            pass  # a file system without hard links: check_target above is all that can be done
    if linked:
        os.unlink(temporary)
    else:
        os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the file system can say so."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # some network file systems can't sync a folder; the data themselves are safe by now
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)

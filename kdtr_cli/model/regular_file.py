"""Opening a file that a stranger made: only a regular file, so that no FIFO and no device keeps kdtr waiting."""

import os
import stat
from pathlib import Path

from kdtr_cli.errors import InputError

__all__ = ["open_regular"]


def open_regular(path: Path) -> int:
    """A descriptor to read from, which the caller closes. Links are followed: the hub's cache is made of them.

    InputError for a path that is missing or cannot be opened, and for a folder, a FIFO, a socket or a device.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO without a writer opens at once
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InputError(f"{path}: not a regular file")
    return handle

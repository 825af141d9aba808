"""Exit codes and the three kinds of error, in one place.

Everything that can go wrong ends as one of these with a one-line message that says what is wrong, where, and what to
do. The command line prints the line on standard error and leaves with the error's exit code; it never prints a
traceback unless asked with ``--debug``.
"""

from enum import IntEnum

__all__ = ["DeviceError", "EngineError", "Exit", "InputError", "KdtrError"]


class Exit(IntEnum):
    """What the process says to the shell. Stable: CI pipelines depend on these numbers."""

    AGREES = 0  #: the run agrees with the golden, or the command did what was asked
    DIFFERS = 1  #: the run differs from the golden; nothing else ever exits with 1
    UNJUDGED = 2  #: bad input or evidence that cannot be judged
    FAILED = 3  #: kdtr itself, the device or a foreign engine failed


class KdtrError(Exception):
    """An error with a one-line message for the user. Raise one of the subclasses."""

    exit_code: Exit = Exit.FAILED


class InputError(KdtrError):
    """The user's input can't be used: a flag, a file, a checkpoint, a bundle, a value out of range (exit 2)."""

    exit_code = Exit.UNJUDGED


class DeviceError(KdtrError):
    """A device, a compiler or kdtr's own engine failed (exit 3)."""

    exit_code = Exit.FAILED


class EngineError(KdtrError):
    """A foreign engine failed, or what it wrote can't be used as its answer (exit 3)."""

    exit_code = Exit.FAILED

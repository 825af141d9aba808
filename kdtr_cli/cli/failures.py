"""From any exception to the one line and the exit code that the user gets.

The rules stand in docs/cli.md. Exit code 1 means "the run differs" and nothing else, so no exception may ever lead to
it: click's own default for its exceptions, 1, is replaced here.
"""

import os
import signal
from pathlib import Path

import click
from click.core import ParameterSource

import kdtr_cli
from kdtr_cli.errors import Exit, KdtrError

__all__ = ["Terminated", "explain", "one_line"]

#: The operating system's errors that a path given by the user causes (exit 2); any other is a failure (exit 3).
_PATH_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)


class Terminated(KeyboardInterrupt):
    """A signal asked the process to stop. A KeyboardInterrupt, so that no `except Exception` swallows it and every
    `finally` and context manager on the way out removes its temporary file."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def one_line(text: str) -> str:
    """`text` as one line that can't disturb a terminal: runs of white space are one space, other control characters
    and lone surrogates (from file names that are not UTF-8) are shown as escapes."""
    joined = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in joined)


def explain(error: BaseException) -> tuple[Exit, str]:
    """The exit code and the message, one line without the `kdtr: error: ` before it, for an exception."""
    try:
        code, message = _explain(error)
    except Exception:  # an exception of a stranger's library whose own text fails must not end as a traceback
        code, message = Exit.FAILED, f"internal error: {type(error).__name__} (run again as 'kdtr --debug ...')"
    return code, one_line(message)


def _explain(error: BaseException) -> tuple[Exit, str]:
    match error:
        case KdtrError():
            return error.exit_code, str(error) or type(error).__name__
        case click.UsageError():
            return Exit.UNJUDGED, _usage(error)
        case click.ClickException():
            return Exit.UNJUDGED, error.format_message()
        case Terminated() if error.number != signal.SIGINT:
            return Exit.FAILED, f"stopped by {signal.Signals(error.number).name} before the end{_notes(error)}"
        case KeyboardInterrupt() | click.Abort():
            return Exit.FAILED, f"interrupted before the end{_notes(error)}"
        case BrokenPipeError():
            return Exit.FAILED, "the reader of the output left before everything was written"
        case MemoryError():
            how = "use fewer or shorter prompts, or 'kdtr golden --memory-limit' for a large model"
            return Exit.FAILED, f"out of memory{': ' if str(error) else ''}{error}; {how}"
        case OSError():
            return _operating_system(error)
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Exit.FAILED, f"internal error: {what} (run again as 'kdtr --debug ...' to see where)"


def _notes(error: BaseException) -> str:
    return "".join(f"; {note}" for note in getattr(error, "__notes__", ()))


def _usage(error: click.UsageError) -> str:
    message = error.format_message().strip()
    if error.ctx is None:
        return message
    if isinstance(error, click.NoSuchOption) and error.option_name in ("--debug", "--no-config", "--version"):
        return f"{error.option_name} stands before the command: 'kdtr {error.option_name} ...'"
    param = getattr(error, "param", None)
    if (
        isinstance(param, click.Option)
        and error.ctx.get_parameter_source(param.name or "") is ParameterSource.DEFAULT_MAP
    ):
        return f"{message} (set by [tool.kdtr] in pyproject.toml; --no-config ignores it)"
    return f"{message} (see '{error.ctx.command_path} --help')"


def _operating_system(error: OSError) -> tuple[Exit, str]:
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return Exit.FAILED, reason
    names = [os.fsdecode(n) if isinstance(n, (str, bytes)) else str(n) for n in (error.filename, error.filename2) if n]
    where = " -> ".join(names)
    package = Path(kdtr_cli.__file__).parent.parent
    own = any(Path(n).is_relative_to(package / d) for n in names for d in ("kdtr_cli", "kernels_cu"))
    if own and isinstance(error, FileNotFoundError):
        return Exit.FAILED, f"{where}: {reason}: this installation of kdtr is incomplete; install it again"
    return (Exit.UNJUDGED if isinstance(error, _PATH_ERRORS) else Exit.FAILED), f"{where}: {reason}"

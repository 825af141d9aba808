"""The summary page of a GitHub Actions step: a file that steps append Markdown to."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from kdtr_cli.parity.results import Report
from kdtr_cli.report.markdown import report_markdown

__all__ = ["append_step_summary"]

#: GitHub refuses the whole page of a step that is larger.
MAX_BYTES = 1024 * 1024


def append_step_summary(path: str | Path, report: Report) -> str | None:
    """Append the report to the file at `path`, all of it or nothing. Returns one line on why it could not; the verdict
    is in the report, so a page that is missing changes nothing."""
    name = f"GITHUB_STEP_SUMMARY {os.fspath(path)!r}"
    try:
        # not to wait for the reader of a pipe; one process appends at a time
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except (OSError, ValueError) as error:
        return f"{name} can't be written to: {getattr(error, 'strerror', None) or error}"
    with open(fd, "r+b", buffering=0):
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a regular file: no summary is written"
        size = status.st_size
        try:
            before = b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""
            before += b"\n" if size else b""  # a heading of its own
            text = report_markdown(report, max(0, MAX_BYTES - size - len(before)))
            if not text:
                return f"{name} holds {size} bytes: no room for a summary (GitHub takes {MAX_BYTES} of a step)"
            _write(fd, before + text.encode("ascii"))
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(fd, size)
            return f"{name} can't be written to: {error.strerror or error}"
    return None


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]

"""The two consoles: results on standard output, notes and progress on standard error.

Colours, boxes and progress bars are for terminals. What goes into a pipe or a file is plain, and no line is wrapped
or cut. ``NO_COLOR`` (not empty) wins over ``FORCE_COLOR``; ``TERM=dumb`` means no escape sequence at all. Text is
printed as it is: a name like ``[red]`` or ``:smile:`` in the user's data is no markup.
"""

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

__all__ = ["notes", "print_table", "progress", "results"]

#: The width given to rich where nobody sees columns: wide enough that no line is ever wrapped or cut.
_ENDLESS = 100_000


class _Console(Console):
    """rich's console, except for one thing."""

    def on_broken_pipe(self) -> None:
        # rich would leave with exit code 1 here, which is kdtr's word for "the run differs".
        raise


def results() -> Console:
    """A console on the current `sys.stdout`. Make one when printing, don't keep it over a change of `sys.stdout`."""
    return _console(stderr=False)


def notes() -> Console:
    """A console on the current `sys.stderr`, for what is no result: progress, warnings, hints."""
    return _console(stderr=True)


def progress(estimate: bool = False) -> Progress:
    """A progress display on standard error that shows itself on a capable terminal only and leaves nothing behind.

    ``estimate``: the share of the work and the time that is left, in place of counts.

    Use: ``with progress() as bar: task = bar.add_task("decode", total=24); ...; bar.advance(task)``.
    """
    console = notes()
    counts = [TaskProgressColumn(), TimeRemainingColumn()] if estimate else [MofNCompleteColumn()]
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *counts,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not (_is_terminal(sys.stderr) and console.is_terminal) or console.is_dumb_terminal,
    )


def print_table(console: Console, header: Sequence[str], rows: Sequence[Sequence[object]], right: str = "") -> None:
    """Print `rows` (each as long as `header`) below `header`: a rich table on a terminal, columns of plain text
    elsewhere. `right` has an ``r`` at the place of each column to be aligned to the right, e.g. ``"  r"``."""
    numeric = [right[i : i + 1] == "r" for i in range(len(header))]
    cells = [[str(cell) for cell in row] for row in rows]
    if console.is_terminal and not console.is_dumb_terminal:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name, r in zip(header, numeric, strict=True):
            table.add_column(name, justify="right" if r else "left", overflow="fold")
        for row in cells:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    for row in [list(header), *cells]:
        parts = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, numeric, strict=True)]
        console.print("  ".join(parts).rstrip())


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    seen = _is_terminal(stream)
    return _Console(
        stderr=stderr,
        color_system=None if plain else "auto",
        force_terminal=False if plain and not seen else None,
        width=None if seen else _ENDLESS,
        soft_wrap=not seen,
        markup=False,
        emoji=False,
        highlight=False,
    )


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (ValueError, OSError):  # closed, or no longer a file
        return False

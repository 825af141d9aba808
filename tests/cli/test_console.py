"""Colours, boxes and progress for terminals only; plain, unwrapped text for everything else."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import kdtr_cli

pytestmark = pytest.mark.quick

ROOT = Path(kdtr_cli.__file__).parents[1]

SCRIPT = """
import sys
from kdtr_cli.cli import console
what = sys.argv[1]
if what == "line":
    console.results().print("[red]a[/red] :smile: 'q' 1.0 " + "word " * 60 + "end")
elif what == "style":
    console.results().print("green", style="bold green")
elif what == "table":
    rows = [["a", 1], ["long name " * 12, 20_000]]
    console.print_table(console.results(), ["name", "bytes"], rows, right=" r")
elif what == "notes":
    console.notes().print("note")
elif what == "progress":
    with console.progress() as bar:
        task = bar.add_task("[decode]", total=3)
        for _ in range(3):
            bar.advance(task)
    print("done")
"""


def environment(**more):
    dropped = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **more}


def piped(what, **more):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, what], env=environment(**more), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def on_terminal(what, **more):
    """What the script writes to a terminal of 80 columns, standard output and error together."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-c", SCRIPT, what]
    process = subprocess.Popen(command, env=environment(**more), stdout=follower, stderr=follower, close_fds=True)
    os.close(follower)
    seen = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:  # how Linux tells that the other side is closed
            break
        if not block:
            break
        seen += block
    os.close(leader)
    assert process.wait(timeout=60) == 0, seen
    return seen.decode()


@pytest.mark.parametrize("more", [{}, {"COLUMNS": "20"}, {"TERM": "dumb"}])
def test_a_line_in_a_pipe_is_neither_wrapped_nor_read_as_markup(more):
    out, err = piped("line", **more)
    assert out == "[red]a[/red] :smile: 'q' 1.0 " + "word " * 60 + "end\n"
    assert err == ""


def test_a_table_in_a_pipe_is_columns_of_plain_text():
    out, _ = piped("table")
    name = "long name " * 12
    assert out.splitlines() == [
        "name".ljust(120) + "  bytes",
        "a".ljust(120) + "      1",
        name + "  20000",
    ]


def test_a_table_forced_into_a_pipe_is_not_cut_either():
    out, _ = piped("table", FORCE_COLOR="1", COLUMNS="40")
    assert "long name " * 11 in out


def test_a_table_on_a_terminal_fits_it_and_loses_nothing():
    out = on_terminal("table", NO_COLOR="1")
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("long") == 12
    assert "─" in out


def test_colours_are_for_terminals():
    assert piped("style")[0] == "green\n"
    assert "\x1b[1;32m" in on_terminal("style")


def test_no_color_wins_over_force_color():
    assert "\x1b[" in piped("style", FORCE_COLOR="1")[0]
    assert "\x1b[" not in piped("style", FORCE_COLOR="1", NO_COLOR="1")[0]
    assert "\x1b[" not in on_terminal("style", NO_COLOR="1", FORCE_COLOR="1")
    assert "\x1b[" in on_terminal("style", NO_COLOR="")


@pytest.mark.parametrize("what", ["style", "table", "progress"])
def test_a_dumb_terminal_gets_no_escape_sequence(what):
    assert "\x1b" not in on_terminal(what, TERM="dumb", FORCE_COLOR="1")


def test_notes_go_to_standard_error():
    assert piped("notes") == ("", "note\n")


def test_progress_shows_on_a_terminal_and_is_silent_elsewhere():
    assert piped("progress") == ("done\n", "")
    assert piped("progress", FORCE_COLOR="1") == ("done\n", "")
    assert "[decode]" in on_terminal("progress")

"""The process: exit codes, one-line errors, closed and full outputs, signals, lazy commands."""

import errno
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import kdtr_cli
from kdtr_cli.cli import main as entry
from kdtr_cli.cli.failures import Terminated, explain, one_line
from kdtr_cli.errors import DeviceError, Exit, InputError

pytestmark = pytest.mark.quick

ROOT = Path(kdtr_cli.__file__).parents[1]

#: A kdtr with a few commands more, each of which goes wrong (or not) in its own way.
DRIVER = '''
import os, sys, time
from pathlib import Path
import click
from rich.console import Console
from kdtr_cli.cli import console, main as entry
from kdtr_cli.errors import DeviceError, Exit, InputError

@entry.cli.command("say")
@click.argument("lines", type=int)
@click.option("--code", type=int, default=0)
@click.option("--how", default="echo")
@click.option("--mutter", is_flag=True)
@click.pass_context
def say(ctx, lines, code, how, mutter):
    if mutter:
        print("Grüße")
        sys.stderr.write("half a line")
    for i in range(lines):
        if how == "rich":
            console.results().print("x" * 100)
        elif how == "print":
            print("x" * 100)
        else:
            click.echo("x" * 100)
    ctx.exit(code)

@entry.cli.command("hold")
@click.argument("path")
@click.option("--slow-clean", is_flag=True)
def hold(path, slow_clean):
    """Hold a temporary file until told to stop."""
    Path(path).write_text("half")
    try:
        print("ready", flush=True)
        try:
            time.sleep(60)
        except Exception:
            print("swallowed", flush=True)
    finally:
        if slow_clean:
            print("cleaning", flush=True)
            time.sleep(0.4)
        os.unlink(path)

@entry.cli.command("open")
@click.argument("path")
def open_(path):
    """Open a file, tell its number, write into it by the numbers of the standard files."""
    with open(path, "w") as file:
        sys.stderr and print("number", file.fileno(), file=sys.stderr)
        for number in (0, 1, 2):
            try:
                os.write(number, b"stray")
            except OSError:
                pass

@entry.cli.command("fail")
@click.argument("kind")
def fail(kind):
    errors = {"input": lambda: InputError("the file is\\nbroken"), "device": lambda: DeviceError("no driver"),
              "zero": lambda: ZeroDivisionError("division by zero"), "memory": lambda: MemoryError(),
              "exit1": lambda: SystemExit(1), "exits": lambda: SystemExit("a word"),
              "differs": lambda: SystemExit(Exit.DIFFERS), "click": lambda: click.ClickException("odd"),
              "abort": lambda: click.Abort(), "eof": lambda: EOFError("no input")}
    raise errors[kind]()

if __name__ == "__main__":
    sys.exit(entry.main())
'''


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "driver.py"
    path.write_text(DRIVER)
    return path


def environment(**more):
    dropped = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "PYTHONUNBUFFERED", "_KDTR_COMPLETE")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **more}


def shell(driver, line, **more):
    """Run a line of shell in which $K is the driver. Returns (exit code, stdout, stderr)."""
    line = line.replace("$K", f"'{sys.executable}' '{driver}'")
    done = subprocess.run(
        ["bash", "-c", line], env=environment(**more), capture_output=True, text=True, timeout=60, cwd=driver.parent
    )
    return done.returncode, done.stdout, done.stderr


def invoke(*args):
    return CliRunner().invoke(entry.cli, list(args))


def assert_one_line(stderr, *words):
    assert stderr.startswith("kdtr: error: ")
    assert stderr.endswith("\n")
    assert stderr.count("\n") == 1
    for word in words:
        assert word in stderr


class TestExplain:
    @pytest.mark.parametrize(
        ("error", "code", "words"),
        [
            (InputError("g.h5: broken"), 2, ["g.h5: broken"]),
            (DeviceError("no driver"), 3, ["no driver"]),
            (click.ClickException("odd"), 2, ["odd"]),
            (click.FileError("x.txt", "gone"), 2, ["x.txt", "gone"]),
            (click.UsageError("what"), 2, ["what"]),
            (click.Abort(), 3, ["interrupted"]),
            (KeyboardInterrupt(), 3, ["interrupted"]),
            (Terminated(signal.SIGINT), 3, ["interrupted"]),
            (Terminated(signal.SIGTERM), 3, ["SIGTERM"]),
            (FileNotFoundError(errno.ENOENT, "No such file", "/u/a.h5"), 2, ["/u/a.h5", "No such file"]),
            (PermissionError(errno.EACCES, "Permission denied", "/u/a.h5"), 2, ["/u/a.h5", "Permission denied"]),
            (IsADirectoryError(errno.EISDIR, "Is a directory", b"/u"), 2, ["/u", "Is a directory"]),
            (OSError(errno.ENOSPC, "No space left on device", "/u/a.h5"), 3, ["/u/a.h5", "No space left"]),
            (PermissionError(errno.EPERM, "Operation not permitted"), 3, ["not permitted"]),
            (OSError("can't read"), 3, ["can't read"]),
            (BrokenPipeError(errno.EPIPE, "Broken pipe"), 3, ["reader"]),
            (MemoryError("Unable to allocate 8 GiB"), 3, ["out of memory", "8 GiB"]),
            (ZeroDivisionError("division"), 3, ["internal error: ZeroDivisionError: division", "--debug"]),
            (AssertionError(), 3, ["internal error: AssertionError ", "--debug"]),
            (EOFError("no input"), 3, ["EOFError"]),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
    )
    def test_code_and_words(self, error, code, words):
        got, line = explain(error)
        assert got == code
        assert all(word in line for word in words), line

    def test_both_names_of_a_failed_rename_are_told(self):
        _, line = explain(OSError(errno.EXDEV, "Invalid cross-device link", "a.tmp", None, "b.h5"))
        assert "a.tmp -> b.h5" in line

    def test_a_missing_file_of_the_package_is_no_fault_of_the_user(self):
        path = str(ROOT / "kernels_cu" / "gone.cu")
        code, line = explain(FileNotFoundError(errno.ENOENT, "No such file", path))
        assert code == Exit.FAILED
        assert "install" in line

    def test_an_exception_that_has_no_text_of_its_own_is_told_by_its_name(self):
        class Mute(Exception):
            def __str__(self):
                raise ValueError("not enough values to unpack")

        assert explain(Mute()) == (Exit.FAILED, "internal error: Mute (run again as 'kdtr --debug ...')")

    def test_no_exception_is_told_as_differs(self):
        def kinds(base):
            yield base
            for kind in base.__subclasses__():
                yield from kinds(kind)

        assert {InputError, Terminated, click.UsageError, FileNotFoundError} <= set(kinds(BaseException))
        seen = 0
        for kind in set(kinds(BaseException)):
            try:
                error = kind(signal.SIGTERM if kind is Terminated else "text")
            except Exception:
                continue
            seen += 1
            assert explain(error)[0] in (Exit.UNJUDGED, Exit.FAILED), kind
        assert seen > 50

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("a\n  b\r\tc", "a b c"),
            ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
            ("bad\udc80name", r"bad\udc80name"),
            ("Grüße 漢字 🙂", "Grüße 漢字 🙂"),
            ("a\u202eb\u2028c\x85d", "a\\u202eb c d"),
        ],
    )
    def test_one_line(self, text, line):
        assert one_line(text) == line


class TestErrors:
    @pytest.mark.parametrize(
        ("kind", "code", "word"),
        [
            ("input", 2, "the file is broken"),
            ("device", 3, "no driver"),
            ("zero", 3, "internal error: ZeroDivisionError: division by zero"),
            ("memory", 3, "out of memory"),
            ("exit1", 3, "exit code 1"),
            ("exits", 3, "a word"),
            ("click", 2, "odd"),
            ("abort", 3, "interrupted"),
            ("eof", 3, "EOFError"),
        ],
    )
    def test_every_exception_is_one_line_and_never_exit_1(self, driver, kind, code, word):
        got, out, err = shell(driver, f"$K fail {kind}")
        assert (got, out) == (code, "")
        assert_one_line(err, word)

    def test_only_a_stated_verdict_exits_1(self, driver):
        assert shell(driver, "$K fail differs") == (1, "", "")
        assert shell(driver, "$K say 0 --code 1") == (1, "", "")
        assert shell(driver, "$K say 0 --code 77")[0] == 3

    def test_debug_shows_the_traceback_and_the_same_code(self, driver):
        code, _, err = shell(driver, "$K --debug fail zero")
        assert code == 3
        assert "Traceback" in err
        assert err.splitlines()[-1].startswith("kdtr: error: internal error")

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["doktor"], ["doktor", "doctor", "kdtr --help"]),
            (["--nope"], ["--nope", "kdtr --help"]),
            (["--no-config", "nothing"], ["nothing"]),
            (["doctor", "--nope"], ["--nope", "kdtr doctor --help"]),
            (["doctor", "--format"], ["--format"]),
            (["doctor", "--debug"], ["before the command"]),
            (["doctor", "surplus"], ["surplus"]),
        ],
    )
    def test_a_usage_error_is_one_line_with_a_hint(self, args, words):
        result = invoke(*args)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert_one_line(result.stderr, *words)

    def test_no_command_is_no_success(self):
        result = invoke()
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "Commands:" in result.stderr

    def test_a_standard_error_that_cannot_be_written_changes_no_code(self, driver):
        for target in ("2>&-", "2>/dev/full"):
            assert shell(driver, f"$K fail input {target}")[0] == 2
            assert shell(driver, f"$K fail zero {target}")[0] == 3
            assert shell(driver, f"$K say 1 {target}")[0] == 0
        assert shell(driver, "$K say 1 --mutter 2>/dev/full")[0] == 0


class TestOutput:
    @pytest.mark.parametrize("how", ["echo", "print", "rich"])
    @pytest.mark.parametrize("lines", [1, 5000])
    @pytest.mark.parametrize("code", [0, 1])
    def test_a_reader_that_leaves_makes_it_exit_3(self, driver, how, lines, code):
        line = f"$K say {lines} --how {how} --code {code} | true; echo ${{PIPESTATUS[0]}}"
        # `true` may be slower than one line: then the line fits into the pipe. So wait until it has gone.
        line = line.replace("$K", "(sleep 0.2; exec $K").replace(" | true", ") | true")
        _, out, err = shell(driver, line)
        assert out == "3\n"
        assert_one_line(err, "reader")

    @pytest.mark.parametrize("how", ["echo", "print", "rich"])
    @pytest.mark.parametrize("lines", [1, 5000])
    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_a_full_disk_makes_it_exit_3(self, driver, how, lines, unbuffered):
        line = f"$K say {lines} --how {how} > /dev/full"
        code, _, err = shell(driver, line, PYTHONUNBUFFERED=unbuffered)
        assert code == 3
        assert_one_line(err, "No space left")

    def test_an_earlier_fault_keeps_its_code(self, driver):
        assert shell(driver, "$K fail input > /dev/full")[0] == 2

    @pytest.mark.parametrize("args", ["say 1", "--help", "--version", "doctor --help"])
    def test_a_closed_standard_output_makes_it_exit_3(self, driver, args):
        code, _, err = shell(driver, f"$K {args} >&-")
        assert code == 3
        assert_one_line(err, "standard output")

    @pytest.mark.parametrize("args", ["--help", "--version", "doctor --help"])
    def test_help_and_version_too_need_an_output(self, driver, args):
        code, _, err = shell(driver, f"$K {args} >/dev/full")
        assert code == 3
        assert_one_line(err, "standard output")

    def test_a_file_never_takes_the_number_of_a_standard_file(self, driver, tmp_path):
        path = tmp_path / "bundle"
        assert shell(driver, f"$K open '{path}' <&- 2>&-")[0] == 0
        assert path.read_bytes() == b""

    def test_a_locale_without_unicode_is_no_fault(self, driver):
        ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
        code, _, err = shell(driver, "$K Grüße", **ascii_only)
        assert code == 2
        assert_one_line(err, r"Gr\xfc\xdfe")
        assert shell(driver, "$K say 0 --mutter", **ascii_only) == (0, "Gr\\xfc\\xdfe\n", "half a line")


class TestSignals:
    def start(self, driver, path, *args, prefix=()):
        process = subprocess.Popen(
            [*prefix, sys.executable, str(driver), "hold", str(path), *args],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        assert path.exists()
        return process

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_removes_temporary_files_and_exits_3(self, driver, tmp_path, number):
        path = tmp_path / "half"
        process = self.start(driver, path)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 3
        assert not path.exists()
        assert_one_line(err, "before the end")
        assert "swallowed" not in out

    def test_a_second_signal_does_not_interrupt_the_cleaning(self, driver, tmp_path):
        path = tmp_path / "half"
        process = self.start(driver, path, "--slow-clean")
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "cleaning\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 3
        assert not path.exists()
        assert_one_line(err, "interrupted")

    def test_a_signal_that_the_caller_ignores_stays_ignored(self, driver, tmp_path):
        path = tmp_path / "half"
        process = self.start(driver, path, prefix=["nohup"])
        try:
            process.send_signal(signal.SIGHUP)
            time.sleep(0.3)
            assert process.poll() is None
            assert path.exists()
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)
        assert not path.exists()


class TestCommands:
    def test_version(self):
        result = invoke("--version")
        assert (result.exit_code, result.stdout) == (0, f"kdtr {kdtr_cli.__version__}\n")

    def test_python_m_is_the_same(self):
        done = subprocess.run(
            [sys.executable, "-m", "kdtr_cli", "--version"], env=environment(), capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, f"kdtr {kdtr_cli.__version__}\n", "")

    @pytest.mark.parametrize("flag", ["-h", "--help"])
    def test_help_lists_every_command(self, flag):
        result = invoke(flag)
        assert result.exit_code == 0
        for name, lazy in entry.COMMANDS.items():
            assert re.search(rf"^  {name} +{re.escape(lazy.help)}$", result.stdout, re.M), name

    def test_help_and_version_load_no_command_and_no_heavy_library(self):
        code = (
            "import sys\nfrom kdtr_cli.cli.main import cli\n"
            "for args in (['--help'], ['--version']):\n"
            "    try: cli.main(args)\n"
            "    except SystemExit as end: assert not end.code\n"
            "heavy = {'numpy', 'h5py', 'rich', 'cupy', 'safetensors', 'tokenizers'} & set(sys.modules)\n"
            "own = [m for m in sys.modules if m.startswith('kdtr_cli.') and m.split('.')[1] not in ('cli', 'errors')]\n"
            "print(heavy, own, file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
        assert done.stderr == "set() []\n"

    def test_a_command_that_cannot_be_loaded_takes_no_other_with_it(self):
        broken = {"broken": entry.Lazy("kdtr_cli.cli.no_such_module:broken", "Is broken."), **entry.COMMANDS}
        group = entry.LazyGroup("kdtr", lazy=broken)
        bad = CliRunner().invoke(group, ["broken"])
        assert bad.exit_code == 3
        assert_one_line(bad.stderr, "broken", "no_such_module", "install kdtr again")
        assert "internal" not in bad.stderr
        assert CliRunner().invoke(group, ["--help"]).exit_code == 0
        assert CliRunner().invoke(group, ["doctor", "--help"]).exit_code == 0

    @pytest.mark.parametrize("name", entry.COMMANDS)
    def test_the_table_agrees_with_the_command(self, name):
        module, _, attribute = entry.COMMANDS[name].target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert command.name == name
        assert command.get_short_help_str(limit=100) == entry.COMMANDS[name].help

    def test_every_command_and_option_stands_in_the_guide(self):
        text = (ROOT / "docs" / "cli.md").read_text()
        sections = dict(re.findall(r"^### `kdtr ([a-z ]+)`\n(.*?)(?=^##|\Z)", text, re.M | re.S))

        def missing(path, command):
            if isinstance(command, click.Group):
                for name, child in command.commands.items():
                    yield from missing(f"{path} {name}", child)
                return
            body = sections.get(path, "")
            for param in command.params:
                for opt in [*param.opts, *param.secondary_opts]:
                    if opt.startswith("--") and f"`{opt}" not in body and f"/{opt}" not in body:
                        yield f"{path} {opt}"

        context = click.Context(entry.cli)
        found = [m for n in entry.COMMANDS for m in missing(n, entry.cli.get_command(context, n))]
        assert not found

    @pytest.mark.parametrize("shell_name", ["bash", "zsh", "fish"])
    def test_completion_source(self, driver, shell_name):
        code, out, _ = shell(driver, "$K", _KDTR_COMPLETE=f"{shell_name}_source")
        assert code == 0
        assert f"_KDTR_COMPLETE={shell_name}_complete" in out

    def test_completion_knows_commands_and_their_options(self, driver):
        complete = {"_KDTR_COMPLETE": "bash_complete"}
        code, out, _ = shell(driver, "$K", COMP_WORDS="kdtr d", COMP_CWORD="1", **complete)
        assert code == 0
        assert out.split() == ["plain,diff", "plain,demo", "plain,doctor"]
        code, out, _ = shell(driver, "$K", COMP_WORDS="kdtr doctor --f", COMP_CWORD="2", **complete)
        assert (code, out) == (0, "plain,--format\n")

    def test_an_unknown_completion_request_is_no_verdict(self, driver):
        assert shell(driver, "$K", _KDTR_COMPLETE="bash_nonsense")[0] == 2

"""The command group `kdtr`, and the entry of the process.

Commands are loaded when they are called: `kdtr --help` and `kdtr --version` import none of them, and one whose
imports fail takes no other with it. Everything that ends a command ends in one of the exit codes 0 to 3 of
`kdtr_cli.errors.Exit`; what leads to which stands in `failures` and in docs/cli.md.
"""

import contextlib
import difflib
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TextIO

import click

from kdtr_cli import __version__
from kdtr_cli.cli import failures, settings
from kdtr_cli.errors import Exit, InputError, KdtrError

__all__ = ["COMMANDS", "Lazy", "LazyGroup", "cli", "main"]


class Lazy(NamedTuple):
    """A command that is loaded when it is called."""

    target: str  #: "module:object"
    help: str  #: its short help; a test keeps it equal to the command's own


COMMANDS: Mapping[str, Lazy] = {
    "golden": Lazy("kdtr_cli.cli.golden:golden", "Make reference tokens and logits from the NumPy model."),
    "run": Lazy("kdtr_cli.cli.run:run", "Run a golden's prompts through the CUDA engine."),
    "diff": Lazy("kdtr_cli.cli.diff:diff", "Judge a run against its golden."),
    "probe": Lazy("kdtr_cli.cli.probe:probe", "Probe the engine's determinism on a golden's prompts."),
    "import": Lazy("kdtr_cli.cli.import_file:import_command", "Make a run bundle of an engine's own output file."),
    "export": Lazy("kdtr_cli.cli.export:export", "Write a bundle, or a golden's inputs, as another file."),
    "selftest": Lazy("kdtr_cli.cli.selftest:selftest", "Sabotage the engine and see whether the gate notices."),
    "bisect": Lazy("kdtr_cli.cli.bisect:bisect", "Find the faulty operation of the engine."),
    "merge": Lazy("kdtr_cli.cli.merge:merge", "Merge a sweep into one bundle."),
    "demo": Lazy("kdtr_cli.cli.demo:demo", "Show golden, run and diff on the built-in model."),
    "model": Lazy("kdtr_cli.cli.model:model", "Make or show a model folder."),
    "inspect": Lazy("kdtr_cli.cli.inspect:inspect", "Show what a bundle holds."),
    "verify": Lazy("kdtr_cli.cli.verify:verify", "Check a bundle's integrity."),
    "doctor": Lazy("kdtr_cli.cli.doctor:doctor", "Show devices, compilers, versions and caches."),
    "kernels": Lazy("kdtr_cli.cli.kernels:kernels", "List, compile and test the kernels."),
}

#: A repeated Ctrl-C, or the SIGTERM that follows a SIGINT, within this many seconds is the same wish: it must not
#: interrupt the removal of temporary files that the first one started.
_SAME_WISH_S = 1.0


class LazyGroup(click.Group):
    """A group whose commands stand in a table, and whose `main` ends in kdtr's exit codes.

    Commands added in click's own way work too; the table comes first.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, Lazy], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.lazy, *(name for name in super().list_commands(ctx) if name not in self.lazy)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, name = self.lazy[cmd_name].target.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, OSError) as error:
            raise KdtrError(f"the command '{cmd_name}' can't be loaded: {error}; install kdtr again") from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.list_commands(ctx) and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise click.UsageError(f"no such command '{args[0]}'{hint}", ctx)
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and command is not None and not ctx.resilient_parsing:
            self._apply_settings(ctx, name, command, rest)
        return name, command, rest

    def _apply_settings(self, ctx: click.Context, name: str, command: click.Command, rest: list[str]) -> None:
        if ctx.params.get("no_config"):
            return
        try:
            found = settings.load(_current_folder(), self.list_commands(ctx))
            ctx.default_map = {name: settings.defaults_for(command, name, found)}
        except InputError:
            # A broken file must not keep anyone from reading the help, nor `doctor` from telling what is broken.
            if name != "doctor" and not {"-h", "--help"} & set(rest):
                raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self._short_help(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=self._short_help(ctx, name)) for name in names]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def _short_help(self, ctx: click.Context, name: str) -> str:
        if name in self.lazy:
            return self.lazy[name].help
        command = self.get_command(ctx, name)
        return command.get_short_help_str() if command is not None else ""

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        arguments = list(sys.argv[1:] if args is None else args)
        sys.exit(int(_run(self, arguments, prog_name or "kdtr", complete_var or "_KDTR_COMPLETE", extra)))


@click.group(
    name="kdtr",
    cls=LazyGroup,
    lazy=COMMANDS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="kdtr", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--no-config", is_flag=True, help="Ignore [tool.kdtr] in pyproject.toml.")
@click.pass_context
def cli(ctx: click.Context, debug: bool, no_config: bool) -> None:
    """Prove a CUDA inference engine right: make a golden, run the engine, judge the run.

    Exit codes: 0 agrees (or done), 1 differs, 2 cannot be judged (bad input), 3 kdtr or the device failed.
    """
    if ctx.invoked_subcommand is None:
        # Not success: a CI line whose command got lost must not pass.
        click.echo(ctx.get_help(), err=True)
        ctx.exit(Exit.UNJUDGED)


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code; never raises, never prints a traceback unless asked to."""
    try:
        closed = _occupy_standard_files()
        _handle_signals()
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a locale without UTF-8 is no reason to fail
        if closed:
            return _tell(KdtrError("standard output is closed: there is nowhere to put the result"), debug=False)
        cli.main(argv, prog_name="kdtr")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else Exit.FAILED
    except KeyboardInterrupt as error:  # between two steps of the way out
        return _tell(error, debug=False)
    return Exit.FAILED  # pragma: no cover: cli.main always exits


def _run(group: click.Group, args: list[str], prog_name: str, complete_var: str, extra: dict[str, Any]) -> Exit:
    """Run the command line, tell what went wrong, and return the exit code."""
    debug = _asks_for_debug(args)  # before click takes the list apart
    code, error = Exit.AGREES, None
    try:
        code = _dispatch(group, args, prog_name, complete_var, extra)
    except BaseException as raised:
        error = raised
    unwritten = _flush(sys.stdout)
    told = code in (Exit.UNJUDGED, Exit.FAILED) or not (error is None or _is_nameless(error))
    if unwritten is not None and not told:
        error = unwritten
    if error is not None:
        code = _tell(error, debug)
    _flush(sys.stderr)
    return code


def _dispatch(group: click.Group, args: list[str], prog_name: str, complete_var: str, extra: dict[str, Any]) -> Exit:
    instruction = os.environ.get(complete_var)
    if instruction:
        from click.shell_completion import shell_complete

        refused = shell_complete(group, extra, prog_name, complete_var, instruction)
        return Exit.UNJUDGED if refused else Exit.AGREES
    try:
        with group.make_context(prog_name, args, **extra) as ctx:
            group.invoke(ctx)
    except click.exceptions.Exit as end:
        return Exit(end.exit_code) if end.exit_code in tuple(Exit) else Exit.FAILED
    except SystemExit as end:
        return _left_with(end.code)
    return Exit.AGREES


def _left_with(code: object) -> Exit:
    """The exit code for a SystemExit's. Commands leave by `ctx.exit(code)` or `sys.exit(Exit...)`, which may give a
    verdict; the 1 of a bare `sys.exit(1)`, by which libraries mean failure, must not be taken for one."""
    if code is None or isinstance(code, Exit):
        return code or Exit.AGREES
    if code in (Exit.AGREES, Exit.UNJUDGED, Exit.FAILED):
        return Exit(code)
    raise KdtrError(code if isinstance(code, str) else f"ended unexpectedly with exit code {code!r}")


def _is_nameless(error: BaseException) -> bool:
    """An error of the operating system that does not say which file: perhaps standard output."""
    return isinstance(error, OSError) and error.filename is None


def _flush(stream: TextIO | None) -> Exception | None:
    """Write out what `stream` still holds; the error if it can't be, after which the stream leads nowhere."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError) as error:
        _abandon(stream)
        if isinstance(error, OSError) and error.errno and not isinstance(error, BrokenPipeError):
            return OSError(error.errno, error.strerror, "standard output")
        return error
    return None


def _tell(error: BaseException, debug: bool) -> Exit:
    """Say what went wrong on standard error, in one line, and return the exit code."""
    helpful = getattr(click.exceptions, "NoArgsIsHelpError", ())  # click 8.2 and later: the message is the help page
    code, line = (Exit.UNJUDGED, "") if isinstance(error, helpful) else failures.explain(error)
    text = f"kdtr: error: {line}" if line else str(error)
    if debug:
        text = "".join(traceback.format_exception(error)) + text
    # Not through click or rich: nothing may go wrong here.
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(text + "\n")
    _flush(sys.stderr)
    return code


def _asks_for_debug(args: Sequence[str]) -> bool:
    """Whether `--debug` stands before the command; needed even where the arguments can't be parsed."""
    before = next((i for i, arg in enumerate(args) if not arg.startswith("-")), len(args))
    return "--debug" in args[:before]


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise InputError("the current folder does not exist any more; change to another") from error


def _occupy_standard_files() -> bool:
    """Fill those of file descriptors 0 to 2 that the caller closed with the null device, so that no bundle gets such
    a number and then error messages of some library into it. True if standard output was closed."""
    closed = False
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            closed = closed or number == 1
    return closed or sys.stdout is None


def _abandon(stream: TextIO) -> None:
    """Send what a broken stream still holds to the null device; else the interpreter complains at its end."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


def _handle_signals() -> None:
    """Let SIGINT, SIGTERM and SIGHUP raise, so that temporary files are removed on the way out."""
    last = -_SAME_WISH_S

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SAME_WISH_S:
            last = now
            raise failures.Terminated(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a background job: the caller wants it ignored
            signal.signal(number, stop)

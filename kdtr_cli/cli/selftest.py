"""`kdtr selftest`: is the gate red for every classic bug, and green without one?"""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import click
from click.core import ParameterSource

from kdtr_cli.cli import settings
from kdtr_cli.cli.console import print_table, progress, results
from kdtr_cli.cli.diff import RULES, judge_options
from kdtr_cli.cli.diff import diff as diff_command
from kdtr_cli.errors import InputError
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.workflows.selftest import SelftestOptions
from kdtr_cli.workflows.selftest import selftest as run_selftest
from kdtr_cli.workflows.selftest_report import SabotageRow, SelftestReport
from kdtr_cli.workflows.selftest_sabotages import SABOTAGES

__all__ = ["selftest"]

#: Rules that choose among the user's own sequences and steps; the self-test's goldens are others.
_OF_A_GOLDEN = ("steps", "select")


@click.command("selftest")
@click.option("--device", type=click.Choice(("auto", "gpu", "cpu")), default="cpu", show_default=True)
@click.option(
    "--gate",
    metavar="OPTIONS",
    help="Judge by these options of kdtr diff, and by [tool.kdtr.diff]: what would your tolerance let pass?",
)
@click.option("--only", metavar="NAMES", help="These sabotages only, separated by commas.")
@click.option("--list", "list_only", is_flag=True, help="Name the sabotages and run none.")
@click.option("--format", "form", type=click.Choice(("text", "json")), default="text", show_default=True)
@click.pass_context
def selftest(ctx: click.Context, device: str, gate: str | None, only: str | None, list_only: bool, form: str) -> None:
    """Sabotage the engine and see whether the gate notices.

    Makes small goldens, breaks the engine or its output in one classic way after the other, and judges each run as
    kdtr diff does. Exit 0: every sabotage was found for what it is, and the engine as it is passes. 1: one passed, or
    was called something else, or the engine as it is did not pass. 3: the self-test is broken. The last line stays
    as it is (docs/selftest.md).
    """
    if list_only:
        _list()
        return
    names = None if only is None else tuple(name for part in only.split(",") if (name := part.strip()))
    if names == ():
        raise InputError("--only names no sabotage; give names separated by commas ('kdtr selftest --list' has them)")
    options = SelftestOptions(device, names or (), None if gate is None else _gate(ctx, gate), gate)
    with progress() as bar:
        task = bar.add_task("selftest", total=None)
        report = run_selftest(
            options, lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        )
    if form == "json":
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        _show(report)
    ctx.exit(report.exit_code)


def _gate(ctx: click.Context, text: str) -> JudgeOptions:
    """The judgement that `kdtr diff` would make with these options, those of pyproject.toml included."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"--gate {text!r}: {error}") from error
    root = ctx.find_root()
    defaults = {}
    if not root.params.get("no_config") and isinstance(root.command, click.Group):
        found = settings.load(Path.cwd(), root.command.list_commands(root))
        defaults = settings.defaults_for(diff_command, "diff", found)
    # without --help, which would end all with exit 0
    asked = {"default_map": defaults, "help_option_names": []}
    parsed = diff_command.make_context("kdtr diff", [*words, "GOLDEN", "RUN"], **asked)
    given = [name for name in parsed.params if parsed.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    for name in given:
        if name not in (*(rule for rule in RULES if rule not in _OF_A_GOLDEN), "rule", "golden", "run"):
            option = "--format" if name == "form" else f"--{name.replace('_', '-')}"
            raise InputError(f"--gate {text!r}: {option} is no tolerance; give it to kdtr diff alone")
    return replace(judge_options(parsed), **dict.fromkeys(_OF_A_GOLDEN))


def _list() -> None:
    header = ("sabotage", "kind", "golden", "expected", "what", "like")
    rows = [
        (name, s.kind, s.golden, f"{s.verdict.value} {'|'.join(s.hints)}", s.what, s.like or "-")
        for name, s in SABOTAGES.items()
    ]
    print_table(results(), header, rows)


def _show(report: SelftestReport) -> None:
    console = results()
    print_table(
        console,
        ("golden", "engine as it is", "green", "seconds"),
        [(row.golden, row.verdict, _yes(row.green), f"{row.seconds:.1f}") for row in report.baselines],
        "   r",
    )
    click.echo()
    print_table(
        console,
        ("sabotage", "kind", "where", "expected", "got", "first tensor", "killed", "seconds"),
        [
            (
                row.name,
                row.kind,
                row.where,
                f"{row.expected} {'|'.join(row.expected_hints)}",
                f"{row.verdict} {row.hint or '-'}",
                row.first_tensor or "-",
                _yes(row.killed),
                f"{row.seconds:.1f}",
            )
            for row in report.rows
        ],
        "       r",
    )
    click.echo()
    for row in report.survivors:
        click.echo(f"survivor: {_about(row)}")
    if report.survivors and report.gate is not None:
        click.echo("Your tolerance can't tell these engines from a right one.")
    for row in report.misnamed:
        click.echo(f"misnamed: {_about(row)}; the gate said: {row.finding}")
    click.echo(f"device: {report.device}, {report.seconds:.0f} s")
    click.echo(report.line)


def _about(row: SabotageRow) -> str:
    return f"{row.name}: {row.what}" + (f" ({row.like})" if row.like else "")


def _yes(value: bool) -> str:
    return "yes" if value else "NO"

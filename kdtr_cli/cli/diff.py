"""`kdtr diff`: does a run agree with its golden?"""

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from kdtr_cli.cli.console import notes, progress
from kdtr_cli.cli.settings import origin
from kdtr_cli.parity.results import Report
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import ON_TIE
from kdtr_cli.report.github import report_github
from kdtr_cli.report.json import report_json
from kdtr_cli.report.junit import report_junit
from kdtr_cli.report.line import verdict_line
from kdtr_cli.report.text import report_text
from kdtr_cli.workflows.diff import check_report_target, write_report
from kdtr_cli.workflows.diff import diff as judge_bundles
from kdtr_cli.workflows.step_summary import append_step_summary
from kdtr_cli.workflows.sweep_diff import diff_sweeps

__all__ = ["diff"]

#: Columns of a report that goes to no terminal.
_WIDTH = 100

#: What `--format` may say.
FORMATS = ("text", "json", "junit", "github")

#: The options whose origin the report names.
_RULES = ("atol", "rtol", "max_ulp", "max_kl", "on_tie", "allow_partial", "allow_loose", "steps", "select")
_RULES += ("tolerance", "tolerance_factor")

#: The bounds that `--tolerance auto` sets.
_AUTO = ("atol", "rtol", "max_kl")


@click.command()
@click.argument("golden", type=click.Path(path_type=Path))
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--atol", type=float, help="Largest |run - golden| beside --rtol.  [default: 0 for tier exact]")
@click.option("--rtol", type=float, help="The same, as a share of |golden|.  [default: 0 for tier exact]")
@click.option("--max-ulp", type=click.IntRange(min=0), help="Largest distance in units of the run's storage type.")
@click.option("--max-kl", type=float, help="Largest KL(golden || run) of a step, in nats, over the full vocabulary.")
@click.option(
    "--tolerance",
    type=click.Choice(("auto",)),
    help="The noise floor that the golden measured, times a factor, in place of --atol, --rtol and --max-kl.",
)
@click.option(
    "--tolerance-factor", type=float, metavar="X", help="Of --tolerance auto.  [default: 8, for bf16 and int4 3]"
)
@click.option("--suggest", is_flag=True, help="Say which tolerance is the tightest that passes.")
@click.option("--on-tie", type=click.Choice(ON_TIE), default="fail", show_default=True, help="What TIE_BREAK means.")
@click.option("--allow-partial", is_flag=True, help="Judge by partial logits (top K, or none).")
@click.option("--allow-loose", is_flag=True, help="Judge by a tolerance that zeros or shuffled logits would pass too.")
@click.option("--steps", type=click.IntRange(min=1), help="Judge the first N output tokens of each sequence only.")
@click.option("--select", metavar="IDS", help="Judge these sequences only: ids separated by commas.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option(
    "--output-file",
    type=click.Path(path_type=Path),
    help="Write the report to this file, the verdict line alone to standard output.",
)
@click.option("--force", is_flag=True, help="Overwrite the output file.")
@click.pass_context
def diff(
    ctx: click.Context,
    golden: Path,
    run: Path,
    atol: float | None,
    rtol: float | None,
    max_ulp: int | None,
    max_kl: float | None,
    tolerance: str | None,
    tolerance_factor: float | None,
    suggest: bool,
    on_tie: str,
    allow_partial: bool,
    allow_loose: bool,
    steps: int | None,
    select: str | None,
    form: str,
    output_file: Path | None,
    force: bool,
) -> None:
    """Judge a run against its golden.

    Two bundles, or two sweeps (directories), which get one verdict.

    Exit 0: they agree. 1: they differ. 2: that can't be judged. 3: kdtr failed. The last line on standard output says
    it all in a form that stays the same (docs/judging.md).
    """
    bounds = {"atol": atol, "rtol": rtol, "max_kl": max_kl}
    auto = {"tolerance": tolerance, "tolerance_factor": tolerance_factor}
    options = JudgeOptions(
        **_those_that_win(ctx, bounds | auto),
        max_ulp=max_ulp,
        suggest=suggest,
        on_tie=on_tie,
        allow_partial=allow_partial,
        allow_loose=allow_loose,
        steps=steps,
        select=None if select is None else tuple(name for part in select.split(",") if (name := part.strip())),
        origins={name: f"--{name.replace('_', '-')}, {origin(ctx, name)}" for name in _RULES},
    )
    if output_file is not None:
        check_report_target(output_file, force, (golden, run))
    report = _judge(golden, run, options)
    text = _render(report, form, output_file)
    if output_file is not None:
        write_report(output_file, text)
        text = verdict_line(report) + "\n"
    if form == "github" and (summary := os.environ.get("GITHUB_STEP_SUMMARY")):
        note = append_step_summary(summary, report)
        if note is not None:
            with suppress(OSError):  # a standard error that is full changes no verdict either
                notes().print(f"note: {note}")
    click.echo(text, nl=False)  # it flushes; `main` makes exit 3 of a standard output that can't take it
    ctx.exit(int(report.exit_code))


def _those_that_win(ctx: click.Context, given: dict[str, Any]) -> dict[str, Any]:
    """Between --tolerance auto and the bounds that it sets, what the command line says wins over pyproject.toml; two of
    one place are left, and refused."""
    here = {name for name, value in given.items() if value is not None and origin(ctx, name) == "command line"}
    if "tolerance" in here:
        return {name: value for name, value in given.items() if name not in _AUTO or name in here}
    if here & set(_AUTO):
        return {name: value for name, value in given.items() if not name.startswith("tolerance") or name in here}
    return given


def _judge(golden: Path, run: Path, options: JudgeOptions) -> Report:
    if not golden.is_dir() and not run.is_dir():
        return judge_bundles(golden, run, options)
    with progress() as bar:
        task = bar.add_task("diff", total=None)
        return diff_sweeps(
            golden, run, options, lambda what, done, total: bar.update(task, completed=done, total=total)
        )


def _render(report: Report, form: str, output_file: Path | None) -> str:
    match form:
        case "json":
            return report_json(report)
        case "junit":
            return report_junit(report)
        case "github":
            return report_github(report)
    return report_text(report, _width(output_file))


def _width(output_file: Path | None) -> int:
    if output_file is None and sys.stdout is not None and sys.stdout.isatty():
        return max(40, shutil.get_terminal_size((_WIDTH, 24)).columns)
    return _WIDTH

"""`kdtr diff`: does a run agree with its golden?"""

import os
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import click

from kdtr_cli.cli.console import notes, progress
from kdtr_cli.cli.settings import origin
from kdtr_cli.cli.tensor_rule import TensorRuleType
from kdtr_cli.parity.results import Report
from kdtr_cli.parity.tolerances import JudgeOptions, TensorRule
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


@click.command()
@click.argument("golden", type=click.Path(path_type=Path))
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--atol", type=float, help="Largest |run - golden| beside --rtol.  [default: 0 for tier exact]")
@click.option("--rtol", type=float, help="The same, as a share of |golden|.  [default: 0 for tier exact]")
@click.option("--max-ulp", type=click.IntRange(min=0), help="Largest distance in units of the run's storage type.")
@click.option("--max-kl", type=float, help="Largest KL(golden || run) of a step, in nats, over the full vocabulary.")
@click.option(
    "--rule",
    type=TensorRuleType(),
    multiple=True,
    metavar="PATTERN:BOUNDS",
    help='Bounds of tensors by name, such as "*.router_logits:atol=1e-4,rtol=0"; the first that matches holds.',
)
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
    rule: tuple[TensorRule, ...],
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
    options = JudgeOptions(
        atol=atol,
        rtol=rtol,
        max_ulp=max_ulp,
        max_kl=max_kl,
        on_tie=on_tie,
        allow_partial=allow_partial,
        allow_loose=allow_loose,
        steps=steps,
        select=None if select is None else tuple(name for part in select.split(",") if (name := part.strip())),
        origins={name: f"--{name.replace('_', '-')}, {origin(ctx, name)}" for name in _RULES},
        rules=tuple(replace(one, origin=f"--rule, {origin(ctx, 'rule')}") for one in rule),
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

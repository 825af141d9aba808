"""`kdtr diff`: does a run agree with its golden?"""

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from kdtr_cli.cli.console import notes, progress, results
from kdtr_cli.cli.settings import origin
from kdtr_cli.cli.tensor_rule import TensorRuleType
from kdtr_cli.parity.results import Report
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import ON_TIE
from kdtr_cli.report.divergence import Look
from kdtr_cli.report.github import report_github
from kdtr_cli.report.html.page import report_html
from kdtr_cli.report.json import report_json
from kdtr_cli.report.junit import report_junit
from kdtr_cli.report.line import verdict_line
from kdtr_cli.report.plot import check_plot, report_png
from kdtr_cli.report.text import report_parts, report_text
from kdtr_cli.workflows.diff import check_report_target, write_report
from kdtr_cli.workflows.diff import diff as judge_bundles
from kdtr_cli.workflows.step_summary import append_step_summary
from kdtr_cli.workflows.sweep_diff import diff_sweeps
from kdtr_cli.workflows.token_text import token_texts

__all__ = ["RULES", "diff", "judge_options"]

#: Text of a token id, None where it is not known.
TextOf = Callable[[int], str | None]

#: Columns of a report that goes to no terminal.
_WIDTH = 100

#: What `--format` may say.
FORMATS = ("text", "json", "junit", "github", "html")

#: The options that a judgement follows; the report names their origin.
RULES = ("atol", "rtol", "max_ulp", "max_kl", "tolerance", "tolerance_factor", "on_tie", "allow_partial", "allow_loose")
RULES += ("steps", "select")

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
@click.option(
    "--rule",
    type=TensorRuleType(),
    multiple=True,
    metavar="PATTERN:BOUNDS",
    help='Bounds of tensors by name, such as "*.router_logits:atol=1e-4,rtol=0"; the first that matches holds.',
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
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE.png",
    help="Draw the curves of the worst sequence as PNG too (needs kdtr[plot]).",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Show tokens as text too, by the tokenizer of this folder (text and html).",
)
@click.option("--force", is_flag=True, help="Overwrite the output files.")
@click.pass_context
def diff(
    ctx: click.Context,
    golden: Path,
    run: Path,
    form: str,
    output_file: Path | None,
    plot: Path | None,
    tokenizer: Path | None,
    force: bool,
    **rules: object,
) -> None:
    """Judge a run against its golden.

    Two bundles, or two sweeps (directories), which get one verdict.

    Exit 0: they agree. 1: they differ. 2: that can't be judged. 3: kdtr failed. The last line on standard output says
    it all in a form that stays the same (docs/judging.md).
    """
    options = replace(judge_options(ctx), keep_rounds=form == "html")
    if output_file is not None:
        check_report_target(output_file, force, (golden, run))
    if plot is not None:
        check_report_target(plot, force, (golden, run), "--plot")
        check_plot(plot, output_file)
    text_of = None if tokenizer is None else token_texts(tokenizer)
    report = _judge(golden, run, options)
    text = _render(report, form, output_file, text_of)
    picture = None if plot is None else report_png(report)
    if output_file is not None:
        write_report(output_file, text)
        text = verdict_line(report) + "\n"
    if plot is not None and picture is not None:
        write_report(plot, picture)
    if form == "github" and (summary := os.environ.get("GITHUB_STEP_SUMMARY")):
        note = append_step_summary(summary, report)
        if note is not None:
            with suppress(OSError):  # a standard error that is full changes no verdict either
                notes().print(f"note: {note}")
    # the page is UTF-8, whatever the terminal takes; echo flushes, and `main` makes exit 3 of an output that is full
    click.echo(text.encode() if form == "html" else text, nl=False)
    ctx.exit(int(report.exit_code))


def judge_options(ctx: click.Context) -> JudgeOptions:
    """What the context of a `kdtr diff` asks of the judgement, each rule with its origin."""
    rules = _those_that_win(ctx, {name: ctx.params[name] for name in RULES})
    if (select := rules["select"]) is not None:
        rules["select"] = tuple(name for part in select.split(",") if (name := part.strip()))
    return JudgeOptions(
        **rules,
        suggest=ctx.params["suggest"],
        origins={name: f"--{name.replace('_', '-')}, {origin(ctx, name)}" for name in RULES},
        rules=tuple(replace(one, origin=f"--rule, {origin(ctx, 'rule')}") for one in ctx.params["rule"]),
    )


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


def _render(report: Report, form: str, output_file: Path | None, text_of: TextOf | None) -> str:
    """The report, or what of it is still to be written: of a text for a terminal the last line."""
    match form:
        case "json":
            return report_json(report)
        case "junit":
            return report_junit(report)
        case "github":
            return report_github(report)
        case "html":
            return report_html(report, text_of)
    out = results()
    if output_file is not None or not out.is_terminal or out.is_dumb_terminal:
        return report_text(report, _width(output_file), text_of)
    unicode = out.encoding.replace("-", "").lower() == "utf8"
    for part in report_parts(report, Look(_width(output_file), unicode, text_of)):
        # lines are wrapped where that makes sense; a terminal wraps the others better than at blanks
        out.print(part, soft_wrap=isinstance(part, str | Text))
    return verdict_line(report) + "\n"


def _width(output_file: Path | None) -> int:
    if output_file is None and sys.stdout is not None and sys.stdout.isatty():
        return max(40, shutil.get_terminal_size((_WIDTH, 24)).columns)
    return _WIDTH

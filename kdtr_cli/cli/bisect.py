"""`kdtr bisect`: which operation of the engine is wrong?"""

import json
import re
from pathlib import Path

import click

from kdtr_cli.cli.console import print_table, progress, results
from kdtr_cli.cli.settings import origin
from kdtr_cli.parity.operations import OUT, OperationResult
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.workflows.bisect import BisectOptions
from kdtr_cli.workflows.bisect import bisect as run_bisect
from kdtr_cli.workflows.bisect_graft import FORMS
from kdtr_cli.workflows.bisect_report import BisectReport, Group, grouped, ranges

__all__ = ["bisect"]

_RULES = ("atol", "rtol", "max_ulp", "select")


class _Positions(click.ParamType):
    """all, or positions separated by commas."""

    name = "positions"

    def convert(
        self, value: str | tuple[int, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | tuple[int, ...]:
        if isinstance(value, tuple) or value == "all":
            return value
        if not re.fullmatch(r" *[0-9]{1,9} *(, *[0-9]{1,9} *)*", value):
            self.fail(f"{value!r}: all, or positions separated by commas, e.g. 0,17", param, ctx)
        return tuple(int(part) for part in value.split(","))


@click.command("bisect")
@click.argument("golden", type=click.Path(path_type=Path))
@click.option("--model", metavar="DIR", help="The checkpoint, where the golden holds no weights.")
@click.option("--device", type=click.Choice(("auto", "gpu", "cpu")), default="auto", show_default=True)
@click.option("--select", metavar="IDS", help="Feed these sequences only: ids separated by commas.")
@click.option(
    "--positions",
    type=_Positions(),
    metavar="LIST",
    help="Positions that are fed alone, as a decode step does: 0,17 or all.  [default: the first and last of a step]",
)
@click.option("--atol", type=float, help="Largest |engine - golden| beside --rtol.  [default: 0]")
@click.option("--rtol", type=float, help="The same, as a share of |golden|.  [default: 0]")
@click.option("--max-ulp", type=click.IntRange(min=0), help="Largest distance in units of float32.")
@click.option("--all-layers", is_flag=True, help="A row for each layer, form and kernel.")
@click.option("--format", "form", type=click.Choice(("text", "json")), default="text", show_default=True)
@click.pass_context
def bisect(
    ctx: click.Context,
    golden: Path,
    model: str | None,
    device: str,
    select: str | None,
    positions: str | tuple[int, ...] | None,
    atol: float | None,
    rtol: float | None,
    max_ulp: int | None,
    all_layers: bool,
    form: str,
) -> None:
    """Find the faulty operation of the engine.

    Feeds a golden's own inputs to every operation by itself, so that an early fault spoils no later one. Exit 0: all
    agree. 1: one is at fault. 2: the golden can't be used. 3: the device failed. The last line stays as it is
    (docs/bisect.md).
    """
    judge = JudgeOptions(
        atol=atol,
        rtol=rtol,
        max_ulp=max_ulp,
        select=None if select is None else tuple(name for part in select.split(",") if (name := part.strip())),
        origins={name: f"--{name.replace('_', '-')}, {origin(ctx, name)}" for name in _RULES},
    )
    options = BisectOptions(golden, model, device, positions, judge)
    with progress() as bar:
        task = bar.add_task("bisect", total=None)
        report = run_bisect(
            options, lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        )
    if form == "json":
        click.echo(json.dumps(report.as_json(), indent=2, allow_nan=False))
    else:
        _show(report, all_layers)
    ctx.exit(report.exit_code)


def _show(report: BisectReport, all_layers: bool) -> None:
    header = ("", "operation", "layer", "form", "kernels", "rows", "max abs", "ULP", "NMSE", "")
    rows = [_cells(group) for group in (grouped(report.rows, all_layers))]
    print_table(results(), header, rows, "     rrrr")
    for group in grouped(report.rows, False):
        if group.status == OUT:
            click.echo(_where(group.rows[0]))
    click.echo(f"device: {report.device}")
    click.echo(report.line)


def _cells(group: Group) -> tuple[object, ...]:
    layers = [row.layer for row in group.rows if row.layer is not None]
    good = group.rows_total - group.rows_out
    return (
        "!" if group.status == OUT else "",
        group.rows[0].operation,
        ",".join(ranges(sorted(set(layers)))) or "-",
        _forms(group),
        _kernels(group.rows),
        f"{good}/{group.rows_total}",
        _number(group.max_abs),
        "-" if group.max_ulp is None else group.max_ulp,
        _number(group.nmse),
        group.status,
    )


def _forms(group: Group) -> str:
    forms = dict.fromkeys(row.form for row in group.rows)
    return "all" if len(forms) == len(FORMS) else "+".join(forms)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _kernels(rows: tuple[OperationResult, ...]) -> str:
    """Kernels, those of one place that differ in their variant alone as NAME{A,B}."""
    places = zip(*dict.fromkeys(row.kernels for row in rows), strict=True)
    return " ".join(_variants(list(dict.fromkeys(names))) for names in places)


def _variants(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    parts = [re.fullmatch(r"(.*?)((?:w\d+_m\d+\w*)?)", name).groups() for name in names]
    if len({stem for stem, _ in parts}) > 1:
        return ",".join(names)
    return f"{parts[0][0]}{{{','.join(variant for _, variant in parts)}}}"


def _where(row: OperationResult) -> str:
    sequence, position = row.first_row
    layer = "" if row.layer is None else f" of layer {row.layer}"
    bad = f", {row.nonfinite} values not finite" if row.nonfinite else ""
    return f"{row.operation}{layer} ({row.form}): first wrong at position {position} of sequence {sequence!r}{bad}"

"""`kdtr demo`: the three commands of a kdtr day on the built-in model."""

import tempfile
from pathlib import Path

import click

from kdtr_cli.cli.golden import show_golden
from kdtr_cli.cli.run import show_run
from kdtr_cli.report.text import report_text
from kdtr_cli.workflows.demo import Demo

__all__ = ["demo"]


@click.command("demo")
@click.option("--device", type=click.Choice(("auto", "gpu", "cpu")), default="auto", show_default=True)
@click.pass_context
def demo(ctx: click.Context, device: str) -> None:
    """Show golden, run and diff on the built-in model.

    On a GPU if there is one, else on the processor. Nothing is left behind; the exit code is that of the verdict.
    """
    with tempfile.TemporaryDirectory(prefix="kdtr-demo-") as folder:
        steps = Demo(Path(folder), device)
        click.echo("$ kdtr golden tiny -o golden.h5")
        show_golden(steps.golden(), name="golden.h5")
        click.echo("\n$ kdtr run golden.h5 -o run.h5")
        show_run(steps.run(), name="run.h5")
        click.echo("\n$ kdtr diff golden.h5 run.h5")
        report = steps.diff()
        click.echo(report_text(report, 100), nl=False)
        ctx.exit(int(report.exit_code))

"""`kdtr merge`: a sweep as one bundle."""

from pathlib import Path

import click

from kdtr_cli.cli.console import progress
from kdtr_cli.workflows.merge import merge_sweep

__all__ = ["merge"]


@click.command("merge")
@click.argument("sweep", metavar="DIR", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The bundle to write.")
@click.option("--force", is_flag=True, help="Overwrite the output.")
def merge(sweep: Path, output: Path, force: bool) -> None:
    """Merge a sweep into one bundle.

    All shards of the sweep DIR become one ordinary bundle: of goldens the same file that 'kdtr golden' would have
    written in one piece. Every array is verified on the way.
    """
    with progress() as bar:
        task = bar.add_task("merge", total=None)
        made = merge_sweep(
            sweep, output, force, lambda what, done, total: bar.update(task, completed=done, total=total)
        )
    click.echo(
        f"{made.kind} {made.path}: merged shards={made.shards} sequences={made.sequences} "
        f"manifest_sha256={made.manifest_sha256}"
    )

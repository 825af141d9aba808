"""`kdtr export`: a bundle as safetensors or npz, or a golden's inputs alone."""

from pathlib import Path
from typing import Any

import click

from kdtr_cli.workflows.export import ExportOptions, export_bundle

__all__ = ["export"]


@click.command("export")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--format",
    type=click.Choice(("safetensors", "npz", "hdf5")),
    default="safetensors",
    show_default=True,
    help="hdf5 is for --inputs, npz for whole bundles.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="The file to write.  [default: beside the bundle]"
)
@click.option("--inputs", is_flag=True, help="What an engine is given, and no answer: the file {inputs} of kdtr run.")
@click.option("--teacher-force", is_flag=True, help="With --inputs: the golden's tokens too, to be fed.")
@click.option("--steps", type=click.IntRange(min=1), help="With --inputs: fewer (or more) tokens than the golden.")
@click.option("--model", metavar="DIR", help="With --inputs: the checkpoint that they name.")
@click.option("--force", is_flag=True, help="Overwrite the output.")
def export(**options: Any) -> None:
    """Write a bundle, or a golden's inputs, as another file.

    Every array of the bundle, its manifest and its config; each is verified on the way, and the same bundle gives the
    same bytes. docs/engines.md says what the file of inputs holds.
    """
    made = export_bundle(ExportOptions(**options))
    click.echo(f"export {made.path}: arrays={made.arrays} bytes={made.bytes}")

"""`kdtr import`: an engine's own output file as a run bundle."""

from pathlib import Path
from typing import Any

import click

from kdtr_cli.cli.console import notes
from kdtr_cli.workflows.engine_run import EngineRunOptions
from kdtr_cli.workflows.import_file import import_file

__all__ = ["import_command", "values_note"]


@click.command("import")
@click.argument("golden", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The run bundle to write.")
@click.option(
    "--tier",
    type=click.Choice(("exact", "bf16", "fp16", "fp8", "int4")),
    default="exact",
    show_default=True,
    help="The arithmetic that the engine claims.",
)
@click.option(
    "--values", type=click.Choice(("logits", "logprobs")), help="What the numbers are.  [default: the file's]"
)
@click.option("--teacher-force", is_flag=True, help="The engine was fed the golden's tokens.")
@click.option(
    "--steps", type=click.IntRange(min=1), help="It was asked for fewer (or more) tokens than the golden has."
)
@click.option("--model", metavar="DIR", help="The checkpoint that it ran, where its config is not the golden's.")
@click.option("--force", is_flag=True, help="Overwrite the output.")
def import_command(file: Path, values: str | None, **options: Any) -> None:
    """Make a run bundle of an engine's own output file.

    FILE is npz, safetensors or JSON as 'kdtr run --engine command:' takes them, one .npy array, or JSON with
    log-probabilities of vLLM, llama.cpp or SGLang (docs/engines.md). GOLDEN says what the engine was asked.
    """
    made = import_file(EngineRunOptions(engine="", **options), file, values)
    for note in made.notes:
        notes().print(f"note: {note}")
    tokens = sum(len(result.tokens) for _, result in made.sequences)
    click.echo(
        f"import {made.path}: {made.model} by {made.engine} sequences={len(made.sequences)} tokens={tokens} "
        f"logits={made.logits}{values_note(made.values)}"
    )


def values_note(values: str) -> str:
    """What stands behind the form of a run's logits: nothing where they are logits."""
    return "" if values == "logits" else f" values={values}"

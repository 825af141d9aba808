"""`kdtr model`: make a model folder from a preset or in another format, and show what a model is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kdtr_cli.cli import console
from kdtr_cli.errors import InputError
from kdtr_cli.model.presets import PRESETS, write_model
from kdtr_cli.model.published import DTYPES, PUBLISHED, cut, write_published
from kdtr_cli.model.requantise import FORMATS, quantise_model
from kdtr_cli.model.source import open_model
from kdtr_cli.model.summary import summary

__all__ = ["model"]


@click.group(short_help="Make or show a model folder.")
def model() -> None:
    """Make or show a model folder.

    A MODEL is a Hugging Face folder (config.json and *.safetensors) or the name of a preset, a small model with seeded
    random weights.
    """


@model.command(short_help="Write a preset with random weights as a Hugging Face folder.")
@click.argument("preset", type=click.Choice([*PRESETS, *PUBLISHED]))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to make.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**64 - 1), help="Seed of the weights.")
@click.option("--layers", type=click.IntRange(1), help="Of a model of real shape: the first layers only.")
@click.option(
    "--dense-layers",
    "dense",
    type=click.IntRange(0),
    help="Of a model of real shape: how many dense layers.",
)
@click.option("--experts", type=click.IntRange(1), help="Of a model of real shape: so many routed experts a layer.")
@click.option(
    "--dtype",
    default="published",
    show_default=True,
    type=click.Choice(DTYPES),
    help="Quantised as published, as Kimi's (int4) or DeepSeek's (fp8) checkpoints are, or not at all (bf16).",
)
@click.option("--force", is_flag=True, help="Replace a folder that kdtr made.")
def new(
    preset: str,
    output: Path,
    seed: int,
    layers: int | None,
    dense: int | None,
    experts: int | None,
    dtype: str,
    force: bool,
) -> None:
    """Write PRESET with random weights as a Hugging Face folder.

    The same seed gives the same bytes on every machine. The folder appears complete or not at all. Presets of real
    shape (kimi-k2.6, deepseek-v3, ...) are cut to size with --layers, --dense-layers and --experts, and quantised
    while they are written: a few million values are in memory at a time.
    """
    if preset in PUBLISHED:
        obj = cut(preset, layers, experts, dtype, dense)
        with console.progress() as bar:
            task = bar.add_task(preset, total=None)
            write_published(output, obj, seed, force, lambda n, of: bar.update(task, completed=n, total=of))
    elif any(option is not None for option in (layers, dense, experts)):
        raise InputError(
            f"--layers, --dense-layers and --experts cut presets of real shape ({', '.join(PUBLISHED)}), not {preset}"
        )
    elif dtype in FORMATS and dtype != "bf16":
        raise InputError(
            f"--dtype {dtype} is for presets of real shape ({', '.join(PUBLISHED)}); write {preset} and give it to "
            f"'kdtr model quantize DIR --to {dtype}'"
        )
    else:
        write_model(output, preset, seed, force)
    console.results().print(f"{output}: {preset} with weights from seed {seed}")


@model.command(short_help="Write a model folder anew as INT4, FP8 or bf16.")
@click.argument("source", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--to", "form", required=True, type=click.Choice(FORMATS), help="The format to write.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to make.")
@click.option("--force", is_flag=True, help="Replace a folder that kdtr made.")
def quantize(source: Path, form: str, output: Path, force: bool) -> None:
    """Write the model folder DIR anew in another format, in the layout of the published checkpoints.

    int4 packs the routed experts in groups of 32 (Kimi-K2.6), fp8 scales every projection in blocks of 128 x 128
    (DeepSeek-V3), bf16 takes quantisation away. The tokenizer comes along. The folder appears complete or not at all.
    """
    with console.progress() as bar:
        task = bar.add_task(form, total=None)
        notes = quantise_model(source, output, form, force, lambda n, of: bar.update(task, completed=n, total=of))
    for note in notes:
        console.notes().print(f"kdtr: note: {note}")
    console.results().print(f"{output}: {source} as {form}")


@model.command(short_help="Show a model's sizes, parameters, router and rope.")
@click.argument("spec", metavar="DIR|PRESET")
@click.option(
    "--format", "form", default="text", show_default=True, type=click.Choice(["text", "json"]), help="Output format."
)
def show(spec: str, form: str) -> None:
    """Show the sizes, parameters, router and rope of a model, and check that its tensors are all there.

    A preset's name means the preset; write ./tiny for a folder of that name.
    """
    told = summary(open_model(spec))
    if form == "json":
        click.echo(json.dumps(told, indent=2))
        return
    rows = [(name, _cell(value)) for name, value in _flat(told) if name not in ("schema", "notes")]
    console.print_table(console.results(), ("what", "value"), rows)
    for note in told["notes"]:
        console.notes().print(f"kdtr: note: {note}")


def _flat(table: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Nested tables as dotted names, in order."""
    out: list[tuple[str, Any]] = []
    for key, value in table.items():
        out += _flat(value, f"{before}{key}.") if isinstance(value, dict) else [(f"{before}{key}", value)]
    return out


def _cell(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)

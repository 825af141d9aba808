"""`kdtr run`: a golden's prompts through the CUDA engine."""

from pathlib import Path
from typing import Any

import click

from kdtr_cli.bundle.sweep import is_sweep
from kdtr_cli.cli.console import notes, progress
from kdtr_cli.cli.import_file import values_note
from kdtr_cli.cli.sweep_options import output_option, show_sweep, sweep_options, wanted_sweep
from kdtr_cli.ddtree.rounds import statistics
from kdtr_cli.errors import InputError
from kdtr_cli.model.traces import TRACE_LEVELS
from kdtr_cli.workflows.decode import TIERS
from kdtr_cli.workflows.engine_run import EngineRunOptions, make_engine_run
from kdtr_cli.workflows.run import RunOptions, RunSummary, make_run
from kdtr_cli.workflows.show import continuation
from kdtr_cli.workflows.sweep import SweepSummary
from kdtr_cli.workflows.sweep_run import make_run_sweep

__all__ = ["run", "show_run"]


@click.command("run")
@click.argument("golden", type=click.Path(path_type=Path))
@output_option
@click.option(
    "--mode",
    type=click.Choice(("ar", "ddtree", "chain")),
    default="ar",
    show_default=True,
    help="ar: one token a step; ddtree: draft trees; chain: the drafter's best chain.",
)
@click.option("--drafter", metavar="DIR|ngram|replay|synthetic:P", help="Who drafts.  [default: as the golden]")
@click.option("--budget", type=click.IntRange(1, 1024), help="Nodes of a tree.  [default: as the golden, or block - 1]")
@click.option("--block-size", type=click.IntRange(2, 33), help="Root and tokens drafted ahead.  [default: 8]")
@click.option("--device", type=click.Choice(("auto", "gpu", "cpu")), default="auto", show_default=True)
@click.option(
    "--tier",
    type=click.Choice(("exact", "bf16", "fp16", "fp8", "int4")),
    default="exact",
    show_default=True,
    help="The arithmetic; fp16, fp8 and int4 with --engine alone.",
)
@click.option("--model", metavar="DIR", help="The checkpoint, where the golden holds no weights.")
@click.option("--batch", type=click.IntRange(min=1), help="Sequences decoded together.  [default: 8]")
@click.option("--prefill", type=click.IntRange(1, 4096), help="Prompt tokens fed in one pass.  [default: up to 64]")
@click.option("--teacher-force", is_flag=True, help="Feed the golden's tokens, whatever the engine chooses.")
@click.option("--steps", type=click.IntRange(min=1), help="Decode fewer (or more) tokens than the golden.")
@click.option(
    "--engine", metavar="NAME:ARGUMENT", help='Another: command:"./my_engine {inputs} {out}", hf:DIR, openai:URL.'
)
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds that --engine may take.")
@click.option(
    "--inputs",
    type=click.Choice(("safetensors", "hdf5")),
    help="The file that --engine command reads.  [default: safetensors]",
)
@click.option("--trace", type=click.Choice(TRACE_LEVELS), help="Keep intermediate tensors: layers' outputs, or all.")
@sweep_options
@click.option("--force", is_flag=True, help="Overwrite the output.")
def run(golden: Path, output: str, jobs: int | None, executor: str | None, **options: Any) -> None:
    """Run a golden's prompts through the CUDA engine.

    The engine sees the golden's prompts, config, weights and settings; its tokens only with --teacher-force, its
    logits never. Mode, drafter, --batch and --prefill change no bit of tokens and logits. With --engine another
    engine is asked the same: docs/engines.md.
    """
    if options["engine"] is not None:
        _run_engine(golden, output, {**options, "--jobs": jobs, "--executor": executor})
        return
    for name in ("engine", "timeout", "inputs"):
        if options.pop(name) is not None:
            raise InputError(f"--{name} goes with --engine")
    if options["tier"] not in TIERS:
        raise InputError(
            f"--tier {options['tier']}: kdtr's own engine has {' and '.join(TIERS)}; others go with --engine"
        )
    asked = RunOptions(golden=golden, output=Path(output), **options)
    many = wanted_sweep(output, jobs, executor)
    if (many is not None) != golden.is_dir():
        raise InputError(f"-o {output}: a sweep is run into a sweep (-o DIR/), a bundle into a bundle")
    with progress() as bar:
        task = bar.add_task("run", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        made = make_run(asked, tell) if many is None else make_run_sweep(asked, many, tell)
    if isinstance(made, SweepSummary):
        _show_sweep(made, asked.output)
    else:
        show_run(made)


#: Options of kdtr's own engine, each with the value that says nothing.
_OWN = {"mode": "ar", "device": "auto", "drafter": None, "budget": None, "block_size": None, "batch": None}
_OWN |= {"prefill": None, "--jobs": None, "--executor": None, "trace": None}


def _run_engine(golden: Path, output: str, options: dict[str, Any]) -> None:
    for name, nothing in _OWN.items():
        if options.pop(name) != nothing:
            option = name if name.startswith("--") else "--" + name.replace("_", "-")
            raise InputError(f"{option} is for kdtr's own engine; it can't go with --engine")
    if is_sweep(output) or golden.is_dir():
        raise InputError("--engine runs one bundle, no sweep; 'kdtr merge DIR -o golden.h5' makes one of a sweep")
    container = options.pop("inputs") or "safetensors"
    summary = make_engine_run(EngineRunOptions(golden=golden, output=Path(output), container=container, **options))
    for line in continuation(summary.folder, summary.sequences):
        click.echo(line)
    for note in summary.notes:
        notes().print(f"note: {note}")
    tokens = sum(len(result.tokens) for _, result in summary.sequences)
    click.echo(
        f"run {summary.path}: {summary.model} by {summary.engine} sequences={len(summary.sequences)} "
        f"tokens={tokens} logits={summary.logits}{values_note(summary.values)} seconds={summary.seconds:.1f}"
    )


def _show_sweep(summary: SweepSummary, name: Path) -> None:
    figures = [figure for figure in summary.results if figure is not None]
    for note in dict.fromkeys(note for figure in figures for note in figure.notes):
        notes().print(f"note: {note}")
    show_sweep(summary, name, [f"on={summary.sweep.manifest['run']['device'].replace(' ', '_')}"])


def _say_drafter(summary: RunSummary) -> None:
    """What drafted, where the user did not choose it in so many words."""
    if summary.drafter == "replay":
        notes().print("note: the golden's drafts are replayed; --drafter DIR runs the drafter itself")
    elif summary.drafter is not None:
        click.echo(
            f"drafter={summary.drafter.partition(':')[0] if summary.drafter.startswith('dflash') else summary.drafter}"
        )


def show_run(summary: RunSummary, name: str | None = None) -> None:
    """Print what a run made: the text where there is a tokenizer, then one line under its path or another name."""
    for line in continuation(summary.model.folder, summary.sequences):
        click.echo(line)
    for note in summary.notes:
        notes().print(f"note: {note}")
    _say_drafter(summary)
    tokens = sum(len(result.tokens) for _, result in summary.sequences)
    rounds = [r for sequence in summary.rounds for r in sequence]
    if rounds:
        found = statistics(rounds)
        histogram = " ".join(f"{n}:{count}" for n, count in sorted(found["histogram"].items()))
        click.echo(f"rounds={len(rounds)} tau={found['tau']:.3f} (accepted rows a round, the root counted) {histogram}")
    counted = summary.statistics
    touched = counted.summary()["experts_touched"]
    figures = [f"passes={counted.passes}+{counted.prefill_passes} prefill", f"tokens/s={tokens / summary.seconds:.0f}"]
    if touched is not None:
        figures.append(f"experts touched a layer and pass={touched:.1f} of {summary.model.config.n_routed_experts}")
    click.echo(" ".join(figures))
    click.echo(
        f"run {name or summary.path}: {summary.model.name} on {summary.device['device']} "
        f"sequences={len(summary.sequences)} tokens={tokens}"
    )

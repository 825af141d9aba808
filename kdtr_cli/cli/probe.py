"""`kdtr probe`: does anything that must change no bit change one?"""

import json
from pathlib import Path

import click

from kdtr_cli.cli.console import print_table, progress, results
from kdtr_cli.workflows.probe import ProbeOptions
from kdtr_cli.workflows.probe import probe as run_probes
from kdtr_cli.workflows.probe_report import SKIPPED, ProbeReport, ProbeRow
from kdtr_cli.workflows.probe_variations import PROBES

__all__ = ["probe"]


@click.command("probe")
@click.argument("golden", type=click.Path(path_type=Path))
@click.option("--model", metavar="DIR", help="The checkpoint, where the golden holds no weights.")
@click.option("--device", type=click.Choice(("auto", "gpu", "cpu")), default="auto", show_default=True)
@click.option("--probe", "probes", multiple=True, type=click.Choice(PROBES), help="Repeatable.  [default: all]")
@click.option("--steps", type=click.IntRange(min=1), help="Decode fewer (or more) tokens than the golden.")
@click.option("--sequences", type=click.IntRange(min=1), help="Take the golden's first N sequences only.")
@click.option("--format", "form", type=click.Choice(("text", "json")), default="text", show_default=True)
@click.pass_context
def probe(
    ctx: click.Context,
    golden: Path,
    model: str | None,
    device: str,
    probes: tuple[str, ...],
    steps: int | None,
    sequences: int | None,
    form: str,
) -> None:
    """Probe the engine's determinism on a golden's prompts.

    Decodes them plainly, then again, in a fresh process, alone, in other places, with the prompt in pieces, by draft
    trees and by chains, and compares tokens and logits bit for bit. Exit 0: all the same. 1: something differs.
    2: nothing could be compared, or a probe named by --probe could not. The last line stays as it is
    (docs/judging.md).
    """
    options = ProbeOptions(golden, model, device, probes, steps, sequences)
    with progress() as bar:
        task = bar.add_task("probe", total=None)
        report = run_probes(
            options, lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        )
    if form == "json":
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        _show(report)
    ctx.exit(report.exit_code)


def _show(report: ProbeReport) -> None:
    header = ("probe", "varied", "sequences", "tokens", "verdict", "")
    rows = [
        (
            row.probe,
            row.varied,
            "-" if row.verdict == SKIPPED else row.sequences,
            "-" if row.verdict == SKIPPED else f"{row.tokens_equal}/{row.tokens}",
            row.verdict,
            _note(row),
        )
        for row in (*report.rows, report.golden)
    ]
    print_table(results(), header, rows, "  rr")
    click.echo(f"device: {report.device}")
    click.echo(report.line)


def _note(row: ProbeRow) -> str:
    found = row.difference
    if found is None:
        return row.note
    prompt = found.part == "prompt_logits"
    where = f"{'prompt position' if prompt else 'step'} {found.step}"
    what = ("logits" if prompt else found.part) + ("" if found.index is None else f"[{found.index}]")
    values = [
        str(value) if bits is None else f"{bits} ({value:.9g})"
        for value, bits in ((found.base, found.base_bits), (found.other, found.other_bits))
    ]
    return f"sequence {row.sequence!r} {where} {what}: {values[0]} -> {values[1]}"

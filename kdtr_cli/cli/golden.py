"""`kdtr golden`: reference tokens and logits from the NumPy model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kdtr_cli.bundle.schema import MAX_SEQUENCES
from kdtr_cli.cli.console import notes, print_table, progress, results
from kdtr_cli.cli.sweep_options import output_option, show_sweep, sweep_options, wanted_sweep
from kdtr_cli.ddtree.rounds import statistics
from kdtr_cli.errors import InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.traces import TRACE_LEVELS
from kdtr_cli.parity.floor import NoiseFloor, shared_floors
from kdtr_cli.workflows.golden import GoldenOptions, GoldenPlan, GoldenSummary, make_golden, plan_golden
from kdtr_cli.workflows.golden_memory import available, parse_size, shown_size
from kdtr_cli.workflows.golden_plan import shown_time
from kdtr_cli.workflows.golden_rounds import DraftOptions
from kdtr_cli.workflows.prompts import PromptOptions
from kdtr_cli.workflows.show import continuation
from kdtr_cli.workflows.sweep import SweepSummary
from kdtr_cli.workflows.sweep_golden import make_golden_sweep

__all__ = ["golden", "show_golden", "show_plan"]

_BOTH = "exact,float64"


@click.command("golden")
@click.argument("model", default="tiny", metavar="[MODEL]")
@output_option
@click.option("--prompt-ids", multiple=True, metavar="IDS", help='A prompt as token ids: "1 2 3". Repeatable.')
@click.option("--prompt-text", multiple=True, metavar="TEXT", help="A prompt as text. Repeatable.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Prompts from a .jsonl file ({"id": …, "ids": […]}, {"id": …, "text": …} or {"messages": […]} a line) '
    "or a .txt file.",
)
@click.option("--chat", is_flag=True, help="Put text through the folder's chat template; it becomes a user's message.")
@click.option("--num-prompts", type=click.IntRange(min=1), help="Random prompts.")
@click.option("--prompt-len", type=int, help="Tokens of a random prompt.  [default: 16]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For prompts and sampling.")
@click.option("--steps", type=int, default=24, show_default=True, help="Tokens to decode.")
@click.option("--ignore-eos", is_flag=True, help="Decode on after a stop id.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option(
    "--arith",
    type=click.Choice((_BOTH, "float64", "float32")),
    help=f"float32: by BLAS, fast. IDENTICAL needs exact.  [default: {_BOTH}]",
)
@click.option("--no-exact", is_flag=True, help="The same as --arith float64.")
@click.option("--bf16", is_flag=True, help="Emulate a bf16 engine along the tokens too, for diff --tolerance auto.")
@click.option("--logits", default="full", show_default=True, metavar="full|top:K|digest", help="What to keep of a row.")
@click.option("--score", is_flag=True, help="Keep the logits of the prompt too.")
@click.option("--trace", type=click.Choice(TRACE_LEVELS), help="Keep intermediate tensors: layers' outputs, or all.")
@click.option(
    "--latent-norm-eps",
    type=click.Choice(("hf", "config")),
    default="hf",
    show_default=True,
    help="eps of the q_a and kv_a norms: 1e-6 as transformers, or the config's as vLLM and SGLang.",
)
@click.option(
    "--rope-angles", type=click.Choice(("f64", "f32")), default="f64", show_default=True, help="f32 as transformers."
)
@click.option("--embed-weights/--no-embed-weights", default=None, help="Weights in the bundle.  [default: below 64 MB]")
@click.option(
    "--ddtree", is_flag=True, help="Decode by DDTree rounds too, and store them; tokens and logits stay the same."
)
@click.option("--chain", is_flag=True, help="The same with the drafter's best chain in place of a tree.")
@click.option("--drafter", metavar="DIR|ngram|synthetic:P", help="A DFlash checkpoint, prompt look-up, or a hit rate.")
@click.option("--budget", type=int, help="Nodes of a tree, 1 to 1024.  [default: block size - 1]")
@click.option("--block-size", type=int, help="Root and drafted tokens.  [default: the checkpoint's, else 8]")
@click.option("--shard-size", type=click.IntRange(1, MAX_SEQUENCES), help="Sequences of a shard.  [default: 256]")
@sweep_options
@click.option(
    "--memory-limit",
    metavar="SIZE",
    help="Bytes to use, such as 8G: weights that don't fit are read again. A stopped golden goes on where it was.",
)
@click.option("--plan", is_flag=True, help="Print what would be read and how long it would take, and make nothing.")
@click.option("--force", is_flag=True, help="Overwrite the output.")
def golden(
    model: str,
    output: str,
    prompt_ids: tuple[str, ...],
    prompt_text: tuple[str, ...],
    prompts: Path | None,
    num_prompts: int | None,
    prompt_len: int | None,
    seed: int,
    arith: str | None,
    no_exact: bool,
    latent_norm_eps: str,
    rope_angles: str,
    ddtree: bool,
    chain: bool,
    drafter: str | None,
    budget: int | None,
    block_size: int | None,
    shard_size: int | None,
    jobs: int | None,
    executor: str | None,
    memory_limit: str | None,
    plan: bool,
    **options: Any,
) -> None:
    """Make reference tokens and logits from the NumPy model.

    MODEL is a preset (tiny, tiny-groups, tiny-v2, odd) or a Hugging Face folder; without a prompt option there is one
    prompt of 16 ids from the seed.
    """
    if no_exact and arith not in (None, "float64"):
        raise InputError(f"--no-exact is --arith float64, and --arith {arith} was given; leave one of the two out")
    arithmetic = "float64" if no_exact else arith or _BOTH
    asked = GoldenOptions(
        model=model,
        output=Path(output),
        prompts=PromptOptions(prompt_ids, prompt_text, prompts, num_prompts, prompt_len, seed),
        exact=arithmetic == _BOTH,
        single="float32" if arithmetic == "float32" else "float64",
        choices=Choices(latent_norm_eps, rope_angles),
        drafting=_drafting(ddtree, chain, drafter, budget, block_size),
        memory_limit=None if memory_limit is None else parse_size(memory_limit),
        **options,
    )
    if plan:
        if asked.drafting is not None:
            notes().print("note: the plan does not count the rounds")
        show_plan(plan_golden(asked))
        return
    many = wanted_sweep(output, jobs, executor, shard_size)
    with progress(estimate=True) as bar:
        task = bar.add_task("golden", total=None)

        def tell(what: str, done: float, total: float) -> None:
            bar.update(task, description=what, completed=done, total=total)

        made = make_golden(asked, tell) if many is None else make_golden_sweep(asked, many, tell)
    if isinstance(made, SweepSummary):
        _show_sweep(made, asked.output)
    else:
        show_golden(made)


def show_plan(plan: GoldenPlan) -> None:
    """Print what a golden would take, pass by pass."""
    rows = [
        [
            line.what,
            line.passes,
            line.rows or "",
            shown_size(line.read),
            f"{line.products:.3g}" if line.products else "",
            shown_time(line.seconds),
        ]
        for line in plan.lines
    ]
    header = ["pass", "times", "rows", "read, as float32", "multiply-adds", "time"]
    print_table(results(), header, rows, "lrrrrr")
    seconds = sum(line.seconds for line in plan.lines)
    kept = plan.budget.weights_limit
    groups = plan.budget.groups
    parts = [
        f"plan: sequences={sum(map(len, groups))}",
        f"groups={len(groups)}",
        f"checkpoint={shown_size(plan.stored_bytes)}",
        f"weights_kept={'all' if kept is None else shown_size(min(kept, plan.packed_bytes))}",
        f"memory={shown_size(plan.memory)}",
        f"time={shown_time(seconds)}",
    ]
    if plan.trace:
        parts.insert(-1, f"trace={shown_size(plan.trace)}")
    click.echo(" ".join(parts))
    there = available()
    if there is not None and plan.memory > there:
        notes().print(f"note: more than the {shown_size(there)} that are free here: give --memory-limit")


def _show_sweep(summary: SweepSummary, name: Path) -> None:
    figures = [figure for figure in summary.results if figure is not None]
    more = []
    if len(figures) == len(summary.sweep.shards):
        more += _noise(shared_floors(f.floors for f in figures))
    more.append(f"weights={'embedded' if summary.sweep.manifest['model']['embedded'] else 'not-embedded'}")
    show_sweep(summary, name, more)
    if ties := sum(f.ties for f in figures):
        notes().print(f"note: float64 would choose another token at {ties} steps; the bundles list them as ties")


def _noise(floors: Mapping[str, NoiseFloor]) -> list[str]:
    names = [name for name in ("exact", "bf16") if name in floors]
    return [f"max_abs_{name}_minus_float64={floors[name].max_abs:.3e}" for name in names]


def _drafting(
    ddtree: bool, chain: bool, drafter: str | None, budget: int | None, block_size: int | None
) -> DraftOptions | None:
    """The drafting options, None in plain decoding; InputError for one without the mode that it belongs to."""
    if not ddtree and not chain:
        for name, value in (("--drafter", drafter), ("--budget", budget), ("--block-size", block_size)):
            if value is not None:
                raise InputError(f"{name} needs --ddtree or --chain")
        return None
    if drafter is None:
        raise InputError("--ddtree and --chain need --drafter: the folder of a DFlash drafter, ngram, or synthetic:P")
    return DraftOptions("chain" if chain else "ddtree", drafter, budget, block_size)


def show_golden(summary: GoldenSummary, name: str | None = None) -> None:
    """Print what a golden holds: the text where there is a tokenizer, then one line under its path or another name."""
    for line in continuation(summary.model.folder, summary.sequences):
        click.echo(line)
    tokens = sum(len(result.tokens) for _, result in summary.sequences)
    parts = [
        f"golden {name or summary.path}: {summary.model.name}",
        f"sequences={len(summary.sequences)}",
        f"tokens={tokens}",
    ]
    parts += _noise(summary.floors)
    if summary.settings is not None:
        figures = statistics(summary.rounds, len(summary.sequences))
        parts += [
            f"mode={summary.settings.mode}",
            f"drafter={summary.settings.drafter.split(':')[0]}",
            f"budget={summary.settings.budget}",
            f"tau={figures['tau']:.3f}",
            f"rounds={figures['rounds']}",
        ]
    parts.append(f"weights={'embedded' if summary.embedded else 'not-embedded'}")
    click.echo(" ".join(parts))
    if summary.resumed:
        notes().print("note: went on from the work of a command that was stopped")
    if summary.ties:
        notes().print(
            f"note: float64 would choose another token at {summary.ties} steps; the bundle lists them as ties"
        )

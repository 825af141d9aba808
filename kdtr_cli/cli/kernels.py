"""`kdtr kernels`: list, compile and test the engine's kernels."""

import math

import click

from kdtr_cli.cli.console import notes, print_table, results
from kdtr_cli.engine.devices import open_device
from kdtr_cli.engine.kernels import KERNELS
from kdtr_cli.errors import Exit, InputError
from kdtr_cli.workflows.kernels import ARCHITECTURES, check_kernels, compile_kernels, select_kernels

__all__ = ["kernels"]


@click.group("kernels")
def kernels() -> None:
    """List, compile and test the kernels."""


@kernels.command("list")
def list_kernels() -> None:
    """Show the kernel table: entry, source file, tier, arguments."""
    rows = []
    for kernel in KERNELS.values():
        args = ", ".join(
            f"{a.dtype} {a.name}" + ("" if a.shape is None else f"[{', '.join(a.shape)}]") for a in kernel.args
        )
        rows.append((kernel.name, kernel.file, kernel.tier, math.prod(kernel.block), args))
    print_table(results(), ("kernel", "file", "tier", "threads", "arguments"), rows, "   r")


@kernels.command("compile")
@click.option("--arch", multiple=True, metavar="sm_XX", help=f"Repeatable.  [default: {', '.join(ARCHITECTURES)}]")
@click.pass_context
def compile_command(ctx: click.Context, arch: tuple[str, ...]) -> None:
    """Compile every kernel and check its PTX.

    NVRTC compiles for each architecture, and what comes out is checked against the numerics contract. No GPU is needed.
    """
    bad = []
    rows = []
    for made in compile_kernels(arch or ARCHITECTURES):
        rows.append((made.file, made.arch, made.cubin_bytes, len(made.violations)))
        bad += [f"{made.file} {made.arch}: {v}" for v in made.violations]
    print_table(results(), ("file", "architecture", "cubin bytes", "violations"), rows, "  rr")
    for line in bad:
        notes().print(line)
    files = len({r[0] for r in rows})
    click.echo(
        f"{'FAIL' if bad else 'PASS'} compile files={files} architectures={len(rows) // files} violations={len(bad)}"
    )
    ctx.exit(Exit.DIFFERS if bad else Exit.AGREES)


@kernels.command("test")
@click.argument("names", nargs=-1, metavar="[KERNEL]...")
@click.option("--device", type=click.Choice(("auto", "gpu", "cpu")), default="auto", show_default=True)
@click.option(
    "--schedule", type=click.IntRange(min=0), default=0, show_default=True, help="Lane order of the CPU device."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("-v", "--verbose", is_flag=True, help="Show every case.")
@click.pass_context
def test_command(
    ctx: click.Context, names: tuple[str, ...], device: str, schedule: int, seed: int, verbose: bool
) -> None:
    """Compare kernels with NumPy, bit for bit.

    Each runs on a device, and beside it its NumPy twin on the same inputs.
    """
    chosen = select_kernels(names)
    if not chosen:
        raise InputError("no kernel chosen")
    tally: dict[str, list[int]] = {}
    with open_device(device, schedule=schedule) as opened:
        where = opened.describe()["device"]
        for result in check_kernels(opened, chosen, seed):
            count = tally.setdefault(result.kernel, [0, 0, 0])
            count[0] += 1
            count[1] += result.compared
            count[2] += result.differing
            if verbose or result.differing:
                what = "" if result.first is None else f"; first {result.first}"
                click.echo(f"{result.kernel}: {result.label}: {result.differing} of {result.compared} differ{what}")
    print_table(results(), ("kernel", "cases", "elements", "differing"), [(k, *v) for k, v in tally.items()], " rrr")
    cases, elements, differing = (sum(column) for column in zip(*tally.values(), strict=True))
    click.echo(
        f"{'FAIL' if differing else 'PASS'} kernels={len(tally)} cases={cases} elements={elements} "
        f"differing={differing} device={where}"
    )
    ctx.exit(Exit.DIFFERS if differing else Exit.AGREES)

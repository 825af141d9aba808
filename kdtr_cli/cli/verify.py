"""`kdtr verify`: is a bundle whole?"""

import json
from pathlib import Path

import click

from kdtr_cli.cli.failures import one_line
from kdtr_cli.workflows.verify import Verification, exit_code, verify_bundle, verify_document, verify_sweep

__all__ = ["verify"]


@click.command("verify")
@click.argument("bundles", nargs=-1, required=True, metavar="BUNDLE...", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Text for people, or one JSON document (schema kdtr.verify/1).",
)
@click.pass_context
def verify(ctx: click.Context, bundles: tuple[Path, ...], output_format: str) -> None:
    """Check a bundle's integrity.

    Reads all of each BUNDLE, or of all shards of a sweep's directory, and checks its structure, its manifest and the
    SHA-256 of every array. Prints one line for each. Exit code 0 if all are whole, else 2.
    """
    results = []
    for path in bundles:
        result = verify_sweep(path) if path.is_dir() else verify_bundle(path)
        results.append(result)
        if output_format == "text":
            click.echo(_line(result))
    if output_format == "json":
        click.echo(json.dumps(verify_document(results), indent=2))
    ctx.exit(exit_code(results))


def _line(result: Verification) -> str:
    if not result.ok:
        more = f" (and {len(result.problems) - 1} more)" if len(result.problems) > 1 else ""
        return one_line(f"BAD {result.problems[0]}{more}")
    if result.shards is not None:
        return one_line(
            f"OK {result.path}: sweep of {result.kind}s shards={result.shards} sequences={result.sequences} "
            f"arrays={result.arrays} bytes={result.array_bytes}"
        )
    return one_line(
        f"OK {result.path}: {result.kind} sequences={result.sequences} arrays={result.arrays} "
        f"bytes={result.array_bytes} manifest_sha256={result.manifest_sha256}"
    )

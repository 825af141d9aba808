"""`kdtr doctor`: show what the machine has, and what is missing."""

import json
from collections.abc import Iterator
from pathlib import Path

import click

from kdtr_cli.cli import console, failures, settings
from kdtr_cli.workflows.diagnosis import Diagnosis, Item, Probe
from kdtr_cli.workflows.doctor import examine

__all__ = ["doctor"]

_STYLES = {"ok": "green", "note": "none", "missing": "yellow", "failed": "bold red"}


@click.command("doctor")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Text for people, or one JSON document (schema kdtr.doctor/1).",
)
@click.pass_context
def doctor(ctx: click.Context, output_format: str) -> None:
    """Show devices, compilers, versions and caches.

    Everything that a bug report needs. Exit code 0 if the engine can run here, on a GPU or on the CPU device; 3 if it
    can't run at all.
    """
    found = examine([Probe("settings", lambda: _settings(ctx))])
    if output_format == "json":
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        _render(found)
    ctx.exit(found.exit_code)


def _settings(ctx: click.Context) -> Iterator[Item]:
    """Which file gives defaults, and whether every command could take what it says."""
    if ctx.find_root().params.get("no_config"):
        yield Item("pyproject.toml", "note", "ignored (--no-config)")
        return
    group = ctx.find_root().command
    names = group.list_commands(ctx) if isinstance(group, click.Group) else ["doctor"]
    remedy = "correct the file, or give --no-config before the command"
    try:
        found = settings.load(Path.cwd(), names)
    except Exception as error:
        yield Item("pyproject.toml", "failed", failures.explain(error)[1], remedy)
        return
    yield Item("pyproject.toml", "note", str(found.path) if found.path else "none in reach")
    for name in found.tables:
        try:
            command = group.get_command(ctx, name) if isinstance(group, click.Group) else ctx.command
            if command is not None:
                settings.defaults_for(command, name, found)
            yield Item(f"[tool.kdtr.{name}]", "ok", ", ".join(found.tables[name]) or "empty")
        except Exception as error:
            yield Item(f"[tool.kdtr.{name}]", "failed", failures.explain(error)[1], remedy)


def _render(found: Diagnosis) -> None:
    out = console.results()
    width = max((len(item.name) for section in found.sections for item in section.items), default=0)
    for section in found.sections:
        out.print(section.title, style="bold")
        for item in section.items:
            name = failures.one_line(item.name).ljust(width)
            out.print(f"  {item.state:<8}", style=_STYLES[item.state], end="")
            out.print(f"{name}  {failures.one_line(item.value)}".rstrip())
            if item.remedy:
                out.print(f"{'':10}{'':{width}}  -> {failures.one_line(item.remedy)}")
    able = [name for name, works in found.devices.items() if works]
    out.print(f"The engine can run on: {', '.join(able)}." if able else "The engine can't run here on any device.")

"""Defaults of options from `[tool.kdtr]` in pyproject.toml.

One table for each command, with the names of its options as keys (dashes or underscores)::

    [tool.kdtr.diff]
    atol = 1e-5
    format = "json"

    [tool.kdtr.model.new]
    seed = 7

    [[tool.kdtr.diff.rules]]            # an option that is repeated may be a list of tables: --rule
    tensor = "*.router_logits"
    atol = 1e-4

Which file: the nearest pyproject.toml from the current folder upward, no further than the repository root (the folder
that holds `.git`); outside a repository only the current folder's. That one file decides, whether it has a
`[tool.kdtr]` or not. What the command line gives wins.

A gate must not be loosened by a typing error, so nothing is skipped: a table that names no command, a key that names
no option and a value of another type are each an InputError that names file and key. The keys of a command are
checked when that command runs, for only then is its module loaded.

Two things a file that comes with a repository may not do: name a command to be executed (every key that begins with
`engine`) and agree to overwrite files (`force`). These are for the command line alone.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kdtr_cli.errors import InputError

__all__ = ["Settings", "defaults_for", "find", "load", "origin"]

#: A pyproject.toml larger than this is none.
_MAX_BYTES = 1 << 20

_ORIGINS = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.PROMPT: "command line",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "pyproject.toml",
    ParameterSource.DEFAULT: "default",
}


@dataclass(frozen=True)
class Settings:
    """The `[tool.kdtr]` of one file: the file (None: there is none) and its tables, one a command."""

    path: Path | None
    tables: Mapping[str, Any]


def origin(ctx: click.Context, param: str) -> str:
    """Where the value of the parameter named `param` (as Python sees it: ``"max_ulp"``) came from.

    'command line', 'pyproject.toml', 'environment' or 'default'. Reports print this beside each effective rule.
    """
    source = ctx.get_parameter_source(param)
    return _ORIGINS.get(source, "default") if source is not None else "default"


def find(start: Path) -> Path | None:
    """The pyproject.toml that holds for the folder `start`, or None. See the module's text for the rule."""
    folders = [start, *start.parents]
    root = next((i for i, folder in enumerate(folders) if (folder / ".git").exists()), 0)
    return next((f / "pyproject.toml" for f in folders[: root + 1] if (f / "pyproject.toml").is_file()), None)


def load(start: Path, commands: Sequence[str]) -> Settings:
    """Read the settings for the folder `start`. `commands`: the names that tables may have.

    InputError for a file that can't be read or parsed and for a table that names no command.
    """
    path = find(start)
    if path is None:
        return Settings(None, {})
    tool = _parse(path).get("tool", {})
    tables = tool.get("kdtr", {}) if isinstance(tool, dict) else {}
    if not isinstance(tables, dict):
        raise InputError(f"{path}: [tool.kdtr] must be a table, not {_kind(tables)}")
    for name, table in tables.items():
        if name.startswith("engine"):
            raise _reserved(path, f"tool.kdtr.{name}")
        if name not in commands:
            raise InputError(f"{path}: [tool.kdtr.{name}] names no command; the commands are {', '.join(commands)}")
        if not isinstance(table, dict):
            raise InputError(f"{path}: tool.kdtr.{name} must be a table of options, not {_kind(table)}")
    return Settings(path, tables)


def defaults_for(command: click.Command, name: str, settings: Settings) -> dict[str, Any]:
    """The table of the command `name`, checked against its options, as click's `default_map` wants it.

    Keys are parameter names, numbers are the text that the command line would have had, so that both are read by one
    parser. A group's table may hold options of its own and one table for each of its subcommands.
    """
    return _defaults(command, settings.tables.get(name, {}), f"tool.kdtr.{name}", settings.path)


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise InputError(f"{path}: larger than {_MAX_BYTES} bytes; --no-config ignores it")
        return tomllib.loads(content.decode())
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}; --no-config ignores it") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not valid TOML: {error}; --no-config ignores it") from error


def _defaults(command: click.Command, table: Mapping[str, Any], where: str, path: Path | None) -> dict[str, Any]:
    options = _options(command)
    children = command.commands if isinstance(command, click.Group) else {}
    result: dict[str, Any] = {}
    taken: dict[str, str] = {}
    for key, value in table.items():
        place = f"{where}.{key}"
        if key in children and isinstance(value, dict):
            result[key] = _defaults(children[key], value, place, path)
            continue
        option = options.get(key.replace("_", "-")) or _of_tables(command, key)
        if _is_reserved(key, option):
            raise _reserved(path, place)
        if option is None or option.name is None:
            known = ", ".join(sorted({*options, *children})) or "none"
            raise InputError(f"{path}: {place}: no such option; '{command.name}' has: {known}")
        if option.name in taken:
            raise InputError(f"{path}: {place} and {taken[option.name]} set the same option; keep one")
        taken[option.name] = place
        found = _value(option, value, place, path)
        if found is not None:
            result[option.name] = found
    return result


def _options(command: click.Command) -> dict[str, click.Option]:
    """Long option names without their dashes in front. `--help` and the like, which only act, are no settings."""
    return {
        opt[2:]: param
        for param in command.params
        if isinstance(param, click.Option) and param.expose_value
        for opt in param.opts
        if opt.startswith("--")
    }


def _of_tables(command: click.Command, key: str) -> click.Option | None:
    """The repeatable option that a list of tables under this name stands for: its type reads tables."""
    options = (param for param in command.params if isinstance(param, click.Option))
    return next((option for option in options if getattr(option.type, "table_key", None) == key), None)


def _is_reserved(key: str, option: click.Option | None) -> bool:
    names = [key] if option is None else [key, option.name or "", *(opt.lstrip("-") for opt in option.opts)]
    return any(name.startswith("engine") or name == "force" for name in names)


def _reserved(path: Path | None, place: str) -> InputError:
    return InputError(f"{path}: {place} can't be set in a file; give it on the command line")


def _value(option: click.Option, value: Any, place: str, path: Path | None) -> Any:
    if option.is_flag:
        if not isinstance(value, bool):
            raise InputError(f"{path}: {place} must be true or false, not {_kind(value)}")
        if option.is_bool_flag and option.flag_value is not False:
            return value
        return option.flag_value if value else None  # a switch to one value: true is the switch given
    if option.multiple or option.nargs != 1:
        if not isinstance(value, list):
            raise InputError(f"{path}: {place} must be a list, not {_kind(value)}")
        return [
            _table(option.type, item, f"{place}[{i}]", path)
            if isinstance(item, dict) and hasattr(option.type, "text_of")
            else _scalar(option.type, item, place, path)
            for i, item in enumerate(value)
        ]
    return _scalar(option.type, value, place, path)


def _table(type_: Any, table: Mapping[str, Any], place: str, path: Path | None) -> str:
    try:
        return type_.text_of(table)
    except ValueError as error:
        raise InputError(f"{path}: {place}: {error}") from None


def _scalar(type_: click.ParamType, value: Any, place: str, path: Path | None) -> str:
    """One TOML value as the text that a person would have typed, if it is of the kind that the option takes."""
    if isinstance(type_, click.types.IntParamType):
        fits, wanted = isinstance(value, int), "a whole number"
    elif isinstance(type_, click.types.FloatParamType):
        fits, wanted = isinstance(value, int | float), "a number"
    elif isinstance(type_, click.types.StringParamType | click.Choice | click.Path | click.File):
        fits, wanted = isinstance(value, str), "a string"
    else:  # a type of our own reads text: a number is taken as it would have been typed
        fits, wanted = isinstance(value, int | float | str), "a string or a number"
    if not fits or isinstance(value, bool):
        raise InputError(f"{path}: {place} must be {wanted}, not {_kind(value)}")
    return value if isinstance(value, str) else repr(value)


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "a table" if isinstance(value, dict) else f"a {type(value).__name__}")

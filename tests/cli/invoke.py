"""The command line in this process."""

from click.testing import CliRunner, Result

from kdtr_cli.cli.main import cli


def kdtr(*args: object, config: bool = False) -> Result:
    """`kdtr ARGS`; settings in a pyproject.toml count with `config` alone."""
    return CliRunner().invoke(cli, [*([] if config else ["--no-config"]), *map(str, args)])

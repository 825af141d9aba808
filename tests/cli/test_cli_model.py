"""`kdtr model new` and `kdtr model show`, through click."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kdtr_cli.cli.model import model
from kdtr_cli.errors import Exit, InputError
from kdtr_cli.model.presets import PRESETS

pytestmark = pytest.mark.quick
TINY_KIMI = Path(__file__).parents[2] / "fixtures" / "tiny-kimi"


def call(*args: object) -> Result:
    return CliRunner().invoke(model, [str(arg) for arg in args])


def refused(*args: object) -> str:
    result = call(*args)
    assert result.output == ""
    assert isinstance(result.exception, InputError)
    assert result.exception.exit_code == Exit.UNJUDGED
    return str(result.exception)


@pytest.mark.parametrize("name", list(PRESETS))
def test_new_then_show(tmp_path: Path, name: str) -> None:
    result = call("new", name, "-o", tmp_path / "m", "--seed", 3)
    assert result.exit_code == 0
    assert result.output == f"{tmp_path / 'm'}: {name} with weights from seed 3\n"
    shown = call("show", tmp_path / "m", "--format", "json")
    assert shown.exit_code == 0
    told, preset = json.loads(shown.stdout), json.loads(call("show", name, "--format", "json").stdout)
    assert told["schema"] == "kdtr.model/1"
    assert told["name"] == "m"
    assert {**told, "name": name} == preset


def test_new_takes_the_seed(tmp_path: Path) -> None:
    files = []
    for name, args in (("a", ("--seed", 3)), ("b", ("--seed", 4)), ("c", ()), ("d", ("--seed", 0))):
        assert call("new", "odd", "-o", tmp_path / name, *args).exit_code == 0
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert len(set(files)) == 3
    assert files[2] == files[3]


def test_show_as_text_is_aligned_plain_and_unwrapped() -> None:
    result = call("show", TINY_KIMI)
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["what", "value"]
    cells = dict(line.split(maxsplit=1) for line in lines)
    assert cells["parameters.total"] == "3,818,864"
    assert cells["attention.softmax_scale"] == "0.1871303351950243"
    assert cells["router.scoring"] == "sigmoid"
    assert cells["stop_ids"] == "1002"
    column = {len(line) - len(line.split(maxsplit=1)[1]) for line in lines}
    assert len(column) == 1
    assert "\x1b" not in result.stdout


def test_notes_go_to_standard_error(tmp_path: Path) -> None:
    call("new", "odd", "-o", tmp_path / "m")
    shard = tmp_path / "m" / "model.safetensors"
    shard.rename(shard.with_name("part.safetensors"))
    names = json.loads(shard.with_name("part.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    index = {"weight_map": {name: "part.safetensors" for name in names if name != "__metadata__"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "m" / "other.safetensors").write_bytes(b"")
    result = call("show", tmp_path / "m", "--format", "text")
    assert result.exit_code == 0
    assert "other.safetensors" in result.stderr
    assert "other.safetensors" not in result.stdout
    assert json.loads(call("show", tmp_path / "m", "--format", "json").stdout)["notes"]


def test_existing_folder_needs_force(tmp_path: Path) -> None:
    assert call("new", "odd", "-o", tmp_path / "m").exit_code == 0
    assert "--force" in refused("new", "odd", "-o", tmp_path / "m")
    assert call("new", "tiny", "-o", tmp_path / "m", "--force").exit_code == 0
    assert json.loads(call("show", tmp_path / "m", "--format", "json").stdout)["sizes"]["vocabulary"] == 512


def test_unknown_model_is_one_line(tmp_path: Path) -> None:
    assert "tiny-groups" in refused("show", tmp_path / "none")
    assert "config.json" in refused("show", tmp_path)


@pytest.mark.parametrize(
    "args", [("new", "huge", "-o", "x"), ("new", "tiny"), ("new", "tiny", "-o", "x", "--seed", "-1"), ("show",)]
)
def test_usage_errors(args: tuple[str, ...]) -> None:
    result = call(*args)
    assert result.exit_code == 2
    assert result.stdout == ""

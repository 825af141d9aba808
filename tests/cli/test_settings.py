"""`[tool.kdtr]`: which file holds, what it may say, and who wins."""

import os

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kdtr_cli.cli import main as entry
from kdtr_cli.cli import settings
from kdtr_cli.errors import InputError

pytestmark = pytest.mark.quick


def make_group():
    """A kdtr with two commands of its own, which echo what reached them and where it came from."""
    help_names = {"help_option_names": ["-h", "--help"]}
    group = entry.LazyGroup("kdtr", lazy={}, params=list(entry.cli.params), context_settings=help_names)

    @group.command("judge")
    @click.argument("golden", default="g.h5")
    @click.option("--atol", type=float, default=0.0)
    @click.option("--max-ulp", type=click.IntRange(0, 100))
    @click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text")
    @click.option("--select", multiple=True)
    @click.option("--pair", nargs=2, type=int)
    @click.option("--embed/--no-embed", default=True)
    @click.option("--no-exact", is_flag=True)
    @click.option("--no-rounds", "rounds", flag_value=False, default=True)
    @click.option("--plain", "style", flag_value="plain")
    @click.option("--logits", type=Logits())
    @click.option("-o", "--output", type=click.Path())
    @click.option("--engine-command")
    @click.option("--via", "engine")
    @click.option("--force", is_flag=True)
    @click.pass_context
    def judge(ctx, **values):
        for name, value in sorted(values.items()):
            click.echo(f"{name}={value!r} from {settings.origin(ctx, name)}")

    @group.group("model")
    def model():
        """Models."""

    @model.command("new")
    @click.option("--seed", type=int, default=0)
    def new(seed):
        click.echo(f"seed={seed}")

    return group


class Logits(click.ParamType):
    """A type of our own, which reads text."""

    name = "logits"

    def convert(self, value, param, ctx):
        if not isinstance(value, str):
            self.fail(f"got {value!r}, not text", param, ctx)
        return ("parsed", value)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository root as current folder; `write(text)` writes its pyproject.toml."""
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(text)


def run(*args):
    result = CliRunner().invoke(make_group(), list(args))
    return result.exit_code, result.stdout, result.stderr


def refused(*words, args=("judge",)):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for word in ("pyproject.toml", *words):
        assert word in err, err
    return True


class TestFind:
    def test_the_nearest_file_below_the_repository_root_holds(self, repository):
        write(repository, "")
        assert settings.find(repository / "a" / "b") == repository / "pyproject.toml"
        write(repository / "a", "")
        (repository / "a" / "b").mkdir()
        assert settings.find(repository / "a" / "b") == repository / "a" / "pyproject.toml"

    def test_a_nearer_file_without_our_table_hides_the_one_above(self, repository, monkeypatch):
        write(repository, "[tool.kdtr.judge]\natol = 1.0")
        write(repository / "a", "[project]\nname = 'a'")
        monkeypatch.chdir(repository / "a")
        assert "atol=0.0 from default" in run("judge")[1]

    def test_nothing_above_the_repository_root_is_read(self, tmp_path):
        write(tmp_path, "")
        (tmp_path / "repo" / ".git").mkdir(parents=True)
        (tmp_path / "repo" / "deep").mkdir()
        assert settings.find(tmp_path / "repo" / "deep") is None

    def test_a_worktree_whose_git_is_a_file_is_a_repository(self, tmp_path):
        write(tmp_path, "")
        (tmp_path / "tree" / "deep").mkdir(parents=True)
        (tmp_path / "tree" / ".git").write_text("gitdir: elsewhere")
        assert settings.find(tmp_path / "tree" / "deep") is None
        write(tmp_path / "tree", "")
        assert settings.find(tmp_path / "tree" / "deep") == tmp_path / "tree" / "pyproject.toml"

    def test_outside_a_repository_only_the_current_folder_counts(self, tmp_path):
        write(tmp_path, "")
        (tmp_path / "deep").mkdir()
        assert settings.find(tmp_path) == tmp_path / "pyproject.toml"
        assert settings.find(tmp_path / "deep") is None

    def test_a_pipe_of_that_name_is_not_opened(self, repository):
        os.mkfifo(repository / "pyproject.toml")
        assert settings.find(repository) is None


class TestValues:
    def test_a_value_arrives_and_its_origin_is_known(self, repository):
        write(repository, "[tool.kdtr.judge]\natol = 1e-5\nmax_ulp = 4\nformat = 'json'")
        code, out, _ = run("judge", "--max-ulp", "7")
        assert code == 0
        assert "atol=1e-05 from pyproject.toml" in out
        assert "max_ulp=7 from command line" in out
        assert "output_format='json' from pyproject.toml" in out
        assert "embed=True from default" in out

    @pytest.mark.parametrize("key", ["max-ulp", "max_ulp"])
    def test_dashes_and_underscores_are_the_same(self, repository, key):
        write(repository, f"[tool.kdtr.judge]\n{key} = 4")
        assert "max_ulp=4 from pyproject.toml" in run("judge")[1]

    def test_both_spellings_at_once_are_refused(self, repository):
        write(repository, "[tool.kdtr.judge]\nmax_ulp = 4\nmax-ulp = 5")
        assert refused("max_ulp", "max-ulp", "same option")

    def test_an_equal_value_on_the_command_line_is_from_the_command_line(self, repository):
        write(repository, "[tool.kdtr.judge]\natol = 0.5")
        assert "atol=0.5 from command line" in run("judge", "--atol", "0.5")[1]

    @pytest.mark.parametrize(
        ("line", "arrives"),
        [
            ("atol = 1", "atol=1.0"),
            ("atol = inf", "atol=inf"),
            ("select = ['a', 'b']", "select=('a', 'b')"),
            ("select = []", "select=()"),
            ("pair = [1, 2]", "pair=(1, 2)"),
            ("embed = false", "embed=False"),
            ("no-exact = true", "no_exact=True"),
            ("no-exact = false", "no_exact=False"),
            ("no-rounds = true", "rounds=False"),
            ("no-rounds = false", "rounds=True"),
            ("plain = true", "style='plain'"),
            ("plain = false", "style=None"),
            ("logits = 'top:5'", "logits=('parsed', 'top:5')"),
            ("logits = 5", "logits=('parsed', '5')"),
            ("output = 'x.h5'", "output='x.h5'"),
        ],
    )
    def test_each_kind_of_option_takes_its_kind_of_value(self, repository, line, arrives):
        write(repository, f"[tool.kdtr.judge]\n{line}")
        code, out, err = run("judge")
        assert code == 0, err
        assert f"{arrives} from" in out

    @given(st.floats(allow_nan=False))
    def test_a_float_arrives_bit_for_bit(self, number):
        command = make_group().commands["judge"]
        found = settings.defaults_for(command, "judge", settings.Settings(None, {"judge": {"atol": number}}))
        assert float(found["atol"]).hex() == number.hex()

    def test_a_subcommand_has_a_table_of_its_own(self, repository):
        write(repository, "[tool.kdtr.model.new]\nseed = 7")
        assert run("model", "new")[1] == "seed=7\n"
        assert run("model", "new", "--seed", "8")[1] == "seed=8\n"

    def test_no_config_ignores_the_file(self, repository):
        write(repository, "[tool.kdtr.judge]\natol = 0.5")
        assert "atol=0.0 from default" in run("--no-config", "judge")[1]
        write(repository, "broken = = toml")
        assert run("--no-config", "judge")[0] == 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[tool.kdtr.judeg]\natol = 1", ["tool.kdtr.judeg", "judge"]),
            ("[tool.kdtr]\natol = 1", ["tool.kdtr.atol", "no command"]),
            ("[tool.kdtr]\njudge = 1", ["tool.kdtr.judge", "table"]),
            ("[tool]\nkdtr = 1", ["[tool.kdtr]", "table"]),
            ("[tool.kdtr.judge]\natoll = 1", ["tool.kdtr.judge.atoll", "atol"]),
            ("[tool.kdtr.judge]\ngolden = 'x'", ["tool.kdtr.judge.golden"]),
            ("[tool.kdtr.judge]\nhelp = true", ["tool.kdtr.judge.help"]),
            ("[tool.kdtr.judge]\no = 'x'", ["tool.kdtr.judge.o"]),
            ("[tool.kdtr.judge.new]\nseed = 1", ["tool.kdtr.judge.new"]),
            ("[tool.kdtr.model.nwe]\nseed = 1", ["tool.kdtr.model.nwe"]),
            ("[tool.kdtr.judge]\natol = '1e-5'", ["tool.kdtr.judge.atol", "a number", "a string"]),
            ("[tool.kdtr.judge]\natol = true", ["tool.kdtr.judge.atol", "a number", "true or false"]),
            ("[tool.kdtr.judge]\natol = [1.0]", ["tool.kdtr.judge.atol", "a list"]),
            ("[tool.kdtr.judge]\natol = 1979-05-27", ["tool.kdtr.judge.atol", "a date"]),
            ("[tool.kdtr.judge]\nmax-ulp = 1.5", ["tool.kdtr.judge.max-ulp", "a whole number"]),
            ("[tool.kdtr.judge]\nformat = 1", ["tool.kdtr.judge.format", "a string"]),
            ("[tool.kdtr.judge]\nselect = 'a'", ["tool.kdtr.judge.select", "a list"]),
            ("[tool.kdtr.judge]\nselect = [1]", ["tool.kdtr.judge.select", "a string"]),
            ("[tool.kdtr.judge]\nembed = 1", ["tool.kdtr.judge.embed", "true or false"]),
            ("[tool.kdtr.judge]\nembed = 'no'", ["tool.kdtr.judge.embed", "true or false"]),
            ("[tool.kdtr.judge]\nno-embed = true", ["tool.kdtr.judge.no-embed", "embed"]),
            ("[tool.kdtr.judge]\nlogits = {top = 5}", ["tool.kdtr.judge.logits", "a table"]),
            ("[tool.kdtr.judge]\natol = = 1", ["not valid TOML", "--no-config"]),
            ("x = " + "[" * 10_000, ["not valid TOML"]),
        ],
    )
    def test_nothing_is_skipped(self, repository, text, words):
        write(repository, text)
        assert refused(*words, args=("model", "new") if "model" in text else ("judge",))

    @pytest.mark.parametrize(
        ("line", "word"),
        [
            ("max-ulp = 101", "0<=x<=100"),
            ("format = 'xml'", "'xml'"),
        ],
    )
    def test_a_value_that_the_option_refuses_is_traced_to_the_file(self, repository, line, word):
        write(repository, f"[tool.kdtr.judge]\n{line}")
        assert refused(word, "--no-config")

    @pytest.mark.parametrize(
        "text",
        [
            "[tool.kdtr.judge]\nengine-command = 'rm x'",
            "[tool.kdtr.judge]\nengine_command = 'rm x'",
            "[tool.kdtr.judge]\nengine = 'rm x'",
            "[tool.kdtr.judge]\nvia = 'rm x'",
            "[tool.kdtr.engine]\ncommand = 'rm x'",
            "[tool.kdtr]\nengine = 'rm x'",
            "[tool.kdtr.judge]\nforce = true",
        ],
    )
    def test_a_file_cannot_name_a_command_to_run_or_agree_to_overwrite(self, repository, text):
        write(repository, text)
        assert refused("command line")

    def test_a_misspelt_command_is_told_whichever_command_runs(self, repository):
        write(repository, "[tool.kdtr.judeg]\natol = 1")
        assert refused("judeg", args=("model", "new"))

    def test_bytes_that_are_no_text_and_a_huge_file_are_refused(self, repository):
        (repository / "pyproject.toml").write_bytes(b"\xff\xfe")
        assert refused("not valid TOML")
        (repository / "pyproject.toml").write_bytes(b"#" * (1 << 20) + b"\n")
        assert refused("larger")

    def test_an_unreadable_file_is_refused(self, repository, monkeypatch):
        write(repository, "")

        def deny(self, *args, **kwargs):
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr("pathlib.Path.open", deny)
        with pytest.raises(InputError, match=r"pyproject\.toml: can't be read: Permission denied"):
            settings.load(repository, ["judge"])

    def test_a_current_folder_that_is_gone_is_one_line(self, tmp_path, monkeypatch):
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        result = CliRunner().invoke(make_group(), ["judge"])
        assert result.exit_code == 2
        assert "current folder" in result.stderr


class TestNoObstacle:
    """A broken file must not keep anyone from the help, the version or the doctor."""

    @pytest.mark.parametrize("args", [["--version"], ["--help"], ["judge", "--help"], ["judge", "-h"]])
    def test_help_and_version(self, repository, args):
        write(repository, "broken = = toml")
        assert run(*args)[0] == 0

    def test_completion(self, repository, monkeypatch):
        write(repository, "broken = = toml")
        monkeypatch.setenv("_KDTR_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", "kdtr judge --max")
        monkeypatch.setenv("COMP_CWORD", "2")
        result = CliRunner().invoke(make_group(), [], prog_name="kdtr")
        assert (result.exit_code, result.stdout) == (0, "plain,--max-ulp\n")

"""`kdtr selftest` on the command line: the whole kill matrix once, tolerances that let bugs pass, exit codes."""

import json
from importlib import resources

import pytest
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from kdtr_cli.cli.main import cli
from kdtr_cli.errors import InputError
from kdtr_cli.workflows.selftest_goldens import GOLDENS
from kdtr_cli.workflows.selftest_sabotage import Edit, Sabotage
from kdtr_cli.workflows.selftest_sabotages import SABOTAGES

SCHEMA = json.loads(resources.files("kdtr_cli.report").joinpath("schema/selftest-1.json").read_text(encoding="utf-8"))


def kdtr(*args: str, config: bool = False) -> Result:
    return CliRunner().invoke(cli, [*([] if config else ["--no-config"]), "selftest", *args])


@pytest.fixture(scope="module")
def whole() -> Result:
    return kdtr("--format", "json")


class TestWhole:
    def test_every_sabotage_is_killed_and_nothing_is_red_without_one(self, whole):
        assert whole.exit_code == 0, whole.stderr
        document = json.loads(whole.stdout)
        count = len(SABOTAGES)
        assert document["line"] == f"PASS selftest killed={count}/{count} false_red=0/{len(GOLDENS)}"
        assert [row["name"] for row in document["rows"]] == list(SABOTAGES)
        assert {row["golden"] for row in document["goldens"]} == set(GOLDENS)
        assert {row["verdict"] for row in document["goldens"]} == {"IDENTICAL"}
        for row in document["rows"]:
            sabotage = SABOTAGES[row["name"]]
            assert (row["verdict"], row["hint"] in sabotage.hints) == (sabotage.verdict.value, True)
            assert (row["killed"], row["survived"]) == (True, False)

    def test_the_first_tensor_is_where_the_bug_is(self, whole):
        first = {row["name"]: row["first_tensor"] for row in json.loads(whole.stdout)["rows"]}
        for name, tensor in {
            "biased-weights": "model.layers.1.mlp.expert_weights",
            "mask-zero": "model.layers.1.mlp.expert_ids",
            "bf16-router": "model.layers.1.mlp.router_logits",
            "swapped-expert": "model.layers.1.mlp.moe_out",
            "latent-norm": "model.layers.0.self_attn.kv_latent",
            "rope-layout": "model.layers.0.self_attn.k_rope",
            "mscale-missing": "model.layers.0.self_attn.attn_out",
            "argmax-tie": None,
        }.items():
            assert first[name] == tensor

    def test_the_document_keeps_to_its_schema(self, whole):
        Draft202012Validator.check_schema(SCHEMA)
        document = json.loads(whole.stdout)
        validator = Draft202012Validator(SCHEMA)
        validator.validate(document)
        for wrong in ({"exit_code": 1}, {"survivors": ["nan"]}, {"line": "PASS"}, {"rows": []}, {"more": 1}):
            assert not validator.is_valid({**document, **wrong})


def test_the_list_names_all_and_runs_none(monkeypatch):
    monkeypatch.setattr("kdtr_cli.cli.selftest.run_selftest", None)
    made = kdtr("--list")
    assert made.exit_code == 0
    assert [line.split()[0] for line in made.stdout.splitlines()] == ["sabotage", *SABOTAGES]


def test_the_matrix_as_text():
    made = kdtr("--only", "truncated, nan")
    assert made.exit_code == 0, made.stderr
    lines = made.stdout.splitlines()
    assert lines[0].split() == ["golden", "engine", "as", "it", "is", "green", "seconds"]
    assert lines[1].split()[:3] == ["groups", "IDENTICAL", "yes"]
    header = next(line for line in lines if line.startswith("sabotage"))
    assert header.split("  ")[0].strip() == "sabotage"
    assert [line.split()[0] for line in lines if " output " in line] == ["nan", "truncated"]
    assert lines[-1] == f"PASS selftest killed=2/2 false_red=0/1 sabotages=2/{len(SABOTAGES)}"


class TestGate:
    def test_a_loose_tolerance_lets_bugs_pass_and_is_told_which(self):
        made = kdtr("--gate", "--atol 100 --allow-loose", "--only", "shift,previous-step,truncated,nan")
        assert made.exit_code == 1, made.stderr
        lines = made.stdout.splitlines()
        assert lines[-1] == (
            "FAIL selftest killed=2/4 false_red=0/1 survivors=shift,previous-step "
            f'sabotages=4/{len(SABOTAGES)} gate="--atol 100 --allow-loose"'
        )
        assert "survivor: previous-step: the logits of the step before (KernelBench #165)" in lines
        assert "Your tolerance can't tell these engines from a right one." in lines

    def test_a_tight_one_does_not(self):
        made = kdtr("--gate", "--atol 1e-3 --max-kl 1e-4", "--only", "shift,previous-step,truncated,nan")
        assert made.exit_code == 0, made.stdout
        assert made.stdout.splitlines()[-1].startswith("PASS selftest killed=4/4 false_red=0/1 ")

    def test_the_golden_s_own_noise_floor_lets_no_bug_pass_that_moves_numbers(self):
        made = kdtr("--gate", "--tolerance auto", "--only", "shift,latent-norm,int4-offset,bf16-router")
        assert made.exit_code == 0, made.stdout + made.stderr
        assert " killed=4/4 false_red=0/3 " in made.stdout.splitlines()[-1]
        far = kdtr("--gate", "--tolerance auto --tolerance-factor 1e8 --allow-loose", "--only", "shift")
        assert (far.exit_code, "survivors=shift" in far.stdout) == (1, True)

    def test_a_tie_that_is_let_pass_survives(self):
        made = kdtr("--gate", "--on-tie pass", "--only", "argmax-tie,argmax-tie-forced")
        assert made.exit_code == 1
        assert " killed=1/2 false_red=0/1 survivors=argmax-tie-forced " in made.stdout.splitlines()[-1]

    def test_the_settings_of_pyproject_hold_and_the_command_line_wins(self, monkeypatch, tmp_path):
        (tmp_path / "pyproject.toml").write_text(
            "[tool.kdtr.diff]\natol = 100.0\nallow-loose = true\nsteps = 1\nselect = 'x'\n"
        )
        monkeypatch.chdir(tmp_path)
        made = kdtr("--gate", "", "--only", "shift", config=True)
        assert (made.exit_code, made.stderr) == (1, "")
        assert "survivors=shift " in made.stdout.splitlines()[-1]
        asked = []

        def remember(options, progress):
            asked.append(options.gate)
            raise InputError("enough")

        monkeypatch.setattr("kdtr_cli.cli.selftest.run_selftest", remember)
        for args, config in ((("--gate", "--atol 1e-3"), True), ((), True), (("--gate", ""), False)):
            assert kdtr(*args, config=config).exit_code == 2
        won, without, plain = asked
        assert (won.atol, won.allow_loose, won.steps, won.select) == (1e-3, True, None, None)
        assert won.origin("atol") == "--atol, command line"
        assert won.origin("allow_loose") == "--allow-loose, pyproject.toml"
        assert without is None
        assert (plain.atol, plain.allow_loose) == (None, False)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("--atol", "--atol"),
            ("--atol -1", "--atol is -1.0; give a finite number"),
            ("--no-such 1", "no such option"),
            ("--atol '1", "No closing quotation"),
            ("--help", "no such option"),
            ("--format json", "--format is no tolerance"),
            ("--steps 2", "--steps is no tolerance"),
            ("--select a", "--select is no tolerance"),
            ("--output-file x", "--output-file is no tolerance"),
            ("--suggest", "--suggest is no tolerance"),
            ("--tolerance auto --atol 1", "leave one of the two out"),
            ("golden.h5", "unexpected extra argument"),
        ],
    )
    def test_what_is_no_tolerance_is_refused(self, text, said):
        made = kdtr("--gate", text, "--only", "nan")
        assert made.exit_code == 2
        assert said.lower() in made.stderr.lower()
        assert made.stdout == ""


class TestFailures:
    def test_a_sabotage_that_no_longer_fits_is_exit_3_and_no_verdict(self, monkeypatch):
        broken = Sabotage("", "", "groups", ("stop",), edits=(Edit("router.cu", "a text that was", "never there"),))
        monkeypatch.setitem(SABOTAGES, "gone", broken)
        made = kdtr()
        assert made.exit_code == 3
        assert made.stdout == ""
        assert "the sabotage 'gone' is broken: router.cu holds its text 0 times, not once" in made.stderr

    @pytest.mark.parametrize("only", ["nap", ",", ""])
    def test_names_that_are_none(self, only):
        made = kdtr("--only", only)
        assert made.exit_code == 2
        assert "--only" in made.stderr
        assert made.stdout == ""

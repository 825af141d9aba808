"""`kdtr diff` as a process: exit codes, what goes where, options from the command line and from pyproject.toml."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from parity_bundles import write_pair
from parity_cases import golden_side, make_tie, perturb, run_side

import kdtr_cli
from kdtr_cli.cli.diff import FORMATS
from kdtr_cli.cli.diff import diff as command
from kdtr_cli.cli.main import main

pytestmark = pytest.mark.quick

ROOT = Path(kdtr_cli.__file__).parents[1]
IDENTICAL = "PASS ar tokens=12/12 exact max_abs_logit_diff=0.000e+00 verdict=IDENTICAL"


@pytest.fixture
def case(tmp_path, monkeypatch, capsys):
    """Writes a golden and a run into the current folder, calls `kdtr diff`, gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    class Case:
        golden = golden_side()
        run = None

        def __call__(self, *args, write=True):
            if write:
                write_pair(self.golden, self.run, tmp_path)
            code = main(["diff", "g.h5", "r.h5", *args])
            out = capsys.readouterr()
            return code, out.out, out.err

    case = Case()
    case.golden = golden_side()
    case.run = run_side(case.golden)
    return case


def spawn(args, cwd, **kwargs):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "kdtr_cli", *args], cwd=cwd, env=environment, check=False, timeout=60, **kwargs
    )


class TestExitCodes:
    def test_zero_for_a_run_that_agrees(self, case):
        code, out, err = case()
        assert (code, out.splitlines()[-1], err) == (0, IDENTICAL, "")

    def test_zero_within_tolerance(self, case):
        perturb(case.run, 1e-3)
        code, out, _ = case("--atol", "2e-3")
        assert code == 0
        assert out.endswith(" verdict=PASS\n")

    def test_one_for_a_run_that_differs(self, case):
        case.run.one.tokens[3] ^= 1
        code, out, err = case()
        assert (code, err) == (1, "")
        assert out.splitlines()[-1].startswith("FAIL ar tokens=9/12 first_divergence=0:3 margin=")

    @pytest.mark.parametrize(
        ("on_tie", "code", "word"), [("fail", 1, "FAIL"), ("warn", 0, "PASS"), ("pass", 0, "PASS")]
    )
    def test_a_tie_as_told(self, case, on_tie, code, word):
        case.run.manifest["decoding"]["teacher_forced"] = True
        make_tie(case.golden, case.run, 2)
        got, out, _ = case("--atol", "2e-3", "--on-tie", on_tie)
        assert got == code
        assert out.splitlines()[-1].startswith(word + " ")
        assert out.endswith(" verdict=TIE_BREAK\n")

    def test_two_for_what_can_not_be_judged(self, case):
        for s in case.golden.seqs:
            s.form = "top:5"
        perturb(case.run, 1e-4)
        code, out, err = case("--atol", "1e-3")
        assert (code, err) == (2, "")
        assert " verdict=INCONCLUSIVE reason=" in out.splitlines()[-1]
        assert case("--atol", "1e-3", "--allow-partial")[0] == 0

    def test_two_for_invalid_evidence(self, case):
        case.run.manifest["decoding"]["stop_ids"] = [9]
        code, out, err = case()
        assert (code, err) == (2, "")
        assert out.splitlines()[-1].startswith("ERROR ar tokens=0/12 max_abs_logit_diff=none verdict=INVALID reason=")

    @pytest.mark.parametrize("names", [("g.h5", "g.h5"), ("r.h5", "r.h5"), ("r.h5", "g.h5")])
    def test_two_for_other_pairs_of_kinds(self, case, names, capsys):
        case()
        assert main(["diff", *names]) == 2
        assert " verdict=INVALID reason=" in capsys.readouterr().out.splitlines()[-1]

    def test_two_for_a_broken_bundle(self, case):
        case()
        Path("r.h5").write_bytes(Path("r.h5").read_bytes()[:2000])
        code, out, _ = case(write=False)
        assert code == 2
        assert out.splitlines()[-1].startswith("ERROR unknown tokens=0/12 ")

    @pytest.mark.parametrize(
        "args",
        [
            ["--atol", "x"],
            ["--atol", "-1"],
            ["--atol", "nan"],
            ["--rtol", "inf"],
            ["--max-ulp", "-1"],
            ["--max-ulp", "1.5"],
            ["--max-kl", "-0.1"],
            ["--on-tie", "maybe"],
            ["--steps", "0"],
            ["--steps", "-2"],
            ["--select", ""],
            ["--select", " , "],
            ["--select", "s0,nope"],
            ["--format", "xml"],
            ["--output-file", "g.h5"],
            ["--output-file", "g.h5", "--force"],
            ["--output-file", "no/where"],
            ["--output-file", "."],
            ["--nonsense"],
            ["third.h5"],
        ],
        ids=" ".join,
    )
    def test_two_and_one_line_for_a_mistake_in_the_command(self, case, args):
        code, out, err = case(*args)
        assert (code, out) == (2, "")
        assert err.startswith("kdtr: error: ")
        assert err.count("\n") == 1

    def test_two_for_a_file_that_is_not_there(self, case, capsys):
        case()
        for args in (["diff", "g.h5", "no.h5"], ["diff", "no.h5", "r.h5"], ["diff", "g.h5"], ["diff"]):
            assert main(args) == 2
            out = capsys.readouterr()
            assert (out.out, out.err.count("\n")) == ("", 1)


class TestOutput:
    def test_json_is_one_document_on_a_clean_output(self, case):
        case.run.one.logits["engine"][1, 1] = np.nan
        code, out, err = case("--format", "json")
        document = json.loads(out)
        assert (code, err) == (1, "")
        assert (document["schema"], document["verdict"], document["exit_code"]) == ("kdtr.diff/1", "DIVERGED", 1)
        assert document["totals"]["max_abs"] == "nan"

    def test_json_of_invalid_evidence(self, case):
        case.run.manifest["choices"]["rope_angles"] = "f32"
        code, out, _ = case("--format", "json")
        assert (code, json.loads(out)["verdict"]) == (2, "INVALID")

    @pytest.mark.parametrize("form", ["text", "json"])
    def test_an_output_file_takes_the_report_and_the_line_goes_to_stdout(self, case, form):
        code, out, _ = case("--format", form, "--output-file", "report")
        assert (code, out) == (0, IDENTICAL + "\n")
        text = Path("report").read_text()
        if form == "json":
            assert json.loads(text)["verdict"] == "IDENTICAL"
        else:
            assert text.splitlines()[-1] == IDENTICAL
            assert "sequence 1 's1': IDENTICAL" in text

    def test_the_exit_code_is_that_of_the_verdict_with_an_output_file_too(self, case):
        case.run.one.tokens[3] ^= 1
        assert case("--output-file", "report")[0] == 1

    def test_an_output_file_is_not_overwritten_without_force(self, case):
        Path("report").write_text("old")
        code, out, err = case("--output-file", "report")
        assert (code, out, Path("report").read_text()) == (2, "", "old")
        assert "--force" in err
        assert case("--output-file", "report", "--force")[0] == 0
        assert Path("report").read_text() != "old"

    def test_a_report_that_can_not_be_written_is_never_a_pass(self, case, monkeypatch):
        def full(fd):
            raise OSError(28, "No space left on device")

        case()
        monkeypatch.setattr("kdtr_cli.workflows.diff.os.fsync", full)
        code, out, err = case("--output-file", "report", write=False)
        assert (code, out) == (3, "")
        assert "could not be written" in err
        assert not Path("report").exists()

    def test_both_token_lists_stand_above_the_line(self, case):
        case.run.one.tokens[3] ^= 1
        lines = case()[1].splitlines()
        at = next(i for i, line in enumerate(lines) if line.split()[:1] == ["golden"] and "tier" not in line)
        assert [int(t) for t in lines[at].split()[1:]] == case.golden.one.tokens.tolist()
        assert [int(t) for t in lines[at + 1].split()[1:]] == case.run.one.tokens.tolist()


class TestFormats:
    """What each format puts where; what they hold is tested in tests/report."""

    @pytest.fixture(autouse=True)
    def no_github(self, monkeypatch):
        monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def spoil(self, case, verdict):
        """Make the pair of that verdict; returns options and exit code."""
        if verdict == "DIVERGED":
            case.run.one.tokens[3] ^= 1
        if verdict == "INVALID":
            case.run.manifest["decoding"]["stop_ids"] = [9]
        if verdict == "INCONCLUSIVE":
            case.run.one.logits.clear()
        if verdict == "TIE_BREAK":
            case.run.manifest["decoding"]["teacher_forced"] = True
            make_tie(case.golden, case.run, 2)
            return ["--atol", "2e-3", "--on-tie", "pass"], 0
        return [], {"IDENTICAL": 0, "DIVERGED": 1}.get(verdict, 2)

    @pytest.mark.parametrize("form", FORMATS)
    @pytest.mark.parametrize("verdict", ["IDENTICAL", "TIE_BREAK", "DIVERGED", "INCONCLUSIVE", "INVALID"])
    def test_no_format_changes_an_exit_code(self, case, form, verdict):
        options, expected = self.spoil(case, verdict)
        code, out, err = case("--format", form, *options)
        assert (code, err) == (expected, "")
        if form == "json":
            assert json.loads(out)["verdict"] == verdict
        elif form == "junit":
            told = {p.get("name"): p.get("value") for p in ElementTree.fromstring(out).iter("property")}
            assert (told["verdict"], told["exit_code"]) == (verdict, str(expected))
        elif form == "html":
            assert f'data-verdict="{verdict}"' in out
        else:
            assert f" verdict={verdict}" in out.splitlines()[-1]

    def test_junit_is_one_document_on_a_clean_output(self, case):
        case.run.one.tokens[3] ^= 1
        _, out, _ = case("--format", "junit")
        suite = ElementTree.fromstring(out).find("testsuite")
        assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == ("g.h5 / r.h5", "2", "1")
        assert {c.get("classname") for c in suite.iter("testcase")} == {"kdtr.g.ar"}

    def test_github_writes_annotations_the_line_and_the_step_s_summary(self, case, monkeypatch):
        case.run.one.tokens[3] ^= 1
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", "page.md")
        Path("page.md").write_text("# before\n")
        code, out, err = case("--format", "github")
        assert (code, err) == (1, "")
        assert out.startswith("::error title=kdtr diff%3A DIVERGED [tokens.diverged]::sequence 's0': ")
        page = Path("page.md").read_text()
        assert page.startswith("# before\n\n### kdtr diff: FAIL (DIVERGED)\n")
        assert f"\n    {out.splitlines()[-1]}\n" in page

    @pytest.mark.parametrize("form", ["text", "json", "junit"])
    def test_other_formats_leave_the_summary_alone(self, case, monkeypatch, form):
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", "page.md")
        assert case("--format", form)[0] == 0
        assert not Path("page.md").exists()

    def test_github_without_a_summary_to_write(self, case, monkeypatch):
        assert case("--format", "github") == (0, IDENTICAL + "\n", "")
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", "")
        assert case("--format", "github") == (0, IDENTICAL + "\n", "")

    @pytest.mark.parametrize(("verdict", "code"), [("IDENTICAL", 0), ("DIVERGED", 1)])
    def test_a_summary_that_can_not_be_written_is_a_note_and_no_verdict(self, case, monkeypatch, verdict, code):
        self.spoil(case, verdict)
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", "no/where.md")
        got, out, err = case("--format", "github")
        assert got == code
        assert out.splitlines()[-1].endswith(f" verdict={verdict}")
        assert err == "note: GITHUB_STEP_SUMMARY 'no/where.md' can't be written to: No such file or directory\n"

    @pytest.mark.parametrize("form", ["junit", "github"])
    def test_an_output_file_takes_the_report(self, case, form):
        code, out, _ = case("--format", form, "--output-file", "report")
        assert (code, out) == (0, IDENTICAL + "\n")
        assert Path("report").read_text().startswith("<?xml" if form == "junit" else IDENTICAL)


class TestOptions:
    def test_steps_and_select(self, case):
        case.run.one.tokens[3] ^= 1
        assert case("--steps", "3")[1].splitlines()[-1].endswith(" steps=6/12 verdict=IDENTICAL")
        code, out, _ = case("--select", " s1 ")
        assert code == 0
        assert out.splitlines()[-1].endswith(" sequences=1/2 verdict=IDENTICAL")
        assert case("--select", "s1,s0")[0] == 1

    def test_every_bound_reaches_the_judge(self, case):
        perturb(case.run, 1e-4)
        for args, code in (
            (["--atol", "1e-3"], 0),
            (["--rtol", "1e-9"], 1),
            (["--max-ulp", "1"], 1),
            (["--max-kl", "1e-5"], 0),
            (["--max-kl", "0"], 1),
            (["--atol", "1e-3", "--max-ulp", "1"], 1),
            (["--atol", "1000"], 2),
            (["--atol", "1000", "--allow-loose"], 0),
        ):
            assert case(*args)[0] == code, args

    def test_auto_in_pyproject_and_on_the_command_line(self, case):
        perturb(case.run, 1e-6)
        code, out, _ = case("--tolerance", "auto")
        assert (code, "holds no noise floor" in out) == (2, True)
        floor = {"rows": 12, "values": 480, "max_abs": 1e-6, "max_ulp": 9, "max_kl": 1e-13}
        case.golden.manifest["noise_floor"] = {"exact": floor}
        code, out, _ = case("--tolerance", "auto")
        assert code == 0
        assert "atol 8e-06 (auto: 8 x the golden's floor 1e-06; --tolerance, command line)" in out
        Path("pyproject.toml").write_text('[tool.kdtr.diff]\ntolerance = "auto"\ntolerance-factor = 2\n')
        code, out, _ = case()
        assert code == 0
        assert "atol 2e-06 (auto: 2 x the golden's floor 1e-06; --tolerance, pyproject.toml)" in out
        document = json.loads(case("--format", "json")[1])
        assert document["tolerance"]["tolerance"] == {"value": "auto", "origin": "--tolerance, pyproject.toml"}
        assert document["tolerance"]["tolerance_factor"] == {"value": 2, "origin": "--tolerance-factor, pyproject.toml"}
        assert 0.1 < document["tolerance"]["used"]["values"] < 1

    def test_of_auto_and_a_bound_that_it_sets_the_command_line_s_wins_and_two_of_one_place_are_refused(self, case):
        perturb(case.run, 1e-6)
        floor = {"rows": 12, "values": 480, "max_abs": 1e-6, "max_ulp": 9, "max_kl": 1e-13}
        case.golden.manifest["noise_floor"] = {"exact": floor}
        settings = Path("pyproject.toml")
        settings.write_text('[tool.kdtr.diff]\ntolerance = "auto"\ntolerance-factor = 2\n')
        code, out, _ = case("--atol", "0.5")
        assert (code, "atol 0.5 (--atol, command line)" in out, "auto" in out) == (0, True, False)
        settings.write_text("[tool.kdtr.diff]\natol = 0.5\nmax-kl = 0.1\nmax-ulp = 1000000\n")
        code, out, _ = case("--tolerance", "auto")
        assert (code, "atol 8e-06 (auto" in out, "0.5" in out) == (0, True, False)
        assert "at most 1000000 ULP (--max-ulp, pyproject.toml)" in out
        settings.write_text('[tool.kdtr.diff]\natol = 0.5\ntolerance = "auto"\n')
        code, out, err = case()
        assert (code, out) == (2, "")
        assert "--tolerance auto (--tolerance, pyproject.toml) sets what --atol (--atol, pyproject.toml) sets" in err
        code, out, err = case("--tolerance", "auto", "--max-kl", "1")
        assert (code, out, "--max-kl, command line" in err) == (2, "", True)
        settings.unlink()
        assert "needs --tolerance auto" in case("--tolerance-factor", "3")[2]

    def test_a_suggestion_given_back_as_it_is_printed_passes(self, case):
        perturb(case.run, 1e-4)
        code, out, _ = case("--suggest")
        assert code == 1
        lines = out.splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("suggest "))
        rules = [line.split() for line in lines[at + 1 :] if line.lstrip().startswith("--")]
        assert len(rules) >= 4
        for rule in rules:
            assert case(*rule)[0] == 0, rule
        document = json.loads(case("--suggest", "--format", "json")[1])
        assert len(document["tolerance"]["suggested"]["rules"]) == len(rules)
        case.run.one.logits["engine"][0, 0] = np.nan
        assert "suggest nothing: " in case("--suggest", "--atol", "1")[1]

    def test_where_a_bound_came_from_is_printed(self, case):
        perturb(case.run, 1e-4)
        Path("pyproject.toml").write_text("[tool.kdtr.diff]\natol = 1e-3\n")
        code, out, _ = case("--max-kl", "0.5")
        assert code == 0
        assert "atol 0.001 (--atol, pyproject.toml) and rtol 0 (0 beside --atol)" in out
        assert "KL at most 0.5 (--max-kl, command line)" in out
        document = json.loads(case("--format", "json")[1])
        assert document["tolerance"]["atol"] == {"value": 1e-3, "origin": "--atol, pyproject.toml"}
        assert document["tolerance"]["on_tie"] == {"value": "fail", "origin": "--on-tie, default"}

    def test_the_command_s_help_names_every_option(self, capsys):
        assert main(["diff", "--help"]) == 0
        shown = capsys.readouterr().out
        for parameter in command.params:
            assert parameter.param_type_name == "argument" or parameter.opts[0] in shown


class TestProcess:
    @pytest.fixture
    def folder(self, tmp_path):
        golden = golden_side()
        write_pair(golden, run_side(golden), tmp_path)
        return tmp_path

    def test_a_closed_standard_output_is_never_zero(self, folder):
        done = spawn(["diff", "g.h5", "r.h5"], folder, stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1))
        assert done.returncode == 3
        assert b"standard output" in done.stderr

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
    @pytest.mark.parametrize("form", FORMATS)
    def test_a_full_one_neither(self, folder, form):
        with open("/dev/full", "w") as full:
            done = spawn(["diff", "g.h5", "r.h5", "--format", form], folder, stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 3
        assert done.stderr.count(b"\n") == 1

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
    def test_a_note_that_finds_no_room_on_standard_error_changes_nothing(self, folder):
        with open("/dev/full", "w") as full, pytest.MonkeyPatch.context() as patched:
            patched.setenv("GITHUB_STEP_SUMMARY", "no/where.md")
            done = spawn(["diff", "g.h5", "r.h5", "--format", "github"], folder, stdout=subprocess.PIPE, stderr=full)
        assert (done.returncode, done.stdout.decode()) == (0, IDENTICAL + "\n")

    def test_nor_one_whose_reader_left(self, folder):
        read, write = os.pipe()
        os.close(read)
        try:
            done = spawn(["diff", "g.h5", "r.h5"], folder, stdout=write, stderr=subprocess.PIPE)
        finally:
            os.close(write)
        assert done.returncode == 3

    def test_in_a_pipe_the_line_is_last(self, folder):
        done = spawn(["diff", "g.h5", "r.h5"], folder, capture_output=True, text=True)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, IDENTICAL)
        assert done.stderr == ""

    def test_an_ascii_locale_is_no_reason_to_fail(self, tmp_path):
        golden = golden_side()
        golden.one.id = "s\u00e9q \u4e2d"
        run = run_side(golden)
        run.one.tokens[2] ^= 1
        write_pair(golden, run, tmp_path)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONIOENCODING": "ascii",
        }
        done = subprocess.run(
            [sys.executable, "-m", "kdtr_cli", "diff", "g.h5", "r.h5"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 1
        assert b"s\\xe9q" in done.stdout

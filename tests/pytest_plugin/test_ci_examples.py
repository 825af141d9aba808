"""The pipelines of docs/ci.md, run as scripts: every `run:` and `script:` in order, in a folder with what the page
says that a repository has, for an engine that is right and for one that is not.

What is not run: `uses:` steps (the folder is the checkout, the environment the installed package). One substitution:
a line that begins with `pip install` becomes `kdtr --version`, which shows that this checkout is what is installed.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import junitparser
import pytest
import yaml

from kdtr_cli.errors import Exit
from kdtr_cli.parity.verdicts import Verdict, exit_code

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples/ci"

GITHUB_SHELL = ["bash", "-e", "-c"]  #: of a step that names none

GITLAB_SHELL = ["bash", "-eo", "pipefail", "-c"]

#: Actions that the files may use, since they are not run here.
ACTIONS = {"actions/checkout@v4", "actions/setup-python@v5", "actions/upload-artifact@v4"}


@dataclass
class Step:
    name: str
    script: str
    always: bool
    code: int | None = None
    output: str = ""


@dataclass
class Pipeline:
    """A job as its service would run it: after a step that fails only those marked so go on."""

    shell: list[str]
    steps: list[Step]
    artifacts: list[str]

    def run(self, folder: Path, environment: dict[str, str]) -> None:
        failed = False
        for step in self.steps:
            if failed and not step.always:
                continue
            script = re.sub(r"(?m)^pip install .*$", "kdtr --version", step.script)
            done = subprocess.run(
                [*self.shell, script],
                cwd=folder,
                env={**environment, "CI": "true"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            step.code, step.output = done.returncode, done.stdout
            failed = failed or bool(step.code)

    def codes(self) -> dict[str, int | None]:
        return {step.name: step.code for step in self.steps}


def github(name: str) -> Pipeline:
    (job,) = yaml.safe_load((EXAMPLES / name).read_text())["jobs"].values()
    steps, artifacts = [], []
    for step in job["steps"]:
        condition = step.get("if")
        assert condition in (None, "${{ !cancelled() }}"), f"a condition that this test does not know: {condition}"
        if "uses" in step:
            assert step["uses"] in ACTIONS
            artifacts += step.get("with", {}).get("path", "").split()
        else:
            steps.append(Step(step["name"], step["run"], condition is not None))
    return Pipeline(GITHUB_SHELL, steps, artifacts)


def gitlab(name: str) -> Pipeline:
    document = yaml.safe_load((EXAMPLES / name).read_text())
    (job,) = (entry for key, entry in document.items() if key != "stages")
    # GitLab runs before_script and script as one shell, after_script as another one in any case
    steps = [Step("script", "\n".join([*job["before_script"], *job["script"]]), False)]
    steps.append(Step("after_script", "\n".join(job["after_script"]), True))
    artifacts = [*job["artifacts"]["reports"]["junit"], *job["artifacts"]["paths"]]
    assert job["artifacts"]["when"] == "always"
    assert job["retry"]["exit_codes"] == [int(Exit.FAILED)]
    return Pipeline(GITLAB_SHELL, steps, artifacts)


def artifact_is_there(folder: Path, name: str) -> bool:
    return (folder / name).is_dir() if name.endswith("/") else (folder / name).is_file()


@pytest.fixture(scope="module")
def repository(tmp_path_factory, installed) -> Path:
    """What the page says that a repository has, with goldens made by the page's own commands."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "engine.py").write_text((DOCS / "examples/numpy_engine.py").read_text())
    (folder / "test_parity.py").write_text((EXAMPLES / "test_parity.py").read_text())
    (once,) = re.findall(r"```sh\n(.*?)```", (DOCS / "ci.md").read_text(), re.DOTALL)
    done = subprocess.run([*GITHUB_SHELL, once], cwd=folder, env=installed, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def checkout(repository, tmp_path) -> Path:
    folder = tmp_path / "checkout"
    subprocess.run(["cp", "-r", str(repository), str(folder)], check=True)
    return folder


def sabotage(folder: Path) -> None:
    """An engine whose logits are a little off, in the program and in the tests alike."""
    for name, old, new in (
        ("engine.py", '"logits": np.concatenate(', '"logits": np.float32(1.001) * np.concatenate('),
        ("test_parity.py", "Output(made.tokens, made.logits,", "Output(made.tokens, made.logits * 1.001,"),
    ):
        text = (folder / name).read_text()
        assert text.count(old) == 1
        (folder / name).write_text(text.replace(old, new))


class TestGitHub:
    def test_the_gate_is_green_for_the_engine_that_is_right(self, checkout, installed):
        pipeline = github("github-gate.yml")
        pipeline.run(checkout, {**installed, "GITHUB_STEP_SUMMARY": str(checkout / "summary.md")})
        assert set(pipeline.codes().values()) == {0}, [s.output for s in pipeline.steps if s.code]
        assert "verdict=IDENTICAL" in (checkout / "summary.md").read_text()
        assert all(artifact_is_there(checkout, a) for a in pipeline.artifacts)
        assert junitparser.JUnitXml.fromfile(str(checkout / "kdtr.xml")).failures == 0

    def test_the_gate_is_red_for_one_that_is_not_and_leaves_the_evidence(self, checkout, installed):
        sabotage(checkout)
        pipeline = github("github-gate.yml")
        pipeline.run(checkout, {**installed, "GITHUB_STEP_SUMMARY": str(checkout / "summary.md")})
        codes = pipeline.codes()
        assert [codes[n] for n in ("Install", "Run the engine")] == [0, 0]
        assert [codes[n] for n in ("Judge it", "Report as JUnit", "The engine's own tests")] == [1, 1, 1]
        (judged,) = (s.output for s in pipeline.steps if s.name == "Judge it")
        assert judged.startswith("::error")
        assert judged.splitlines()[-1].startswith("FAIL ")
        assert "DIVERGED" in (checkout / "summary.md").read_text()
        assert junitparser.JUnitXml.fromfile(str(checkout / "kdtr.xml")).failures == 2
        assert len(list((checkout / "failed").iterdir())) == 2

    def test_a_golden_that_was_changed_stops_it_before_anything_runs(self, checkout, installed):
        golden = checkout / "goldens/short.h5"
        golden.write_bytes((checkout / "goldens/scored.h5").read_bytes())  # whole, but another
        pipeline = github("github-gate.yml")
        pipeline.steps = [step for step in pipeline.steps if not step.always]
        pipeline.run(checkout, installed)
        assert [s.code for s in pipeline.steps if s.name == "The goldens are those that were committed"] == [1]
        assert not (checkout / "run.h5").exists()

    def test_the_nightly_job_runs_in_an_empty_folder(self, tmp_path, installed):
        pipeline = github("github-nightly.yml")
        pipeline.run(tmp_path, {**installed, "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")})
        assert set(pipeline.codes().values()) == {0}, [s.output for s in pipeline.steps if s.code]
        assert len(pipeline.steps) == 7
        assert all(artifact_is_there(tmp_path, artifact) for artifact in pipeline.artifacts)
        assert "tokens=48/48" in (tmp_path / "summary.md").read_text()
        assert pipeline.steps[-1].output.splitlines()[-1].startswith("PASS selftest ")


class TestGitLab:
    def test_the_gate_is_green_for_the_engine_that_is_right(self, checkout, installed):
        pipeline = gitlab("gitlab-ci.yml")
        pipeline.run(checkout, installed)
        assert pipeline.codes() == {"script": 0, "after_script": 0}, [s.output for s in pipeline.steps]
        assert all(artifact_is_there(checkout, artifact) for artifact in pipeline.artifacts)
        assert pipeline.steps[1].output.splitlines()[-1].startswith("PASS ")

    def test_the_gate_is_red_for_one_that_is_not(self, checkout, installed):
        sabotage(checkout)
        pipeline = gitlab("gitlab-ci.yml")
        pipeline.run(checkout, installed)
        assert pipeline.codes() == {"script": 1, "after_script": 1}
        assert junitparser.JUnitXml.fromfile(str(checkout / "kdtr.xml")).failures == 2
        assert (checkout / "run.h5").is_file()


class TestPage:
    TEXT = (DOCS / "ci.md").read_text()

    def test_every_example_is_linked_and_run(self):
        linked = set(re.findall(r"\(examples/ci/([\w.-]+)\)", self.TEXT))
        assert linked == {f.name for f in EXAMPLES.iterdir() if f.is_file()}
        source = Path(__file__).read_text()
        assert all(f'"{name}"' in source for name in linked)

    def test_the_table_of_verdicts_is_the_code_s(self):
        said = re.findall(r"(?m)^\| ([0-3]) \| ([^|]+) \|", self.TEXT)
        assert sorted({int(code) for code, _ in said}) == [0, 1, 2, 3]
        told = {(int(code), v) for code, text in said for v in Verdict if v.value in re.findall(r"[A-Z_]+", text)}
        assert told == {(int(exit_code(v, tie)), v) for v in Verdict for tie in ("fail", "warn", "pass")}

    def test_no_step_hides_an_exit_code(self):
        for file in EXAMPLES.glob("*.yml"):
            text = re.sub(r"(?m)^\s*#.*$", "", file.read_text())
            assert not re.search(r"\|\| *true|allow_failure|continue-on-error|exit-zero|\|\|", text), file

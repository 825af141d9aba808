"""The pytest plugin, as projects use it: pytest within pytest, and where the process matters in one of its own, in an
environment where kdtr is installed."""

import hashlib
import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import junitparser
import numpy as np
import pytest

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.pytest_plugin import on_ci
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.golden_rounds import DraftOptions
from kdtr_cli.workflows.prompts import PromptOptions

pytest_plugins = ["pytester"]

#: An engine that answers with what a file holds, so that a test of the plugin says what it answers.
ENGINE = """
import numpy as np
from kdtr_cli.testing import Output

def answers():
    with np.load("answers.npz") as file:
        ids = sorted({name.partition("/")[0] for name in file})
        return {i: Output(file[f"{i}/tokens"], file[f"{i}/logits"]) for i in ids}
"""
DECODE = """
from engine import answers

def test_decode(kdtr):
    golden = kdtr.golden("decode")
    assert [p.id for p in kdtr.inputs(golden).prompts] == ["0", "1"]
    kdtr.assert_parity(golden, answers())
"""
#: How the plugin is loaded where kdtr is not installed but found.
PLUGIN = ("-p", "kdtr_cli.pytest_plugin")
INI = "[pytest]\nfilterwarnings = error\naddopts = --strict-config --strict-markers\n"


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("made") / "decode.h5"
    make_golden(GoldenOptions("tiny", path, PromptOptions(ids=("1 2 3", "7")), 3))
    return path


#: Keeps a copy of what a golden was made anew as, since one of the same content is thrown away.
KEEP = """
import pathlib, shutil
from kdtr_cli.pytest_plugin import update

def keep(path, new, old=update._from_manifest):
    old(path, new)
    pathlib.Path("kept").mkdir(exist_ok=True)
    shutil.copy(new, pathlib.Path("kept") / path.name)

update._from_manifest = keep
"""


class Project:
    """A folder with tests of an engine. `run` starts pytest in it: in this process, or with `alone` in its own."""

    def __init__(self, pytester: pytest.Pytester, environment: dict[str, str], golden: Path):
        self.pytester, self.folder, self.environment = pytester, pytester.path, environment
        (self.folder / "goldens").mkdir()
        (self.folder / "goldens/decode.h5").write_bytes(golden.read_bytes())
        self.write("pytest.ini", INI)
        self.write("engine.py", ENGINE)
        self.write("test_decode.py", DECODE)
        self.answer()

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def answer(self, shift: float = 0.0) -> None:
        arrays = {}
        with open_bundle(self.folder / "goldens/decode.h5") as bundle:
            for s in bundle.sequences:
                arrays |= {f"{s.id}/tokens": s.tokens, f"{s.id}/logits": s.array("logits/exact") + np.float32(shift)}
        np.savez(self.folder / "answers.npz", **arrays)

    def run(self, *arguments: str, code: int = 0, alone: bool = False, ci: str | None = None) -> str:
        words = ["-p", "no:cacheprovider", "-q", *arguments]
        if alone:
            environment = self.environment if ci is None else {**self.environment, "CI": ci}
            command = [sys.executable, "-m", "pytest", *words]
            done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
            text, returned = done.stdout + done.stderr, done.returncode
        else:
            installed = entry_points(group="pytest11", name="kdtr")
            with pytest.MonkeyPatch.context() as patch:
                patch.delenv("CI", raising=False)
                patch.delenv("PYTEST_ADDOPTS", raising=False)
                if ci is not None:
                    patch.setenv("CI", ci)
                patch.setattr(sys, "dont_write_bytecode", True)  # a test file may change within one second
                result = self.pytester.runpytest_inprocess(*words, *([] if installed else PLUGIN))
            text, returned = result.stdout.str() + result.stderr.str(), result.ret
        assert returned == code, text
        return text

    def sha256(self, name: str = "decode.h5") -> str:
        return hashlib.sha256((self.folder / "goldens" / name).read_bytes()).hexdigest()


@pytest.fixture
def project(pytester, installed, golden) -> Project:
    return Project(pytester, installed, golden)


class TestLoading:
    def test_an_unrelated_project_pays_next_to_nothing(self, project):
        """NumPy and h5py are not imported, no test changes, and a warning would be an error."""
        project.write("test_decode.py", "")
        project.write(
            "test_other.py",
            "import sys\n\n\ndef test_a(request):\n"
            "    assert request.config.pluginmanager.has_plugin('kdtr')\n"
            "    heavy = {'numpy', 'h5py', 'click', 'rich', 'safetensors', 'kdtr_cli.testing', 'kdtr_cli.errors'}\n"
            "    assert not heavy & set(sys.modules)\n",
        )
        assert "1 passed" in project.run("test_other.py", alone=True)

    def test_it_can_be_left_out(self, project):
        assert "fixture 'kdtr' not found" in project.run("-p", "no:kdtr", code=1, alone=True)

    def test_kdtr_may_be_imported_before_pytest_starts(self, project):
        """pytest can't rewrite its assertions then, and would say so with a warning: here an error."""
        code = "import sys, kdtr_cli, kernels_cu, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=project.folder, env=project.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def test_its_options_are_in_the_help(self, project):
        text = project.run("--help")
        for option in ("--kdtr-goldens", "--kdtr-save", "--kdtr-update", "--kdtr-unused", "kdtr_goldens"):
            assert option in text


class TestParity:
    def test_an_engine_that_is_right_passes_and_one_that_is_not_fails_with_the_verdict_line(self, project):
        assert "1 passed" in project.run()
        project.answer(0.5)
        text = project.run("--junit-xml=report.xml", code=1)
        line = "first_logit_failure=0:0 weights=unverified rope=unverified verdict=DIVERGED"
        assert line in text
        (case,) = next(iter(junitparser.JUnitXml.fromfile(str(project.folder / "report.xml"))))
        assert line in case.result[0].text  # its message pytest cuts short
        assert not list(project.folder.glob("**/*.partial"))

    def test_the_tolerance_may_be_the_golden_s_own_noise_floor(self, project):
        project.answer(1e-7)  # within what rounding does
        project.run(code=1)
        project.write("test_decode.py", DECODE.replace("answers())", "answers(), tolerance='auto')"))
        project.run()
        project.answer(1e-2)
        out = project.run(code=1)
        assert "max_abs_logit_diff=1.000e-02" in out

    def test_the_folder_of_goldens_is_the_ini_files_or_as_told(self, project):
        (project.folder / "goldens").rename(project.folder / "reference data")
        assert "no such golden" in project.run(code=1)
        assert "1 passed" in project.run("--kdtr-goldens", "reference data")
        project.write("pytest.ini", f"{INI}kdtr_goldens = reference data\n")
        (project.folder / "below").mkdir()
        assert "1 passed" in project.run("--rootdir", ".", "-c", "pytest.ini", "test_decode.py")

    def test_no_name_leaves_the_folder(self, project):
        names = ["../goldens/decode", f"{project.folder}/goldens/decode", "", "a/../../decode"]
        project.write(
            "test_decode.py",
            "import pytest\nfrom kdtr_cli.testing import InputError\n\n"
            f"@pytest.mark.parametrize('name', {names})\ndef test_a(kdtr, name):\n"
            "    with pytest.raises(InputError, match='not a name below'):\n        kdtr.golden(name)\n",
        )
        assert "4 passed" in project.run()

    def test_a_broken_golden_is_told_from_a_failure_of_the_engine(self, project):
        path = project.folder / "goldens/decode.h5"
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        text = project.run(code=1)
        assert "InputError" in text
        assert "ParityError" not in text


class TestSave:
    def test_a_failed_run_is_kept_and_the_command_judges_it_again(self, project):
        project.answer(0.5)
        project.write(
            "test_decode.py",
            DECODE.replace("def test_decode(kdtr):", "import pytest\n@pytest.mark.parametrize('x', ['a b', 'a/b'])\n"
                           "def test_decode(kdtr, x):").replace("answers())", "answers(), atol=1e-3, on_tie='warn')"),
        )  # fmt: skip
        text = project.run("--kdtr-save", "failed/runs", "--tb=short", code=1)
        again = {line.partition("again: ")[2] for line in text.splitlines() if "again: kdtr diff" in line}
        assert len(again) == 2
        assert len(list((project.folder / "failed/runs").iterdir())) == 2
        for command in again:
            done = subprocess.run(
                command, shell=True, cwd=project.folder, env=project.environment, capture_output=True, text=True
            )
            assert done.returncode == 1, done.stderr
            assert done.stdout.splitlines()[-1] in text
        project.run("--kdtr-save", "failed/runs", code=1)  # the same names again, not more and more
        assert len(list((project.folder / "failed/runs").iterdir())) == 2

    def test_a_run_that_passes_is_not_kept(self, project):
        project.run("--kdtr-save", "failed")
        assert not list((project.folder / "failed").iterdir())


class TestUpdate:
    def test_it_is_refused_where_ci_is_set(self, project):
        before = project.sha256()
        text = project.run("--kdtr-update", code=4, ci="true", alone=True)
        assert len([line for line in text.splitlines() if line.strip()]) == 1
        assert "--kdtr-update is refused where CI is set" in text
        assert project.sha256() == before
        assert "1 passed" in project.run(ci="true")
        assert "nothing changed" in project.run("--kdtr-update", ci="false")

    @pytest.mark.parametrize("value", ["true", "1", "yes", "True", "woodpecker", " x"])
    def test_whatever_else_ci_is_set_to_counts(self, value):
        assert on_ci({"CI": value})

    @pytest.mark.parametrize("value", ["", "0", "false", "False", " "])
    def test_what_means_that_it_is_unset(self, value):
        assert not on_ci({"CI": value})
        assert not on_ci({})

    def test_a_golden_is_made_anew_from_its_manifest_byte_for_byte(self, project):
        made = {
            "plain": {},
            "preset": {"embed_weights": False},
            "float32": {"exact": False, "single": "float32"},
            "top": {"score": True, "logits": "top:7", "temperature": 0.5, "ignore_eos": True},
            "ddtree": {"drafting": DraftOptions("ddtree", "synthetic:0.5", 4, 4)},
            "bf16": {"bf16": True},
            "float64, bf16": {"exact": False, "bf16": True},
        }
        (project.folder / "p.jsonl").write_text('{"id": "ä", "ids": [3, 4]}\n{"id": "b", "ids": [5]}\n')
        prompts = PromptOptions(file=project.folder / "p.jsonl", seed=7)
        for name, options in made.items():
            make_golden(GoldenOptions("tiny", project.folder / f"goldens/{name}.h5", prompts, 3, **options))
        before = {name: project.sha256(f"{name}.h5") for name in made}
        project.write("conftest.py", KEEP)
        project.write(
            "test_decode.py", f"def test_a(kdtr):\n    for name in {list(made)}:\n        kdtr.golden(name)\n"
        )
        assert project.run("--kdtr-update", alone=True).count("nothing changed") == len(made)
        assert {name: project.sha256(f"{name}.h5") for name in made} == before
        kept = {f.stem: hashlib.sha256(f.read_bytes()).hexdigest() for f in (project.folder / "kept").iterdir()}
        assert kept == before

    def test_a_recipe_makes_what_is_not_there_and_says_what_changed(self, project):
        test = "def test_a(kdtr):\n    kdtr.golden('new/one', recipe={!r})\n"
        project.write("test_decode.py", test.format("tiny --prompt-ids '1 2' --steps 2"))
        assert "pytest --kdtr-update makes it" in project.run(code=1)
        assert "one.h5: made" in project.run("--kdtr-update")
        first = project.sha256("new/one.h5")
        assert "nothing changed" in project.run("--kdtr-update")
        assert project.sha256("new/one.h5") == first
        project.write("test_decode.py", test.format(["tiny", "--prompt-ids", "1 3", "--steps", "4"]))
        text = project.run("--kdtr-update")
        assert "decoding.steps 2 -> 4" in text
        assert "1 prompts are others, first of '0'" in text
        with open_bundle(project.folder / "goldens/new/one.h5") as bundle:
            assert bundle.sequences[0].prompt.tolist() == [1, 3]
        assert [f.name for f in (project.folder / "goldens/new").iterdir()] == ["one.h5"]

    def test_a_function_may_be_the_recipe(self, project):
        project.write(
            "test_decode.py",
            "import shutil\n\ndef make(path):\n    shutil.copy('goldens/decode.h5', path)\n\n"
            "def test_a(kdtr):\n    kdtr.golden('copy', recipe=make)\n",
        )
        assert "copy.h5: made" in project.run("--kdtr-update")
        assert project.sha256("copy.h5") == project.sha256()

    def test_a_recipe_that_fails_leaves_the_old_golden(self, project):
        before = project.sha256()
        project.write(
            "test_decode.py",
            "import pytest\n\nrecipes = ['no-such-model', lambda path: path.write_bytes(b'x'), lambda path: None]\n\n"
            "@pytest.mark.parametrize('recipe', recipes)\ndef test_a(kdtr, recipe):\n"
            "    kdtr.golden('decode', recipe=recipe)\n",
        )
        text = project.run("--kdtr-update", code=1)
        assert "3 failed" in text
        assert "failed with exit 2" in text
        assert project.sha256() == before
        assert [f.name for f in (project.folder / "goldens").iterdir()] == ["decode.h5"]

    def test_a_new_golden_is_read_whole_before_it_takes_the_old_one_s_place(self, project):
        path = project.folder / "goldens/decode.h5"
        with open_bundle(path) as bundle:
            logits = bundle.sequences[0].array("logits/exact").tobytes()
        data = bytearray(path.read_bytes())
        data[data.index(logits)] ^= 1  # it opens, and only the digest of this array is wrong
        (project.folder / "damaged").write_bytes(data)
        before = project.sha256()
        project.write(
            "test_decode.py",
            "import shutil\n\ndef test_a(kdtr):\n"
            "    kdtr.golden('decode', recipe=lambda path: shutil.copy('damaged', path))\n",
        )
        assert "was not made anew" in project.run("--kdtr-update", code=1)
        assert project.sha256() == before

    def test_a_broken_golden_is_mended_by_a_recipe_and_not_by_itself(self, project):
        path = project.folder / "goldens/decode.h5"
        path.write_bytes(path.read_bytes()[:3000])
        project.write("test_decode.py", "def test_a(kdtr):\n    kdtr.golden('decode')\n")
        project.run("--kdtr-update", code=1)
        assert path.stat().st_size == 3000
        project.write("test_decode.py", "def test_a(kdtr):\n    kdtr.golden('decode', recipe='tiny --steps 2')\n")
        assert "the old one was broken" in project.run("--kdtr-update")

    def test_what_a_manifest_can_not_say_needs_a_recipe(self, project, tmp_path):
        path = project.folder / "goldens/folder.h5"
        model = tmp_path / "some model"
        subprocess.run([sys.executable, "-m", "kdtr_cli", "model", "new", "tiny", "-o", str(model)], check=True)
        make_golden(GoldenOptions(str(model), path, PromptOptions(ids=("1",)), 2, embed_weights=False))
        project.write("test_decode.py", "def test_a(kdtr):\n    kdtr.golden('folder')\n")
        assert "give it a recipe" in project.run("--kdtr-update", code=1)

    def test_workers_make_a_golden_once(self, project):
        pytest.importorskip("xdist")
        project.write(
            "test_decode.py",
            "import os, pathlib, pytest, shutil\n\ndef make(path):\n"
            "    pathlib.Path(f'made.{os.getpid()}').touch()\n"
            "    shutil.copy('goldens/decode.h5', path)\n\n@pytest.mark.parametrize('i', range(8))\n"
            "def test_a(kdtr, i):\n    kdtr.golden('copy', recipe=make)\n",
        )
        text = project.run("--kdtr-update", "-n", "2", "--dist", "load", alone=True)
        assert "8 passed" in text
        assert text.count("copy.h5: made") == 1
        assert len(list(project.folder.glob("made.*"))) == 1
        assert "refused" in project.run("--kdtr-update", "-n", "2", code=4, alone=True, ci="1")


class TestUnused:
    @pytest.fixture
    def three(self, project) -> Project:
        folder = project.folder / "goldens"
        (folder / "old").mkdir()
        (folder / "old/forgotten.h5").write_bytes(b"")
        (folder / ".decode.00.partial.h5").write_bytes(b"")
        (folder / "sweep").mkdir()
        (folder / "sweep/sweep.json").write_text("{}")
        (folder / "sweep/shard-000000.h5").write_bytes(b"")
        return project

    @pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
    def test_goldens_that_nobody_asked_for_are_listed_on_request(self, three, workers):
        text = three.run("--kdtr-unused", "fail", *workers, code=1, alone=bool(workers))
        assert "1 passed" in text
        listed = [
            line.partition(": no test of this run")[0] for line in text.splitlines() if "no test of this run" in line
        ]
        assert [Path(line).relative_to(three.folder / "goldens").as_posix() for line in listed] == [
            "old/forgotten.h5",
            "sweep",
        ]

    def test_they_are_no_failure_unless_that_is_said(self, three):
        assert "forgotten" not in three.run()
        assert "forgotten" in three.run("--kdtr-unused", "warn")

    def test_none_is_no_failure(self, project):
        assert "1 passed" in project.run("--kdtr-unused", "fail")


def test_the_parts_of_an_update_that_are_said(project):
    """Each kind of change in the one line: tokens, logits, the model."""
    path = project.folder / "goldens/decode.h5"
    recipe = "tiny --prompt-ids '1 2 3' --prompt-ids 7 --steps 3"
    project.write(
        "test_decode.py",
        f"def test_a(kdtr):\n    kdtr.golden('decode', recipe={recipe + ' --latent-norm-eps config'!r})\n",
    )
    text = project.run("--kdtr-update")
    assert "choices.latent_norm_eps hf -> config" in text
    with open_bundle(path) as bundle:
        assert json.loads(bundle.config_text)["vocab_size"] == 512

"""`kdtr doctor`: tells everything, crashes on nothing, and exits 3 only where no engine can run."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import kdtr_cli
from kdtr_cli.cli.main import cli
from kdtr_cli.engine.devices.gpu import gpu_missing
from kdtr_cli.reference import arith
from kdtr_cli.workflows import doctor as host
from kdtr_cli.workflows import doctor_engine
from kdtr_cli.workflows.diagnosis import Diagnosis, Item, Probe, Section, gather

ROOT = Path(kdtr_cli.__file__).parents[1]

#: Variables of the caller's that would change what the tests see.
CLEAN = ("CXX", "NO_COLOR", "FORCE_COLOR", "KDTR_CACHE_DIR", "COLUMNS")


@pytest.fixture(autouse=True)
def clean(tmp_path_factory, tmp_path, monkeypatch):
    """A current folder of its own, and one cache for all tests of this file."""
    for name in CLEAN:
        monkeypatch.delenv(name, raising=False)
    cache = tmp_path_factory.getbasetemp() / "doctor-cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    monkeypatch.setenv("KDTR_CACHE_DIR", str(cache))
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)


def ask(*args, before=()):
    """The exit code and the document of `kdtr doctor --format json`."""
    result = CliRunner().invoke(cli, [*before, "doctor", "--format", "json", *args])
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert document["exit_code"] == result.exit_code
    return document


def section(document, title):
    (found,) = [s for s in document["sections"] if s["title"] == title]
    return {item["name"]: item for item in found["items"]}


class TestDocument:
    def test_it_is_one_document_of_the_schema(self):
        document = ask()
        assert set(document) == {"schema", "exit_code", "devices", "sections"}
        assert document["schema"] == "kdtr.doctor/1"
        assert set(document["devices"]) == {"cpu", "gpu"}
        titles = [s["title"] for s in document["sections"]]
        assert len(set(titles)) == len(titles)
        for found in document["sections"]:
            assert set(found) == {"title", "items"}
            assert found["items"], f"{found['title']} says nothing"
            for item in found["items"]:
                assert set(item) == {"name", "state", "value", "remedy"}
                assert item["state"] in ("ok", "note", "missing", "failed")
                assert bool(item["remedy"]) == (item["state"] in ("missing", "failed")), item

    def test_it_tells_what_a_bug_report_needs(self):
        document = ask()
        assert section(document, "kdtr")["version"]["value"] == kdtr_cli.__version__
        assert section(document, "kdtr")["python"]["value"].startswith(platform.python_version())
        assert section(document, "machine")["platform"]["value"] == platform.platform()
        cores = len(os.sched_getaffinity(0))
        assert section(document, "machine")["cores"]["value"].startswith(f"{cores} usable")
        assert re.match(r"\d+\.\d GiB, \d+\.\d GiB available", section(document, "machine")["memory"]["value"])
        assert section(document, "numpy")["version"]["value"] == np.__version__
        assert section(document, "numpy")["BLAS"]["value"] not in ("", "unknown")
        assert {"click", "h5py", "numpy", "safetensors"} <= set(section(document, "libraries"))
        assert "entries" in section(document, "compile cache")

    def test_the_cpu_device_runs_here_and_was_tried(self):
        document = ask()
        assert document["devices"]["cpu"] is True
        assert document["exit_code"] == 0
        assert section(document, "CPU device")["self-check"]["state"] == "ok"
        assert section(document, "C++ compiler")["C++ compiler"]["state"] == "ok"

    def test_the_text_says_the_same(self):
        document = ask()
        result = CliRunner().invoke(cli, ["doctor"])
        assert result.exit_code == 0
        assert result.stderr == ""
        assert "\x1b" not in result.stdout
        lines = result.stdout.splitlines()
        for found in document["sections"]:
            assert found["title"] in lines
            for item in found["items"]:
                assert any(line.startswith(f"  {item['state']:<8}{item['name']} ") for line in lines), item
        assert lines[-1].startswith("The engine can run on: cpu")

    @pytest.mark.parametrize("devices", [{"cpu": c, "gpu": g} for c in (True, False) for g in (True, False)])
    def test_exit_3_only_where_nothing_runs(self, devices):
        assert Diagnosis((), devices).exit_code == (0 if devices["cpu"] or devices["gpu"] else 3)


class TestGuard:
    def test_a_probe_that_fails_keeps_what_it_found_and_stops_no_other(self):
        def half():
            yield Item("a", "ok", "1")
            raise OSError(5, "Input/output error\nat line 2")

        def whole():
            yield Item("b", "ok", "2")

        first, second = gather([Probe("half", half), Probe("whole", whole)])
        assert first.items[0] == Item("a", "ok", "1")
        assert first.items[1].state == "failed"
        assert first.items[1].value == "OSError: [Errno 5] Input/output error at line 2"
        assert second == Section("whole", (Item("b", "ok", "2"),))

    def test_doctor_outlives_every_probe(self, monkeypatch):
        def broken(*_):
            raise RuntimeError("broken")
            yield

        for name in ("_kdtr", "_machine", "_numpy", "_libraries", "_environment"):
            monkeypatch.setattr(host, name, broken)
        for name in ("compiler", "cpu_device", "gpu_device", "nvrtc", "cache"):
            monkeypatch.setattr(doctor_engine, name, broken)
        document = ask()
        assert document["exit_code"] == 3
        failed = [s["title"] for s in document["sections"] if s["items"][0]["value"] == "RuntimeError: broken"]
        assert len(failed) == 10
        result = CliRunner().invoke(cli, ["doctor"])
        assert result.exit_code == 3
        assert result.stdout.endswith("The engine can't run here on any device.\n")

    def test_an_engine_that_cannot_be_imported_is_a_line(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "kdtr_cli.engine.devices", None)
        document = ask()
        assert "ModuleNotFoundError" in section(document, "CPU device")["probe"]["value"]
        assert document["devices"]["cpu"] is False
        assert section(document, "C++ compiler")["C++ compiler"]["state"] == "ok"


class TestCompiler:
    def test_none_at_all_is_told_with_what_to_install(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setitem(sys.modules, "ziglang", None)
        monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
        document = ask()
        item = section(document, "C++ compiler")["C++ compiler"]
        assert item["state"] == "missing"
        for word in ("g++", "CXX", "ziglang"):
            assert word in item["remedy"]
        assert document["devices"]["cpu"] is False
        assert document["exit_code"] == (0 if document["devices"]["gpu"] else 3)

    def test_a_compiler_that_does_not_work_is_told_by_name(self, monkeypatch):
        monkeypatch.setenv("CXX", "/bin/false")
        document = ask()
        assert "/bin/false" in section(document, "C++ compiler")["C++ compiler"]["remedy"]
        assert section(document, "CPU device")["self-check"]["state"] == "failed"
        assert section(document, "environment")["CXX"]["value"] == "/bin/false"


class TestDevices:
    def test_one_wrong_bit_and_the_device_does_not_count(self, monkeypatch):
        right = arith.rms_norm

        def wrong(x, weight, eps):
            result = right(x, weight, eps)
            result.view(np.uint32)[1, 7] ^= 1
            return result

        monkeypatch.setattr(arith, "rms_norm", wrong)
        document = ask()
        item = section(document, "CPU device")["self-check"]
        assert item["state"] == "failed"
        assert "1 elements" in item["value"]
        assert document["devices"]["cpu"] is False

    def test_a_gpu_that_lacks_something_is_told_with_what(self, monkeypatch):
        monkeypatch.setattr("kdtr_cli.engine.devices.gpu.gpu_missing", lambda: "CuPy can't be imported: pip install it")
        document = ask()
        item = section(document, "GPU device")["self-check"]
        assert item["state"] == "missing"
        assert "pip install" in item["value"]
        assert document["devices"]["gpu"] is False

    def test_two_cupy_packages_are_a_fault(self, monkeypatch):
        monkeypatch.setattr(doctor_engine, "_version", lambda name: "14.0" if name.startswith("cupy-") else None)
        item = section(ask(), "GPU device")["CuPy"]
        assert item["state"] == "failed"
        assert "pip uninstall -y cupy-cuda12x cupy-cuda13x" in item["remedy"]

    @pytest.mark.parametrize(
        ("script", "name", "state", "word"),
        [
            ("echo 'NVIDIA H200, 9.0, 143771 MiB, 143000 MiB, 580.65.06, Default'", "GPU 0", "note", "compute_cap 9.0"),
            ("echo 'Driver/library version mismatch'; exit 18", "nvidia-smi", "failed", "mismatch"),
        ],
    )
    def test_what_nvidia_smi_says(self, monkeypatch, tmp_path, script, name, state, word):
        fake = tmp_path / "nvidia-smi"
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        item = section(ask(), "GPU device")[name]
        assert item["state"] == state
        assert word in item["value"]

    @pytest.mark.gpu
    def test_the_gpu_runs_here_and_was_tried(self):
        if lacking := gpu_missing():
            pytest.skip(lacking)
        document = ask()
        assert document["devices"]["gpu"] is True
        assert section(document, "GPU device")["self-check"]["state"] == "ok"
        assert "driver" in section(document, "GPU device")


class TestArithmetic:
    """Modes of the processor that break the numerics contract are seen, each in a process of its own."""

    def states(self, prelude):
        """The states of the numpy section, looked at alone: HDF5 does not survive another rounding mode."""
        code = f"{prelude}\nfrom kdtr_cli.workflows.doctor import _numpy\nfor i in _numpy(): print(i.name, i.state)"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())

    def test_nothing_wrong(self):
        found = self.states("import numpy, ctypes")
        assert (found["subnormals"], found["rounding"]) == ("ok", "ok")

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="the bits of MXCSR are x86's")
    @pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
    @pytest.mark.parametrize("bits", ["0x8000", "0x0040", "0x8040"])
    def test_flushed_subnormals(self, tmp_path, bits):
        source = f"#include <xmmintrin.h>\nvoid flush(void) {{ _mm_setcsr(_mm_getcsr() | {bits}); }}"
        library = tmp_path / "flush.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=source.encode(), check=True)
        found = self.states(f"import numpy, ctypes; ctypes.CDLL({str(library)!r}).flush()")
        assert found["subnormals"] == "failed"

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of the rounding mode is x86's")
    @pytest.mark.parametrize("mode", [0x400, 0x800, 0xC00])
    def test_another_rounding_mode(self, mode):
        found = self.states(f"import numpy, ctypes; ctypes.CDLL('libm.so.6').fesetround({mode})")
        assert found["rounding"] == "failed"


class TestCache:
    def test_an_unsafe_folder_is_told(self, monkeypatch, tmp_path):
        folder = tmp_path / "open"
        folder.mkdir()
        folder.chmod(0o777)
        monkeypatch.setenv("KDTR_CACHE_DIR", str(folder))
        item = section(ask(), "compile cache")["folder"]
        assert item["state"] == "failed"
        assert "chmod" in item["remedy"]

    def test_entries_are_counted(self, monkeypatch, tmp_path):
        folder = tmp_path / "cache"
        monkeypatch.setenv("KDTR_CACHE_DIR", str(folder))
        found = section(ask(), "compile cache")
        assert found["folder"]["state"] == "ok"
        sizes = [p.stat().st_size for p in folder.glob("entry-*")]
        assert len(sizes) >= 2  # the runtime and one kernel of the self-check
        assert found["entries"]["value"] == f"{len(sizes)} ({sum(sizes)} bytes)"


class TestSettings:
    def test_a_broken_file_is_told_and_stops_nothing(self, tmp_path):
        (tmp_path / "pyproject.toml").write_text("broken = = toml")
        document = ask()
        assert document["exit_code"] == 0
        item = section(document, "settings")["pyproject.toml"]
        assert item["state"] == "failed"
        assert str(tmp_path / "pyproject.toml") in item["value"]

    def test_the_tables_of_all_commands_are_checked(self, tmp_path):
        text = "[tool.kdtr.diff]\natoll = 1\n[tool.kdtr.verify]\nformat = 'json'"
        (tmp_path / "pyproject.toml").write_text(text)
        found = section(ask(), "settings")
        assert found["[tool.kdtr.diff]"]["state"] == "failed"
        assert "atoll" in found["[tool.kdtr.diff]"]["value"]
        assert found["[tool.kdtr.verify]"] == {
            "name": "[tool.kdtr.verify]",
            "state": "ok",
            "value": "format",
            "remedy": "",
        }

    def test_no_config(self, tmp_path):
        (tmp_path / "pyproject.toml").write_text("broken = = toml")
        item = section(ask(before=["--no-config"]), "settings")["pyproject.toml"]
        assert item["state"] == "note"

    def test_its_own_format_can_be_set(self, tmp_path):
        (tmp_path / "pyproject.toml").write_text("[tool.kdtr.doctor]\nformat = 'json'")
        result = CliRunner().invoke(cli, ["doctor"])
        assert json.loads(result.stdout)["schema"] == "kdtr.doctor/1"


class TestEnvironment:
    def test_variables_that_matter(self, monkeypatch):
        monkeypatch.setenv("KDTR_SOMETHING", "x")
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setenv("SECRET_TOKEN", "hidden")
        found = section(ask(), "environment")
        assert found["KDTR_SOMETHING"]["value"] == "x"
        assert found["OMP_NUM_THREADS"]["value"] == "3"
        assert found["CUDA_VISIBLE_DEVICES"]["value"] == "(set, but empty)"
        assert "SECRET_TOKEN" not in found

    def test_a_value_cannot_disturb_the_terminal(self, monkeypatch):
        monkeypatch.setenv("KDTR_SOMETHING", "a\n\x1b[31mb")
        result = CliRunner().invoke(cli, ["doctor"])
        assert r"a \x1b[31mb" in result.stdout

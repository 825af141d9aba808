"""This checkout as an installed distribution, for processes of their own: what `pip install` would leave in an
environment, without one being touched."""

import os
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

import kdtr_cli

ROOT = Path(kdtr_cli.__file__).parents[1]


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> dict[str, str]:
    """An environment in which kdtr of this checkout is installed: its entry points and its command `kdtr`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    site = tmp_path_factory.mktemp("site")
    info = site / f"kdtr-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kdtr\nVersion: {project['version']}\n")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [
        line for group, points in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    # pytest goes by it: what comes with a plugin has its assertions rewritten
    files = [f.relative_to(ROOT) for package in ("kdtr_cli", "kernels_cu") for f in (ROOT / package).rglob("*.py")]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    commands = tmp_path_factory.mktemp("bin")
    for name, target in {"kdtr": project["scripts"]["kdtr"], "pytest": "pytest:console_main"}.items():
        module, _, function = target.partition(":")
        # with the guard that pip writes too: processes of a sweep import it
        script = (
            f'import sys\nfrom {module} import {function}\n\nif __name__ == "__main__":\n    sys.exit({function}())\n'
        )
        (commands / name).write_text(f"#!{sys.executable}\n{script}")
        (commands / name).chmod(0o755)
    for name in ("python", "python3"):
        (commands / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        (commands / name).chmod(0o755)
    unset = (
        "CI",
        "GITHUB_STEP_SUMMARY",
        "GITHUB_ACTIONS",
        "PYTEST_ADDOPTS",
        "PYTEST_CURRENT_TEST",
        "PYTEST_XDIST_WORKER",
    )
    kept = {k: v for k, v in os.environ.items() if k not in unset}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]),
        "PATH": os.pathsep.join([str(commands), kept["PATH"]]),
        "OMP_NUM_THREADS": "1",
    }

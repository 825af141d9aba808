"""The pytest plugin: goldens of a project by name, parity as an assertion, failed runs kept, goldens made anew.

    def test_decode(kdtr):
        golden = kdtr.golden("decode")                  # goldens/decode.h5
        outputs = my_engine(kdtr.inputs(golden))        # prompts and settings, no answers
        kdtr.assert_parity(golden, outputs, atol=1e-3)

It is loaded in every project of an environment that has kdtr, so nothing here imports more than pytest and the
standard library before a test asks for the fixture. docs/ci.md is its reference; ``-p no:kdtr`` leaves it out.
(PYTEST_DONT_REWRITE: there is no assertion here.)
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kdtr_cli.pytest_plugin.goldens import Kdtr

__all__ = ["State", "kdtr", "on_ci"]


@dataclass
class State:
    """What one pytest process knows: the folder of goldens, where failed runs are kept (None: nowhere), whether goldens
    are made anew, which goldens its tests asked for, and what became of those made anew."""

    goldens: Path
    save: Path | None
    update: bool
    used: set[str] = field(default_factory=set)
    updated: list[str] = field(default_factory=list)


_STATE = pytest.StashKey[State]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kdtr", "parity with goldens (kdtr)")
    group.addoption("--kdtr-goldens", metavar="DIR", help="The folder of goldens, in place of the ini option.")
    group.addoption("--kdtr-save", metavar="DIR", help="Keep every run that fails as a bundle in this folder.")
    group.addoption(
        "--kdtr-update",
        action="store_true",
        help="Make the goldens anew that tests ask for, and say what changed. Refused where CI is set.",
    )
    group.addoption(
        "--kdtr-unused", choices=("warn", "fail"), help="List goldens that no test asked for; fail: exit with 1 then."
    )
    parser.addini("kdtr_goldens", "The folder of goldens, from the ini file's folder.", default="goldens")


def pytest_configure(config: pytest.Config) -> None:
    update = config.getoption("--kdtr-update")
    if update and on_ci(os.environ):
        raise pytest.UsageError(
            "--kdtr-update is refused where CI is set: a pipeline must not make the goldens that it is judged by; "
            "make them on a machine of your own and commit them"
        )
    told, save = config.getoption("--kdtr-goldens"), config.getoption("--kdtr-save")
    here = config.invocation_params.dir
    base = config.rootpath if config.inipath is None else config.inipath.parent
    folder = here / told if told else base / config.getini("kdtr_goldens")
    config.stash[_STATE] = State(folder, None if save is None else here / save, update)


@pytest.fixture
def kdtr(request: pytest.FixtureRequest) -> "Kdtr":
    """The goldens of this project, and `assert_parity` against them (kdtr_cli.pytest_plugin.goldens.Kdtr)."""
    from kdtr_cli.pytest_plugin.goldens import Kdtr  # NumPy and h5py: only tests that ask pay for them

    return Kdtr(request.config.stash[_STATE], request)


def pytest_sessionfinish(session: pytest.Session) -> None:
    state = session.config.stash[_STATE]
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # a worker of pytest-xdist: the controller reports
        output["kdtr"] = {"used": sorted(state.used), "updated": state.updated}
    elif _unused(session.config) and session.config.getoption("--kdtr-unused") == "fail":
        session.exitstatus = max(int(session.exitstatus), int(pytest.ExitCode.TESTS_FAILED))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    said: Mapping[str, Any] = getattr(node, "workeroutput", {}).get("kdtr", {})
    state = node.config.stash[_STATE]
    state.used |= set(said.get("used", ()))
    state.updated += said.get("updated", ())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    lines = list(config.stash[_STATE].updated)
    lines += [f"{config.stash[_STATE].goldens / name}: no test of this run asked for it" for name in _unused(config)]
    if lines:
        terminalreporter.section("kdtr")
        for line in lines:
            terminalreporter.line(line)


def _unused(config: pytest.Config) -> list[str]:
    """The goldens below the folder that no test asked for; none where that was not to be looked at."""
    if config.getoption("--kdtr-unused") is None or config.getoption("collectonly"):
        return []
    state = config.stash[_STATE]
    return sorted(set(_goldens(state.goldens)) - state.used)


def _goldens(folder: Path) -> Iterator[str]:
    """Bundles and sweeps below a folder, relative to it; a sweep is one golden."""
    for path, folders, files in os.walk(folder):
        relative = Path(path).relative_to(folder)
        if "sweep.json" in files:
            folders.clear()
            yield str(relative)
            continue
        yield from (str(relative / name) for name in files if name.endswith(".h5") and not name.startswith("."))


def on_ci(environment: Mapping[str, str]) -> bool:
    """Whether CI is set, as the CI services do it: to anything but empty, 0 or false."""
    return environment.get("CI", "").strip().lower() not in ("", "0", "false")

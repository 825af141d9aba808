"""What the fixture `kdtr` is: the goldens of a project by name, and parity with them."""

import fcntl
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kdtr_cli.errors import InputError
from kdtr_cli.parity.results import Report
from kdtr_cli.pytest_plugin import State
from kdtr_cli.pytest_plugin.update import Recipe, make_anew
from kdtr_cli.testing.inputs import Inputs, golden_inputs
from kdtr_cli.testing.outputs import Output
from kdtr_cli.testing.parity import assert_parity

__all__ = ["Kdtr"]


class Kdtr:
    """The fixture, one for each test. A golden is named ("decode": goldens/decode.h5) or given as a `Path`."""

    def __init__(self, state: State, request: pytest.FixtureRequest) -> None:
        self._state = state
        self._request = request
        self._saved = 0

    def golden(self, name: str, recipe: Recipe | None = None) -> Path:
        """The path of the golden ``name`` below the folder of goldens, a bundle or a sweep; ``.h5`` may be left out.

        ``recipe`` makes it anew under --kdtr-update: the words of a `kdtr golden` without ``-o`` (one text, or a
        list), run from pytest's root folder, or a function that writes a golden to the path it is given. Without a
        recipe it is made anew from what its manifest says. InputError: no such golden, or a name that leaves the
        folder.
        """
        path = self._path(name)
        self._state.used.add(str(path.relative_to(self._state.goldens)))
        if self._state.update:
            self._once(path, lambda: make_anew(path, recipe, self._request.config.rootpath))
        if not path.exists():
            how = "pytest --kdtr-update makes it" if recipe is not None else "make it with 'kdtr golden'"
            raise InputError(f"{path}: no such golden; {how}")
        return path

    def inputs(self, golden: str | Path, *, teacher_force: bool = False) -> Inputs:
        """What the golden asks: prompts and settings, no answers (`kdtr_cli.testing.golden_inputs`)."""
        return golden_inputs(self._resolved(golden), teacher_force=teacher_force)

    def assert_parity(
        self, golden: str | Path, run: Path | Mapping[str, Output] | Sequence[Output], **options: Any
    ) -> Report:
        """As `kdtr_cli.testing.assert_parity`; under --kdtr-save a run that fails is kept, and the text has the one
        command that judges it again."""
        __tracebackhide__ = True
        return assert_parity(self._resolved(golden), run, **{"save": self._place(), **options})

    def _resolved(self, golden: str | Path) -> Path:
        return golden if isinstance(golden, Path) else self.golden(golden)

    def _path(self, name: str) -> Path:
        parts = Path(name).parts
        if not parts or Path(name).is_absolute() or ".." in parts:
            raise InputError(f"golden {name!r}: not a name below {self._state.goldens}")
        plain = self._state.goldens / name
        return plain if plain.suffix == ".h5" or plain.is_dir() else plain.with_name(f"{plain.name}.h5")

    def _place(self) -> Path | None:
        """Where a run that fails would be kept: the same name for the same test, whoever runs it."""
        folder = self._state.save
        if folder is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        node = self._request.node.nodeid
        self._saved += 1
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", node)[-100:].strip("_.")
        number = f"-{self._saved}" if self._saved > 1 else ""
        return folder / f"{stem}-{hashlib.sha256(node.encode()).hexdigest()[:8]}{number}.h5"

    def _once(self, path: Path, make: Callable[[], str]) -> None:
        """Once a session, in whichever process of pytest-xdist comes first; the others wait for it."""
        shared = self._request.getfixturevalue("tmp_path_factory").getbasetemp()
        if hasattr(self._request.config, "workerinput"):
            shared = shared.parent
        mark = shared / f"kdtr-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
        with open(mark, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not file.read():
                line = make()
                file.write("made")
                file.flush()  # before the lock is let go
                self._state.updated.append(line)

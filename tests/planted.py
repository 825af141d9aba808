"""Faults in the source of one kernel, planted in a copy of it."""

import re
from dataclasses import replace
from pathlib import Path

import kernels_cu
from kdtr_cli.engine.kernels import KERNELS

FOLDER = Path(kernels_cu.__file__).parent


def plant(monkeypatch, folder: Path, name: str, file: str, right: str, wrong: str) -> None:
    """Lets kernel `name` be made of a copy in `folder`, with `wrong` for `right` in `file`: its own or one it includes.

    Of the kernels that one file makes by macro the others are left out of the copy: they would only be compiled.
    """

    def kept(line: re.Match) -> str:
        return "" if line[1] in KERNELS and line[1] != name else line[0]

    own = KERNELS[name].file
    for each in {own, file}:
        text = (FOLDER / each).read_text(encoding="utf-8")
        if each == file:
            assert right in text, f"{file} has changed: plant this fault elsewhere ({right})"
            text = text.replace(right, wrong)
        (folder / each).write_text(re.sub(r"(?m)^[A-Z]\w*\((\w+), .*\)\n", kept, text), encoding="utf-8")
    monkeypatch.setitem(KERNELS, name, replace(KERNELS[name], file=folder / own))

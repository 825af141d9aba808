"""What a sabotage of `kdtr selftest` is, and the kernel texts that one replaces.

What is replaced must be found exactly once: where a kernel has moved on, the self-test fails as broken instead of
passing blindly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.engine.compile import source_text
from kdtr_cli.errors import DeviceError
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.workflows.decode import Job

__all__ = ["Edit", "Sabotage", "replaced_sources"]


@dataclass(frozen=True)
class Edit:
    """In the expanded text of a kernel file: what stands there, exactly once, and what shall stand there instead."""

    file: str
    right: str
    wrong: str


@dataclass(frozen=True)
class Sabotage:
    """One bug. ``like``: public reports of it, empty where none is known; ``where``: the place in kdtr that is changed.

    golden: the name in GOLDENS on which it must show. verdict, hints: what `kdtr diff` must say of it; any of several
    hints is right. Of edits, job, output and other_weights one is given. run: options of the run, by field.
    """

    what: str
    like: str
    golden: str
    hints: tuple[str, ...]
    verdict: Verdict = Verdict.DIVERGED
    edits: tuple[Edit, ...] = ()
    job: Callable[[Job], Job] | None = None
    output: Callable[[list[SequenceData]], list[SequenceData]] | None = None
    other_weights: bool = False
    run: tuple[tuple[str, Any], ...] = ()
    place: str = ""

    @property
    def kind(self) -> str:
        if self.edits:
            return "engine"
        return "output" if self.output is not None else "host"

    @property
    def where(self) -> str:
        return ", ".join(dict.fromkeys(edit.file for edit in self.edits)) or self.place


def replaced_sources(name: str, sabotage: Sabotage) -> dict[str, str]:
    """Expanded texts of the kernel files that the sabotage changes. DeviceError: a text is not there exactly once."""
    texts: dict[str, str] = {}
    for edit in sabotage.edits:
        text = texts.get(edit.file) or source_text(edit.file)
        if (found := text.count(edit.right)) != 1:
            raise DeviceError(
                f"internal: the sabotage {name!r} is broken: {edit.file} holds its text {found} times, not once: "
                f"{edit.right!r}"
            )
        texts[edit.file] = text.replace(edit.right, edit.wrong)
    return texts

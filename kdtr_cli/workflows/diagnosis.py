"""The shape of what `kdtr doctor` finds, and the guard under which its probes run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kdtr_cli.errors import Exit

__all__ = ["SCHEMA", "Diagnosis", "Item", "Probe", "Section", "gather"]

SCHEMA = "kdtr.doctor/1"


@dataclass(frozen=True)
class Item:
    """One finding. `state`: 'ok' (checked and right), 'note' (a fact), 'missing' (not there; kdtr works without it or
    `remedy` says what to do) or 'failed' (there, but wrong)."""

    name: str
    state: Literal["ok", "note", "missing", "failed"]
    value: str
    remedy: str = ""


@dataclass(frozen=True)
class Section:
    """Findings on one matter, e.g. 'compiler'."""

    title: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Probe:
    """A section to be: its title, and a function that yields its items and may fail."""

    title: str
    look: Callable[[], Iterator[Item]]


@dataclass(frozen=True)
class Diagnosis:
    """All findings. `devices`: for 'cpu' and 'gpu', whether an engine can run there, by a self-check."""

    sections: tuple[Section, ...]
    devices: dict[str, bool]

    @property
    def exit_code(self) -> Exit:
        """3 only where no engine can run at all: a missing GPU is no fault of a laptop."""
        return Exit.AGREES if any(self.devices.values()) else Exit.FAILED

    def as_json(self) -> dict[str, Any]:
        """The document of schema kdtr.doctor/1."""
        return {
            "schema": SCHEMA,
            "exit_code": int(self.exit_code),
            "devices": self.devices,
            "sections": [asdict(section) for section in self.sections],
        }


def gather(probes: Sequence[Probe]) -> tuple[Section, ...]:
    """Run every probe. One that fails keeps the items that it had found and adds an item that says how it failed."""
    return tuple(Section(probe.title, tuple(_guarded(probe))) for probe in probes)


def _guarded(probe: Probe) -> Iterator[Item]:
    try:
        yield from probe.look()
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        yield Item("probe", "failed", " ".join(what.split()), "please report this with the rest of this page")

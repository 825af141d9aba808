"""What is found while one sequence is judged."""

from dataclasses import replace

from kdtr_cli.parity.verdicts import Finding, Level, Verdict

__all__ = ["SequenceFindings"]


class SequenceFindings:
    """The findings of the sequence `id`, in the order in which they were made."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.items: list[Finding] = []

    @property
    def verdicts(self) -> list[Verdict]:
        """What the findings lead to, those that lead to nothing left out."""
        return [f.verdict for f in self.items if f.verdict is not None]

    def add(
        self, code: str, message: str, verdict: Verdict | None, level: Level | None = None, **place: object
    ) -> None:
        """Add a finding; `place` are its step, token, golden and run. Without a level: an error where it leads to a
        verdict, else a note."""
        level = level or (Level.ERROR if verdict is not None else Level.NOTE)
        self.items.append(Finding(level, code, f"sequence {self.id!r}: {message}", verdict, self.id, **place))

    def drop_hint(self, hint: str) -> None:
        """Take a hint back that another finding explains better."""
        self.items = [replace(f, hint=None) if f.hint == hint else f for f in self.items]

"""`kdtr demo`: golden, run and diff on the built-in model, as a user would call them."""

from dataclasses import dataclass
from pathlib import Path

from kdtr_cli.parity.results import Report
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.workflows.diff import diff
from kdtr_cli.workflows.golden import GoldenOptions, GoldenSummary, make_golden
from kdtr_cli.workflows.run import RunOptions, RunSummary, make_run

__all__ = ["Demo"]


@dataclass(frozen=True)
class Demo:
    """The three steps on the preset ``tiny``, bundles in one folder; call them in order."""

    folder: Path
    device: str = "auto"

    @property
    def golden_path(self) -> Path:
        return self.folder / "golden.h5"

    @property
    def run_path(self) -> Path:
        return self.folder / "run.h5"

    def golden(self) -> GoldenSummary:
        """Reference tokens and logits."""
        return make_golden(GoldenOptions("tiny", self.golden_path))

    def run(self) -> RunSummary:
        """The same prompt through the engine."""
        return make_run(RunOptions(self.golden_path, self.run_path, device=self.device))

    def diff(self) -> Report:
        """The verdict."""
        return diff(self.golden_path, self.run_path, JudgeOptions())

"""What `kdtr selftest` finds: the kill matrix, one verdict of all, and the line that CI jobs grep for."""

from dataclasses import asdict, dataclass
from typing import Any

from kdtr_cli.errors import Exit
from kdtr_cli.parity.verdicts import first_word
from kdtr_cli.report.line import safe

__all__ = ["SCHEMA", "BaselineRow", "SabotageRow", "SelftestReport"]

SCHEMA = "kdtr.selftest/1"


@dataclass(frozen=True)
class BaselineRow:
    """The engine as it is on one golden: what the gate must let pass."""

    golden: str
    brings: str
    verdict: str
    exit_code: int
    seconds: float

    @property
    def green(self) -> bool:
        return self.exit_code == Exit.AGREES


@dataclass(frozen=True)
class SabotageRow:
    """One sabotage and what the gate said of it. ``gated``: it was judged by the user's own tolerance."""

    name: str
    what: str
    like: str
    kind: str
    where: str
    golden: str
    expected: str
    expected_hints: tuple[str, ...]
    verdict: str
    exit_code: int
    hint: str | None
    first_tensor: str | None
    finding: str
    gated: bool
    seconds: float

    @property
    def survived(self) -> bool:
        """The gate let it pass."""
        return self.exit_code == Exit.AGREES

    @property
    def killed(self) -> bool:
        """The gate went red, and said why: with the verdict and a hint that belong to this bug. Under a tolerance of
        the user's own it is enough that it did not pass, since the verdict then depends on the tolerance."""
        if self.survived or self.gated:
            return not self.survived
        return self.verdict == self.expected and self.hint in self.expected_hints


@dataclass(frozen=True)
class SelftestReport:
    """The kill matrix. ``sabotages``: how many there are in all; ``gate``: the tolerance options as given."""

    device: str
    gate: str | None
    baselines: tuple[BaselineRow, ...]
    rows: tuple[SabotageRow, ...]
    sabotages: int
    seconds: float

    @property
    def false_red(self) -> list[str]:
        return [row.golden for row in self.baselines if not row.green]

    @property
    def survivors(self) -> list[SabotageRow]:
        return [row for row in self.rows if row.survived]

    @property
    def misnamed(self) -> list[SabotageRow]:
        """Red, but with a verdict or a hint that does not belong to the bug."""
        return [row for row in self.rows if not row.survived and not row.killed]

    @property
    def exit_code(self) -> Exit:
        if not self.rows:
            return Exit.UNJUDGED  # nothing tried is no success
        return Exit.DIFFERS if self.false_red or any(not row.killed for row in self.rows) else Exit.AGREES

    @property
    def line(self) -> str:
        """The last line on standard output; its order never changes (docs/selftest.md)."""
        killed = sum(row.killed for row in self.rows)
        words = [first_word(self.exit_code), "selftest", f"killed={killed}/{len(self.rows)}"]
        words.append(f"false_red={len(self.false_red)}/{len(self.baselines)}")
        for key, names in (
            ("survivors", [row.name for row in self.survivors]),
            ("misnamed", [row.name for row in self.misnamed]),
            ("red", self.false_red),
        ):
            if names:
                words.append(f"{key}={','.join(names)}")
        if len(self.rows) < self.sabotages:
            words.append(f"sabotages={len(self.rows)}/{self.sabotages}")
        if self.gate is not None:
            words.append('gate="' + safe(self.gate).replace("\\", "\\\\").replace('"', '\\"') + '"')
        return " ".join(words)

    def as_json(self) -> dict[str, Any]:
        """The document of schema kdtr.selftest/1 (kdtr_cli/report/schema/selftest-1.json)."""
        return {
            "schema": SCHEMA,
            "exit_code": int(self.exit_code),
            "line": self.line,
            "device": self.device,
            "gate": self.gate,
            "killed": sum(row.killed for row in self.rows),
            "sabotages": self.sabotages,
            "survivors": [row.name for row in self.survivors],
            "misnamed": [row.name for row in self.misnamed],
            "false_red": self.false_red,
            "seconds": round(self.seconds, 3),
            "goldens": [{**_rounded(row), "green": row.green} for row in self.baselines],
            "rows": [{**_rounded(row), "killed": row.killed, "survived": row.survived} for row in self.rows],
        }


def _rounded(row: BaselineRow | SabotageRow) -> dict[str, Any]:
    document = asdict(row)
    document["seconds"] = round(row.seconds, 3)
    if "expected_hints" in document:
        document["expected_hints"] = list(document["expected_hints"])
    document.pop("gated", None)
    return document

"""What `kdtr probe` finds: one row a variation, one verdict of all, and the line that CI jobs grep for."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from kdtr_cli.errors import Exit
from kdtr_cli.parity.verdicts import first_word
from kdtr_cli.report.line import safe
from kdtr_cli.workflows.bitwise import Difference

__all__ = ["DIFFERS", "SAME", "SCHEMA", "SKIPPED", "ProbeReport", "ProbeRow"]

SCHEMA = "kdtr.probe/1"

SAME, DIFFERS, SKIPPED = "SAME", "DIFFERS", "SKIPPED"


@dataclass(frozen=True)
class ProbeRow:
    """One variation against the base. A skipped one compared nothing and says why in ``note``."""

    probe: str
    varied: str
    verdict: str
    sequences: int = 0
    tokens: int = 0  #: of the base, compared here
    tokens_equal: int = 0  #: counted in each sequence up to its first difference
    note: str = ""
    sequence: str | None = None  #: the id of the first sequence that differs …
    place: int | None = None  #: … and its place in the golden
    difference: Difference | None = None


@dataclass(frozen=True)
class ProbeReport:
    """All rows. ``golden`` is the base against the golden's own logits: no probe, and counted as none."""

    device: str
    rows: tuple[ProbeRow, ...]
    golden: ProbeRow
    named: bool  #: the user named the probes: then each of them must have been made
    parts: tuple[tuple[str, int, int], ...] = ()  #: what was cut by options: (what, used, of)

    @property
    def probes(self) -> dict[str, str]:
        """A verdict for each probe: DIFFERS if one of its rows does, SAME only if every one is."""
        found: dict[str, set[str]] = {}
        for row in self.rows:
            found.setdefault(row.probe, set()).add(row.verdict)
        return {
            probe: next(verdict for verdict in (DIFFERS, SKIPPED, SAME) if verdict in verdicts)
            for probe, verdicts in found.items()
        }

    @property
    def skipped(self) -> list[str]:
        return [probe for probe, verdict in self.probes.items() if verdict == SKIPPED]

    @property
    def first(self) -> ProbeRow | None:
        """The first row that differs, the golden's after all others."""
        return next((row for row in (*self.rows, self.golden) if row.verdict == DIFFERS), None)

    @property
    def verdict(self) -> str:
        """NONDETERMINISTIC, DIVERGED (one answer, and not the golden's), INCONCLUSIVE or DETERMINISTIC."""
        if any(row.verdict == DIFFERS for row in self.rows):
            return "NONDETERMINISTIC"
        if self.golden.verdict == DIFFERS:
            return "DIVERGED"
        if self.skipped and (self.named or len(self.skipped) == len(self.probes)):
            return "INCONCLUSIVE"
        return "DETERMINISTIC" if self.rows else "INCONCLUSIVE"

    @property
    def exit_code(self) -> Exit:
        codes = {"DETERMINISTIC": Exit.AGREES, "INCONCLUSIVE": Exit.UNJUDGED}
        return codes.get(self.verdict, Exit.DIFFERS)

    @property
    def line(self) -> str:
        """The last line on standard output; its order never changes (docs/judging.md)."""
        probes, first = self.probes, self.first
        same = sum(verdict == SAME for verdict in probes.values())
        words = [first_word(self.exit_code), f"probes={same}/{len(probes)}"]
        if self.skipped:
            words.append(f"skipped={','.join(self.skipped)}")
        words.append(f"tokens={sum(row.tokens_equal for row in self.rows)}/{sum(row.tokens for row in self.rows)}")
        words.append(f"golden={_GOLDEN[self.golden.verdict]}")
        words += [f"{what}={used}/{of}" for what, used, of in self.parts]
        if first is not None and first.difference is not None:
            words += [f"first={first.probe}", f"first_difference={first.place}:{first.difference.step}"]
        words.append(f"verdict={self.verdict}")
        if self.verdict == "INCONCLUSIVE":
            why = next((row for row in self.rows if row.verdict == SKIPPED), None)
            reason = safe("nothing was compared" if why is None else f"{why.probe}: {why.note}")
            words.append('reason="' + reason.replace("\\", "\\\\").replace('"', '\\"') + '"')
        return " ".join(words)

    def as_json(self) -> dict[str, Any]:
        """The document of schema kdtr.probe/1 (docs/judging.md)."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "exit_code": int(self.exit_code),
            "line": self.line,
            "device": self.device,
            "probes": self.probes,
            "golden": _row(self.golden),
            "rows": [_row(row) for row in self.rows],
        }


_GOLDEN = {SAME: "same", DIFFERS: "differs", SKIPPED: "not-compared"}


def _row(row: ProbeRow) -> dict[str, Any]:
    document = asdict(row)
    if row.difference is not None:
        for side in ("base", "other"):
            value = document["difference"][side]
            if isinstance(value, float) and not math.isfinite(value):
                document["difference"][side] = str(value)
    return document

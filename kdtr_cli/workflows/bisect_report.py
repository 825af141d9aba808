"""What `kdtr bisect` finds: a row an operation, layer and form of pass, one verdict of all, the line for CI."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from kdtr_cli.errors import Exit
from kdtr_cli.parity.operation_hints import HINTS
from kdtr_cli.parity.operations import IDENTICAL, OUT, WITHIN, OperationResult
from kdtr_cli.parity.tolerances import Tolerance
from kdtr_cli.parity.verdicts import Verdict, exit_code, first_word
from kdtr_cli.workflows.bisect_operations import OPERATIONS

__all__ = ["SCHEMA", "BisectReport", "Group", "grouped", "ranges"]

SCHEMA = "kdtr.bisect/1"

_RANK = (IDENTICAL, WITHIN, OUT)
_PLACES = {op.name: place for place, op in enumerate(OPERATIONS)}


@dataclass(frozen=True)
class BisectReport:
    """rows: in order of execution. sequences: fed, and of how many. unseen: kernels that a run of this model may launch
    and no pass here did."""

    device: str
    rows: tuple[OperationResult, ...]
    tolerance: Tolerance
    sequences: tuple[int, int]
    unseen: tuple[str, ...]

    @property
    def operations(self) -> dict[tuple[str, int | None], str]:
        """(operation, layer) → the worst status of its forms, in order of execution."""
        found: dict[tuple[str, int | None], str] = {}
        for row in self.rows:
            key = (row.operation, row.layer)
            found[key] = max(found.get(key, IDENTICAL), row.status, key=_RANK.index)
        return found

    @property
    def faulty(self) -> tuple[str, ...]:
        """Each faulty operation by name, with its layers (ranges), and with the form where it fails in one alone."""
        layers: dict[tuple[str, str], list[int | None]] = {}
        for (name, layer), status in self.operations.items():
            if status == OUT:
                layers.setdefault((name, self._only_form(name, layer)), []).append(layer)
        return tuple(
            f"{name}{place}{form}"
            for (name, form), of in layers.items()
            for place in ([""] if of == [None] else [f"@layer{part}" for part in ranges(of)])
        )

    def _only_form(self, name: str, layer: int | None) -> str:
        rows = [row for row in self.rows if (row.operation, row.layer) == (name, layer)]
        wrong = dict.fromkeys(row.form for row in rows if row.status == OUT)
        return f":{'+'.join(wrong)}" if len(wrong) < len({row.form for row in rows}) else ""

    @property
    def hint(self) -> str | None:
        """What the first faulty operation's error looks like, in all its forms: a code (docs/bisect.md), else
        prefill-decode where it is right in another form, else first-tensor: no more is known. None without a fault."""
        name, layer = next((key for key, status in self.operations.items() if status == OUT), (None, None))
        rows = [row for row in self.rows if (row.operation, row.layer) == (name, layer) and row.status == OUT]
        if not rows:
            return None
        known = [code for code in HINTS if all(code in row.hints for row in rows)]
        return known[0] if known else ("prefill-decode" if self._only_form(name, layer) else "first-tensor")

    @property
    def verdict(self) -> Verdict:
        """IDENTICAL, PASS (within the tolerance) or DIVERGED; INCONCLUSIVE where nothing was compared."""
        statuses = set(self.operations.values())
        if OUT in statuses:
            return Verdict.DIVERGED
        if not statuses:
            return Verdict.INCONCLUSIVE
        return Verdict.IDENTICAL if statuses == {IDENTICAL} else Verdict.PASS

    @property
    def exit_code(self) -> Exit:
        return exit_code(self.verdict)

    @property
    def line(self) -> str:
        """The last line on standard output; its order never changes (docs/bisect.md)."""
        operations = self.operations
        good = sum(status != OUT for status in operations.values())
        words = [first_word(self.exit_code), "bisect", f"operations={good}/{len(operations)}"]
        if self.verdict is Verdict.IDENTICAL:
            words.append("identical")
        if self.faulty:
            words += [f"faulty={','.join(self.faulty)}", f"hint={self.hint}"]
        if self.sequences[0] < self.sequences[1]:
            words.append(f"sequences={self.sequences[0]}/{self.sequences[1]}")
        if self.unseen:
            words.append(f"unseen={','.join(self.unseen)}")
        words.append(f"verdict={self.verdict.value}")
        return " ".join(words)

    def as_json(self) -> dict[str, Any]:
        """The document of schema kdtr.bisect/1 (kdtr_cli/report/schema/bisect-1.json)."""
        bounds = {name: getattr(self.tolerance, name) for name in ("atol", "rtol", "max_ulp")}
        return {
            "schema": SCHEMA,
            "verdict": self.verdict.value,
            "exit_code": int(self.exit_code),
            "line": self.line,
            "device": self.device,
            "sequences": {"fed": self.sequences[0], "of": self.sequences[1]},
            "tolerance": bounds,
            "faulty": list(self.faulty),
            "hint": self.hint,
            "unseen_kernels": list(self.unseen),
            "operations": [_row(row) for row in self.rows],
        }


@dataclass(frozen=True)
class Group:
    """Rows of one operation and one status, to be shown as one; numbers are those of the worst row."""

    rows: tuple[OperationResult, ...]

    @property
    def status(self) -> str:
        return self.rows[0].status

    @property
    def rows_total(self) -> int:
        return sum(row.rows for row in self.rows)

    @property
    def rows_out(self) -> int:
        return sum(row.rows_out for row in self.rows)

    @property
    def max_abs(self) -> float | None:
        return self._worst("max_abs")

    @property
    def max_ulp(self) -> int | None:
        return self._worst("max_ulp")

    @property
    def nmse(self) -> float | None:
        return self._worst("nmse")

    def _worst(self, name: str) -> float | None:
        values = [value for row in self.rows if (value := getattr(row, name)) is not None]
        # NaN is worse than any number
        return max(values, key=lambda v: (math.isnan(v), v), default=None)


def grouped(rows: tuple[OperationResult, ...], apart: bool) -> list[Group]:
    """Rows of one operation and status together, in a layer's order of execution; ``apart``: each by itself."""
    if apart:
        return [Group((row,)) for row in rows]
    groups: dict[tuple[int, int], list[OperationResult]] = {}
    for row in rows:
        key = (_PLACES[row.operation], _RANK.index(row.status))
        groups.setdefault(key, []).append(row)
    return [Group(tuple(groups[key])) for key in sorted(groups)]


def ranges(layers: list[int]) -> list[str]:
    """Ascending numbers as ranges: 3, 5-7."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return [f"{a}" if a == b else f"{a}-{b}" for a, b in parts]


def _row(row: OperationResult) -> dict[str, Any]:
    document = asdict(row)
    document |= {"kernels": list(row.kernels), "hints": list(row.hints)}
    document["status"] = row.status
    document["first_row"] = (
        None if row.first_row is None else {"sequence": row.first_row[0], "position": row.first_row[1]}
    )
    for key in ("max_abs", "nmse"):
        value = document[key]
        if value is not None and not math.isfinite(value):
            document[key] = "nan" if math.isnan(value) else "inf"
    return document

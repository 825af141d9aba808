"""The table of a report for people: a row a sequence."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from kdtr_cli.parity.results import SequenceResult
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.line import safe

__all__ = ["overview_table", "verdict_style"]

_MAX_ID = 32


def verdict_style(verdict: Verdict) -> str:
    """rich's name of the colour of a verdict."""
    if verdict in (Verdict.IDENTICAL, Verdict.PASS):
        return "bold green"
    return "bold red" if verdict is Verdict.DIVERGED else "bold yellow"


def overview_table(sequences: Sequence[SequenceResult]) -> Table:
    """The table, all of it ASCII but for the lines that a terminal draws."""
    rounds = any(r.rounds is not None and r.rounds.compared for r in sequences)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, right in (
        ("#", True),
        ("sequence", False),
        ("verdict", False),
        ("tokens", True),
        ("first", True),
        ("margin", True),
        ("max abs", True),
        ("max ULP", True),
        ("max KL", True),
        *([("rounds", True)] if rounds else []),
    ):
        table.add_column(name, justify="right" if right else "left", overflow="fold", header_style="dim")
    for r in sequences:
        table.add_row(*_row(r, rounds))
    return table


def _row(r: SequenceResult, rounds: bool) -> list[str | Text]:
    name, d, n = safe(r.id), r.divergence, r.logits
    cells = [
        str(r.index),
        Text(name if len(name) <= _MAX_ID else name[: _MAX_ID - 3] + "..."),
        Text(r.verdict.value, verdict_style(r.verdict)),
        f"{r.tokens_equal}/{len(r.golden_tokens)}",
        "missing" if r.run_tokens is None else "-" if d is None else str(d.step),
        "-" if d is None or d.golden_margin is None else f"{d.golden_margin:.3g}",
        "-" if n.max_abs is None else f"{n.max_abs:.3e}",
        "-" if n.max_ulp is None else str(n.max_ulp),
        "-" if n.max_kl is None else f"{n.max_kl:.3e}",
    ]
    if rounds:
        compared = r.rounds is not None and r.rounds.compared
        cells.append(f"{r.rounds.equal}/{r.rounds.judged}" if compared else "-")
    return [Text(cell) if isinstance(cell, str) else cell for cell in cells]

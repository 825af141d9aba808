"""The six verdicts, their precedence, and the one place where a verdict becomes an exit code.

| verdict      | means                                                                    | exit   | first word   |
|--------------|--------------------------------------------------------------------------|--------|--------------|
| IDENTICAL    | all bits of all logits and all tokens                                    | 0      | PASS         |
| PASS         | all tokens, and logits at every step within tolerance                    | 0      | PASS         |
| TIE_BREAK    | tokens part only where the reference itself is a tie within tolerance    | 1 or 0 | FAIL or PASS |
| INCONCLUSIVE | too little was compared to say                                           | 2      | ERROR        |
| DIVERGED     | anything else that differs                                               | 1      | FAIL         |
| INVALID      | evidence that can't be judged                                            | 2      | ERROR        |
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kdtr_cli.errors import Exit

__all__ = ["ON_TIE", "Finding", "Level", "OnTie", "Verdict", "combine", "exit_code", "first_word", "ordered"]

#: What `--on-tie` may say.
ON_TIE = ("fail", "warn", "pass")
OnTie = str


class Verdict(Enum):
    """A verdict; the order of the members is the precedence, weakest first."""

    IDENTICAL = "IDENTICAL"
    PASS = "PASS"
    TIE_BREAK = "TIE_BREAK"
    INCONCLUSIVE = "INCONCLUSIVE"
    DIVERGED = "DIVERGED"
    INVALID = "INVALID"


class Level(Enum):
    """How much a finding weighs: an error made the verdict what it is, a warning and a note did not."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    `code` is a stable dotted name (docs/judging.md lists them), `message` one line, `verdict` what the finding leads
    to (None: nothing). `sequence` is the sequence's id, `step` the output position, `token` the place in the
    vocabulary; `golden` and `run` are the two values that were compared, as JSON can hold them. `hint`: what the fault
    may be, a code of `hints.HINTS`.
    """

    level: Level
    code: str
    message: str
    verdict: Verdict | None = None
    sequence: str | None = None
    step: int | None = None
    token: int | None = None
    golden: object = None
    run: object = None
    hint: str | None = None


_RANK = {verdict: rank for rank, verdict in enumerate(Verdict)}


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of several: INVALID > DIVERGED > INCONCLUSIVE > TIE_BREAK > PASS > IDENTICAL; of none, INCONCLUSIVE
    (nothing compared is never a pass)."""
    return max(verdicts, key=_RANK.__getitem__, default=Verdict.INCONCLUSIVE)


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings that weigh most first; among equals the order in which they were found."""
    return tuple(sorted(findings, key=lambda f: -1 if f.verdict is None else _RANK[f.verdict], reverse=True))


def exit_code(verdict: Verdict, on_tie: OnTie = "fail") -> Exit:
    """The exit code of a verdict. Only IDENTICAL, PASS and, if asked for, TIE_BREAK lead to 0."""
    match verdict:
        case Verdict.IDENTICAL | Verdict.PASS:
            return Exit.AGREES
        case Verdict.TIE_BREAK:
            return Exit.AGREES if on_tie in ("warn", "pass") else Exit.DIFFERS
        case Verdict.DIVERGED:
            return Exit.DIFFERS
        case Verdict.INCONCLUSIVE | Verdict.INVALID:
            return Exit.UNJUDGED
    raise ValueError(f"no verdict: {verdict!r}")


def first_word(code: Exit) -> str:
    """The first word of the verdict line: PASS, FAIL or ERROR."""
    return {Exit.AGREES: "PASS", Exit.DIFFERS: "FAIL"}.get(code, "ERROR")

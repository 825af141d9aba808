"""The verdict table of the design: meaning stands in test_judge.py; here exit codes, first words, precedence."""

import itertools

import pytest

from kdtr_cli.errors import Exit
from kdtr_cli.parity.verdicts import ON_TIE, Verdict, combine, exit_code, first_word

pytestmark = pytest.mark.quick

TABLE = {
    Verdict.IDENTICAL: (0, "PASS"),
    Verdict.PASS: (0, "PASS"),
    Verdict.TIE_BREAK: (1, "FAIL"),
    Verdict.INCONCLUSIVE: (2, "ERROR"),
    Verdict.DIVERGED: (1, "FAIL"),
    Verdict.INVALID: (2, "ERROR"),
}
PRECEDENCE = [
    Verdict.INVALID,
    Verdict.DIVERGED,
    Verdict.INCONCLUSIVE,
    Verdict.TIE_BREAK,
    Verdict.PASS,
    Verdict.IDENTICAL,
]


def test_the_table_is_whole():
    assert set(TABLE) == set(Verdict) == set(PRECEDENCE)


@pytest.mark.parametrize("verdict", Verdict)
def test_exit_code_and_first_word(verdict):
    code = exit_code(verdict)
    assert (code, first_word(code)) == TABLE[verdict]
    assert isinstance(code, Exit)


@pytest.mark.parametrize(("on_tie", "code"), [("fail", 1), ("warn", 0), ("pass", 0)])
def test_on_tie_moves_a_tie_break_and_nothing_else(on_tie, code):
    assert on_tie in ON_TIE
    assert exit_code(Verdict.TIE_BREAK, on_tie) == code
    for verdict in set(Verdict) - {Verdict.TIE_BREAK}:
        assert exit_code(verdict, on_tie) == TABLE[verdict][0]


def test_only_agreement_exits_with_zero():
    assert {v for v in Verdict if exit_code(v) == 0} == {Verdict.IDENTICAL, Verdict.PASS}


def test_a_failure_of_kdtr_is_no_pass():
    assert first_word(Exit.FAILED) == "ERROR"


@pytest.mark.parametrize("pair", list(itertools.product(range(6), repeat=2)), ids=str)
def test_precedence(pair):
    expected = PRECEDENCE[min(pair)]
    assert combine([PRECEDENCE[i] for i in pair]) is expected


def test_nothing_is_no_pass():
    assert combine([]) is Verdict.INCONCLUSIVE

"""What is said of each step in one mark."""

import numpy as np
import picture_cases as pictures
import pytest
from parity_cases import golden_side, make_tie, perturb, run_side

from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.report.steps import Mark, marks

pytestmark = pytest.mark.quick

LETTERS = {Mark.SAME: "=", Mark.EQUAL: ".", Mark.TIE: "~", Mark.OUT: "!", Mark.DIFFERS: "X", Mark.NOT_COMPARED: "-"}


def pair(**kwargs):
    golden = golden_side(**{"sequences": 1, "steps": 8, **kwargs})
    return golden, run_side(golden)


def line(golden, run, **options):
    report = judge(golden.evidence(), run.evidence(), JudgeOptions(**options))
    return "".join(LETTERS[Mark(m)] for m in marks(report.sequences[0], report.teacher_forced))


def test_equal_bits():
    assert line(*pair()) == "========"


def test_equal_tokens_with_other_logits():
    golden, run = pair()
    perturb(run, 1e-3)
    assert line(golden, run, atol=1e-2) == "........"


def test_equal_tokens_without_logits():
    golden, run = pair()
    run.one.logits.clear()
    assert line(golden, run) == "........"


def test_which_rows_have_the_same_bits_is_known_by_the_curves():
    golden, run = pair(steps=8, vocab=64)
    run.one.logits["engine"][3, 5] += np.float32(1e-3)
    report = pictures.drawn(golden, run, atol=1e-2)
    assert [Mark(m) for m in marks(report.sequences[0], False)] == [Mark.SAME] * 3 + [Mark.EQUAL] + [Mark.SAME] * 4


def test_after_the_first_divergence_of_a_free_run_nothing_was_compared():
    golden, run = pair()
    run.one.tokens[3] ^= 1
    assert line(golden, run) == "===X----"


def test_a_teacher_forced_run_is_compared_everywhere():
    golden, run = pair()
    run.manifest["decoding"]["teacher_forced"] = True
    run.one.tokens[[3, 6]] ^= 1
    assert line(golden, run) == "===X==X="


def test_ties():
    golden, run = pair()
    run.manifest["decoding"]["teacher_forced"] = True
    make_tie(golden, run, 2)
    assert line(golden, run, atol=1e-2)[2] == "~"
    assert line(golden, run)[2] == "X"


def test_the_first_row_that_is_out_of_tolerance():
    golden, run = pair()
    run.one.logits["engine"][5, 0] = np.nan
    assert line(golden, run, atol=1)[5] == "!"


@pytest.mark.parametrize(("golden_ends", "run_ends", "expected"), [(8, 5, "=====X--"), (5, 8, "=====X--")])
def test_where_one_side_had_stopped(golden_ends, run_ends, expected):
    golden, run = pair()
    for side, end in ((golden, golden_ends), (run, run_ends)):
        side.one.tokens = side.one.tokens[:end]
        side.one.logits = {k: v[:end] for k, v in side.one.logits.items()}
    assert line(golden, run).replace(".", "=") == expected


def test_a_missing_sequence_and_an_empty_one():
    golden, run = pair(sequences=2)
    del run.seqs[0]
    assert line(golden, run) == "--------"
    golden, run = pair(steps=0)
    assert line(golden, run) == ""

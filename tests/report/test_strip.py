"""The strip: one character a step."""

import picture_cases as pictures
import pytest
from parity_cases import golden_side, run_side

from kdtr_cli.parity.judge import judge
from kdtr_cli.report.steps import Mark, marks
from kdtr_cli.report.strip import legend, strip

pytestmark = pytest.mark.quick


def case(steps, wrong=None):
    golden = golden_side(sequences=1, steps=steps, vocab=10)
    run = run_side(golden)
    if wrong is not None:
        run.one.tokens[wrong] = (run.one.tokens[wrong] + 1) % 10
    return judge(golden.evidence(), run.evidence()).sequences[0]


def lines(result, width=100, unicode=False):
    return [str(line) for line in strip(result, False, width, unicode)]


@pytest.mark.parametrize("width", [20, 40, 79, 100, 300])
@pytest.mark.parametrize(("steps", "wrong"), [(1, 0), (9, 8), (10, None), (24, 17), (60, 30)])
def test_every_step_has_its_character_in_its_place(width, steps, wrong):
    result = case(steps, wrong)
    made = lines(result, width)
    seen = {}
    for line in made:
        label, first, groups = line[:10].strip(), int(line[10:18]), line[20:]
        assert label == "steps"
        assert len(line) <= max(width, 31)
        for i, char in enumerate(groups):
            if i % 11 == 10:
                assert char == " "
            else:
                seen[first + i - i // 11] = char
    expected = "".join(
        {Mark.SAME: "=", Mark.DIFFERS: "X", Mark.NOT_COMPARED: "-"}[Mark(m)] for m in marks(result, False)
    )
    if len(expected) == len(seen):
        assert [seen[i] for i in range(steps)] == list(expected)
    else:
        assert any("left out" in line for line in made)


def test_a_long_strip_is_cut_around_the_first_divergence_and_counts_the_rest():
    made = lines(case(5000, 3333), 80)
    assert len(made) < 16
    left_out = [line for line in made if "left out" in line]
    assert "same bits" in left_out[0]
    assert "not compared" in left_out[-1]
    counted = sum(
        int(word)
        for line in left_out
        for word in line.partition("left out: ")[2].replace(",", "").split()
        if word.isdigit()
    )
    shown = sum(len(line[20:].replace(" ", "")) for line in made if "left out" not in line)
    assert counted + shown == 5000
    assert sum("X" in line[20:] for line in made) == 1


def test_the_better_marks_and_their_colours():
    report = pictures.diverged()
    (line,) = strip(report.sequences[0], False, 100, True)
    assert "✗" in str(line)
    assert any(span.style == "bold red" for span in line.spans)
    (said,) = legend(report.sequences, False, True)
    assert "✗ another token" in str(said)
    assert "≈" not in str(said)


def test_no_step_has_no_strip_and_no_legend():
    result = case(0)
    assert lines(result) == []
    assert list(legend([result], False, False)) == []

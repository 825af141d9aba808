"""The first difference of two outputs: in the order of computing, to the bit, and never blind to NaN."""

import dataclasses

import numpy as np
import pytest

from kdtr_cli.model.prompts import Generated
from kdtr_cli.workflows.bitwise import Difference, first_difference

pytestmark = pytest.mark.quick


def output(**changed) -> Generated:
    logits = np.arange(15, dtype=np.float32).reshape(3, 5)
    return dataclasses.replace(Generated(np.array([4, 4, 4], np.int32), logits, None, "length"), **changed)


def other_logit(row: int, place: int, value: float) -> np.ndarray:
    logits = output().logits.copy()
    logits[row, place] = value
    return logits


def test_equal_outputs_do_not_differ():
    assert first_difference(output(), output()) == (3, None)


def test_one_bit_of_one_logit():
    changed = other_logit(1, 2, np.nextafter(np.float32(7), np.float32(8)))
    steps, found = first_difference(output(), output(logits=changed))
    assert steps == 1
    assert found == Difference("logits", 1, 2, 7.0, float(changed[1, 2]), "0x40e00000", "0x40e00001")


def test_the_sign_of_zero_is_a_bit():
    assert first_difference(output(), output(logits=other_logit(0, 0, -0.0)))[1].other_bits == "0x80000000"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_even_the_same_as_itself(value):
    bad = output(logits=other_logit(2, 4, value))
    steps, found = first_difference(bad, bad)
    assert (steps, found.part, found.step, found.index) == (2, "logits", 2, 4)


def test_logits_come_before_the_token_that_they_choose_and_after_earlier_tokens():
    tokens = np.array([4, 3, 4], np.int32)
    at = {row: first_difference(output(), output(tokens=tokens, logits=other_logit(row, 0, 99.0))) for row in range(3)}
    assert [(steps, d.part, d.step) for steps, d in at.values()] == [
        (0, "logits", 0),
        (1, "logits", 1),
        (1, "token", 1),
    ]
    assert (at[2][1].base, at[2][1].other) == (4, 3)


def test_a_shorter_output_and_another_reason():
    short = output(tokens=output().tokens[:2], logits=output().logits[:2])
    assert first_difference(output(), short) == (2, Difference("length", 2, None, 3, 2))
    assert first_difference(short, output()) == (2, Difference("length", 2, None, 2, 3))
    stopped = first_difference(output(), output(finish_reason="stop"))
    assert stopped == (3, Difference("finish_reason", 2, None, "length", "stop"))


def test_prompt_logits_come_first_and_may_not_be_missing():
    prompt = np.ones((2, 5), np.float32)
    changed = prompt.copy()
    changed[1, 3] = 2
    both = output(prompt_logits=changed, logits=other_logit(0, 0, 99.0))
    steps, found = first_difference(output(prompt_logits=prompt), both)
    assert (steps, found.part, found.step, found.index) == (0, "prompt_logits", 1, 3)
    assert first_difference(output(prompt_logits=prompt), output())[1].part == "prompt_logits"


def test_digests_of_rows_take_the_place_of_logits():
    digests = np.zeros((3, 32), np.uint8)
    changed = digests.copy()
    changed[2, 31] = 1
    assert first_difference(output(logits=digests), output(logits=digests)) == (3, None)
    steps, found = first_difference(output(logits=digests), output(logits=changed))
    assert (steps, found.part, found.step, found.index) == (2, "logits", 2, None)

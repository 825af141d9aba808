"""Rows that are rotated or reordered are told from rows that are neither."""

import numpy as np
import pytest

from kdtr_cli.parity.rotary import describe_rotation, is_permutation

pytestmark = pytest.mark.quick

HALF = 4
ROTARY = 10000.0 ** (-np.arange(HALF) / HALF)
AT = np.array([0, 3, 5, 200])
CLOSE = 1e-3


def rows(heads: int = 3) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((len(AT), heads * 2 * HALF))


def turned(x: np.ndarray, by: np.ndarray | float) -> np.ndarray:
    """Every pair of row m turned as by[m] positions more."""
    pairs = x.reshape(len(x), -1, 2 * HALF)
    angle = (np.zeros(len(x)) + by)[:, None, None] * ROTARY
    a, b = pairs[..., :HALF], pairs[..., HALF:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1).reshape(
        x.shape
    )


@pytest.mark.parametrize("shift", [1, -1, 7, 64])
def test_a_shift_of_whole_positions_is_found(shift):
    at = AT + 70
    found = describe_rotation(rows(), turned(rows(), shift), at, ROTARY, CLOSE)
    side = "later" if shift > 0 else "earlier"
    number = "1 position" if abs(shift) == 1 else f"{abs(shift)} positions"
    assert found.rotation
    assert found.shift == f"turned as {number} {side} in 4 rows, first at position 70"


def test_a_row_has_its_own_shift():
    found = describe_rotation(rows(), turned(rows(), np.array([1, 2, 3, -4])), AT, ROTARY, CLOSE)
    assert found.shift.startswith("turned as -4 to +3 positions away, another number each row")


def test_nothing_stands_before_position_0():
    assert describe_rotation(rows(1), turned(rows(1), -2), AT, ROTARY, CLOSE).shift is None  # row 0 can't be


def test_other_angles_are_a_rotation_and_no_shift():
    for by in (0.5, 65, -0.25):
        found = describe_rotation(rows(), turned(rows(), by), AT, ROTARY, CLOSE)
        assert (found.rotation, found.shift) == (True, None)


def test_other_lengths_are_no_rotation():
    found = describe_rotation(rows(), 1.01 * turned(rows(), 1), AT, ROTARY, CLOSE)
    assert (found.rotation, found.shift) == (False, None)
    assert not describe_rotation(rows(), rows()[::-1], AT, ROTARY, CLOSE).rotation


def test_permutations():
    x = rows()
    assert is_permutation(x, x[:, ::-1], CLOSE).all()
    heads = x.reshape(len(x), 3, -1)[:, ::-1].reshape(x.shape)
    assert is_permutation(x, heads, CLOSE).all()
    assert not is_permutation(x, heads, CLOSE, 2 * HALF).any()  # other values in every head
    inside = x.reshape(len(x), 3, -1)[..., ::-1].reshape(x.shape)
    assert is_permutation(x, inside, CLOSE, 2 * HALF).all()


def test_what_is_no_permutation():
    x = rows()
    assert not is_permutation(x, x, CLOSE).any()  # equal rows are in order
    assert not is_permutation(x, x + 1e-6, CLOSE).any()
    assert not is_permutation(x, x[:, ::-1] * 1.01, CLOSE).any()
    assert not is_permutation(x, turned(x, 1), CLOSE).any()
    # thousands of values of one distribution, sorted, are near each other
    one, other = (np.random.default_rng(seed).standard_normal((4, 1 << 13)) for seed in (1, 2))
    assert not is_permutation(one, other, 0.03, 64).any()

"""Errors of single operations: counts and distances against NumPy's own, and hints that fit what they are named for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr_cli.parity.hints import HINTS as ALL_HINTS
from kdtr_cli.parity.operation_hints import HINTS, Look, fitting
from kdtr_cli.parity.operations import IDENTICAL, OUT, WITHIN, OperationTally
from kdtr_cli.parity.tolerances import JudgeOptions, effective_tolerance

pytestmark = pytest.mark.quick

RIGHT = np.random.default_rng(0).standard_normal((6, 3, 8)).astype(np.float32)
AT = np.arange(6)


def tally(**judge) -> OperationTally:
    return OperationTally("o", 1, "prefill", ("k",), effective_tolerance(JudgeOptions(**judge), "exact"))


class TestTally:
    def test_distances_are_those_of_all_passes_together(self):
        rng = np.random.default_rng(1)
        one = tally(atol=1e-3)
        passes = [(RIGHT[:4], AT[:4]), (RIGHT[4:], AT[4:]), (RIGHT, AT)]
        spoiled = []
        for wanted, at in passes:
            got = wanted + np.float32(1e-4) * rng.standard_normal(wanted.shape).astype(np.float32)
            got[0] = wanted[0]
            spoiled.append(got)
            one.add("s", at, (got, wanted))
        a = np.concatenate(spoiled).astype(np.float64)
        b = np.concatenate([wanted for wanted, _ in passes]).astype(np.float64)
        found = one.result()
        assert (found.rows, found.rows_identical, found.rows_out, found.status) == (12, 3, 0, WITHIN)
        assert found.max_abs == np.abs(a - b).max()
        assert found.nmse == pytest.approx(((a - b) ** 2).sum() / (b**2).sum(), rel=1e-12)
        assert found.first_row == ("s", 1)

    def test_rows_are_out_by_any_of_their_values(self):
        got = RIGHT.copy()
        got[2, 1, 3] += 1
        one = tally(atol=0.5)
        one.add("a", AT, (RIGHT, RIGHT))
        assert one.result().status == IDENTICAL
        one.add("b", AT + 10, (got, RIGHT))
        found = one.result()
        assert (found.rows, found.rows_identical, found.rows_out, found.status) == (12, 11, 1, OUT)
        assert found.first_row == ("b", 12)

    @given(st.integers(1, 1 << 20))
    def test_ulps(self, steps):
        got = RIGHT.copy()
        got[3, 0, 0] = np.float32(1.5)
        wanted = got.copy()
        got.view(np.int32)[3, 0, 0] += steps
        one = tally(max_ulp=steps)
        one.add("s", AT, (got, wanted))
        assert (one.result().max_ulp, one.result().status) == (steps, WITHIN)
        less = tally(max_ulp=steps - 1)
        less.add("s", AT, (got, wanted))
        assert less.result().status == OUT

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_never_passes(self, value):
        got = RIGHT.copy()
        got[5, 2, 7] = value
        one = tally(atol=1e30, rtol=1e30, max_ulp=1 << 40)
        one.add("s", AT, (got, RIGHT))
        one.add("s", AT, (RIGHT + np.float32(1), RIGHT))  # a finite error behind it hides nothing
        found = one.result()
        assert (found.rows_out, found.status, found.nonfinite) == (1, OUT, 1)
        assert not np.isfinite(found.max_abs)
        assert not np.isfinite(found.nmse)

    def test_zeros_of_another_sign_are_not_identical_but_equal(self):
        zero = np.zeros((1, 4), np.float32)
        one = tally()
        one.add("s", AT[:1], (-zero, zero))
        found = one.result()
        assert (found.rows_identical, found.rows_out, found.max_abs, found.max_ulp, found.nmse) == (0, 0, 0.0, 0, 0.0)
        assert found.status == WITHIN

    def test_an_output_that_should_be_zero(self):
        one = tally()
        one.add("s", AT[:1], (np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)))
        assert one.result().nmse == np.inf

    def test_integers_know_no_tolerance(self):
        ids = np.arange(12).reshape(6, 2)
        other = ids.copy()
        other[4, 1] += 1
        one = tally(atol=100.0, max_ulp=100)
        one.add("s", AT, None, (other, ids))
        found = one.result()
        assert (found.rows_identical, found.rows_out, found.max_abs, found.nmse) == (5, 1, None, None)

    def test_a_hint_is_what_fits_every_pass(self):
        one = tally()
        one.add("s", AT, (RIGHT * np.float32(2), RIGHT))
        assert one.result().hints == ("constant-scale",)
        one.add("s", AT, (RIGHT, RIGHT))  # nothing to see
        assert one.result().hints == ("constant-scale",)
        one.add("s", AT, (RIGHT + np.float32(1), RIGHT))
        assert one.result().hints == ()
        one.add("s", AT, (RIGHT * np.float32(2), RIGHT))
        assert one.result().hints == ()


ROTARY = np.array([1.0, 0.1, 0.01, 0.001])  #: radians a position of the four pairs of a vector of RIGHT


def hints(kind: str, got, wanted=RIGHT, at=AT, ids=None, got_ids=None) -> set[str]:
    return set(fitting(Look(kind, np.asarray(got, np.float32), wanted, ids, got_ids, ROTARY), at))


def turned(angles: np.ndarray) -> np.ndarray:
    """RIGHT with pair i, (i, i + 4), of each row turned by angles [6, 4]."""
    pairs = (RIGHT[..., :4] + 1j * RIGHT[..., 4:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([pairs.real, pairs.imag], -1).astype(np.float32)


class TestHints:
    def test_a_factor(self):
        assert hints("", RIGHT * np.float32(2.827)) == {"constant-scale"}
        assert hints("", -RIGHT) == {"constant-scale"}
        some = RIGHT.copy()
        some[2:4] *= np.float32(0.5)
        assert hints("", some) == {"constant-scale"}
        some[5] *= np.float32(0.75)
        assert hints("", some) == set()
        assert hints("", RIGHT * 0) == set()
        assert hints("", np.nextafter(RIGHT, np.float32(9))) == set()
        assert hints("", RIGHT, RIGHT * 0) == set()

    def test_what_is_not_finite(self):
        got = RIGHT.copy()
        got[0, 0, 0] = np.inf
        for kind in ("", "rope", "logits"):
            assert hints(kind, got) == {"nonfinite"}

    def test_a_shift_of_logits(self):
        logits = RIGHT[:, 0]
        shifted = logits + np.arange(1, 7, dtype=np.float32)[:, None]
        assert hints("logits", shifted, logits) == {"shift"}
        assert hints("", shifted, logits) == set()
        shifted[3, 3] += np.float32(0.01)
        assert hints("logits", shifted, logits) == set()

    def test_rotated_vectors(self):
        apart = RIGHT.reshape(6, 3, 4, 2).swapaxes(-1, -2).reshape(6, 3, 8)
        assert hints("rope", apart) == {"rope-layout"}
        assert hints("rope", turned(np.ones((6, 1)) * ROTARY)) == {"position"}
        assert hints("rope", turned(np.ones((6, 1)) * ROTARY * 0.3)) == {"position"}
        slower = turned(AT[:, None] * ROTARY * -0.3)
        assert hints("rope", slower) == {"yarn-scale"}
        # without position 0 nobody can say
        assert hints("rope", slower[1:], RIGHT[1:], AT[1:]) == {"yarn-scale", "position"}
        slower[3] = RIGHT[3]
        assert hints("rope", slower) == set()
        assert hints("rope", RIGHT + 1) == set()
        assert hints("rope", RIGHT * 2) == {"constant-scale"}

    def test_routers(self):
        weights, ids = np.abs(RIGHT[:, 0]), np.arange(48).reshape(6, 8)
        other = weights + np.float32(0.1)
        assert hints("router", other, weights, ids=ids, got_ids=ids) == {"router-bias"}
        assert hints("router", other, weights, ids=ids, got_ids=ids + 1) == {"router-choice"}
        assert hints("router", weights * 2, weights, ids=ids, got_ids=ids) == {"constant-scale", "router-bias"}

    def test_one_expert(self):
        ids = np.array([[0, 1, 2], [3, 1, 0], [2, 3, 4], [1, 0, 4], [4, 3, 2], [0, 4, 3]])
        one = RIGHT + (ids == 2)[..., None]
        assert hints("experts", one, ids=ids) == {"single-expert"}
        one[0, 2] = RIGHT[0, 2]  # a right item of it
        assert hints("experts", one, ids=ids) == set()
        assert hints("experts", RIGHT + ((ids == 2) | (ids == 3))[..., None], ids=ids) == set()
        assert hints("experts", RIGHT + 1, ids=np.zeros_like(ids)) == set()

    @pytest.mark.parametrize("kind", ["", "rope", "router", "experts", "logits"])
    def test_right_numbers_say_nothing(self, kind):
        ids = np.arange(18).reshape(6, 3)
        assert hints(kind, RIGHT, ids=ids, got_ids=ids) == set()

    def test_right_weights_of_other_experts(self):
        ids = np.arange(18).reshape(6, 3)
        assert hints("router", RIGHT, ids=ids, got_ids=ids[::-1]) == {"router-choice"}

    def test_the_codes_are_those_of_all_hints(self):
        assert len(HINTS) == len(set(HINTS))
        assert {*HINTS, "prefill-decode", "first-tensor"} <= set(ALL_HINTS)

"""Two traces compared: which tensor parts first, in figures, whatever the arrays are."""

from functools import partial

import numpy as np
import pytest
from parity_cases import tensor_of

from kdtr_cli.parity import traces
from kdtr_cli.parity.evidence import Tensor
from kdtr_cli.parity.tolerances import JudgeOptions, effective_tolerance, tolerance_for
from kdtr_cli.parity.traces import compare_traces, step_of

pytestmark = pytest.mark.quick

PROMPT, ROWS = 4, 9
NAMES = ("embed", "model.layers.0.mlp.expert_ids", "model.layers.0.hidden", "model.layers.12.hidden", "final_norm")


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {name: rng.standard_normal((ROWS, 5)).astype(np.float32) for name in NAMES}
    made[NAMES[1]] = rng.integers(0, 8, (ROWS, 2)).astype(np.int32)
    return made


def compared(golden, run, rows=ROWS, **bounds):
    base = effective_tolerance(JudgeOptions(**bounds), "exact")
    sides = ({n: tensor_of(a) for n, a in side.items()} for side in (golden, run))
    return compare_traces(*sides, rows, PROMPT, lambda name: tolerance_for(name, (), base))[0]


def by_name(found):
    return {t.name: t for t in found.tensors}


def test_equal_traces():
    found = compared(arrays(), arrays())
    assert found.all_bits
    assert found.first is None
    assert not found.fails
    assert [t.name for t in found.tensors] == list(NAMES)
    assert [t.layer for t in found.tensors] == [None, 0, 0, 12, None]
    for t in found.tensors:
        figures = (None, None) if t.kind == "expert_ids" else (0.0, 0.0)
        assert (t.rows, t.rows_identical, t.rows_out, t.max_abs, t.nmse, t.first_row) == (ROWS, ROWS, 0, *figures, None)


def test_figures_are_those_of_numpy():
    golden, run = arrays(), arrays()
    run["final_norm"][[2, 6]] += np.float32([[0.5], [-2]])
    t = by_name(compared(golden, run))["final_norm"]
    g, r = (side["final_norm"].astype(np.float64) for side in (golden, run))
    assert t.max_abs == np.abs(r - g).max()
    assert t.nmse == pytest.approx(((r - g) ** 2).sum() / (g**2).sum(), rel=1e-12)
    assert (t.rows_identical, t.rows_out, t.first_row) == (ROWS - 2, 2, 2)


@pytest.mark.parametrize(
    ("changes", "first", "row", "step"),
    [
        ({"final_norm": 1, "embed": 5}, "final_norm", 1, 0),  # the prompt before a decoded row
        ({"final_norm": 1, "model.layers.0.hidden": 3}, "model.layers.0.hidden", 3, 0),  # in it the earlier tensor
        ({"final_norm": 4, "embed": 5}, "final_norm", 4, 1),  # an earlier decoded row
        ({"model.layers.12.hidden": 6, "model.layers.0.hidden": 6}, "model.layers.0.hidden", 6, 3),
    ],
)
def test_the_first_step_decides_and_in_it_the_order_of_execution(changes, first, row, step):
    run = arrays()
    for name, at in changes.items():
        run[name][at:] += 1
    found = compared(arrays(), run)
    assert (found.first.name, found.first.first_row, found.step) == (first, row, step)


def test_steps():
    assert [step_of(row, 3) for row in range(6)] == [0, 0, 0, 1, 2, 3]


def test_rows_that_saw_other_tokens_are_left_out():
    run = arrays()
    run["embed"][6:] += 1
    assert compared(arrays(), run, rows=6).first is None
    assert compared(arrays(), run, rows=7).first.first_row == 6


def test_integers_differ_or_do_not():
    run = arrays()
    run[NAMES[1]][5, 1] ^= 1
    found = compared(arrays(), run, atol=100.0)
    assert (found.first.name, found.first.max_abs, found.first.rows_out) == (NAMES[1], None, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_out_whatever_the_bound(value):
    run = arrays()
    run["embed"][2, 2] = value
    for bounds in ({"atol": 1e30}, {"max_ulp": 2**62}, {"max_kl": 1e30}, {}):
        found = compared(arrays(), run, **bounds)
        assert (found.first.name, found.first.first_row, found.first.rows_out) == ("embed", 2, 1)
        assert not found.first.max_abs < 1e30


def test_a_golden_that_is_not_finite_is_named_even_where_both_have_it():
    golden = arrays()
    golden["model.layers.0.hidden"][8, 0] = np.inf
    assert compared(golden, golden).golden_nonfinite == "model.layers.0.hidden"
    assert compared(arrays(), arrays()).golden_nonfinite is None


def test_a_sign_of_zero_is_another_bit_and_within():
    golden, run = arrays(), arrays()
    golden["embed"][3, 3], run["embed"][3, 3] = 0.0, -0.0
    found = compared(golden, run)
    assert found.first is None
    assert not found.all_bits
    assert by_name(found)["embed"].first_row == 3


def test_a_tolerance_decides_only_for_logits():
    run = arrays()
    run["embed"][3] += np.float32(0.1)
    assert compared(arrays(), run, atol=1.0).first is None
    found = compared(arrays(), run, atol=0.01)
    assert (found.first.name, found.fails) == ("embed", False)
    assert compared(arrays(), run).fails


def test_tensors_of_one_side_are_listed():
    golden, run = arrays(), arrays()
    del golden["embed"], run["final_norm"]
    found = compared(golden, run)
    assert (found.only_golden, found.only_run) == (("final_norm",), ("embed",))
    assert [t.name for t in found.tensors] == list(NAMES[1:4])


def test_blocks_change_nothing(monkeypatch):
    golden, run = arrays(), arrays()
    run["model.layers.0.hidden"][[1, 4, 8], 2] *= 3
    whole = compared(golden, run)
    monkeypatch.setattr(traces, "_BLOCK_VALUES", 7)
    cut = compared(golden, run)
    assert [t.first_row for t in cut.tensors] == [t.first_row for t in whole.tensors]
    assert by_name(cut)["model.layers.0.hidden"].nmse == pytest.approx(by_name(whole)["model.layers.0.hidden"].nmse)


def test_equal_digests_are_not_read_on_the_run_s_side():
    golden = arrays()["embed"]

    def never(lo: int, hi: int) -> np.ndarray:
        raise AssertionError

    def digest(text: str) -> str:
        return text

    def side(rows, text):
        return {"embed": Tensor(ROWS, 5, golden.dtype, rows, partial(digest, text))}

    base = effective_tolerance(JudgeOptions(), "exact")
    g = side(lambda lo, hi: golden[lo:hi], "a")
    found, _ = compare_traces(g, side(never, "a"), ROWS, PROMPT, lambda n: (base, True))
    assert found.all_bits
    with pytest.raises(AssertionError):
        compare_traces(g, side(never, "b"), ROWS, PROMPT, lambda n: (base, True))

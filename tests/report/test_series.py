"""Curves as pictures show them: grouped, and of each group the worst."""

import numpy as np
import pytest

from kdtr_cli.parity.curves import RowCurves
from kdtr_cli.report.series import pooled, series_of

pytestmark = pytest.mark.quick


def curves(n, rows_per_entry=1, blocks=3):
    rng = np.random.default_rng(n)
    columns = [rng.random(n) for _ in range(5)]
    return RowCurves(*columns, np.ones(n, np.int8), rng.random((n, blocks)).astype(np.float32), 16, rows_per_entry)


@pytest.mark.parametrize(("n", "limit", "factor"), [(1, 10, 1), (10, 10, 1), (11, 10, 2), (25, 10, 3), (30, 10, 3)])
def test_no_more_entries_than_there_is_room_for(n, limit, factor):
    made = curves(n)
    series = series_of(made, n, limit)
    assert series.per == factor
    groups = [slice(i, i + factor) for i in range(0, n, factor)]
    assert len(series.max_abs) == len(groups) <= limit
    for name, worst in (("max_abs", np.max), ("kl", np.max), ("golden_margin", np.min), ("run_margin", np.min)):
        np.testing.assert_array_equal(getattr(series, name), [worst(getattr(made, name)[g]) for g in groups])
    np.testing.assert_array_equal(series.blocks, [made.blocks[g].max(axis=0) for g in groups])


def test_entries_of_many_rows_are_groups_of_groups():
    assert series_of(curves(25, rows_per_entry=4), 98, 10).per == 12


def test_nan_is_the_worst_of_its_group_and_an_unknown_margin_is_not():
    made = curves(4)
    made.max_abs[1] = made.run_margin[1] = np.nan
    made.blocks[3, 0] = np.nan
    series = series_of(made, 4, 2)
    assert np.isnan(series.max_abs).tolist() == [True, False]
    assert not np.isnan(series.run_margin).any()
    assert np.isnan(series.blocks).tolist() == [[False] * 3, [True, False, False]]


def test_nothing_gives_nothing():
    assert series_of(None, 0) is None
    assert series_of(curves(0), 0) is None
    assert pooled(np.empty(0, np.uint8), 1, np.maximum).tolist() == []


def test_whether_nothing_differs():
    made = curves(3)
    assert not series_of(made, 3).all_zero
    made.max_abs[:] = 0
    assert series_of(made, 3).all_zero

"""Curves: one entry a row, or the worst of as many rows as keep memory flat."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_cases import golden_side, perturb, run_side

from kdtr_cli.parity import curves as module
from kdtr_cli.parity import drawn
from kdtr_cli.parity.curves import MAX_BLOCKS, MAX_ENTRIES, CurveBuilder, curve_block_size
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.json import report_json

pytestmark = pytest.mark.quick

NAMES = ("max_abs", "max_ulp", "kl", "golden_margin", "run_margin")


def figures(seed, n, blocks=3):
    rng = np.random.default_rng(seed)
    columns = {name: np.where(rng.random(n) < 0.1, np.nan, rng.random(n)) for name in NAMES}
    return columns, rng.integers(-1, 2, n).astype(np.int8), rng.random((n, blocks), np.float32)


class TestGroups:
    @given(
        seed=st.integers(0, 1000), n=st.integers(1, 60), entries=st.integers(1, 12), cuts=st.lists(st.integers(0, 60))
    )
    @settings(deadline=None, max_examples=60)
    def test_an_entry_is_the_worst_of_its_rows_however_they_come(self, seed, n, entries, cuts):
        columns, top1, blocks = figures(seed, n)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "MAX_ENTRIES", entries)
            builder = CurveBuilder(n, 96)
        ends = sorted({0, n, *(min(c, n) for c in cuts)})
        for lo, hi in zip(ends, [*ends[1:], n], strict=True):
            builder.add({k: v[lo:hi] for k, v in columns.items()}, top1[lo:hi], blocks[lo:hi])
        made = builder.curves()
        step = -(-n // entries)
        assert made.rows_per_entry == step
        assert len(made) == -(-n // step) <= entries
        for i in range(len(made)):
            rows = slice(i * step, (i + 1) * step)
            for name in NAMES:
                worst = columns[name][rows].min() if "margin" in name else columns[name][rows].max()
                assert repr(getattr(made, name)[i]) == repr(worst)
            kinds = set(top1[rows].tolist())
            assert made.top1_equal[i] == (0 if 0 in kinds else -1 if -1 in kinds else 1)
            assert np.array_equal(made.blocks[i], blocks[rows].max(axis=0))

    def test_up_to_65536_rows_each_has_its_own(self):
        assert CurveBuilder(MAX_ENTRIES, 10).rows_per_entry == 1
        assert CurveBuilder(MAX_ENTRIES + 1, 10).rows_per_entry == 2
        assert CurveBuilder(0, 10).curves().max_abs.shape == (0,)

    def test_rows_that_never_came_have_no_entry(self):
        builder = CurveBuilder(10, 96)
        columns, top1, blocks = figures(0, 4)
        builder.add(columns, top1, blocks)
        assert len(builder.curves()) == len(builder.curves().blocks) == 4

    @given(vocab=st.integers(1, 10**6))
    @settings(deadline=None)
    def test_blocks_are_at_most_64_and_cover_the_vocabulary(self, vocab):
        size = curve_block_size(vocab)
        made = CurveBuilder(1, vocab).curves()
        assert made.blocks.shape[1] == -(-vocab // size) <= MAX_BLOCKS
        assert made.block_size == size


class TestOfAJudgement:
    def pair(self, **kwargs):
        golden = golden_side(vocab=100, **kwargs)
        return golden, run_side(golden)

    def curves(self, golden, run, **options):
        report = judge(golden.evidence(), run.evidence(), JudgeOptions(**options))
        return report, report.sequences[0].logits

    def test_rows_equal_bit_for_bit_have_zeros_and_their_margins(self):
        golden, run = self.pair()
        curves = self.curves(golden, run)[1].curves
        for name in ("max_abs", "max_ulp", "kl", "blocks"):
            assert not getattr(curves, name).any()
        top = np.sort(golden.one.logits["exact"].astype(float), axis=1)
        assert np.array_equal(curves.golden_margin, top[:, -1] - top[:, -2])
        assert np.array_equal(curves.run_margin, curves.golden_margin)
        assert (curves.top1_equal == 1).all()

    def test_extremes_of_the_result_are_those_of_its_curves(self):
        golden, run = self.pair()
        perturb(run, 1e-3)
        logits = self.curves(golden, run, atol=1e-2)[1]
        curves = logits.curves
        assert (curves.max_abs.max(), curves.max_ulp.max(), curves.kl.max()) == (
            logits.max_abs,
            logits.max_ulp,
            logits.max_kl,
        )
        assert np.array_equal(curves.blocks.max(axis=1), curves.max_abs.astype(np.float32))
        difference = np.abs(run.one.logits["engine"].astype(float) - golden.one.logits["exact"])
        assert np.array_equal(curves.blocks[:, 3], difference[:, 96:].max(axis=1).astype(np.float32))

    def test_partial_rows_have_what_is_known(self):
        golden, run = self.pair()
        golden.one.form = "top:3"
        perturb(run, 1e-3)
        curves = self.curves(golden, run, atol=1e-2)[1].curves
        assert np.isnan(curves.kl).all()
        assert (curves.max_abs > 0).all()
        assert (curves.top1_equal == 1).all()
        assert np.isnan(curves.blocks).any(axis=1).all() or (curves.blocks >= 0).any(axis=1).all()

    def test_they_are_no_part_of_the_json(self):
        golden, run = self.pair()
        report, logits = self.curves(golden, run)
        assert logits.curves is not None
        text = report_json(report)
        assert "curves" not in text
        assert "block_size" not in text

    def test_many_sequences_keep_no_more_than_one_long_one(self, monkeypatch):
        golden, run = self.pair(sequences=9, steps=6, score=True)
        run.seqs[7].tokens[3] ^= 1
        monkeypatch.setattr(drawn, "MAX_ENTRIES", 30)
        report = judge(golden.evidence(), run.evidence())
        kept = [s.logits.curves is not None for s in report.sequences]
        assert sum(drawn.curve_entries(s) for s in report.sequences) <= 30
        assert kept[7]  # the one that differs
        assert kept == [True, *[False] * 6, True, False]
        assert report.sequences[7].verdict is Verdict.DIVERGED

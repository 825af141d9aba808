"""A run of log-probabilities: judged against the golden's log-softmax, row by row with as many values as there are."""

from dataclasses import replace

import numpy as np
import pytest
from parity_cases import golden_side, run_side
from scipy.special import log_softmax as scipy_log_softmax

from kdtr_cli.parity.evidence import Logits
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.log_probabilities import log_softmax
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict

pytestmark = pytest.mark.quick

K = 6


def pair(counts=K, change=None, k=K, zero=None, logits=None):
    """A golden of one sequence and a run with its top log-probabilities; `change` may alter ids and values [T, K].
    `zero`: id 0 is the one of that rank at step 2. `logits`: the run holds logits, moved by so much as the golden's.
    """
    golden = golden_side(sequences=1)
    exact = golden.one.logits["exact"]
    if zero is not None:
        other = int(np.argsort(-exact[2], kind="stable")[zero])
        exact[2, [0, other]] = exact[2, [other, 0]]
        golden.one.tokens[2] = exact[2].argmax()
    exact += np.float32(logits or 0)
    run = run_side(golden).evidence()
    rows = exact if logits else scipy_log_softmax(exact.astype(np.float64), axis=1)
    ids = np.argsort(-rows, axis=1, kind="stable")[:, :k].astype(np.int32)
    values = np.take_along_axis(rows, ids, 1).astype(np.float32)
    counts = np.full(len(rows), counts, np.int32) if np.isscalar(counts) else np.array(counts, np.int32)
    if change is not None:
        change(ids, values)
    top = Logits(
        len(rows), None, np.dtype(np.float32),
        top_ids=lambda lo, hi: ids[lo:hi], top_values=lambda lo, hi: values[lo:hi], k=k,
        top_counts=lambda lo, hi: counts[lo:hi],
    )  # fmt: skip
    sequence = replace(run.sequences[0], logits={"engine": top})
    return golden.evidence(), replace(
        run, manifest=run.manifest | {"values": "logits" if logits else "logprobs"}, sequences=(sequence,)
    )


def report_of(pair, **options):
    return judge(*pair, JudgeOptions(**{"atol": 1e-4, "allow_partial": True, **options}))


class TestLogSoftmax:
    def test_it_is_scipy_s(self):
        rows = np.random.default_rng(0).normal(0, 50, (20, 333)).astype(np.float32)
        np.testing.assert_allclose(log_softmax(rows), scipy_log_softmax(rows.astype(np.float64), axis=1), atol=1e-12)

    def test_what_is_not_finite_stays_seen(self):
        rows = np.array([[1, np.nan, 2], [np.inf, 0, 0]], np.float32)
        assert not np.isfinite(log_softmax(rows)[0]).any()
        assert np.isnan(log_softmax(rows)[1]).any()


class TestCounts:
    def test_rows_of_all_lengths_pass(self):
        report = report_of(pair(counts=[6, 5, 4, 3, 2, 1]))
        assert report.verdict is Verdict.PASS
        assert report.totals.values_compared == 21

    def test_an_id_is_counted_once(self):
        report = report_of(pair(counts=[6, 6, 2, 6, 6, 6], zero=0))
        assert (report.verdict, report.totals.values_compared) == (Verdict.PASS, 32)

    def test_nothing_is_not_a_small_value(self):
        """Logits of 100 and more: what is not there must not stand among them as a 0."""
        report = report_of(pair(counts=[6, 6, 2, 6, 6, 6], logits=100))
        assert (report.verdict, report.totals.values_compared) == (Verdict.PASS, 32)

    def test_what_lies_past_a_count_is_nothing(self):
        """Neither its value nor its id counts, be it one that the golden has high up."""

        def spoil(ids, values):
            values[1, 3:] = np.nan
            ids[1, 3:] = 0

        assert report_of(pair(counts=[6, 3, 6, 6, 6, 6], change=spoil)).verdict is Verdict.PASS
        assert report_of(pair(counts=6, change=spoil)).verdict is not Verdict.PASS

    def test_a_likely_id_that_is_not_there_is_a_miss(self):
        """The second largest is gone: what is left reaches below it, so that the golden's value can't be."""

        def drop(ids, values):
            ids[2, 1:5], values[2, 1:5] = ids[2, 2:6].copy(), values[2, 2:6].copy()
            ids[2, 5], values[2, 5] = ids[2, 0], 0

        report = report_of(pair(counts=[6, 6, 5, 6, 6, 6], change=drop))
        assert report.verdict is Verdict.DIVERGED
        assert report.totals.first_logit_failure == (0, 2)

    def test_an_id_past_the_count_hides_no_miss(self):
        """The id that is missing stands where nothing stands, be it the 0 that nothing is read as."""

        def hide(ids, values):
            ids[2, 1:6], values[2, 1:6] = np.roll(ids[2, 1:6], -1), np.roll(values[2, 1:6], -1)

        for zero in (None, 1):
            assert report_of(pair(counts=[6, 6, 5, 6, 6, 6], change=hide, zero=zero)).verdict is Verdict.DIVERGED

    def test_a_row_without_any_can_t_be_measured(self):
        report = report_of(pair(counts=[6, 0, 6, 6, 6, 6]))
        assert report.verdict is Verdict.INCONCLUSIVE
        assert "1 rows of logits can't be measured" in report.reason

    @pytest.mark.parametrize("counts", [[6, 7, 6, 6, 6, 6], [6, -1, 6, 6, 6, 6]])
    def test_a_count_that_is_none(self, counts):
        assert report_of(pair(counts=counts)).verdict is Verdict.INVALID

    def test_an_id_twice_or_outside_is_none(self):
        def twice(ids, values):
            ids[1, 2] = ids[1, 0]

        def outside(ids, values):
            ids[1, 2] = 40

        for change in (twice, outside):
            assert report_of(pair(change=change)).verdict is Verdict.INVALID


class TestValues:
    def test_a_nan_diverges(self):
        def spoil(ids, values):
            values[3, 2] = np.nan

        assert report_of(pair(change=spoil)).verdict is Verdict.DIVERGED

    def test_without_the_mark_they_are_no_logits(self):
        golden, run = pair()
        assert (
            report_of((golden, replace(run, manifest={**run.manifest, "values": "logits"}))).verdict is Verdict.DIVERGED
        )

    def test_equal_bits_are_not_identical(self):
        report = report_of(pair(), atol=1e-4)
        assert report.verdict is Verdict.PASS
        assert report.totals.rows_identical == 0

    def test_a_golden_that_is_not_finite_is_invalid(self):
        golden = golden_side(sequences=1)
        golden.one.logits["exact"][4, 7] = np.nan
        assert report_of((golden.evidence(), pair()[1])).verdict is Verdict.INVALID

    @pytest.mark.parametrize("atol", [1.0, 3.4, 3.9])
    def test_all_ids_equally_likely_are_what_zeros_are(self, atol):
        """An engine that knows nothing gives log(1/V) everywhere: a bound that lets it pass is too loose, and zeros are
        no measure, lying 3.7 away."""
        golden = golden_side(sequences=1)
        for name in golden.one.logits:
            golden.one.logits[name] = (golden.one.logits[name] * 0.01).astype(golden.one.logits[name].dtype)
        golden.one.tokens[:] = golden.one.logits["exact"].argmax(axis=1)
        run = pair()[1]
        sequence = replace(run.sequences[0], tokens=golden.one.tokens, logits={})
        rows = log_softmax(golden.one.logits["exact"])
        logits = Logits(6, 40, np.dtype(np.float32), rows=lambda lo, hi: rows[lo:hi].astype(np.float32))
        run = replace(run, sequences=(replace(sequence, logits={"engine": logits}),))
        report = report_of((golden.evidence(), run), atol=atol, allow_partial=False)
        assert report.verdict is Verdict.INCONCLUSIVE
        assert "zeros" in report.reason
        assert report_of((golden.evidence(), run), atol=1e-4).verdict is Verdict.PASS


def test_the_line_names_the_poorest_row():
    """A server that gives K values once and one value ever after has not been compared by its top K."""
    assert report_of(pair(counts=[K, 1, 3, K, K, K])).totals.logits == "top1"
    assert report_of(pair(counts=[K, 4, 3, 0, K, K])).totals.logits == "top3"
    assert report_of(pair()).totals.logits == f"top{K}"

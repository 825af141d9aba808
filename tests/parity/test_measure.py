"""The fused figures of rows against metrics.py and other libraries; no number depends on blocks or threads."""

import math
from dataclasses import asdict, replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_cases import golden_side, perturb, run_side
from scipy.special import log_softmax, rel_entr
from scipy.stats import entropy

from kdtr_cli.parity import logits as logits_module
from kdtr_cli.parity import measure as module
from kdtr_cli.parity.evidence import logits_of
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.logits import compare_logits
from kdtr_cli.parity.measure import Measure, find_golden_nonfinite
from kdtr_cli.parity.metrics import FAR, abs_difference, equal_rows, kl_divergence, top_k, ulp_distance
from kdtr_cli.parity.needs import used_share
from kdtr_cli.parity.ranks import TOP_KS
from kdtr_cli.parity.tolerances import JudgeOptions, Tolerance
from kdtr_cli.parity.verdicts import Level, Verdict

pytestmark = pytest.mark.quick

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def rule(atol=0.0, rtol=0.0, max_ulp=None, max_kl=None):
    return Tolerance(atol, rtol, max_ulp, max_kl, {})


def rows(seed, n, vocab, dtype=np.float32, noise=1e-3, scale=3.0):
    """Golden and run [n, vocab]; about one row in four is equal bit for bit."""
    rng = np.random.default_rng(seed)
    golden = rng.normal(0, scale, (n, vocab))
    run = golden + rng.uniform(-noise, noise, (n, vocab)) * (rng.random((n, 1)) > 0.25)
    return golden.astype(dtype), run.astype(dtype)


def measured(golden, run, tolerance=None, dtype=None):
    return Measure(tolerance or rule(), golden.shape[1], np.dtype(dtype or run.dtype)).full(0, golden, run)


def assert_as_by_metrics(block, golden, run, tolerance):
    """Every figure of a block is what the plain functions give, row by row."""
    equal = equal_rows(run, golden) if run.dtype == golden.dtype else np.zeros(len(golden), bool)
    assert np.array_equal(block.identical, equal)
    difference, ulps = abs_difference(run, golden), ulp_distance(run, golden, run.dtype)
    assert np.array_equal(block.max_abs, difference.max(axis=1), equal_nan=True)
    assert np.array_equal(block.max_ulp[~equal], ulps.max(axis=1)[~equal])
    ok = tolerance.values_within(difference, golden, ulps) & np.isfinite(run)
    assert block.out[~equal].tolist() == (~ok).sum(axis=1)[~equal].tolist()
    shares = [used_share(*row) for row in zip(difference, tolerance.bound(golden), strict=True)]
    assert block.share[~equal].tolist() == (np.array(shares)[~equal].tolist() if tolerance.rtol else [0] * sum(~equal))
    np.testing.assert_allclose(block.kl, np.where(equal, 0, kl_divergence(run, golden)), rtol=1e-9, atol=3e-14)
    size = module.curve_block_size(golden.shape[1])
    for lo in range(0, golden.shape[1], size):
        with np.errstate(over="ignore"):
            largest = difference[:, lo : lo + size].max(axis=1).astype(np.float32)
        assert np.array_equal(block.blocks[:, lo // size], largest, equal_nan=True)
    for i in range(len(golden)):
        for side, top, margin in (
            (golden, block.golden_top, block.golden_margin),
            (run, block.run_top, block.run_margin),
        ):
            ids, values = top_k(side[i], 10)
            assert top[i].tolist() == ids.tolist() + [-1] * (10 - len(ids))
            values = [float(v) for v in values[:2]]
            if len(ids) > 1 and np.isfinite(values).all():
                assert margin[i] == values[0] - values[1]
        if not equal[i]:
            at = block.locate("abs", i)
            assert (at.row, at.token) == (i, int(difference[i].argmax()))
            assert block.locate("ulp", i).token == int(ulps[i].argmax())
            if not ok[i].all():
                assert block.locate("value", i).token == int(np.argmin(ok[i]))


class TestAgainstMetrics:
    @pytest.mark.parametrize("name", TYPES)
    @given(
        seed=st.integers(0, 10**6),
        n=st.integers(1, 9),
        vocab=st.sampled_from([1, 2, 5, 7, 8, 9, 31, 33, 63, 127, 300, 641, 2049]),
        noise=st.sampled_from([0.0, 1e-6, 1e-2, 5.0]),
        atol=st.sampled_from([0.0, 1e-3, 1.0]),
        rtol=st.sampled_from([0.0, 1e-3]),
        max_ulp=st.sampled_from([None, 0, 3, 2**40]),
        tile=st.sampled_from([64, 512, 1 << 15]),
    )
    @settings(deadline=None, max_examples=40)
    def test_all_figures(self, name, seed, n, vocab, noise, atol, rtol, max_ulp, tile):
        golden, run = rows(seed, n, vocab, TYPES[name], noise)
        tolerance = rule(atol, rtol, max_ulp)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "TILE", tile)
            assert_as_by_metrics(measured(golden, run, tolerance), golden, run, tolerance)

    def test_a_value_that_may_not_differ_and_does_not_uses_nothing_of_its_bound(self):
        golden = np.array([[0, 1, 4], [0, 0, 4], [0, 1, 4]], np.float32)
        run = np.array([[0, 1, 5], [-0.0, 0, 4], [1e-9, 1, 4]], np.float32)
        assert measured(golden, run, rule(rtol=1 / 4)).share.tolist() == [1, 0, math.inf]

    @given(seed=st.integers(0, 10**6), vocab=st.sampled_from([1, 7, 40, 641]), bound=st.sampled_from([None, 2]))
    @settings(deadline=None, max_examples=30)
    def test_a_run_with_bits_of_any_kind(self, seed, vocab, bound):
        """Random bits: NaNs of both kinds, infinities, denormals, values near the end of the range."""
        rng = np.random.default_rng(seed)
        run = rng.integers(0, 2**32, (6, vocab), np.uint32).view(np.float32)
        golden, tolerance = rows(seed, 6, vocab)[0], rule(1.0, 1e-3, bound)
        assert_as_by_metrics(measured(golden, run, tolerance), golden, run, tolerance)

    @pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
    def test_a_golden_of_another_type(self, dtype):
        golden = np.random.default_rng(0).normal(0, 3, (5, 333))
        golden[3, 7] = 1e300  # beyond the run's type: no ULP reaches it
        with np.errstate(over="ignore"):
            run = golden.astype(dtype)
        run[3, 7] = 1  # finite there
        run[1, 5] = np.nan
        tolerance = rule(1e-2, 1e-2, 5)
        block = measured(golden, run, tolerance)
        assert_as_by_metrics(block, golden, run, tolerance)
        assert (block.max_ulp[[1, 3]] == FAR).all()
        assert (block.max_ulp[[0, 2, 4]] == 0).all()

    @pytest.mark.parametrize("size", [1e3, 1e150, 1e307])
    def test_logits_as_large_as_float64_has_them(self, size):
        rng = np.random.default_rng(1)
        golden = rng.normal(0, 1, (4, 50)) * size
        run = golden * (1 + 1e-3 * rng.normal(0, 1, golden.shape))
        run[2] = -golden[2]
        assert_as_by_metrics(measured(golden, run), golden, run, rule())

    def test_differences_beyond_float64_are_infinite_and_never_pass(self):
        golden, run = np.full((1, 20), 1.7e308), np.full((1, 20), -1.7e308)
        block = measured(golden, run, rule(1e308, 1e308))
        assert (block.max_abs[0], block.out[0]) == (np.inf, 20)

    @pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("vocab", [1, 3, 100])
    def test_a_value_that_is_not_finite_never_passes(self, bad, vocab):
        golden, run = rows(0, 3, vocab)
        run[1, vocab - 1] = bad
        block = measured(golden, run, rule(1e30, 1e30))
        assert block.out[1] >= 1
        assert block.nonfinite.tolist() == [False, True, False]
        assert block.max_ulp[1] == FAR
        assert not block.max_abs[1] <= 1e30
        assert not block.kl[1] <= 1e30 or bad == -np.inf
        assert block.locate("nonfinite", 1).token == vocab - 1

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
    def test_a_golden_that_is_not_finite_ends_the_block_before_its_row(self, bad, dtype):
        golden, run = rows(0, 6, 40, dtype)
        golden[3, 9] = golden[3, 20] = golden[5, 0] = bad
        run[3] = golden[3]
        block = measured(golden, run)
        place = block.golden_nonfinite
        assert (len(block), place.row, place.token) == (3, 3, 9)
        assert repr(place.golden) == repr(float(bad))
        assert find_golden_nonfinite(10, golden).row == 13
        assert find_golden_nonfinite(10, golden[:3]) is None

    @pytest.mark.parametrize("n", [0, 3])
    def test_no_rows_and_no_vocabulary(self, n):
        for golden in (np.empty((0, 7), np.float32), np.empty((n, 0), np.float32)):
            if golden.shape[1]:
                assert len(measured(golden, golden.copy())) == 0
            assert find_golden_nonfinite(0, golden) is None


class TestAgainstOthers:
    @given(seed=st.integers(0, 10**6), vocab=st.sampled_from([1, 2, 33, 500]), noise=st.sampled_from([1e-6, 1e-2, 3.0]))
    @settings(deadline=None, max_examples=30)
    def test_kl_is_scipys(self, seed, vocab, noise):
        golden, run = rows(seed, 3, vocab, np.float64, noise)
        p, q = np.exp(log_softmax(golden, axis=1)), np.exp(log_softmax(run, axis=1))
        ours = measured(golden, run).kl
        np.testing.assert_allclose(ours, rel_entr(p, q).sum(axis=1), rtol=1e-9, atol=1e-14)
        np.testing.assert_allclose(ours, entropy(p, q, axis=1), rtol=1e-9, atol=1e-14)
        assert (ours >= 0).all()

    def test_a_small_kl_is_right_to_many_digits(self):
        """By arithmetic of 60 digits; a KL of 1e-13 is the difference of sums near 1e-7."""
        decimal = pytest.importorskip("decimal")
        golden, run = rows(3, 2, 200, np.float64, 1e-6, scale=1.0)
        run[0] += 1e-7
        with decimal.localcontext() as context:
            context.prec = 60
            y, x = ([decimal.Decimal(float(v)) for v in side[0]] for side in (golden, run))
            py, px = [v.exp() for v in y], [v.exp() for v in x]
            sy, sx = sum(py), sum(px)
            exact = sum(p / sy * ((b - sy.ln()) - (a - sx.ln())) for p, b, a in zip(py, y, x, strict=True))
        assert measured(golden, run).kl[0] == pytest.approx(float(exact), abs=1e-15)

    @given(seed=st.integers(0, 10**6), vocab=st.integers(1, 60), atol=st.floats(0, 0.1), rtol=st.floats(0, 0.1))
    @settings(deadline=None, max_examples=60)
    def test_a_row_is_within_where_assert_allclose_is_content(self, seed, vocab, atol, rtol):
        golden, run = rows(seed, 2, vocab, np.float64, 0.1)
        out = measured(golden, run, rule(atol, rtol)).out
        for i in range(2):
            try:
                np.testing.assert_allclose(run[i], golden[i], rtol=rtol, atol=atol)
                content = True
            except AssertionError:
                content = False
            assert (out[i] == 0) == content


def result_fields(result):
    """All that a result says, and its curves, as something that compares NaN with itself."""
    curves = result.curves
    arrays = {name: np.asarray(getattr(curves, name)).tobytes() for name in vars(curves)}
    return repr(asdict(replace(result, curves=None, kl=None))), arrays


class TestNothingDependsOnTheCut:
    @pytest.fixture
    def pair(self):
        golden, run = rows(5, 60, 130)
        run[17, 3], run[40, 9] = np.nan, -np.inf
        run[20] = golden[20] + np.float32(1.5)
        return golden, run

    @pytest.mark.parametrize("threads", [1, 2, 5])
    @pytest.mark.parametrize("block_values", [1, 130, 1000, 1 << 19])
    @pytest.mark.parametrize("golden_type", [np.float32, np.float64])
    def test_blocks_and_threads(self, monkeypatch, pair, threads, block_values, golden_type):
        golden = logits_of(pair[0].astype(golden_type))
        for run in (logits_of(pair[1]), logits_of(np.nan_to_num(pair[1], neginf=0))):  # sums with a NaN say little
            monkeypatch.setattr(logits_module, "BLOCK_VALUES", 1 << 19)
            whole = result_fields(compare_logits(golden, run, 60, 60, rule(1e-4, 0, 5)))
            monkeypatch.setattr(logits_module, "BLOCK_VALUES", block_values)
            assert result_fields(compare_logits(golden, run, 60, 60, rule(1e-4, 0, 5), threads)) == whole

    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("at", [(0, 0), (33, 129), (59, 5)])
    def test_a_golden_that_is_not_finite(self, monkeypatch, pair, threads, at):
        golden, run = pair
        golden[at] = np.inf
        one, two = logits_of(golden), logits_of(run)
        whole = result_fields(compare_logits(one, two, 40, 60, rule(1e-4)))
        monkeypatch.setattr(logits_module, "BLOCK_VALUES", 260)
        assert result_fields(compare_logits(one, two, 40, 60, rule(1e-4), threads)) == whole

    def test_rows_beside_a_row_do_not_matter(self):
        golden, run = rows(9, 64, 333)
        together = measured(golden, run)
        for i in range(64):
            alone = measured(golden[i : i + 1], run[i : i + 1])
            for name in ("max_abs", "kl", "sums", "blocks", "shift", "golden_margin", "run_margin"):
                assert getattr(alone, name)[0].tobytes() == getattr(together, name)[i].tobytes(), name

    @pytest.mark.parametrize("form", ["top:7", "digest"])
    def test_blocks_of_partial_rows(self, monkeypatch, pair, form):
        golden, run = logits_of(pair[0], form), logits_of(pair[1])
        whole = result_fields(compare_logits(golden, run, 60, 60, rule(1e-4)))
        monkeypatch.setattr(logits_module, "BLOCK_VALUES", 300)
        assert result_fields(compare_logits(golden, run, 60, 60, rule(1e-4))) == whole

    def test_a_fault_on_a_thread_comes_out(self, pair, monkeypatch):
        monkeypatch.setattr(logits_module, "BLOCK_VALUES", 130)

        def fail(lo, hi):
            if lo >= 30:
                raise OSError("gone")
            return pair[1][lo:hi]

        with pytest.raises(OSError, match="gone"):
            compare_logits(logits_of(pair[0]), replace(logits_of(pair[1]), rows=fail), 60, 60, rule(), 3)


class TestShift:
    def shifted(self, by, dtype=np.float32, n=4):
        golden = np.random.default_rng(0).normal(0, 3, (n, 500)).astype(dtype)
        return golden, (golden.astype(np.float64) + by).astype(dtype)

    @pytest.mark.parametrize("by", [1e-3, 0.5, -20.0])
    def test_a_constant_is_recognised_and_not_forgiven(self, by):
        golden, run = self.shifted(by)
        result = compare_logits(logits_of(golden), logits_of(run), 4, 4, rule(abs(by) / 2))
        assert (result.rows_shifted, result.rows_out) == (4, 4)
        assert result.shift == pytest.approx(by, rel=1e-2)
        assert result.max_kl < 1e-12 * max(1, abs(by) * 1e6)

    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
    def test_even_where_the_type_is_coarse(self, dtype):
        golden, run = self.shifted(8.0, dtype)
        assert compare_logits(logits_of(golden), logits_of(run), 4, 4, rule()).rows_shifted == 4

    def test_the_largest_of_several_constants_is_named(self):
        golden, run = self.shifted(np.array([[0.5], [-3.0], [0.0], [2.0]]))
        result = compare_logits(logits_of(golden), logits_of(run), 4, 4, rule())
        assert (result.rows_shifted, result.rows_identical) == (3, 1)
        assert result.shift == pytest.approx(-3, rel=1e-6)

    @pytest.mark.parametrize("spoil", ["noise", "one value", "scale", "late"])
    def test_nothing_else_is_called_one(self, spoil):
        golden, run = self.shifted(0.0)
        match spoil:
            case "noise":
                run += np.random.default_rng(1).normal(0, 1e-3, run.shape).astype(np.float32)
            case "one value":
                run[:, 3] += 1
            case "scale":
                run *= np.float32(1.01)
            case "late":  # a constant for all that a first look sees
                run += np.float32(1)
                run[:, 400] -= np.float32(1)
        assert compare_logits(logits_of(golden), logits_of(run), 4, 4, rule()).rows_shifted == 0

    def test_few_values_are_no_evidence(self):
        golden = np.zeros((1, 7), np.float32)
        assert compare_logits(logits_of(golden), logits_of(golden + 1), 1, 1, rule()).rows_shifted == 0


class TestSummaries:
    def test_nmse_and_cosine_are_those_of_the_rows_that_differ(self):
        golden, run = rows(4, 20, 97)
        result = compare_logits(logits_of(golden), logits_of(run), 20, 20, rule())
        other = ~equal_rows(run, golden)
        y, x = golden[other].astype(float).ravel(), run[other].astype(float).ravel()
        assert result.nmse == pytest.approx(((x - y) ** 2).sum() / (y**2).sum(), rel=1e-12)
        assert result.cosine == pytest.approx(x @ y / math.sqrt((x @ x) * (y @ y)), rel=1e-12)

    @pytest.mark.parametrize(
        ("golden", "run", "nmse", "cosine"),
        [(0.0, 0.0, 0.0, 1.0), (0.0, 2.0, math.inf, None), (2.0, 0.0, 1.0, None), (2.0, -2.0, 4.0, -1.0)],
    )
    def test_at_their_ends(self, golden, run, nmse, cosine):
        one, two = (logits_of(np.full((2, 9), v, np.float32)) for v in (golden, run))
        result = compare_logits(one, two, 2, 2, rule())
        assert (result.nmse, result.cosine) == (nmse, pytest.approx(cosine) if cosine else cosine)

    @given(seed=st.integers(0, 10**6), vocab=st.sampled_from([1, 4, 9, 12, 340, 700]))
    @settings(deadline=None, max_examples=30)
    def test_agreement_by_id_is_that_of_plain_sets(self, seed, vocab):
        rng = np.random.default_rng(seed)
        golden, run = rng.integers(-4, 5, (2, 6, vocab)).astype(np.float32)
        run[:2] = golden[:2]
        result = compare_logits(logits_of(golden), logits_of(run), 6, 6, rule())
        for top, k in zip(result.top, TOP_KS, strict=True):
            wide = min(k, vocab)
            sets = [[{*sorted(range(vocab), key=lambda i: (-r[i], i))[:k]} for r in side] for side in (golden, run)]
            shared = [len(a & b) for a, b in zip(*sets, strict=True)]
            assert asdict(top) == {
                "k": k,
                "rows": 6,
                "equal": sum(n == wide for n in shared),
                "ids": 6 * wide,
                "shared": sum(shared),
            }

    def test_top_ids_of_partial_rows_count_as_far_as_they_are_held(self):
        golden, run = rows(8, 12, 60)
        result = compare_logits(logits_of(golden, "top:7"), logits_of(run), 12, 12, rule(1.0))
        same = int(equal_rows(run, golden).sum())
        assert [t.rows for t in result.top] == [12, 12, same]
        assert 0 < same < 12
        full = compare_logits(logits_of(golden), logits_of(run), 12, 12, rule(1.0))
        assert result.top[:2] == full.top[:2]
        assert result.min_golden_margin == full.min_golden_margin
        assert result.mean_kl is None
        assert result.nmse is None

    def test_smallest_margins_and_their_rows(self):
        golden, run = rows(2, 9, 50)
        golden[4, :2] = 50, np.nextafter(np.float32(50), np.float32(60))
        run[6, 5] = run[6, 30] = 70
        result = compare_logits(logits_of(golden), logits_of(run), 9, 9, rule())
        assert (result.min_golden_margin, result.min_golden_margin_row) == (2.0**-18, 4)
        assert (result.min_run_margin, result.min_run_margin_row) == (0.0, 6)
        assert result.curves.golden_margin[4] == 2.0**-18
        assert result.curves.top1_equal[6] == 0

    def test_totals_are_those_of_all_rows(self):
        golden = golden_side(sequences=3, steps=7, score=True)
        run = run_side(golden)
        perturb(run, 0.3)
        totals = judge(golden.evidence(), run.evidence(), JudgeOptions(atol=1)).totals
        pairs = [(g.logits["exact"], r.logits["engine"]) for g, r in zip(golden.seqs, run.seqs, strict=True)]
        pairs += [
            (g.prompt_logits["exact"], r.prompt_logits["engine"]) for g, r in zip(golden.seqs, run.seqs, strict=True)
        ]
        a, b = (np.concatenate(side) for side in zip(*pairs, strict=True))
        whole = compare_logits(logits_of(a), logits_of(b), len(a), len(a), rule(1.0))
        assert whole.top[0].rows == len(a) > whole.top[1].equal
        for name in ("top", "p99_kl", "min_golden_margin", "min_run_margin", "rows_shifted"):
            assert getattr(totals, name) == getattr(whole, name)
        assert totals.mean_kl == pytest.approx(whole.mean_kl, rel=1e-14)

    def test_sets_with_equal_digests_have_their_margins_and_no_figure_is_taken(self, monkeypatch):
        golden = rows(2, 9, 50)[0]
        whole = compare_logits(logits_of(golden), logits_of(golden.copy()), 9, 9, rule())
        monkeypatch.setattr(Measure, "full", None)
        same = compare_logits(logits_of(golden, digest=True), logits_of(golden.copy(), digest=True), 9, 9, rule())
        assert result_fields(same) == result_fields(whole)


class TestNoSummaryIsABound:
    """A summary forgives, and a summary may look alarming where every value is within: neither moves a verdict."""

    def report(self, golden, run, **options):
        return judge(golden.evidence(), run.evidence(), JudgeOptions(**options))

    def test_one_wrong_value_in_the_best_of_summaries(self):
        golden = golden_side(sequences=1, vocab=20_000)
        run = run_side(golden)
        row = run.one.logits["engine"][3]
        row[int(row.argmin())] += np.float32(1)
        logits = self.report(golden, run, atol=1e-3).sequences[0].logits
        assert logits.nmse < 1e-5
        assert logits.cosine > 0.99999
        assert logits.p99_kl < 1e-6
        assert [t.equal for t in logits.top] == [6, 6, 6]
        report = self.report(golden, run, atol=1e-3)
        assert (report.verdict, report.totals.first_logit_failure) == (Verdict.DIVERGED, (0, 3))

    def test_the_worst_of_summaries_within_every_bound(self):
        golden = golden_side(sequences=1)
        run = run_side(golden)
        for side, name in ((golden, "exact"), (run, "engine")):
            side.one.logits[name] *= np.float32(1e-3)
        run.one.logits["engine"] *= np.float32(-1)
        report = self.report(golden, run, atol=1, allow_loose=True)
        logits = report.sequences[0].logits
        assert logits.nmse == pytest.approx(4)
        assert logits.cosine == pytest.approx(-1)
        assert logits.top[0].equal == 0
        assert report.verdict is Verdict.PASS

    def test_a_constant_shift_is_a_note_beside_the_verdict(self):
        golden = golden_side(sequences=1)
        run = run_side(golden)
        run.one.logits["engine"] += np.float32(0.25)
        for options, verdict in (
            ({}, Verdict.DIVERGED),
            ({"atol": 0.5}, Verdict.PASS),
            ({"max_kl": 1e-6}, Verdict.PASS),
        ):
            report = self.report(golden, run, **options)
            notes = [f for f in report.findings if f.code == "logits.shift"]
            assert report.verdict is verdict
            assert [(f.hint, f.verdict, f.level) for f in notes] == [("shift", None, Level.NOTE)]
            assert "6 of 6 rows of logits are the golden's moved by one constant, up to 0.25" in notes[0].message
        assert not [f for f in self.report(golden, run_side(golden)).findings if f.code == "logits.shift"]


class TestScan:
    class Scan:
        """A scan of an array that notes what it is fed."""

        def __init__(self, values, sha256="a", fails=False):
            self.values, self.sha256, self.fails = values, sha256, fails
            self.fed, self.ended = [], False

        def rows(self, lo, hi, memory=None):
            kept = memory[: self.values[lo:hi].nbytes].view(self.values.dtype).reshape(hi - lo, -1)
            kept[...] = self.values[lo:hi]
            return kept

        def feed(self, rows):
            self.fed.append(rows.copy())

        def finish(self):
            self.ended = True
            if self.fails:
                raise OSError("damaged")

    def sides(self, golden, run, **kwargs):
        scans = [self.Scan(golden), self.Scan(run, "b", **kwargs)]
        return scans, [replace(logits_of(s.values), rows=lambda lo, hi: 1 / 0, scan=lambda s=s: s) for s in scans]

    @pytest.mark.parametrize("threads", [1, 2, 4])
    @pytest.mark.parametrize("n_rows", [0, 1, 35, 60])
    @pytest.mark.parametrize("stop", [None, 3, 50])
    def test_every_row_is_fed_in_order_whatever_is_compared(self, monkeypatch, threads, n_rows, stop):
        monkeypatch.setattr(logits_module, "BLOCK_VALUES", 260)
        golden, run = rows(1, 60, 130)
        run = np.concatenate([run, run[:11]])  # a run that is longer
        if stop is not None:
            golden[stop, 4] = np.nan
        scans, both = self.sides(golden, run)
        result = compare_logits(*both, n_rows, 58, rule(), threads)
        for scan in scans:
            assert np.concatenate(scan.fed).tobytes() == scan.values.tobytes()
            assert scan.ended
        plain = compare_logits(logits_of(golden), logits_of(run), n_rows, 58, rule())
        assert result_fields(result) == result_fields(plain)

    @pytest.mark.parametrize("threads", [1, 3])
    def test_no_result_leaves_before_the_rows_were_found_right(self, threads):
        _, both = self.sides(*rows(1, 60, 130), fails=True)
        with pytest.raises(OSError, match="damaged"):
            compare_logits(*both, 60, 60, rule(), threads)

"""Reports of shards, added up, say what one judgement of all says."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_cases import Side, golden_side, make_tie, perturb, run_side
from trace_cases import noise as noisy
from trace_cases import traced_pair

from kdtr_cli.parity import combine as module
from kdtr_cli.parity.combine import Combined
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Finding, Level, Verdict
from kdtr_cli.report.text import report_text

pytestmark = pytest.mark.quick


def part(side: Side, names: set[str]) -> Side:
    """The sequences of a side that are named, in a shard of their own."""
    return replace(side, seqs=[s for s in side.seqs if s.id in names])


def by_shards(golden: Side, run: Side, size: int, options: JudgeOptions):
    """Cut by the golden's order; a run's own further sequences come with the last shard."""
    combined = Combined()
    ids = [s.id for s in golden.seqs]
    extra = {s.id for s in run.seqs} - set(ids)
    for first in range(0, len(ids), size):
        names = set(ids[first : first + size])
        last = first + size >= len(ids)
        both = part(golden, names), part(run, names | (extra if last else set()))
        combined.add(judge(both[0].evidence(), both[1].evidence(), options), first)
    return combined.report(golden.evidence().name, run.evidence().name)


def assert_same(golden: Side, run: Side, size: int, **asked):
    options = JudgeOptions(**asked)
    whole = judge(golden.evidence(), run.evidence(), options)
    added = by_shards(golden, run, size, options)
    assert repr(added.totals) == repr(whole.totals)  # repr: NaN equals itself there
    assert repr([(s.index, s.id, s.verdict, s.logits) for s in added.sequences]) == repr(
        [(s.index, s.id, s.verdict, s.logits) for s in whole.sequences]
    )
    assert (added.verdict, added.exit_code) == (whole.verdict, whole.exit_code)
    assert sorted(map(repr, added.findings)) == sorted(map(repr, whole.findings))
    assert (added.mode, added.reference, added.rounds, added.unverified) == (
        whole.mode,
        whole.reference,
        whole.rounds,
        whole.unverified,
    )
    assert (added.reason is None) == (whole.reason is None)
    assert repr(added.tolerance) == repr(whole.tolerance)
    for one, other in ((added.golden, whole.golden), (added.run, whole.run)):
        known = tuple(pair for pair in other.provenance if not pair[0].endswith("manifest_sha256"))  # of one file
        assert repr(one) == repr(replace(other, provenance=known))
    return added


def other_token(golden, run):
    run.seqs[3].tokens[2] ^= 1


def two_tokens(golden, run):
    run.seqs[4].tokens[5] ^= 1
    run.seqs[1].tokens[3] ^= 1


def nan_in_run(golden, run):
    run.seqs[2].logits["engine"][1, 7] = np.nan


def nan_in_golden(golden, run):
    golden.seqs[2].logits["exact"][1, 7] = np.nan


def missing(golden, run):
    del run.seqs[2]


def first_shard_missing(golden, run):
    del run.seqs[:2]


def extra(golden, run):
    run.seqs.append(replace(run.seqs[0], id="more"))


def other_prompt(golden, run):
    run.seqs[3].prompt[0] ^= 1


def other_seed(golden, run):
    run.manifest["decoding"]["seed"] = 5


def unverified(golden, run):
    run.manifest["model"]["weights_used_sha256"] = None


def topk(golden, run):
    for s in golden.seqs:
        s.form = "top:3"


def no_logits_in_one(golden, run):
    run.seqs[1].logits = {}


def tie(golden, run):
    make_tie(golden, run, 5, seq=3)


def noise(golden, run):
    perturb(run, 1e-3)


CASES = [other_token, two_tokens, nan_in_run, nan_in_golden, missing, first_shard_missing, extra, other_prompt]
CASES += [other_seed, unverified, topk, no_logits_in_one, tie, noise]


@pytest.mark.parametrize("spoil", [lambda golden, run: None, *CASES])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("asked", [{}, {"atol": 2e-3}, {"steps": 3, "allow_partial": True}], ids=str)
def test_the_sum_is_the_whole(spoil, size, asked):
    golden = golden_side(sequences=5, score=True)
    run = run_side(golden)
    spoil(golden, run)
    assert_same(golden, run, size, **asked)


@given(
    sequences=st.integers(1, 6),
    size=st.integers(1, 7),
    spoils=st.lists(st.sampled_from([other_token, two_tokens, nan_in_run, missing, extra, tie, noise]), max_size=3),
    seed=st.integers(0, 1000),
    atol=st.sampled_from([None, 1e-4, 1e-2]),
)
@settings(deadline=None, max_examples=60)
def test_the_sum_is_the_whole_for_any_cut_and_mixture(sequences, size, spoils, seed, atol):
    golden = golden_side(sequences=max(sequences, 5 if spoils else 1), seed=seed)
    run = run_side(golden)
    for spoil in dict.fromkeys(spoils):
        if spoil is not missing or len(run.seqs) > 3:
            try:
                spoil(golden, run)
            except IndexError:
                continue
    assert_same(golden, run, size, atol=atol)


class TestInvalid:
    def test_shards_that_are_judged_by_other_rules_are_no_whole(self):
        golden = golden_side(sequences=2)
        run = run_side(golden)
        for side, s in ((golden, golden.seqs[1]), (run, run.seqs[1])):
            if side is golden:
                del s.logits["exact"]
        report = by_shards(golden, run, 1, JudgeOptions(atol=1.0, allow_loose=True))
        assert report.verdict is Verdict.INVALID
        assert "other reference logits: exact, float64" in report.reason
        assert judge(golden.evidence(), run.evidence(), JudgeOptions(atol=1.0)).verdict is Verdict.INVALID

    def test_one_shard_that_cannot_be_judged_spoils_the_whole_and_no_number_is_left(self):
        golden = golden_side(sequences=4)
        run = run_side(golden)
        other_prompt(golden, run)
        report = by_shards(golden, run, 1, JudgeOptions())
        assert report.verdict is Verdict.INVALID
        assert (report.totals.tokens_equal, report.totals.tokens, report.totals.max_abs) == (0, 24, None)
        assert not report.sequences

    def test_nothing_added_is_no_report(self):
        with pytest.raises(ValueError, match="no shard"):
            Combined().report("a", "b")

    def test_a_refused_whole_keeps_the_reason(self):
        golden = golden_side(sequences=1)
        combined = Combined()
        combined.add(judge(golden.evidence(), run_side(golden).evidence()), 0)
        combined.refuse(Finding(Level.ERROR, "sweep", "half of it is gone", Verdict.INVALID))
        report = combined.report("a", "b")
        assert (report.verdict, report.exit_code, report.reason) == (Verdict.INVALID, 2, "half of it is gone")
        assert (report.golden.name, report.run.name) == ("a", "b")


class TestBounds:
    def test_sequences_that_agree_are_left_out_first_and_counted(self, monkeypatch):
        monkeypatch.setattr(module, "MAX_SEQUENCES", 3)
        golden = golden_side(sequences=9)
        run = run_side(golden)
        run.seqs[5].tokens[0] ^= 1
        run.seqs[8].tokens[0] ^= 1
        report = by_shards(golden, run, 2, JudgeOptions())
        assert [s.index for s in report.sequences] == [0, 5, 8]
        assert report.totals.verdicts == {"IDENTICAL": 7, "DIVERGED": 2}
        assert "sequences are not shown" not in report_text(report)
        monkeypatch.setattr("kdtr_cli.report.text.MAX_SEQUENCES", 2)
        assert "7 more sequences are not shown; all together: 7 IDENTICAL, 2 DIVERGED" in report_text(report)
        assert report.totals.sequences == 9

    def test_findings_are_bounded_and_the_rest_is_counted(self, monkeypatch):
        monkeypatch.setattr(module, "MAX_FINDINGS", 4)
        golden = golden_side(sequences=15)
        run = run_side(golden)
        for s in run.seqs:
            s.tokens[0] ^= 1
        whole = judge(golden.evidence(), run.evidence())
        report = by_shards(golden, run, 1, JudgeOptions())
        assert report.verdict is Verdict.DIVERGED
        assert len(report.findings) == 5
        assert f"{len(whole.findings) - 4} more findings are left out" in report.findings[-1].message

    def test_what_every_shard_finds_is_told_once(self):
        golden = golden_side(sequences=6)
        run = run_side(golden)
        other_seed(golden, run)
        report = by_shards(golden, run, 1, JudgeOptions())
        assert [f.code for f in report.findings] == ["provenance.decoding.seed"]

    def test_a_skipped_shard_counts_as_there(self):
        golden = golden_side(sequences=2)
        combined = Combined()
        combined.skip(7)
        combined.add(judge(golden.evidence(), run_side(golden).evidence()), 7)
        totals = combined.report("a", "b").totals
        assert (totals.sequences, totals.sequences_available, totals.exact) == (2, 9, True)


def test_of_traces_the_first_tensors_that_are_out_are_kept():
    golden, run = traced_pair()
    combined = Combined()
    combined.add(judge(golden.evidence(), run.evidence(), JudgeOptions()), 0)
    names = [n for n, a in run.one.trace.items() if a.dtype.kind == "f"][3:]
    for name in names:
        run.one.trace[name] = noisy(run.one.trace[name])
    whole = judge(golden.evidence(), run.evidence(), JudgeOptions())
    combined.add(whole, 1)
    equal, parted = (s.trace for s in combined.report("g", "r").sequences)
    assert (equal.tensors, equal.all_bits, equal.identical) == ((), True, len(golden.one.trace))
    assert [t.name for t in parted.tensors] == names[: module.MAX_TENSORS]
    assert (parted.first, parted.hint, parted.all_bits) == (whole.sequences[0].trace.first, "first-tensor", False)
    assert parted.identical == whole.sequences[0].trace.identical == len(golden.one.trace) - len(names)

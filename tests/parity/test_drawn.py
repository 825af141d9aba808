"""What reports draw is kept of the worst sequences only."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
from parity_cases import golden_side, run_side
from rounds_cases import round_pair

from kdtr_cli.parity.combine import Combined
from kdtr_cli.parity.curves import RowCurves
from kdtr_cli.parity.drawn import MAX_DRAWN, drawn_sequences, lightened
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict

pytestmark = pytest.mark.quick


def results(count, wrong, **options):
    golden, run = round_pair(sequences=count, steps=4, vocab=16)
    for i in wrong:
        run.seqs[i].tokens[2] ^= 1
    return judge(golden.evidence(), run.evidence(), JudgeOptions(**options))


def test_rounds_are_kept_where_they_are_asked_for():
    assert results(2, []).sequences[0].rounds.golden_arrays is None
    kept = results(2, [], keep_rounds=True).sequences[0].rounds
    for side in (kept.golden_arrays, kept.run_arrays):
        assert set(side) == {
            "start",
            "root",
            "bonus",
            "n_nodes",
            "n_accepted",
            "tokens",
            "parents",
            "scores",
            "accepted",
        }


def test_the_worst_come_first_and_the_rest_is_let_go():
    wrong = [1, 40, 77]
    report = results(80, wrong, keep_rounds=True)
    drawn = drawn_sequences(report.sequences)
    assert [s.index for s in drawn[:3]] == wrong
    assert all(s.verdict is Verdict.DIVERGED for s in drawn[:3])
    assert len(drawn) == MAX_DRAWN
    heavy = [s.index for s in report.sequences if s.rounds.golden_arrays is not None]
    assert heavy == sorted(s.index for s in drawn)
    assert [s.index for s in report.sequences] == list(range(80))


def test_curves_of_the_rest_are_let_go_as_they_come():
    base = results(1, []).sequences[0]
    alive, most = weakref.WeakSet(), 0

    def made():
        nonlocal most
        for i in range(500):
            curves = RowCurves(*[np.empty(0)] * 5, np.empty(0, np.int8), np.empty((0, 0), np.float32), 0)
            alive.add(curves)
            most = max(most, len(alive))
            yield replace(base, index=i, logits=replace(base.logits, curves=curves))

    kept = lightened(made())
    assert [s.index for s in kept if s.logits.curves is not None] == list(range(MAX_DRAWN))
    assert len(kept) == 500
    assert most <= 2 * MAX_DRAWN + 2


def test_a_sweep_keeps_no_more_than_a_bundle():
    combined = Combined()
    for i in range(6):
        golden, run = round_pair(sequences=10, steps=4, vocab=16)
        if i == 4:
            run.seqs[3].tokens[2] ^= 1
        combined.add(judge(golden.evidence(), run.evidence(), JudgeOptions(keep_rounds=True)), 10 * i)
    report = combined.report("g", "r")
    heavy = [s.index for s in report.sequences if s.rounds.golden_arrays is not None]
    assert heavy == [*range(MAX_DRAWN - 1), 43]


def test_nothing_of_it_changes_a_verdict():
    golden = golden_side(sequences=3)
    run = run_side(golden)
    one, other = (judge(golden.evidence(), run.evidence(), JudgeOptions(keep_rounds=k)) for k in (False, True))
    assert (one.verdict, one.totals) == (other.verdict, other.totals)


def test_a_sweep_has_no_digest_of_one_file():
    combined = Combined()
    golden = golden_side()
    combined.add(judge(golden.evidence(), run_side(golden).evidence()), 0)
    report = combined.report("g", "r")
    for side in (report.golden, report.run):
        assert "choices.rope_angles" in dict(side.provenance)
        assert not [path for path, _ in side.provenance if path.endswith("manifest_sha256")]

"""Rounds are judged to the bit: every difference is found and named, and nothing unsound passes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_cases import golden_side, judged, make_tie, perturb, run_side
from rounds_cases import DRAFTER, node_at, round_pair, rounds_of

from kdtr_cli.parity.evidence import RoundProblem
from kdtr_cli.parity.rounds import compare_rounds, fault, judged_rounds
from kdtr_cli.parity.verdicts import Level, Verdict
from kdtr_cli.report.line import verdict_line

pytestmark = pytest.mark.quick

LENIENT = {"atol": 1.0, "allow_loose": True}


def rounds_findings(report):
    return [f for f in report.findings if f.code.startswith("rounds.")]


def first(golden, run, **options):
    """The one finding about rounds, and the difference behind it."""
    report = judged(golden, run, **options)
    (finding,) = rounds_findings(report)
    (result,) = [s for s in report.sequences if s.rounds.first_difference is not None]
    return report, finding, result.rounds.first_difference


class TestEqual:
    @pytest.mark.parametrize("mode", ["ddtree", "chain"])
    @pytest.mark.parametrize("vocab", [2, 5, 40])
    @pytest.mark.parametrize(("budget", "block_size"), [(1, 2), (6, 5), (64, 8)])
    def test_equal_rounds_are_identical(self, mode, vocab, budget, block_size):
        golden, run = round_pair(mode, budget, block_size, vocab=vocab)
        report = judged(golden, run)
        count = sum(len(s.rounds["rounds/start"]) for s in golden.seqs)
        assert count > 2
        assert (report.verdict, report.rounds, report.findings) == (Verdict.IDENTICAL, "compared", ())
        assert (report.totals.rounds_equal, report.totals.rounds_judged) == (count, count)
        assert verdict_line(report) == (
            f"PASS {mode} tokens=24/24 exact max_abs_logit_diff=0.000e+00 rounds={count}/{count} verdict=IDENTICAL"
        )
        for s, result in zip(golden.seqs, report.sequences, strict=True):
            accepted = s.rounds["rounds/n_accepted"]
            assert result.rounds.golden_tau == result.rounds.run_tau == pytest.approx(accepted.mean())
            assert result.rounds.golden_rounds == result.rounds.run_rounds == len(accepted)
            assert result.rounds.all_bits

    def test_one_token_has_no_round(self):
        golden, run = round_pair(steps=1)
        report = judged(golden, run)
        assert report.verdict is Verdict.IDENTICAL
        assert " rounds=0/0 " in verdict_line(report)
        assert report.sequences[0].rounds.golden_tau is None

    def test_what_lies_past_the_counts_is_nothing(self):
        golden, run = round_pair()
        a = rounds_of(run)
        past = np.arange(a["draft_top_ids"].shape[2]) >= a["draft_counts"][..., None]
        assert past.any()
        a["draft_top_ids"][past] = 7
        a["draft_top_logps"][past] = np.nan
        assert judged(golden, run).verdict is Verdict.IDENTICAL


def bump_start(a, at):
    a["start"][at] += 1
    return "start", f"the run's starts at {a['start'][at]}, golden {a['start'][at] - 1}"


def bump_root(a, at):
    a["root"][at] ^= 1
    return "root", f"the root is {a['root'][at]}, golden {a['root'][at] ^ 1}"


def bump_counts(a, at):
    old = int(a["draft_counts"][at, 2])
    a["draft_counts"][at, 2] = old - 1
    return "marginals", f"depth 3 has {old - 1} candidates, golden {old}"


def bump_ids(a, at):
    old = int(a["draft_top_ids"][at, 1, 0])
    a["draft_top_ids"][at, 1, 0] = old ^ 1
    return "marginals", f"depth 2, rank 0 is token {old ^ 1}, golden {old}"


def bump_logps(a, at):
    old = a["draft_top_logps"][at, 3, 0]
    a["draft_top_logps"][at, 3, 0] = np.nextafter(old, np.float32(1))
    return "marginals", f"depth 4, rank 0 has log-probability {a['draft_top_logps'][at, 3, 0]!s}, golden {old!s}"


def bump_tokens(a, at):
    i = node_at(a, at, 5)
    a["tokens"][i] ^= 1
    return "tree", f"node 5 has token {a['tokens'][i]}, golden {a['tokens'][i] ^ 1}"


def bump_parents(a, at):
    i = node_at(a, at, 4)
    a["parents"][i] ^= 1
    return "tree", f"node 4 has parent {a['parents'][i]}, golden {a['parents'][i] ^ 1}"


def bump_depths(a, at):
    i = node_at(a, at, 6)
    a["depths"][i] += 1
    return "tree", f"node 6 has depth {a['depths'][i]}, golden {a['depths'][i] - 1}"


def bump_scores(a, at):
    i = node_at(a, at, 3)
    old = a["scores"][i]
    a["scores"][i] = np.nextafter(old, 1)
    return "scores", f"node 3 has score {a['scores'][i]}, golden {old}"


def bump_posterior(a, at):
    i = int(a["n_nodes"][:at].sum()) + at + 6  # row 6
    a["posterior"][i] ^= 1
    return "posterior", f"after node 6 the target chose {a['posterior'][i]}, golden {a['posterior'][i] ^ 1}"


def bump_accepted(a, at):
    i = int(a["n_accepted"][:at].sum()) + 1
    a["accepted"][i] += 1
    return "accepted", f"row 1 of the accepted path is node {a['accepted'][i]}, golden {a['accepted'][i] - 1}"


def bump_bonus(a, at):
    a["bonus"][at] ^= 1
    return "bonus", f"the bonus is {a['bonus'][at]}, golden {a['bonus'][at] ^ 1}"


def bump_cache(a, at):
    old = a["cache_digest"][at].tobytes().hex()
    a["cache_digest"][at, 31] ^= 1
    a["cache_digest"][at, 0] ^= 0x80
    new = a["cache_digest"][at].tobytes().hex()
    return "cache", f"the digest of the cache rows that it committed is {new[:12]}..., golden {old[:12]}..."


BUMPS = [
    bump_start, bump_root, bump_counts, bump_ids, bump_logps, bump_tokens, bump_parents, bump_depths, bump_scores,
    bump_posterior, bump_accepted, bump_bonus, bump_cache,
]  # fmt: skip
PARTS = ["start", "root", "marginals", "tree", "scores", "posterior", "accepted", "bonus", "cache"]


def full_rounds(golden, seq=0):
    """Rounds with a whole tree, all counts above 1 and a node accepted: every element can be changed."""
    a = rounds_of(golden, seq)
    good = (a["n_nodes"] == 6) & (a["n_accepted"] > 1) & (a["draft_counts"] > 1).all(axis=1)
    return np.flatnonzero(good).tolist()


class TestEveryElement:
    @pytest.mark.parametrize("bump", BUMPS, ids=lambda bump: bump.__name__[5:])
    @pytest.mark.parametrize("seq", [0, 1])
    def test_is_found_and_named(self, bump, seq):
        golden, run = round_pair(steps=40)
        for at in (full_rounds(golden, seq)[0], full_rounds(golden, seq)[-1]):
            golden, run = round_pair(steps=40)
            part, what = bump(rounds_of(run, seq), at)
            report, finding, difference = first(golden, run)
            start = int(golden.seqs[seq].rounds["rounds/start"][at])
            assert report.verdict is Verdict.DIVERGED
            assert (finding.code, finding.verdict) == (f"rounds.{part}", Verdict.DIVERGED)
            assert finding.message == f"sequence 's{seq}': round {at} (position {start}): {what}"
            assert finding.step == start - len(golden.seqs[seq].prompt) + 1
            assert (finding.golden, finding.run) == (difference.golden, difference.run)
            assert finding.golden != finding.run
            assert (difference.round, difference.position, difference.part) == (at, start, part)
            assert report.totals.first_round_difference == (seq, at)
            others = sum(len(s.rounds["rounds/start"]) for i, s in enumerate(golden.seqs) if i != seq)
            assert report.totals.rounds_equal == at + others
            assert (
                f" rounds={at + others}/{report.totals.rounds_judged} first_round_difference={seq}:{at} verdict="
                in (verdict_line(report))
            )

    @pytest.mark.parametrize("earlier", range(len(BUMPS)))
    def test_the_first_in_the_order_of_cause_and_effect_is_named(self, earlier):
        for later in range(earlier + 1, len(BUMPS)):
            golden, run = round_pair(steps=40)
            at = full_rounds(golden)[0]
            a = rounds_of(run)
            part, what = BUMPS[earlier](a, at)
            other, _ = BUMPS[later](a, at)
            report, finding, _ = first(golden, run)
            if part == other or {part, other} == {"tree", "scores"}:
                continue  # within a tree the smaller node counts: below
            assert finding.code == f"rounds.{part}"
            assert what in finding.message
            assert report.verdict is Verdict.DIVERGED

    def test_of_two_rounds_the_earlier_is_named(self):
        golden, run = round_pair(steps=40)
        early, late = full_rounds(golden)[0], full_rounds(golden)[-1]
        assert early < late
        bump_start(rounds_of(run), late)
        bump_cache(rounds_of(run), early)
        _, finding, difference = first(golden, run)
        assert (finding.code, difference.round) == ("rounds.cache", early)

    @pytest.mark.parametrize(("token", "score", "code"), [(2, 5, "tree"), (5, 2, "scores"), (3, 3, "tree")])
    def test_in_a_tree_the_smaller_node_is_named(self, token, score, code):
        golden, run = round_pair(steps=40)
        at, a = full_rounds(golden)[0], rounds_of(run)
        a["tokens"][node_at(a, at, token)] ^= 1
        a["scores"][node_at(a, at, score)] -= 1
        _, finding, _ = first(golden, run)
        assert finding.code == f"rounds.{code}"
        assert f"node {min(token, score)} has " in finding.message

    def test_a_smaller_tree(self):
        golden, run = round_pair()
        at = full_rounds(golden)[0]
        a = rounds_of(run)
        for name in ("tokens", "parents", "depths", "scores"):
            run.one.rounds[f"rounds/{name}"] = np.delete(a[name], node_at(a, at, 6))
        row = int(a["n_nodes"][:at].sum()) + at + 6
        run.one.rounds["rounds/posterior"] = np.delete(a["posterior"], row)
        a["n_nodes"][at] -= 1
        _, finding, _ = first(golden, run)
        assert finding.code == "rounds.tree"
        assert "the tree has 5 nodes, golden 6" in finding.message

    def test_a_longer_path(self):
        golden, run = round_pair(steps=40)
        at, a = full_rounds(golden)[0], rounds_of(run)
        end = int(a["n_accepted"][: at + 1].sum())
        run.one.rounds["rounds/accepted"] = np.insert(a["accepted"], end, 6)
        a["n_accepted"][at] += 1
        count = a["n_accepted"][at]
        _, finding, _ = first(golden, run)
        assert finding.code == "rounds.accepted"
        assert f"{count} rows are accepted, golden {count - 1}" in finding.message

    def test_equal_digits_are_told_apart_by_their_bits(self):
        golden, run = round_pair(steps=40)
        at = full_rounds(golden)[0]
        for side, bits in ((golden, 0x7FF8000000000000), (run, 0x7FF8000000000001)):
            a = rounds_of(side)
            a["scores"].view(np.uint64)[node_at(a, at, 1)] = bits
        _, finding, _ = first(golden, run)
        assert "score nan (bits 7ff8000000000001), golden nan (bits 7ff8000000000000)" in finding.message

    def test_the_sign_of_a_zero_is_a_bit(self):
        golden, run = round_pair(steps=40)
        at = full_rounds(golden)[0]
        rounds_of(golden)["draft_top_logps"][at, 0, 0] = 0.0
        rounds_of(run)["draft_top_logps"][at, 0, 0] = -0.0
        _, finding, _ = first(golden, run)
        assert "has log-probability -0.0, golden 0.0" in finding.message

    def test_the_cache_at_the_end(self):
        golden, run = round_pair()
        count = len(golden.one.rounds["rounds/start"])
        old = golden.one.rounds["rounds/final_cache_digest"].tobytes().hex()
        rounds_of(run)["final_cache_digest"][5] ^= 1
        report, finding, difference = first(golden, run)
        assert (finding.code, finding.verdict) == ("rounds.final_cache", Verdict.DIVERGED)
        assert "after the last round: the digest of the cache at the end is " in finding.message
        assert (difference.golden, difference.round, difference.position) == (old, count, None)
        assert report.totals.rounds_equal == report.totals.rounds_judged
        assert f" first_round_difference=0:{count} verdict=DIVERGED" in verdict_line(report)

    @pytest.mark.parametrize("side", [0, 1])
    def test_a_round_too_few(self, side):
        pair = round_pair(steps=40)
        arrays = rounds_of(pair[side])
        pair[side].one.rounds = {f"rounds/{k}": v for k, v in without_last(arrays).items()}
        count = len(arrays["start"])
        report, finding, difference = first(*pair)
        assert report.verdict is Verdict.DIVERGED
        has = (count, count - 1) if side == 0 else (count - 1, count)
        assert f"the run has {has[0]} rounds, golden {has[1]}" in finding.message
        assert (finding.code, difference.round) == ("rounds.count", count - 1)
        assert difference.position == arrays["start"][-1]


def without_last(a):
    n, accepted = int(a["n_nodes"][-1]), int(a["n_accepted"][-1])
    cut = {name: a[name][: len(a[name]) - n] for name in ("tokens", "parents", "depths", "scores")}
    cut |= {"posterior": a["posterior"][: -n - 1], "accepted": a["accepted"][:-accepted]}
    rest = [name for name in a if name not in cut and name != "final_cache_digest"]
    return cut | {name: a[name][:-1] for name in rest} | {"final_cache_digest": a["final_cache_digest"]}


@given(data=st.data(), seed=st.integers(0, 50), mode=st.sampled_from(["ddtree", "chain"]), vocab=st.integers(2, 40))
@settings(max_examples=300, deadline=None)
def test_no_single_change_in_a_run_is_identical(data, seed, mode, vocab):
    golden, run = round_pair(mode, seed=seed, vocab=vocab, steps=9)
    seq = data.draw(st.integers(0, len(run.seqs) - 1))
    a = rounds_of(run, seq)
    name = data.draw(st.sampled_from(sorted(name for name in a if a[name].size)))
    array = a[name].reshape(-1)
    at = data.draw(st.integers(0, array.size - 1))
    if name.startswith("draft_top"):
        width = a[name].shape[2]
        if a["draft_counts"].reshape(-1)[at // width] <= at % width:
            return  # past the counts
    raw = array.view(f"u{array.dtype.itemsize}")
    raw[at] ^= raw.dtype.type(1 << data.draw(st.integers(0, 8 * raw.itemsize - 1)))
    before = {k: v.tobytes() for k, v in golden.seqs[seq].rounds.items()}
    report = judged(golden, run)
    assert report.verdict in (Verdict.DIVERGED, Verdict.INVALID)
    assert report.exit_code != 0
    lenient = judged(golden, run, **LENIENT)
    assert lenient.verdict is not Verdict.IDENTICAL
    assert before == {k: v.tobytes() for k, v in golden.seqs[seq].rounds.items()}


class TestWhatIsComparable:
    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("mode", "chain", "other modes: golden ddtree, run chain (drafting.mode)"),
            ("drafter", "ngram", f"other drafters: golden {DRAFTER}, run ngram (drafting.drafter)"),
            ("budget", 7, "other budgets: golden 6, run 7 (drafting.budget)"),
            ("block_size", 4, "other block sizes: golden 5, run 4 (drafting.block_size)"),
            ("budget", None, "the run's manifest does not say drafting.budget"),
        ],
    )
    def test_another_drafting_is_noted_and_not_compared(self, key, value, said):
        golden, run = round_pair()
        run.manifest["drafting"][key] = value
        bump_bonus(rounds_of(run), 0)
        report = judged(golden, run)
        (finding,) = report.findings
        assert (finding.level, finding.code, finding.verdict) == (Level.NOTE, "rounds.not_compared", None)
        assert finding.message == f"rounds are not compared: {said}"
        assert (report.verdict, report.rounds) == (Verdict.IDENTICAL, "not-compared")
        assert " rounds=not-compared verdict=IDENTICAL" in verdict_line(report)
        assert (report.totals.rounds_judged, report.totals.rounds_equal) == (0, 0)
        result = report.sequences[0].rounds
        assert result.run_tau > 0
        assert (result.compared, result.judged, result.equal, result.first_difference) == (False, 0, 0, None)

    @pytest.mark.parametrize("which", ["golden", "run"])
    def test_a_side_without_rounds(self, which):
        golden, run = round_pair()
        side = golden if which == "golden" else run
        for s in side.seqs:
            s.rounds = {}
        side.manifest["decoding"]["mode"] = "ar"
        report = judged(golden, run)
        (finding,) = report.findings
        assert finding.message == f"rounds are not compared: the {which} holds no rounds (its mode is ar)"
        assert (report.verdict, report.rounds) == (Verdict.IDENTICAL, "not-compared")

    def test_plain_decoding_says_nothing_of_rounds(self):
        golden = golden_side()
        report = judged(golden, run_side(golden))
        assert (report.rounds, report.findings, report.sequences[0].rounds) == (None, (), None)
        assert "rounds" not in verdict_line(report)

    def test_a_replay_drafts_what_the_golden_s_drafter_did(self):
        golden, run = round_pair()
        golden.drafts_kept = 6
        run.manifest["drafting"] |= {"drafter": "replay", "of": DRAFTER}
        assert judged(golden, run).rounds == "compared"
        bump_bonus(rounds_of(run), 0)
        assert judged(golden, run).verdict is Verdict.DIVERGED

    @pytest.mark.parametrize(
        ("of", "kept", "said"),
        [
            ("ngram", 6, f"other drafters: golden {DRAFTER}, run ngram (drafting.of)"),
            (None, 6, "the run's manifest does not say drafting.of"),
            (DRAFTER, 5, "the run replays the 5 candidates a depth that the golden keeps of 6"),
            (DRAFTER, None, "the run replays the 0 candidates a depth that the golden keeps of 6"),
        ],
    )
    def test_a_replay_of_others_or_of_too_few(self, of, kept, said):
        golden, run = round_pair()
        golden.drafts_kept = kept
        run.manifest["drafting"] |= {"drafter": "replay", "of": of}
        report = judged(golden, run)
        assert (report.rounds, report.findings[0].message) == ("not-compared", f"rounds are not compared: {said}")

    @pytest.mark.parametrize(("kept", "rounds"), [(6, "compared"), (7, "not-compared")])
    def test_a_replay_of_a_synthetic_drafter_that_drew_for_another_count(self, kept, rounds):
        golden, run = round_pair()
        golden.drafts_kept = kept
        golden.manifest["drafting"] |= {"drafter": "synthetic:0.7"}
        run.manifest["drafting"] |= {"drafter": "replay", "of": "synthetic:0.7"}
        assert judged(golden, run).rounds == rounds

    @pytest.mark.parametrize(("mode", "vocab", "kept"), [("ddtree", 4, 4), ("chain", 40, 1)])
    def test_a_replay_needs_no_more_candidates_than_there_are_or_than_a_chain_takes(self, mode, vocab, kept):
        golden, run = round_pair(mode, vocab=vocab)
        golden.drafts_kept = kept
        run.manifest["drafting"] |= {"drafter": "replay", "of": DRAFTER}
        assert judged(golden, run).rounds == "compared"

    def test_a_golden_that_replays_is_nobody_s_reference(self):
        golden, run = round_pair()
        golden.drafts_kept = 6
        for side in (golden, run):
            side.manifest["drafting"] |= {"drafter": "replay", "of": DRAFTER}
        assert judged(golden, run).rounds == "not-compared"

    @pytest.mark.parametrize("which", [0, 1])
    def test_a_sequence_without_rounds_among_others_with(self, which):
        pair = round_pair()
        pair[which].seqs[1].rounds = {}
        report = judged(*pair)
        (finding,) = rounds_findings(report)
        assert (report.verdict, finding.code) == (Verdict.INVALID, "rounds.missing")
        assert (
            finding.message == f"sequence 's1': the {('golden', 'run')[which]} holds no rounds of it, though of others"
        )

    def test_a_missing_sequence_counts_its_rounds(self):
        golden, run = round_pair()
        del run.seqs[0]
        report = judged(golden, run)
        first_count, second = (len(s.rounds["rounds/start"]) for s in golden.seqs)
        assert f" rounds={second}/{first_count + second} " in verdict_line(report)
        assert report.verdict is Verdict.DIVERGED

    def test_a_selection_has_the_rounds_of_its_sequences(self):
        golden, run = round_pair(sequences=3)
        bump_bonus(rounds_of(run, 0), 0)
        run.seqs[2].problems = (RoundProblem("round 0: no cycle: node 1 is its own ancestor", True, 0),)
        report = judged(golden, run, select=("s1",))
        count = len(golden.seqs[1].rounds["rounds/start"])
        assert f" rounds={count}/{count} sequences=1/3 verdict=IDENTICAL" in verdict_line(report)


class TestAPart:
    def shortened(self, steps, run_steps):
        """A run that was made with fewer steps: its last round starts before its limit."""
        golden, run = round_pair(steps=steps)
        for s in run.seqs:
            s.tokens = s.tokens[:run_steps]
            s.logits = {k: v[:run_steps] for k, v in s.logits.items()}
            a = {k.removeprefix("rounds/"): v for k, v in s.rounds.items()}
            while len(a["start"]) and a["start"][-1] - len(s.prompt) + 1 >= run_steps:
                a = without_last(a)
            s.rounds = {f"rounds/{k}": v for k, v in a.items()}
            s.rounds["rounds/final_cache_digest"] = np.zeros(32, np.uint8)
        return golden, run

    @pytest.mark.parametrize("steps", [1, 2, 3, 7, 11])
    def test_a_shorter_run_agrees_as_far_as_it_goes(self, steps):
        golden, run = self.shortened(12, steps)
        report = judged(golden, run, steps=steps)
        assert report.verdict is Verdict.IDENTICAL
        counts = [len(s.rounds["rounds/start"]) for s in run.seqs]
        assert report.totals.rounds_judged == report.totals.rounds_equal == sum(counts)
        assert report.totals.steps == 2 * steps

    def test_without_steps_it_is_shorter(self):
        golden, run = self.shortened(12, 7)
        report = judged(golden, run)
        assert report.verdict is Verdict.DIVERGED
        assert {f.code for f in report.findings} == {"tokens.shorter", "rounds.count"}
        assert all(f.verdict is None for f in rounds_findings(report))

    @pytest.mark.parametrize("past", [0, 1])
    def test_a_difference_counts_up_to_the_cut(self, past):
        golden, run = round_pair(steps=40)
        a = rounds_of(run)
        at = full_rounds(golden)[1]
        begins = int(a["start"][at]) - len(golden.one.prompt) + 1  # the first output step that the round emits
        bump_cache(a, at)
        report = judged(golden, run, steps=begins + 1 - past)
        assert report.verdict is (Verdict.IDENTICAL if past else Verdict.DIVERGED)
        assert judged_rounds(golden.one.rounds, len(golden.one.prompt), begins + 1 - past) == at + 1 - past

    def test_the_cache_at_the_end_of_longer_outputs_is_not_compared(self):
        golden, run = round_pair()
        rounds_of(run)["final_cache_digest"][0] ^= 1
        assert judged(golden, run, steps=11).verdict is Verdict.IDENTICAL
        assert judged(golden, run, steps=12).verdict is Verdict.DIVERGED

    def test_a_broken_rule_beyond_the_cut_does_not_count_but_malformed_rounds_do(self):
        golden, run = round_pair(steps=40)
        a = rounds_of(run)
        steps = int(a["start"][3]) - len(run.one.prompt) + 1
        for text, malformed, number, verdict in (
            ("round 3: bonus: 1 is stored", False, 3, Verdict.IDENTICAL),
            ("round 2: bonus: 1 is stored", False, 2, Verdict.DIVERGED),
            ("emitted <= limit: 5 tokens; the limit is 4", False, None, Verdict.DIVERGED),
            ("round 3: budget: 99 nodes", True, 3, Verdict.INVALID),
        ):
            run.one.problems = (RoundProblem(text, malformed, number),)
            assert judged(golden, run, steps=steps).verdict is verdict


class TestTolerance:
    """With a tolerance the marginals' numbers, the choices off the path and the caches may differ."""

    @pytest.mark.parametrize("bump", BUMPS, ids=lambda bump: bump.__name__[5:])
    def test_what_is_drafted_and_emitted_decides(self, bump):
        golden, run = round_pair(steps=40)
        at = full_rounds(golden)[0]
        part, what = bump(rounds_of(run), at)
        report = judged(golden, run, **LENIENT)
        (finding,) = rounds_findings(report)
        assert finding.code == f"rounds.{part}"
        assert what in finding.message
        if part in ("start", "root", "tree", "accepted", "bonus"):
            assert (report.verdict, finding.verdict) == (Verdict.DIVERGED, Verdict.DIVERGED)
        else:
            assert (report.verdict, finding.verdict, finding.level) == (Verdict.PASS, None, Level.NOTE)
            assert "(so in 1 rounds; with a tolerance this decides nothing)" in finding.message
            assert report.totals.rounds_equal == report.totals.rounds_judged
            assert report.totals.first_round_difference is None
            assert report.sequences[0].rounds.first_open.round == at

    def test_the_cache_at_the_end_is_a_note(self):
        golden, run = round_pair()
        rounds_of(run)["final_cache_digest"][0] ^= 1
        report = judged(golden, run, **LENIENT)
        assert (report.verdict, rounds_findings(report)[0].code) == (Verdict.PASS, "rounds.final_cache")

    def test_another_tier_with_other_logits_and_the_same_trees_passes(self):
        golden, run = round_pair()
        run.manifest["tier"] = "bf16"
        perturb(run, 1e-3)
        for seq in range(2):
            a = rounds_of(run, seq)
            a["draft_top_logps"][...] *= np.float32(1.001)
            a["scores"][...] *= 1.001
            a["cache_digest"][...] ^= 0xFF
        report = judged(golden, run, atol=1e-2)
        assert (report.verdict, report.exit_code) == (Verdict.PASS, 0)
        count = report.totals.rounds_judged
        assert f" rounds={count}/{count} verdict=PASS" in verdict_line(report)
        bump_tokens(rounds_of(run), full_rounds(golden)[0])
        assert judged(golden, run, atol=1e-2).verdict is Verdict.DIVERGED

    def test_notes_say_how_many_rounds(self):
        golden, run = round_pair(steps=40)
        for at in range(3):
            bump_cache(rounds_of(run), at)
        (finding,) = rounds_findings(judged(golden, run, **LENIENT))
        assert "(so in 3 rounds;" in finding.message

    @pytest.mark.parametrize("options", [{"atol": 0.0}, {"max_ulp": 0}])
    def test_a_tolerance_of_zero_is_none(self, options):
        golden, run = round_pair()
        bump_cache(rounds_of(run), 0)
        assert judged(golden, run, **options).verdict is Verdict.DIVERGED


class TestAfterOtherTokens:
    """Rounds part where tokens do: that is one difference, not two."""

    def other_token(self, golden, run, step):
        """Let the target choose another token at `step`, the round that emits it included; the round's number and the
        row where it chose."""
        a = rounds_of(run)
        at = int(np.flatnonzero(a["start"] - len(run.one.prompt) + 1 <= step)[-1])
        k = step - (int(a["start"][at]) - len(run.one.prompt)) - 1
        row = int(a["accepted"][int(a["n_accepted"][:at].sum()) + k])
        run.one.tokens[step] ^= 1
        a["posterior"][int(a["n_nodes"][:at].sum()) + at + row] = run.one.tokens[step]
        return a, at, row

    @pytest.mark.parametrize("step", [1, 5, 11])
    def test_the_tokens_have_the_verdict(self, step):
        golden, run = round_pair()
        _, at, row = self.other_token(golden, run, step)
        report = judged(golden, run)
        assert report.verdict is Verdict.DIVERGED
        (finding,) = rounds_findings(report)
        assert (finding.code, finding.verdict, finding.level) == ("rounds.posterior", None, Level.NOTE)
        assert f"round {at} " in finding.message
        assert f"after node {row} the target chose {run.one.tokens[step]}, golden {golden.one.tokens[step]}" in (
            finding.message
        )
        assert "it follows from the tokens" in finding.message
        assert report.totals.first_round_difference == (0, at)

    def tie_at_the_end(self):
        """A pair whose last token, the bonus of a whole round, is a tie that the run breaks otherwise."""
        for seed in range(100):
            golden, run = round_pair(seed=seed)
            a = rounds_of(run)
            at = len(a["start"]) - 1
            if at in full_rounds(golden) and a["start"][at] - len(run.one.prompt) + a["n_accepted"][at] == 11:
                break
        token = make_tie(golden, run, 11)
        row = int(a["n_nodes"][:at].sum()) + at + int(a["accepted"][-1])
        assert a["posterior"][row] == a["bonus"][at] == golden.one.tokens[11] != token == run.one.tokens[11]
        a["posterior"][row] = a["bonus"][at] = token
        return golden, run, at

    def test_a_tie_at_the_last_step_stays_a_tie(self):
        golden, run, at = self.tie_at_the_end()
        report = judged(golden, run, atol=2e-3)
        assert report.verdict is Verdict.TIE_BREAK
        assert {f.code: f.verdict for f in rounds_findings(report)} == {"rounds.posterior": None, "rounds.bonus": None}
        assert report.totals.first_round_difference == (0, at)
        assert judged(golden, run, atol=2e-3, on_tie="pass").exit_code == 0

    @pytest.mark.parametrize("bump", [bump_start, bump_root, bump_tokens])
    def test_a_tie_excuses_no_other_tree(self, bump):
        golden, run, at = self.tie_at_the_end()
        bump(rounds_of(run), at)
        assert judged(golden, run, atol=2e-3).verdict is Verdict.DIVERGED

    def test_later_rounds_follow_too(self):
        golden, run = round_pair(steps=40)
        a, at, _ = self.other_token(golden, run, 5)
        bump_root(a, at + 1)
        report = judged(golden, run, **LENIENT)  # which leaves the choice itself open
        found = {f.code: f for f in rounds_findings(report)}
        assert set(found) == {"rounds.posterior", "rounds.root"}
        assert found["rounds.root"].verdict is None
        assert "it follows from the tokens" in found["rounds.root"].message

    def test_a_choice_off_the_path_is_not_excused_by_the_token(self):
        golden, run = round_pair()
        a, at, row = self.other_token(golden, run, 5)
        first_row = int(a["n_nodes"][:at].sum()) + at
        other = next(i for i in range(int(a["n_nodes"][at]) + 1) if i != row)
        a["posterior"][first_row + other] ^= 1
        (finding,) = rounds_findings(judged(golden, run))
        assert (finding.code, finding.verdict) == ("rounds.posterior", Verdict.DIVERGED)
        assert f"after node {other} the target chose" in finding.message

    def test_a_difference_before_the_token_has_its_own_verdict(self):
        golden, run = round_pair()
        run.one.tokens[11] ^= 1
        bump_cache(rounds_of(run), 0)
        (finding,) = rounds_findings(judged(golden, run))
        assert (finding.code, finding.verdict) == ("rounds.cache", Verdict.DIVERGED)


class TestDigests:
    @pytest.mark.parametrize("name", ["cache_digest", "final_cache_digest"])
    @pytest.mark.parametrize("which", [0, 1])
    def test_on_one_side_alone_are_noted(self, name, which):
        pair = round_pair()
        del pair[which].one.rounds[f"rounds/{name}"]
        report = judged(*pair)
        (finding,) = report.findings
        assert (report.verdict, finding.code, finding.level) == (Verdict.IDENTICAL, "rounds.digests", Level.NOTE)
        assert f"the {('run', 'golden')[which]} alone has digests of the cache" in finding.message

    def test_on_neither_side(self):
        golden, run = round_pair()
        for side in (golden, run):
            for s in side.seqs:
                del s.rounds["rounds/cache_digest"], s.rounds["rounds/final_cache_digest"]
        report = judged(golden, run)
        assert (report.verdict, report.findings) == (Verdict.IDENTICAL, ())
        bump_bonus(rounds_of(run), 0)
        assert judged(golden, run).verdict is Verdict.DIVERGED


class TestProblems:
    def test_malformed_rounds_are_invalid_whoever_has_them(self):
        for which, name in enumerate(("golden", "run")):
            pair = round_pair()
            problem = RoundProblem("round 2: no cycle: node 5 is its own ancestor", malformed=True, round=2)
            pair[which].seqs[1].problems = (problem,)
            report = judged(*pair)
            assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)
            (finding,) = rounds_findings(report)
            assert finding.code == "rounds.malformed"
            assert finding.message == f"sequence 's1': the {name}'s rounds are malformed: {problem.text}"
            assert report.reason == finding.message
            assert (report.sequences[1].rounds.equal, report.sequences[1].rounds.compared) == (0, True)

    @pytest.mark.parametrize(("which", "verdict"), [(0, Verdict.INVALID), (1, Verdict.DIVERGED)])
    @pytest.mark.parametrize("compared", [True, False])
    def test_a_broken_rule_spoils_a_golden_and_fails_a_run(self, which, verdict, compared):
        pair = round_pair()
        text = "round 1: best-first: the tree's tokens are not those that its marginals give"
        pair[which].one.problems = (RoundProblem(text, round=1), RoundProblem("round 1: more", round=1))
        if not compared:
            pair[1].manifest["drafting"]["budget"] = 7
        report = judged(*pair)
        assert report.verdict is verdict
        (finding,) = [f for f in rounds_findings(report) if f.code == "rounds.invariant"]
        assert finding.message == f"sequence 's0': the {('golden', 'run')[which]}'s rounds break a rule: {text}"

    def test_a_golden_is_checked_where_the_run_lacks_the_sequence(self):
        golden, run = round_pair()
        golden.one.problems = (RoundProblem("round 0: budget: 9 nodes", True, 0),)
        del run.seqs[0]
        assert judged(golden, run).verdict is Verdict.INVALID

    def test_invalid_counts_more_than_diverged(self):
        golden, run = round_pair()
        bump_bonus(rounds_of(run), 0)
        golden.seqs[1].problems = (RoundProblem("round 0: budget: 9 nodes", True, 0),)
        assert judged(golden, run).verdict is Verdict.INVALID


def resized(name, change):
    def spoil(a):
        a[name] = change(a[name])

    return spoil


def less(name, value):
    def spoil(a):
        a[name][1] = value

    return spoil


def dropped(name):
    return lambda a: a.pop(name)


FAULTS = {
    "no accepted path": (dropped("accepted"), "rounds/accepted is missing"),
    "no counts": (dropped("draft_counts"), "rounds/draft_counts is missing"),
    "float tokens": (resized("tokens", lambda x: x.astype(np.float32)), "rounds/tokens is float32, not int32"),
    "long scores": (resized("scores", lambda x: x.astype(np.float32)), "rounds/scores is float32, not float64"),
    "starts of two dimensions": (resized("start", lambda x: x[:, None]), "rounds/start has shape"),
    "a bonus too many": (resized("bonus", lambda x: np.append(x, x[:1])), "rounds/bonus has shape"),
    "nodes below zero": (less("n_nodes", -1), "round 1: rounds/n_nodes is -1; at least 0 is due"),
    "nothing accepted": (less("n_accepted", 0), "round 1: rounds/n_accepted is 0; at least 1 is due"),
    "a node too few": (resized("parents", lambda x: x[1:]), "the counts of the rounds add up to"),
    "a score too many": (resized("scores", lambda x: np.append(x, x[:1])), "rounds/scores has shape"),
    "a choice too few": (resized("posterior", lambda x: x[1:]), "rounds/posterior has shape"),
    "an accepted too many": (resized("accepted", lambda x: np.append(x, x[:1])), "rounds/accepted has shape"),
    "more nodes than there are": (less("n_nodes", 2**31 - 1), "the counts of the rounds add up to 2147483"),
    "other marginals": (
        resized("draft_top_logps", lambda x: x[:, :-1]),
        "[rounds, L, K] twice and [rounds, L] are due",
    ),
    "other counts": (resized("draft_counts", lambda x: x[:, :-1]), "[rounds, L, K] twice and [rounds, L] are due"),
    "marginals of fewer rounds": (
        lambda a: a.update({k: a[k][:-1] for k in ("draft_top_ids", "draft_top_logps", "draft_counts")}),
        "[rounds, L, K] twice and [rounds, L] are due",
    ),
    "flat marginals": (resized("draft_top_ids", lambda x: x.reshape(-1)), "[rounds, L, K] twice"),
    "a short digest": (resized("cache_digest", lambda x: x[:, :31]), "rounds/cache_digest has shape"),
    "a long last digest": (resized("final_cache_digest", lambda x: np.append(x, x)), "has shape [64], not [32]"),
}


class TestFaults:
    @pytest.mark.parametrize("name", FAULTS)
    @pytest.mark.parametrize("which", [0, 1])
    def test_arrays_that_are_no_rounds_are_invalid(self, name, which):
        spoil, said = FAULTS[name]
        pair = round_pair()
        assert fault(pair[which].one.rounds) is None
        arrays = rounds_of(pair[which])
        spoil(arrays)
        pair[which].one.rounds = {f"rounds/{k}": v for k, v in arrays.items()}
        report = judged(*pair)
        (finding,) = rounds_findings(report)
        assert (report.verdict, finding.code) == (Verdict.INVALID, "rounds.malformed")
        assert f"the {('golden', 'run')[which]}'s rounds are malformed: " in finding.message
        assert said in finding.message

    def test_marginals_of_another_size_are_a_difference(self):
        golden, run = round_pair()
        for name in ("draft_top_ids", "draft_top_logps"):
            run.one.rounds[f"rounds/{name}"] = rounds_of(run)[name][:, :, :-1]
        comparison = compare_rounds(golden.one.rounds, run.one.rounds, 4)
        assert comparison.difference.what == "the marginals are [4, 5], golden [4, 6]"

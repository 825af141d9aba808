"""Rounds from two files to a verdict: whatever a bundle holds has a name, and nothing hangs or escapes."""

import copy
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from parity_bundles import write_bundle, write_pair
from rounds_cases import node_at, round_pair, rounds_of

from kdtr_cli.bundle.reader import BundleSequence, open_bundle
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.json import report_document
from kdtr_cli.report.line import verdict_line
from kdtr_cli.workflows.diff import bundle_evidence, diff

pytestmark = pytest.mark.quick

SIDES = ("golden", "run")


def rounds_findings(report):
    return [f for f in report.findings if f.code.startswith("rounds.")]


def whole_round(side, seq=0):
    """A round with six nodes, every count above 1 and a node accepted."""
    a = {k.removeprefix("rounds/"): v for k, v in side.seqs[seq].rounds.items()}
    return int(np.flatnonzero((a["n_nodes"] == 6) & (a["n_accepted"] > 1) & (a["draft_counts"] > 1).all(axis=1))[0])


def node(name, which, value):
    """Change node `which` of the round: to `value`, or by a function of the round's nodes."""

    def spoil(a, at):
        first = node_at(a, at, 1)
        nodes = {k: a[k][first : first + 6] for k in ("tokens", "parents", "depths")}
        a[name][first + which - 1] = value(nodes) if callable(value) else value

    return spoil


def cycle(a, at):
    first = node_at(a, at, 1)
    a["parents"][first + 2], a["parents"][first + 4] = 5, 3


def late_parent(a, at):
    first = node_at(a, at, 1)
    a["parents"][first], a["parents"][first + 5], a["depths"][first + 5] = 6, 0, 1


def twins(a, at):
    first = node_at(a, at, 1)
    a["parents"][first + 5], a["depths"][first + 5] = a["parents"][first], a["depths"][first]
    a["tokens"][first + 5] = a["tokens"][first]


def one_node_more(a, at):
    other = at + 1 if at + 1 < len(a["n_nodes"]) else at - 1
    a["n_nodes"][at] += 1
    a["n_nodes"][other] -= 1


def each(name, change):
    def spoil(a, at):
        a[name][at] += change

    return spoil


def path(place, value):
    def spoil(a, at):
        a["accepted"][int(a["n_accepted"][:at].sum()) + place] = value

    return spoil


def choice(value):
    def spoil(a, at):
        a["posterior"][int(a["n_nodes"][:at].sum()) + at + 3] = value

    return spoil


def count(value):
    def spoil(a, at):
        a["draft_counts"][at, 1] = value

    return spoil


HUGE = 2**31 - 1
#: What spoils the arrays of a round, and what must be said of it ("{n}": the round).
MALFORMED = {
    "a cycle": (cycle, "round {n}: no cycle: node 3 is its own ancestor"),
    "its own parent": (node("parents", 4, 4), "round {n}: no cycle: node 4 is its own ancestor"),
    "a parent after its child": (late_parent, "round {n}: parent < child: node 1 stands before its parent 6"),
    "no such parent": (node("parents", 2, 7), "round {n}: parent: node 2 has parent 7; needed: 0 to 6"),
    "a parent below zero": (node("parents", 2, -1), "round {n}: parent: node 2 has parent -1"),
    "a huge parent": (node("parents", 2, HUGE), "round {n}: parent: node 2 has parent 2147483647"),
    "duplicate siblings": (twins, "round {n}: no duplicate siblings: nodes 1 and 6 under 0 both have token"),
    "a wrong depth": (
        node("depths", 5, lambda n: n["depths"][4] % 4 + 1),
        "round {n}: position = start + depth: node 5 has depth",
    ),
    "a depth of zero": (node("depths", 5, 0), "round {n}: horizon: node 5 has depth 0; 1 to 4 are possible"),
    "a depth beyond the horizon": (node("depths", 5, 5), "round {n}: horizon: node 5 has depth 5"),
    "a huge depth": (node("depths", 1, HUGE), "round {n}: horizon: node 1 has depth 2147483647"),
    "too many nodes": (one_node_more, "round {n}: budget: 7 nodes; the budget is 6"),
    "a node too few": (each("n_nodes", -1), "rounds/tokens has shape"),
    "nodes below zero": (each("n_nodes", -99), "round {n}: rounds/n_nodes is -93"),
    "nothing accepted": (each("n_accepted", -9), "round {n}: rounds/n_accepted is -"),
    "an accepted row too many": (each("n_accepted", 1), "rounds/accepted has shape"),
    "a path from elsewhere": (path(0, 1), "round {n}: accepted path rooted: it starts with [1]"),
    "a path with a jump": (path(1, 0), "round {n}: accepted path rooted: node 0 follows 0 but has parent -1"),
    "a path out of the tree": (path(1, 7), "round {n}: accepted path rooted: it leaves the tree of 7 rows"),
    "a path below zero": (path(1, -1), "round {n}: accepted path rooted: it leaves the tree"),
    "a token outside": (node("tokens", 3, 40), "round {n}: token: node 3 has token 40; the vocabulary is 0 to 39"),
    "a token below zero": (node("tokens", 3, -1), "round {n}: token: node 3 has token -1"),
    "a root outside": (lambda a, at: a["root"].__setitem__(at, HUGE), "round {n}: token: node 0 has token 2147483647"),
    "a choice outside": (choice(HUGE), "round {n}: token: posterior 3 is 2147483647; the vocabulary is 0 to 39"),
    "a choice below zero": (choice(-5), "round {n}: token: posterior 3 is -5"),
    "too many candidates": (count(7), "round {n}: marginals: depth 2 counts 7 candidates; 0 to 6 are possible"),
    "candidates below zero": (count(-1), "round {n}: marginals: depth 2 counts -1 candidates"),
}


class TestMalformed:
    @pytest.mark.parametrize("name", MALFORMED)
    @pytest.mark.parametrize("which", [0, 1])
    def test_is_invalid_with_reason_side_sequence_and_round(self, tmp_path, name, which):
        spoil, said = MALFORMED[name]
        pair = round_pair()
        at = whole_round(pair[which], 1)
        spoil(rounds_of(pair[which], 1), at)
        report = diff(*write_pair(*pair, tmp_path))
        assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)
        (finding,) = rounds_findings(report)
        assert finding.code == "rounds.malformed"
        assert finding.message.startswith(f"sequence 's1': the {SIDES[which]}'s rounds are malformed: ")
        assert said.format(n=at) in finding.message
        assert report.reason == finding.message
        assert 'verdict=INVALID reason="sequence ' in verdict_line(report)

    @pytest.mark.parametrize("name", ["start", "accepted", "posterior", "draft_counts", "draft_top_ids", "n_nodes"])
    @pytest.mark.parametrize("which", [0, 1])
    def test_arrays_that_are_missing(self, tmp_path, name, which):
        pair = round_pair()
        del pair[which].one.rounds[f"rounds/{name}"]
        report = diff(*write_pair(*pair, tmp_path))
        assert report.verdict is Verdict.INVALID
        assert f"the {SIDES[which]}'s rounds are malformed: rounds/{name} is missing" in report.reason

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"budget": 0}, "--budget 0: 1 to 1024 nodes"),
            ({"budget": 2**40}, "1 to 1024 nodes"),
            ({"block_size": 99}, "--block-size 99"),
            ({"mode": "tree"}, "mode 'tree'"),
            ({"mode": "chain"}, "the manifest says mode 'ddtree', and 'chain' of the drafting"),
            ({"budget": 7}, "has shape [{n}, 4, 6]; block size and budget give [{n}, 4, 7]"),
            ({"block_size": 6}, "block size and budget give [{n}, 5, 6]"),
            (None, "its manifest lacks 'drafting/mode'"),
        ],
    )
    @pytest.mark.parametrize("which", [0, 1])
    def test_settings_that_are_none(self, tmp_path, change, said, which):
        pair = round_pair(sequences=1)
        count = len(pair[0].one.rounds["rounds/start"])
        if change is None:
            del pair[which].manifest["drafting"]
        else:
            pair[which].manifest["drafting"] |= change
        report = diff(*write_pair(*pair, tmp_path))
        assert report.verdict is Verdict.INVALID
        assert f"the {SIDES[which]}'s rounds are malformed: " in report.reason
        assert said.format(n=count) in report.reason

    @pytest.mark.parametrize("which", [0, 1])
    def test_more_rounds_than_tokens(self, tmp_path, which):
        pair = round_pair()
        s = pair[which].one
        s.tokens, s.logits = s.tokens[:2], {k: v[:2] for k, v in s.logits.items()}
        report = diff(*write_pair(*pair, tmp_path))
        assert report.verdict is Verdict.INVALID
        assert "rounds for 2 tokens; each round emits one at least" in report.reason

    @pytest.mark.parametrize("which", [0, 1])
    def test_a_damaged_array(self, tmp_path, which):
        pair = round_pair()
        paths = write_pair(*pair, tmp_path)
        digest = pair[which].one.rounds["rounds/cache_digest"].tobytes()
        data = paths[which].read_bytes()
        assert data.count(digest) == 1
        paths[which].write_bytes(data.replace(digest, bytes(len(digest))))
        report = diff(*paths)
        assert (report.verdict, report.findings[0].code) == (Verdict.INVALID, "bundle")
        assert str(paths[which]) in report.reason
        assert "rounds/cache_digest does not match its digest" in report.reason

    def test_a_tree_of_a_million_nodes_ends_at_once(self, tmp_path):
        golden, run = round_pair(sequences=1)
        a = rounds_of(run)
        extra = 1_000_000
        a["n_nodes"][0] += extra
        nodes = a["n_nodes"][0]
        for name in ("tokens", "parents", "depths"):
            # one long chain from bottom to top: to walk up from every node would take for ever
            run.one.rounds[f"rounds/{name}"] = np.concatenate([np.arange(2, extra + 2, dtype=np.int32), a[name]])
        run.one.rounds["rounds/scores"] = np.concatenate([np.zeros(extra), a["scores"]])
        run.one.rounds["rounds/posterior"] = np.concatenate([np.zeros(extra, np.int32), a["posterior"]])
        paths = write_pair(golden, run, tmp_path)
        begin = time.perf_counter()
        report = diff(*paths)
        assert time.perf_counter() - begin < 5
        assert report.verdict is Verdict.INVALID
        assert f"round 0: budget: {nodes} nodes; the budget is 6" in report.reason

    def test_a_cycle_at_the_largest_budget_ends_soon(self, tmp_path):
        golden, run = round_pair(sequences=1, budget=1024, block_size=33, vocab=40)
        a = rounds_of(run)
        assert a["n_nodes"].max() == 1024
        at = int(a["n_nodes"].argmax())
        first = node_at(a, at, 1)
        a["parents"][first : first + 1024] = np.arange(2, 1026) % 1025  # a chain upwards into the root
        a["parents"][first + 1023] = 1
        begin = time.perf_counter()
        report = diff(*write_pair(golden, run, tmp_path))
        assert time.perf_counter() - begin < 10
        assert f"round {at}: no cycle: node 1 is its own ancestor" in report.reason


def swap_tokens(a, at):
    i = node_at(a, at, 6)
    a["tokens"][i] = next(t for t in range(40) if t not in a["tokens"][i - 5 : i + 1])


def next_score(a, at):
    i = node_at(a, at, 2)
    a["scores"][i] = np.nextafter(a["scores"][i], 1)


def same_candidates(a, at):
    a["draft_top_ids"][at, 2, 1] = a["draft_top_ids"][at, 2, 0]


def not_finite(a, at):
    a["draft_top_logps"][at, 2, 1] = np.nan


def other_choice(a, at):
    rows = int(a["n_nodes"][:at].sum()) + at
    a["posterior"][rows] = next(t for t in range(40) if t not in a["tokens"][node_at(a, at, 1) :][:6])


#: What an engine may do wrong: what the run is blamed for first, and the rule that it breaks.
BROKEN = {
    "another node": (swap_tokens, "rounds.tree", "round {n}: best-first: the tree's tokens"),
    "another score": (next_score, "rounds.scores", "round {n}: best-first: the tree's scores"),
    "a candidate twice": (same_candidates, "rounds.marginals", "round {n}: marginals: the ids of depth 3"),
    "a log-probability that is none": (not_finite, "rounds.marginals", "that is not finite"),
    "another choice": (other_choice, "rounds.posterior", "round {n}: accepted = walk: "),
    "another bonus": (
        lambda a, at: a["bonus"].__setitem__(at, 39 - a["bonus"][at]),
        "rounds.bonus",
        "round {n}: bonus: ",
    ),
    "a bonus outside": (lambda a, at: a["bonus"].__setitem__(at, -7), "rounds.bonus", "round {n}: bonus: -7"),
    "another start": (each("start", 1), "rounds.start", "round {n}: position = start + depth: the round starts at"),
    "a start beyond all positions": (each("start", 2**30), "rounds.start", "round {n}: position = start + depth"),
    "a start before all": (each("start", -(2**30)), "rounds.start", "round {n}: position = start + depth"),
    "another root": (
        lambda a, at: a["root"].__setitem__(at, 39 - a["root"][at]),
        "rounds.root",
        "round {n}: root: ",
    ),
}


class TestBrokenRules:
    @pytest.mark.parametrize("name", BROKEN)
    def test_a_run_is_blamed(self, tmp_path, name):
        spoil, code, rule = BROKEN[name]
        golden, run = round_pair(steps=20)
        at = whole_round(run, 1)
        spoil(rounds_of(run, 1), at)
        report = diff(*write_pair(golden, run, tmp_path))
        assert (report.verdict, report.exit_code) == (Verdict.DIVERGED, 1)
        found = {f.code: f for f in rounds_findings(report)}
        assert set(found) == {"rounds.invariant", code}
        assert found["rounds.invariant"].message.startswith("sequence 's1': the run's rounds break a rule: ")
        assert rule.format(n=at) in found["rounds.invariant"].message
        assert f"round {at} (position " in found[code].message
        assert f" first_round_difference=1:{at} verdict=DIVERGED" in verdict_line(report)

    @pytest.mark.parametrize("name", BROKEN)
    def test_a_golden_is_none(self, tmp_path, name):
        spoil, _, rule = BROKEN[name]
        golden, run = round_pair(steps=20)
        at = whole_round(golden, 1)
        spoil(rounds_of(golden, 1), at)
        report = diff(*write_pair(golden, run, tmp_path))
        assert report.verdict is Verdict.INVALID
        assert report.reason.startswith("sequence 's1': the golden's rounds break a rule: ")
        assert rule.format(n=at) in report.reason

    @pytest.mark.parametrize("name", BROKEN)
    def test_a_run_that_can_t_be_compared_is_blamed_too(self, tmp_path, name):
        spoil, _, rule = BROKEN[name]
        golden, run = round_pair(steps=20)
        at = whole_round(run, 1)
        spoil(rounds_of(run, 1), at)
        for s in golden.seqs:
            s.rounds = {}
        report = diff(*write_pair(golden, run, tmp_path))
        assert report.verdict is Verdict.DIVERGED
        assert " rounds=not-compared verdict=DIVERGED" in verdict_line(report)
        assert rule.format(n=at) in report.findings[0].message

    def test_a_rule_that_a_later_round_breaks_is_not_held_against_the_part_before(self, tmp_path):
        golden, run = round_pair(steps=20)
        a = rounds_of(run)
        a["bonus"][3] = 39 - a["bonus"][3]
        paths = write_pair(golden, run, tmp_path)
        first_step = int(a["start"][3]) - len(run.one.prompt) + 1  # that this round emits
        assert diff(*paths, JudgeOptions(steps=first_step)).verdict is Verdict.IDENTICAL
        assert diff(*paths, JudgeOptions(steps=first_step + 1)).verdict is Verdict.DIVERGED

    @pytest.mark.parametrize("step", [0, 3, 11])
    def test_tokens_that_the_rounds_do_not_emit(self, tmp_path, step):
        golden, run = round_pair()
        run.one.tokens[step] ^= 1
        report = diff(*write_pair(golden, run, tmp_path))
        assert {f.code for f in report.findings} >= {"tokens.diverged", "rounds.invariant"}
        assert report.verdict is Verdict.DIVERGED

    def test_a_round_after_the_limit(self, tmp_path):
        golden, run = round_pair()
        for side in (golden, run):
            side.manifest["decoding"]["steps"] = 9
        report = diff(*write_pair(golden, run, tmp_path))
        assert report.verdict is Verdict.INVALID
        assert "emitted <= limit" in report.reason

    def test_a_round_after_a_stop_token(self, tmp_path):
        golden, run = round_pair()
        for side in (golden, run):
            side.manifest["decoding"] |= {"ignore_eos": False, "stop_ids": [int(golden.one.tokens[4])]}
        report = diff(*write_pair(golden, run, tmp_path))
        assert report.verdict is Verdict.INVALID
        assert "nothing after a stop token" in report.reason

    def test_drafts_of_a_golden_that_are_none(self, tmp_path):
        golden, run = round_pair()
        ids = np.tile(np.arange(6, dtype=np.int32), (12, 4, 1))
        drafts = {"top_ids": ids, "top_logps": np.zeros(ids.shape, np.float32), "counts": np.full((12, 4), 6, np.int32)}
        golden.one.rounds |= {f"drafts/{k}": v for k, v in drafts.items()}
        assert diff(*write_pair(golden, run, tmp_path)).verdict is Verdict.IDENTICAL
        drafts["top_logps"][7, 1, 2] = np.inf
        report = diff(*write_pair(golden, run, tmp_path))
        assert report.verdict is Verdict.INVALID
        assert "the golden's rounds break a rule: drafts of position 7: marginals: depth 2" in report.reason


class TestFromFiles:
    @pytest.mark.parametrize("mode", ["ddtree", "chain"])
    def test_a_bundle_is_judged_like_the_arrays_in_it(self, tmp_path, mode):
        for spoil in (None, next_score, each("bonus", 0)):
            golden, run = round_pair(mode, steps=20)
            if spoil is not None:
                a = rounds_of(run, 1)
                spoil(a, int(np.flatnonzero(a["n_nodes"] > 1)[0]))
            from_files = report_document(diff(*write_pair(golden, run, tmp_path)))
            golden.sha256 = run.manifest["run"]["golden_manifest_sha256"]
            run.sha256 = dict(from_files["totals"]["run"]["provenance"])["manifest_sha256"]
            in_memory = report_document(judge(golden.evidence(), run.evidence()))
            for document in (from_files, in_memory):
                document["totals"]["golden"]["name"] = document["totals"]["run"]["name"] = ""
                # memory has no checks of its own
                document["findings"] = [f for f in document["findings"] if f["code"] != "rounds.invariant"]
                for s in document["sequences"]:
                    s["findings"] = [f for f in s["findings"] if f["code"] != "rounds.invariant"]
            assert from_files == in_memory

    def test_what_a_golden_keeps_for_replay_comes_through(self, tmp_path):
        golden, run = round_pair()
        assert bundle_evidence(open_bundle(write_pair(golden, run, tmp_path)[0])).drafts_kept is None
        for s in golden.seqs:
            kept = 6 if s is golden.one else 5
            s.rounds["drafts/top_ids"] = np.tile(np.arange(kept, dtype=np.int32), (12, 4, 1))
        with open_bundle(write_pair(golden, run, tmp_path)[0]) as bundle:
            assert bundle_evidence(bundle).drafts_kept == 5
        run.manifest["drafting"] |= {"drafter": "replay", "of": golden.manifest["drafting"]["drafter"]}
        report = diff(*write_pair(golden, run, tmp_path))
        assert "the run replays the 5 candidates a depth that the golden keeps of 6" in report.findings[0].message

    def test_plain_bundles_are_not_asked_for_rounds(self, tmp_path, monkeypatch):
        golden, run = round_pair()
        for side in (golden, run):
            side.manifest["decoding"]["mode"] = "ar"
            del side.manifest["drafting"]
            for s in side.seqs:
                s.rounds = {}
        paths = write_pair(golden, run, tmp_path)
        read = []
        array = BundleSequence.array
        monkeypatch.setattr(BundleSequence, "array", lambda self, path: read.append(path) or array(self, path))
        report = diff(*paths)
        assert (report.verdict, report.rounds) == (Verdict.IDENTICAL, None)
        assert not [path for path in read if path.startswith(("rounds/", "drafts/"))]

    def test_rounds_of_sequences_that_are_not_judged_are_not_read(self, tmp_path):
        golden, run = round_pair()
        cycle(rounds_of(run, 0), whole_round(run, 0))
        paths = write_pair(golden, run, tmp_path)
        assert diff(*paths).verdict is Verdict.INVALID
        assert diff(*paths, JudgeOptions(select=("s1",))).verdict is Verdict.IDENTICAL


_WILD = st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 5, 6, 7, 39, 40, 1025, 2**30, 2**31 - 1])


@pytest.fixture(scope="module")
def wild(tmp_path_factory):
    """A pair whose golden is written once."""
    folder = tmp_path_factory.mktemp("wild")
    golden, run = round_pair(sequences=1, steps=8)
    run.manifest["run"]["golden_manifest_sha256"] = write_bundle(golden, folder / "g.h5")
    return folder, run


@given(data=st.data())
@settings(max_examples=150, deadline=5000)
def test_wild_numbers_never_escape_and_are_never_identical(wild, data):
    folder, clean = wild
    run = copy.deepcopy(clean)
    a = rounds_of(run)
    for _ in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from(sorted(n for n in a if a[n].dtype == np.int32 and n != "draft_top_ids")))
        at = data.draw(st.integers(0, a[name].size - 1))
        a[name].reshape(-1)[at] = data.draw(_WILD)
    changed = any(not np.array_equal(a[n], clean.one.rounds[f"rounds/{n}"]) for n in a)
    write_bundle(run, folder / "r.h5")
    report = diff(folder / "g.h5", folder / "r.h5")
    assert report.verdict in ((Verdict.DIVERGED, Verdict.INVALID) if changed else (Verdict.IDENTICAL,))

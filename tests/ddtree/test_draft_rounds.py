"""Rounds: packed and unpacked without loss, every invariant found by its name, statistics."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from kdtr_cli.ddtree.accept import walk
from kdtr_cli.ddtree.rounds import (
    DraftSettings,
    Round,
    check_marginals,
    check_rounds,
    pack_rounds,
    rows_digest,
    statistics,
    unpack_rounds,
)
from kdtr_cli.ddtree.tree import Tree, build_tree, paths
from kdtr_cli.errors import InputError

pytestmark = pytest.mark.quick

VOCAB, PROMPT, STEPS, STOP = 11, [3, 1, 4], 20, 10
SETTINGS = DraftSettings("ddtree", "ngram", 6, 5)
CHAIN = DraftSettings("chain", "ngram", 4, 5)


def target(context) -> int:
    """A target model in one line: the next token is a digest of all before. Token 10 never comes up."""
    return hashlib.sha256(bytes(context)).digest()[0] % 10


def decode(settings: DraftSettings, steps: int = STEPS, wrong: float = 0.3, seed: int = 0):
    """Rounds of a sequence under ``target``, with a drafter that knows the text but not always says so: (rounds, T)."""
    rng = np.random.default_rng(seed)
    text, rounds = [*PROMPT], []
    text.append(target(text))
    while len(text) - len(PROMPT) < steps:
        start = len(text) - 1
        ids = np.zeros((settings.horizon, settings.width(VOCAB)), np.int32)
        ahead = [*text]
        for d in range(settings.horizon):
            ahead.append(target(ahead))
            order = [t for t in rng.permutation(VOCAB) if t != ahead[-1]]
            order.insert(0 if rng.random() > wrong else 1, ahead[-1])
            ids[d] = order[: ids.shape[1]]
        logps = -np.sort(rng.exponential(size=ids.shape)).astype(np.float32)
        counts = np.full(settings.horizon, ids.shape[1], np.int32)
        tree = build_tree(text[-1], ids, logps, counts, settings.nodes)
        posterior = np.array([target(text[:-1] + tree.tokens[p].tolist()) for p in paths(tree)], np.int32)
        accepted, bonus = walk(tree, posterior)
        digest = hashlib.sha256(bytes([len(rounds)])).digest()
        rounds.append(Round(start, text[-1], bonus, tree, accepted, posterior, ids, logps, counts, digest))
        text += rounds[-1].emitted.tolist()
    return rounds, np.array(text[len(PROMPT) :][:steps], np.int32)


def broken(rounds, tokens, settings=SETTINGS, steps=STEPS, stop=STOP, positions=100):
    return check_rounds(
        rounds,
        settings,
        len(PROMPT),
        tokens,
        steps=steps,
        stop_ids=[stop],
        vocab_size=VOCAB,
        max_positions=positions,
    )


@pytest.mark.parametrize("settings", [SETTINGS, CHAIN])
@pytest.mark.parametrize("steps", [1, 2, 7, 20])
def test_rounds_decode_what_the_target_says(settings, steps):
    rounds, tokens = decode(settings, steps)
    plain = [*PROMPT]
    for _ in range(steps):
        plain.append(target(plain))
    assert tokens.tolist() == plain[len(PROMPT) :]
    assert broken(rounds, tokens, settings, steps) == []


@pytest.mark.parametrize("settings", [SETTINGS, CHAIN])
def test_packed_and_unpacked_they_are_the_same(settings):
    rounds, _ = decode(settings)
    arrays = pack_rounds(rounds, settings.horizon, settings.width(VOCAB), b"\1" * 32)
    assert arrays["rounds/final_cache_digest"].tolist() == [1] * 32
    assert arrays["rounds/posterior"].size == arrays["rounds/tokens"].size + len(rounds)
    assert all(path.startswith("rounds/") for path in arrays)
    for one, two in zip(rounds, unpack_rounds(arrays), strict=True):
        for name in ("start", "root", "bonus", "cache_digest"):
            assert getattr(one, name) == getattr(two, name)
        for name in ("accepted", "posterior", "draft_ids", "draft_logps", "draft_counts"):
            assert getattr(one, name).tobytes() == getattr(two, name).tobytes()
        for name in ("tokens", "parents", "depths", "scores"):
            assert getattr(one.tree, name).tobytes() == getattr(two.tree, name).tobytes()


def test_no_rounds_are_arrays_of_no_rows():
    arrays = pack_rounds([], 4, 6)
    assert arrays["rounds/draft_top_ids"].shape == (0, 4, 6)
    assert arrays["rounds/cache_digest"].shape == (0, 32)
    assert unpack_rounds(arrays) == []
    assert broken([], np.array([1], np.int32), steps=1) == []


def test_candidates_that_are_not_there_are_stored_as_zeros():
    """Whatever a drafter leaves in its arrays: two of them that draft the same must store the same bytes."""
    rounds, _ = decode(SETTINGS)
    one = rounds[0]
    counts = np.array([2, 0, 6, 1], np.int32)
    ids, logps = one.draft_ids.copy(), one.draft_logps.copy()
    ids[0, 2:], logps[1] = 77, np.nan
    arrays = pack_rounds([replace(one, draft_ids=ids, draft_logps=logps, draft_counts=counts)], 4, 6)
    gone = np.arange(6) >= counts[:, None]
    assert not arrays["rounds/draft_top_ids"][0][gone].any()
    assert not arrays["rounds/draft_top_logps"][0][gone].any()
    assert np.array_equal(arrays["rounds/draft_top_ids"][0][~gone], one.draft_ids[~gone])


def test_digests_are_left_out_where_one_is_not_taken():
    rounds, _ = decode(SETTINGS)
    arrays = pack_rounds([rounds[0], replace(rounds[1], cache_digest=None)], 4, 6)
    assert "rounds/cache_digest" not in arrays
    assert "rounds/final_cache_digest" not in arrays
    assert [one.cache_digest for one in unpack_rounds(arrays)] == [None, None]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("n_nodes", lambda a: a + 1, "rounds/n_nodes adds up to"),
        ("n_nodes", lambda a: np.append(a[:-2], [-1, a[-2] + a[-1] + 1]), "rounds/n_nodes holds -1"),
        ("n_accepted", lambda a: a + 1, "rounds/n_accepted adds up to"),
        ("posterior", lambda a: a[1:], "rounds/posterior has"),
        ("draft_counts", None, "rounds/draft_counts is missing"),
        ("tokens", None, "rounds/tokens is missing"),
    ],
)
def test_arrays_that_cannot_be_cut_into_rounds(name, change, message):
    rounds, _ = decode(SETTINGS)
    arrays = pack_rounds(rounds, 4, 6)
    old = arrays.pop(f"rounds/{name}")
    if change:
        arrays[f"rounds/{name}"] = change(old)
    with pytest.raises(InputError, match=message):
        unpack_rounds(arrays)


def test_the_digest_is_over_little_endian_float32_layer_by_layer():
    layers = [np.array([[1, 2], [3, 4]], np.float32), np.array([[5, 6], [7, 8]], np.float32)]
    assert rows_digest(layers) == hashlib.sha256(np.arange(1, 9, dtype="<f4").tobytes()).digest()
    assert rows_digest(x[1:] for x in layers) == hashlib.sha256(np.array([3, 4, 7, 8], "<f4").tobytes()).digest()


def with_tree(one: Round, **change) -> Round:
    return replace(one, tree=replace(one.tree, **{k: np.array(v) for k, v in change.items()}))


def unrelated(tree: Tree) -> tuple[int, int]:
    """(i, j): a node and a later one that does not descend from it."""
    own = [set(path.tolist()) for path in paths(tree)]
    return next((i, j) for i in range(1, tree.n) for j in range(i + 1, tree.n + 1) if i not in own[j])


def edit(array, at, value):
    out = array.copy()
    out[at] = value
    return out


#: name → (round, what is done to it, how the complaint starts)
MUTATIONS = {
    "start": (2, lambda r: replace(r, start=r.start + 1), "position = start + depth: the round starts at"),
    "root": (2, lambda r: with_tree(replace(r, root=(r.root + 1) % VOCAB)), "root: "),
    "cycle": (1, lambda r: with_tree(r, parents=edit(r.tree.parents, 2, 2)), "no cycle: node 2"),
    "order": (1, lambda r: with_tree(r, parents=edit(r.tree.parents, *unrelated(r.tree))), "parent < child: node "),
    "depth": (1, lambda r: with_tree(r, depths=edit(r.tree.depths, 4, 0)), "position = start + depth: node 4"),
    "token": (1, lambda r: with_tree(r, tokens=edit(r.tree.tokens, 1, (r.tree.tokens[1] + 1) % VOCAB)), "best-first"),
    "foreign": (1, lambda r: with_tree(r, tokens=edit(r.tree.tokens, 1, VOCAB)), "token: node 1"),
    "score": (1, lambda r: with_tree(r, scores=np.nextafter(r.tree.scores, -9)), "best-first: the tree's scores"),
    "smaller": (
        1,
        lambda r: replace(r, tree=Tree(*(a[:-1] for a in vars(r.tree).values())), posterior=r.posterior[:-1]),
        "best-first",
    ),
    "posterior": (1, lambda r: replace(r, posterior=edit(r.posterior, 0, VOCAB)), "token: posterior holds"),
    "walk": (1, lambda r: replace(r, accepted=r.accepted[:0]), "accepted path rooted"),
    "bonus": (1, lambda r: replace(r, bonus=(r.bonus + 1) % VOCAB), "bonus: "),
    "shape": (1, lambda r: replace(r, draft_ids=r.draft_ids[:, 1:]), "marginals: shapes"),
    "counts": (1, lambda r: replace(r, draft_counts=edit(r.draft_counts, 0, 7)), "marginals: depth 1 counts 7"),
    "below": (1, lambda r: replace(r, draft_counts=edit(r.draft_counts, 0, -1)), "marginals: depth 1 counts -1"),
    "twice": (1, lambda r: replace(r, draft_ids=edit(r.draft_ids, (1, 0), r.draft_ids[1, 1])), "marginals: the ids"),
    "nan": (1, lambda r: replace(r, draft_logps=edit(r.draft_logps, (2, 0), np.nan)), "marginals: depth 3 holds"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_broken_invariant_is_named(name):
    rounds, tokens = decode(SETTINGS)
    number, change, message = MUTATIONS[name]
    rounds[number] = change(rounds[number])
    found = broken(rounds, tokens)
    assert found
    assert any(problem.startswith(f"round {number}: {message}") for problem in found), found


def test_duplicate_siblings_are_named():
    rounds, tokens = decode(SETTINGS)
    tree = rounds[0].tree
    first, second = np.flatnonzero(tree.parents == 0)[:2]
    rounds[0] = with_tree(rounds[0], tokens=edit(tree.tokens, second, tree.tokens[first]))
    assert any(p.startswith("round 0: no duplicate siblings") for p in broken(rounds, tokens))


def test_a_tree_over_its_budget_is_named():
    rounds, tokens = decode(SETTINGS)
    assert "round 0: budget: 6 nodes; the budget is 5" in broken(rounds, tokens, replace(SETTINGS, budget=5))


def test_a_node_past_the_last_position_is_named():
    rounds, tokens = decode(SETTINGS)
    deep = next(i for i, one in enumerate(rounds) if max(one.tree.depths) >= 2)
    found = broken(rounds, tokens, positions=rounds[deep].start + 2)
    assert found[0].startswith(f"round {deep}: horizon: a node at depth {max(rounds[deep].tree.depths)}")


def test_accepting_less_than_the_chain_is_named():
    """The walk is checked first, so a shorter path needs a walk that agrees: choices changed with it."""
    rounds, tokens = decode(SETTINGS, wrong=0)
    from kdtr_cli.ddtree import rounds as module

    one = next(r for r in rounds if r.n_accepted > 1)
    assert 1 + module._chain_length(one) == one.n_accepted
    short = replace(one, accepted=one.accepted[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "check_walk", lambda *_: [])
        found = broken([*rounds[: rounds.index(one)], short], tokens)
    assert any("accepted(tree) >= accepted(chain)" in problem for problem in found)


def test_output_that_is_not_what_the_rounds_give_is_named():
    rounds, tokens = decode(SETTINGS)
    assert broken(rounds, edit(tokens, 9, (tokens[9] + 1) % 10))[-1].startswith("output = rounds")
    assert broken(rounds[:-1], tokens)[-1].startswith("output = rounds")
    assert broken(rounds, tokens[:-1])[-1].startswith("output = rounds")


def test_more_than_the_limit_is_named():
    rounds, tokens = decode(SETTINGS)
    found = broken(rounds, tokens, steps=STEPS - 5)
    assert found[0] == "emitted <= limit: 20 tokens; the limit is 15"
    assert any("emitted <= limit: the round starts although" in p for p in broken(rounds, tokens[:2], steps=2))


def test_going_on_after_a_stop_token_is_named():
    rounds, tokens = decode(SETTINGS)
    found = broken(rounds, tokens, stop=int(tokens[3]))
    first = tokens.tolist().index(tokens[3])
    assert found[0].startswith(f"nothing after a stop token: token {first} of 20")
    assert any("nothing after a stop token: the round starts" in problem for problem in found)


def test_output_ends_after_a_stop_token_inside_a_round():
    rounds, tokens = decode(SETTINGS, wrong=0)
    one = next(i for i, r in enumerate(rounds) if r.n_accepted > 2)
    emitted = sum(r.n_accepted for r in rounds[:one])
    stop = next(t for t in rounds[one].emitted[:-1] if t not in tokens[: emitted + 1])
    cut = tokens[: tokens.tolist().index(stop) + 1]
    assert broken(rounds[: one + 1], cut, stop=int(stop)) == []
    assert broken(rounds[: one + 1], tokens[: len(cut) + 1], stop=int(stop)) != []


def test_check_marginals_looks_at_the_counted_alone():
    ids, logps = np.array([[1, 1, 9]], np.int32), np.array([[-1, np.nan, 0]], np.float32)
    assert check_marginals(ids, logps, np.array([1]), 5) == []
    assert check_marginals(ids, logps, np.array([0]), 5) == []
    assert check_marginals(ids, logps, np.array([2]), 5) != []


def test_statistics():
    rounds, _ = decode(SETTINGS)
    lengths = [len(r.accepted) for r in rounds]
    figures = statistics(rounds, 2)
    assert figures["tau"] == pytest.approx(np.mean(lengths))
    assert sum(k * v for k, v in figures["histogram"].items()) == sum(lengths)
    assert list(figures["histogram"]) == sorted(set(lengths))
    assert (figures["rounds"], figures["forward_passes"]) == (len(rounds), len(rounds) + 2)
    assert figures["nodes"] == 6 * len(rounds)
    assert statistics([])["tau"] == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 0}, "--budget 0: 1 to 1024"),
        ({"budget": 1025}, "--budget 1025"),
        ({"block_size": 1}, "--block-size 1: 2 to 33"),
        ({"block_size": 34}, "--block-size 34"),
        ({"mode": "tree"}, "mode 'tree'"),
    ],
)
def test_settings_out_of_range(change, message):
    with pytest.raises(InputError, match=message):
        replace(SETTINGS, **change)


def test_what_settings_say():
    assert (SETTINGS.horizon, SETTINGS.nodes, SETTINGS.width(VOCAB), SETTINGS.width(4)) == (4, 6, 6, 4)
    chain = replace(CHAIN, budget=64)
    assert (chain.nodes, chain.width(VOCAB)) == (4, 1)
    assert replace(chain, budget=2).nodes == 2

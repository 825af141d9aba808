"""DDTree and chain rounds in NumPy: whatever the drafter says, the output is that of plain decoding to the bit."""

from dataclasses import replace

import numpy as np
import pytest
from drafting_cases import (
    Scripted,
    assert_plain,
    broken,
    plain,
    prompts,
    small_model,
    text_prompt,
    trained_model,
)

from kdtr_cli.ddtree.rounds import DraftSettings
from kdtr_cli.ddtree.tree import build_tree, paths
from kdtr_cli.errors import InputError
from kdtr_cli.model.prompts import Decoding
from kdtr_cli.reference import float64, rounds
from kdtr_cli.reference.drafters.ngram import NgramDrafter
from kdtr_cli.reference.drafters.replay import ReplayDrafter
from kdtr_cli.reference.drafters.synthetic import SyntheticDrafter
from kdtr_cli.reference.rounds import draft_everywhere, generate_rounds
from kdtr_cli.reference.transformer import Rows

TREE = DraftSettings("ddtree", "scripted", 8, 5)
L = 4
#: ranks of the right token at each depth
ALL_RIGHT, ALL_WRONG = (0,) * L, (None,) * L
SECOND, DEEPEST_ALONE = (1,) * L, (None, None, None, 0)


def known(model, asked, steps=24, temperature=0.0):
    results, _ = plain(model, asked, Decoding(steps, temperature=temperature))
    return {p.id: r.tokens for p, r in zip(asked, results, strict=True)}


def scripted(model, asked, ranks, steps=24, temperature=0.0):
    return Scripted(ranks, known(model, asked, steps, temperature))


class TestLossless:
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    @pytest.mark.parametrize("budget", [1, 2, 7, 8, 16, 64])
    def test_every_budget(self, budget, temperature):
        """Two prompts, the second shorter; synthetic drafts hit and miss in all ranks."""
        model, asked = small_model(), prompts(9, 4)
        decoding = Decoding(20, temperature=temperature, seed=5)
        texts = known(model, asked, 20)  # greedy: at a temperature most of it is wrong
        drafter = SyntheticDrafter(0.7, 1, 7, 512, texts)
        assert_plain(model, asked, decoding, drafter, DraftSettings("ddtree", "synthetic", budget, 8))

    def test_a_temperature_is_not_ignored(self):
        model, asked = small_model(), prompts(9)
        settings = replace(TREE, block_size=8)
        greedy, warm = (
            generate_rounds(model, asked, Decoding(20, temperature=t, seed=5), NgramDrafter(7), settings)[0]
            for t in (0.0, 0.8)
        )
        assert greedy.generated.tokens.tolist() != warm.generated.tokens.tolist()

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    @pytest.mark.parametrize("mode", ["ddtree", "chain"])
    def test_ngram(self, mode, temperature):
        """Code repeats itself: there is something to look up."""
        asked = [text_prompt("x = [0]\nx = [1]\nx = ["), text_prompt("def f(a, b):\n    return a", "1", 1)]
        decoding = Decoding(16, temperature=temperature, seed=2)
        each = assert_plain(trained_model(), asked, decoding, NgramDrafter(7), DraftSettings(mode, "ngram", 7, 8))
        assert max(one.tree.n for rounds in each for one in rounds) > 1
        assert max(one.n_accepted for rounds in each for one in rounds) > 1

    @pytest.mark.parametrize("ranks", [ALL_RIGHT, ALL_WRONG, SECOND, DEEPEST_ALONE, (0, 2, 1, 0)])
    @pytest.mark.parametrize("settings", [TREE, replace(TREE, mode="chain", budget=4), replace(TREE, budget=20)])
    def test_drafts_with_a_script(self, settings, ranks):
        model, asked = small_model(), prompts(6, 3)
        each = assert_plain(model, asked, Decoding(18), scripted(model, asked, ranks), settings)
        hits = (0, 1, 2, 3, 4) if ranks == ALL_RIGHT else None
        if hits and settings.budget == 4:
            assert [one.accepted.tolist() for one in each[0][:-1]] == [list(hits)] * (len(each[0]) - 1)

    @pytest.mark.parametrize("batch", [1, 2, 3])
    def test_a_batch_as_large_as_the_tree(self, batch):
        """Whoever mixes up rows a request with requests sees nothing but here."""
        model, asked = small_model(), prompts(*[5, 3, 7][:batch])
        drafter = scripted(model, asked, (0, 1), 10)
        assert_plain(model, asked, Decoding(10), drafter, DraftSettings("ddtree", "x", 2, 3))

    def test_a_sequence_alone_has_the_rounds_that_it_has_in_a_batch(self):
        model, asked = small_model(), prompts(9, 4, 6)
        texts = known(model, asked)
        settings = replace(TREE, block_size=8)
        together = generate_rounds(model, asked, Decoding(16), SyntheticDrafter(0.6, 1, 7, 512, texts), settings)
        for prompt, one in zip(asked, together, strict=True):
            alone = generate_rounds(model, [prompt], Decoding(16), SyntheticDrafter(0.6, 1, 7, 512, texts), settings)[0]
            assert alone.final_cache_digest == one.final_cache_digest
            for a, b in zip(alone.rounds, one.rounds, strict=True):
                assert (a.start, a.bonus, a.cache_digest) == (b.start, b.bonus, b.cache_digest)
                assert a.posterior.tolist() == b.posterior.tolist()
                assert a.tree.tokens.tolist() == b.tree.tokens.tolist()


class TestAcceptance:
    def test_all_wrong_is_one_token_a_round(self):
        model, asked = small_model(), prompts(6)
        [each] = assert_plain(model, asked, Decoding(9), scripted(model, asked, ALL_WRONG), TREE)
        assert [one.n_accepted for one in each] == [1] * 8

    def test_all_right_is_a_block_a_round(self):
        model, asked = small_model(), prompts(6)
        [each] = assert_plain(model, asked, Decoding(16), scripted(model, asked, ALL_RIGHT), replace(TREE, budget=32))
        assert [one.n_accepted for one in each] == [L + 1] * 3

    def test_right_only_in_the_second_child(self):
        """A chain accepts nothing here; the tree goes down its second branch, over rows with gaps, several rounds."""
        model, asked = small_model(), prompts(6)
        drafter = scripted(model, asked, SECOND)
        [each] = assert_plain(model, asked, Decoding(14), drafter, replace(TREE, budget=60))
        assert all(one.n_accepted > 1 for one in each)
        assert all((np.diff(one.accepted) > 1).any() for one in each)
        [chain] = assert_plain(model, asked, Decoding(14), drafter, replace(TREE, mode="chain", budget=4))
        assert all(one.n_accepted == 1 for one in chain)

    def test_right_only_at_the_deepest_node(self):
        """The last node popped is the right one, at full depth: its path is scattered over all rows."""
        model, asked = small_model(), prompts(6)
        ranks = (0, 0, 0, 1)
        script = scripted(model, asked, ranks)
        ids, logps, counts = Scripted(ranks, script.known), None, None
        ids.reset(0, asked[0])
        ids.extend(0, asked[0].ids, None)
        marginals = ids.marginals(0, 6, int(script.known["p0"][0]), 16)
        logps, counts = marginals[1], marginals[2]
        budget = 1
        while True:  # the smallest budget whose last node is the right path's end
            tree = build_tree(0, marginals[0], logps, counts, budget)
            if paths(tree)[-1].size == L + 1 and tree.tokens[-1] == marginals[0][3, 1]:
                break
            budget += 1
        [each] = assert_plain(model, asked, Decoding(11), script, replace(TREE, budget=budget))
        assert each[0].n_accepted == L + 1
        assert each[0].accepted[-1] == budget == each[0].tree.n

    def test_a_right_token_below_wrong_ones_is_not_accepted(self):
        model, asked = small_model(), prompts(6)
        [each] = assert_plain(
            model, asked, Decoding(8), scripted(model, asked, DEEPEST_ALONE), replace(TREE, budget=60)
        )
        assert [one.n_accepted for one in each] == [1] * 7

    def test_a_tree_accepts_at_least_what_the_chain_in_it_does(self):
        """At equal roots the tree that contains the chain never loses to it (the text is the same for both)."""
        model, asked = small_model(), prompts(6)
        drafter = SyntheticDrafter(0.6, 4, 4, 512, known(model, asked))
        settings = replace(TREE, budget=40)
        [tree] = generate_rounds(model, asked, Decoding(20), drafter, settings)
        [chain] = generate_rounds(model, asked, Decoding(20), drafter, replace(TREE, mode="chain", budget=4))
        chains = {one.start: one for one in chain.rounds}
        both = [(one, chains[one.start]) for one in tree.rounds if one.start in chains]
        assert len(both) > 2
        contained = 0
        for one, other in both:
            spine = {tuple(one.tree.tokens[p].tolist()) for p in paths(one.tree)}
            if tuple(other.tree.tokens.tolist()) in spine:
                contained += 1
                assert one.n_accepted >= other.n_accepted
        assert contained


class TestEnds:
    def decode(self, stop_at: int | None, steps: int = 18, ranks=ALL_RIGHT):
        """Rounds of 5 tokens after the first one: outputs 1-5, 6-10 …; the stop id is the token at stop_at."""
        model, asked = small_model(), prompts(6)
        texts = known(model, asked)
        stops = () if stop_at is None else (int(texts["p0"][stop_at]),)
        if stop_at:
            assert stops[0] not in texts["p0"][:stop_at]  # the first time that it comes up
        decoding = Decoding(steps, stop_ids=stops)
        [each] = assert_plain(model, asked, decoding, scripted(model, asked, ranks), replace(TREE, budget=32))
        result = plain(model, asked, decoding)[0][0]
        return each, result

    def test_a_stop_token_as_the_first_root(self):
        each, result = self.decode(0)
        assert (each, len(result.tokens), result.finish_reason) == ([], 1, "stop")

    def test_a_stop_token_in_the_middle_of_the_accepted_path(self):
        each, result = self.decode(8)
        assert (len(each), len(result.tokens), result.finish_reason) == (2, 9, "stop")
        assert each[-1].n_accepted == L + 1  # the walk itself does not know of stop tokens

    def test_a_stop_token_as_the_bonus(self):
        each, result = self.decode(5)
        assert (len(each), len(result.tokens), result.finish_reason) == (1, 6, "stop")
        assert each[-1].bonus == result.tokens[-1]

    def test_a_stop_token_that_was_a_later_root(self):
        each, result = self.decode(5, ranks=ALL_WRONG)
        assert (len(each), len(result.tokens), result.finish_reason) == (5, 6, "stop")

    def test_ignore_eos_goes_on(self):
        model, asked = small_model(), prompts(6)
        stop = int(known(model, asked)["p0"][3])
        decoding = Decoding(12, stop_ids=(stop,), ignore_eos=True)
        [each] = assert_plain(model, asked, decoding, scripted(model, asked, ALL_RIGHT), TREE)
        assert sum(one.n_accepted for one in each) >= 11

    @pytest.mark.parametrize("steps", [1, 2, 6, 7, 8, 11])
    def test_a_limit_inside_the_accepted_path(self, steps):
        each, result = self.decode(None, steps)
        assert len(result.tokens) == steps
        assert len(each) == -(-(steps - 1) // 5)

    @pytest.mark.parametrize("steps", [6, 9])
    def test_the_last_position_of_the_model_bounds_the_tree(self, steps):
        model = small_model(max_position_embeddings=6 + steps - 1, positions=6 + steps - 1)
        asked = prompts(6)
        texts = known(small_model(), asked)
        [each] = assert_plain(model, asked, Decoding(steps), Scripted(ALL_RIGHT, texts), replace(TREE, budget=32))
        assert max(one.start + max(one.tree.depths) for one in each) == 6 + steps - 2

    def test_a_drafter_without_a_number_is_one_clear_error(self):
        model, asked = small_model(), prompts(6)
        drafter = scripted(model, asked, ALL_RIGHT)
        good = drafter.marginals

        def bad(slot, start, root, k):
            ids, logps, counts = good(slot, start, root, k)
            logps[2, 1] = np.nan
            return ids, logps, counts

        drafter.marginals = bad
        with pytest.raises(InputError, match="depth 3, rank 1 is nan"):
            generate_rounds(model, asked, Decoding(9), drafter, TREE)


class TestNotBlind:
    """What the checks above rest on must be able to fail."""

    def run(self):
        model, asked = small_model(), prompts(6)
        return assert_plain(model, asked, Decoding(14), scripted(model, asked, SECOND), replace(TREE, budget=60))

    @pytest.mark.parametrize("error", ["none", "prefix", "off by one"])
    def test_a_wrong_compaction_is_seen(self, monkeypatch, error):
        def wrong(rows, start, accepted):
            if error == "prefix":
                rows[start : start + len(accepted)] = rows[start + np.arange(len(accepted))]
            elif error == "off by one":
                rows[start + 1 : start + 1 + len(accepted)] = rows[start + accepted]

        self.run()
        monkeypatch.setattr(rounds, "compact", wrong)
        with pytest.raises(AssertionError):
            self.run()

    def test_a_row_that_sees_other_branches_is_seen(self, monkeypatch):
        """A causal triangle in place of the tree's visibility: every row sees all rows before it."""

        def wrong(tree):
            return [np.arange(i - d, i + 1) for i, d in enumerate(tree.depths)]

        monkeypatch.setattr(rounds, "paths", wrong)
        with pytest.raises(AssertionError):
            self.run()

    @pytest.mark.parametrize("shift", [1, -1])
    def test_positions_off_by_one_are_seen(self, monkeypatch, shift):
        made = rounds._tree_rows

        def wrong(starts, trees, slots):
            rows = made(starts, trees, slots)
            return replace(rows, positions=rows.positions + shift)

        monkeypatch.setattr(rounds, "_tree_rows", wrong)
        with pytest.raises(AssertionError):
            self.run()

    def test_check_rounds_sees_a_changed_round(self):
        model, asked = small_model(), prompts(6)
        [one] = generate_rounds(model, asked, Decoding(9), scripted(model, asked, SECOND), TREE)
        one.rounds[1] = replace(one.rounds[1], start=one.rounds[1].start + 1)
        assert broken(model, asked[0], Decoding(9), TREE, one)


class TestRows:
    """A node's logits have the bits of its path fed one token after another, at any width and place."""

    @pytest.mark.parametrize("start", [0, 1, 37, 250, 254, 255, 256])
    def test_a_tree_across_any_position(self, start):
        """Around position 256 a chunk of the attention ends inside the tree."""
        model = small_model(layers=1, positions=300)
        rng = np.random.default_rng(start)
        context = rng.integers(0, 512, start).astype(np.int32)
        ids = np.stack([rng.permutation(512)[:4] for _ in range(6)]).astype(np.int32)
        logps = -np.sort(rng.exponential(size=(6, 4))).astype(np.float32)
        tree = build_tree(int(rng.integers(512)), ids, logps, np.full(6, 4, np.int32), 13)

        filled = model.cache([300])
        if start:
            model.forward(Rows(context, np.zeros(start, np.int32), np.arange(start)), filled)

        def fed():
            cache = model.cache([300])
            for layer, full in zip(cache.rows, filled.rows, strict=True):
                layer[0][:] = full[0]
            return cache

        rows = rounds._tree_rows([start], [tree], [0])
        wide = model.logits(model.forward(rows, fed()))
        for i, path in enumerate(paths(tree)):
            cache = fed()
            for d, node in enumerate(path):
                row = Rows(tree.tokens[[node]], np.zeros(1, np.int32), np.array([start + d]))
                alone = model.logits(model.forward(row, cache))
            assert alone[0].tobytes() == wide[i].tobytes(), i

    def test_rows_with_and_without_a_path_in_one_run(self):
        """A chain may be fed plainly or as a tree of one branch, also both in one pass."""
        model = small_model(layers=1, positions=40)
        tokens = np.arange(5, dtype=np.int32) + 9
        slots, positions = np.zeros(5, np.int32), np.arange(5)
        plain_hidden = model.forward(Rows(tokens, slots, positions), model.cache([8]))
        some = [None, None, np.array([1, 2]), None, np.arange(5)]
        for chosen in (some, [np.arange(i + 1) for i in range(5)], [None] * 5):
            hidden = model.forward(Rows(tokens, slots, positions, positions, chosen), model.cache([8]))
            assert hidden.tobytes() == plain_hidden.tobytes()

    def test_keys_are_found_by_position_wherever_they_lie(self):
        """A chain written to rows in any order gives the bits of the chain in order."""
        model = small_model(layers=2, positions=40)
        tokens = np.arange(6, dtype=np.int32) * 7
        slots, positions = np.zeros(6, np.int32), np.arange(6)
        straight = model.forward(Rows(tokens, slots, positions), model.cache([9]))
        places = np.array([5, 2, 8, 0, 7, 3])
        trail = [places[: i + 1] for i in range(6)]
        assert model.forward(Rows(tokens, slots, positions, places, trail), model.cache([9])).tobytes() == (
            straight.tobytes()
        )

    def test_in_float64_too(self):
        model = small_model(layers=2, ops=float64)
        tree = build_tree(
            3,
            np.array([[5, 6], [7, 8]], np.int32),
            np.array([[-0.5, -0.6], [-0.5, -0.6]], np.float32),
            np.array([2, 2], np.int32),
            6,
        )
        cache = model.cache([16])
        model.forward(Rows(np.array([1, 2], np.int32), np.zeros(2, np.int32), np.arange(2)), cache)
        wide = model.logits(model.forward(rounds._tree_rows([2], [tree], [0]), cache))
        for i, path in enumerate(paths(tree)):
            ids = np.append([1, 2], tree.tokens[path]).astype(np.int32)
            rows = Rows(ids, np.zeros(len(ids), np.int32), np.arange(len(ids)))
            alone = model.logits(model.forward(rows, model.cache([16])))[-1]
            np.testing.assert_allclose(wide[i], alone, rtol=0, atol=1e-12)


class TestEverywhere:
    def test_drafts_at_every_output_position_replay_the_rounds(self):
        """Stored marginals play the very rounds again, and past their end a round has a root alone."""
        model, asked, decoding = small_model(), prompts(9, 4), Decoding(16)
        asked = [replace(p, ids=np.tile(p.ids[:3], 3)) for p in asked]
        settings = DraftSettings("ddtree", "ngram", 8, 6)
        drafter = NgramDrafter(5)
        drafted = generate_rounds(model, asked, decoding, drafter, settings)
        outputs = [one.generated.tokens for one in drafted]
        everywhere = draft_everywhere(drafter, asked, outputs, 12)
        assert [part.shape for part in everywhere[0]] == [(16, 5, 12), (16, 5, 12), (16, 5)]
        stored = {p.id: marginals for p, marginals in zip(asked, everywhere, strict=True)}
        again = generate_rounds(model, asked, decoding, ReplayDrafter(5, stored), settings)
        for one, two in zip(drafted, again, strict=True):
            assert [r.tree.tokens.tolist() for r in one.rounds] == [r.tree.tokens.tolist() for r in two.rounds]
            assert [r.tree.scores.tobytes() for r in one.rounds] == [r.tree.scores.tobytes() for r in two.rounds]
        short = {name: tuple(part[:7] for part in marginals) for name, marginals in stored.items()}
        rest = assert_plain(model, asked, decoding, ReplayDrafter(5, short), settings)
        late = [one for one in rest[0] if one.start - len(asked[0].ids) >= 7]
        assert late
        assert all(one.tree.n == 0 and one.n_accepted == 1 for one in late)

    def test_replay_with_a_larger_budget_than_was_stored(self):
        model, asked, decoding = small_model(), prompts(6), Decoding(12)
        drafter = SyntheticDrafter(0.7, 1, 4, 512, known(model, asked))
        settings = DraftSettings("ddtree", "x", 30, 5)
        drafted = generate_rounds(model, asked, decoding, drafter, settings)
        stored = {"p0": draft_everywhere(drafter, asked, [drafted[0].generated.tokens], 2)[0]}
        [each] = assert_plain(model, asked, decoding, ReplayDrafter(4, stored), settings)
        assert max(one.tree.n for one in each) == 30 == 2 + 4 + 8 + 16
        assert all((one.draft_counts == 2).all() for one in each)

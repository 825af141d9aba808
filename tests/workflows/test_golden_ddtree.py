"""A golden with rounds: what it stores, that it is plain decoding's output, and that broken rounds are never taken."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.writer import BundleWriter
from kdtr_cli.ddtree.rounds import rows_digest
from kdtr_cli.ddtree.tree import MAX_BUDGET
from kdtr_cli.errors import DeviceError, InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import parse_config
from kdtr_cli.model.dflash import open_drafter
from kdtr_cli.model.source import open_model
from kdtr_cli.reference import exact
from kdtr_cli.reference import rounds as loop
from kdtr_cli.reference.transformer import Model, Rows
from kdtr_cli.workflows import golden_rounds
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.golden_rounds import DraftOptions
from kdtr_cli.workflows.inspect import describe
from kdtr_cli.workflows.prompts import PromptOptions
from kdtr_cli.workflows.rounds import broken_rounds, stored_rounds
from kdtr_cli.workflows.verify import verify_bundle

FIXTURES = Path(__file__).parents[2] / "fixtures"
DRAFTER = str(FIXTURES / "tiny-kimi-dflash")
TEXTS = ("def read(path):\n    ", "class Foo")


def trained(output: Path, drafting: DraftOptions | None, steps: int = 14, **more):
    prompts = PromptOptions(texts=TEXTS)
    return make_golden(
        GoldenOptions(
            str(FIXTURES / "tiny-kimi"), output, prompts, steps, embed_weights=False, drafting=drafting, **more
        )
    )


def tiny(output: Path, drafting: DraftOptions | None, steps: int = 8, **more):
    return make_golden(
        GoldenOptions("tiny", output, PromptOptions(ids=("1 2 3 1 2 3",)), steps, drafting=drafting, **more)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("goldens")


@pytest.fixture(scope="module")
def golden(folder) -> Path:
    trained(folder / "tree.h5", DraftOptions("ddtree", DRAFTER, 8))
    return folder / "tree.h5"


@pytest.fixture(scope="module")
def small(folder) -> Path:
    """The preset with prompt look-up: its rounds have trees, and it is made in a moment."""
    tiny(folder / "small.h5", DraftOptions("ddtree", "synthetic:0.7", 6, 5))
    return folder / "small.h5"


class TestContent:
    def test_the_manifest_says_how_it_was_drafted(self, golden):
        with open_bundle(golden) as bundle:
            assert bundle.manifest["decoding"]["mode"] == "ddtree"
            drafting = bundle.manifest["drafting"]
            sha256 = drafting["drafter_sha256"]
            text = Path(DRAFTER, "config.json").read_text()
            digest = hashlib.sha256(text.encode())
            for name, value in sorted(
                open_drafter(DRAFTER, parse_config(json.loads(bundle.config_text))).weights.items()
            ):
                digest.update(f"{name} float32 {','.join(map(str, value.shape))}\n".encode() + value.tobytes())
            assert sha256 == digest.hexdigest()
            assert {k: drafting[k] for k in ("drafter", "budget", "block_size", "mode", "horizon")} == {
                "drafter": f"dflash:{sha256}",
                "budget": 8,
                "block_size": 8,
                "mode": "ddtree",
                "horizon": 7,
            }

    def test_tokens_and_logits_are_those_of_a_golden_without_rounds(self, golden, folder):
        trained(folder / "plain.h5", None)
        with open_bundle(golden) as one, open_bundle(folder / "plain.h5") as two:
            assert "drafting" not in two.manifest
            for a, b in zip(one.sequences, two.sequences, strict=True):
                assert a.tokens.tolist() == b.tokens.tolist()
                for name in b.array_names():
                    assert a.verified_sha256(name) == b.verified_sha256(name)

    def test_every_round_is_there_and_whole(self, golden):
        with open_bundle(golden) as bundle:
            for sequence in bundle.sequences:
                rounds = stored_rounds(bundle, sequence)
                assert sum(one.n_accepted for one in rounds) + 1 >= len(sequence.tokens)
                assert broken_rounds(bundle, sequence) == []
                assert sequence.shape("rounds/draft_top_ids") == (len(rounds), 7, 8)
                assert sequence.shape("rounds/cache_digest") == (len(rounds), 32)
                assert sequence.shape("rounds/final_cache_digest") == (32,)
        assert verify_bundle(golden).ok

    def test_drafts_of_every_position_hold_those_of_the_rounds(self, golden):
        with open_bundle(golden) as bundle:
            for sequence in bundle.sequences:
                ids, logps = sequence.array("drafts/top_ids"), sequence.array("drafts/top_logps")
                assert ids.shape == logps.shape == (len(sequence.tokens), 7, 256)
                assert (sequence.array("drafts/counts") == 256).all()
                for one in stored_rounds(bundle, sequence):
                    t = one.start - len(sequence.prompt)
                    assert sequence.tokens[t] == one.root
                    assert one.draft_ids.tolist() == ids[t, :, :8].tolist()
                    assert one.draft_logps.tobytes() == logps[t, :, :8].tobytes()

    def test_a_round_digest_is_that_of_its_rows_in_plain_decoding(self, small):
        """The rows that a round committed, as plain prefill of the same text leaves them."""
        opened = open_model("tiny")
        model = Model(opened.config, opened.weights, Choices(), 64, exact)
        with open_bundle(small) as bundle:
            [sequence] = bundle.sequences
            rounds = stored_rounds(bundle, sequence)
            text = np.concatenate([sequence.prompt, sequence.tokens[:1], *(one.emitted for one in rounds)])[:-1]
            cache = model.cache([len(text)])
            model.forward(Rows(text, np.zeros(len(text), np.int32), np.arange(len(text))), cache)
            for one in rounds:
                rows = slice(one.start, one.start + one.n_accepted)
                assert one.cache_digest == rows_digest(layer[0][rows] for layer in cache.rows)
            end = len(sequence.prompt) + len(sequence.tokens) - 1
            final = rows_digest(layer[0][:end] for layer in cache.rows)
            assert sequence.array("rounds/final_cache_digest").tobytes() == final

    @pytest.mark.parametrize("drafter", ["ngram", "synthetic:0.7"])
    @pytest.mark.parametrize("mode", ["ddtree", "chain"])
    def test_drafters_without_weights(self, tmp_path, drafter, mode):
        summary = tiny(tmp_path / "g.h5", DraftOptions(mode, drafter), temperature=0.8)
        with open_bundle(tmp_path / "g.h5") as bundle:
            drafting = bundle.manifest["drafting"]
            assert (drafting["drafter"], drafting["drafter_sha256"], drafting["mode"]) == (drafter, None, mode)
            assert (drafting["block_size"], drafting["budget"]) == (8, 7)
            assert bundle.sequences[0].shape("rounds/draft_top_ids")[2] == (1 if mode == "chain" else 7)
        assert summary.settings.mode == mode
        assert verify_bundle(tmp_path / "g.h5").problems == ()

    def test_one_token_needs_no_round(self, tmp_path):
        tiny(tmp_path / "g.h5", DraftOptions("ddtree", "ngram"), steps=1)
        with open_bundle(tmp_path / "g.h5") as bundle:
            [sequence] = bundle.sequences
            assert stored_rounds(bundle, sequence) == []
            assert sequence.shape("drafts/top_ids") == (1, 7, 256)
        assert verify_bundle(tmp_path / "g.h5").ok
        assert describe(tmp_path / "g.h5")["rounds"]["tau"] == 0.0

    def test_the_same_bytes_again(self, small, tmp_path):
        tiny(tmp_path / "again.h5", DraftOptions("ddtree", "synthetic:0.7", 6, 5))
        assert (tmp_path / "again.h5").read_bytes() == small.read_bytes()

    def test_statistics(self, golden):
        document = describe(golden)
        figures = document["rounds"]
        assert figures["tau"] > 1.5
        assert sum(int(k) * v for k, v in figures["histogram"].items()) == pytest.approx(
            figures["tau"] * figures["rounds"]
        )
        assert figures["forward_passes"] == figures["rounds"] + 2
        assert json.loads(json.dumps(document))["drafting"]["budget"] == 8


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "more", "message"),
        [
            (DraftOptions("ddtree", "ngram"), {"exact": False}, "--no-exact: rounds are made in the exact arithmetic"),
            (DraftOptions("ddtree", "replay"), {}, "--drafter replay: it replays the drafts of a golden"),
            (DraftOptions("ddtree", "absent"), {}, "--drafter absent"),
            (DraftOptions("ddtree", "synthetic:2"), {}, "--drafter synthetic:2"),
            (DraftOptions("ddtree", "ngram", 0), {}, "--budget 0"),
            (DraftOptions("ddtree", "ngram", MAX_BUDGET + 1), {}, "--budget 1025"),
            (DraftOptions("ddtree", "ngram", 8, 34), {}, "--block-size 34"),
            (DraftOptions("ddtree", DRAFTER, 8), {}, "hidden_size is 192; allowed: 128, that of the target"),
        ],
    )
    def test_before_anything_is_written(self, tmp_path, options, more, message):
        with pytest.raises(InputError, match=message):
            tiny(tmp_path / "g.h5", options, **more)
        assert list(tmp_path.iterdir()) == []

    def test_a_block_larger_than_the_drafters(self, tmp_path):
        with pytest.raises(InputError, match="--block-size 9"):
            trained(tmp_path / "g.h5", DraftOptions("ddtree", DRAFTER, 8, 9))


class TestInvariants:
    def test_a_loop_that_is_wrong_ends_as_an_internal_failure(self, tmp_path, monkeypatch):
        """Without compaction the second round reads a rejected row, and the golden is not written."""
        monkeypatch.setattr(loop, "compact", lambda rows, start, accepted: None)
        with pytest.raises(DeviceError, match=r"internal: sequence '0': output = AR output: the .* at"):
            trained(tmp_path / "g.h5", DraftOptions("ddtree", DRAFTER, 8))
        assert list(tmp_path.iterdir()) == []

    def test_a_cache_that_differs_is_found(self, tmp_path, monkeypatch):
        monkeypatch.setattr(loop, "rows_digest", lambda layers: hashlib.sha256(b"other").digest())
        with pytest.raises(DeviceError, match="cache after compaction = AR cache"):
            tiny(tmp_path / "g.h5", DraftOptions("ddtree", "ngram"))

    def test_rounds_that_break_an_invariant_are_not_written(self, tmp_path, monkeypatch):
        monkeypatch.setattr(golden_rounds, "check_rounds", lambda *_, **__: ["round 0: bonus: wrong"])
        with pytest.raises(DeviceError, match="internal: sequence '0': round 0: bonus: wrong"):
            tiny(tmp_path / "g.h5", DraftOptions("ddtree", "ngram"))


def tampered(golden: Path, path: Path, change=None, drafting=None) -> Path:
    """A copy with arrays changed by change(dict of arrays) and manifest entries replaced; its digests are right."""
    with open_bundle(golden) as bundle, BundleWriter(path, "golden", True) as writer:
        writer.add_config(bundle.config_text)
        for sequence in bundle.sequences:
            arrays = {name: sequence.array(name).copy() for name in sequence.array_names()}
            if change:
                change(arrays)
            writer.add_sequence(
                SequenceData(
                    sequence.id, sequence.stream, sequence.prompt, sequence.tokens, sequence.finish_reason, arrays
                )
            )
        keys = ("datasets", "sequences", "kind", "schema")
        manifest = {k: v for k, v in bundle.manifest.items() if k not in keys}
        manifest["drafting"] = {**manifest["drafting"], **(drafting or {})}
        manifest["model"] = {**manifest["model"], "embedded": False}
        writer.finish(manifest)
    return path


def put(name: str, at, value):
    def change(arrays):
        arrays[f"rounds/{name}"][at] = value

    return change


def siblings(arrays):
    parents, tokens = arrays["rounds/parents"], arrays["rounds/tokens"]
    first, second = np.flatnonzero(parents[: arrays["rounds/n_nodes"][0]] == 0)[:2]
    tokens[second] = tokens[first]


def drop(name):
    return lambda arrays: arrays.pop(f"rounds/{name}")


MALFORMED = {
    "a node that is its own parent": (put("parents", 1, 2), "round 0: no cycle: node 2 is its own ancestor"),
    "a cycle of two": (put("parents", slice(0, 2), [2, 1]), "round 0: no cycle: node 1 is its own ancestor"),
    "a parent after its child": (put("parents", 0, 6), "round 0: parent < child: node 1 stands before its parent 6"),
    "a parent that is not there": (put("parents", 0, 99), "round 0: parent: node 1 has parent 99; needed: 0 to 6"),
    "duplicate siblings": (siblings, "round 0: no duplicate siblings"),
    "another depth": (put("depths", 0, 2), "round 0: position = start \\+ depth: node 1 has depth 2"),
    "another score": (put("scores", 3, -0.125), "round 0: best-first: the tree's scores"),
    "another token": (put("tokens", 3, 77), "round 0: (best-first: the tree's tokens|no duplicate)"),
    "a token outside": (put("tokens", 3, 512), "round 0: token: node 4 has token 512; the vocabulary is 0 to 511"),
    "no root in the path": (put("accepted", 0, 1), "round 0: accepted path rooted"),
    "another bonus": (put("bonus", 0, 5), "round 0: bonus: 5 is stored"),
    "another start": (put("start", 0, 7), "round 0: position = start \\+ depth: the round starts at 7; 6 is due"),
    "another root": (put("root", 0, 5), "round 0: root: 5; the token chosen last is"),
    "no number": (put("draft_top_logps", (0, 0, 0), np.nan), "round 0: marginals: depth 1 holds a log-probability"),
    "more candidates than there are": (put("draft_counts", (0, 0), 7), "round 0: marginals: depth 1 counts 7"),
    "one node too many": (put("n_nodes", 0, 7), "rounds/n_nodes adds up to"),
    "less than nothing": (put("n_accepted", slice(0, 2), [-1, 9]), "rounds/n_accepted"),
    "no posterior": (drop("posterior"), "rounds/posterior is missing; rounds are stored whole or not at all"),
}


class TestMalformed:
    @pytest.mark.parametrize("name", MALFORMED)
    def test_broken_rounds_have_their_reason(self, small, tmp_path, name):
        """Every digest is right, so nothing but the checks of the rounds sees it; verify and inspect name it."""
        change, reason = MALFORMED[name]
        path = tampered(small, tmp_path / "bad.h5", change)
        [problem] = verify_bundle(path).problems
        assert re.match(rf"{re.escape(str(path))}: sequence '0': ({reason})", problem), problem
        with pytest.raises(InputError, match=reason):
            describe(path, round_number=0)

    def test_more_nodes_than_the_budget(self, small, tmp_path):
        path = tampered(small, tmp_path / "bad.h5", drafting={"budget": 5})
        assert "round 0: budget: 6 nodes; the budget is 5" in verify_bundle(path).problems[0]

    def test_drafts_that_are_none(self, small, tmp_path):
        def change(arrays):
            arrays["drafts/top_ids"][3, 1, 1] = arrays["drafts/top_ids"][3, 1, 0]

        path = tampered(small, tmp_path / "bad.h5", change)
        assert "drafts of position 3: marginals: the ids of depth 2" in verify_bundle(path).problems[0]

    def test_ids_of_drafts_outside_the_vocabulary(self, small, tmp_path):
        def change(arrays):
            arrays["drafts/top_ids"][0, 0, 0] = 512

        with pytest.raises(InputError, match="drafts/top_ids holds token id 512"):
            tampered(small, tmp_path / "bad.h5", change)

    def test_a_manifest_that_does_not_say_how(self, small, tmp_path):
        path = tampered(small, tmp_path / "ok.h5")
        assert verify_bundle(path).ok
        with pytest.raises(InputError, match="mode 'x'"):
            broken_rounds_of(tampered(small, tmp_path / "bad.h5", drafting={"mode": "x"}))


def broken_rounds_of(path: Path) -> list[str]:
    with open_bundle(path) as bundle:
        return broken_rounds(bundle, bundle.sequences[0])

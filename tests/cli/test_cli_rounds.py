"""`kdtr golden --ddtree` and `kdtr inspect --round`: options, what is printed, and with what they leave."""

import io
import json
from pathlib import Path

import pytest
from invoke import kdtr
from rich.console import Console

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.cli.round_tree import render_round
from kdtr_cli.reference import rounds as loop
from kdtr_cli.workflows.rounds import describe_round, stored_rounds

FIXTURES = Path(__file__).parents[2] / "fixtures"
MODEL, DRAFTER = FIXTURES / "tiny-kimi", FIXTURES / "tiny-kimi-dflash"


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("g") / "g.h5"
    made = kdtr(
        "golden", MODEL, "-o", path, "--prompt-text", "def read(path):\n    ", "--prompt-ids", "7 8 9", "--steps", 12,
        "--ddtree", "--drafter", DRAFTER, "--budget", 8, "--no-embed-weights",
    )  # fmt: skip
    assert made.exit_code == 0, made.stderr
    last = made.stdout.splitlines()[-1]
    assert " mode=ddtree drafter=dflash budget=8 tau=" in last
    return path


class TestGolden:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--drafter", "ngram"], "--drafter needs --ddtree or --chain"),
            (["--budget", 3], "--budget needs --ddtree or --chain"),
            (["--block-size", 3], "--block-size needs --ddtree or --chain"),
            (["--ddtree"], "--ddtree and --chain need --drafter"),
            (["--chain", "--budget", 3], "--ddtree and --chain need --drafter"),
            (["--ddtree", "--drafter", "ngram", "--budget", 0], "--budget 0: 1 to 1024 nodes"),
            (["--ddtree", "--drafter", "ngram", "--no-exact"], "--no-exact: rounds are made in the exact arithmetic"),
        ],
    )
    def test_options_that_do_not_fit(self, tmp_path, options, message):
        result = kdtr("golden", "tiny", "-o", tmp_path / "g.h5", *options)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"kdtr: error: {message}")
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / "g.h5").exists()

    @pytest.mark.parametrize("modes", [["--chain"], ["--ddtree", "--chain"]])
    def test_a_chain(self, tmp_path, modes):
        path = tmp_path / "g.h5"
        result = kdtr("golden", "tiny", "-o", path, "--steps", 5, *modes, "--drafter", "synthetic:1", "--block-size", 4)
        assert result.exit_code == 0, result.stderr
        assert "mode=chain drafter=synthetic" in result.stdout
        with open_bundle(path) as bundle:
            assert bundle.manifest["decoding"]["mode"] == "chain"
            [one] = stored_rounds(bundle, bundle.sequences[0])
        assert (one.tree.parents.tolist(), one.n_accepted) == ([-1, 0, 1, 2], 4)

    def test_a_loop_that_is_wrong_is_exit_code_3(self, tmp_path, monkeypatch):
        monkeypatch.setattr(loop, "_choose", lambda logits, *_: logits.argmin(-1))
        result = kdtr("golden", "tiny", "-o", tmp_path / "g.h5", "--steps", 4, "--ddtree", "--drafter", "ngram")
        assert result.exit_code == 3
        assert result.stderr.startswith("kdtr: error: internal: sequence '0': output = AR output: the tokens")
        assert list(tmp_path.iterdir()) == []


class TestInspect:
    def test_statistics_stand_in_the_overview(self, golden):
        lines = kdtr("inspect", golden).stdout.splitlines()
        [figures] = [line for line in lines if line.startswith("rounds ")]
        assert " tau=" in figures
        assert " forward_passes=" in figures
        assert any(line.startswith("drafting ") and "budget=8" in line for line in lines)

    def test_a_tree_in_plain_text(self, golden):
        with open_bundle(golden) as bundle:
            rounds = stored_rounds(bundle, bundle.sequences[1])
        number = max(range(len(rounds)), key=lambda i: rounds[i].n_accepted)
        one = rounds[number]
        result = kdtr("inspect", golden, "--sequence", 1, "--round", number)
        assert result.exit_code == 0, result.stderr
        head, root, *rest = result.stdout.splitlines()
        assert head == (
            f"round {number} of {len(rounds)}, sequence 1: start={one.start} nodes={one.tree.n} "
            f"accepted={one.n_accepted} bonus={one.bonus}"
        )
        assert root.startswith(f"[0] {one.root} root at {one.start} accepted")
        assert result.stdout.isascii()
        assert len(rest) == one.tree.n
        above, order = [0], []
        for line in rest:
            before, _, after = line.partition("[")
            node = int(after.split("]")[0])
            above = [*above[: len(before) // 4], node]  # the last node of each depth so far
            assert above[-2] == one.tree.parents[node]
            order.append(node)
            assert f"] {one.tree.tokens[node]} score={one.tree.scores[node]:.4f}" in line
            assert (" accepted" in line) == (node in one.accepted.tolist())
            assert (f"-> bonus {one.bonus}" in line) == (node == one.accepted[-1])
        for parent in range(one.tree.n + 1):
            own = [node for node in order if one.tree.parents[node] == parent]
            assert own == sorted(own)  # the better sibling first

    def test_tokens_as_text(self, golden):
        result = kdtr("inspect", golden, "--round", 0, "--tokenizer", MODEL)
        assert result.exit_code == 0, result.stderr
        assert "bonus=" in result.stdout
        assert all('"' in line for line in result.stdout.splitlines())

    def test_on_a_terminal_the_path_is_coloured_and_the_lines_are_drawn(self, golden):
        with open_bundle(golden) as bundle:
            document = describe_round(bundle, bundle.sequences[0], 0)
        out = io.StringIO()
        render_round(Console(file=out, force_terminal=True, color_system="standard", width=200), document)
        assert "├── " in out.getvalue()
        assert out.getvalue().count("\x1b[1;32m") == len(document["accepted"])

    def test_json(self, golden):
        document = json.loads(kdtr("inspect", golden, "--round", 0, "--format", "json").stdout)
        shown = document["round"]
        assert (shown["sequence"], shown["number"], shown["accepted"][0]) == ("0", 0, 0)
        assert shown["nodes"][0]["parent"] == -1
        assert all(node["position"] > shown["start"] for node in shown["nodes"][1:])
        assert document["sequence"] is None
        assert json.loads(kdtr("inspect", golden, "--format", "json").stdout)["round"] is None

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--round", 99], "no round 99 in sequence '0'; it has "),
            (["--round", 0, "--sequence", "x"], "no sequence 'x'"),
            (["--tokenizer", MODEL], "--tokenizer needs --round"),
            (["--round", 0, "--tokenizer", DRAFTER], "no tokenizer.json"),
        ],
    )
    def test_what_is_not_there(self, golden, options, message):
        result = kdtr("inspect", golden, *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr

    def test_a_bundle_without_rounds(self, tmp_path):
        assert kdtr("golden", "tiny", "-o", tmp_path / "g.h5", "--steps", 2).exit_code == 0
        result = kdtr("inspect", tmp_path / "g.h5", "--round", 0)
        assert result.exit_code == 2
        assert "has no rounds; it was decoded without a drafter" in result.stderr
        document = json.loads(kdtr("inspect", tmp_path / "g.h5", "--format", "json").stdout)
        assert (document["rounds"], document["drafting"]) == (None, None)

    def test_token_texts_can_not_steer_the_terminal(self, golden):
        with open_bundle(golden) as bundle:
            document = describe_round(bundle, bundle.sequences[0], 0)
        for node in document["nodes"]:
            node["text"] = "\x1b[2J\n[red]PASS"
        out = io.StringIO()
        render_round(Console(file=out, width=10000, markup=False), document)
        assert "\x1b" not in out.getvalue()
        assert not any(line.startswith("PASS") for line in out.getvalue().splitlines())

"""Rounds on the CPU device: tokens and logits of autoregressive decoding, and the NumPy model's rounds, bit for bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.engine.devices import open_device
from kdtr_cli.engine.drafters import NgramDrafter, ReplayDrafter, Sequence, SyntheticDrafter
from kdtr_cli.engine.generate import Request, generate
from kdtr_cli.engine.rounds import generate_rounds
from kdtr_cli.engine.transformer import Transformer
from kdtr_cli.engine.weights import upload_weights
from kdtr_cli.errors import DeviceError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.source import open_model
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.workflows.diff import diff
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.golden_rounds import DraftOptions
from kdtr_cli.workflows.prompts import PromptOptions, random_prompt
from kdtr_cli.workflows.run import RunOptions, make_run

FIXTURES = Path(__file__).parents[2] / "fixtures"
HORIZON, BATCH, STEPS, BUDGET = 7, 2, 12, 16
LENGTHS = (9, 3, 14)  # more sequences than slots, the second shorter


class Engine:
    """The preset tiny on the CPU device, and what plain decoding gives there."""

    def __init__(self) -> None:
        self.device = open_device("cpu")
        model = open_model("tiny")
        self.config = model.config
        prompts = [Prompt(f"p{i}", random_prompt(i, n, self.config.vocab_size, 3), i) for i, n in enumerate(LENGTHS)]
        self.requests = [Request(p) for p in prompts]
        weights = upload_weights(self.device, self.config, model.weights)
        rows = BATCH * (BUDGET + 1)
        capacity = max(LENGTHS) + 2 * STEPS + BUDGET + 1
        self.model = Transformer(
            self.device, self.config, weights, Choices(), rows=rows, slots=BATCH, capacity=capacity
        )
        self.plain = self.ar(Decoding(STEPS))

    def ar(self, decoding: Decoding) -> list:
        found = dict(generate(self.model, self.requests, decoding, batch=BATCH, prefill=8))
        return [found[i] for i in range(len(LENGTHS))]

    def drafter(self, kind: str, k: int = BUDGET):
        if kind == "ngram":
            return NgramDrafter(self.device, BATCH, HORIZON, k)
        rate = float(kind.partition(":")[2])
        size = {"rate": rate, "seed": 5, "vocab": self.config.vocab_size, "known": STEPS}
        return SyntheticDrafter(self.device, BATCH, HORIZON, k, **size)

    def rounds(self, kind: str, decoding: Decoding, budget: int = BUDGET) -> list:
        known = [
            Sequence(r.prompt.ids, r.prompt.stream, p.tokens) for r, p in zip(self.requests, self.plain, strict=True)
        ]
        asked = list(zip(self.requests, known, strict=True))
        decoded = generate_rounds(
            self.model, self.drafter(kind, budget), asked, decoding, batch=BATCH, budget=budget, prefill=8
        )
        found = {index: (result, rounds) for index, result, rounds, _ in decoded}
        self.device.check_guards()
        return [found[i] for i in range(len(LENGTHS))]


@pytest.fixture(scope="module")
def engine():
    made = Engine()
    yield made
    made.device.free_all()


def assert_same(results, plain) -> None:
    for (got, _), wanted in zip(results, plain, strict=True):
        assert got.tokens.tolist() == wanted.tokens.tolist()
        assert got.finish_reason == wanted.finish_reason
        assert got.logits.tobytes() == wanted.logits.tobytes()


class TestAgainstPlainDecoding:
    @pytest.mark.parametrize("kind", ["ngram", "synthetic:0.0", "synthetic:0.7", "synthetic:1.0"])
    def test_whatever_the_drafter_says(self, engine, kind):
        results = engine.rounds(kind, Decoding(STEPS))
        assert_same(results, engine.plain)
        accepted = [r.n_accepted for _, rounds in results for r in rounds]
        if kind == "synthetic:1.0":
            assert max(accepted) == HORIZON + 1
        if kind == "synthetic:0.7":
            assert 1 < np.mean(accepted) < HORIZON + 1

    @pytest.mark.parametrize("budget", [1, 2, 3, 7, 8])
    def test_whatever_the_budget(self, engine, budget):
        assert_same(engine.rounds("synthetic:0.7", Decoding(STEPS), budget), engine.plain)

    def test_at_a_temperature_the_same_draws(self, engine):
        decoding = Decoding(STEPS, temperature=0.8, seed=11)
        plain = engine.ar(decoding)
        assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(plain, engine.plain, strict=True))
        assert_same(engine.rounds("synthetic:0.7", decoding), plain)

    @pytest.mark.parametrize("steps", [1, 2, 5, 8])
    def test_a_limit_anywhere_in_a_round(self, engine, steps):
        results = engine.rounds("synthetic:1.0", Decoding(steps))
        for (got, _), wanted in zip(results, engine.plain, strict=True):
            assert got.tokens.tolist() == wanted.tokens[:steps].tolist()
            assert got.logits.tobytes() == wanted.logits[:steps].tobytes()

    @pytest.mark.parametrize("place", [0, 1, 3, 7, 8, 11])
    def test_a_stop_token_as_root_inside_a_path_or_as_bonus(self, engine, place):
        stop = int(engine.plain[0].tokens[place])
        decoding = Decoding(STEPS, stop_ids=(stop,))
        results = engine.rounds("synthetic:1.0", decoding)
        assert_same(results, engine.ar(decoding))
        first = results[0][0]
        assert first.finish_reason == "stop"
        assert first.tokens[-1] == stop
        assert stop not in first.tokens[:-1]

    def test_scattered_rows_were_accepted(self, engine):
        rounds = [r for _, rounds in engine.rounds("synthetic:0.7", Decoding(STEPS)) for r in rounds]
        assert any((np.diff(r.accepted) > 1).any() for r in rounds)

    def test_the_last_position_of_the_model_bounds_the_tree(self, engine):
        last = max(LENGTHS) + STEPS - 1
        small = replace(engine.config, max_position_embeddings=last)
        engine.model.config, whole = small, engine.model.config
        try:
            results = engine.rounds("synthetic:1.0", Decoding(STEPS))
        finally:
            engine.model.config = whole
        assert_same(results, engine.plain)
        for _, rounds in results:
            deepest = max(int(r.start + r.tree.depths.max()) for r in rounds)
            assert deepest <= last - 1
        assert any(r.tree.depths.max() < HORIZON for _, rounds in results for r in rounds)

    def test_marginals_that_are_not_finite_are_one_clear_error(self, engine):
        ids = np.tile(np.arange(4, dtype=np.int32), (STEPS, HORIZON, 1))
        logps = np.full((STEPS, HORIZON, 4), np.nan, np.float32)
        counts = np.full((STEPS, HORIZON), 4, np.int32)
        drafter = ReplayDrafter(engine.device, BATCH, HORIZON, 4, positions=STEPS, kept=4)
        asked = [(r, Sequence(r.prompt.ids, r.prompt.stream, None, ids, logps, counts)) for r in engine.requests]
        decoded = generate_rounds(engine.model, drafter, asked, Decoding(STEPS), batch=BATCH, budget=4, prefill=8)
        with pytest.raises(DeviceError, match=r"log-probabilities are not finite in sequence 'p[01]', round 0"):
            list(decoded)


def judged(folder: Path, golden: GoldenOptions, **run) -> tuple:
    """The report of a golden and a run of it."""
    if not golden.output.exists():
        make_golden(golden)
    out = folder / "run.h5"
    make_run(RunOptions(golden.output, out, device="cpu", force=True, **run))
    return diff(golden.output, out, JudgeOptions()), out


class TestAgainstNumpy:
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    @pytest.mark.parametrize(
        ("mode", "drafter", "budget"),
        [
            ("ddtree", "ngram", 1),
            ("ddtree", "ngram", 16),
            ("ddtree", "synthetic:0.7", 2),
            ("ddtree", "synthetic:0.7", 7),
            ("ddtree", "synthetic:0.7", 64),
            ("chain", "synthetic:0.7", 7),
        ],
    )
    def test_every_round_is_equal(self, tmp_path, mode, drafter, budget, temperature):
        golden = GoldenOptions(
            "tiny",
            tmp_path / "golden.h5",
            PromptOptions(count=3, length=9, seed=2),
            steps=10,
            temperature=temperature,
            drafting=DraftOptions(mode, drafter, budget),
        )
        report, _ = judged(tmp_path, golden, mode=mode, batch=2)
        assert report.verdict is Verdict.IDENTICAL
        assert report.totals.rounds_equal == report.totals.rounds_judged > 0

    @pytest.mark.parametrize("options", [{}, {"drafter": "own", "batch": 1, "prefill": 5}, {"budget": 64}])
    def test_the_trained_pair(self, tmp_path_factory, options):
        folder = tmp_path_factory.getbasetemp()
        own = str(FIXTURES / "tiny-kimi-dflash")
        golden = GoldenOptions(
            str(FIXTURES / "tiny-kimi"),
            folder / "trained.h5",
            PromptOptions(texts=("class Stack:", "import os\n\ndef main(")),
            steps=24,
            drafting=DraftOptions("ddtree", own, 8),
        )
        asked = {**options, "drafter": own} if options.get("drafter") else options
        report, out = judged(folder, golden, mode="ddtree", **asked)
        assert report.verdict is Verdict.IDENTICAL
        with open_bundle(out) as bundle:
            assert bundle.manifest["drafting"]["budget"] == options.get("budget", 8)

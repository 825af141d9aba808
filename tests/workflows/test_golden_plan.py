"""The plan of a golden: what it counts is what is done."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import parse_config
from kdtr_cli.model.presets import PRESETS
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.source import open_model
from kdtr_cli.reference import exact, float64
from kdtr_cli.reference.generate import generate, score_group
from kdtr_cli.reference.transformer import Model
from kdtr_cli.workflows.golden import GoldenOptions, plan_golden
from kdtr_cli.workflows.golden_memory import Budget
from kdtr_cli.workflows.golden_plan import NOMINAL, Costs, calibrate, plan_lines, shown_time
from kdtr_cli.workflows.prompts import PromptOptions

pytestmark = pytest.mark.quick
INT4 = Path(__file__).parents[2] / "fixtures" / "tiny-kimi-int4"


def costs(preset: str = "tiny", kept: int | None = None, main: str = "exact") -> Costs:
    return Costs(parse_config(PRESETS[preset], where=preset), NOMINAL, kept, main)


def budget(*lengths: int) -> Budget:
    return Budget([[Prompt(str(i), np.zeros(n, np.int32), i) for i, n in enumerate(lengths)]], None, 0)


@pytest.mark.parametrize("preset", ["tiny", "tiny-groups", "tiny-v2", "odd"])
def test_multiply_adds_are_those_that_are_made(preset, monkeypatch):
    opened = open_model(preset, cache=False)
    made = dict.fromkeys(("exact", "float64"), 0)
    for name, ops in (("exact", exact), ("float64", float64)):
        real = ops.linear

        def linear(x, w, bias=None, name=name, real=real):
            y = real(x, w, bias)
            made[name] += x.shape[0] * x.shape[1] * y.shape[1]
            return y

        monkeypatch.setattr(ops, "linear", linear)
    prompts = [Prompt("a", np.arange(1, 20, dtype=np.int32), 0), Prompt("b", np.arange(1, 6, dtype=np.int32), 1)]
    steps = 4
    decoding = Decoding(steps, ignore_eos=True)
    results = generate(Model(opened.config, opened.weights, Choices(), 30, exact), prompts, decoding)
    score_group(Model(opened.config, opened.weights, Choices(), 30, float64), prompts, [r.tokens for r in results])
    lines = {line.what: line for line in plan_lines(costs(preset), budget(19, 5), steps)}
    planned = lines["prompts, exact"].products + lines["steps, exact"].products
    assert planned == pytest.approx(made["exact"], rel=0.03)  # norms and biases are counted as products
    assert lines["all tokens, float64"].products == pytest.approx(made["float64"], rel=0.03)


def test_weights_that_are_kept_are_read_once():
    total = costs().total
    for kept, share in ((None, 0.0), (4 * total, 0.0), (2 * total, 0.5), (0, 1.0)):
        lines = {line.what: line for line in plan_lines(costs(kept=kept), budget(4), 5)}
        once = sum(sum(costs().loaded(i, 1)) for i in range(costs().config.num_hidden_layers)) + costs().head
        assert lines["steps, exact"].read == pytest.approx(4 * share * once * 4)
        assert lines["prompts, exact"].read > 0
        assert lines["all tokens, float64"].read > 0


def test_experts_that_are_touched():
    c = costs()
    assert c.touched(0) == 0
    assert c.touched(1) == pytest.approx(c.config.num_experts_per_tok)
    assert c.config.n_routed_experts * 0.999 < c.touched(1000) <= c.config.n_routed_experts


def test_groups_of_one_kind_are_one_line():
    two = Budget([budget(3, 4).groups[0], budget(9).groups[0]], None, 0)
    lines = {line.what: line for line in plan_lines(costs(), two, 3)}
    assert list(lines) == ["digests", "prompts, exact", "steps, exact", "all tokens, float64"]
    assert (lines["prompts, exact"].passes, lines["steps, exact"].passes) == (2, 4)
    assert lines["prompts, exact"].rows == 9
    assert [line.what for line in plan_lines(costs(main="float32"), two, 1)] == ["digests", "prompts, float32"]


@pytest.mark.parametrize("spec", ["tiny", "odd", str(INT4)])
def test_rates_are_measured(spec):
    model = open_model(spec, cache=False)
    rates = calibrate(model.config, model.weights)
    assert 0 < rates.digest < 1e-3
    for arithmetic in (rates.exact, rates.float64):
        values = dataclasses.asdict(arithmetic)
        assert all(0 <= value < 1e-2 for value in values.values()), values
        assert arithmetic.row > 0
        assert arithmetic.load_dense > 0


def test_a_plan_writes_nothing(tmp_path):
    plan = plan_golden(GoldenOptions("tiny", tmp_path / "g.h5", PromptOptions(ids=("1 2",)), 2))
    assert sum(line.seconds for line in plan.lines) > 0
    assert plan.memory > plan.stored_bytes > 0
    assert not any(tmp_path.iterdir())


def test_times_are_shown():
    assert [shown_time(s) for s in (0.04, 12, 119, 600, 3600 * 3.4, 86400 * 12)] == [
        "0.04 s", "12 s", "119 s", "10 min", "3.4 h", "12 d",
    ]  # fmt: skip

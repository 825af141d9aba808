"""Statistics of a run: the experts that the NumPy model chooses, padding rows and resting slots left out."""

import numpy as np
import pytest

from kdtr_cli.engine.devices import open_device
from kdtr_cli.engine.drafters import Sequence, SyntheticDrafter
from kdtr_cli.engine.generate import Request, generate
from kdtr_cli.engine.rounds import generate_rounds
from kdtr_cli.engine.statistics import Statistics
from kdtr_cli.engine.transformer import Transformer
from kdtr_cli.engine.weights import upload_weights
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.source import open_model
from kdtr_cli.reference import exact
from kdtr_cli.reference.transformer import Model, Rows
from kdtr_cli.workflows.prompts import random_prompt

STEPS = 6


@pytest.fixture(scope="module")
def tiny():
    return open_model("tiny")


@pytest.fixture(scope="module")
def device():
    with open_device("cpu") as opened:
        yield opened


def transformer(device, tiny, rows: int, slots: int) -> Transformer:
    weights = upload_weights(device, tiny.config, tiny.weights)
    return Transformer(device, tiny.config, weights, Choices(), rows=rows, slots=slots, capacity=64)


def chosen_by_numpy(tiny, ids: np.ndarray) -> list[np.ndarray]:
    """expert ids [positions, slots] of each MoE layer, feeding a sequence at once."""
    seen: list[np.ndarray] = []
    model = Model(tiny.config, tiny.weights, Choices(), 64, exact)
    rows = Rows(ids.astype(np.int32), np.zeros(len(ids), np.int32), np.arange(len(ids), dtype=np.int32))
    model.forward(rows, model.cache([64]), lambda name, v: seen.append(v) if name.endswith("expert_ids") else None)
    return seen


def test_decode_steps_touch_the_experts_that_numpy_chooses(device, tiny):
    prompts = [Prompt(f"p{i}", random_prompt(i, n, 512, 1), i) for i, n in enumerate((5, 8))]
    model, counted = transformer(device, tiny, 16, 3), Statistics()
    asked = [Request(p) for p in prompts]
    found = dict(generate(model, asked, Decoding(STEPS), batch=3, prefill=16, statistics=counted))
    each = [chosen_by_numpy(tiny, np.concatenate([p.ids, found[i].tokens[:-1]])) for i, p in enumerate(prompts)]
    assert (counted.passes, counted.prefill_passes) == (STEPS - 1, 2)
    for step, touched in enumerate(counted.touched):
        wanted = [
            len({int(e) for i, p in enumerate(prompts) for e in each[i][layer][len(p.ids) + step]})
            for layer in range(len(each[0]))
        ]
        assert touched.tolist() == wanted  # the third slot rests: what it chooses does not count


def test_a_round_counts_its_tree_and_not_the_rows_past_it(device, tiny):
    prompt = Prompt("p", random_prompt(0, 5, 512, 1), 0)
    budget, horizon = 7, 2
    model = transformer(device, tiny, 2 * (budget + 1), 2)
    plain = dict(generate(model, [Request(prompt)], Decoding(STEPS), batch=1, prefill=16))[0]
    drafter = SyntheticDrafter(device, 2, horizon, 1, rate=1.0, seed=0, vocab=512, known=STEPS)
    asked, counted = [(Request(prompt), Sequence(prompt.ids, 0, plain.tokens))], Statistics()
    ((_, _, rounds, _),) = generate_rounds(
        model, drafter, asked, Decoding(STEPS), batch=2, budget=budget, prefill=16, statistics=counted
    )
    each = chosen_by_numpy(tiny, np.concatenate([prompt.ids, plain.tokens[:-1]]))
    assert counted.passes == len(rounds) > 1
    first = rounds[0]
    assert first.n_accepted == first.tree.n + 1 == horizon + 1  # a chain of right tokens: its rows are the sequence's
    fed = slice(first.start, first.start + horizon + 1)
    assert counted.touched[0].tolist() == [len(np.unique(layer[fed])) for layer in each]
    assert counted.summary()["experts_touched"] == pytest.approx(np.mean([t.mean() for t in counted.touched]))

"""The float32 reference: near float64 within a measured bound, the same tokens where the model is sure, plain BLAS."""

from pathlib import Path

import numpy as np
import pytest

from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.source import open_model
from kdtr_cli.reference import exact, float32, float64
from kdtr_cli.reference.attention import Branches
from kdtr_cli.reference.generate import generate, score
from kdtr_cli.reference.transformer import Model
from kdtr_cli.workflows.prompts import random_prompt

pytestmark = pytest.mark.quick
FIXTURES = Path(__file__).parents[2] / "fixtures"
#: |float32 - float64| of a logit, as a part of the largest logit. Seen: at most 1.0e-6.
BOUND = 5e-6


def model(name: str, ops) -> Model:
    opened = open_model(str(FIXTURES / name) if name.startswith("tiny-kimi") else name)
    return Model(opened.config, opened.weights, Choices(), 80, ops)


@pytest.mark.parametrize(
    "name", ["tiny", "tiny-groups", "tiny-v2", "odd", "tiny-kimi", "tiny-kimi-int4", "tiny-kimi-fp8"]
)
def test_logits_are_near_float64_and_no_bits_of_the_contract(name):
    real, near = model(name, float64), model(name, float32)
    prompt = Prompt("0", random_prompt(0, 40, real.config.vocab_size, 0), 0)
    tokens = random_prompt(1, 9, real.config.vocab_size, 0)
    want, got = score(real, prompt, tokens), score(near, prompt, tokens)
    assert got.dtype == np.float32
    assert 0 < np.abs(got - want).max() / np.abs(want).max() < BOUND
    assert not np.array_equal(got, score(model(name, exact), prompt, tokens))


def test_tokens_of_the_trained_model_are_those_of_float64():
    prompts = [Prompt(str(i), np.array(ids, np.int32), i) for i, ids in enumerate(([51, 281, 282], [7], [100] * 20))]
    decoding = Decoding(24, ignore_eos=True)
    real, near = (generate(model("tiny-kimi", ops), prompts, decoding) for ops in (float64, float32))
    for one, two in zip(real, near, strict=True):
        assert one.tokens.tolist() == two.tokens.tolist()
        assert two.logits.dtype == np.float32


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_products_with_any_number_of_rows(rows):
    rng = np.random.default_rng(rows)
    x, w, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 33), (19, 33), (19,)))
    y = float32.linear(x, w, bias)
    assert (y.dtype, y.shape) == (np.float32, (rows, 19))
    np.testing.assert_allclose(y, x.astype(np.float64) @ w.T.astype(np.float64) + bias, rtol=0, atol=1e-5)
    assert float32.pack(w) is w  # converted once, kept once


@pytest.mark.parametrize("tree", [False, True])
def test_attention_hides_what_a_row_does_not_see(tree):
    rng = np.random.default_rng(3)
    query = rng.standard_normal((4, 3, 10)).astype(np.float32)
    keys = rng.standard_normal((9, 10)).astype(np.float32)
    visible = np.array([6, 9, 7, 8])
    branches = Branches(5, np.array([[5, 5, 5, 5], [5, 6, 7, 8], [6, 8, 6, 6], [7, 6, 5, 7]])) if tree else None
    spoilt = keys.copy()
    if not tree:
        query, visible = query[:1], visible[:1]
        spoilt[6:] = 1e6
    got = float32.attend(query, spoilt, visible, 0.3, 8, branches)
    want = float64.attend(query.astype(np.float64), keys.astype(np.float64), visible, 0.3, 8, branches)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)

"""The noise floor and its factors against engines that are not ours: transformers in float32 and in bf16.

Both are right, and each must lie within the factor of `--tolerance auto` of the reference, and not far below it: a
factor that nobody needs is no measurement.
"""

import copy

import numpy as np
import pytest
import torch
from hf_models import load

from kdtr_cli.model.choices import Choices
from kdtr_cli.model.presets import write_model
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.source import open_model
from kdtr_cli.parity.auto import FACTORS
from kdtr_cli.parity.floor import measure_floor
from kdtr_cli.reference import bf16, exact, float64
from kdtr_cli.reference.generate import generate, score_group
from kdtr_cli.reference.transformer import Model
from kdtr_cli.workflows.prompts import random_prompt

pytestmark = pytest.mark.hf


@pytest.mark.parametrize("preset", ["tiny", "tiny-v2"])
def test_transformers_lies_within_the_factors(tmp_path, preset):
    write_model(tmp_path / "m", preset)
    opened = open_model(str(tmp_path / "m"))
    prompts = [Prompt(str(i), random_prompt(i, 8, opened.config.vocab_size, 0), i) for i in range(4)]

    def model(ops) -> Model:
        return Model(opened.config, opened.weights, Choices(rope_angles="f32"), 40, ops)

    made = generate(model(exact), prompts, Decoding(12, ignore_eos=True))
    tokens = [one.tokens for one in made]
    ours = np.concatenate([one.logits for one in made])
    truth, rounded = (
        np.concatenate([own for _, own in score_group(model(ops), prompts, tokens)]) for ops in (float64, bf16)
    )
    theirs, _ = load(tmp_path / "m", "deepseek_v3" if preset == "tiny" else None)
    wide = copy.deepcopy(theirs)
    small = theirs.to(torch.bfloat16)
    for name, kept in wide.named_buffers():  # what transformers keeps in float32 when it loads a bf16 model
        owner, _, leaf = name.rpartition(".")
        setattr(small.get_submodule(owner), leaf, kept.clone())

    def logits(engine: torch.nn.Module) -> np.ndarray:
        rows = []
        for prompt, own in zip(prompts, tokens, strict=True):
            ids = torch.tensor(np.concatenate([prompt.ids, own[:-1]])[None].astype(np.int64))
            with torch.no_grad():
                rows.append(engine(ids, use_cache=False).logits[0].float().numpy()[len(prompt.ids) - 1 :])
        return np.concatenate(rows)

    for engine, reference, floor, name in (
        (wide, ours, measure_floor(ours, truth), "exact"),
        (small, truth, measure_floor(rounded, truth), "bf16"),
    ):
        found = measure_floor(logits(engine), reference.astype(np.float64))
        for ratio in (found.max_abs / floor.max_abs, (found.max_kl / floor.max_kl) ** 0.5):
            assert FACTORS[name] / 8 < ratio < FACTORS[name] * 0.75, (name, ratio)

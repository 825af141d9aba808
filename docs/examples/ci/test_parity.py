"""An engine against its goldens, in pytest (docs/ci.md). Put your engine in the place of `decode`.

pytest --kdtr-update    # once, on your machine: makes the goldens by their recipes
pytest                  # from then on
"""

from pathlib import Path

import pytest

from kdtr_cli.model.choices import Choices
from kdtr_cli.model.source import open_model
from kdtr_cli.reference import exact
from kdtr_cli.reference.generate import generate
from kdtr_cli.reference.transformer import Model
from kdtr_cli.testing import Inputs, Output, golden_model

#: Golden → the words of the `kdtr golden` that makes it.
GOLDENS = {
    "short": "tiny --prompt-ids '1 2 3' --prompt-ids 7 --steps 8",
    "scored": "tiny --num-prompts 1 --prompt-len 17 --steps 2 --score",
}


def decode(model: Path, inputs: Inputs) -> dict[str, Output]:
    """kdtr's own NumPy model; tensors of any framework do as well as these arrays."""
    opened = open_model(model)
    positions = max(len(prompt.ids) for prompt in inputs.prompts) + inputs.steps - 1
    choices = Choices(inputs.choices["latent_norm_eps"], inputs.choices["rope_angles"])
    engine = Model(opened.config, opened.weights, choices, positions, exact)
    results = generate(engine, list(inputs.prompts), inputs.decoding, keep_prompt_logits=inputs.score)
    return {
        prompt.id: Output(made.tokens, made.logits, made.finish_reason, prompt_logits=made.prompt_logits)
        for prompt, made in zip(inputs.prompts, results, strict=True)
    }


@pytest.mark.parametrize("name", GOLDENS)
def test_the_engine_computes_what_the_model_says(kdtr, tmp_path, name):
    golden = kdtr.golden(name, recipe=GOLDENS[name])
    kdtr.assert_parity(golden, decode(golden_model(golden, tmp_path), kdtr.inputs(golden)))

"""Real traces for the tests of judging: those of the NumPy model, as a golden and a run that agree bit for bit."""

import copy
import functools

import numpy as np
from parity_cases import Seq, Side, manifest

from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import parse_config
from kdtr_cli.model.presets import PRESETS, new_weights
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.traces import Trace
from kdtr_cli.model.weights import Weights
from kdtr_cli.reference import exact
from kdtr_cli.reference.generate import advance, begin
from kdtr_cli.reference.transformer import Model
from kdtr_cli.workflows.diff_facts import facts_of
from kdtr_cli.workflows.prompts import random_prompt

PROMPT, STEPS = 14, 7
CONFIG = parse_config(PRESETS["tiny-groups"])
#: A dense layer, and the first mixture of experts.
DENSE, MOE = "model.layers.0.", "model.layers.1."


@functools.cache
def _made() -> Side:
    weights = Weights.from_arrays(new_weights(CONFIG, 0), CONFIG)
    model = Model(CONFIG, weights, Choices(), PROMPT + STEPS, exact)
    prompt, decoding = Prompt("p", random_prompt(0, PROMPT, CONFIG.vocab_size, 0), 0), Decoding(STEPS)
    state = begin(model, [prompt], decoding)
    state.traces = [Trace(CONFIG, "full", PROMPT + STEPS - 1)]
    while not state.done():
        advance(model, [prompt], decoding, state, keep_prompt_logits=True)
    result = state.results()[0]
    trace = state.traces[0].finished(PROMPT + STEPS - 1)
    seq = Seq("p", 0, prompt.ids, result.tokens, {"exact": result.logits}, {"exact": result.prompt_logits})
    seq.trace = {name.removeprefix("trace/"): values for name, values in trace.items()}
    return Side("golden", manifest("golden", steps=STEPS), [seq], CONFIG.vocab_size, facts=facts_of(CONFIG))


def traced_pair() -> tuple[Side, Side]:
    """A golden and a run, to be changed at will."""
    golden = copy.deepcopy(_made())
    run = Side("run", manifest("run", steps=STEPS), copy.deepcopy(golden.seqs), golden.vocab)
    run.one.logits = {"engine": run.one.logits["exact"]}
    run.one.prompt_logits = {"engine": run.one.prompt_logits["exact"]}
    return golden, run


def noise(x: np.ndarray, size: float = 0.1) -> np.ndarray:
    """The values with noise of a share of the largest one."""
    rng = np.random.default_rng(5)
    return (x + size * np.abs(x).max() * rng.standard_normal(x.shape)).astype(x.dtype)

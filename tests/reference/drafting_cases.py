"""What the tests of rounds and drafters share: small models, plain decoding as the measure, drafters with a script."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from kdtr_cli.ddtree.rounds import DraftSettings, check_rounds, rows_digest
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import parse_config
from kdtr_cli.model.dflash import open_drafter
from kdtr_cli.model.presets import PRESETS, new_weights
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.source import open_model
from kdtr_cli.model.tokenizer import load_tokenizer
from kdtr_cli.model.weights import Weights
from kdtr_cli.reference import exact
from kdtr_cli.reference.generate import generate
from kdtr_cli.reference.rounds import generate_rounds
from kdtr_cli.reference.transformer import Model
from kdtr_cli.workflows.prompts import random_prompt

FIXTURES = Path(__file__).parents[2] / "fixtures"
POSITIONS = 64


@cache
def small_model(layers: int = 2, seed: int = 0, positions: int = POSITIONS, ops=exact, **change) -> Model:
    config = replace(parse_config(PRESETS["tiny"]), num_hidden_layers=layers, **change)
    return Model(config, Weights.from_arrays(new_weights(config, seed), config), Choices(), positions, ops)


@cache
def trained_model(positions: int = 256) -> Model:
    opened = open_model(FIXTURES / "tiny-kimi")
    return Model(opened.config, opened.weights, Choices(), positions, exact)


@cache
def trained_drafter():
    return open_drafter(FIXTURES / "tiny-kimi-dflash", trained_model().config)


@cache
def _tokenizer():
    return load_tokenizer(FIXTURES / "tiny-kimi")


def text_prompt(text: str, name: str = "0", stream: int = 0) -> Prompt:
    return Prompt(name, np.array(_tokenizer().encode(text), np.int32), stream)


def prompts(*lengths: int, vocab: int = 512) -> list[Prompt]:
    return [Prompt(f"p{i}", random_prompt(i, n, vocab, 3), i) for i, n in enumerate(lengths)]


def plain(model: Model, asked: list[Prompt], decoding: Decoding):
    """(what plain decoding gives, the digest of the cache that it leaves) for each prompt."""
    cache = model.cache([len(p.ids) + decoding.steps - 1 for p in asked])
    results = generate(model, asked, decoding, cache=cache)
    rows = [len(p.ids) + len(r.tokens) - 1 for p, r in zip(asked, results, strict=True)]
    return results, [rows_digest(layer[s][:n] for layer in cache.rows) for s, n in enumerate(rows)]


def assert_plain(model: Model, asked: list[Prompt], decoding: Decoding, drafter, settings: DraftSettings):
    """Decode by rounds and demand what plain decoding gives, to the bit, and every invariant; returns the rounds."""
    results, digests = plain(model, asked, decoding)
    drafted = generate_rounds(model, asked, decoding, drafter, settings)
    for prompt, result, digest, one in zip(asked, results, digests, drafted, strict=True):
        assert one.generated.tokens.tolist() == result.tokens.tolist()
        assert one.generated.logits.tobytes() == result.logits.tobytes()
        assert one.generated.finish_reason == result.finish_reason
        assert one.final_cache_digest == digest
        assert broken(model, prompt, decoding, settings, one) == []
    return [one.rounds for one in drafted]


def broken(model: Model, prompt: Prompt, decoding: Decoding, settings: DraftSettings, one) -> list[str]:
    return check_rounds(
        one.rounds,
        settings,
        len(prompt.ids),
        one.generated.tokens,
        steps=decoding.steps,
        stop_ids=() if decoding.ignore_eos else decoding.stop_ids,
        vocab_size=model.config.vocab_size,
        max_positions=model.config.max_position_embeddings,
    )


class Scripted:
    """A drafter that knows the text and gives the right token of depth d the rank ranks[d], or leaves it out (None)."""

    taps: tuple[int, ...] = ()

    def __init__(self, ranks, known: dict[str, np.ndarray], vocab: int = 512) -> None:
        self.ranks, self.known, self.vocab, self.horizon = ranks, known, vocab, len(ranks)
        self.names: dict[int, Prompt] = {}
        self.committed: dict[int, list[int]] = {}

    def reset(self, slot, prompt):
        self.names[slot], self.committed[slot] = prompt, []

    def extend(self, slot, tokens, features):
        assert features is None
        self.committed[slot] += tokens.tolist()

    def marginals(self, slot, start, root, k):
        prompt = self.names[slot]
        text = [*prompt.ids.tolist(), *self.known[prompt.id].tolist()]
        assert self.committed[slot][:start] == text[:start]
        assert root == text[start]
        ids = np.empty((self.horizon, k), np.int32)
        for d, rank in enumerate(self.ranks):
            right = text[start + 1 + d] if start + 1 + d < len(text) else self.vocab - 1
            row = [t for t in range(k + 1) if t != right][:k]
            if rank is not None and rank < k:
                row[rank] = right
            ids[d] = row
        # each rank a little less likely: the tree grows wide and deep at once
        logps = np.broadcast_to(-0.3 - 0.25 * np.arange(k, dtype=np.float32), ids.shape).copy()
        return ids, logps, np.full(self.horizon, k, np.int32)

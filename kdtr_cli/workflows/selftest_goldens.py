"""The goldens of `kdtr selftest`: small models on which the classic bugs show.

On an easy model many of them change nothing: with a bias of 0 a router that weighs by the biased scores is right, and
a chain is right under positions by index. So each golden here brings what a bug needs (negative and large biases, exact
ties, several groups, odd sizes and lengths, branching trees, a stop token inside an accepted run), and is checked to
bring it: a golden that lost it would let a bug through without a sound.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from kdtr_cli.bundle.reader import Bundle, open_bundle
from kdtr_cli.ddtree.rounds import Round
from kdtr_cli.errors import DeviceError
from kdtr_cli.model.config import ModelConfig, parse_config
from kdtr_cli.model.dflash import draft_tensors, parse_dflash
from kdtr_cli.model.presets import PRESETS, new_weights, write_model
from kdtr_cli.model.prompts import Prompt, check_prompts
from kdtr_cli.model.requantise import quantise_model
from kdtr_cli.model.source import Model, open_model
from kdtr_cli.model.weights import Weights
from kdtr_cli.workflows.golden import GoldenOptions, prepare_golden, write_golden
from kdtr_cli.workflows.golden_rounds import DraftOptions
from kdtr_cli.workflows.prompts import random_prompt
from kdtr_cli.workflows.rounds import stored_rounds

__all__ = ["DRAFTER", "GOLDENS", "SelftestGolden", "make_selftest_golden"]

#: Where the golden `drafter` keeps its DFlash drafter, in the folder of all goldens.
DRAFTER = "dflash"

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class SelftestGolden:
    """How a golden is made. ``brings``: what of it makes bugs show; ``check`` says what of that is missing, or None.

    prompts: their lengths. model: makes the model, given a folder of its own to work in.
    """

    brings: str
    model: Callable[[Path], Model]
    prompts: tuple[int, ...]
    steps: int
    check: Callable[[Bundle, ModelConfig], str | None]
    drafting: Callable[[Path], DraftOptions] | None = None


def make_selftest_golden(name: str, folder: Path) -> Path:
    """Make the golden ``name`` of GOLDENS in ``folder``; its path. DeviceError: it does not bring what it should."""
    made, path = GOLDENS[name], folder / f"{name}.h5"
    model = made.model(folder)
    vocab = model.config.vocab_size
    prompts = [Prompt(str(i), random_prompt(i, n, vocab, 1), i) for i, n in enumerate(made.prompts)]
    drafting = made.drafting(folder) if made.drafting is not None else None
    options = GoldenOptions(model.name, path, steps=made.steps, drafting=drafting, trace="full")
    prepared = prepare_golden(options, model, check_prompts(prompts, model.config, made.steps))
    write_golden(prepared, prompts, path, force=False)
    with open_bundle(path) as bundle:
        missing = made.check(bundle, model.config)
    if missing is not None:
        raise DeviceError(f"internal: the self-test's golden {name!r} is no test any more: {missing}")
    return path


# ------------------------------------------------------------------------------------------------------------- models


def _preset(preset: str, change: Callable[[Arrays, ModelConfig], None] | None = None, **fields: Any) -> Model:
    """A preset with other config fields and with weights that ``change`` has worked on (float32 arrays by name)."""
    obj = {**PRESETS[preset], **fields}
    config = parse_config(obj, where=f"preset {preset}")
    weights = new_weights(config, 0)
    if change is not None:
        values = {name: array.astype(np.float32) for name, array in weights.items()}
        change(values, config)
        weights = {name: values[name].astype(array.dtype) for name, array in weights.items()}
    text = json.dumps(obj, indent=2, sort_keys=True) + "\n"
    return Model(config, text, Weights.from_arrays(weights, config, cache=False), None, preset)


def _routers(config: ModelConfig) -> list[str]:
    return [f"model.layers.{i}.mlp.gate" for i in range(config.num_hidden_layers) if config.is_moe_layer(i)]


def _large_biases(weights: Arrays, config: ModelConfig) -> None:
    """Biases of +12: in the first layer of as many experts as are chosen, whose own scores are tiny together; else of
    all."""
    first, *others = _routers(config)
    chosen = config.num_experts_per_tok
    weights[f"{first}.e_score_correction_bias"][:chosen] += 12
    logits = weights[f"{first}.weight"]
    logits[:chosen] = logits[0] * np.linspace(16, 20, chosen, dtype=np.float32)[:, None]
    for router in others:
        weights[f"{router}.e_score_correction_bias"] += 12.6


def _ties(weights: Arrays, config: ModelConfig) -> None:
    """Vocabulary in equal pairs, experts in equal threes (4 are chosen, so a three is always torn)."""
    weights["lm_head.weight"][1::2] = weights["lm_head.weight"][::2]
    for router in _routers(config):
        for name in (f"{router}.weight", f"{router}.e_score_correction_bias"):
            values = weights[name]
            values[:] = values[np.arange(len(values)) // 3 * 3]


def _int4(folder: Path) -> Model:
    plain, quantised = folder / "bf16", folder / "tiny-int4"
    write_model(plain, "tiny")
    quantise_model(plain, quantised, "int4")
    return open_model(quantised, cache=False)


def _small_vocabulary(eos: int) -> Model:
    """Few tokens, so that trees hold what the target chooses, mostly in a branch that is not the first."""

    def loud_stop(weights: Arrays, config: ModelConfig) -> None:
        weights["lm_head.weight"][eos] *= 4  # presets make the stop token a quarter as loud as the others

    return _preset("tiny", loud_stop, num_hidden_layers=2, vocab_size=64, bos_token_id=62, eos_token_id=eos)


#: A drafter for _small_vocabulary: one layer of random weights.
_DFLASH: Mapping[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 61, "target_layer_ids": [0, 1]},
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "num_target_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 64,
}


def _dflash(folder: Path) -> DraftOptions:
    config = parse_dflash(dict(_DFLASH), _small_vocabulary(63).config)
    tensors = {}
    for number, (name, shape) in enumerate(draft_tensors(config).items()):
        words = np.random.Philox(key=number).random_raw(int(np.prod(shape)))
        values = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)
        values = values.reshape(shape) * np.float32(1.0 if len(shape) == 1 else 3.4 * shape[-1] ** -0.5)
        tensors[name] = (values + np.float32(len(shape) == 1)).astype(ml_dtypes.bfloat16)
    (folder / DRAFTER).mkdir()
    (folder / DRAFTER / "config.json").write_text(json.dumps(_DFLASH))
    safetensors.numpy.save_file(tensors, folder / DRAFTER / "model.safetensors", metadata={"format": "pt"})
    return DraftOptions("ddtree", str(folder / DRAFTER), budget=40)


def _synthetic(folder: Path) -> DraftOptions:
    return DraftOptions("ddtree", "synthetic:0.5", budget=12, block_size=6)


# ------------------------------------------------------------------------------------------------------------- checks


def _several_groups(bundle: Bundle, config: ModelConfig) -> str | None:
    if not 1 < config.topk_group < config.n_group or len({len(s.prompt) for s in bundle.sequences}) < 2:
        return "no groups of experts that are left out, or prompts of one length"
    biases = [bundle.weight(f"{router}.e_score_correction_bias") for router in _routers(config)]
    return None if max(b.max() for b in biases) < -0.5 else "no biases that are all negative"


def _biases_are_large(bundle: Bundle, config: ModelConfig) -> str | None:
    routers = _routers(config)
    if min(bundle.weight(f"{router}.e_score_correction_bias").max() for router in routers) < 11:
        return "no large biases"
    for sequence in bundle.sequences:
        logits, ids = (sequence.array(f"trace/{routers[0][:-5]}.{name}") for name in ("router_logits", "expert_ids"))
        if (np.take_along_axis(logits, ids, 1).max(axis=1) < -14).any():  # a score of 1e-6 and less
            return None
    return "no token whose experts all have tiny scores"


def _has_ties(bundle: Bundle, config: ModelConfig) -> str | None:
    for sequence in bundle.sequences:
        logits = sequence.array("logits/exact")
        if ((logits == logits.max(axis=1, keepdims=True)).sum(axis=1) < 2).any():
            return "a step is no tie"
    return None


def _one_odd_prompt(bundle: Bundle, config: ModelConfig) -> str | None:
    # alone it is decoded one row at a time, by which the sabotages at this border know a decode step
    if len(bundle.sequences) != 1 or len(bundle.sequences[0].prompt) < 2 or len(bundle.sequences[0].tokens) < 3:
        return "not one sequence with a prompt of several tokens and several steps"
    return None


def _is_int4(bundle: Bundle, config: ModelConfig) -> str | None:
    return None if config.quantisation is not None else "no quantised weights"


def _stops_inside_a_run(bundle: Bundle, config: ModelConfig) -> str | None:
    rounds = [_rounds(bundle, index) for index in range(len(bundle.sequences))]
    if not any(_scattered(one) for made in rounds for one in made[:-1]):
        return "no accepted path that is not the tree's first rows, and a round after it"
    for sequence, made in zip(bundle.sequences, rounds, strict=True):
        if sequence.finish_reason == "stop" and made and int(made[-1].bonus) != int(sequence.tokens[-1]):
            return None
    return "no stop token inside an accepted run"


def _drafts_from_scattered_features(bundle: Bundle, config: ModelConfig) -> str | None:
    found = any(_scattered(one) for i in range(len(bundle.sequences)) for one in _rounds(bundle, i)[:-1])
    return None if found else "no accepted path that is not the tree's first rows, and a round after it"


def _rounds(bundle: Bundle, index: int) -> list[Round]:
    return stored_rounds(bundle, bundle.sequences[index]) or []


def _scattered(one: Round) -> bool:
    return bool((one.accepted != np.arange(len(one.accepted))).any())


GOLDENS: dict[str, SelftestGolden] = {
    "groups": SelftestGolden(
        "DeepSeek-V3's router: groups of experts left out, all biases negative; prompts of odd lengths",
        lambda folder: _preset("tiny-groups"),
        (11, 5),
        4,
        _several_groups,
    ),
    "offset": SelftestGolden(
        "expert biases of +12, in one layer of experts whose own scores are tiny",
        lambda folder: _preset("tiny", _large_biases),
        (7, 3),
        3,
        _biases_are_large,
    ),
    "ties": SelftestGolden(
        "equal rows of lm_head and equal experts: every choice is a tie",
        lambda folder: _preset("tiny", _ties),
        (5,),
        3,
        _has_ties,
    ),
    "border": SelftestGolden(
        "one sequence, no size a multiple of 8, attention biases: decode steps of one row behind a prefill",
        lambda folder: _preset("odd"),
        (9,),
        5,
        _one_odd_prompt,
    ),
    "int4": SelftestGolden("routed experts in 4 bits, groups of 32", _int4, (5,), 3, _is_int4),
    "tree": SelftestGolden(
        "branching draft trees, accepted paths that are not the first rows, a stop token inside an accepted run",
        lambda folder: _small_vocabulary(12),
        (6, 9, 4),
        14,
        _stops_inside_a_run,
        _synthetic,
    ),
    "drafter": SelftestGolden(
        "a DFlash drafter whose accepted nodes are scattered over the tree",
        lambda folder: _small_vocabulary(63),
        (5, 8),
        10,
        _drafts_from_scattered_features,
        _dflash,
    ),
}

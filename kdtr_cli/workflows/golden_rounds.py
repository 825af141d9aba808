"""The rounds of a golden: made with the NumPy model, checked against plain decoding to the bit, packed for a bundle."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kdtr_cli.ddtree.rounds import DraftSettings, Round, check_rounds, pack_rounds, rows_digest
from kdtr_cli.errors import DeviceError, InputError
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.prompts import Decoding, Generated, Prompt
from kdtr_cli.reference.drafters.dflash import DFlashDrafter
from kdtr_cli.reference.drafters.ngram import NgramDrafter
from kdtr_cli.reference.drafters.synthetic import SyntheticDrafter
from kdtr_cli.reference.rounds import Drafted, draft_everywhere, generate_rounds
from kdtr_cli.reference.transformer import Cache, Model
from kdtr_cli.workflows.drafting import DrafterSpec, draft_settings, parse_drafter

__all__ = ["STORED_CANDIDATES", "DraftOptions", "DraftedArrays", "Drafting", "check_drafted", "draft_group"]
__all__ += ["numpy_drafter", "open_drafting"]

STORED_CANDIDATES = 256  #: candidates a depth that a golden keeps for replay, at most


@dataclass(frozen=True)
class DraftOptions:
    """The options as given. mode: 'ddtree' or 'chain'; drafter: 'ngram', 'synthetic:P', or a DFlash folder."""

    mode: str
    drafter: str
    budget: int | None = None
    block_size: int | None = None


@dataclass(frozen=True)
class Drafting:
    """The options resolved against a target."""

    spec: DrafterSpec
    settings: DraftSettings


@dataclass(frozen=True)
class DraftedArrays:
    """One sequence's rounds, and the bundle's arrays of rounds/ and drafts/."""

    rounds: list[Round]
    arrays: dict[str, np.ndarray]


def open_drafting(options: DraftOptions, config: ModelConfig) -> Drafting:
    """Resolve the options of a golden; InputError for what does not fit the target, or has nothing to replay."""
    spec = parse_drafter(options.drafter, config)
    if spec.kind == "replay":
        raise InputError("--drafter replay: it replays the drafts of a golden, so no golden can be made with it")
    return Drafting(spec, draft_settings(spec, options.mode, options.budget, options.block_size))


def numpy_drafter(
    drafting: Drafting, target: Model, seed: int, known: Mapping[str, np.ndarray]
) -> DFlashDrafter | NgramDrafter | SyntheticDrafter:
    """The NumPy drafter for as many positions as the target has; known: prompt id → its continuation."""
    spec, horizon = drafting.spec, drafting.settings.horizon
    if spec.dflash is not None:
        return DFlashDrafter(spec.dflash, target, horizon, target.positions)
    if spec.kind == "synthetic":
        return SyntheticDrafter(spec.rate, seed, horizon, target.config.vocab_size, known)
    return NgramDrafter(horizon)


def draft_group(
    drafting: Drafting,
    model: Model,
    prompts: list[Prompt],
    decoding: Decoding,
    plain: list[Generated],
    cache: Cache,
) -> list[DraftedArrays]:
    """Decode prompts by rounds; plain and cache: what plain decoding gave and left. DeviceError where the two part."""
    settings, config = drafting.settings, model.config
    known = {prompt.id: result.tokens for prompt, result in zip(prompts, plain, strict=True)}
    drafter = numpy_drafter(drafting, model, decoding.seed, known)
    drafted = generate_rounds(model, prompts, decoding, drafter, settings)
    for slot, (prompt, result, one) in enumerate(zip(prompts, plain, drafted, strict=True)):
        rows = len(prompt.ids) + len(result.tokens) - 1
        digest = rows_digest(layer[slot][:rows] for layer in cache.rows)
        check_drafted(prompt, result, one, digest)
        broken = check_rounds(
            one.rounds,
            settings,
            len(prompt.ids),
            result.tokens,
            steps=decoding.steps,
            stop_ids=() if decoding.ignore_eos else decoding.stop_ids,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
        )
        if broken:
            raise DeviceError(f"internal: sequence {prompt.id!r}: {broken[0]}")
    everywhere = draft_everywhere(
        drafter, prompts, [result.tokens for result in plain], min(STORED_CANDIDATES, config.vocab_size)
    )
    out = []
    for one, (ids, logps, counts) in zip(drafted, everywhere, strict=True):
        arrays = pack_rounds(one.rounds, settings.horizon, settings.width(config.vocab_size), one.final_cache_digest)
        arrays |= {"drafts/top_ids": ids, "drafts/top_logps": logps, "drafts/counts": counts}
        out.append(DraftedArrays(one.rounds, arrays))
    return out


def check_drafted(prompt: Prompt, plain: Generated, drafted: Drafted, plain_digest: bytes) -> None:
    """DeviceError, naming the invariant, unless tokens, logits and cache are those of plain decoding bit for bit."""
    other, where = drafted.generated, f"internal: sequence {prompt.id!r}: output = AR output:"
    if not np.array_equal(plain.tokens, other.tokens) or plain.finish_reason != other.finish_reason:
        same = np.equal(plain.tokens[: len(other.tokens)], other.tokens[: len(plain.tokens)])
        at = int(np.argmin(same)) if not same.all() else len(same)
        raise DeviceError(f"{where} the tokens of the rounds part from plain decoding at {at}")
    if plain.logits.tobytes() != other.logits.tobytes():
        rows = zip(plain.logits, other.logits, strict=True)
        at = next(t for t, (a, b) in enumerate(rows) if a.tobytes() != b.tobytes())
        raise DeviceError(f"{where} the logits of the rounds differ from those of plain decoding at step {at}")
    if plain_digest != drafted.final_cache_digest:
        raise DeviceError(f"internal: sequence {prompt.id!r}: cache after compaction = AR cache: the caches differ")

"""Decoding a golden's prompts on a device: autoregressive, or by rounds of a drafter."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kdtr_cli.ddtree.rounds import DraftSettings, Round
from kdtr_cli.engine.devices import Device
from kdtr_cli.engine.dflash import DFlashDrafter
from kdtr_cli.engine.drafters import Drafter, NgramDrafter, ReplayDrafter, Sequence, SyntheticDrafter
from kdtr_cli.engine.generate import Request, generate
from kdtr_cli.engine.rounds import generate_rounds
from kdtr_cli.engine.statistics import Statistics
from kdtr_cli.engine.transformer import Transformer, prefill_rows
from kdtr_cli.engine.transformer_bf16 import Bf16Transformer
from kdtr_cli.engine.weights import upload_weights
from kdtr_cli.engine.weights_bf16 import upload_bf16
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Decoding, Generated
from kdtr_cli.model.source import Model
from kdtr_cli.workflows.drafting import DrafterSpec

__all__ = ["TIERS", "Decoded", "Draft", "Job", "decode"]


#: tier → how weights are laid out, and the engine over them
_TIERS = {"exact": (upload_weights, Transformer), "bf16": (upload_bf16, Bf16Transformer)}
TIERS = tuple(_TIERS)  #: of kdtr's own engine


@dataclass(frozen=True)
class Draft:
    """How a job drafts: settings, the opened drafter, and for each request what the drafter may know."""

    settings: DraftSettings
    spec: DrafterSpec
    sequences: list[Sequence]


@dataclass(frozen=True)
class Job:
    """What to decode. ``positions``: the most a sequence feeds; ``prefill`` None: as many rows as scratch allows."""

    model: Model
    choices: Choices
    requests: list[Request]
    decoding: Decoding
    positions: int
    batch: int
    prefill: int | None
    keep_prompt_logits: bool
    draft: Draft | None
    trace: str | None = None
    tier: str = "exact"


@dataclass(frozen=True)
class Decoded:
    """One sequence's result; rounds and the digest of its committed cache only where it was drafted."""

    generated: Generated
    rounds: list[Round]
    cache_digest: bytes | None


def decode(
    device: Device, job: Job, statistics: Statistics, progress: Callable[[int], None] = lambda done: None
) -> list[Decoded]:
    """Run a job; ``statistics`` counts along, ``progress`` is told how many sequences have ended.

    Guard zones are checked at the end.
    """
    config, draft = job.model.config, job.draft
    capacity, rows = job.positions, job.batch
    if draft is not None:
        # rows of a draft's tree and block lie behind the last committed one
        capacity += 1 + max(draft.settings.nodes, draft.settings.horizon)
        rows = job.batch * (1 + draft.settings.nodes)
    prefill = job.prefill or prefill_rows(config, capacity)
    size = {"rows": max(rows, prefill), "slots": job.batch, "capacity": capacity}
    upload, engine = _TIERS[job.tier]
    transformer = engine(device, config, upload(device, config, job.model.weights), job.choices, **size)
    results: list[Decoded | None] = [None] * len(job.requests)
    for done, (index, result) in enumerate(_results(transformer, job, prefill, statistics), 1):
        results[index] = result
        progress(done)
    device.synchronize()
    device.check_guards()
    return results


def _results(transformer: Transformer, job: Job, prefill: int, statistics: Statistics) -> Iterator[tuple[int, Decoded]]:
    same = {"batch": job.batch, "prefill": prefill, "keep_prompt_logits": job.keep_prompt_logits}
    same |= {"statistics": statistics, "trace": job.trace}
    if job.draft is None:
        for index, result in generate(transformer, job.requests, job.decoding, **same):
            yield index, Decoded(result, [], None)
        return
    requests = list(zip(job.requests, job.draft.sequences, strict=True))
    drafter = _drafter(transformer, job)
    decoded = generate_rounds(transformer, drafter, requests, job.decoding, budget=job.draft.settings.nodes, **same)
    for index, result, rounds, digest in decoded:
        yield index, Decoded(result, rounds, digest)


def _drafter(transformer: Transformer, job: Job) -> Drafter:
    settings, spec = job.draft.settings, job.draft.spec
    vocab = transformer.config.vocab_size
    device, batch = transformer.device, job.batch
    horizon, k = settings.horizon, settings.width(vocab)
    if spec.kind == "dflash":
        return DFlashDrafter(device, transformer, spec.dflash, batch, horizon, k, 1 + settings.nodes)
    if spec.kind == "ngram":
        return NgramDrafter(device, batch, horizon, k)
    sequences = job.draft.sequences
    if spec.kind == "synthetic":
        known = max(len(s.known) for s in sequences)
        seed = job.decoding.seed
        return SyntheticDrafter(device, batch, horizon, k, rate=spec.rate, seed=seed, vocab=vocab, known=known)
    positions, kept = max(len(s.counts) for s in sequences), sequences[0].top_ids.shape[-1]
    return ReplayDrafter(device, batch, horizon, k, positions=positions, kept=kept)

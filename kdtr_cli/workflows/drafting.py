"""``--drafter``: what the words of the command line stand for, for a golden and for a run alike."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtr_cli.ddtree.rounds import DraftSettings
from kdtr_cli.errors import InputError
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.dflash import Drafter, open_drafter

__all__ = ["DEFAULT_BLOCK", "DrafterSpec", "draft_settings", "drafting_manifest", "parse_drafter"]

DEFAULT_BLOCK = 8  #: block size of the drafters that have no checkpoint: 7 tokens ahead


@dataclass(frozen=True)
class DrafterSpec:
    """An opened ``--drafter``: its kind, its name in bundles, and what it needs."""

    kind: str  #: dflash, ngram, synthetic or replay
    identity: str
    rate: float = 0.0  #: synthetic: how often the first candidate is the known token
    dflash: Drafter | None = None


def parse_drafter(text: str, target: ModelConfig) -> DrafterSpec:
    """``ngram``, ``replay``, ``synthetic:P`` with 0 <= P <= 1, or the folder of a DFlash drafter for this target."""
    if text in ("ngram", "replay"):
        return DrafterSpec(text, text)
    head, _, rest = text.partition(":")
    if head == "synthetic":
        try:
            rate = float(rest)
        except ValueError:
            rate = -1.0
        if not 0.0 <= rate <= 1.0:
            raise InputError(f"--drafter {text}: synthetic:P needs a rate P from 0 to 1, such as synthetic:0.7")
        return DrafterSpec("synthetic", f"synthetic:{rate!r}", rate=rate)
    if not Path(text).is_dir():
        raise InputError(
            f"--drafter {text}: no such folder; ngram, synthetic:P, the folder of a DFlash drafter, or (run) replay"
        )
    drafter = open_drafter(text, target)
    return DrafterSpec("dflash", drafter.identity, dflash=drafter)


def draft_settings(spec: DrafterSpec, mode: str, budget: int | None, block_size: int | None) -> DraftSettings:
    """Settings of the rounds. The block size is the drafter's own, which an option may only shrink; budget: L."""
    if spec.dflash is not None:
        own = spec.dflash.config.block_size
        if block_size is not None and block_size > own:
            raise InputError(f"--block-size {block_size}: the drafter was made for blocks of {own}")
        block_size = own if block_size is None else block_size
    block = DEFAULT_BLOCK if block_size is None else block_size
    return DraftSettings(mode, spec.identity, block - 1 if budget is None else budget, block)


def drafting_manifest(spec: DrafterSpec, settings: DraftSettings, of: str | None = None) -> dict[str, Any]:
    """The manifest's ``drafting``. A replay names in ``of`` the drafter whose marginals it plays."""
    return {
        "mode": settings.mode,
        "drafter": settings.drafter,
        "of": of,
        "drafter_sha256": None if spec.dflash is None else spec.dflash.sha256,
        "budget": settings.budget,
        "block_size": settings.block_size,
        "horizon": settings.horizon,
    }

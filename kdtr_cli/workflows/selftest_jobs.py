"""Sabotages of the host's part: what an engine does that was asked for something else.

Each makes another job of the one that `kdtr run` would do; the bundle says what was asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from kdtr_cli.model.config import ModelConfig
from kdtr_cli.workflows.decode import Job

__all__ = ["never_stops", "other_config", "other_scale", "runs_on", "scaled_to_the"]


def other_config(**changes: Any) -> Callable[[Job], Job]:
    """An engine that reads the model's config wrongly."""
    return lambda job: _with_config(job, replace(job.model.config, **changes))


def _with_config(job: Job, config: ModelConfig) -> Job:
    return replace(job, model=replace(job.model, config=config))


def scaled_to_the(power: int) -> Callable[[Job], Job]:
    """An engine that applies routed_scaling_factor ``power`` times."""

    def change(job: Job) -> Job:
        config = job.model.config
        return _with_config(job, replace(config, routed_scaling_factor=config.routed_scaling_factor**power))

    return change


@dataclass(frozen=True)
class _OtherScale(ModelConfig):
    """A config whose attention scores are scaled otherwise."""

    scale: float = 1.0

    def softmax_scale(self) -> float:
        return self.scale


def other_scale(scale: Callable[[ModelConfig], float]) -> Callable[[Job], Job]:
    """An engine that multiplies attention scores by ``scale`` of the config."""

    def change(job: Job) -> Job:
        config = job.model.config
        values = {field.name: getattr(config, field.name) for field in fields(ModelConfig)}
        return _with_config(job, _OtherScale(**values, scale=scale(config)))

    return change


def never_stops(job: Job) -> Job:
    """An engine without stop tokens: it runs to the limit."""
    return replace(job, decoding=replace(job.decoding, stop_ids=()))


def runs_on(job: Job) -> Job:
    """An engine that decodes three tokens past the limit."""
    return replace(job, decoding=replace(job.decoding, steps=job.decoding.steps + 3), positions=job.positions + 3)

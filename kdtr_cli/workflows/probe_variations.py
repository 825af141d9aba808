"""What `kdtr probe` varies: the same prompts as jobs that must give the same bits."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kdtr_cli.bundle.reader import Bundle
from kdtr_cli.engine.generate import Request
from kdtr_cli.engine.transformer import prefill_rows
from kdtr_cli.errors import InputError
from kdtr_cli.model.prompts import Generated, Prompt
from kdtr_cli.model.source import Model
from kdtr_cli.workflows.decode import Draft, Job
from kdtr_cli.workflows.run import RunOptions, make_job

__all__ = ["BUDGETS", "DRAFTERS", "PREFILL", "PROBES", "Variation", "variations"]

#: In this order; the names are those of --probe.
PROBES = ("rerun", "fresh-process", "solo", "place", "chunked-prefill", "ddtree", "chain")

PREFILL = (1, 7, 64)  #: rows of a prefill pass: none, a prime that cuts no prompt evenly, the usual
BUDGETS = (1, 8, 64)  #: nodes of a tree: a chain of one, the usual, more than a block has
#: ngram hits where the text repeats itself, which random prompts do not; synthetic hits anywhere, so that walks,
#: compaction and positions behind them are used whatever the prompts.
DRAFTERS = ("ngram", "synthetic:0.7")


@dataclass(frozen=True)
class Variation:
    """One way to decode. ``places``: for each request of the job its place in the base, None for mere company.

    Without a job it is the base in a fresh process; ``skipped`` says why nothing can be compared.
    """

    probe: str
    varied: str
    job: Job | None = None
    places: tuple[int | None, ...] = ()
    skipped: str | None = None


def variations(
    golden: Bundle, model: Model, job: Job, base: Sequence[Generated], asked: Sequence[str]
) -> list[Variation]:
    """All variations of the probes that are asked for; ``base`` is what the job itself gave."""
    makers = {
        "rerun": lambda: [Variation("rerun", "again in this process", job, _in_order(job))],
        "fresh-process": lambda: [Variation("fresh-process", "in a new process")],
        "solo": lambda: _solo(job, base),
        "place": lambda: _place(job, base),
        "chunked-prefill": lambda: _chunked(job),
        "ddtree": lambda: _drafted(golden, model, job, base, "ddtree"),
        "chain": lambda: _drafted(golden, model, job, base, "chain"),
    }
    return [variation for name in asked for variation in makers[name]()]


def _in_order(job: Job) -> tuple[int, ...]:
    return tuple(range(len(job.requests)))


# ---------------------------------------------------------------------------------------------------- company


def _solo(job: Job, base: Sequence[Generated]) -> Iterator[Variation]:
    if len(job.requests) == 1:
        company = _company(job)
        together = dataclasses.replace(job, requests=[*job.requests, *company], batch=1 + len(company))
        what, made, places = "with 2 other prompts, alone before", together, (0, *(None for _ in company))
    else:
        what = f"batch 1, {job.batch} together before"
        made, places = dataclasses.replace(job, batch=1), _in_order(job)
    lonely = _lonely(base)
    if lonely is not None:
        yield Variation("solo", what, skipped=lonely)
    elif len(base) > 1 and job.batch == 1:  # not with today's defaults
        yield Variation("solo", what, skipped="the base was not decoded together")
    else:
        yield Variation("solo", what, made, places)


def _place(job: Job, base: Sequence[Generated]) -> Iterator[Variation]:
    n = len(job.requests)
    lonely = _lonely(base)
    if lonely is not None:
        yield Variation("place", "other places in the batch", skipped=lonely)
    elif n == 1:
        company = _company(job)
        after = dataclasses.replace(job, requests=[*company, *job.requests], batch=1 + len(company))
        yield Variation("place", "after 2 other prompts", after, (*(None for _ in company), 0))
    else:
        orders = {"reversed": tuple(range(n))[::-1], "rotated by one": (*range(1, n), 0)}
        if n == 2:
            del orders["rotated by one"]  # the same
        for name, order in orders.items():
            yield Variation("place", name, dataclasses.replace(job, requests=[job.requests[i] for i in order]), order)


def _lonely(base: Sequence[Generated]) -> str | None:
    """Why no decode step can have had two sequences."""
    if sum(len(made.tokens) > 1 for made in base) < min(2, len(base)):
        return "too few sequences go beyond their first token: no step is decoded together"
    return None


def _company(job: Job) -> list[Request]:
    """Neighbours of a prompt that stands alone: itself backwards, and its first half."""
    prompt = job.requests[0].prompt
    ids = prompt.ids
    others = (np.ascontiguousarray(ids[::-1]), ids[: max(1, len(ids) // 2)])
    return [Request(Prompt(f"company {i}", part, prompt.stream)) for i, part in enumerate(others)]


# ---------------------------------------------------------------------------------------------------- prefill


def _chunked(job: Job) -> Iterator[Variation]:
    longest = max(len(request.prompt.ids) for request in job.requests)
    usual = min(prefill_rows(job.model.config, job.positions), longest)
    sizes = sorted({min(size, longest) for size in PREFILL} - {usual})
    if not sizes:
        yield Variation("chunked-prefill", "pieces of the prompt", skipped="every prompt is one token: nothing to cut")
    for size in sizes:
        what = f"{size} token{'s' if size > 1 else ''} a pass, {usual} before"
        yield Variation("chunked-prefill", what, dataclasses.replace(job, prefill=size), _in_order(job))


# ---------------------------------------------------------------------------------------------------- drafts


def _drafted(golden: Bundle, model: Model, job: Job, base: Sequence[Generated], mode: str) -> Iterator[Variation]:
    told = [(drafter, budget) for drafter in DRAFTERS for budget in (BUDGETS if mode == "ddtree" else (None,))]
    if golden.manifest.get("drafting"):
        told.append((None, None))  # the golden's own, replayed where it was a checkpoint
    seen = []
    for drafter, budget in told:
        options = RunOptions(golden.path, Path(), mode, steps=job.decoding.steps, drafter=drafter, budget=budget)
        try:
            draft = make_job(golden, model, options).draft
        except InputError as error:
            yield Variation(mode, drafter or "the golden's own", skipped=str(error))
            continue
        if draft.settings in seen:
            continue
        seen.append(draft.settings)
        own = ", the golden's own" if drafter is None else ""
        nodes = f", budget {draft.settings.budget}" if mode == "ddtree" else f", {draft.settings.nodes} ahead"
        yield Variation(mode, f"{draft.spec.identity}{nodes}{own}", _with_draft(job, draft, base), _in_order(job))


def _with_draft(job: Job, draft: Draft, base: Sequence[Generated]) -> Job:
    """The job by rounds; a drafter that hits known tokens is given the base's, so that it does hit."""
    sequences = [
        dataclasses.replace(sequence, known=made.tokens) for sequence, made in zip(draft.sequences, base, strict=False)
    ]
    return dataclasses.replace(job, draft=dataclasses.replace(draft, sequences=sequences))

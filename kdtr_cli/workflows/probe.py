"""`kdtr probe`: is the engine deterministic? The same prompts in other company, pieces, modes and processes.

The first plain run is the base; what is asked is whether anything that must change no bit does. Variations of decoding
stand in `probe_variations`; here they are run and compared.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kdtr_cli.bundle.reader import Bundle, BundleSequence, open_bundle
from kdtr_cli.ddtree.rounds import statistics as round_statistics
from kdtr_cli.engine.devices import open_device
from kdtr_cli.engine.statistics import Statistics
from kdtr_cli.errors import DeviceError, InputError, KdtrError
from kdtr_cli.model.prompts import Generated
from kdtr_cli.model.source import Model
from kdtr_cli.reference.arith import CONTRACT_VERSION
from kdtr_cli.workflows.bitwise import first_difference
from kdtr_cli.workflows.decode import Decoded, Job, decode
from kdtr_cli.workflows.executors import open_executor
from kdtr_cli.workflows.manifest import logits_arrays
from kdtr_cli.workflows.probe_report import DIFFERS, SAME, SKIPPED, ProbeReport, ProbeRow
from kdtr_cli.workflows.probe_variations import PROBES, Variation, variations
from kdtr_cli.workflows.run import RunOptions, check_golden, make_job, open_golden_model

__all__ = ["ProbeOptions", "probe"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ProbeOptions:
    """The options of ``kdtr probe``; ``probes`` empty: all; ``sequences``: the golden's first N."""

    golden: Path
    model: str | None = None
    device: str = "auto"
    probes: tuple[str, ...] = ()
    steps: int | None = None
    sequences: int | None = None


def probe(options: ProbeOptions, progress: Progress = lambda what, done, total: None) -> ProbeReport:
    """Run a golden's prompts plainly, then in every variation asked for, and compare tokens and logits as bits.

    Nothing is written. InputError for options and bundles that can't be used; DeviceError, naming the probe, where the
    engine fails instead of differing.
    """
    unknown = [name for name in options.probes if name not in PROBES]
    if unknown:
        raise InputError(f"--probe {unknown[0]}: one of {', '.join(PROBES)}")
    asked = tuple(name for name in PROBES if not options.probes or name in options.probes)
    with open_bundle(options.golden) as golden:
        check_golden(golden)
        model = open_golden_model(golden, _run_options(options))
        job = _base_job(golden, model, options)
        progress("base", 0, 1)
        device, made = _decode("base", job, options)
        base = [one.generated for one in made]
        ids = [request.prompt.id for request in job.requests]
        todo = variations(golden, model, job, base, asked)
        rows = []
        for done, variation in enumerate(todo, 1):
            progress(variation.probe, done, len(todo) + 1)
            rows.append(_row(variation, ids, base, options))
        parts = _parts(golden, job, options, asked)
        return ProbeReport(
            device, tuple(rows), _against_golden(golden, model, ids, base, options), bool(options.probes), parts
        )


def _run_options(options: ProbeOptions) -> RunOptions:
    return RunOptions(options.golden, Path(), model=options.model, steps=options.steps)


def _base_job(golden: Bundle, model: Model, options: ProbeOptions) -> Job:
    job = make_job(golden, model, _run_options(options))
    requests = job.requests[: options.sequences]
    return dataclasses.replace(job, requests=requests, batch=min(job.batch, len(requests)))


def _parts(golden: Bundle, job: Job, options: ProbeOptions, asked: tuple[str, ...]) -> tuple[tuple[str, int, int], ...]:
    parts = []
    if len(asked) < len(PROBES):
        parts.append(("selected", len(asked), len(PROBES)))
    if options.steps is not None:
        parts.append(("steps", options.steps, golden.manifest["decoding"]["steps"]))
    if len(job.requests) < len(golden.sequences):
        parts.append(("sequences", len(job.requests), len(golden.sequences)))
    return tuple(parts)


def _decode(name: str, job: Job, options: ProbeOptions) -> tuple[str, list[Decoded]]:
    try:
        with open_device(options.device) as device:
            return device.describe()["device"], decode(device, job, Statistics())
    except DeviceError as error:
        raise DeviceError(f"{name}: {error}") from error


# ---------------------------------------------------------------------------------------------------- one variation


def _row(variation: Variation, ids: list[str], base: list[Generated], options: ProbeOptions) -> ProbeRow:
    name, varied = variation.probe, variation.varied
    if variation.skipped is not None:
        return ProbeRow(name, varied, SKIPPED, note=variation.skipped)
    if variation.job is None:
        return _compared(name, varied, ids, base, _fresh(options))
    _, made = _decode(f"{name} ({varied})", variation.job, options)
    results = {place: one.generated for place, one in zip(variation.places, made, strict=True) if place is not None}
    company = [one.generated for place, one in zip(variation.places, made, strict=True) if place is None]
    if company and max(len(one.tokens) for one in company) < 2:
        return ProbeRow(name, varied, SKIPPED, note="the other prompts end with their first token: no company")
    note = ""
    if variation.job.draft is not None:
        rounds = [one for result in made for one in result.rounds]
        if not rounds:
            return ProbeRow(
                name, varied, SKIPPED, note="every sequence ends with its first token: no round was drafted"
            )
        note = f"rounds={len(rounds)} tau={round_statistics(rounds)['tau']:.2f}"
    return _compared(name, varied, ids, base, [results[place] for place in range(len(base))], note)


def _compared(
    name: str, varied: str, ids: list[str], base: list[Generated], other: list[Generated], note: str = ""
) -> ProbeRow:
    found = [first_difference(a, b) for a, b in zip(base, other, strict=True)]
    tokens, equal = sum(len(one.tokens) for one in base), sum(steps for steps, _ in found)
    place = next((i for i, (_, difference) in enumerate(found) if difference is not None), None)
    counts = {"sequences": len(base), "tokens": tokens, "tokens_equal": equal, "note": note}
    if place is None:
        return ProbeRow(name, varied, SAME, **counts)
    return ProbeRow(name, varied, DIFFERS, **counts, sequence=ids[place], place=place, difference=found[place][1])


def _fresh(options: ProbeOptions) -> list[Generated]:
    """The base again, in a process of its own that starts from nothing; it goes when this one does."""
    with open_executor("processes", 1) as (executor, _):
        try:
            return executor.submit(decode_afresh, options).result()
        except BrokenExecutor as error:
            raise DeviceError("fresh-process: the process died (killed, or out of memory)") from error
        except KdtrError as error:
            raise type(error)(f"fresh-process: {error}") from error


def decode_afresh(options: ProbeOptions) -> list[Generated]:
    """What the fresh process does: everything that leads to the base, from the files on."""
    with open_bundle(options.golden) as golden:
        job = _base_job(golden, open_golden_model(golden, _run_options(options)), options)
        _, made = _decode("base", job, options)
        return [one.generated for one in made]


# ---------------------------------------------------------------------------------------------------- the golden


def _against_golden(
    golden: Bundle, model: Model, ids: list[str], base: list[Generated], options: ProbeOptions
) -> ProbeRow:
    """The base against the golden's exact logits, as far as both go."""
    row = ProbeRow("golden", "the base against the golden's exact logits", SKIPPED)
    other = _other_question(golden, model, options)
    if other is not None:
        return dataclasses.replace(row, note=other)
    steps = golden.manifest["decoding"]["steps"]
    steps = steps if options.steps is None else min(steps, options.steps)
    pairs = [_golden_pair(s, made, steps) for s, made in zip(golden.sequences[: len(base)], base, strict=True)]
    if any(pair is None for pair in pairs):
        return dataclasses.replace(row, note="it holds no exact logits")
    wanted, got = zip(*pairs, strict=True)
    return _compared(row.probe, row.varied, ids, list(wanted), list(got))


def _other_question(golden: Bundle, model: Model, options: ProbeOptions) -> str | None:
    """Why the golden's numbers are no answer here: another contract, or another model than the one embedded."""
    made = golden.manifest["model"]
    if golden.manifest.get("contract_version") != CONTRACT_VERSION:
        return "it was made by another version of the numerics contract"
    if options.model is None:
        return None
    if made.get("config_sha256") != hashlib.sha256(model.config_text.encode()).hexdigest():
        return "the config is not the golden's"
    same = made.get("weights_used_sha256") == model.weights.digests().used
    return None if same else "the weights are not the golden's"


def _golden_pair(sequence: BundleSequence, made: Generated, steps: int) -> tuple[Generated, Generated] | None:
    """Golden and base of one sequence, as logits or, where the golden keeps no more, as digests of their rows."""
    names = sequence.array_names()
    form = next((form for form in ("full", "digest") if _path("logits", form) in names), None)
    if form is None:
        return None
    tokens = sequence.tokens[:steps]
    reason = sequence.finish_reason if len(tokens) == len(sequence.tokens) == len(made.tokens) else made.finish_reason
    prompts = made.prompt_logits is not None and _path("prompt_logits", form) in names

    def stored(group: str) -> np.ndarray:
        return sequence.array(_path(group, form))

    def kept(group: str, logits: np.ndarray) -> np.ndarray:
        return logits_arrays(group, "exact", logits, form)[_path(group, form)]

    wanted = Generated(tokens, stored("logits")[:steps], stored("prompt_logits") if prompts else None, reason)
    got = Generated(
        made.tokens[:steps],
        kept("logits", made.logits[:steps]),
        kept("prompt_logits", made.prompt_logits) if prompts else None,
        made.finish_reason,
    )
    return wanted, got


def _path(group: str, form: str) -> str:
    return f"{group}/exact" if form == "full" else f"{group}/exact_sha256"

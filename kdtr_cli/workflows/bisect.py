"""`kdtr bisect`: every operation of the engine by itself, given a golden's own inputs; the faulty one stands alone.

The inputs are those of the NumPy model that made the golden, run again along the golden's tokens: a trace of everything
that an operation reads would be many times as large as what it is made from. That they are the golden's own is proven,
not assumed: config, weights and contract must have its digests, and every row of its exact logits must come out again.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kdtr_cli.bundle.reader import Bundle, BundleSequence, open_bundle
from kdtr_cli.engine.devices import Device, open_device
from kdtr_cli.engine.transformer import Transformer, prefill_rows
from kdtr_cli.engine.weights import upload_weights
from kdtr_cli.errors import DeviceError, InputError
from kdtr_cli.model.prompts import Prompt
from kdtr_cli.model.source import Model
from kdtr_cli.parity.tolerances import EXACT_TIER, JudgeOptions, effective_tolerance
from kdtr_cli.reference import exact
from kdtr_cli.reference.arith import CONTRACT_VERSION
from kdtr_cli.reference.transformer import Model as NumpyModel
from kdtr_cli.workflows.bisect_graft import BATCH, DECODE, PREFILL, SLOTS, Grafting, Pass
from kdtr_cli.workflows.bisect_operations import pass_sizes, reachable_kernels
from kdtr_cli.workflows.bisect_report import BisectReport
from kdtr_cli.workflows.decode import Job
from kdtr_cli.workflows.manifest import logits_arrays
from kdtr_cli.workflows.run import RunOptions, check_golden, make_job, open_golden_model

__all__ = ["BisectOptions", "bisect"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BisectOptions:
    """The options of ``kdtr bisect``. ``positions``: those that are fed alone, as decode steps feed them; "all", or
    None for the first and the last that a decode step fed. ``judge``: tolerance and selected sequences."""

    golden: Path
    model: str | None = None
    device: str = "auto"
    positions: tuple[int, ...] | str | None = None
    judge: JudgeOptions = field(default_factory=JudgeOptions)


def bisect(options: BisectOptions, progress: Progress = lambda what, done, total: None) -> BisectReport:
    """Judge every operation of the engine along a golden's sequences.

    InputError: a golden that can't be used, or other weights than it was made with. DeviceError: the device failed.
    """
    tolerance = effective_tolerance(options.judge, EXACT_TIER)
    with open_bundle(options.golden) as golden:
        check_golden(golden)
        chosen = _selected(golden, options)
        asked = RunOptions(options.golden, Path(), model=options.model, teacher_force=True)
        model = open_golden_model(golden, asked)
        _check_origin(golden, model)
        job = make_job(golden, model, asked)
        with open_device(options.device) as device:
            engine, most = _engine(device, job)
            reference = NumpyModel(model.config, model.weights, job.choices, job.positions, exact, inner=True)
            grafting = Grafting(engine, reference, job.decoding, tolerance, most)
            sizes = pass_sizes(engine, most)
            plan = [(s, list(_passes(s, sizes, most, options.positions))) for s in chosen]
            total = sum(len(passes) for _, passes in plan)
            done = 0
            for sequence, passes in plan:
                grafting.start(Prompt(sequence.id, sequence.prompt, sequence.stream), _fed(sequence))
                for one in passes:
                    progress(f"{sequence.id}: {one.form}", done, total)
                    grafting.feed(one, _proof(golden, sequence, one))
                    done += 1
            reachable = frozenset().union(*(reachable_kernels(engine, n) for n in sizes))
            report = BisectReport(
                device.describe()["device"],
                grafting.results(),
                tolerance,
                (len(chosen), len(golden.sequences)),
                tuple(sorted(reachable - grafting.kernels)),
            )
            _check_guards(device, report)
            return report


def _check_guards(device: Device, report: BisectReport) -> None:
    """DeviceError where something wrote outside its array; what was found by then is not lost."""
    try:
        device.check_guards()
    except DeviceError as error:
        if not report.faulty:
            raise
        raise DeviceError(f"{error}; at fault by then: {', '.join(report.faulty)}") from error


def _engine(device: Device, job: Job) -> tuple[Transformer, int]:
    """The engine as a run has it, and the rows of its longest pass."""
    config, capacity = job.model.config, job.positions
    rows = prefill_rows(config, capacity)
    weights = upload_weights(device, config, job.model.weights)
    return Transformer(device, config, weights, job.choices, rows=rows, slots=SLOTS, capacity=capacity), rows


def _selected(golden: Bundle, options: BisectOptions) -> list[BundleSequence]:
    """The sequences to feed; InputError where one is not there, or a position is in none of them."""
    wanted = options.judge.select
    known = [s.id for s in golden.sequences]
    for name in wanted or ():
        if name not in known:
            raise InputError(f"--select {name}: no such sequence in {golden.path}; it has {_listed(known)}")
    chosen = [s for s in golden.sequences if wanted is None or s.id in wanted]
    if not chosen:
        raise InputError(f"{golden.path} holds no sequence")
    if isinstance(options.positions, tuple):
        longest = max(len(_fed(s)) for s in chosen)
        for position in options.positions:
            if not 0 <= position < longest:
                raise InputError(f"--positions {position}: the sequences feed positions 0 to {longest - 1}")
    return chosen


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _fed(sequence: BundleSequence) -> np.ndarray:
    """int32 [P + T - 1]: all ids that a sequence feeds; its last token is not."""
    return np.concatenate([sequence.prompt, sequence.tokens[:-1]]).astype(np.int32)


def _passes(
    sequence: BundleSequence, sizes: list[int], most: int, positions: tuple[int, ...] | str | None
) -> Iterator[Pass]:
    """How a sequence is fed: all of it in pieces, then its last rows in each other size, and single rows."""
    count = len(_fed(sequence))
    for first in range(0, count, most):
        yield Pass(PREFILL, first, min(most, count - first))
    if positions is None:
        alone = {min(len(sequence.prompt), count - 1), count - 1}
    else:
        alone = set(range(count)) if positions == "all" else {p for p in positions if p < count}
    yield from (Pass(BATCH, count - rows, rows) for rows in sizes if 1 < rows <= count)
    yield from (Pass(DECODE, first, 1) for first in sorted(alone))


# ------------------------------------------------------------------------------------------- the golden's own inputs


def _check_origin(golden: Bundle, model: Model) -> None:
    """InputError unless the reference, run again, must give what the golden holds."""
    made, path = golden.manifest, golden.path
    if "exact" not in made["arithmetic"]:
        raise InputError(
            f"{path} holds no exact logits ({', '.join(made['arithmetic'])}): bisect needs a golden of the exact "
            "arithmetic; make it without --no-exact and --arith"
        )
    if made.get("contract_version") != CONTRACT_VERSION:
        raise InputError(
            f"{path} is of version {made.get('contract_version')} of the numerics contract, this kdtr of "
            f"{CONTRACT_VERSION}; make it again"
        )
    config = hashlib.sha256(model.config_text.encode()).hexdigest()
    for what, key, digest in (
        ("another config", "config_sha256", config),
        ("other weights", "weights_used_sha256", model.weights.digests().used),
    ):
        if made["model"].get(key) != digest:
            raise InputError(f"{path} was made with {what} than {model.name}'s ({key} differs); give that model")


def _proof(golden: Bundle, sequence: BundleSequence, one: Pass) -> Callable[[str, np.ndarray], None]:
    """Watches the reference: InputError where its logits, or a tensor that the golden's trace has, is not the golden's,
    to the bit."""
    before = len(sequence.prompt) - 1  # rows that predict no token
    names = set(sequence.array_names())

    def same(path: str, first: int, rows: np.ndarray) -> None:
        stored = sequence.rows(path, first, first + len(rows))
        if rows.tobytes() != stored.tobytes():
            raise InputError(
                f"{golden.path}: {path} of sequence {sequence.id!r} is not what this kdtr's reference gives; "
                "make the golden again"
            )

    def see(name: str, value: np.ndarray) -> None:
        if f"trace/{name}" in names:
            same(f"trace/{name}", one.first, value)
        if name == "logits" and one.first + one.count > before:
            low = max(one.first, before)
            made = logits_arrays("logits", "exact", value[low - one.first :], golden.manifest["logits"])
            for path, rows in made.items():
                same(path, low - before, rows)

    return see

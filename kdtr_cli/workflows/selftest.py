"""`kdtr selftest`: does the gate go red for every classic bug, and stay green without one?

Goldens, runs and judgements are the real ones: what `kdtr golden`, `kdtr run` and `kdtr diff` do, on an engine with one
thing changed (`selftest_sabotages`), over models on which that shows (`selftest_goldens`).
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.engine.devices import Device, open_device
from kdtr_cli.errors import DeviceError, InputError, KdtrError
from kdtr_cli.model.presets import write_model
from kdtr_cli.model.traces import trace_tensors
from kdtr_cli.parity.results import Report
from kdtr_cli.parity.tolerances import JudgeOptions, TensorRule
from kdtr_cli.workflows.decode import Job
from kdtr_cli.workflows.diff import diff
from kdtr_cli.workflows.run import RunOptions, embedded_config, make_run, run_changed
from kdtr_cli.workflows.selftest_goldens import DRAFTER, GOLDENS, make_selftest_golden
from kdtr_cli.workflows.selftest_outputs import rewrite
from kdtr_cli.workflows.selftest_report import BaselineRow, SabotageRow, SelftestReport
from kdtr_cli.workflows.selftest_sabotage import Sabotage, replaced_sources
from kdtr_cli.workflows.selftest_sabotages import SABOTAGES

__all__ = ["SelftestOptions", "selftest"]

#: Called with what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SelftestOptions:
    """The options of ``kdtr selftest``; ``only`` empty: all sabotages.

    gate: None, the gate as it is without options, or the user's own; gate_text: that as the user gave it.
    """

    device: str = "cpu"
    only: tuple[str, ...] = ()
    gate: JudgeOptions | None = None
    gate_text: str | None = None


def selftest(
    options: SelftestOptions,
    progress: Progress = lambda what, done, total: None,
    sabotages: Mapping[str, Sabotage] = SABOTAGES,
) -> SelftestReport:
    """Sabotage the engine in every way asked for and judge each run; nothing is left behind but compiled kernels.

    InputError: a sabotage that there isn't, a device that there isn't. KdtrError, naming the sabotage: the self-test
    itself is broken, or the engine fails (exit 3); no verdict is given then.
    """
    unknown = [name for name in options.only if name not in sabotages]
    if unknown:
        raise InputError(f"--only: no sabotage is called {unknown[0]!r}; 'kdtr selftest --list' names them")
    asked = {name: s for name, s in sabotages.items() if not options.only or name in options.only}
    # all texts first: a sabotage that no longer fits must show before anything else is said
    texts = {name: replaced_sources(name, s) for name, s in asked.items()}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kdtr-selftest-") as folder, ThreadPoolExecutor(_processors()) as pool:
        bench = _Bench(Path(folder), options)
        # compilers are processes of their own: they work while the goldens are made
        devices = {name: pool.submit(_device, name, options.device, given) for name, given in texts.items() if given}
        names = dict.fromkeys(s.golden for s in asked.values())
        total = len(names) + len(asked)
        baselines, rows = [], []
        for golden in names:
            progress(f"golden {golden}", len(baselines), total)
            baselines.append(bench.baseline(golden))
        for name, sabotage in asked.items():
            progress(name, len(baselines) + len(rows), total)
            rows.append(bench.row(name, sabotage, devices.get(name)))
    return SelftestReport(
        device=bench.device,
        gate=options.gate_text,
        baselines=tuple(baselines),
        rows=tuple(rows),
        sabotages=len(sabotages),
        seconds=time.monotonic() - begin,
    )


def _processors() -> int:
    return max(1, len(os.sched_getaffinity(0)))


def _device(name: str, kind: str, replaced: Mapping[str, str]) -> Device:
    """A device whose kernels are sabotaged, these compiled already."""
    with _naming(name):
        device = open_device(kind, replaced=replaced)
        device.compile(replaced)
        return device


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Puts the name of what was being done before an error's message."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    except KdtrError as error:
        raise DeviceError(f"{name}: {error}") from error


class _Bench:
    """Where goldens and runs lie, and how they are judged."""

    def __init__(self, folder: Path, options: SelftestOptions) -> None:
        self.folder, self.options = folder, options
        self.device = ""

    def baseline(self, golden: str) -> BaselineRow:
        """Make a golden, run the engine as it is, judge it."""
        begin = time.monotonic()
        with _naming(golden):
            make_selftest_golden(golden, self.folder)
            summary = make_run(self._run_options(golden, self._healthy(golden)))
            self.device = summary.device["device"]
            report = self._judge(golden, self._healthy(golden))
        return BaselineRow(
            golden, GOLDENS[golden].brings, report.verdict.value, int(report.exit_code), time.monotonic() - begin
        )

    def row(self, name: str, sabotage: Sabotage, device: Future[Device] | None) -> SabotageRow:
        """Run the sabotaged engine, judge it."""
        begin = time.monotonic()
        with _naming(name):
            run = self.folder / f"{name}.run.h5"
            if sabotage.output is not None:
                rewrite(self._healthy(sabotage.golden), run, sabotage.output)
            else:
                self._run(name, sabotage, run, device)
            report = self._judge(sabotage.golden, run)
        return SabotageRow(
            name=name,
            what=sabotage.what,
            like=sabotage.like,
            kind=sabotage.kind,
            where=sabotage.where,
            golden=sabotage.golden,
            expected=sabotage.verdict.value,
            expected_hints=sabotage.hints,
            verdict=report.verdict.value,
            exit_code=int(report.exit_code),
            hint=_hint(report),
            first_tensor=_first_tensor(report),
            finding=report.findings[0].message if report.findings else "",
            gated=self.options.gate is not None,
            seconds=time.monotonic() - begin,
        )

    def _run(self, name: str, sabotage: Sabotage, run: Path, device: Future[Device] | None) -> None:
        options = self._run_options(sabotage.golden, run, **dict(sabotage.run))
        if sabotage.other_weights:
            other = self.folder / "other-weights"
            write_model(other, "tiny-groups", seed=1)
            make_run(self._run_options(sabotage.golden, run, model=str(other)))
            return
        opened = device.result() if device is not None else open_device(self.options.device)
        run_changed(opened, options, sabotage.job or _as_it_is)

    def _judge(self, golden: str, run: Path) -> Report:
        options = self.options.gate or JudgeOptions()
        if options.rules:
            # rules are made for the user's tensors; one that holds for none here would be a mistake in `kdtr diff`
            with open_bundle(self._golden(golden)) as bundle:
                tensors = trace_tensors(embedded_config(bundle, bundle.path), "full")
            names = {"logits", *(tensor.name for tensor in tensors)}
            options = replace(options, rules=_that_hold(options.rules, names))
        return diff(self._golden(golden), run, options)

    def _run_options(self, golden: str, run: Path, **more: object) -> RunOptions:
        drafting = GOLDENS[golden].drafting
        if drafting is not None:
            more |= {"mode": "ddtree"}
            if golden == "drafter":
                more |= {"drafter": str(self.folder / DRAFTER)}
        return RunOptions(self._golden(golden), run, device=self.options.device, trace="full", **more)

    def _golden(self, golden: str) -> Path:
        return self.folder / f"{golden}.h5"

    def _healthy(self, golden: str) -> Path:
        return self.folder / f"{golden}.run.h5"


def _that_hold(rules: tuple[TensorRule, ...], names: set[str]) -> tuple[TensorRule, ...]:
    """The rules that are the first to match one of the names."""
    kept: list[TensorRule] = []
    for rule in rules:
        if any(rule.matches(name) and not any(other.matches(name) for other in kept) for name in names):
            kept.append(rule)
    return tuple(kept)


def _as_it_is(job: Job) -> Job:
    return job


def _hint(report: Report) -> str | None:
    """The first hint that says more than where."""
    hints = [finding.hint for finding in report.findings if finding.hint is not None]
    return next((hint for hint in hints if hint != "first-tensor"), hints[0] if hints else None)


def _first_tensor(report: Report) -> str | None:
    traces = (sequence.trace for sequence in report.sequences)
    return next((trace.first.name for trace in traces if trace is not None and trace.first is not None), None)

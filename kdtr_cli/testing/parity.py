"""`assert_parity`: a run against its golden, as a test's assertion."""

import os
import secrets
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.errors import DeviceError, EngineError, Exit, InputError
from kdtr_cli.parity.judge import invalid, judge
from kdtr_cli.parity.results import Report
from kdtr_cli.parity.tolerances import JudgeOptions, TensorRule
from kdtr_cli.parity.verdicts import Finding, Level, Verdict
from kdtr_cli.report.short import report_short
from kdtr_cli.testing.inputs import inputs_of
from kdtr_cli.testing.outputs import MadeRun, Output, make_run, save_run
from kdtr_cli.workflows.diff import bundle_evidence, diff
from kdtr_cli.workflows.run import check_golden
from kdtr_cli.workflows.sweep_diff import diff_sweeps
from kdtr_cli.workflows.verify import verify_bundle, verify_sweep

__all__ = ["ParityError", "assert_parity", "replay_command"]

#: What a caller may say of the judgement, by the names of the fields; where each came from is said for them.
_JUDGING = tuple(f.name for f in fields(JudgeOptions) if f.name != "origins")

#: Those that change nothing that is said; `kdtr diff` has no option for them.
_SILENT = ("keep_rounds", "threads")


class ParityError(AssertionError):
    """The run does not agree with the golden, or that can't be shown (INVALID, INCONCLUSIVE). Its text is a short
    report that ends with the verdict line of `kdtr diff`; ``report`` is the whole of it, ``saved`` the run's bundle."""

    def __init__(self, text: str, report: Report, saved: Path | None = None) -> None:
        super().__init__(text)
        self.report = report
        self.saved = saved


def assert_parity(
    golden: str | Path,
    run: str | Path | Mapping[str, Output] | Sequence[Output],
    *,
    tier: str = "exact",
    teacher_forced: bool = False,
    about: Mapping[str, Any] | None = None,
    save: str | Path | None = None,
    **judging: Any,
) -> Report:
    """Judge ``run`` against the bundle (or sweep) ``golden``, as `kdtr diff` does; returns the report if that exits
    with 0 and raises `ParityError` otherwise.

    run: the path of a run bundle or sweep, or what the engine made, in memory: an `Output` for each prompt by the
    sequence's id, or a list in the golden's order. Of those in memory ``tier`` is the arithmetic that the engine
    claims, as in `kdtr run --engine --tier`; ``teacher_forced`` says that it was fed the golden's tokens; ``about``
    what it says of itself (docs/engines.md), the digest of its weights for instance.

    judging: atol, rtol, max_ulp, max_kl, on_tie, allow_partial, allow_loose, steps, select (an id or several), rules
    (of `kdtr_cli.parity.tolerances.TensorRule`), and whatever else `JudgeOptions` has, with the defaults of `kdtr
    diff`: without a bound, tier exact is judged at 0. No pyproject.toml is read.

    save: where a run that does not pass is written as a bundle, over what is there; the text then has the one command
    that gives the same verdict again.

    InputError (no AssertionError): the golden is missing, broken, not finite or no golden, ``save`` names it, or an
    option is wrong. Then nothing is known of the engine.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    options = _options(judging)
    made = None
    if save is not None and Path(save).exists() and Path(golden).exists() and Path(save).samefile(golden):
        raise InputError(f"save: {save} is the golden itself; give the run another name")
    if isinstance(run, str | os.PathLike):
        if teacher_forced or about is not None or tier != "exact":
            raise InputError("tier, teacher_forced and about are for outputs in memory: a run bundle says them itself")
        report = _judge_paths(Path(golden), Path(run), options)
    else:
        if Path(golden).is_dir():
            raise InputError(f"{golden} is a sweep: 'kdtr merge' makes one golden of it, for outputs in memory")
        report, made = _judge_memory(Path(golden), run, options, tier, teacher_forced, about or {})
    if report.exit_code is Exit.AGREES:
        return report
    notes, saved = _replay(Path(golden), run, made, options, save)
    raise ParityError(report_short(report, notes), report, saved)


def replay_command(golden: Path, run: Path, options: JudgeOptions) -> str:
    """The `kdtr diff` that judges two bundles by these options and no others, quoted for a shell."""
    words = ["kdtr", "--no-config", "diff", str(golden), str(run)]
    standard = JudgeOptions()
    for name in _JUDGING:
        value = getattr(options, name)
        if value == getattr(standard, name) or name in _SILENT:
            continue
        if name == "rules":
            words += [word for rule in value for word in ("--rule", _as_text(rule))]
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(",".join(value) if isinstance(value, tuple) else str(value))
    return shlex.join(words)


def _as_text(rule: TensorRule) -> str:
    bounds = {name: getattr(rule, name) for name in ("atol", "rtol", "max_ulp")}
    return f"{rule.tensor}:" + ",".join(f"{name}={value}" for name, value in bounds.items() if value is not None)


def _options(judging: Mapping[str, Any]) -> JudgeOptions:
    if unknown := sorted(set(judging) - set(_JUDGING)):
        raise TypeError(f"assert_parity() has no option {unknown[0]!r}; it has {', '.join(_JUDGING)}")
    given = dict(judging)
    select = given.get("select")
    if isinstance(select, str):
        given["select"] = (select,)
    elif isinstance(select, Iterable):
        given["select"] = tuple(select)
    if "rules" in given:
        given["rules"] = tuple(replace(rule, origin="rules= of assert_parity") for rule in given["rules"])
    return JudgeOptions(**given, origins={name: f"{name}= of assert_parity" for name in given})


def _judge_paths(golden: Path, run: Path, options: JudgeOptions) -> Report:
    sweeps = golden.is_dir() or run.is_dir()
    report = (diff_sweeps if sweeps else diff)(golden, run, options)
    for finding in report.findings:
        if finding.code in ("bundle", "sweep"):
            broken = (verify_sweep if golden.is_dir() else verify_bundle)(golden).problems
            if broken:
                raise InputError(broken[0])
        if finding.code == "kinds" and report.golden is not None and report.golden.kind != "golden":
            raise InputError(finding.message)
    return _with_sound_golden(report)


def _judge_memory(
    golden: Path,
    outputs: Mapping[str, Output] | Sequence[Output],
    options: JudgeOptions,
    tier: str,
    teacher_forced: bool,
    about: Mapping[str, Any],
) -> tuple[Report, MadeRun | None]:
    with open_bundle(golden) as bundle:
        check_golden(bundle)
        evidence = bundle_evidence(bundle)
        try:
            made = make_run(bundle, inputs_of(bundle, teacher_forced), outputs, tier, about)
        except EngineError as error:
            finding = Finding(Level.ERROR, "shape", str(error), Verdict.INVALID)
            return invalid([finding], options, evidence), None
        return _with_sound_golden(judge(evidence, made.evidence(), options)), made


def _with_sound_golden(report: Report) -> Report:
    for finding in report.findings:
        if finding.code.endswith("golden_nonfinite"):
            raise InputError(finding.message)
    return report


def _replay(
    golden: Path,
    run: str | Path | Mapping[str, Output] | Sequence[Output],
    made: MadeRun | None,
    options: JudgeOptions,
    save: str | Path | None,
) -> tuple[list[str], Path | None]:
    """The line with the command, and where the run is; a run that can't be kept changes no verdict."""
    kept = Path(run) if isinstance(run, str | os.PathLike) else None
    notes = []
    if save is not None:
        try:
            if kept is None and (made is None or not made.sequences):
                notes.append("not saved: no bundle can hold such outputs")
            elif kept is None:
                save_run(made, Path(save))
                kept = Path(save)
            elif not kept.is_dir():
                _copy(kept, Path(save))
                kept = Path(save)
        except (InputError, DeviceError, OSError) as error:
            notes.append(f"not saved: {error}")
    if kept is None:
        return notes, None
    return [*notes, f"again: {replay_command(golden, kept, options)}"], kept


def _copy(source: Path, target: Path) -> None:
    """Under its name when it is whole. A run need not be a sound bundle to be kept: that may be why it fails."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        shutil.copyfile(source, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)

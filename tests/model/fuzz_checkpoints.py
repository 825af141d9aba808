"""Mutants of model folders through open, summary and a golden of two steps: each works, or is refused in one line.

    python tests/model/fuzz_checkpoints.py --files 2000 --seed 0
    python tests/model/fuzz_checkpoints.py --only 17 --seed 0 --keep /tmp/17     # one of them again, and its folder

A mutant is run in a forked process of its own with a limit on its memory and on its time. A find is anything but
success or an InputError of one line of at most 300 characters that leaves nothing behind: another exception, a warning,
text on standard error, a crash, a hang, more memory than the limit. Exit code 1 with a find, 0 without.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mutants import mutate

from kdtr_cli.errors import InputError
from kdtr_cli.model.presets import PRESETS, write_model
from kdtr_cli.model.requantise import quantise_model
from kdtr_cli.model.safetensors_file import SafetensorsFile
from kdtr_cli.model.safetensors_writer import SafetensorsWriter
from kdtr_cli.model.source import open_model
from kdtr_cli.model.summary import summary
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.golden_rounds import DraftOptions
from kdtr_cli.workflows.prompts import PromptOptions
from kdtr_cli.workflows.show import continuation

FIXTURES = Path(__file__).parents[2] / "fixtures"
MEMORY = 1 << 30  # bytes that a mutant may take beyond those of the process that forked it
LINE = 300
DRAFTER = "tiny-kimi-dflash"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: ok, refused or find; what it said, its seconds, and the bytes that it grew by."""

    number: int
    base: str
    touched: list[str]
    kind: str
    line: str
    seconds: float
    grown: int


def make_bases(root: Path) -> dict[str, Path]:
    """Good folders to be damaged: presets in bf16, INT4, FP8 and in shards, and the fixtures."""
    bases = {}
    for preset in PRESETS:
        bases[preset] = root / preset
        write_model(bases[preset], preset)
    for preset, form in (("tiny", "int4"), ("odd", "fp8"), ("tiny-groups", "int4")):
        bases[f"{preset}-{form}"] = root / f"{preset}-{form}"
        quantise_model(root / preset, root / f"{preset}-{form}", form)
    for name in ("odd", "tiny-int4"):
        bases[f"{name}-sharded"] = root / f"{name}-sharded"
        _shard(root / name, root / f"{name}-sharded")
    for name in ("tiny-kimi", "tiny-kimi-int4", "tiny-kimi-fp8", DRAFTER):
        bases[name] = FIXTURES / name
    return bases


def _shard(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = SafetensorsFile(source / "model.safetensors")
    plan = {name: (region.dtype, region.shape) for name, region in file.regions.items()}
    limit = sum(region.length for region in file.regions.values()) // 3 + 1
    with SafetensorsWriter(folder, plan, limit) as writer:
        for name, region in file.regions.items():
            writer.append(name, file.array(name, region))


def make_mutant(bases: dict[str, Path], seed: int, number: int, folder: Path) -> tuple[str, list[str]]:
    """Write mutant ``number`` of a seed; the base's name and what was touched."""
    dice = random.Random(f"{seed} {number}")
    base = dice.choice(sorted(bases))
    folder.mkdir()
    for path in sorted(bases[base].iterdir()):
        (folder / path.name).symlink_to(path)
    return base, mutate(folder, dice)


def attempt(folder: Path, base: str, output: Path) -> None:
    """What a user does with a model: look at it, make a golden, show it."""
    if base == DRAFTER:
        drafting, target = DraftOptions("ddtree", str(folder), 4, None), str(FIXTURES / "tiny-kimi")
    else:
        drafting, target = None, str(folder)
        json.dumps(summary(open_model(target)), allow_nan=False)
    texts = ("The cat",) if (folder / "tokenizer.json").exists() else ()
    prompts = PromptOptions(ids=("1 2 3",), texts=texts)
    made = make_golden(GoldenOptions(target, output, prompts, steps=2, drafting=drafting))
    continuation(made.model.folder, made.sequences)


def _sabotage(number: int, output: Path) -> None:
    """Each fault that the fuzzer looks for, in turn."""
    match number % 7:
        case 0:
            raise KeyError("a fault")
        case 1:
            time.sleep(3600)
        case 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        case 3:
            os.write(2, b"a panic")
        case 4:
            output.with_suffix(".tmp").touch()
            raise InputError("refused, but not cleanly")
        case 5:
            raise InputError("x" * (LINE + 1))
        case 6:
            bytearray(2 * MEMORY)


def _verdict(run: Callable[[], None]) -> tuple[str, str]:
    try:
        run()
    except InputError as error:
        line = str(error)
        if "\n" in line or len(line) > LINE:
            return "find", f"a line of {len(line)} characters: {line[:400]!r}"
        return "refused", line
    except BaseException:
        return "find", traceback.format_exc()
    return "ok", ""


def _child(run: Callable[[], None], folder: Path, output: Path, pipe: int) -> None:
    """In the fork: limits, the attempt, the answer through the pipe. Never returns."""
    errors = os.open(folder.with_suffix(".stderr"), os.O_CREAT | os.O_RDWR)
    os.dup2(errors, 2)
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    warnings.simplefilter("error")
    kind, line = _verdict(run)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if os.lseek(errors, 0, os.SEEK_END):
        kind, line = "find", f"on standard error: {os.pread(errors, 400, 0)!r}; {line}"
    left = sorted(path.name for path in output.parent.iterdir())
    if left != ([output.name] if kind == "ok" else []) and kind != "find":
        kind, line = "find", f"left behind: {left}; {line}"
    os.write(pipe, json.dumps([kind, line[-4000:], grown]).encode())
    os._exit(0)


@dataclass
class _Running:
    number: int
    base: str
    touched: list[str]
    folder: Path
    pid: int
    begun: float


def run(
    bases: dict[str, Path], seed: int, numbers: list[int], root: Path, jobs: int, seconds: float, sabotage: bool
) -> Iterator[Outcome]:
    """Outcomes of mutants, as they end; each mutant's folder is removed after it."""
    waiting, running = list(reversed(numbers)), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                end, it = _start(bases, seed, waiting.pop(), root, sabotage)
                running[end] = it
            ready, _, _ = select.select(list(running), [], [], 0.2)
            now = time.monotonic()
            for end in [end for end, it in running.items() if end in ready or now - it.begun > seconds]:
                yield _end(end, running.pop(end), end not in ready)
    finally:
        for end, it in running.items():
            _end(end, it, late=True)


def _start(bases: dict[str, Path], seed: int, number: int, root: Path, sabotage: bool) -> tuple[int, _Running]:
    folder = root / str(number)
    base, touched = make_mutant(bases, seed, number, folder)
    output = root / f"{number}.out" / "golden.h5"
    output.parent.mkdir()
    ends = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            work = partial(_sabotage, number, output) if sabotage else partial(attempt, folder, base, output)
            _child(work, folder, output, ends[1])
        finally:
            os._exit(3)
    os.close(ends[1])
    return ends[0], _Running(number, base, touched, folder, pid, time.monotonic())


def _end(end: int, it: _Running, late: bool) -> Outcome:
    took = time.monotonic() - it.begun
    if late:
        os.kill(it.pid, signal.SIGKILL)
    answer = b"" if late else os.read(end, 1 << 16)
    os.close(end)
    _, status = os.waitpid(it.pid, 0)
    _clear(it.folder)
    why = f"no end after {took:.0f} s" if late else f"the process died, status {status}"
    kind, line, grown = json.loads(answer) if answer else ("find", why, 0)
    return Outcome(it.number, it.base, it.touched, kind, line, took, grown)


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder.with_name(f"{folder.name}.out"), ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.with_suffix(".stderr").unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--keep", type=Path, help="with --only: write the mutant's folder here")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="for one mutant")
    parser.add_argument("--sabotage", action="store_true", help="run faults in place of the mutants: all must be found")
    parser.add_argument("--lines", action="store_true", help="print every outcome")
    given = parser.parse_args()
    numbers = list(range(given.first, given.first + given.files)) if given.only is None else [given.only]
    counts: Counter[str] = Counter()
    slowest, largest, begun = 0.0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kdtr-") as name:
        root = Path(name)
        (root / "bases").mkdir()
        bases = make_bases(root / "bases")
        if given.keep is not None:
            make_mutant({k: v.resolve() for k, v in bases.items()}, given.seed, numbers[0], given.keep)
            for path in given.keep.iterdir():
                if path.is_symlink() and path.resolve().is_relative_to(root):
                    data = path.read_bytes()
                    path.unlink()
                    path.write_bytes(data)
        for it in run(bases, given.seed, numbers, root, given.jobs, given.seconds, given.sabotage):
            counts[it.kind] += 1
            slowest, largest = max(slowest, it.seconds), max(largest, it.grown)
            if it.kind == "find" or given.lines:
                print(
                    f"{it.kind} --seed {given.seed} --only {it.number} {it.seconds:.1f} s",
                    f"({it.base}: {', '.join(it.touched)}):",
                    it.line,
                    flush=True,
                )
    total = " ".join(f"{kind}={counts[kind]}" for kind in ("ok", "refused", "find"))
    took = f"seconds={time.monotonic() - begun:.0f} slowest={slowest:.1f} grown={largest >> 20} MiB"
    print(f"files={sum(counts.values())} {total} {took}")
    return 1 if counts["find"] else 0


if __name__ == "__main__":
    sys.exit(main())

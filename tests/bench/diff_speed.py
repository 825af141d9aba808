"""`kdtr diff` of two bundles of 2 GB of logits against what it can't do without: SHA-256 and one float64 KL pass.

    python tests/bench/diff_speed.py [--folder DIR] [--gib 2] [--threads N] [--costs]

The files are made in DIR (three times the size must be free; kept and taken up again). Sides take turns; a figure is
the best of the turns, by the clock and in seconds of processors (the fairer one on a machine that others use). All of
them may use every core: the two SHA-256 run side by side, the KL pass takes rows on as many threads as there are cores.
`h5diff` (Debian: hdf5-tools) is asked about every dataset of logits, where it is installed. Memory is the largest that
a process of `kdtr diff` ever had (VmHWM).
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from parity_cases import SHA, manifest

from kdtr_cli.bundle import scan
from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.writer import BundleWriter
from kdtr_cli.parity import measure, tally
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.workflows import diff as workflow

VOCAB, ROWS = 163840, 128
NOISE = 1e-5
BLOCK = 4 << 20


def write(path: Path, kind: str, sequences: int, noise: float) -> None:
    """A golden, or a run of it with uniform noise, `sequences` of ROWS rows each."""
    name = "exact" if kind == "golden" else "engine"
    with BundleWriter(path, kind, force=True) as writer:
        writer.add_config(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 4096}))
        for index in range(sequences):
            rng = np.random.default_rng(index)
            logits = rng.standard_normal((ROWS, VOCAB), np.float32) * np.float32(3)
            tokens = logits.argmax(axis=1).astype(np.int32)
            if noise:
                logits += (rng.random(logits.shape, np.float32) - np.float32(0.5)) * np.float32(2 * noise)
            prompt = np.arange(4, dtype=np.int32)
            arrays = {f"logits/{name}": logits}
            writer.add_sequence(SequenceData(f"s{index}", index, prompt, tokens, "length", arrays))
        made = manifest(kind, steps=ROWS)
        if kind == "run":
            made["run"]["golden_manifest_sha256"] = SHA["golden"]
        writer.finish(made)


def make(folder: Path, gib: float) -> tuple[Path, Path, Path]:
    """Golden, a run beside it, and a run that has its bits."""
    sequences = max(1, round(gib * 2**30 / (ROWS * VOCAB * 4)))
    paths = tuple(folder / f"{name}-{sequences}.h5" for name in ("golden", "run", "same"))
    for path, kind, noise in zip(paths, ("golden", "run", "run"), (0.0, NOISE, 0.0), strict=True):
        if not path.exists():
            write(path, kind, sequences, noise)
    return paths


def regions(path: Path) -> Iterator[tuple[int, int]]:
    """Where in the file the logits lie: offset and bytes of each sequence's."""
    with open_bundle(path) as bundle:
        for name in bundle.array_paths():
            if "/logits/" in name:
                dataset = bundle._file[name]
                yield dataset.id.get_offset(), dataset.nbytes


def sha256(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(BLOCK))
        for offset, size in regions(path):
            digest = hashlib.sha256()
            for at in range(offset, offset + size, BLOCK):
                n = os.preadv(file.fileno(), [buffer[: min(BLOCK, offset + size - at)]], at)
                digest.update(buffer[:n])


def kl(x: np.ndarray, y: np.ndarray) -> float:
    """KL of one row as one would write it in float64 with care for memory: no temporary but one."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    x -= x.max()
    y -= y.max()
    p = np.exp(y)
    y -= x  # log p - log q up to a constant
    np.exp(x, out=x)
    total = p.sum()
    y *= p
    return y.sum() / total + np.log(x.sum()) - np.log(total)


def kl_pass(golden: Path, run: Path, threads: int) -> None:
    with open(golden, "rb", buffering=0) as g, open(run, "rb", buffering=0) as r, ThreadPoolExecutor(threads) as pool:

        def row(places: tuple[int, int]) -> float:
            one = np.empty((2, VOCAB), np.float32)
            os.preadv(g.fileno(), [one[0]], places[0])
            os.preadv(r.fileno(), [one[1]], places[1])
            return kl(one[1], one[0])

        rows = [
            (a + i, b + i)
            for (a, size), (b, _) in zip(regions(golden), regions(run), strict=True)
            for i in range(0, size, VOCAB * 4)
        ]
        list(pool.map(row, rows))


def diff(golden: Path, run: Path, threads: int | None, *options: str) -> str:
    """The verdict line and the peak of memory, from a process of its own."""
    code = (
        "import sys; from kdtr_cli.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(open('/proc/self/status').read(), file=sys.stderr)"
    )
    pin = [] if threads is None else ["taskset", "-c", f"0-{threads - 1}"]
    command = [*pin, sys.executable, "-c", code, "--no-config", "diff", str(golden), str(run), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    peak = re.search(r"VmHWM:\s+(\d+)", done.stderr)
    return f"{done.stdout.strip().splitlines()[-1]} [{int(peak[1]) / 1024:.0f} MiB]" if peak else done.stderr


def h5diff(golden: Path, run: Path, *options: str) -> None:
    with open_bundle(golden) as bundle:
        names = [name for name in bundle.array_paths() if name.endswith("logits/exact")]
    for name in names:
        other = name.replace("exact", "engine")
        subprocess.run(
            ["h5diff", *options, golden, run, f"/{name}", f"/{other}"], stdout=subprocess.DEVNULL, check=False
        )


def costs(golden: Path, run: Path) -> None:
    """What each step of the pass costs on one thread, in ns for each pair of values."""
    spent: dict[str, float] = {}
    inside = [0.0]

    def watch(place: object, name: str, title: str) -> None:
        function = getattr(place, name)

        def watched(*args: object, **kwargs: object) -> object:
            before, begun = inside[0], time.thread_time()
            inside[0] = 0.0
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.thread_time() - begun
                spent[title] = spent.get(title, 0.0) + taken - inside[0]  # what watched steps inside took is theirs
                inside[0] = before + taken

        setattr(place, name, watched)

    for place, name, title in (
        (scan.ArrayScan, "rows", "read both"),
        (scan.ArrayScan, "feed", "SHA-256 of both"),
        (measure, "find_golden_nonfinite", "golden finite"),
        (measure, "_equal_rows", "equal bits"),
        (measure, "largest_of_blocks", "largest of each block, both"),
        (measure, "rank_rows", "top 10 and margins, both"),
        (measure, "_differences", "float64 of both, difference"),
        (measure._Moved, "add", "shift"),
        (measure, "_add_squares", "NMSE and cosine"),
        (measure, "_add_masses", "KL"),
        (measure, "_largest_of_tile", "max abs by block"),
        (measure.Measure, "_ulps", "ULP"),
        (measure.Measure, "_count_out", "bounds"),
        (measure.Measure, "full", "the rest of measuring"),
        (tally.Tally, "add", "adding up, baselines"),
        (workflow, "diff", "the rest"),
    ):
        watch(place, name, title)
    workflow._threads = lambda: 1
    report = workflow.diff(golden, run, JudgeOptions(atol=2 * NOISE))
    print(f"{report.totals.values_compared} pairs of values, one thread, ns of processor a pair")
    for title, seconds in spent.items():
        print(f"{title:<28}{seconds / report.totals.values_compared * 1e9:6.2f}")
    print(f"{'together':<28}{sum(spent.values()) / report.totals.values_compared * 1e9:6.2f}")


def timed(what: Callable[[], object]) -> tuple[float, float, object]:
    """Seconds by the clock, seconds of processor time (children included), and what came back."""
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    result = what()
    return time.perf_counter() - wall, sum(os.times()[:4]) - cpu, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--costs", action="store_true", help="print what each step costs instead")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="kdtr-diff-speed-"))
    folder.mkdir(parents=True, exist_ok=True)
    golden, run, same = make(folder, given.gib)
    if given.costs:
        costs(golden, run)
        return
    cores = given.threads or len(os.sched_getaffinity(0))

    def both() -> None:
        with ThreadPoolExecutor(min(2, cores)) as pool:
            list(pool.map(sha256, (golden, run)))

    every = ["--rtol", "1e-6", "--atol", f"{NOISE / 2}", "--max-ulp", str(2**32), "--max-kl", "1"]
    sides: dict[str, Callable[[], object]] = {
        "sha256 of both": both,
        "float64 KL pass": lambda: kl_pass(golden, run, cores),
        "kdtr diff": lambda: diff(golden, run, given.threads, "--atol", str(2 * NOISE)),
        "kdtr diff, every bound": lambda: diff(golden, run, given.threads, *every),
        "kdtr diff, all values out": lambda: diff(golden, run, given.threads),
        "kdtr diff, equal digests": lambda: diff(golden, same, given.threads),
    }
    if shutil.which("h5diff"):
        sides["h5diff"] = lambda: h5diff(golden, run)
        sides["h5diff -d"] = lambda: h5diff(golden, run, "-d", str(2 * NOISE))
    best: dict[str, tuple[float, float]] = {}
    for turn in range(given.turns):
        for name, side in sides.items():
            wall, cpu, said = timed(side)
            before = best.get(name, (wall, cpu))
            best[name] = min(wall, before[0]), min(cpu, before[1])
            print(f"turn {turn} {name}: {wall:.2f} s, {cpu:.2f} s of processors {said or ''}", flush=True)
    must = [sum(best[name][i] for name in ("sha256 of both", "float64 KL pass")) for i in (0, 1)]
    size = golden.stat().st_size + run.stat().st_size
    print(
        f"\n{size / 1e9:.2f} GB in both files, {cores} cores, numpy {np.__version__}; x: times as fast as SHA-256 + KL"
    )
    for name, (wall, cpu) in best.items():
        clock = f"{wall:7.2f} s {size / wall / 1e9:6.2f} GB/s {must[0] / wall:6.2f} x"
        print(f"{name:<28}{clock}   of processors {cpu:7.2f} s {must[1] / cpu:6.2f} x")
    if "h5diff" in best:
        print(f"kdtr diff is {best['h5diff'][0] / best['kdtr diff'][0]:.2f} times as fast as h5diff")
        print(f"kdtr diff is {best['h5diff -d'][0] / best['kdtr diff'][0]:.2f} times as fast as h5diff -d")


if __name__ == "__main__":
    main()

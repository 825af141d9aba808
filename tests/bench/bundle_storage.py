"""How logits and weights could be stored in HDF5, and what a bundle of them costs to write and to read.

    python tests/bench/bundle_storage.py [--folder DIR] [--turns 4] [--rows 64] [--sequences 4]

One array of ROWS × 163,840 in each storage, MB of the array a second, the best of the turns, from the page cache; then
a bundle of sequences of four times as many rows.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from parity_cases import manifest

from kdtr_cli.bundle import BundleWriter, SequenceData
from kdtr_cli.bundle.reader import open_bundle

VOCAB = 163_840
ROWS_AT_ONCE = 8

#: storage → options of h5py's create_dataset; chunks of one row unless they say otherwise
STORAGES = {
    "contiguous": {},
    "chunks of one row": {"chunks": (1, VOCAB)},
    "chunks of 8 × 16,384": {"chunks": (8, 16_384)},
    "one row, fletcher32": {"chunks": (1, VOCAB), "fletcher32": True},
    "one row, gzip 1": {"chunks": (1, VOCAB), "compression": "gzip", "compression_opts": 1},
    "one row, shuffle + gzip 1": {
        "chunks": (1, VOCAB), "shuffle": True, "compression": "gzip", "compression_opts": 1,
    },
    "one row, shuffle + gzip 4": {
        "chunks": (1, VOCAB), "shuffle": True, "compression": "gzip", "compression_opts": 4,
    },
}  # fmt: skip


def seconds(work: Callable[[], object], turns: int) -> float:
    """The best of the turns, by the clock."""
    found = []
    for _ in range(turns):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


def storage_row(name: str, values: np.ndarray, options: dict, path: Path, turns: int) -> str:
    def write() -> None:
        with h5py.File(path, "w", libver=("v108", "v108")) as file:
            file.create_dataset("x", data=values, **options)

    def read() -> None:
        with h5py.File(path) as file:
            file["x"][...]

    def read_rows() -> None:
        with h5py.File(path) as file:
            for low in range(0, len(values), ROWS_AT_ONCE):
                file["x"][low : low + ROWS_AT_ONCE]

    rates = [values.nbytes / 1e6 / seconds(work, turns) for work in (write, read, read_rows)]
    return f"| {name} | {path.stat().st_size / values.nbytes:.3f} | " + " | ".join(f"{r:.0f}" for r in rates) + " |"


def bundle_rows(folder: Path, rows: int, sequences: int, turns: int) -> None:
    path, rng = folder / "whole.h5", np.random.default_rng(1)
    logits = rng.normal(0, 2, (rows, VOCAB)).astype(np.float32)
    tokens = logits.argmax(1).astype(np.int32)
    arrays = "sequences/000000/logits/exact"
    megabytes = sequences * logits.nbytes / 1e6

    def write() -> None:
        with BundleWriter(path, "golden", force=True) as writer:
            writer.add_config("{}")
            for i in range(sequences):
                one = SequenceData(str(i), i, np.ones(1, np.int32), tokens, "length", {"logits/exact": logits})
                writer.add_sequence(one)
            writer.finish({**manifest("golden"), "arithmetic": ["exact"]})

    def verify() -> None:
        with open_bundle(path) as bundle:
            for name in bundle.array_paths():
                bundle.verify(name)

    def each(read: Callable) -> Callable[[], None]:
        def work() -> None:
            with open_bundle(path) as bundle:
                for i in range(sequences):
                    read(bundle, arrays.replace("000000", f"{i:06d}"))

        return work

    def blocks(bundle, name: str) -> None:
        for _ in bundle.blocks(name):
            pass

    def by_rows(bundle, name: str) -> None:
        for low in range(0, rows, ROWS_AT_ONCE):
            bundle.rows(name, low, low + ROWS_AT_ONCE)

    works = {"write with fsync": write, "verify": verify, "array": each(lambda bundle, name: bundle.array(name))}
    works |= {"blocks": each(blocks), "rows with its verification": each(by_rows)}
    for name, work in works.items():
        print(f"{name}: {megabytes / seconds(work, turns):.0f} MB/s of {megabytes:.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=4)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    values = rng.normal(0, 2, (options.rows, VOCAB)).astype(np.float32)
    weights = rng.normal(0, 0.02, values.shape).astype(ml_dtypes.bfloat16).view(np.uint16)
    print(f"load {os.getloadavg()[0]:.1f}\n| storage | size | write | read whole | rows |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "one.h5"
        for name, how in STORAGES.items():
            print(storage_row(name, values, how, path, options.turns), flush=True)
        for name in ("contiguous", "one row, shuffle + gzip 4"):
            print(storage_row(f"bfloat16, {name}", weights, STORAGES[name], path, options.turns), flush=True)
        path.unlink()
        bundle_rows(Path(folder), 4 * options.rows, options.sequences, options.turns)


if __name__ == "__main__":
    main()

"""Damage at random places: the same content, or one line of refusal; never another exception, never a hang.

The mutants are read in a process of their own, as a defect in libhdf5's parser could end it; its seed is then printed.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
MUTANTS = 500

CHILD = """
import random, sys
from pathlib import Path
sys.path.insert(0, "tests/bundle")
import hdf5_headers as headers
from conftest import make_bundle
from kdtr_cli.bundle import open_bundle
from kdtr_cli.errors import InputError

folder, first, count, how = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def content(path):
    with open_bundle(path) as bundle:
        found = [bundle.kind, bundle.manifest_sha256, bundle.manifest, bundle.config_text, bundle.weight_names()]
        for sequence in bundle.sequences:
            found += [sequence.id, sequence.stream, sequence.finish_reason, sequence.array_names()]
        for name in bundle.array_paths():
            found += [name, bundle.array(name).tobytes(), bundle.verify(name)]
        return found


def at_random(dice, data):
    place, length = dice.randrange(len(data)), dice.randrange(1, 200)
    match dice.randrange(6):
        case 0:
            del data[place:]
        case 1:
            data[place] ^= 1 << dice.randrange(8)
        case 2:
            for _ in range(dice.randrange(1, 20)):
                data[dice.randrange(len(data))] = dice.randrange(256)
        case 3:
            data[place : place + length] = bytes([dice.choice([0, 255])]) * len(data[place : place + length])
        case 4:
            other = dice.randrange(len(data))
            data[place : place + length] = data[other : other + length]
        case 5:
            data[place:place] = dice.randbytes(length)


def in_headers(dice, data, spans):
    touched = dice.sample(spans, dice.choice([1, 1, 2, 3]))
    for start, end in touched:
        data[dice.randrange(start + 4, end)] = dice.choice([0, 1, 2, 255, dice.randrange(256)])
    headers.repair(data, touched)


good = make_bundle(folder / "good.h5")
whole, want = good.read_bytes(), content(good)
spans = headers.header_spans(whole)
path = folder / "mutant.h5"
refused = 0
for seed in range(first, first + count):
    print("seed", seed, flush=True)
    dice, data = random.Random(seed), bytearray(whole)
    if how == "bytes":
        at_random(dice, data)
    else:
        in_headers(dice, data, spans)
    path.write_bytes(data)
    try:
        assert content(path) == want, "other content was accepted"
    except InputError as error:
        assert str(error).startswith(str(path)) and "\\n" not in str(error), error
        refused += 1
print("refused", refused)
"""


@pytest.mark.parametrize("how", ["bytes", "headers"])
def test_mutants(tmp_path, how):
    """`bytes`: anything anywhere. `headers`: object headers with repaired checksums, so that HDF5 believes them."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", "-c", CHILD, str(tmp_path), "0", str(MUTANTS), how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    last = done.stdout.splitlines()[-1] if done.stdout else ""
    assert done.returncode == 0, f"after {last}: {done.stderr[-2000:]}"
    assert done.stderr == ""
    # most damage hits something: fewer refusals would mean that the mutants are not read at all
    assert int(last.removeprefix("refused ")) > MUTANTS // 3

"""A scan reads what the reader reads, on many threads too, and refuses what is damaged."""

import os
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.errors import InputError

pytestmark = pytest.mark.quick

EXACT = "sequences/000000/logits/exact"


def relaid(path, how):
    """Store the exact logits in another way; digests are of what the data mean."""
    with h5py.File(path, "r+") as file:
        values = file[EXACT][...]
        del file[EXACT]
        file.create_dataset(EXACT, data=values, **how)


def through(scan, n, step=1):
    for lo in range(0, n, step):
        scan.feed(scan.rows(lo, min(lo + step, n)))
    scan.finish()


@pytest.mark.parametrize("how", [{}, {"chunks": (2, 37)}, {"chunks": (1, 20), "compression": "gzip", "shuffle": True}])
@pytest.mark.parametrize("step", [1, 2, 9])
def test_rows_are_those_of_the_reader_however_they_are_stored(bundle_path, how, step):
    if how:
        relaid(bundle_path, how)
    with open_bundle(bundle_path) as bundle:
        whole = bundle.sequences[0].array("logits/exact")
    with open_bundle(bundle_path) as bundle:
        scan = bundle.sequences[0].scan("logits/exact")
        assert scan.rows(1, 3).tobytes() == whole[1:3].tobytes()
        assert not scan.rows(0, 1).flags.writeable
        assert scan.rows(2, 2).shape == (0, 37)
        through(scan, 3, step)
        assert scan.sha256 == bundle.sequences[0].verified_sha256("logits/exact")


def test_bfloat16_comes_back_as_what_it_is(bundle_path):
    with open_bundle(bundle_path) as bundle:
        scan = bundle.scan("model/weights/model.norm.weight")
        assert scan.rows(0, 9).dtype == bundle.weight("model.norm.weight").dtype
        through(scan, 9)


def test_memory_that_is_given_is_used(bundle_path):
    with open_bundle(bundle_path) as bundle:
        scan = bundle.sequences[0].scan("logits/exact")
        memory = np.zeros(1000, np.uint8)
        rows = scan.rows(0, 2, memory)
        assert np.shares_memory(rows, memory)
        assert rows.tobytes() == bundle.sequences[0].array("logits/exact")[:2].tobytes()


def test_many_threads_read_at_once(tmp_path, make):
    rng = np.random.default_rng(0)
    sequence = make.sequences(1)[0]
    values = rng.standard_normal((400, 37)).astype(np.float32)
    sequence.arrays["logits/exact"] = values
    sequence.arrays["logits/float64"] = values.astype(float)
    sequence.tokens = np.zeros(400, np.int32)
    del sequence.arrays["trace/embed"]  # it has a row for each token that was fed
    with open_bundle(make.bundle(tmp_path / "g.h5", sequences=[sequence])) as bundle:
        scan = bundle.sequences[0].scan("logits/exact")
        with ThreadPoolExecutor(8) as pool:
            rows = list(pool.map(lambda i: scan.rows(i, i + 3).tobytes(), range(398)))
        assert rows == [values[i : i + 3].tobytes() for i in range(398)]


def test_a_scan_verifies_for_all_that_comes_later(bundle_path, monkeypatch):
    with open_bundle(bundle_path) as bundle:
        through(bundle.sequences[0].scan("logits/exact"), 3)
        monkeypatch.setattr(type(bundle), "verify", None)
        assert len(bundle.sequences[0].rows("logits/exact", 0, 2)) == 2
        through(bundle.sequences[0].scan("logits/exact"), 3)


@pytest.mark.parametrize("how", [{}, {"chunks": (2, 37)}])
def test_damage_shows_at_the_end_and_not_before(bundle_path, how):
    if how:
        relaid(bundle_path, how)
    with h5py.File(bundle_path, "r+") as file:
        file[EXACT][2, 5] += 1
    with open_bundle(bundle_path) as bundle:
        scan = bundle.sequences[0].scan("logits/exact")
        with pytest.raises(InputError, match=r"golden\.h5: .*logits/exact does not match its digest"):
            through(scan, 3)
        with pytest.raises(InputError, match="does not match its digest"):
            bundle.sequences[0].rows("logits/exact", 0, 1)


def test_a_pass_that_left_rows_out_is_none(bundle_path):
    with open_bundle(bundle_path) as bundle:
        scan = bundle.sequences[0].scan("logits/exact")
        scan.feed(scan.rows(0, 2))
        with pytest.raises(ValueError, match="2 of 3 rows"):
            scan.finish()


def test_a_file_that_is_cut_while_it_is_read(bundle_path):
    with open_bundle(bundle_path) as bundle:
        scan = bundle.sequences[0].scan("logits/exact")
        os.truncate(bundle_path, 1000)
        with pytest.raises(InputError, match="truncated"):
            through(scan, 3)

"""What is written is what is read, bit for bit, and equal content is equal bytes."""

import fcntl
import json
import os
import subprocess
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kdtr_cli.bundle import BundleWriter, SequenceData, open_bundle
from kdtr_cli.bundle.schema import DTYPES
from kdtr_cli.errors import InputError

pytestmark = pytest.mark.quick


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def arrays_of(dtype: np.dtype, shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    """Any bits at all of a dtype: NaN payloads, subnormals, negative zeros."""
    size = int(np.prod(shape)) * dtype.itemsize
    return st.binary(min_size=size, max_size=size).map(lambda data: np.frombuffer(data, dtype).reshape(shape))


IDS = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=60)


@st.composite
def sequence_lists(draw: st.DrawFn) -> tuple[int, list[SequenceData]]:
    vocab = draw(st.integers(1, 300))
    ids = draw(st.lists(IDS, min_size=1, max_size=4, unique=True))
    sequences = []
    for text in ids:
        n_prompt, n_tokens = draw(st.integers(1, 5)), draw(st.integers(0, 4))
        token_ids = st.integers(0, vocab - 1)
        arrays = {}
        for name in draw(st.sets(st.sampled_from(["exact", "float64", "bf16"]))):
            dtype = np.dtype("f8" if name == "float64" else "f4")
            arrays[f"logits/{name}"] = draw(arrays_of(dtype, (n_tokens, vocab)))
            if draw(st.booleans()):
                arrays[f"prompt_logits/{name}"] = draw(arrays_of(dtype, (n_prompt, vocab)))
        if draw(st.booleans()):
            kept = draw(st.integers(1, 3))
            arrays["logits/exact_top_ids"] = draw(hnp.arrays(np.int32, (n_tokens, kept), elements=token_ids))
            arrays["logits/exact_top_values"] = draw(arrays_of(np.dtype("f4"), (n_tokens, kept)))
            arrays["logits/exact_sha256"] = draw(arrays_of(np.dtype("u1"), (n_tokens, 32)))
        width = draw(st.integers(0, 3))
        for name in draw(st.sets(st.sampled_from(["embed", "final_norm", "model.layers.60.hidden"]))):
            kind = np.dtype(draw(st.sampled_from(["f4", "f8"])))
            arrays[f"trace/{name}"] = draw(arrays_of(kind, (n_prompt + max(n_tokens, 1) - 1, width)))
        sequences.append(
            SequenceData(
                id=text,
                stream=draw(st.integers(0, 2**32 - 1)),
                prompt=draw(hnp.arrays(np.int32, n_prompt, elements=token_ids)),
                tokens=draw(hnp.arrays(np.int32, n_tokens, elements=token_ids)),
                finish_reason=draw(st.sampled_from(["length", "stop"])),
                arrays=arrays,
            )
        )
    return vocab, sequences


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=sequence_lists())
def test_any_sequences_come_back(content, tmp_path, make):
    vocab, sequences = content
    path = tmp_path / "any.h5"
    with BundleWriter(path, "golden", force=True) as writer:
        writer.add_config(json.dumps({"vocab_size": vocab}))
        for sequence in sequences:
            writer.add_sequence(sequence)
        digest = writer.finish(make.manifest())
    with open_bundle(path) as bundle:
        assert (bundle.kind, bundle.manifest_sha256, bundle.vocab) == ("golden", digest, vocab)
        assert len(bundle.sequences) == len(sequences)
        for have, want in zip(bundle.sequences, sequences, strict=True):
            assert (have.id, have.stream, have.finish_reason) == (want.id, want.stream, want.finish_reason)
            assert same_bits(have.prompt, want.prompt)
            assert same_bits(have.tokens, want.tokens)
            assert have.array_names() == sorted(want.arrays)
            for name, array in want.arrays.items():
                assert same_bits(have.array(name), array)
                assert (have.shape(name), have.dtype(name)) == (array.shape, array.dtype)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_as_a_weight(tmp_path, make, name):
    bits = np.arange(6 * DTYPES[name].array.itemsize, dtype=np.uint8)
    array = bits.view(DTYPES[name].array).reshape(2, 3)
    with BundleWriter(tmp_path / "w.h5", "golden") as writer:
        writer.add_config("{}")
        writer.add_weight("a.weight", array)
        writer.add_sequence(make.sequences(1)[0])
        writer.finish(make.manifest())
    with open_bundle(tmp_path / "w.h5") as bundle:
        assert bundle.weight_names() == ["a.weight"]
        assert same_bits(bundle.weight("a.weight"), array)
        assert bundle.manifest["datasets"]["model/weights/a.weight"]["dtype"] == name


def test_layout_in_memory_does_not_matter(tmp_path, make):
    """Big-endian, transposed and strided arrays give the file of the plain ones."""
    plain, other = make.sequences(), make.sequences()
    for sequence in other:
        sequence.tokens = sequence.tokens.astype(">i4")
        sequence.arrays["logits/float64"] = np.asfortranarray(sequence.arrays["logits/float64"]).astype(">f8")
        sequence.arrays["logits/exact"] = np.repeat(sequence.arrays["logits/exact"], 2, axis=1)[:, ::2]
        sequence.arrays = dict(reversed(sequence.arrays.items()))
    make.bundle(tmp_path / "a.h5", sequences=plain)
    make.bundle(tmp_path / "b.h5", sequences=other)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_other_process_other_folder_same_bytes(tmp_path, make):
    """No clock, no path, no process, no hash seed in the file."""
    here = make.bundle(tmp_path / "here.h5")
    folder = tmp_path / "a" / "longer folder name"
    folder.mkdir(parents=True)
    code = (
        "import importlib.util, pathlib, sys, time\n"
        "time.sleep(1.1)\n"  # past a second: time stamps in HDF5 have that resolution
        "spec = importlib.util.spec_from_file_location('forge', sys.argv[1])\n"
        "forge = importlib.util.module_from_spec(spec); spec.loader.exec_module(forge)\n"
        "forge.make_bundle(pathlib.Path(sys.argv[2]))\n"
    )
    there = folder / "there with another name.h5"
    forge = Path(__file__).with_name("conftest.py")
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", code, forge, there], check=True, cwd=root, env={**os.environ, "PYTHONHASHSEED": "123"}
    )
    assert here.read_bytes() == there.read_bytes()
    assert str(tmp_path).encode() not in here.read_bytes()
    assert b"here.h5" not in here.read_bytes()


def test_manifest_digest_is_the_same_everywhere(tmp_path, make):
    """On any machine, with any HDF5, NumPy or Python. If this changes, so has the format: raise schema.SCHEMA."""
    logits = (np.arange(6, dtype=np.float32) / 7).reshape(2, 3)
    sequence = SequenceData("0", 0, np.array([1], "i4"), np.array([2, 0], "i4"), "stop", {"logits/exact": logits})
    with BundleWriter(tmp_path / "x.h5", "golden") as writer:
        writer.add_config('{"vocab_size": 3}')
        writer.add_sequence(sequence)
        assert writer.finish(make.manifest()) == "df65a68e8005445e7f47702624767e4ef3638c47c063ce13e09e1b79dbf489b1"


def test_one_bit_of_content_changes_the_digest(tmp_path, make):
    digests = set()
    for bit in (0, 1):
        sequences = make.sequences()
        sequences[0].arrays["logits/exact"].view(np.uint32)[0, 0] ^= bit
        with open_bundle(make.bundle(tmp_path / "x.h5", sequences=sequences)) as bundle:
            digests.add(bundle.manifest_sha256)
    assert len(digests) == 2


def test_rows_and_blocks_are_the_array(tmp_path, make):
    sequences = make.sequences(n_sequences=1, n_tokens=11)
    path = make.bundle(tmp_path / "rows.h5", sequences=sequences)
    want = sequences[0].arrays["logits/exact"]
    with open_bundle(path) as bundle:
        sequence = bundle.sequences[0]
        for low, high in [(0, 11), (0, 0), (3, 4), (10, 11), (11, 11)]:
            assert same_bits(sequence.rows("logits/exact", low, high), want[low:high])
        for block_bytes in (1, 37 * 4 * 3, 1 << 20):
            blocks = list(sequence.blocks("logits/exact", block_bytes))
            assert same_bits(np.concatenate([block for _, block in blocks]), want)
            assert [low for low, _ in blocks] == list(np.cumsum([0, *(len(b) for _, b in blocks)])[:-1])
        for low, high in [(-1, 2), (2, 12), (3, 2)]:
            with pytest.raises(ValueError, match="rows"):
                sequence.rows("logits/exact", low, high)


def test_rows_verify_once(bundle_path, monkeypatch):
    with open_bundle(bundle_path) as bundle:
        passes = []
        original = bundle.blocks
        monkeypatch.setattr(bundle, "blocks", lambda *args: passes.append(args) or original(*args))
        for _ in range(3):
            bundle.sequences[0].rows("logits/exact", 0, 2)
        assert len(passes) == 1
        bundle.sequences[0].array("logits/float64")
        bundle.sequences[0].verified_sha256("logits/float64")
        assert len(passes) == 1


def test_arrays_can_not_be_changed(bundle_path):
    with open_bundle(bundle_path) as bundle:
        array = bundle.sequences[0].array("logits/exact")
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1


def test_sequences_behave_as_a_sequence(bundle_path):
    with open_bundle(bundle_path) as bundle:
        assert [s.id for s in bundle.sequences] == ["séq 0", "séq 1"]
        assert bundle.sequences[-1].id == "séq 1"
        assert [s.id for s in bundle.sequences[::-1]] == ["séq 1", "séq 0"]
        with pytest.raises(IndexError):
            bundle.sequences[2]


def test_absent_names_are_one_line(bundle_path):
    with open_bundle(bundle_path) as bundle:
        for ask in (
            lambda: bundle.weight("nothing"),
            lambda: bundle.sequences[0].array("logits/engine"),
            lambda: bundle.sequences[0].shape("logits/engine"),
            lambda: bundle.sequences[0].rows("../../manifest", 0, 1),
        ):
            with pytest.raises(InputError, match="holds no"):
                ask()


def test_many_readers_at_once(bundle_path):
    """No lock: a read-only file in a read-only folder, open already, is read by others."""
    bundle_path.chmod(0o444)
    bundle_path.parent.chmod(0o555)
    try:
        with open_bundle(bundle_path) as first, open_bundle(bundle_path) as second, ThreadPoolExecutor(4) as pool:
            jobs = [
                pool.submit(lambda b=b, p=p: b.array(p).tobytes())
                for p in first.array_paths()
                for b in (first, second) * 3
            ]
            got = [job.result() for job in jobs]
        assert all(len(set(got[at : at + 6])) == 1 for at in range(0, len(got), 6))
    finally:
        bundle_path.parent.chmod(0o755)


def test_locks_of_others_do_not_matter(bundle_path):
    """HDF5's own locks fail on network file systems and read-only media; a bundle needs none."""
    with bundle_path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with open_bundle(bundle_path) as bundle:
            assert len(bundle.sequences) == 2


def test_the_file_is_what_the_documentation_says(bundle_path):
    """Read with plain h5py and hashlib, knowing docs/bundle.md alone."""
    import hashlib

    import h5py

    with h5py.File(bundle_path, "r") as file:
        assert set(file) == {"manifest", "model", "sequences"}
        data = file["manifest"][()]
        assert hashlib.sha256(data).hexdigest() == file.attrs["manifest_sha256"].decode()
        manifest = json.loads(data)
        assert file.attrs["kdtr_schema"].decode() == manifest["schema"] == "kdtr/1"
        assert data.decode() == json.dumps(manifest, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        for path, entry in manifest["datasets"].items():
            dataset = file[path]
            assert dataset.chunks is None, path
            assert dataset.compression is None
            if entry["dtype"] == "utf8":
                raw, shape = dataset[()], [len(dataset[()])]
            else:
                raw, shape = dataset[()].tobytes(), list(dataset.shape)
                assert dataset.dtype.byteorder in "=<|"
                assert (dataset.attrs.get("kdtr_dtype", b"").decode() or dataset.dtype.name) == entry["dtype"]
            assert shape == entry["shape"]
            head = f"{entry['dtype']}[{','.join(map(str, shape))}]\n".encode()
            assert hashlib.sha256(head + raw).hexdigest() == entry["sha256"]
        weight = file["model/weights/model.norm.weight"][()].view(ml_dtypes.bfloat16)
        assert weight[0] == -2
        assert file["sequences/000001"].attrs["id"].decode() == unicodedata.normalize("NFC", "séq 1")
        assert file["sequences/000001"].attrs["stream"] == 1
        assert file["sequences/000001"].attrs["finish_reason"] == b"stop"

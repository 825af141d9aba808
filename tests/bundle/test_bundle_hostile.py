"""Files that were made to harm: each is refused in one line, and nothing outside the file is touched."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hdf5_headers import header_spans, repair

from kdtr_cli.bundle import open_bundle
from kdtr_cli.bundle.schema import DEFAULT_LIMITS, Limits
from kdtr_cli.errors import InputError

pytestmark = pytest.mark.quick

FIRST = "sequences/000000"
EXACT = f"{FIRST}/logits/exact"


def forge(path: Path, change: Callable[[h5py.File, dict], object]) -> Path:
    """Change file and manifest, then seal the manifest again as an attacker would."""
    with h5py.File(path, "r+", libver=("v108", "latest")) as file:
        manifest = json.loads(file["manifest"][()])
        text = change(file, manifest)
        data = text.encode() if isinstance(text, str) else json.dumps(manifest, sort_keys=True).encode()
        if "manifest" in file:
            del file["manifest"]
            dtype = h5py.string_dtype("utf-8", len(data))
            file.create_dataset("manifest", data=np.array(data, dtype=dtype), dtype=dtype)
            set_text(file, "manifest_sha256", hashlib.sha256(data).hexdigest())
    return path


def set_text(target: h5py.HLObject, name: str, text: str) -> None:
    dtype = h5py.string_dtype("utf-8", len(text.encode()))
    target.attrs.create(name, np.array(text.encode(), dtype=dtype), dtype=dtype)


def replace(file: h5py.File, path: str, **how) -> h5py.Dataset:
    """Put another dataset under the name of one."""
    old = file[path][()]
    del file[path]
    return file.create_dataset(path, **{"data": old, **how})


def read_all(path: Path, limits: Limits | None = None) -> None:
    with open_bundle(path, limits) as bundle:
        for array in bundle.array_paths():
            bundle.array(array)
            bundle.verify(array)


def refused(path: Path, limits: Limits | None = None) -> str:
    """Open the bundle and read all of it; the one line that refuses it."""
    with pytest.raises(InputError) as caught:
        read_all(path, limits)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(str(path))
    return line


# ---- other files, devices and links


def test_external_link(bundle_path, make):
    other = make.bundle(bundle_path.with_name("other.h5"))

    def change(file, manifest):
        del file[EXACT]
        file[EXACT] = h5py.ExternalLink(str(other), EXACT)

    assert f"{EXACT} is an external link" in refused(forge(bundle_path, change))


@pytest.mark.parametrize("name", ["model", "sequences/000001", "model/weights/other"])
def test_soft_link(bundle_path, name):
    def change(file, manifest):
        if name in file:
            del file[name]
        file[name] = h5py.SoftLink("/sequences/000000")

    assert f"{name} is a soft link" in refused(forge(bundle_path, change))


def test_manifest_by_a_link(bundle_path):
    with h5py.File(bundle_path, "r+") as file:
        file.move("manifest", "model/manifest")
        file["manifest"] = h5py.SoftLink("/model/manifest")
    assert "manifest is a soft link" in refused(bundle_path)


def test_virtual_dataset_is_not_opened(bundle_path):
    """Its source is a FIFO: whoever opens that waits for ever."""
    fifo = bundle_path.with_name("fifo.h5")
    os.mkfifo(fifo)

    def change(file, manifest):
        del file[EXACT]
        layout = h5py.VirtualLayout((3, 37), "<f4")
        layout[:] = h5py.VirtualSource(str(fifo), "x", (3, 37))
        file.create_virtual_dataset(EXACT, layout)

    assert f"{EXACT} is a virtual dataset" in in_time(forge(bundle_path, change))


def test_virtual_dataset_of_unlimited_size_is_not_opened(bundle_path):
    """HDF5 looks into the sources of such a dataset to tell its size."""
    fifo = bundle_path.with_name("fifo.h5")
    os.mkfifo(fifo)

    def change(file, manifest):
        del file[EXACT]
        layout = h5py.VirtualLayout((3, 37), "<f4", maxshape=(None, 37))
        source = h5py.VirtualSource(str(fifo), "x", (3, 37), maxshape=(None, 37))
        layout[: h5py.h5s.UNLIMITED, :] = source[: h5py.h5s.UNLIMITED, :]
        file.create_virtual_dataset(EXACT, layout)

    assert f"{EXACT} is a virtual dataset" in in_time(forge(bundle_path, change))


def in_time(path: Path) -> str:
    """As refused, but in a process that is killed when it hangs."""
    code = (
        "import sys\nfrom kdtr_cli.bundle import open_bundle\nfrom kdtr_cli.errors import InputError\n"
        "try:\n    open_bundle(sys.argv[1])\nexcept InputError as error:\n    print(error)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, path], cwd=root, capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout


def test_external_storage(bundle_path):
    secret = bundle_path.with_name("secret")
    secret.write_bytes(bytes(3 * 37 * 4))

    def change(file, manifest):
        del file[EXACT]
        file.create_dataset(EXACT, (3, 37), "<f4", external=[(str(secret), 0, 3 * 37 * 4)])

    assert f"{EXACT} is stored in an external file" in refused(forge(bundle_path, change))


@pytest.mark.parametrize("target", ["manifest", "model/config"])
def test_external_storage_of_text(bundle_path, target):
    secret = bundle_path.with_name("secret")
    with h5py.File(bundle_path, "r+") as file:
        data = file[target][()]
        secret.write_bytes(data)
        del file[target]
        how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        how.set_external(bytes(secret), 0, len(data))
        dtype = h5py.h5t.py_create(h5py.string_dtype("utf-8", len(data)))
        h5py.h5d.create(file.id, target.encode(), dtype, h5py.h5s.create(h5py.h5s.SCALAR), how)
    assert f"{target} is stored in an external file" in refused(bundle_path)


def test_special_files(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    assert "special file" in refused(tmp_path / "fifo")
    assert "special file" in refused(tmp_path / "link")
    assert "special file" in refused(Path("/dev/zero"))
    assert "is a folder" in refused(tmp_path)
    assert "no such file" in refused(tmp_path / "absent")
    assert "can't be opened" in refused(tmp_path / ("x" * 300))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "can't be opened" in refused(tmp_path / "loop")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(bundle_path):
    bundle_path.chmod(0)
    assert "Permission denied" in refused(bundle_path)


def test_files_that_are_no_bundles(tmp_path):
    path = tmp_path / "x.h5"
    for content, message in [
        (b"", "is empty"),
        (b"\x89HDF", "no HDF5 signature"),
        (b"PK\x03\x04" + bytes(100), "no HDF5 signature"),
        (b"hello world\n" * 100, "no HDF5 signature"),
        (b"\x89HDF\r\n\x1a\n", "damaged bundle"),
        (b"\x89HDF\r\n\x1a\n" + bytes(2000), "damaged bundle"),
    ]:
        path.write_bytes(content)
        assert message in refused(path)
    with h5py.File(path, "w") as file:
        file["x"] = 1
    assert "lacks the attribute 'kdtr_schema'" in refused(path)


def test_truncated(bundle_path):
    data = bundle_path.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 100):
        bundle_path.write_bytes(data[:size])
        assert "truncated" in refused(bundle_path)


def test_user_block(bundle_path):
    data = bundle_path.read_bytes()
    bundle_path.write_bytes(b"#!/bin/sh\n".ljust(512, b"\0") + data)
    assert "no HDF5 signature at its start" in refused(bundle_path)


def test_symbolic_links_to_bundles_are_followed(bundle_path):
    """They are the user's own, on the command line."""
    link = bundle_path.with_name("latest.h5")
    link.symlink_to(bundle_path.name)
    with open_bundle(link) as bundle:
        assert bundle.kind == "golden"


# ---- bombs


def test_shape_bomb(bundle_path):
    def change(file, manifest):
        replace(file, EXACT, data=None, shape=(2**33, 37), dtype="<f4", chunks=(64, 37))
        manifest["datasets"][EXACT]["shape"] = [2**33, 37]

    line = refused(forge(bundle_path, change))
    assert f"declares {2**33 * 37 * 4} bytes" in line
    assert "KDTR_BUNDLE_MAX_BYTES" in line


def test_data_that_are_not_stored(bundle_path):
    """A declared size within the limits, filled with zeros by HDF5 when read."""
    for how in ({"chunks": (1, 37)}, {"chunks": (1, 37), "compression": "gzip"}, {}):

        def change(file, manifest, how=how):
            replace(file, EXACT, data=None, shape=(3, 37), dtype="<f4", **how)

        line = refused(forge(bundle_path, change))
        assert "of its 3 chunks 0 are stored" in line or "declares 444 bytes but stores 0" in line


def test_zero_sized_bomb(bundle_path):
    """2^60 rows of nothing must not be walked."""
    path = "model/weights/model.norm.weight"
    shape = [2**60, 0]

    def change(file, manifest):
        replace(file, path, data=None, shape=shape, dtype="<f4")
        digest = hashlib.sha256(f"float32[{2**60},0]\n".encode()).hexdigest()
        manifest["datasets"][path] = {"dtype": "float32", "shape": shape, "sha256": digest}

    with open_bundle(forge(bundle_path, change)) as bundle:
        assert bundle.verify(path) == 0
        assert bundle.array(path).shape == tuple(shape)


def test_compression_bomb(bundle_path):
    path = f"{FIRST}/trace/embed"

    def change(file, manifest):
        replace(file, path, data=np.zeros(4 << 20, "<f4"), chunks=(1 << 20,), compression="gzip")
        manifest["datasets"][path]["shape"] = [4 << 20]

    assert "more than 100 times" in refused(forge(bundle_path, change))


def test_chunk_that_inflates_past_its_size(bundle_path):
    """Shapes and ratio are in order; the gzip stream is not."""

    def change(file, manifest):
        dataset = replace(file, EXACT, data=None, shape=(3, 37), dtype="<f4", chunks=(3, 37), compression="gzip")
        dataset.id.write_direct_chunk((0, 0), zlib.compress(bytes(50 << 20)))

    assert "a chunk does not inflate to its size" in refused(forge(bundle_path, change))


def test_chunk_that_ends_early(bundle_path):
    def change(file, manifest):
        dataset = replace(file, EXACT, data=None, shape=(3, 37), dtype="<f4", chunks=(3, 37), compression="gzip")
        dataset.id.write_direct_chunk((0, 0), zlib.compress(bytes(444))[:-6])

    assert "a chunk does not inflate to its size" in refused(forge(bundle_path, change))


def test_large_chunks(bundle_path):
    def change(file, manifest):
        replace(file, EXACT, data=None, shape=(3, 37), maxshape=(None, 37), dtype="<f4", chunks=(1 << 20, 37))

    assert "chunks of 155189248 bytes" in refused(forge(bundle_path, change))


def test_arrays_that_overlap(bundle_path):
    """Many arrays at one place of the file: small on disk, large in memory."""
    names = [f"model/weights/x{at}" for at in range(4)]

    def change(file, manifest):
        file.create_dataset(names[0], data=np.zeros(10_000, "<f4"))
        for name in names[1:]:
            file.create_dataset(name, (10_000,), "<f4")  # not written, so it has no place yet
        for name in names:
            manifest["datasets"][name] = {"dtype": "float32", "shape": [10_000], "sha256": "0" * 64}

    forge(bundle_path, change)
    assert "declares 40000 bytes but stores 0" in refused(bundle_path)
    with h5py.File(bundle_path, "r") as file:
        place = file[names[0]].id.get_offset()
    nowhere = struct.pack("<QQ", 2**64 - 1, 40_000)
    data = bundle_path.read_bytes()
    assert data.count(nowhere) == 3
    forged = bytearray(data.replace(nowhere, struct.pack("<QQ", place, 40_000)))
    repair(forged, header_spans(data))
    bundle_path.write_bytes(forged)
    assert "arrays overlap" in refused(bundle_path)


def test_limits_can_be_set(bundle_path, monkeypatch):
    assert "declares 888 bytes, more than 500" in refused(bundle_path, Limits(dataset_bytes=500))
    assert "declare more than 1000 bytes" in refused(bundle_path, Limits(total_bytes=1000))
    assert "more than" in refused(bundle_path, Limits(objects=8))
    assert "2 to" not in refused(bundle_path, Limits(manifest_bytes=100))
    assert "config has 18 bytes" in refused(bundle_path, Limits(config_bytes=17))
    monkeypatch.setenv("KDTR_BUNDLE_MAX_BYTES", "500")
    assert "declares 888 bytes, more than 500" in refused(bundle_path)
    monkeypatch.setenv("KDTR_BUNDLE_MAX_BYTES", "1M")
    open_bundle(bundle_path).close()
    assert DEFAULT_LIMITS.dataset_bytes == 16 << 30


# ---- objects that do not belong


@pytest.mark.parametrize("compression", ["lzf", "scaleoffset"])
def test_other_filters(bundle_path, compression):
    how = {"scaleoffset": 3} if compression == "scaleoffset" else {"compression": compression}

    def change(file, manifest):
        replace(file, EXACT, chunks=(3, 37), **how)

    assert "uses HDF5 filter" in refused(forge(bundle_path, change))


def test_allowed_filters_are_read(bundle_path):
    """Chunks, gzip, shuffle and fletcher32 are storage, not content: the digests still hold."""

    def change(file, manifest):
        replace(file, EXACT, chunks=(2, 10), compression="gzip", shuffle=True, fletcher32=True)
        replace(file, f"{FIRST}/tokens", chunks=(2,), maxshape=(None,))
        replace(file, f"{FIRST}/logits/float64", chunks=(3, 37), fletcher32=True)

    with open_bundle(bundle_path) as bundle:
        want = {path: bundle.array(path).tobytes() for path in bundle.array_paths()}
    with open_bundle(forge(bundle_path, change)) as bundle:
        assert {path: bundle.array(path).tobytes() for path in bundle.array_paths()} == want
        assert bundle.sequences[0].rows("logits/exact", 1, 3).tobytes() == want[EXACT][37 * 4 :]


def extra(path: str) -> Callable:
    return lambda file, manifest: file.create_group(path)


def listed(path: str, dtype: str = "int32") -> Callable:
    """An array that the manifest knows and the format does not."""

    def change(file, manifest):
        file.create_dataset(path, data=np.zeros(1, "<i4"))
        manifest["datasets"][path] = {"dtype": dtype, "shape": [1], "sha256": "0" * 64}

    return change


def attribute(path: str, name: str = "note", value: object = 1) -> Callable:
    return lambda file, manifest: file[path].attrs.__setitem__(name, value)


def retyped(path: str, dtype: object) -> Callable:
    def change(file, manifest):
        shape = file[path].shape
        replace(file, path, data=np.zeros(shape, dtype), dtype=dtype)

    return change


def without(path: str) -> Callable:
    return lambda file, manifest: file.__delitem__(path)


def linked(path: str, target: str) -> Callable:
    """A second hard link."""

    def change(file, manifest):
        file[path] = file[target]
        if target in manifest["datasets"]:
            manifest["datasets"][path] = manifest["datasets"][target]

    return change


def moved(path: str, target: str) -> Callable:
    return lambda file, manifest: file.move(path, target)


def named_type(file, manifest) -> None:
    file[f"{FIRST}/trace/type"] = np.dtype("<f4")


def with_named_type(file, manifest) -> None:
    file["model/type"] = np.dtype("<f4")
    dtype = file["model/type"]
    replace(file, EXACT, dtype=dtype)
    del file["model/type"]


def no_space(file, manifest) -> None:
    del file[EXACT]
    file[EXACT] = h5py.Empty("<f4")


def deep(file, manifest) -> None:
    file.create_group(f"{FIRST}/trace/" + "/".join("abcdefghijkl"))


def long_id(file, manifest) -> None:
    set_text(file[FIRST], "id", "x" * 300)
    manifest["sequences"][0]["id"] = "x" * 300


def array_attribute(file, manifest) -> None:
    file[FIRST].attrs["stream"] = np.zeros(1000, "<i8")


def vocabulary(file, manifest) -> None:
    """All digests are right, one token is not."""
    tokens = np.array([1, 2, 99], "<i4")
    replace(file, f"{FIRST}/tokens", data=tokens)
    manifest["datasets"][f"{FIRST}/tokens"]["sha256"] = hashlib.sha256(b"int32[3]\n" + tokens.tobytes()).hexdigest()


def shape_by_manifest(file, manifest) -> None:
    replace(file, EXACT, data=np.zeros((3, 36), "<f4"))


def both_shapes(file, manifest) -> None:
    shape_by_manifest(file, manifest)
    manifest["datasets"][EXACT]["shape"] = [3, 36]


FORGERIES = {
    "unknown group in the root": (extra("notes"), "notes is unknown"),
    "unknown dataset in the model": (listed("model/notes"), "model/notes is unknown"),
    "unknown group in a sequence": (extra(f"{FIRST}/notes"), "notes is an empty group"),
    "unlisted array": (lambda f, m: f.create_dataset(f"{FIRST}/trace/y", data=1.0), "is a dataset, not a group"),
    "listed array with an unknown name": (listed(f"{FIRST}/notes"), "a golden bundle has no such dataset"),
    "logits of a run in a golden": (listed(f"{FIRST}/logits/engine"), "a golden bundle has no such dataset"),
    "text for an array": (listed(f"{FIRST}/trace/y", "utf8"), "is not an array of the manifest"),
    "empty logits group": (extra(f"{FIRST}/prompt_logits"), "is an empty group"),
    "strange name": (extra(f"{FIRST}/trace/a b"), "holds an object named 'a b'"),
    "control characters in a name": (extra(f"{FIRST}/trace/a\x1b[2J"), r"named 'a\x1b[2J'"),
    "deep nesting": (deep, "nested deeper"),
    "attribute of the root": (attribute("/"), "the file has the unknown attribute 'note'"),
    "attribute of a group": (attribute("model"), "model has the unknown attribute 'note'"),
    "attribute of the sequences": (attribute("sequences"), "sequences has the unknown attribute"),
    "attribute of a sequence": (attribute(FIRST), "000000 has the unknown attribute"),
    "attribute of an array": (attribute(EXACT), "exact has the unknown attribute"),
    "attribute of the config": (attribute("model/config"), "config has the unknown attribute"),
    "type of a plain array": (attribute(EXACT, "kdtr_dtype", "x"), "unknown attribute 'kdtr_dtype'"),
    "no type of a bfloat16 array": (
        lambda f, m: f["model/weights/model.norm.weight"].attrs.__delitem__("kdtr_dtype"),
        "lacks the attribute 'kdtr_dtype'",
    ),
    "other type of a bfloat16 array": (
        lambda f, m: set_text(f["model/weights/model.norm.weight"], "kdtr_dtype", "float16"),
        "'kdtr_dtype' is not 'bfloat16'",
    ),
    "no id": (lambda f, m: f[FIRST].attrs.__delitem__("id"), "lacks the attribute 'id'"),
    "other id": (lambda f, m: set_text(f[FIRST], "id", "x"), "id is 'x', but 'séq 0' in the manifest"),
    "other stream": (attribute(FIRST, "stream", np.int64(5)), "stream is 5, but 0"),
    "other finish reason": (lambda f, m: set_text(f[FIRST], "finish_reason", "stop"), "finish_reason is 'stop'"),
    "variable-length id": (attribute(FIRST, "id", "séq 0"), "'id' is not a fixed-length string"),
    "number for an id": (attribute(FIRST, "id", 3), "'id' is not a fixed-length string"),
    "32-bit stream": (attribute(FIRST, "stream", np.int32(0)), "'stream' is not a scalar int64"),
    "array for a stream": (array_attribute, "'stream' is not a scalar int64"),
    "long id": (long_id, "longer than 256 bytes"),
    "other kind": (lambda f, m: set_text(f, "kind", "run"), "'kind' says run, the manifest golden"),
    "unknown kind": (lambda f, m: set_text(f, "kind", "silver"), "its kind is 'silver'"),
    "newer schema": (lambda f, m: set_text(f, "kdtr_schema", "kdtr/12"), "newer than kdtr/1; upgrade kdtr"),
    "unknown schema": (lambda f, m: set_text(f, "kdtr_schema", "mine/1"), "its schema is 'mine/1'"),
    "no manifest": (without("manifest"), "manifest is missing"),
    "no config": (without("model/config"), "config is missing"),
    "no sequences": (without("sequences"), "sequences is missing"),
    "no tokens": (
        lambda f, m: (without(f"{FIRST}/tokens")(f, m), m["datasets"].pop(f"{FIRST}/tokens")),
        "tokens is missing",
    ),
    "an array less": (without(f"{FIRST}/ties"), "ties stands in the manifest but not in the file"),
    "a sequence less": (without("sequences/000001"), "1 sequences, its manifest 2"),
    "a gap in the sequences": (moved("sequences/000001", "sequences/000002"), "000002 stands where"),
    "five digits": (moved("sequences/000001", "sequences/00001"), "00001 stands where"),
    "a cycle": (linked(f"{FIRST}/trace/up", "sequences"), "has 2 hard links"),
    "a cycle to the root": (linked(f"{FIRST}/trace/up", "/"), "is the same object as /"),
    "an alias": (linked(f"{FIRST}/logits/bf16", EXACT), "has 2 hard links"),
    "a dataset for a group": (
        lambda f, m: (without("model/weights")(f, m), listed("model/weights")(f, m)),
        "model/weights is a dataset, not a group",
    ),
    "big-endian": (retyped(EXACT, ">f4"), "exact is not little-endian float32"),
    "wider": (retyped(EXACT, "<f8"), "exact is not little-endian float32"),
    "text": (retyped(f"{FIRST}/ties", "S4"), "ties is not little-endian int32"),
    "references": (
        lambda f, m: replace(f, f"{FIRST}/ties", data=[f["model"].ref], dtype=h5py.ref_dtype),
        "ties is not little-endian int32",
    ),
    "compound": (retyped(f"{FIRST}/ties", [("a", "<i4")]), "ties is not little-endian int32"),
    "a type as an object": (named_type, "is a named type, not a group"),
    "a shared type": (with_named_type, "exact is not little-endian float32"),
    "no data space": (no_space, "exact has no data space"),
    "group for an array": (lambda f, m: (without(EXACT)(f, m), extra(EXACT)(f, m)), "is a group, not a dataset"),
    "other shape than in the manifest": (shape_by_manifest, "[3, 36], but [3, 37] in the manifest"),
    "other shape than the vocabulary": (both_shapes, "[3, 36], not [3, 37]"),
    "token outside the vocabulary": (vocabulary, "tokens holds token id 99, outside 0 … 36"),
    "duplicate keys": (lambda f, m: '{"kind": "run", ' + json.dumps(m)[1:], "key 'kind' twice"),
    "NaN": (lambda f, m: m["decoding"].update(temperature=float("nan")), "NaN, which is not JSON"),
    "manifest is a list": (lambda f, m: "[]", "not a JSON object"),
    "same id twice": (
        lambda f, m: (set_text(f["sequences/000001"], "id", "séq 0"), m["sequences"][1].update(id="séq 0")),
        "same id 'séq 0'",
    ),
    "weights without digest": (lambda f, m: m["model"].update(weights={"a": 1}), "'model/weights'"),
}


@pytest.mark.parametrize("case", FORGERIES)
def test_forgeries(bundle_path, case):
    change, message = FORGERIES[case]
    assert message in refused(forge(bundle_path, change))


def test_the_forger_leaves_a_good_file_good(bundle_path):
    """The table above has no other fault than the one it names."""
    read_all(forge(bundle_path, lambda file, manifest: None))


def test_text_in_other_forms(bundle_path):
    for how, message in [
        ({"dtype": h5py.string_dtype()}, "not a fixed-length string"),
        ({"dtype": "<i4", "data": 1}, "not a fixed-length string"),
        ({"data": np.array([b"{}"], "S2")}, "not scalar"),
        ({"data": np.array([b"{}"], "S2"), "chunks": (1,)}, "chunked"),
    ]:
        with h5py.File(bundle_path, "r+") as file:
            replace(file, "manifest", **how)
        assert message in refused(bundle_path)


def test_a_file_that_is_replaced_while_it_is_opened(bundle_path, make, monkeypatch):
    other = make.bundle(bundle_path.with_name("other.h5"))
    original = h5py.File

    def late(path, *args, **kwargs):
        os.replace(other, bundle_path)
        return original(path, *args, **kwargs)

    monkeypatch.setattr(h5py, "File", late)
    assert "was replaced while it was opened" in refused(bundle_path)


def test_refusals_close_the_file(bundle_path):
    forge(bundle_path, extra("notes"))
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(5):
        refused(bundle_path)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before

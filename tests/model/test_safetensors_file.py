"""Our safetensors reader: what the library writes is read; anything wrong is one line that names the tensor."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdtr_cli.errors import InputError
from kdtr_cli.model.safetensors_file import SafetensorsFile

pytestmark = pytest.mark.quick

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1.5, -2.0, np.nan], dtype=ml_dtypes.bfloat16),
    "c": np.array([[0.1], [6e-8]], dtype=np.float16),
}


def refused(path: Path, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    for word in words:
        assert word in message


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    safetensors.numpy.save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.regions) == set(TENSORS)
    for name, want in TENSORS.items():
        got = file.array(name, file.regions[name])
        assert got.dtype == want.dtype
        assert got.tobytes() == want.tobytes()
        assert not got.flags.writeable
        assert b"".join(file.blocks(name, file.regions[name])) == want.tobytes()


def with_metadata(path: Path, value: str) -> Path:
    header = b'{"__metadata__":%s}' % value.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def test_metadata_are_texts_by_key(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(TENSORS, path, metadata={"format": "pt", "é": "a\nb"})
    assert SafetensorsFile(path).metadata == {"format": "pt", "é": "a\nb"}
    safetensors.numpy.save_file(TENSORS, path)
    assert SafetensorsFile(path).metadata == {}
    assert SafetensorsFile(with_metadata(path, "null")).metadata == {}
    for value in ("[]", "3", '{"a":1}', '{"a":null}', '{"a":{}}'):
        refused(with_metadata(path, value), "__metadata__")
        with pytest.raises(safetensors.SafetensorError):
            safetensors.numpy.load_file(path)


def test_our_test_writer_agrees_with_the_library(tmp_path: Path, save_raw: Callable[..., Path]) -> None:
    path = save_raw(tmp_path / "x.safetensors", TENSORS)
    for name, want in safetensors.numpy.load_file(path).items():
        assert want.tobytes() == TENSORS[name].tobytes()


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (entry(data_offsets=[0, 20]), None, ["tensor a", "20 bytes", "needs 24"]),
        (entry(shape=[2, 2]), None, ["tensor a", "needs 16"]),
        (entry(dtype="BF16"), None, ["tensor a", "needs 12"]),
        (entry(dtype="F12"), None, ["tensor a", "unknown dtype", "F12"]),
        (entry(dtype=3), None, ["tensor a", "unknown dtype"]),
        (entry(shape=[2, -3]), None, ["tensor a", "shape"]),
        (entry(shape=[True, 6]), None, ["tensor a", "shape"]),
        (entry(shape=[2.0, 3]), None, ["tensor a", "shape"]),
        (entry(shape="6"), None, ["tensor a", "shape"]),
        (entry(shape=[2**61, 2**61]), None, ["tensor a", "needs"]),
        (entry(data_offsets=[24, 0]), None, ["tensor a", "data_offsets"]),
        (entry(data_offsets=[0, 24, 48]), None, ["tensor a", "data_offsets"]),
        (entry(data_offsets=[0, 2**70]), None, ["tensor a", "data_offsets"]),
        (entry(data_offsets=[-24, 0]), None, ["tensor a", "data_offsets"]),
        (entry(data_offsets=[24, 48]), None, ["tensor a", "cut short"]),
        (entry(), b"x" * 23, ["tensor a", "cut short"]),
        (entry(), b"x" * 25, ["1 bytes after the last tensor"]),
        (entry(data_offsets=[4, 28]), b"x" * 28, ["tensor a", "hole"]),
        (entry(extra=1), None, ["tensor a", "header entry"]),
        ({"a": 3}, None, ["tensor a", "header entry"]),
        ({"a\nb": 3}, None, [r'"a\nb"']),
        ({"a": entry()["a"], "b": entry()["a"]}, None, ["tensor b", "overlaps"]),
        (b'{"a": 1, "a": 2}', None, ['"a" is given twice']),
        (b"not json at all", None, ["JSON"]),
        (b"[1, 2]", None, ["object"]),
    ],
)
def test_faults_name_the_tensor(
    tmp_path: Path, save_raw: Callable[..., Path], header: Any, data: bytes | None, words: list[str]
) -> None:
    arrays = {"a": TENSORS["a"]}
    refused(save_raw(tmp_path / "x.safetensors", arrays, header, data), *words)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "0 bytes"),
        (b"short", "5 bytes"),
        (b"\xff" * 8, "header of"),
        ((101 << 20).to_bytes(8, "little") + b"{}", "header of"),
        ((200).to_bytes(8, "little") + b"{}", "cut short"),
        (b"PK\x03\x04" + b"\0" * 100, "header of"),
    ],
)
def test_files_that_are_no_safetensors(tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    refused(tmp_path / "x.safetensors", word)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    refused(tmp_path / "none.safetensors", "cannot be read")
    refused(tmp_path, "")


@given(data=st.data())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_read_or_refused_but_never_fails_otherwise(tmp_path: Path, data: st.DataObject) -> None:
    good = safetensors.numpy.save(TENSORS)
    at = data.draw(st.integers(0, len(good) - 1))
    damaged = bytearray(good)
    damaged[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(good)), st.integers(0, len(good))))
    path = tmp_path / "x.safetensors"
    path.write_bytes(damaged[:cut])
    try:
        file = SafetensorsFile(path)
    except InputError:
        return
    assert cut == len(good)
    for name, region in file.regions.items():
        assert region.start + region.length <= len(good)
        assert sum(len(block) for block in file.blocks(name, region)) == region.length


def test_file_cut_short_after_opening_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(100_000, np.float32)}, path)
    file = SafetensorsFile(path)
    os.truncate(path, 1000)
    with pytest.raises(InputError, match="tensor a ends early"):
        file.array("a", file.regions["a"])


def test_opening_and_reading_one_tensor_of_a_huge_file_reads_nothing_else(
    tmp_path: Path, save_raw: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    big = 6 << 30  # offsets beyond 32 bits; the file is sparse
    header = {
        "big": {"dtype": "BF16", "shape": [big // 2], "data_offsets": [0, big]},
        "small": {"dtype": "F32", "shape": [3], "data_offsets": [big, big + 12]},
    }
    path = save_raw(tmp_path / "x.safetensors", None, header, b"")
    start = path.stat().st_size
    with open(path, "r+b") as out:
        out.seek(start + big)
        out.write(np.array([1, 2, 3], np.float32).tobytes())
    read = []
    preadv = os.preadv

    def counted(handle: int, buffers: list[memoryview], offset: int) -> int:
        read.append(preadv(handle, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    file = SafetensorsFile(path)
    assert file.array("small", file.regions["small"]).tolist() == [1, 2, 3]
    assert sum(read) == start + 12


def test_the_descriptor_goes_with_the_object(tmp_path: Path) -> None:
    safetensors.numpy.save_file(TENSORS, tmp_path / "x.safetensors")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    files = [SafetensorsFile(tmp_path / "x.safetensors") for _ in range(10)]
    del files
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before

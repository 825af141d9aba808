"""The piecewise writer makes the library's files, in one piece or in shards with an index."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from kdtr_cli.model.safetensors_file import SafetensorsFile
from kdtr_cli.model.safetensors_writer import SafetensorsWriter

pytestmark = pytest.mark.quick
CODES = {"float32": "F32", "bfloat16": "BF16", "int32": "I32", "float16": "F16", "int64": "I64",
         "float8_e4m3fn": "F8_E4M3"}  # fmt: skip


def some_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "b.weight": rng.standard_normal((5, 7)).astype(ml_dtypes.bfloat16),
        "a.weight_packed": rng.integers(-(2**31), 2**31, (5, 3)).astype(np.int32),
        "c": rng.standard_normal(3).astype(np.float32),
        "a.weight_scale": rng.standard_normal((5, 2)).astype(np.float16),
        "empty": np.zeros((0, 4), np.float32),
        "d": np.array([2**40, 1]),
        "e": rng.standard_normal((3, 3)).astype(ml_dtypes.float8_e4m3fn),
    }


def plan_of(arrays: dict[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (CODES[array.dtype.name], array.shape) for name, array in arrays.items()}


def write(folder: Path, arrays: dict[str, np.ndarray], shard_bytes: int = 10**9) -> None:
    with SafetensorsWriter(folder, plan_of(arrays), shard_bytes) as writer:
        for name, array in arrays.items():
            for row in array:
                writer.append(name, row)


def test_one_file_has_the_librarys_bytes(tmp_path: Path) -> None:
    arrays = some_arrays()
    write(tmp_path, arrays)
    library = safetensors.numpy.save(arrays, metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == library
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_tensors_may_take_turns(tmp_path: Path) -> None:
    arrays = {name: array for name, array in some_arrays().items() if len(array) == 5}
    with SafetensorsWriter(tmp_path, plan_of(arrays)) as writer:
        for row in range(5):
            for name, array in arrays.items():
                writer.append(name, array[row])
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert all(file.array(n, file.regions[n]).tobytes() == a.tobytes() for n, a in arrays.items())


@pytest.mark.parametrize(("limit", "shards"), [(1, 7), (80, 3), (180, 2)])
def test_shards_follow_the_plan_and_the_index_names_them(tmp_path: Path, limit: int, shards: int) -> None:
    arrays = some_arrays()
    write(tmp_path, arrays, limit)
    names = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
    assert sorted(os.listdir(tmp_path)) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays.values())
    assert [*dict.fromkeys(index["weight_map"][n] for n in arrays)] == names
    seen = {}
    for shard in names:
        file = SafetensorsFile(tmp_path / shard)
        assert all(index["weight_map"][n] == shard for n in file.regions)
        assert sum(r.length for r in file.regions.values()) <= max(limit, 70)
        seen |= {n: file.array(n, r).tobytes() for n, r in file.regions.items()}
    assert seen == {n: a.tobytes() for n, a in arrays.items()}


def test_what_does_not_fit_the_plan_is_a_fault(tmp_path: Path) -> None:
    plan = {"x": ("F32", (2, 3)), "y": ("I32", (1,))}
    for i, (name, array) in enumerate([("x", np.zeros(7, np.float32)), ("x", np.zeros(1, np.int32))]):
        (tmp_path / str(i)).mkdir()
        with pytest.raises(ValueError, match="x: "), SafetensorsWriter(tmp_path / str(i), plan) as writer:
            writer.append(name, array)
    with pytest.raises(ValueError, match="y: 4 bytes were never written"), SafetensorsWriter(tmp_path, plan) as writer:
        writer.append("x", np.zeros(6, np.float32))


def test_descriptors_are_closed_whatever_happens(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    plan = {f"x{i}": ("F32", (1,)) for i in range(20)}
    with pytest.raises(KeyboardInterrupt), SafetensorsWriter(tmp_path, plan, 4):
        raise KeyboardInterrupt
    assert len(os.listdir("/proc/self/fd")) == before
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model-00003-of-00020.safetensors").write_text("x")
    with pytest.raises(FileExistsError), SafetensorsWriter(tmp_path / "b", plan, 4):
        pass
    assert len(os.listdir("/proc/self/fd")) == before

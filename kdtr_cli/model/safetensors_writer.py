"""Writing safetensors piece by piece: one file, or shards with an index, laid out before the first value is known.

The bytes of a file are those that the safetensors library writes for the same tensors, metadata {"format": "pt"}.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from kdtr_cli.model.safetensors_file import STORED_DTYPES

__all__ = ["SHARD_BYTES", "SafetensorsWriter", "write_tensors"]

SHARD_BYTES = 5 * 10**9  #: data of a shard, unless one tensor has more
# the library's order of dtypes in a file, widest first; then names
_RANK = {"I64": 0, "F32": 1, "I32": 2, "BF16": 3, "F16": 4, "F8_E4M3": 5}


class SafetensorsWriter:
    """A context manager over the files of one checkpoint in ``folder``; ``plan``: name → (dtype, shape).

    ``append`` adds values to a tensor, in order, from any number of arrays; tensors may take turns. The block must end
    with every tensor full (ValueError else). Files are synced. Memory holds only what append is given.
    """

    def __init__(
        self, folder: Path, plan: Mapping[str, tuple[str, tuple[int, ...]]], shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.folder, self.plan = folder, plan
        self._size = {name: math.prod(shape) * STORED_DTYPES[dtype].itemsize for name, (dtype, shape) in plan.items()}
        self._shards = self._split(shard_bytes)
        self._stack = ExitStack()
        self._place: dict[str, tuple[int, int]] = {}  # the file's descriptor, and where the next byte goes
        self._left = dict(self._size)

    def _split(self, limit: int) -> dict[str, list[str]]:
        groups: list[list[str]] = [[]]
        filled = 0
        for name in self.plan:
            if groups[-1] and filled + self._size[name] > limit:
                groups.append([])
                filled = 0
            groups[-1].append(name)
            filled += self._size[name]
        if len(groups) == 1:
            return {"model.safetensors": groups[0]}
        return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}

    def __enter__(self) -> "SafetensorsWriter":
        with self._stack as stack:
            for shard, names in self._shards.items():
                handle = os.open(self.folder / shard, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                stack.callback(os.close, handle)
                ordered = sorted(names, key=lambda name: (_RANK[self.plan[name][0]], name))
                entries, at = {"__metadata__": {"format": "pt"}}, 0
                for name in ordered:
                    dtype, shape = self.plan[name]
                    end = at + self._size[name]
                    entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
                    at = end
                header = json.dumps(entries, separators=(",", ":")).encode()
                header += b" " * (-len(header) % 8)
                _write(handle, struct.pack("<Q", len(header)) + header, 0)
                for name in ordered:
                    self._place[name] = handle, 8 + len(header) + entries[name]["data_offsets"][0]
            self._stack = stack.pop_all()
        return self

    def append(self, name: str, values: np.ndarray) -> None:
        """The next values of a tensor, C order, in its dtype; its shape does not matter."""
        dtype, data = self.plan[name][0], np.ascontiguousarray(values)
        if data.dtype != STORED_DTYPES[dtype] or data.nbytes > self._left[name]:
            raise ValueError(f"{name}: {data.nbytes} bytes of {data.dtype} for the last {self._left[name]} of {dtype}")
        handle, at = self._place[name]
        _write(handle, memoryview(data.reshape(-1).view(np.uint8)), at)
        self._place[name] = handle, at + data.nbytes
        self._left[name] -= data.nbytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if kind is not None:
                return
            for name, left in self._left.items():
                if left:
                    raise ValueError(f"{name}: {left} bytes were never written")
            for handle in {handle for handle, _ in self._place.values()}:
                os.fsync(handle)
        if len(self._shards) > 1:
            mapping = {name: shard for shard, names in self._shards.items() for name in names}
            index = {"metadata": {"total_size": sum(self._size.values())}, "weight_map": dict(sorted(mapping.items()))}
            with open(self.folder / "model.safetensors.index.json", "x", encoding="utf-8") as file:
                file.write(json.dumps(index, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())


def write_tensors(
    file: BinaryIO,
    texts: Mapping[str, str],
    plan: Mapping[str, tuple[str, int, tuple[int, ...]]],
    blocks: Callable[[str], Iterable[np.ndarray]],
) -> None:
    """One file with ``__metadata__``: the same bytes for the same content, which the library does not promise.

    plan: name → (dtype, bytes of an element, shape). blocks: the values of a tensor, in order. Widest elements come
    first, so that every tensor lies at a multiple of their size.
    """
    names = sorted(plan, key=lambda name: (-plan[name][1], name))
    entries: dict[str, object] = {"__metadata__": dict(texts)}
    at = 0
    for name in names:
        dtype, width, shape = plan[name]
        end = at + width * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    file.write(struct.pack("<Q", len(header)) + header)
    for name in names:
        for values in blocks(name):
            file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def _write(handle: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(handle, view[: 1 << 30], at)
        view, at = view[done:], at + done

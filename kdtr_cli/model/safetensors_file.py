"""One safetensors file: its header, checked, and the bytes of its tensors, read when asked for.

Format: an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the data. Our own
reader, because the safetensors library gives no raw bytes and names no tensor in its messages; it is as strict: known
dtypes, lengths that fit shapes, no overlap, no hole, nothing after the last tensor.
"""

import math
import os
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.model.fields import parse_json, shown
from kdtr_cli.model.regular_file import open_regular

__all__ = ["DTYPES", "MAX_ITEMS", "NAMES", "STORED_DTYPES", "Region", "SafetensorsFile", "is_name"]

MAX_HEADER = 100 << 20  # bytes; the safetensors library has the same limit
MAX_ITEMS = 3_000_000  #: JSON values of a header or an index; an INT4 Kimi-K2 in one file would have 2,100,000
MAX_NAME = 150  # characters; it stands in every message about the tensor
MAX_DIMENSIONS = 64  # NumPy's
BLOCK = 1 << 22  # bytes read at a time where a digest is made

#: dtypes that kdtr computes with, by their name in the header
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
#: and those that quantised weights are stored in
STORED_DTYPES = DTYPES | {
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
#: NumPy's and ml_dtypes' name of a dtype → its name in a header
NAMES = {
    "float64": "F64", "int64": "I64", "float32": "F32", "int32": "I32", "float16": "F16", "bfloat16": "BF16",
    "int8": "I8", "uint8": "U8", "float8_e4m3fn": "F8_E4M3",
}  # fmt: skip
_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Region:
    """A tensor's place: offset of the first byte from the start of the file, length in bytes, dtype and shape."""

    start: int
    length: int
    dtype: str
    shape: tuple[int, ...]


class SafetensorsFile:
    """An open file; ``regions`` has every tensor of its header, ``metadata`` its texts by key. The descriptor is closed
    with the object.

    Reads are positioned reads, not a memory map: a file that is cut short afterwards is an InputError, not a SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = open_regular(path)
        weakref.finalize(self, os.close, self._handle)
        self.regions = self._read_header()

    def _read_header(self) -> dict[str, Region]:
        size = os.fstat(self._handle).st_size
        if size < 8:
            raise InputError(f"{self.path}: not a safetensors file ({size} bytes)")
        (length,) = struct.unpack("<Q", self._read_at(0, 8, "the header length"))
        if length > MAX_HEADER or length < 2:
            raise InputError(f"{self.path}: header of {length} bytes; not a safetensors file, or damaged")
        if 8 + length > size:
            raise InputError(f"{self.path}: cut short: a header of {length} bytes in a file of {size}")
        header = parse_json(self._read_at(8, length, "the header").obj, f"{self.path}: header", MAX_ITEMS)
        base = 8 + length
        self.metadata = self._metadata(header.get("__metadata__"))
        regions = {}
        for name, entry in header.items():
            if name != "__metadata__":
                regions[name] = self._region(name, entry, base, size)
        at = base
        for name, region in sorted(regions.items(), key=lambda item: (item[1].start, item[1].length)):
            if region.start != at:
                what = "overlaps the tensor before it" if region.start < at else "leaves a hole before it"
                raise InputError(f"{self.path}: tensor {name} {what}; the file is damaged")
            at += region.length
        if at != size:
            raise InputError(f"{self.path}: {size - at} bytes after the last tensor; the file is damaged")
        return regions

    def _metadata(self, entry: Any) -> dict[str, str]:
        if entry is None:  # as the library takes it
            return {}
        if not isinstance(entry, dict) or any(type(value) is not str for value in entry.values()):
            raise InputError(f"{self.path}: __metadata__ is {shown(entry)}, not texts by key")
        return entry

    def _region(self, name: str, entry: Any, base: int, size: int) -> Region:
        if not is_name(name):
            raise InputError(f"{self.path}: {shown(name)} is no name for a tensor")
        where = f"{self.path}: tensor {name}"
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise InputError(f"{where}: header entry {shown(entry)} where dtype, shape and data_offsets are expected")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(dtype) is not str or dtype not in _SIZES:
            raise InputError(f"{where}: unknown dtype {shown(dtype)}")
        if not _whole_numbers(shape) or len(shape) > MAX_DIMENSIONS:
            raise InputError(f"{where}: shape {shown(shape)} is not a list of sizes")
        if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise InputError(f"{where}: data_offsets {shown(offsets)} are not [begin, end]")
        begin, end = offsets
        if base + end > size:
            raise InputError(f"{where}: ends at byte {base + end} of a file of {size}; the file is cut short")
        needed = math.prod(shape) * _SIZES[dtype]
        if end - begin != needed:
            raise InputError(f"{where}: {end - begin} bytes of data, but {dtype} {shown(shape)} needs {shown(needed)}")
        return Region(base + begin, end - begin, dtype, tuple(shape))

    def _read_at(self, start: int, length: int, what: str) -> memoryview:
        out = memoryview(bytearray(length))
        self._fill(out, start, what)
        return out

    def _fill(self, out: memoryview, start: int, what: str) -> None:
        done = 0
        while done < len(out):
            try:
                # at most 1 GiB a call: Linux reads no more than 2 GiB at once
                got = os.preadv(self._handle, [out[done : done + (1 << 30)]], start + done)
            except OSError as error:
                raise InputError(f"{self.path}: {what} cannot be read ({error.strerror})") from None
            if got == 0:
                raise InputError(f"{self.path}: {what} ends early; the file was cut short while in use")
            done += got

    def array(self, name: str, region: Region) -> np.ndarray:
        """The values of a region in their stored dtype (of STORED_DTYPES), read-only; ``name`` for messages."""
        out = np.empty(region.shape, STORED_DTYPES[region.dtype])
        self._fill(memoryview(out.reshape(-1).view(np.uint8)), region.start, f"tensor {name}")
        out.flags.writeable = False
        return out

    def blocks(self, name: str, region: Region) -> Iterator[memoryview]:
        """The bytes of a region in order, some at a time."""
        for at in range(0, region.length, BLOCK):
            yield self._read_at(region.start + at, min(BLOCK, region.length - at), f"tensor {name}")


def is_name(name: str) -> bool:
    """Whether a tensor may be called this: printable and of 1 to 150 characters, so that a message stays one line."""
    return name.isprintable() and 0 < len(name) <= MAX_NAME


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**62 for n in value)

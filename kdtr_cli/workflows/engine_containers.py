"""Arrays in a file that a foreign engine wrote: safetensors and npz behind one face, nothing read before it is known.

Never pickle: an npz is a zip of .npy files, whose headers are read and held against the declared sizes first.
"""

import math
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO

import ml_dtypes
import numpy as np

from kdtr_cli.bundle.schema import limits_from_environment
from kdtr_cli.errors import EngineError
from kdtr_cli.model.safetensors_file import STORED_DTYPES, Region, SafetensorsFile

__all__ = ["Arrays", "Stored", "open_npy", "open_npz", "open_safetensors"]

ABOUT = "about"  #: the key of the text in which the engine speaks of itself

_MAX_MEMBERS = 4_000_000
_MAX_ABOUT = 1 << 20
_BROKEN_ZIP = (
    zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError, SyntaxError,
    KeyError, TypeError, tokenize.TokenError,
)  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """An array in a file: its dtype, its shape, and a function that reads its rows from ``low`` up to ``high``."""

    dtype: np.dtype
    shape: tuple[int, ...]
    rows: Callable[[int, int], np.ndarray]


@dataclass(frozen=True)
class Arrays:
    """A file's arrays by name, and the text ``about`` (None: the engine says nothing of itself)."""

    arrays: Mapping[str, Stored]
    about: str | None


def open_safetensors(path: Path) -> Arrays:
    """The tensors of a safetensors file; ``about`` is a key of its ``__metadata__``. InputError: a damaged file."""
    file = SafetensorsFile(path)
    arrays = {}
    for name, region in file.regions.items():
        if region.dtype not in STORED_DTYPES:
            raise EngineError(f"{path.name}: {name} is {region.dtype}, which is none of {', '.join(STORED_DTYPES)}")
        arrays[name] = Stored(STORED_DTYPES[region.dtype], region.shape, _region_rows(file, name, region))
    return Arrays(arrays, file.metadata.get(ABOUT))


def _region_rows(file: SafetensorsFile, name: str, region: Region) -> Callable[[int, int], np.ndarray]:
    def rows(low: int, high: int) -> np.ndarray:
        row = region.length // region.shape[0] if region.shape[0] else 0
        part = replace(
            region, start=region.start + low * row, length=(high - low) * row, shape=(high - low, *region.shape[1:])
        )
        return file.array(name, part)

    return rows


def open_npz(path: Path) -> Arrays:
    """The arrays of an npz file, compressed or not; ``about`` is a text (dtype U, no dimension) in it."""
    try:
        archive = zipfile.ZipFile(path)
        members = archive.infolist()
    except _BROKEN_ZIP as error:
        raise _broken(path, error) from error
    if len(members) > _MAX_MEMBERS:
        raise EngineError(f"{path.name}: {len(members)} arrays, which is no file of outputs")
    arrays: dict[str, Stored] = {}
    about = None
    for member in members:
        name = member.filename.removesuffix(".npy")
        if name == member.filename or name in arrays:
            raise EngineError(f"{path.name}: {member.filename!r} is no array of its own; np.savez writes such files")
        if name == ABOUT:
            about = _read_about(archive, member, path)
        else:
            arrays[name] = _member(archive, member, path, name)
    return Arrays(arrays, about)


def open_npy(path: Path) -> Stored:
    """The one array of a .npy file; rows are read where they stand."""
    try:
        with open(path, "rb") as file:
            shape, fortran, dtype = _header(file)
            begin = file.tell()
            size = file.seek(0, 2)
    except _BROKEN_ZIP as error:
        raise _broken(path, error, "npy") from error
    kind = _checked(path, "the array", shape, fortran, dtype, size - begin)
    width = math.prod(shape[1:]) * dtype.itemsize

    def rows(low: int, high: int) -> np.ndarray:
        with open(path, "rb") as file:
            file.seek(begin + low * width)
            data = file.read((high - low) * width)
        if len(data) != (high - low) * width:
            raise EngineError(f"{path.name}: the array is cut short")
        return np.frombuffer(data, kind).reshape(high - low, *shape[1:])

    return Stored(kind, shape, rows)


def _broken(path: Path, error: Exception, what: str = "npz") -> EngineError:
    return EngineError(f"{path.name}: not a whole {what} file: {str(error) or type(error).__name__}")


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f".npy version {version[0]}.{version[1]} is not 1.0 or 2.0")


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, name: str) -> Stored:
    try:
        with archive.open(member) as stream:
            shape, fortran, dtype = _header(stream)
            begin = stream.tell()
    except _BROKEN_ZIP as error:
        raise _broken(path, error) from error
    needed = math.prod(shape) * dtype.itemsize
    kind = _checked(path, name, shape, fortran, dtype, member.file_size - begin)

    @cache
    def whole() -> np.ndarray:
        try:
            with archive.open(member) as stream:
                _header(stream)
                data = stream.read()  # to the end, so that the zip's checksum is compared
        except _BROKEN_ZIP as error:
            raise _broken(path, error) from error
        if len(data) != needed:
            raise EngineError(f"{path.name}: {name} is cut short")
        return np.frombuffer(data, kind).reshape(shape)

    return Stored(kind, shape, lambda low, high: whole()[low:high])


def _checked(path: Path, name: str, shape: tuple[int, ...], fortran: bool, dtype: np.dtype, held: int) -> np.dtype:
    """The dtype of an array that its header describes, which has `held` bytes behind it."""
    limit = limits_from_environment()
    if any(size < 0 for size in shape):
        raise EngineError(f"{path.name}: {name} has shape {list(shape)}, which is no list of sizes")
    if dtype.hasobject:
        raise EngineError(f"{path.name}: {name} holds Python objects (pickle), which kdtr never reads")
    if dtype.newbyteorder("<") != dtype or dtype.names is not None:
        raise EngineError(f"{path.name}: {name} is {dtype}; little-endian numbers are expected")
    needed = math.prod(shape) * dtype.itemsize
    if held != needed:
        raise EngineError(f"{path.name}: {name} holds {held} bytes, its shape needs {needed}")
    if needed > limit.dataset_bytes:
        raise EngineError(f"{path.name}: {name} declares {needed} bytes; {limit.remedy}")
    if fortran and len(shape) > 1:
        raise EngineError(f"{path.name}: {name} is in Fortran order; write np.ascontiguousarray of it")
    # what np.savez makes of ml_dtypes.bfloat16, which .npy has no name for
    return np.dtype(ml_dtypes.bfloat16) if dtype == np.dtype("V2") else dtype


def _read_about(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> str:
    if member.file_size > _MAX_ABOUT:
        raise EngineError(f"{path.name}: about has {member.file_size} bytes, which is no text about an engine")
    try:
        with archive.open(member) as stream:
            array = np.lib.format.read_array(stream, allow_pickle=False)
    except _BROKEN_ZIP as error:
        raise _broken(path, error) from error
    if array.dtype.kind != "U" or array.shape != ():
        raise EngineError(f"{path.name}: about is {array.dtype} {list(array.shape)}, not a text")
    return str(array)

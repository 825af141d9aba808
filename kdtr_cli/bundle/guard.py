"""HDF5 access that trusts nothing: every object is looked at before HDF5 is asked to follow or read it.

HDF5 will, for whoever asks nicely, read other files of the machine (external links, external storage, virtual
datasets), run code (filter plugins), allocate terabytes (declared shapes) or inflate 1 MB to 1 GB (gzip). So links are
classified before they are followed, and layout, filters, type and sizes are checked before data are touched. What can't
be guarded here is a defect inside libhdf5's own parser: a crafted file might still crash the process.
"""

import contextlib
import os
import re
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5l, h5o, h5s, h5t, h5z

from kdtr_cli.bundle.schema import DTYPES, DType, Limits, SchemaError
from kdtr_cli.errors import InputError

__all__ = [
    "Layout",
    "as_array",
    "attribute_int",
    "attribute_text",
    "check_attributes",
    "check_inflation",
    "dataset_fd",
    "inspect_dataset",
    "list_links",
    "open_dataset",
    "open_group",
    "open_hdf5",
    "plain_offset",
    "read_all",
    "read_rows",
    "read_text",
    "refusing",
    "row_ranges",
]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_FILTERS = {h5z.FILTER_DEFLATE: "gzip", h5z.FILTER_SHUFFLE: "shuffle", h5z.FILTER_FLETCHER32: "fletcher32"}

_HDF5_TYPES = {
    "int8": h5t.STD_I8LE,
    "uint8": h5t.STD_U8LE,
    "int32": h5t.STD_I32LE,
    "int64": h5t.STD_I64LE,
    "float16": h5t.IEEE_F16LE,
    "float32": h5t.IEEE_F32LE,
    "float64": h5t.IEEE_F64LE,
    "bfloat16": h5t.STD_U16LE,
    "float8_e4m3fn": h5t.STD_U8LE,
}


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turns every way in which reading a bundle can fail into one InputError line that starts with its path."""
    try:
        yield
    except SchemaError as error:
        raise InputError(f"{path}: {error}") from error
    except MemoryError as error:
        raise InputError(f"{path}: what is to be read does not fit into memory") from error
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, zlib.error) as error:
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        reason = (text.strip().splitlines() or [type(error).__name__])[0]
        if "truncated file" in reason:
            reason = "the file is truncated"
        raise InputError(f"{path}: damaged bundle: {reason}") from error


def open_hdf5(path: Path) -> h5py.File:
    """Open a regular file that starts as HDF5 does, without locks (bundles lie on read-only media too).

    InputError for anything else; a FIFO or device is refused unread.
    """
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: can't be opened: {reason}") from error
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise InputError(f"{path} is a folder, not a bundle")
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is a special file, not a bundle")
        head = os.pread(fd, len(_SIGNATURE), 0)
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}") from error
    finally:
        os.close(fd)
    if not head:
        raise InputError(f"{path}: the file is empty, not a bundle")
    if head != _SIGNATURE:
        # HDF5 itself would also look for its signature at 512, 1024, …: behind a user block, which bundles don't have
        raise InputError(f"{path}: not a bundle: no HDF5 signature at its start")
    with refusing(path):
        file = h5py.File(os.fsencode(path), "r", locking=False, driver="sec2")
        opened = os.fstat(file.id.get_vfd_handle())
        if (opened.st_dev, opened.st_ino) != (status.st_dev, status.st_ino):
            file.close()
            raise SchemaError("the file was replaced while it was opened; try again")
        if file.userblock_size:
            file.close()
            raise SchemaError("the file has a user block; a bundle has none")
    return file


def list_links(group: h5g.GroupID, where: str, limit: int) -> list[str]:
    """The names in a group, sorted; SchemaError if a link is not a hard link, or there are more than `limit`."""
    found: list[tuple[bytes, int]] = []

    def collect(name: bytes, info: h5l.LinkInfo) -> bool | None:
        found.append((name, info.type))
        return True if len(found) > limit else None

    group.links.iterate(collect, info=True)
    if len(found) > limit:
        raise SchemaError(f"{where}: more than {limit} objects")
    names = []
    for raw, kind in found:
        name = raw.decode(errors="backslashreplace")
        if kind != h5l.TYPE_HARD:
            word = {h5l.TYPE_SOFT: "a soft", h5l.TYPE_EXTERNAL: "an external"}.get(kind, "a user-defined")
            raise SchemaError(f"{_join(where, name)} is {word} link; a bundle holds its own data")
        # a name with a slash would be taken for a path when it is opened, and could lead anywhere
        if not _NAME.fullmatch(name):
            raise SchemaError(f"{where or 'the file'} holds an object named {name[:80]!r}; a bundle has no such names")
        names.append(name)
    return sorted(names)


def _join(where: str, name: str) -> str:
    shown = name if _NAME.fullmatch(name) else repr(name)
    return f"{where}/{shown[:200]}".lstrip("/")


def _open(parent: h5g.GroupID, name: str, where: str, wanted: str, seen: dict[int, str]) -> h5py.h5g.GroupID:
    """Open the object that a hard link names, once: a second link to it is refused (cycles, aliases)."""
    raw = name.encode()
    info = h5o.get_info(parent, raw)
    kind = {h5o.TYPE_GROUP: "group", h5o.TYPE_DATASET: "dataset"}.get(info.type, "named type")
    if kind != wanted:
        raise SchemaError(f"{where} is a {kind}, not a {wanted}")
    if info.addr in seen:
        raise SchemaError(f"{where} is the same object as {seen[info.addr]}")
    if info.rc != 1:
        raise SchemaError(f"{where} has {info.rc} hard links; a bundle's objects have one")
    seen[info.addr] = where
    return h5o.open(parent, raw)


def open_group(parent: h5g.GroupID, name: str, where: str, seen: dict[int, str]) -> h5g.GroupID:
    """Open a group by its hard link. seen: object address → path of all objects so far, extended."""
    return _open(parent, name, where, "group", seen)


def open_dataset(parent: h5g.GroupID, name: str, where: str, seen: dict[int, str]) -> h5d.DatasetID:
    """Open a dataset by its hard link; as open_group."""
    return _open(parent, name, where, "dataset", seen)


def check_attributes(target: h5g.GroupID | h5d.DatasetID, where: str, names: frozenset[str]) -> None:
    """SchemaError unless the object has exactly these attributes."""
    count = h5a.get_num_attrs(target)
    if count > len(names) + 8:
        raise SchemaError(f"{where or 'the file'} has {count} attributes, not {len(names)}")
    found = {h5a.open(target, index=index).name.decode(errors="backslashreplace") for index in range(count)}
    for name in sorted(found - names):
        raise SchemaError(f"{where or 'the file'} has the unknown attribute {name!r}")
    for name in sorted(names - found):
        raise SchemaError(f"{where or 'the file'} lacks the attribute {name!r}")


def attribute_text(target: h5g.GroupID | h5d.DatasetID, where: str, name: str, max_bytes: int) -> str:
    """A scalar attribute that holds a fixed-length string."""
    attribute = h5a.open(target, name.encode())
    kind = attribute.get_type()
    label = f"{where or 'the file'}: attribute {name!r}"
    if attribute.get_space().get_simple_extent_type() != h5s.SCALAR:
        raise SchemaError(f"{label} is not scalar")
    size = _string_size(kind, label, max_bytes)
    data = np.empty((), dtype=f"S{size}")
    attribute.read(data, mtype=kind)
    return _decode(data.tobytes(), label)


def attribute_int(target: h5g.GroupID | h5d.DatasetID, where: str, name: str) -> int:
    """A scalar attribute that holds a little-endian int64."""
    attribute = h5a.open(target, name.encode())
    scalar = attribute.get_space().get_simple_extent_type() == h5s.SCALAR
    if not scalar or not attribute.get_type().equal(h5t.STD_I64LE):
        raise SchemaError(f"{where}: attribute {name!r} is not a scalar int64")
    data = np.empty((), dtype="<i8")
    attribute.read(data)
    return int(data)


def _string_size(kind: h5t.TypeID, label: str, max_bytes: int) -> int:
    """The bytes of a fixed-length string type; SchemaError for any other type, variable-length strings too."""
    if not isinstance(kind, h5t.TypeStringID) or kind.is_variable_str() or kind.committed():
        raise SchemaError(f"{label} is not a fixed-length string")
    if kind.get_cset() not in (h5t.CSET_ASCII, h5t.CSET_UTF8) or kind.get_strpad() == h5t.STR_SPACEPAD:
        raise SchemaError(f"{label} is not UTF-8 ended or padded with NUL")
    size = kind.get_size()
    if not 1 <= size <= max_bytes:
        raise SchemaError(f"{label} has {size} bytes; 1 to {max_bytes} are allowed")
    return size


def _decode(data: bytes, label: str) -> str:
    data = data.rstrip(b"\0")
    if b"\0" in data:
        raise SchemaError(f"{label} holds a NUL byte")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise SchemaError(f"{label} is not UTF-8") from None


def read_text(dataset: h5d.DatasetID, where: str, max_bytes: int) -> bytes:
    """The bytes of a scalar dataset that holds a fixed-length string, without the NULs at its end; not yet decoded,
    so that a damaged one is first of all found not to match its digest."""
    _check_storage_kind(dataset, where)
    if dataset.get_create_plist().get_layout() == h5d.CHUNKED:
        raise SchemaError(f"{where} is chunked; text is not")
    kind = dataset.get_type()
    if dataset.get_space().get_simple_extent_type() != h5s.SCALAR:
        raise SchemaError(f"{where} is not scalar")
    size = _string_size(kind, where, max_bytes)
    if dataset.get_storage_size() != size:
        raise SchemaError(f"{where}: its {size} bytes are not all stored")
    data = np.empty((), dtype=f"S{size}")
    dataset.read(h5s.ALL, h5s.ALL, data, mtype=kind)
    return data.tobytes().rstrip(b"\0")


@dataclass(frozen=True)
class Layout:
    """What a dataset says of itself, checked. declared, stored: bytes before and after compression."""

    kind: DType
    shape: tuple[int, ...]
    declared: int
    stored: int
    compressed: bool


def _check_storage_kind(dataset: h5d.DatasetID, where: str) -> h5py.h5p.PropDCID:
    # before the shape is asked for: HDF5 may open the sources of a virtual dataset to answer
    plist = dataset.get_create_plist()
    if plist.get_layout() not in (h5d.COMPACT, h5d.CONTIGUOUS, h5d.CHUNKED):
        raise SchemaError(f"{where} is a virtual dataset; a bundle holds its own data")
    if plist.get_external_count():
        raise SchemaError(f"{where} is stored in an external file; a bundle holds its own data")
    return plist


def inspect_dataset(dataset: h5d.DatasetID, where: str, limits: Limits, file_bytes: int, declared_type: str) -> Layout:
    """Check storage, filters, type and size of a numeric dataset without reading it.

    declared_type: its dtype by the manifest, a name of DTYPES; the dataset must have exactly that.
    """
    plist = _check_storage_kind(dataset, where)
    filters = [plist.get_filter(index)[0] for index in range(plist.get_nfilters())]
    for number in filters:
        if number not in _FILTERS:
            raise SchemaError(f"{where} uses HDF5 filter {number}; gzip, shuffle and fletcher32 are allowed")
    if len(set(filters)) != len(filters):
        raise SchemaError(f"{where} uses a filter twice")
    kind = DTYPES[declared_type]
    check_attributes(dataset, where, frozenset({"kdtr_dtype"} if kind.marked else ()))
    if kind.marked and attribute_text(dataset, where, "kdtr_dtype", 64) != kind.name:
        raise SchemaError(f"{where}: attribute 'kdtr_dtype' is not {kind.name!r} as the manifest says")
    file_type = dataset.get_type()
    if file_type.committed() or not file_type.equal(_HDF5_TYPES[kind.name]):
        raise SchemaError(f"{where} is not little-endian {kind.stored.name} as the manifest says")
    space = dataset.get_space()
    if space.get_simple_extent_type() not in (h5s.SCALAR, h5s.SIMPLE):
        raise SchemaError(f"{where} has no data space")
    shape = tuple(int(size) for size in space.get_simple_extent_dims())
    declared = prod(shape) * kind.stored.itemsize
    if declared > limits.dataset_bytes:
        raise SchemaError(f"{where} declares {declared} bytes, more than {limits.dataset_bytes}; {limits.remedy}")
    stored = int(dataset.get_storage_size())
    if stored > file_bytes:
        raise SchemaError(f"{where} says it stores {stored} bytes in a file of {file_bytes}")
    compressed = h5z.FILTER_DEFLATE in filters
    if plist.get_layout() == h5d.CHUNKED:
        _check_chunks(dataset, plist.get_chunk(), where, limits, shape, kind.stored.itemsize)
    if compressed:
        if declared > limits.small_bytes and declared > limits.ratio * stored:
            raise SchemaError(f"{where} inflates {stored} bytes to {declared}, more than {limits.ratio} times")
    elif stored < declared:
        raise SchemaError(f"{where} declares {declared} bytes but stores {stored}")
    return Layout(kind, shape, declared, stored, compressed)


def _check_chunks(
    dataset: h5d.DatasetID, chunk: tuple[int, ...], where: str, limits: Limits, shape: tuple[int, ...], itemsize: int
) -> None:
    size = prod(chunk) * itemsize
    if size > limits.chunk_bytes:
        raise SchemaError(f"{where} has chunks of {size} bytes; {limits.chunk_bytes} are allowed")
    expected = prod(-(-total // part) for total, part in zip(shape, chunk, strict=True))
    if dataset.get_num_chunks() != expected:
        raise SchemaError(f"{where}: of its {expected} chunks {dataset.get_num_chunks()} are stored")


def check_inflation(dataset: h5d.DatasetID, where: str, layout: Layout) -> None:
    """Inflate each gzip chunk with a bound, before HDF5 does it without one.

    libhdf5's gzip filter follows a stream to its end, whatever the chunk's size: 1 MB can become 1 GB.
    """
    if not layout.compressed:
        return
    plist = dataset.get_create_plist()
    filters = [plist.get_filter(index)[0] for index in range(plist.get_nfilters())]
    position = filters.index(h5z.FILTER_DEFLATE)
    # fletcher32 ahead of gzip adds four bytes to what is compressed
    bound = prod(plist.get_chunk()) * layout.kind.stored.itemsize + 4
    fd = dataset_fd(dataset)
    for info in _chunks(dataset):
        if info.filter_mask >> position & 1:
            continue
        inflater = zlib.decompressobj()
        inflated = len(inflater.decompress(os.pread(fd, info.size, info.byte_offset), bound + 1))
        if inflated > bound or not inflater.eof:
            raise SchemaError(f"{where}: a chunk does not inflate to its size")


def _chunks(dataset: h5d.DatasetID) -> list[h5d.StoreInfo]:
    infos: list[h5d.StoreInfo] = []
    if hasattr(dataset, "chunk_iter"):
        dataset.chunk_iter(infos.append)
    else:  # libhdf5 before 1.14; each look-up walks the index from its start
        infos.extend(dataset.get_chunk_info(index) for index in range(dataset.get_num_chunks()))
    return infos


def dataset_fd(dataset: h5d.DatasetID) -> int:
    """The descriptor through which HDF5 reads the file of a dataset."""
    return h5py.h5i.get_file_id(dataset).get_vfd_handle()


def plain_offset(dataset: h5d.DatasetID, layout: Layout) -> int | None:
    """Where in the file the elements of a dataset lie one after another as they are; None where they don't."""
    plist = dataset.get_create_plist()
    if plist.get_layout() != h5d.CONTIGUOUS or plist.get_nfilters() or not layout.declared:
        return None
    return dataset.get_offset()  # from the start of the file: a user block was refused


def read_rows(dataset: h5d.DatasetID, layout: Layout, low: int, high: int) -> np.ndarray:
    """Rows low … high (exclusive) of a dataset of one or more dimensions, as stored."""
    shape = (high - low, *layout.shape[1:])
    out = np.empty(shape, dtype=layout.kind.stored)
    if out.size:
        space = dataset.get_space()
        space.select_hyperslab((low, *(0 for _ in shape[1:])), shape)
        dataset.read(h5s.create_simple(shape), space, out)
    return out


def read_all(dataset: h5d.DatasetID, layout: Layout) -> np.ndarray:
    """A whole dataset as stored, scalar or not."""
    out = np.empty(layout.shape, dtype=layout.kind.stored)
    if out.size:
        dataset.read(h5s.ALL, h5s.ALL, out)
    return out


def row_ranges(layout: Layout, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Row ranges of about `block_bytes` each that cover a dataset of one or more dimensions; none if it is empty."""
    if not layout.declared:
        return
    rows = layout.shape[0]
    row_bytes = prod(layout.shape[1:]) * layout.kind.stored.itemsize
    step = max(1, block_bytes // row_bytes)
    for low in range(0, rows, step):
        yield low, min(rows, low + step)


def as_array(stored: np.ndarray, layout: Layout) -> np.ndarray:
    """Stored elements as what they mean: bfloat16 and fp8 get their type back. No copy."""
    return stored.view(layout.kind.array) if layout.kind.marked else stored.astype(layout.kind.array, copy=False)

"""One pass over the rows of an array that verifies it on the way: what is read for its digest is used, not read again.

Rows of a contiguous dataset without filters, which is what kdtr writes, are read from the file at their offset, so that
several threads can read at once and beside HDF5, which lets one in at a time. Any other dataset is read through HDF5.
"""

import hashlib
import os
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
from h5py import h5d

from kdtr_cli.bundle import guard
from kdtr_cli.bundle.integrity import digest_header, stored_view
from kdtr_cli.bundle.schema import SchemaError

__all__ = ["ArrayScan"]


class ArrayScan:
    """A pass over the rows of the dataset `path`, whose digest the manifest gives as `sha256`.

    `check` is called with the digest at the end (None: the array is verified already, nothing is hashed). InputError
    that starts with `file`: it is damaged.
    """

    def __init__(
        self,
        file: Path,
        dataset: h5d.DatasetID,
        path: str,
        layout: guard.Layout,
        sha256: str,
        check: Callable[[str], None] | None,
    ) -> None:
        self.sha256 = sha256
        self._file = file
        self._dataset, self._path, self._layout, self._check = dataset, path, layout, check
        self._offset = guard.plain_offset(dataset, layout)
        self._fd = guard.dataset_fd(dataset)
        self._digest = hashlib.sha256(digest_header(layout.kind.name, layout.shape))
        self._fed = 0

    def rows(self, low: int, high: int, memory: np.ndarray | None = None) -> np.ndarray:
        """Rows low … high (exclusive), not verified, read-only; on any thread. `memory` uint8, as many bytes at least:
        where they may be put."""
        layout = self._layout
        with guard.refusing(self._file):
            if self._offset is None:
                stored = guard.read_rows(self._dataset, layout, low, high)
            else:
                shape = high - low, *layout.shape[1:]
                size = prod(shape) * layout.kind.stored.itemsize
                memory = np.empty(size, np.uint8) if memory is None else memory[:size]
                stored = memory.view(layout.kind.stored).reshape(shape)
                _read_into(self._fd, stored, self._offset + low * stored[:1].nbytes, self._path)
            array = guard.as_array(stored, layout)
        array.flags.writeable = False
        return array

    def feed(self, rows: np.ndarray) -> None:
        """The next rows, in order."""
        if self._check is not None:
            self._digest.update(stored_view(rows).reshape(-1).view(np.uint8))
        self._fed += len(rows)

    def finish(self) -> None:
        """InputError unless the rows, all of which must have been fed, have the digest."""
        if self._fed != self._layout.shape[0]:
            raise ValueError(f"{self._fed} of {self._layout.shape[0]} rows of {self._path} were fed")
        if self._check is not None:
            with guard.refusing(self._file):
                self._check(self._digest.hexdigest())


def _read_into(fd: int, array: np.ndarray, offset: int, path: str) -> None:
    """Fill an array from a file; the system may return fewer bytes than were asked for."""
    left = memoryview(array.reshape(-1).view(np.uint8))
    while left:
        n = os.preadv(fd, [left], offset)
        if n == 0:
            raise SchemaError(f"{path} lies beyond the end of the file; the file is truncated")
        left, offset = left[n:], offset + n

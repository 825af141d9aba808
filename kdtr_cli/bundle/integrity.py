"""SHA-256 digests of arrays in the form that the manifest records.

A digest covers what an array means, not how the file stores it: chunking and compression don't change it.

    sha256( "<dtype>[<d0>,<d1>,…]\\n"  as ASCII  +  elements in C order, little-endian )

e.g. `float32[24,512]\\n` and 49,152 bytes. dtype is a name of schema.DTYPES (so bfloat16 and its stored uint16 differ).
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from kdtr_cli.bundle.schema import DTYPES, TEXT_DTYPE, dtype_name

__all__ = ["BLOCK_BYTES", "array_sha256", "digest_header", "stored_view", "stream_sha256", "text_sha256"]

#: Bytes that are hashed and read at a time. Measured: 1 MiB to 16 MiB differ by less than 5 %.
BLOCK_BYTES = 4 << 20


def text_sha256(data: bytes) -> str:
    """The digest of a text dataset: as that of an array of dtype 'utf8' with one element a byte."""
    return hashlib.sha256(digest_header(TEXT_DTYPE, (len(data),)) + data).hexdigest()


def digest_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What is hashed before the elements."""
    return f"{dtype}[{','.join(str(size) for size in shape)}]\n".encode("ascii")


def stored_view(array: np.ndarray) -> np.ndarray:
    """The array as stored: C-contiguous, little-endian, bfloat16 and fp8 as unsigned integers. Copies if need be."""
    kind = DTYPES[dtype_name(array)]
    if kind.marked:
        return np.ascontiguousarray(array).view(kind.stored).reshape(array.shape)
    return np.ascontiguousarray(array, dtype=kind.stored).reshape(array.shape)


def array_sha256(array: np.ndarray) -> str:
    """The digest of an array, in hexadecimal."""
    return stream_sha256(dtype_name(array), array.shape, [stored_view(array)])


def stream_sha256(dtype: str, shape: tuple[int, ...], blocks: Iterable[np.ndarray]) -> str:
    """The digest of an array that comes in blocks of rows, each as `stored_view` gives it."""
    digest = hashlib.sha256(digest_header(dtype, shape))
    for block in blocks:
        digest.update(block.reshape(-1).view(np.uint8))
    return digest.hexdigest()

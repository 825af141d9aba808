"""What a row of the kernel table is: a kernel's arguments, its launch and its cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["DTYPES", "SHARED_LIMIT", "Arg", "Dims", "Grid", "Kernel", "args", "up"]

SHARED_LIMIT = 99 << 10  #: bytes of shared memory that a block has on every architecture (sm_120 has the least)

DTYPES = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(np.uint16),  # their bits: NumPy has no bfloat16 of its own
    "f16": np.dtype(np.uint16),
    "f64": np.dtype(np.float64),
    "u8": np.dtype(np.uint8),
    "u16": np.dtype(np.uint16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "u32": np.dtype(np.uint32),
    "u64": np.dtype(np.uint64),
}

Dims = Mapping[str, Any]
Grid = Callable[[Dims], tuple[int, int, int]]


@dataclass(frozen=True)
class Arg:
    """One argument, in the order of the C++ signature."""

    name: str
    dtype: str  #: key of DTYPES
    shape: tuple[str, ...] | None = None  #: names of dimensions; None for a scalar passed by value
    role: str = "in"  #: in, out or inout
    nullable: bool = False


@dataclass(frozen=True)
class Kernel:
    """How to launch a kernel and what it costs."""

    name: str
    file: str
    args: tuple[Arg, ...]
    grid: Grid
    twin: str
    block: tuple[int, int, int] = (128, 1, 1)
    shared: Callable[[Dims], int] = lambda d: 0
    tier: str = "exact"
    #: how far a value may be from the twin's, as a share of the largest of its row (bf16 outputs: and one rounding);
    #: 0: not a bit
    tolerance: float = 0.0
    #: it waits for what the kernel before wrote by itself (mma.cuh), so it may begin while that one ends
    overlaps: bool = False
    #: its instructions have no counterpart on the CPU device: tested on a GPU alone
    gpu_only: bool = False
    #: the most shared memory of a block that it is made for: what every architecture has, or more where another serves
    shared_limit: int = SHARED_LIMIT
    #: bytes that must move through device memory and floating-point operations, for benchmarks
    bytes: Callable[[Dims], int] = lambda d: 0
    flops: Callable[[Dims], int] = lambda d: 0

    def arrays(self) -> tuple[Arg, ...]:
        """The array arguments."""
        return tuple(a for a in self.args if a.shape is not None)


def up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def args(text: str) -> tuple[Arg, ...]:
    """Arguments, one a line: ``role dtype name[dim, dim]``, or ``dtype name`` for a scalar; ``?`` = may be null."""
    out = []
    for line in text.strip().splitlines():
        words = line.split(None, 2) if line.split()[0] in ("in", "out", "inout") else ["", *line.split(None, 1)]
        role, dtype, name = words
        if role:
            name, dims = name.rstrip("]").split("[")
            shape = tuple(d.strip() for d in dims.split(","))
            out.append(Arg(name.rstrip("?"), dtype, shape, role, name.endswith("?")))
        else:
            out.append(Arg(name, dtype))
    return tuple(out)

"""Arrays of any framework as NumPy's, without importing it."""

from typing import Any

import numpy as np

from kdtr_cli.errors import InputError

__all__ = ["as_numpy"]


def as_numpy(values: Any, what: str) -> np.ndarray:
    """``values`` as a NumPy array in host memory; what has a NumPy (or ml_dtypes) type keeps it.

    Lists of numbers, anything with ``__dlpack__`` or ``__array__``, and what lies on a GPU: PyTorch's tensors (through
    their own ``detach`` and ``cpu``), CuPy's arrays (through ``get``). bfloat16 of a framework that can't hand it to
    NumPy becomes float32, which holds each of its values. InputError names ``what`` can't be read.
    """
    if isinstance(values, np.ndarray):
        return values
    kind = f"{type(values).__module__}.{type(values).__qualname__}"
    try:
        host = _on_host(values)
        if isinstance(host, np.ndarray):
            return host
        if str(getattr(host, "dtype", "")) == "torch.bfloat16":
            host = host.float()  # NumPy has no bfloat16, so PyTorch gives it none
        if hasattr(host, "__dlpack__"):
            try:
                return np.from_dlpack(host)
            except (BufferError, RuntimeError, TypeError, ValueError):
                if not hasattr(host, "__array__"):  # a type or a device that DLPack and NumPy do not share
                    raise
        array = np.asarray(host)
    except Exception as error:
        raise InputError(f"{what}: a {kind} can't be read as an array: {error}") from error
    if array.dtype.kind not in "biufV":
        raise InputError(f"{what}: a {kind} is no array of numbers")
    return array


def _on_host(values: Any) -> Any:
    """Tensors of PyTorch and CuPy refuse to leave their device, and the graph of gradients, unless told."""
    if callable(getattr(values, "detach", None)) and callable(getattr(values, "cpu", None)):
        return values.detach().cpu()
    if hasattr(values, "__cuda_array_interface__") and callable(getattr(values, "get", None)):
        return values.get()
    return values

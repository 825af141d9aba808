"""CUDA sources of the engine, as package data: one operation a file (docs/kernels.md)."""

__all__: list[str] = []

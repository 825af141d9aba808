"""CUDA sources of the engine, as package data: one operation a file (docs/kernels.md).

(PYTEST_DONT_REWRITE, as in kdtr_cli.)
"""

__all__: list[str] = []

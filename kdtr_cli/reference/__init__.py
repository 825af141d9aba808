"""The NumPy model: the numerics contract as code, and the float64 truth beside it."""

__all__: list[str] = []

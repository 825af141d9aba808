"""The engine: CUDA kernels compiled at run time, launched on a GPU or on the machine's processor."""

__all__: list[str] = []

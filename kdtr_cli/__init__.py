"""kdtr: proves a CUDA inference engine for Kimi-K2 / DeepSeek-V3 models right, to the bit."""

__all__ = ["__version__"]

__version__ = "0.1.0"

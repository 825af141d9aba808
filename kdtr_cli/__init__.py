"""kdtr: proves a CUDA inference engine for Kimi-K2 / DeepSeek-V3 models right, to the bit.

(PYTEST_DONT_REWRITE: kdtr may be imported before pytest loads its plugin, which is then no reason to warn.)
"""

__all__ = ["__version__"]

__version__ = "0.1.0"

"""DDTree in NumPy: the draft tree, the walk over it, the compaction of a cache, and what a round records."""

__all__: list[str] = []

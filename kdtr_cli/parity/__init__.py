"""Judging: pure functions on evidence in memory, which know nothing of files, engine or reference."""

__all__: list[str] = []

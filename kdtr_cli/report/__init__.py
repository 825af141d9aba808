"""Renderers of one judgement: text for people, JSON for machines. None changes a verdict."""

__all__: list[str] = []

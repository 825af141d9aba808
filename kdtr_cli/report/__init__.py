"""Renderers of one judgement: text for people, JSON, JUnit XML and GitHub's commands for machines. None changes a
verdict."""

__all__: list[str] = []

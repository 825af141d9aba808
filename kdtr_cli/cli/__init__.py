"""The commands of `kdtr`, one file each: parse, call a workflow, render. No logic."""

__all__: list[str] = []

"""What a command does: these modules join the others and read and write bundles."""

__all__: list[str] = []

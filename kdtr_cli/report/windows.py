"""Which part of a long list of steps is shown: its start, the place of the first difference, its end."""

__all__ = ["MAX_TOKENS", "windows"]

#: Longer lists of tokens are shown in part.
MAX_TOKENS = 96


def windows(total: int, first: int | None, most: int = MAX_TOKENS) -> list[tuple[int, int]]:
    """The ranges of `total` steps to show: all where there are at most `most`, else a quarter of them from the start, a
    quarter around step `first`, and a twelfth at the end."""
    if total <= most:
        return [(0, total)] if total else []
    wanted = [(0, most // 4), (total - most // 12, total)]
    if first is not None:
        wanted.append((max(0, first - most // 8), min(total, first + most // 8)))
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(wanted):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return merged

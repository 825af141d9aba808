"""Enough of the HDF5 file format to damage object headers and repair their checksums (Jenkins' lookup3).

Without it every damaged header ends at its checksum, and what lies behind is never tried.
"""

__all__ = ["header_spans", "lookup3", "repair"]

_MASK = 0xFFFFFFFF


def _rotate(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def lookup3(data: bytes) -> int:
    """Bob Jenkins' hashlittle of `data`, start value 0."""
    a = b = c = (0xDEADBEEF + len(data)) & _MASK
    at, left = 0, len(data)
    while left > 12:
        a, b, c = (
            (v + int.from_bytes(data[at + o : at + o + 4], "little")) & _MASK for v, o in ((a, 0), (b, 4), (c, 8))
        )
        for bits in (4, 6, 8, 16, 19, 4):
            # the six steps of mix() are one step with the names turned round
            a = ((a - c) & _MASK) ^ _rotate(c, bits)
            c = (c + b) & _MASK
            a, b, c = b, c, a
        at, left = at + 12, left - 12
    if left == 0:
        return c
    tail = data[at:] + bytes(12 - left)
    a, b, c = ((v + int.from_bytes(tail[o : o + 4], "little")) & _MASK for v, o in ((a, 0), (b, 4), (c, 8)))
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotate(b, bits)) & _MASK
        a, b, c = b, c, a
    return b  # what is called c in C: after seven turns it stands here


def header_spans(data: bytes) -> list[tuple[int, int]]:
    """(start, end) of what each checksum covers: the superblock and all version 2 object headers. The checksum
    follows at `end`."""
    spans, at = [(0, 44)], 0
    while (at := data.find(b"OHDR", at)) >= 0:
        flags = data[at + 5]
        size_at = at + 6 + (16 if flags & 32 else 0) + (4 if flags & 16 else 0)
        width = 1 << (flags & 3)
        spans.append((at, size_at + width + int.from_bytes(data[size_at : size_at + width], "little")))
        at += 4
    return spans


def repair(data: bytearray, spans: list[tuple[int, int]]) -> None:
    """Set the checksum of every span to what it now contains."""
    for start, end in spans:
        data[end : end + 4] = lookup3(bytes(data[start:end])).to_bytes(4, "little")

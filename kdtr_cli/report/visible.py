"""Text from bundles and tokenizers as it may be shown: nothing in it moves a cursor, turns the direction of writing or
hides."""

__all__ = ["visible"]


def visible(text: str, limit: int | None = None) -> str:
    """`text` on one line, everything unprintable as an escape: control characters, line breaks, bidi controls, zero
    width characters, lone surrogates. `limit`: no more characters than these, "..." where some are left out."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    shown = shown.replace("##[", "#\\x23[")  # a GitHub runner takes it for a command
    return shown if limit is None or len(shown) <= limit else shown[: max(0, limit - 3)] + "..."

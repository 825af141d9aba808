"""Text that is shown stays where it is put."""

import pytest

from kdtr_cli.report.visible import visible

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢字", "plain é 漢字"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x1b[31m\x00\x7f\x9b", "\\x1b[31m\\x00\\x7f\\x9b"),
        ("\u202e\u2066\u200f", "\\u202e\\u2066\\u200f"),  # the direction of writing
        ("\u200b\u2028\ufeff\u00a0", "\\u200b\\u2028\\ufeff\\xa0"),
        ("\ud800", "\\ud800"),
        ("##[error]", "#\\x23[error]"),
        ("[red]<b>&", "[red]<b>&"),
    ],
)
def test_what_would_move_or_hide_is_an_escape(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize(("limit", "shown"), [(None, "abcdef"), (6, "abcdef"), (5, "ab..."), (3, "...")])
def test_a_long_text_is_cut(limit, shown):
    assert visible("abcdef", limit) == shown

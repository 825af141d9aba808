"""The step's summary page: appended to, bounded, all or nothing, and never in the way of a verdict."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
sys.path.insert(0, str(Path(__file__).parents[1] / "report"))

from report_cases import REPORTS, many

from kdtr_cli.report.markdown import report_markdown
from kdtr_cli.workflows import step_summary as module
from kdtr_cli.workflows.step_summary import MAX_BYTES, append_step_summary

pytestmark = pytest.mark.quick

REPORT = REPORTS["diverged"]()
TEXT = report_markdown(REPORT, MAX_BYTES).encode()


@pytest.fixture
def page(tmp_path) -> Path:
    return tmp_path / "summary.md"


@pytest.mark.parametrize(
    ("before", "between"), [(None, b""), (b"", b""), (b"# mine\n", b"\n"), (b"no newline", b"\n\n")]
)
def test_it_is_appended_as_a_block_of_its_own(page, before, between):
    if before is not None:
        page.write_bytes(before)
    assert append_step_summary(page, REPORT) is None
    assert page.read_bytes() == (before or b"") + between + TEXT
    assert append_step_summary(page, REPORT) is None
    assert page.read_bytes() == (before or b"") + between + TEXT + b"\n" + TEXT


def test_the_page_never_grows_beyond_what_github_takes(page):
    report = many(200, wrong=200)
    calls = 0
    while (note := append_step_summary(page, report)) is None:
        calls += 1
    assert calls > 10
    assert MAX_BYTES - 1000 < page.stat().st_size <= MAX_BYTES == 2**20
    assert "no room for a summary" in note
    assert note.count("\n") == 0
    size = page.stat().st_size
    assert append_step_summary(page, report) is not None
    assert page.stat().st_size == size


def test_a_page_that_is_too_large_already_is_left_alone(page):
    page.write_bytes(b"x" * (MAX_BYTES + 5))
    assert "no room" in append_step_summary(page, REPORT)
    assert page.stat().st_size == MAX_BYTES + 5


def test_what_is_no_file_to_append_to_is_one_line(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path / "folder", "Is a directory"),
        (tmp_path / "no" / "where", "No such file or directory"),
        (tmp_path / "pipe", "is not a regular file"),
        (Path("/dev/null"), "is not a regular file"),
        (str(tmp_path / "a\nb" / "c"), "No such file or directory"),
        ("a\0b", "null"),
        (str(tmp_path / ("x" * 300)), "too long"),
    ):
        note = append_step_summary(path, REPORT)
        assert said in note
        assert note.startswith("GITHUB_STEP_SUMMARY '")
        assert "\n" not in note


def test_a_page_without_permission_is_one_line(page, monkeypatch):
    def refuse(path, *rest):  # root may write everywhere
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.os, "open", refuse)
    assert (
        append_step_summary(page, REPORT) == f"GITHUB_STEP_SUMMARY {str(page)!r} can't be written to: Permission denied"
    )


def test_a_disk_that_fills_up_leaves_the_page_as_it_was(page, monkeypatch):
    page.write_bytes(b"# mine\n")
    write = os.write

    def full(fd, data):
        if len(data) > 100:
            return write(fd, data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    assert "No space left on device" in append_step_summary(page, REPORT)
    assert page.read_bytes() == b"# mine\n"

"""Workflow commands, read back as the runner reads them: escapes, caps, the verdict line last."""

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_cases import NASTY, REPORTS, judged, many, pair

from kdtr_cli.errors import Exit
from kdtr_cli.report import github as module
from kdtr_cli.report.github import report_github
from kdtr_cli.report.line import hinted, safe, verdict_line

pytestmark = pytest.mark.quick


def unescape(text: str, *more: tuple[str, str]) -> str:
    """In the runner's order: the percent sign last."""
    for mark, escape in (("\r", "%0D"), ("\n", "%0A"), *more, ("%", "%25")):
        text = text.replace(escape, mark)
    return text


def command(line: str) -> tuple[str, dict[str, str], str] | None:
    """Name, properties and message as a runner takes them from a line of the log; None: it is no command."""
    line = line.lstrip()
    if line.startswith("::") and "::" in line[2:]:
        head, message = line[2:].split("::", 1)
        name, _, properties = head.partition(" ")
        pairs = [part.split("=", 1) for part in properties.split(",") if part]
        return (
            name,
            {k: unescape(v, (":", "%3A"), (",", "%2C")) for k, v in pairs},
            unescape(message),
        )
    found = re.search(r"##\[([^]\s]*)[^]]*\](.*)", line)  # the older form, wherever it stands
    return (found[1], {}, found[2]) if found else None


def read(report):
    text = report_github(report)
    assert text.isascii()
    lines = text.removesuffix("\n").split("\n")
    assert lines[-1] == verdict_line(report)
    assert command(lines[-1]) is None
    commands = [c for line in lines if (c := command(line)) is not None]
    plain = [line for line in lines[:-1] if command(line) is None]
    assert all(set(properties) == {"title"} and message for _, properties, message in commands)
    return commands, plain


@pytest.mark.parametrize("name", REPORTS)
def test_every_finding_is_an_annotation_of_its_level(name):
    report = REPORTS[name]()
    commands, plain = read(report)
    assert plain == []
    if report.findings:
        level = {"error": "error", "warning": "warning", "note": "notice"}
        assert Counter((n, m) for n, _, m in commands) == Counter(
            (level[f.level.value], safe(f.message) + hinted(f)) for f in report.findings
        )
    errors = [c for c in commands if c[0] == "error"]
    assert bool(errors) == (report.exit_code is not Exit.AGREES)


def test_the_title_names_verdict_and_code():
    commands, _ = read(REPORTS["diverged"]())
    assert [(n, p["title"]) for n, p, _ in commands] == [
        ("error", "kdtr diff: DIVERGED [tokens.diverged]"),
        ("error", "kdtr diff: DIVERGED [logits.out_of_tolerance]"),
        ("notice", "kdtr diff: [tokens.not_argmax]"),
    ]


def test_a_tie_that_is_let_pass_is_no_error():
    assert [c[0] for c in read(REPORTS["tie"]())[0]] == ["error"]
    assert [c[0] for c in read(REPORTS["tie warn"]())[0]] == ["warning"]
    assert [c[0] for c in read(REPORTS["tie pass"]())[0]] == ["notice"]


def test_no_id_becomes_a_command_and_every_one_is_read_back():
    commands, _ = read(REPORTS["nasty"]())
    assert {n for n, _, _ in commands} == {"error", "notice"}
    for name, (_, _, message) in zip(NASTY, commands, strict=False):
        assert message.startswith(f"sequence {safe(repr(name))}: tokens part")


def test_a_reason_in_the_last_line_is_no_command_either():
    golden, run = pair(sequences=1)
    golden.one.id = run.one.id = "##[error]x"
    run.one.logits.clear()
    read(judged(golden, run))


def test_a_percent_sign_stays_one():
    golden, run = pair(sequences=1)
    golden.one.id = run.one.id = "100%0A"
    run.one.tokens[1] ^= 1
    assert "::sequence '100%250A'" in report_github(judged(golden, run))
    assert read(judged(golden, run))[0][0][2].startswith("sequence '100%0A': ")


def test_no_field_s_name_becomes_a_property():
    ((name, properties, _),) = read(REPORTS["odd choice"]())[0]
    assert name == "error"
    assert properties["title"].startswith("kdtr diff: INVALID [provenance.choices.x,title=y::z..%")


#: Full of what a command gives a meaning to.
TEXT = st.text(st.sampled_from("%\r\n:,;=]02350AD") | st.characters())


@settings(max_examples=50)
@given(TEXT, TEXT.filter(bool))
def test_a_command_is_read_back_whatever_it_says(title, message):
    line = module._command("error", title, message)
    assert "\n" not in line
    assert "\r" not in line
    assert command(line) == ("error", {"title": title}, message)


def test_ten_of_each_kind_and_how_many_more():
    commands, plain = read(many(40, wrong=13))
    assert Counter(name for name, _, _ in commands) == {"error": 10, "notice": 10}
    assert plain == ["3 more errors, 3 more notices without an annotation (--format json lists all)"]
    commands, plain = read(many(40, wrong=10))
    assert (len(commands), plain) == (20, [])


def test_an_id_without_end_does_not_make_an_annotation_without_end():
    golden, run = pair(sequences=1)
    golden.one.id = run.one.id = "%" * 100_000
    run.one.tokens[1] ^= 1
    commands, _ = read(judged(golden, run))
    assert len(commands) == 2
    assert all(len(message) == 2000 and message.endswith("...") for _, _, message in commands)

"""The Markdown summary, rendered by a real parser: cells hold what they should, nothing is markup by accident."""

import pytest
from markdown_it import MarkdownIt
from report_cases import NASTY, REPORTS, judged, many, pair, sweep

from kdtr_cli.parity import combine as combine_module
from kdtr_cli.report.line import hinted, safe, verdict_line
from kdtr_cli.report.markdown import report_markdown

pytestmark = pytest.mark.quick

NO_LIMIT = 10**9
PARSER = MarkdownIt("commonmark").enable("table")


def plain(inline) -> str:
    """The text of an inline token, which must hold text and emphasis and nothing else."""
    assert {c.type for c in inline.children} <= {"text", "text_special", "strong_open", "strong_close"}, inline.content
    return "".join(c.content for c in inline.children)


def read(text: str):
    """(heading, code line, rows of the table, items, other paragraphs)."""
    assert text.isascii()
    tokens = PARSER.parse(text)
    assert {t.type for t in tokens if t.type.startswith(("html", "fence", "hr"))} <= {"html_block"}
    html = [t.content.strip() for t in tokens if t.type == "html_block"]
    assert [h.split(">")[0] for h in html] in (["<details", "</details"], [])
    (code,) = [t.content for t in tokens if t.type == "code_block"]
    rows, items, others, heading, inside = [], [], [], "", ""
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        if token.type.endswith("_open") and token.type != "paragraph_open":
            inside = token.type
        if token.type in ("table_close", "bullet_list_close", "heading_close"):
            inside = ""
        if token.type != "inline":
            continue
        if inside in ("th_open", "td_open"):
            rows[-1].append(plain(token))
        elif inside == "heading_open":
            heading = plain(token)
        else:
            (items if inside == "list_item_open" else others).append(plain(token))
    return heading, code.removesuffix("\n"), rows, items, others


@pytest.mark.parametrize("name", REPORTS)
def test_verdict_line_sequences_and_findings(name):
    report = REPORTS[name]()
    heading, code, rows, items, _ = read(report_markdown(report, NO_LIMIT))
    assert heading == f"kdtr diff: {verdict_line(report).split()[0]} ({report.verdict.value})"
    assert code == verdict_line(report)
    assert [row[:3] for row in rows[1:]] == [[str(s.index), safe(s.id), s.verdict.value] for s in report.sequences]
    assert all(len(row) == 7 for row in rows)
    assert items == [f"{f.level.value} {safe(f.message)} [{safe(f.code)}]{hinted(f)}" for f in report.findings]


def test_a_row_says_where_and_by_how_much():
    rows = read(report_markdown(REPORTS["missing and extra"](), NO_LIMIT))[2]
    assert rows[2][3:5] == ["0 / 6", "the run lacks it"]
    rows = read(report_markdown(REPORTS["diverged"](), NO_LIMIT))[2]
    assert rows[1][3:] == ["2 / 6", "step 2: golden 9, run 8", "0.344", "0.000e+00"]
    assert rows[2][3:] == ["6 / 6", "", "", "5.000e-01"]


def test_no_id_is_markup():
    rows = read(report_markdown(REPORTS["nasty"](), NO_LIMIT))[2]
    assert [row[1] for row in rows[1:]] == [safe(name) for name in NASTY]


def test_what_differs_is_shown_first_and_the_rest_counted():
    _, _, rows, _, others = read(report_markdown(many(300, wrong=0, extra=2), NO_LIMIT))
    assert len(rows) == 101
    assert "Sequences that are not shown: 200. All together: 300 IDENTICAL" in others
    assert "Sequences that only the run has: 2" in others
    golden, run = pair(sequences=150)
    run.seqs[-1].tokens[3] ^= 1
    rows = read(report_markdown(judged(golden, run), NO_LIMIT))[2]
    assert [row[0] for row in rows[1:]] == [*map(str, range(99)), "149"]


def test_a_sweep_counts_what_its_report_does_not_list(monkeypatch):
    monkeypatch.setattr(combine_module, "MAX_SEQUENCES", 3)
    _, _, rows, _, others = read(report_markdown(sweep(shards=4, size=2, wrong=2), NO_LIMIT))
    assert [row[1] for row in rows[1:]] == ["q0", "q1", "q2"]
    assert "Sequences that are not shown: 5. All together: 4 IDENTICAL, 4 DIVERGED" in others


@pytest.mark.parametrize("limit", [0, 1, 100, 400, 1000, 2000, 5000, 20_000])
def test_it_keeps_to_its_limit_and_says_what_is_left_out(limit):
    report = many(60, wrong=60)
    whole = report_markdown(report, NO_LIMIT)
    text = report_markdown(report, limit)
    assert len(text) <= limit
    assert len(whole) > 10_000
    if limit < 400:
        assert text == ""
        return
    _, code, rows, items, others = read(text)
    assert code == verdict_line(report)
    shown = max(0, len(rows) - 1)
    assert any(f"Sequences that are not shown: {60 - shown}." in other for other in others) == (shown < 60)
    listed = len(items) - (items[-1:] != [] and items[-1].startswith("and "))
    assert (
        listed == len(report.findings)
        or items[-1] == f"and {len(report.findings) - listed} more (--format json lists all)"
    )

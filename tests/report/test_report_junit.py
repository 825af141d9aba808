"""JUnit XML: read by two real parsers, its counts are those of the judgement, and it never looks better than it."""

from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import junitparser
import numpy as np
import pytest
from parity_cases import golden_side, run_side
from report_cases import NASTY, REPORTS, diverged, many, missing_and_extra, sweep, tie

from kdtr_cli.errors import Exit
from kdtr_cli.parity import combine as combine_module
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.junit import report_junit
from kdtr_cli.report.line import verdict_line

pytestmark = pytest.mark.quick


def read(report):
    """The one suite, by junitparser; ElementTree must see the same."""
    text = report_junit(report)
    assert text.isascii()
    assert text.endswith("</testsuites>\n")
    root = ElementTree.fromstring(text)
    xml = junitparser.JUnitXml.fromstring(text.encode())
    (suite,) = xml
    cases = list(suite)
    elements = list(root.iter("testcase"))
    assert [c.name for c in cases] == [e.get("name") for e in elements]
    counts = {
        "tests": len(elements),
        "failures": len(root.findall(".//failure")),
        "errors": len(root.findall(".//error")),
    }
    for holder in (root, root.find("testsuite")):
        assert {key: int(holder.get(key)) for key in counts} == counts
        assert (holder.get("skipped"), holder.get("time")) == ("0", "0")
    assert not root.findall(".//skipped")
    assert root.findtext("testsuite/system-out") == verdict_line(report) + "\n"
    said = (suite.tests, suite.failures, suite.errors)
    suite.update_statistics()  # junitparser counts for itself
    assert said == (suite.tests, suite.failures, suite.errors) == tuple(counts.values())
    return suite


def kinds(suite) -> dict[str, str | None]:
    return {c.name: c.result[0].__class__.__name__ if c.result else None for c in suite}


def properties(suite) -> dict[str, str]:
    return {p.name: p.value for p in suite.properties()}


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_is_green_exactly_where_the_exit_code_is_0(name):
    report = REPORTS[name]()
    suite = read(report)
    assert (suite.failures + suite.errors == 0) == (report.exit_code is Exit.AGREES)
    assert (suite.errors > 0) >= (report.exit_code is Exit.UNJUDGED)
    assert suite.tests > 0
    for case in suite:
        for result in case.result:
            assert result.text.splitlines()[-1] == verdict_line(report)
            assert result.message
            assert result.type in Verdict.__members__


@pytest.mark.parametrize("name", REPORTS)
def test_the_counts_are_the_totals(name):
    report = REPORTS[name]()
    suite, totals = read(report), report.totals
    told = properties(suite)
    assert (told["verdict"], told["exit_code"]) == (report.verdict.value, str(int(report.exit_code)))
    assert {key: int(n) for key, n in told.items() if key.startswith("sequences.")} == {
        f"sequences.{verdict}": n for verdict, n in totals.verdicts.items()
    }
    if not report.sequences:
        assert kinds(suite) == {"the pair": "Failure" if report.exit_code is Exit.DIFFERS else "Error"}
        return
    own = [c for c in suite if c.name != "the pair"]
    assert len(own) == totals.sequences + totals.extra
    found = Counter(r.type for c in own for r in c.result)
    on_tie = {} if report.options.on_tie == "fail" else {"TIE_BREAK"}
    bad = {v: n for v, n in totals.verdicts.items() if v not in {"IDENTICAL", "PASS", *on_tie}}
    assert found - Counter(DIVERGED=totals.extra) == Counter(bad)


def test_a_failure_says_where_by_how_much_and_the_line():
    report = diverged()
    first, second, third = read(report)
    golden = golden_side(sequences=3).one
    top = np.sort(golden.logits["exact"][2])
    (failure,) = first.result
    assert failure.message == (
        f"DIVERGED: first divergence at step 2: golden {golden.tokens[2]}, run {golden.tokens[2] ^ 1}; "
        f"margin {top[-1].astype(float) - top[-2].astype(float):.7g}; max abs logit diff 0.000e+00"
    )
    assert "[tokens.diverged]" in failure.text
    assert "logits out of tolerance, first at step 4, id 4" in second.result[0].message
    assert second.result[0].message.endswith("; max abs logit diff 5.000e-01")
    assert third.result == []


def test_a_failure_shows_the_hint():
    report = REPORTS["trace parts"]()
    (hint,) = {f.hint for f in report.findings if f.code == "trace.parted"}
    assert f"[trace.parted] (hint: {hint})" in report_junit(report)


def test_missing_and_extra_sequences_fail_by_name():
    assert kinds(read(missing_and_extra())) == {"s0": None, "s1": "Failure", "s2": None, "other": "Failure"}


def test_a_tie_is_what_on_tie_says():
    assert list(kinds(read(tie())).values()) == ["Failure", None]
    for let in ("warn", "pass"):
        first, second = read(tie(let))
        assert (first.result, second.result) == ([], [])
        assert "[tokens.tie]" in first.system_out  # not in silence
        assert second.system_out is None


def test_too_little_compared_is_an_error_of_the_sequence():
    assert kinds(read(REPORTS["partial"]())) == {"s0": "Error", "s1": "Error"}


def test_names_are_unique_and_hold_nothing_that_xml_can_not():
    names = [c.name for c in read(REPORTS["nasty"]())]
    assert names[0] == NASTY[0]
    assert names[1] == r"\x1b[31m\x00\ud800\ufffe"
    assert names[2] == r"line\nline\r\ttab"
    golden = golden_side(sequences=4)
    ids = ["\x01", "\\x01", "\\x01 (2)", "\u4e2d\U0001f600"]
    for s, name in zip(golden.seqs, ids, strict=True):
        s.id = name
    assert [c.name for c in read(judge(golden.evidence(), run_side(golden).evidence()))] == [
        "\\x01",
        "\\x01 (2)",
        "\\x01 (2) (2)",
        "\u4e2d\U0001f600",
    ]


def test_every_character_of_the_basic_plane_is_read_again_or_escaped():
    golden = golden_side(sequences=1)
    golden.one.id = "".join(map(chr, range(0x10000)))
    (case,) = read(judge(golden.evidence(), run_side(golden).evidence()))
    kept = [c for c in map(chr, range(0x10000)) if c in case.name]
    assert len(kept) == 0x10000 - 32 - 2048 - 2  # without control characters, surrogates, U+FFFE and U+FFFF


def test_the_class_is_the_same_wherever_the_golden_lies():
    report = diverged()
    for name in ("/home/x/kimi-k2.6.h5", "kimi-k2.6.h5", "../y/kimi-k2.6.h5"):
        suite = read(replace(report, golden=replace(report.golden, name=name)))
        assert {c.classname for c in suite} == {"kdtr.kimi-k2_6.ar"}
    suite = read(replace(report, mode="a.\x00b", golden=replace(report.golden, name="")))
    assert {c.classname for c in suite} == {r"kdtr.golden.a_\x00b"}


def test_ten_thousand_sequences():
    report = many(4, wrong=3, extra=2)
    good = report.sequences[-1]
    more = tuple(replace(good, index=i, id=f"s{i}") for i in range(100, 10_096))
    totals = replace(report.totals, sequences=10_000, verdicts={"IDENTICAL": 9997, "DIVERGED": 3})
    report = replace(report, sequences=report.sequences + more, totals=totals)
    suite = read(report)
    assert (suite.tests, suite.failures, suite.errors) == (10_002, 5, 0)
    assert len(report_junit(report)) < 1_000_000


def test_what_a_sweep_does_not_list_is_counted(monkeypatch):
    monkeypatch.setattr(combine_module, "MAX_SEQUENCES", 3)
    suite = read(sweep(shards=4, size=2, wrong=2))
    assert kinds(suite) == {
        "q0": "Failure",
        "q1": "Failure",
        "q2": "Failure",
        "more sequences: IDENTICAL": None,
        "more sequences: DIVERGED": "Failure",
    }
    assert properties(suite)["sequences"] == "8"
    assert properties(suite)["sequences.DIVERGED"] == "4"
    assert (
        "1 more sequences, not listed: DIVERGED"
        in next(c for c in suite if c.name.endswith("DIVERGED")).result[0].message
    )


def test_extra_sequences_that_no_finding_names_are_counted():
    report = many(2, extra=2)
    suite = read(replace(report, totals=replace(report.totals, extra=7)))
    assert kinds(suite) == {
        "s0": None,
        "s1": None,
        "s2": "Failure",
        "s3": "Failure",
        "5 more sequences that the golden lacks": "Failure",
    }


def test_what_is_wrong_with_the_pair_stands_beside_what_differs():
    found = kinds(read(REPORTS["sweep, mixed and wrong"]()))
    assert found.pop("the pair") == "Error"
    assert list(found.values()) == ["Failure", "Failure", None, None, None]

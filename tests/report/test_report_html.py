"""The report as one HTML page: whole, closed to the outside, and true to the report whatever stands in it."""

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import picture_cases as pictures
import pytest
from report_cases import NASTY, REPORTS, many

from kdtr_cli.parity.drawn import MAX_DRAWN
from kdtr_cli.parity.tolerances import TensorRule
from kdtr_cli.report.headroom import suggestion_lines, used_line
from kdtr_cli.report.html.page import report_html
from kdtr_cli.report.html.parts import MAX_FINDINGS, MAX_LISTED
from kdtr_cli.report.html.payload import MAX_NODES, MAX_TEXTS, bfloat16_codes
from kdtr_cli.report.line import verdict_line
from kdtr_cli.report.visible import visible

pytestmark = pytest.mark.quick

_VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The document's text by element; complains where an element isn't closed as it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, dict]] = []
        self.whole: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        self.attributes.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)
            if tag in self.whole:
                self.whole[tag].append("")

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> without a beginning"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in self.whole:
            self.whole[self.open[-1]][-1] += data
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    @property
    def data(self) -> dict:
        return json.loads(self.whole["script"][0])


def page(report, text_of=None) -> Page:
    return Page(report_html(report, text_of))


def unpack(text, dtype):
    return np.frombuffer(base64.b64decode(text), dtype)


class TestDocument:
    @pytest.mark.parametrize("name", REPORTS)
    def test_every_report_is_a_whole_page_with_its_verdict_and_line(self, name):
        report = REPORTS[name]()
        text = report_html(report)
        made = Page(text)
        assert text.startswith("<!DOCTYPE html>")
        assert text.endswith("</html>\n")
        assert visible(verdict_line(report))[:500] in made.text
        ids = [a["id"] for _, a in made.attributes if "id" in a]
        assert len(ids) == len(set(ids))
        assert {a["href"][1:] for t, a in made.attributes if t == "a"} <= set(ids)
        for _, a in made.attributes:
            assert set(a.get("aria-labelledby", "").split()) <= set(ids)

    def test_the_floor_behind_a_bound_its_use_and_the_suggestion_are_shown(self):
        report = REPORTS["auto and suggested"]()
        text = page(report).text
        assert report.tolerance.origins["atol"].startswith("auto: 8 x the golden's floor")
        for said in (*report.tolerance.origins.values(), used_line(report), *suggestion_lines(report.suggestion)):
            assert " ".join(said.split()) in text
        assert "Suggested" not in page(REPORTS["within"]()).text
        nothing = REPORTS["nothing to suggest"]()
        assert f"nothing: {nothing.suggestion.reason}" in page(nothing).text

    @pytest.mark.parametrize("name", REPORTS)
    def test_nothing_unprintable_stands_in_it(self, name):
        assert all(c.isprintable() or c == "\n" for c in report_html(REPORTS[name]()))

    def test_ids_are_text_and_no_markup(self):
        made = page(REPORTS["nasty"]())
        for name in NASTY:
            assert " ".join(visible(name, 60).split()) in made.text
        assert {t for t, _ in made.attributes} <= {
            *(
                "html",
                "head",
                "meta",
                "title",
                "link",
                "style",
                "body",
                "a",
                "header",
                "p",
                "div",
                "button",
                "h1",
                "h2",
            ),
            *("h3", "span", "b", "bdi", "dl", "dt", "dd", "small", "code", "main", "section", "ul", "ol", "li", "i"),
            *(
                "label",
                "select",
                "option",
                "table",
                "caption",
                "thead",
                "tbody",
                "tr",
                "th",
                "td",
                "noscript",
                "details",
            ),
            *("summary", "footer", "script"),
        }
        assert not [a for _, attrs in made.attributes for a in attrs if a.startswith("on") or a == "style"]

    def test_no_text_ends_the_data(self):
        report = pictures.odd()
        made = page(report, lambda token: "</script><script>alert(1)</script>&lt;\u2028\u202e")
        assert len(made.whole["script"]) == 2
        assert not set("<>&") & set(made.whole["script"][0])
        assert set(made.data["texts"].values()) == {visible("</script><script>alert(1)</script>&lt;", 24)}

    def test_its_policy_allows_its_own_style_and_script_alone(self):
        text = report_html(REPORTS["diverged"]())
        policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])
        made = Page(text)
        for kind, source in (("style", made.whole["style"][0]), ("script", made.whole["script"][1])):
            digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
            assert f"{kind}-src 'sha256-{digest}'" in policy
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy

    def test_it_names_no_other_place(self):
        text = report_html(REPORTS["diverged"]())
        text = re.sub(r'(?s)(<script type="application/json" id="data">).*?</script>', "", text)  # base64 has // in it
        assert re.findall(r"(?:https?:)?//[a-z][\w.]+", text.replace("http://www.w3.org/2000/svg", "")) == []
        assert not re.search(r"@import|url\(|\bfetch\(|XMLHttp|import\(|innerHTML|eval\(", text)

    def test_both_lists_of_a_long_sequence_show_the_first_divergence(self):
        report = pictures.long(forced=False)
        text = report_html(report)
        at = text.index('aria-current="true"')
        d = report.sequences[0].divergence
        assert d.golden_token != d.run_token
        shown = f"<i>1200</i><span>{d.golden_token}</span><span>{d.run_token}</span>"
        assert shown in text[at : at + 100]
        assert "steps 24 to 1187 left out" in text

    def test_tokens_have_their_text(self):
        made = page(pictures.diverged(), lambda token: f"<{token}>")
        assert "383 <383>" in made.text
        assert made.data["texts"]["383"] == "<383>"

    def test_what_is_left_out_is_counted(self):
        report = many(300, wrong=250, extra=2)
        made = page(report)
        assert f"{MAX_LISTED} of 300 sequences are listed; all together: 50 IDENTICAL, 250 DIVERGED." in made.text
        assert f"{MAX_DRAWN} of 300 are shown in full" in made.text
        assert "The run has 2 sequences that the golden lacks." in made.text
        assert f"{len(report.findings) - MAX_FINDINGS} more findings are not listed" in made.text

    def test_the_rules_say_where_they_came_from(self):
        made = page(REPORTS["within"]())
        for rule in ("atol0.01|run − golden| ≤ atol + rtol · |golden|--atol", "|golden|0 beside --atol", "max_kl1KL("):
            assert rule in made.text

    def test_the_rules_of_tensors_too(self):
        report = REPORTS["within"]()
        rule = TensorRule("*.router_<b>", atol=1e-3, max_ulp=4, origin="--rule, command line")
        made = page(replace(report, options=replace(report.options, rules=(rule,))))
        assert "*.router_<b>atol 0.001, max_ulp 4of the tensors of that name--rule, command line" in made.text

    def test_provenance_shows_both_sides_and_what_differs(self):
        golden, run = pictures.pair()
        run.manifest["choices"]["rope_angles"] = "f32"
        text = report_html(pictures.judge(golden.evidence(), run.evidence()))
        row = re.search(r"<tr><td><code>choices\.rope_angles</code>.*?</tr>", text)[0]
        assert "<bdi>f64</bdi>" in row
        assert "<bdi>f32</bdi>" in row
        assert "differs" in row
        assert "differs" not in re.search(r"<tr><td><code>choices\.tie_rule</code>.*?</tr>", text)[0]


class TestData:
    def test_the_curves_are_those_of_the_report(self):
        report = pictures.diverged()
        curves, data = report.sequences[0].logits.curves, page(report).data["sequences"][0]
        for name in ("max_abs", "max_ulp", "kl", "golden_margin", "run_margin"):
            got = unpack(data["curves"][name], "<f4")
            np.testing.assert_array_equal(got, getattr(curves, name).astype(np.float32))
        codes = unpack(data["blocks"]["values"], "<u2").reshape(curves.blocks.shape)
        shown = (codes.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(shown, curves.blocks, rtol=2**-8)
        assert ((shown == 0) == (curves.blocks == 0)).all()
        assert data["blocks"]["size"] == curves.block_size

    def test_colours_have_three_digits_and_keep_what_is_odd(self):
        values = np.array([0, 1e-45, 1.0, 3.14159, np.inf, np.nan, 3.4e38], np.float32)
        back = (bfloat16_codes(values).astype(np.uint32) << 16).view(np.float32)
        assert back[0] == 0
        assert back[1] > 0
        np.testing.assert_allclose(back[2:4], values[2:4], rtol=2**-8)
        assert back[4] == np.inf
        assert np.isnan(back[5])
        assert bfloat16_codes(-values[5:6])[0] == 0x7FC0

    def test_two_thousand_steps_have_a_place_each_and_more_are_grouped(self):
        exact = report_html(pictures.long(2000))
        assert Page(exact).data["sequences"][0]["per"] == 1
        assert len(exact) < 600_000
        report = pictures.grouped()
        data = page(report).data["sequences"][0]
        assert data["per"] == 3
        places = -(-5003 // 3)
        blocks = report.sequences[0].logits.curves.blocks
        assert len(unpack(data["marks"], "u1")) == places
        got = (unpack(data["blocks"]["values"], "<u2").astype(np.uint32) << 16).view(np.float32).reshape(places, -1)
        np.testing.assert_allclose(got[7], blocks[21:24].max(axis=0), rtol=2**-8)
        np.testing.assert_allclose(got[-1], blocks[5001:].max(axis=0), rtol=2**-8)
        assert data["golden"] is None

    def test_the_worst_sequences_come_first_and_the_rest_is_light(self):
        report = pictures.many()
        shown = [s["index"] for s in page(report).data["sequences"]]
        assert shown == [s.index for s in report.sequences if s.verdict.value == "DIVERGED"][:MAX_DRAWN]
        assert sum(s.logits.curves is not None for s in report.sequences) == MAX_DRAWN

    def test_rounds_are_those_of_both_sides(self):
        report = pictures.trees()
        data = page(report).data["sequences"]
        first, second = data[0]["rounds"], data[1]["rounds"]
        arrays = report.sequences[0].rounds
        assert first["golden"]["total"] == len(arrays.golden_arrays["start"])
        np.testing.assert_array_equal(unpack(first["golden"]["tokens"], "<i4"), arrays.golden_arrays["tokens"])
        np.testing.assert_array_equal(unpack(first["run"]["tokens"], "<i4"), arrays.run_arrays["tokens"])
        assert first["difference"]["round"] == 3
        assert second["same"]
        assert second["run"] is None

    def test_many_rounds_are_cut_around_the_difference(self, monkeypatch):
        monkeypatch.setattr("kdtr_cli.report.html.payload.MAX_NODES", 120)
        golden, run = pictures.round_pair(budget=24, block_size=8, sequences=1, steps=200, vocab=512)
        a = pictures.rounds_of(run)
        at = int(a["n_nodes"][:20].sum()) + 4
        a["tokens"][at] = (a["tokens"][at] + 1) % 512
        made = page(pictures.drawn(golden, run)).data["sequences"][0]["rounds"]
        side = made["golden"]
        assert side["from"] <= 20 < side["from"] + len(side["start"]) < side["total"]
        assert sum(side["n_nodes"]) <= 120
        assert len(unpack(side["tokens"], "<i4")) == sum(side["n_nodes"])
        assert len(unpack(side["accepted"], "<i4")) == sum(side["n_accepted"])

    def test_a_sequence_without_rounds_or_curves_has_none(self):
        data = page(REPORTS["tokens alone"]()).data["sequences"][0]
        assert (data["curves"], data["blocks"], data["rounds"], data["trace"]) == (None, None, None, None)

    def test_texts_are_bounded(self):
        made = page(pictures.long(), lambda token: "x" * 1000)
        assert all(len(text) <= 24 for text in made.data["texts"].values())
        assert len(made.data["texts"]) <= MAX_TEXTS < MAX_NODES

    def test_tensors_in_the_order_of_execution(self):
        report = pictures.traced()
        data = page(report).data["sequences"][0]["trace"]
        assert [t["name"] for t in data] == [t.name for t in report.sequences[0].trace.tensors]
        assert [t["name"] for t in data if t["first"]] == ["model.layers.2.self_attn.k_rope"]
        assert "is the first tensor that parts" in page(report).text

    def test_a_report_without_anything_is_a_page(self):
        report = replace(REPORTS["unopened"](), findings=(), reason=None)
        assert page(report).data == {"sequences": [], "texts": {}}

"""The HTML report in headless Chromium: it opens fast, complains of nothing, asks for nothing, can be used by keys, and
fits a narrow screen, in dark and in light."""

from pathlib import Path

import picture_cases as pictures
import pytest
from chromium import PROGRAM, Chromium
from report_cases import REPORTS

from kdtr_cli.parity.curves import curve_block_size
from kdtr_cli.report.html.page import report_html

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium: apt-get install chromium")

#: Seconds, of the two that are allowed, from the call to the last picture.
LIMIT = 2.0

CASES = {
    "24 steps, identical": pictures.identical,
    "24 steps, diverged": pictures.diverged,
    "2000 steps": pictures.long,
    "5003 steps": pictures.grouped,
    "trees": pictures.trees,
    "tensors": pictures.traced,
    "tie": pictures.tie,
    "prompt": pictures.prompt,
    "not finite": pictures.odd,
    "many sequences": pictures.many,
    "partial": pictures.partial,
    "no sequence": REPORTS["nothing"],
    "invalid": REPORTS["other prompt"],
    "nasty": REPORTS["nasty"],
    "a bundle that is broken": REPORTS["unopened"],
    "lengths": REPORTS["lengths"],
    "tokens alone": REPORTS["tokens alone"],
}


@pytest.fixture(scope="module")
def browser():
    one = Chromium()
    yield one
    one.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for name, make in CASES.items():
        (folder / f"{name}.html").write_text(report_html(make(), lambda token: f"</b>\u202e{token}"), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_it_opens_fast_in_dark_and_in_light_and_complains_of_nothing(browser, pages, name):
    took = []
    for dark in (False, True):
        took.append(browser.open(pages / f"{name}.html", dark=dark))
        assert browser.run("document.documentElement.dataset.ready") == "yes"
        browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
        browser.run("new Promise(done => setTimeout(done, 30))")  # what opens draws its table
        assert browser.complaints == []
        assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
        ground = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(20, 23, 27)") is dark
    while min(took) >= LIMIT and len(took) < 5:  # the machine may be busy with other tests
        took.append(browser.open(pages / f"{name}.html"))
    assert min(took) < LIMIT, took


@pytest.mark.parametrize("name", ["24 steps, diverged", "2000 steps", "trees", "tensors", "prompt", "nasty", "lengths"])
def test_a_narrow_screen_never_scrolls_sideways(browser, pages, name):
    browser.open(pages / f"{name}.html", width=360, height=740)
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    browser.run("new Promise(done => setTimeout(done, 30))")
    assert browser.run("document.documentElement.scrollWidth") == 360
    assert browser.complaints == []


def test_the_pictures_show_what_the_report_has(browser, pages):
    browser.open(pages / "24 steps, diverged.html")
    heat = "document.querySelector('#seq-0 [role=application] canvas')"
    counted = browser.run(
        f"(() => {{ const c = {heat}, d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, n = {{}};"
        "for (let i = 0; i < d.length; i += 4) { const k = d[i] + ',' + d[i+1] + ',' + d[i+2]; n[k] = (n[k] || 0) + 1 }"
        "return n })()"
    )
    assert counted["47,26,85"] > 100  # the largest error, one cell
    assert counted["220,235,225"] > 1000  # a step where nothing differs but two blocks
    assert counted["230,227,218"] > 1000  # what was not compared
    titles = browser.run("[...document.querySelectorAll('#seq-0 figcaption')].map(f => f.firstChild.textContent)")
    assert titles == [
        "Step by step",
        "Error by step and block of the vocabulary",
        "Error by step",
        "KL(golden ‖ run) by step, nats",
        "ULP distance by step",
        "Margin by step: largest minus second largest logit",
    ]


def test_nothing_differs_is_said_and_not_drawn(browser, pages):
    browser.open(pages / "24 steps, identical.html")
    assert browser.run("document.querySelector('.flat').textContent") == (
        "0 at every step: largest |run − golden|, KL, ULP distance."
    )
    assert browser.run("document.querySelectorAll('figure').length") == 3


def test_keys_move_over_the_heat_map(browser, pages):
    browser.open(pages / "24 steps, diverged.html")
    for _ in range(60):  # it can be reached by the tabulator alone
        browser.press("Tab", 9)
        if browser.run("document.activeElement.getAttribute('role')") == "application":
            break
    else:
        pytest.fail("the heat map is not in the order of the focus")
    read = "document.querySelector('#seq-0 .readout').textContent"
    assert browser.run(read).startswith("step 17golden 383")
    browser.press("ArrowLeft", 37)
    assert browser.run(read).startswith("step 16")
    browser.press("Home", 36)
    browser.press("w", 87, "w")
    assert browser.run(read).startswith("step 0")
    size = curve_block_size(512)
    assert 128 % size == 0
    assert f"ids 128–{127 + size}: 0.00" in browser.run(read)
    browser.press("ArrowDown", 40)
    assert f"ids {128 + size}–{127 + 2 * size}" in browser.run(read)
    browser.press("End", 35)
    assert browser.run(read).startswith("step 23")
    assert "logits not compared" in browser.run(read)
    browser.press("ArrowRight", 39)
    assert browser.run(read).startswith("step 23")


def test_keys_choose_a_round(browser, pages):
    browser.open(pages / "trees.html")
    browser.run("document.querySelector('[role=listbox]').focus()")
    chosen = "document.querySelector('[role=option][aria-selected=true]').id"
    assert browser.run(chosen) == "seq-0-round-3"  # where they part
    assert browser.run("document.querySelectorAll('#seq-0 .tree').length") == 2
    assert browser.run("document.querySelectorAll('#seq-0 .tree .other').length") == 2
    browser.press("ArrowRight", 39)
    assert browser.run(chosen) == "seq-0-round-4"
    assert browser.run("document.querySelectorAll('#seq-0 .tree').length") == 1
    assert browser.run("document.querySelectorAll('#seq-0 .tree .yes rect').length") >= 1
    assert browser.run("document.activeElement.getAttribute('aria-activedescendant')") == "seq-0-round-4"


def test_another_sequence_is_shown_by_its_link_and_by_the_list(browser, pages):
    browser.open(pages / "24 steps, diverged.html")
    shown = "[...document.querySelectorAll('section.seq')].filter(s => !s.hidden).map(s => s.id).join()"
    assert browser.run(shown) == "seq-0"
    browser.run("document.querySelector('a[href=\"#seq-1\"]').click()")
    browser.run("new Promise(done => setTimeout(done, 50))")
    assert browser.run(shown) == "seq-1"
    browser.run(
        "(() => { const list = document.getElementById('pick'); list.value = 'seq-0';"
        "list.dispatchEvent(new Event('change')) })()"
    )
    assert browser.run(shown) == "seq-0"
    assert browser.complaints == []


def test_the_buttons_win_over_the_system_s_colours(browser, pages):
    browser.open(pages / "24 steps, diverged.html", dark=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.run("document.querySelector('[data-theme-to=light]').click()")
    assert browser.run(ground) == "rgb(246, 245, 241)"
    browser.run("document.querySelector('[data-theme-to=auto]').click()")
    assert browser.run(ground) == "rgb(20, 23, 27)"
    browser.run("document.querySelector('[data-theme-to=dark]').click()")
    assert browser.run("document.querySelector('[data-theme-to=dark]').getAttribute('aria-pressed')") == "true"


def test_without_scripts_all_text_is_there(browser, pages):
    browser.open(pages / "24 steps, diverged.html", scripts=False)
    root = browser.call("DOM.getDocument", depth=0)["root"]["nodeId"]
    text = browser.call("DOM.getOuterHTML", nodeId=root)["outerHTML"]
    assert 'class="seq" id="seq-1" data-seq="1" aria-labelledby="seq-1-h">' in text  # nothing is hidden
    assert "First divergence: step 17" in text


def test_everything_that_takes_the_focus_or_is_drawn_has_a_name(browser, pages):
    for name in ("trees", "tensors", "prompt"):
        browser.open(pages / f"{name}.html")
        browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
        browser.run("new Promise(done => setTimeout(done, 30))")
        nameless = browser.run(
            "[...document.querySelectorAll('[tabindex], [role=img], button, select')].filter(e => !e.closest('pre') &&"
            "!(e.getAttribute('aria-label') || e.textContent.trim())).map(e => e.outerHTML.slice(0, 120))"
        )
        assert nameless == []


def test_a_page_can_be_printed(browser, pages):
    browser.open(pages / "24 steps, diverged.html", dark=True)
    assert len(browser.call("Page.printToPDF", printBackground=True)["data"]) > 10_000


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<script>throw new Error('no')</script>", "no"),
        ("<script>console.error('no')</script>", "no"),
        (
            "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\"><img src='https://x.invalid/a'>",
            "violates",
        ),
    ],
)
def test_these_tests_see_complaints(browser, tmp_path, text, complaint):
    (tmp_path / "bad.html").write_text(f"<!DOCTYPE html>{text}")
    browser.open(tmp_path / "bad.html")
    assert any(complaint in said for said in browser.complaints)

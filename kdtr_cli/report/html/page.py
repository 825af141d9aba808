"""report -> one HTML document. What can be read stands in it as text and tables, for viewers that run no script too;
the script only draws, from the data in the document.

Its policy lets nothing be loaded, sent or run but the one style sheet and the one script, known by their digests.
"""

import base64
import hashlib
import json
from functools import cache
from html import escape
from importlib.resources import files
from string import Template

from kdtr_cli import __version__
from kdtr_cli.parity.drawn import drawn_sequences
from kdtr_cli.parity.results import Report
from kdtr_cli.report.html.parts import esc, findings, header, overview, provenance, tolerance
from kdtr_cli.report.html.payload import TextOf, payload
from kdtr_cli.report.html.sequence import section
from kdtr_cli.report.line import verdict_line

__all__ = ["report_html"]

#: The parts of the one script, in this order.
_SCRIPTS = ("base.js", "plots.js", "trace.js", "rounds.js", "page.js")


def report_html(report: Report, text_of: TextOf | None = None) -> str:
    """The document. `text_of` gives the text of a token id."""
    css, page = _data_file("page.css"), _data_file("page.html")
    js = "\n".join(['"use strict";', *map(_data_file, _SCRIPTS)])
    shown = drawn_sequences(report.sequences)
    body = [
        header(report),
        '<main id="main">',
        findings(report),
        overview(report, shown),
        *(section(result, report.teacher_forced, text_of) for result in shown),
        tolerance(report),
        provenance(report),
        "</main>",
        f"<footer>Made by kdtr {esc(__version__)}. The verdict line: <code>{esc(verdict_line(report))}</code></footer>",
    ]
    policy = (
        f"default-src 'none'; script-src '{_digest(js)}'; style-src '{_digest(css)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(page).substitute(
        verdict=esc(report.verdict.value),
        policy=escape(policy),
        title=f"{esc(report.verdict.value)}: kdtr diff",
        css=css,
        js=js,
        body="\n".join(part for part in body if part),
        data=_script_json(payload(report, shown, text_of)),
    )


@cache
def _data_file(name: str) -> str:
    return files("kdtr_cli.report.html").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _script_json(value: object) -> str:
    """JSON in ASCII that no text in it can end the script element of."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

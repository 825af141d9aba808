"""The parts of the page that are about the whole judgement: verdict, findings, list of sequences, rules, both sides."""

from html import escape

from kdtr_cli.errors import Exit
from kdtr_cli.parity.results import Report, SequenceResult, Side
from kdtr_cli.parity.suggest import Suggestion
from kdtr_cli.parity.verdicts import Finding, Verdict, first_word
from kdtr_cli.report.headroom import suggestion_lines, used_line
from kdtr_cli.report.line import verdict_line
from kdtr_cli.report.meaning import MEANS
from kdtr_cli.report.rest import rest_of
from kdtr_cli.report.visible import visible

__all__ = [
    "esc",
    "findings",
    "header",
    "name",
    "number",
    "overview",
    "provenance",
    "table",
    "tolerance",
    "verdict_tag",
]

MAX_LISTED = 200
MAX_FINDINGS = 200
MAX_TEXT = 600

_GOOD = (Verdict.IDENTICAL, Verdict.PASS)

#: What each side has its own of, so that another value is no news.
_OWN = ("file", "tier", "mode", "arithmetic")
_TONE = {Exit.AGREES: "good", Exit.DIFFERS: "bad"}


def esc(text: object, limit: int | None = MAX_TEXT) -> str:
    """Any text as HTML, in an element or between quotes."""
    return escape(visible(str(text), limit), quote=True)


def name(text: str, limit: int = 80) -> str:
    """A name from a bundle: apart from its surroundings, whatever its direction of writing."""
    return f"<bdi>{esc(text, limit)}</bdi>"


def number(value: float | None, form: str = ".3e") -> str:
    return "–" if value is None else f"{value:{form}}"


def table(head: list[str], rows: list[list[str]], caption: str, numeric: str = "", cls: str = "") -> str:
    """A table of cells that are HTML; `numeric` has an r for each column that stands to the right."""
    right = [numeric[i : i + 1] == "r" for i in range(len(head))]

    def cells(tag: str, row: list[str]) -> str:
        opening = [tag + (' scope="col"' if tag == "th" else "") + (' class="r"' if r else "") for r in right]
        return "".join(f"<{begin}>{cell}</{tag}>" for begin, cell in zip(opening, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="{cls}">'
        f'<caption class="hidden">{escape(caption)}</caption><thead><tr>{cells("th", head)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def header(report: Report) -> str:
    t = report.totals
    tone = _TONE.get(report.exit_code, "unsure")
    sides = [f"{side.kind} <b>{name(side.name, 120)}</b>" for side in (report.golden, report.run) if side is not None]
    facts = [
        ("Tokens equal", f"{t.tokens_equal} <small>of {t.tokens}</small>"),
        (
            "Rows of logits identical",
            f"{t.rows_identical} <small>of {t.rows_compared} compared</small>",
        ),
        ("Largest |run − golden|", number(t.max_abs)),
        ("Largest ULP distance", "–" if t.max_ulp is None else f"{t.max_ulp:,}"),
        ("Largest KL", number(t.max_kl)),
    ]
    if report.rounds == "compared":
        facts.append(("Rounds equal", f"{t.rounds_equal} <small>of {t.rounds_judged}</small>"))
    if t.first_divergence is not None:
        margin = "" if t.margin is None else f" <small>margin {t.margin:.2g}</small>"
        where = f"step {t.first_divergence[1]} <small>of sequence {t.first_divergence[0]}</small>"
        facts.append(("First divergence", where + margin))
    listed = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in facts)
    word = first_word(report.exit_code)
    badge = "" if word == report.verdict.value else f'<span class="word">{word}</span> '
    why = MEANS[report.verdict] if report.reason is None else esc(report.reason)
    return (
        f'<header class="{tone}"><div class="top"><p class="brand">kdtr diff</p>'
        '<div class="theme" role="group" aria-label="Colours" hidden>'
        '<button type="button" data-theme-to="auto" aria-pressed="true">Auto</button>'
        '<button type="button" data-theme-to="light" aria-pressed="false">Light</button>'
        '<button type="button" data-theme-to="dark" aria-pressed="false">Dark</button></div></div>'
        f"<h1>{badge}{report.verdict.value.replace('_', ' ')}</h1>"
        f'<p class="why">{why}</p><p class="sides">{" · ".join(sides)}</p>'
        f'<dl class="facts">{listed}</dl><p class="line"><code>{esc(verdict_line(report))}</code></p></header>'
    )


def findings(report: Report) -> str:
    found = report.findings
    title = '<section aria-labelledby="found"><h2 id="found">Findings'
    if not found:
        return f'{title}</h2><p class="quiet">Nothing to report.</p></section>'
    items = "".join(
        f'<li class="{f.level.value}"><span class="tag">{f.level.value}</span> <bdi>{esc(f.message)}</bdi> '
        f"<code>{esc(f.code, 120)}</code></li>"
        for f in found[:MAX_FINDINGS]
    )
    more = len(found) - MAX_FINDINGS
    rest = f'<p class="quiet">{more} more findings are not listed (--format json lists all).</p>' if more > 0 else ""
    return f'{title} <small>{len(found)}</small></h2><ul class="findings">{items}</ul>{rest}</section>'


def _hint(finding: Finding) -> str:
    return "" if finding.hint is None else f' <span class="tag">hint: {esc(finding.hint, 60)}</span>'


def overview(report: Report, shown: list[SequenceResult]) -> str:
    if not report.sequences:
        return ""
    full = {result.index for result in shown}
    listed = sorted(_listed(report, shown), key=lambda s: s.index)
    rows = [_row(result, result.index in full) for result in listed]
    head = [
        "#",
        "Sequence",
        "Verdict",
        "Tokens",
        "First divergence",
        "Margin",
        "max abs",
        "max ULP",
        "max KL",
        "Rounds",
    ]
    notes = []
    if report.totals.sequences > len(listed):
        counts = ", ".join(f"{n} {esc(verdict)}" for verdict, n in report.totals.verdicts.items())
        notes.append(f"{len(listed)} of {report.totals.sequences} sequences are listed; all together: {counts}.")
    if len(shown) < report.totals.sequences:
        notes.append(f"{len(shown)} of {report.totals.sequences} are shown in full, those that do not agree first.")
    rest = rest_of(report)
    if extra := len(rest.extra) + rest.more_extra:
        notes.append(f"The run has {extra} sequences that the golden lacks.")
    options = "".join(
        f'<option value="seq-{r.index}">{r.index} · {esc(r.id, 60)} · {r.verdict.value}</option>' for r in shown
    )
    picker = f'<label class="picker" hidden>Show sequence <select id="pick">{options}</select></label>'
    return (
        '<section aria-labelledby="all"><div class="between">'
        f'<h2 id="all">Sequences <small>{report.totals.sequences}</small></h2>{picker if len(shown) > 1 else ""}</div>'
        + table(head, rows, "Sequences", "r  r rrrr", "list")
        + "".join(f'<p class="quiet">{note}</p>' for note in notes)
        + "</section>"
    )


def _listed(report: Report, shown: list[SequenceResult]) -> list[SequenceResult]:
    """At most MAX_LISTED sequences, those that are shown in full among them."""
    full = {result.index for result in shown}
    others = [s for s in report.sequences if s.index not in full]
    return [*shown, *sorted(others, key=lambda s: (s.verdict in _GOOD, s.index))[: MAX_LISTED - len(shown)]]


def _row(r: SequenceResult, linked: bool) -> list[str]:
    where = "missing" if r.run_tokens is None else "–" if r.divergence is None else f"step {r.divergence.step}"
    rounds = "–" if r.rounds is None or not r.rounds.compared else f"{r.rounds.equal}/{r.rounds.judged}"
    return [
        str(r.index),
        f'<a href="#seq-{r.index}">{name(r.id)}</a>' if linked else name(r.id),
        verdict_tag(r.verdict),
        f"{r.tokens_equal}/{len(r.golden_tokens)}",
        where,
        "–" if r.divergence is None else number(r.divergence.golden_margin, ".3g"),
        number(r.logits.max_abs),
        "–" if r.logits.max_ulp is None else str(r.logits.max_ulp),
        number(r.logits.max_kl),
        rounds,
    ]


def verdict_tag(verdict: Verdict) -> str:
    tone = "good" if verdict in _GOOD else "bad" if verdict is Verdict.DIVERGED else "unsure"
    return f'<span class="verdict {tone}">{verdict.value}</span>'


def tolerance(report: Report) -> str:
    rows = []
    if report.tolerance is not None:
        rules = {
            "atol": "|run − golden| ≤ atol + rtol · |golden|",
            "rtol": "|run − golden| ≤ atol + rtol · |golden|",
            "max_ulp": "ULP distance in the type that the run stores",
            "max_kl": "KL(golden ‖ run), nats, full vocabulary",
        }
        for key, rule in rules.items():
            value = getattr(report.tolerance, key)
            if value is not None:
                rows.append([f"<code>{key}</code>", f"{value:g}", rule, esc(report.tolerance.origins[key])])
    o = report.options
    for rule in o.rules:
        bounds = {key: value for key in ("atol", "rtol", "max_ulp") if (value := getattr(rule, key)) is not None}
        said = ", ".join(f"{key} {value:g}" for key, value in bounds.items())
        rows.append([f"<code>{esc(rule.tensor, 120)}</code>", said, "of the tensors of that name", esc(rule.origin)])
    for key in ("tolerance", "tolerance_factor", "on_tie", "allow_partial", "allow_loose", "steps", "select"):
        value = getattr(o, key)
        if value is not None:
            shown = ", ".join(value) if isinstance(value, tuple) else {True: "yes", False: "no"}.get(value, value)
            rows.append([f"<code>{key}</code>", esc(shown), "", esc(o.origins.get(key, "default"))])
    used = used_line(report)
    used = "" if used is None else f"<p>Used: {esc(used)}.</p>"
    against = f"the golden's <b>{esc(report.reference)}</b> logits" if report.reference else "no logits: there are none"
    return (
        f'<section aria-labelledby="rules"><h2 id="rules">Rules</h2><p>Compared with {against}.</p>'
        + table(["Rule", "Value", "Means", "From"], rows, "Rules and where each came from", " r")
        + used
        + _suggestion(report.suggestion)
        + "</section>"
    )


def _suggestion(suggestion: Suggestion | None) -> str:
    if suggestion is None:
        return ""
    first, *rules = suggestion_lines(suggestion)
    listed = "".join(f"<li><code>{esc(rule)}</code></li>" for rule in rules)
    return f"<h3>Suggested</h3><p>{esc(first)}</p>" + (f"<ul>{listed}</ul>" if listed else "")


def provenance(report: Report) -> str:
    golden, run = (_pairs(side) for side in (report.golden, report.run))
    if not golden and not run:
        return ""
    rows = []
    for key in dict.fromkeys([*golden, *run]):
        cells = [f"<bdi>{esc(side[key], 200)}</bdi>" if key in side else "–" for side in (golden, run)]
        differs = key not in _OWN and key in golden and key in run and golden[key] != run[key]
        tag = ' <span class="verdict unsure">differs</span>' if differs else ""
        both = '<span class="quiet">the same</span>' if key in run and golden.get(key) == run[key] else cells[1]
        rows.append([f"<code>{esc(key, 120)}</code>{tag}", cells[0], both])
    return (
        '<section aria-labelledby="from"><h2 id="from">Provenance</h2>'
        + table(["", "Golden", "Run"], rows, "Provenance of both sides", cls="prov")
        + "</section>"
    )


def _pairs(side: Side | None) -> dict[str, str]:
    if side is None:
        return {}
    own = dict(zip(_OWN, (side.name, side.tier, side.mode, ", ".join(side.arithmetic)), strict=True))
    return own | dict(side.provenance)

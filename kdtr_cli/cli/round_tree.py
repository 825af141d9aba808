"""One round of a bundle as a tree for the terminal: nodes in the order of their scores, the accepted path marked."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from kdtr_cli.cli.failures import one_line

__all__ = ["render_round"]

# (between a child and its parent, the last child, below a child that has a sibling, below the last)
_LINES = ("├── ", "└── ", "│   ", "    ")
_PLAIN = ("|-- ", "`-- ", "|   ", "    ")


def render_round(out: Console, document: Mapping[str, Any]) -> None:
    """Print a round's facts, then its tree; lines and colours on a terminal, plain ASCII lines elsewhere."""
    nodes = document["nodes"]
    accepted = len(document["accepted"])
    facts = (
        f"round {document['number']} of {document['of']}, sequence {document['sequence']}: "
        f"start={document['start']} nodes={len(nodes) - 1} accepted={accepted} "
        f"bonus={_token(document['bonus'], document['bonus_text'])}"
    )
    out.print(one_line(facts))
    children: dict[int, list[int]] = {}
    for node in nodes[1:]:
        children.setdefault(node["parent"], []).append(node["node"])
    last = document["accepted"][-1]
    lines = _LINES if out.is_terminal and not out.is_dumb_terminal else _PLAIN
    for prefix, index in _walk(children, lines):
        node = nodes[index]
        words = [f"[{index}]", _token(node["token"], node["text"])]
        words.append(f"score={node['score']:.4f}" if index else f"root at {node['position']}")
        if node["accepted"]:
            words.append("accepted")
        if index == last:
            words.append(f"-> bonus {_token(document['bonus'], document['bonus_text'])}")
        label = (one_line(" ".join(words)), "bold green") if node["accepted"] else one_line(" ".join(words))
        out.print(Text.assemble(prefix, label))


def _walk(children: Mapping[int, list[int]], lines: tuple[str, str, str, str]) -> Iterator[tuple[str, int]]:
    """(what stands before it, node) from the root down, each child before its next sibling."""
    fork, corner, bar, gap = lines
    waiting = [("", "", 0)]
    while waiting:
        before, joint, node = waiting.pop()
        yield before + joint, node
        below = before + {"": "", fork: bar, corner: gap}[joint]
        own = children.get(node, [])
        for child in reversed(own):
            waiting.append((below, corner if child == own[-1] else fork, child))


def _token(token: int, text: str | None) -> str:
    return str(token) if text is None else f"{token} {json.dumps(text, ensure_ascii=False)}"

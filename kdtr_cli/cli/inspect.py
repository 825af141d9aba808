"""`kdtr inspect`: what is in a bundle?"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kdtr_cli.cli import console
from kdtr_cli.cli.failures import one_line
from kdtr_cli.cli.round_tree import render_round
from kdtr_cli.errors import InputError
from kdtr_cli.workflows.inspect import describe, describe_sweep, find_shard

__all__ = ["inspect"]


@click.command("inspect")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Text for people, or one JSON document (schema kdtr.inspect/1).",
)
@click.option(
    "--sequence", "sequence_id", metavar="ID", help="Show this sequence's tokens and its 5 largest logits a step."
)
@click.option(
    "--round",
    "round_number",
    type=click.IntRange(min=0),
    metavar="N",
    help="Draw the tree of this round (from 0) of the sequence, by default of the first one.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="With --round: show tokens as text too, by the tokenizer of this folder.",
)
def inspect(
    bundle: Path, output_format: str, sequence_id: str | None, round_number: int | None, tokenizer: Path | None
) -> None:
    """Show what a bundle holds.

    Kind, model, choices, decoding, statistics of rounds and every sequence of BUNDLE; of a sweep's directory what its
    shards share and how many there are. Checks the structure and the
    manifest; of the data only those that are shown (`kdtr verify` checks all).
    """
    if tokenizer is not None and round_number is None:
        raise InputError("--tokenizer needs --round: only there are tokens shown as text")
    if bundle.is_dir():
        if sequence_id is None and round_number is None:
            _show_sweep(describe_sweep(bundle), output_format)
            return
        bundle = find_shard(bundle, sequence_id)
    document = describe(bundle, sequence_id, round_number, tokenizer)
    if output_format == "json":
        click.echo(json.dumps(document, indent=2))
    elif document["round"] is not None:
        render_round(console.results(), document["round"])
    else:
        _render(console.results(), document)


def _show_sweep(document: Mapping[str, Any], output_format: str) -> None:
    if output_format == "json":
        click.echo(json.dumps(document, indent=2))
        return
    manifest, shards = document["manifest"], document["shards"]
    made = [shard for shard in shards if shard["file_bytes"] is not None]
    state = "complete" if document["complete"] else "incomplete: the command that made it goes on where it stopped"
    facts = {
        "sweep": f"{document['path']}: of {document['kind']}s, {document['file_bytes']} bytes",
        "shards": f"{len(made)} of {len(shards)}, {state}",
        "sequences": f"{document['sequences_made']} of {document['sequences']}",
        "model": _pairs(manifest["model"]),
        "choices": _pairs(manifest["choices"]),
        "decoding": _pairs(manifest["decoding"]),
        "arithmetic": f"{', '.join(manifest['arithmetic'])} (tier {manifest['tier']})",
        "logits": manifest["logits"] + (", prompt scored" if manifest.get("score") else ""),
    }
    for name in ("drafting", "run"):
        if manifest.get(name) is not None:
            facts[name] = _pairs(manifest[name])
    out = console.results()
    for name, value in facts.items():
        out.print(f"{name.ljust(max(map(len, facts)))}  {one_line(value)}")


def _arrays(arrays: list[dict[str, Any]]) -> str:
    """All but the tensors of a trace, which are many, and are counted."""
    names = [f"{a['name']} {a['dtype']}{a['shape']}" for a in arrays if not a["name"].startswith("trace/")]
    if traced := len(arrays) - len(names):
        names.append(f"trace: {traced} tensors")
    return ", ".join(names) or "-"


def _render(out: Console, document: Mapping[str, Any]) -> None:
    model = document["model"]
    producer = document["producer"]
    used = _or_unknown(model["weights_used_sha256"])
    about = f"{document['kind']}, {document['bundle_schema']}, {document['file_bytes']} bytes"
    facts = {
        "bundle": f"{document['path']}: {about}",
        "manifest": f"sha256 {document['manifest_sha256']}",
        "producer": f"{producer['name']} {producer['version']}, numerics contract {document['contract_version']}",
        "config": _pairs(model["config"]),
        "config sha256": model["config_sha256"],
        "weights": f"{model['tensors']} tensors, {model['embedded']} embedded, as used sha256 {used}",
        "rotary table": f"sha256 {_or_unknown(model['rope_table_sha256'])}",
        "choices": _pairs(document["choices"]),
        "decoding": _pairs(document["decoding"]),
        "arithmetic": f"{', '.join(document['arithmetic'])} (tier {document['tier']})",
        "logits": document["logits"]
        + (", prompt scored" if document["score"] else "")
        + (", log-probabilities" if document["values"] == "logprobs" else ""),
    }
    for name, floor in (document["noise_floor"] or {}).items():
        facts[f"noise {name}"] = _pairs(floor)
    if document["drafting"] is not None:
        facts["drafting"] = _pairs(document["drafting"])
    if document["rounds"] is not None:
        facts["rounds"] = _statistics(document["rounds"])
    if document["run"] is not None:
        facts["run"] = _pairs(document["run"])
    width = max(map(len, facts))
    for name, value in facts.items():
        out.print(f"{name.ljust(width)}  {one_line(value)}")
    out.print()
    console.print_table(
        out,
        ["id", "stream", "prompt", "tokens", "finish", "arrays"],
        [
            [
                one_line(row["id"]),
                row["stream"],
                row["prompt_length"],
                row["n_tokens"],
                row["finish_reason"],
                _arrays(row["arrays"]),
            ]
            for row in document["sequences"]
        ],
        right=" rrr  ",
    )
    if document["sequence"] is not None:
        _render_sequence(out, document["sequence"])


def _render_sequence(out: Console, detail: Mapping[str, Any]) -> None:
    out.print()
    out.print(f"sequence  {one_line(detail['id'])}")
    out.print(f"prompt    {_ids(detail['prompt'])}")
    out.print(f"tokens    {_ids(detail['tokens'])}  (ended by {detail['finish_reason']})")
    if detail["ties"]:
        out.print(f"ties      float64 would choose another token at steps {_ids(detail['ties'])}")
    for arithmetic, steps in detail["top_logits"].items():
        out.print()
        out.print(f"largest logits, {arithmetic}")
        rows = []
        for step, (token, top) in enumerate(zip(detail["tokens"], steps, strict=True)):
            rows.append([step, token, "  ".join(f"{entry['id']}:{entry['logit']}" for entry in top)])
        console.print_table(out, ["step", "token", "id:logit"], rows, right="rr ")


def _statistics(rounds: Mapping[str, Any]) -> str:
    lengths = " ".join(f"{length}:{count}" for length, count in rounds["histogram"].items()) or "-"
    return (
        f"rounds={rounds['rounds']} tau={rounds['tau']:.3f} forward_passes={rounds['forward_passes']} "
        f"nodes={rounds['nodes']} accepted {lengths}"
    )


def _ids(ids: list[int]) -> str:
    return " ".join(map(str, ids)) or "-"


def _pairs(entries: Mapping[str, Any]) -> str:
    shown = (f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in entries.items())
    return " ".join(shown) or "-"


def _or_unknown(digest: str | None) -> str:
    return "unknown" if digest is None else digest

"""What a bundle holds, as one document that a command prints as text or JSON (schema kdtr.inspect/1)."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.bundle.reader import Bundle, BundleSequence, open_bundle
from kdtr_cli.bundle.schema import SCHEMA
from kdtr_cli.bundle.sweep import check_shard, read_sweep
from kdtr_cli.errors import InputError
from kdtr_cli.workflows.rounds import describe_round, describe_rounds
from kdtr_cli.workflows.sweep import finished_shards

__all__ = ["CONFIG_FIELDS", "describe", "describe_sweep", "find_sequence", "find_shard", "largest"]

#: The sizes that `inspect` shows, in this order, where the config has them.
CONFIG_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
    "scoring_func",
    "topk_method",
    "max_position_embeddings",
    "rope_theta",
    "torch_dtype",
    "dtype",
)

_TOP = 5


def describe(
    path: str | Path,
    sequence_id: str | None = None,
    round_number: int | None = None,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """The document for one bundle; with `sequence_id` also that sequence's tokens and largest logits at each step.

    Keys: schema, path, bundle_schema, kind, manifest_sha256, file_bytes, producer, contract_version, model, choices,
    decoding, drafting and rounds (statistics; both None without rounds), arithmetic, tier, logits, score, values,
    noise_floor (None where none was measured), run (None in a golden), sequences, sequence (None unless asked for),
    round (None unless asked for: that round of the sequence, by default the first one, instead of its logits; with
    texts where the folder of a tokenizer is given).
    JSON-ready: non-finite numbers are the strings "nan", "inf" and "-inf". InputError: as `open_bundle`; no such
    sequence or round, or rounds that are none.
    """
    with open_bundle(path) as bundle:
        manifest = bundle.manifest
        chosen = None if sequence_id is None else find_sequence(bundle, sequence_id)
        shown = None
        if round_number is not None:
            if chosen is None and not len(bundle.sequences):
                raise InputError(f"{bundle.path}: it has no sequence, and so no rounds")
            shown = describe_round(bundle, chosen or bundle.sequences[0], round_number, tokenizer)
            chosen = None
        return {
            "schema": "kdtr.inspect/1",
            "path": str(path),
            "bundle_schema": SCHEMA,
            "kind": bundle.kind,
            "manifest_sha256": bundle.manifest_sha256,
            "file_bytes": bundle.file_bytes,
            "producer": manifest["producer"],
            "contract_version": manifest["contract_version"],
            "model": _model(bundle),
            "choices": manifest["choices"],
            "decoding": manifest["decoding"],
            "drafting": manifest.get("drafting"),
            "rounds": describe_rounds(bundle),
            "arithmetic": manifest["arithmetic"],
            "tier": manifest["tier"],
            "logits": manifest["logits"],
            "score": manifest.get("score", False),
            "values": manifest.get("values", "logits"),
            "noise_floor": manifest.get("noise_floor"),
            "run": manifest.get("run"),
            "sequences": [_row(sequence) for sequence in bundle.sequences],
            "sequence": None if chosen is None else _detail(chosen),
            "round": shown,
        }


def describe_sweep(folder: str | Path) -> dict[str, Any]:
    """The document for a sweep: what its shards have in common, and which of them are there (kdtr.inspect-sweep/1).

    Reads manifests alone. InputError: no sweep, or a shard that is damaged or another.
    """
    folder = Path(folder)
    sweep = read_sweep(folder)
    shards = []
    for shard in sweep.shards:
        there = check_shard(folder, sweep, shard) is not None
        size = (folder / shard.name).stat().st_size if there else None
        shards.append({"name": shard.name, "first": shard.first, "count": shard.count, "file_bytes": size})
    made = [shard for shard in shards if shard["file_bytes"] is not None]
    return {
        "schema": "kdtr.inspect-sweep/1",
        "path": str(folder),
        "kind": sweep.kind,
        "complete": len(made) == len(shards),
        "sequences": sweep.sequences,
        "sequences_made": sum(shard["count"] for shard in made),
        "file_bytes": sum(shard["file_bytes"] for shard in made),
        "manifest": {key: value for key, value in sweep.manifest.items() if key != "model"}
        | {"model": {key: value for key, value in sweep.manifest["model"].items() if key != "weights"}},
        "shards": shards,
    }


def find_shard(folder: str | Path, sequence_id: str | None) -> Path:
    """The shard that holds the sequence of that id, the first one for None. InputError: none does."""
    folder = Path(folder)
    sweep = read_sweep(folder)
    for shard, manifest in finished_shards(folder, sweep):
        if sequence_id is None or any(entry["id"] == sequence_id for entry in manifest["sequences"]):
            return folder / shard.name
    raise InputError(f"{folder}: no sequence {sequence_id!r} in any of its {len(sweep.shards)} shards")


def find_sequence(bundle: Bundle, sequence_id: str) -> BundleSequence:
    """The sequence of that id; InputError, naming some that there are, where there is none."""
    ids = [entry["id"] for entry in bundle.manifest["sequences"]]
    if sequence_id in ids:
        return bundle.sequences[ids.index(sequence_id)]
    some = ", ".join(repr(one) for one in ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
    raise InputError(f"{bundle.path}: no sequence {sequence_id!r}; it has {some}")


def largest(rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` largest values of each row: (ids int32 [n, count], values [n, count]), for float [n, V].

    Larger values first, then smaller ids (rule 6 of the numerics contract). NaN comes before all: whoever looks at a
    row that has one wants to see it.
    """
    count = min(count, rows.shape[1])
    ids = np.empty((rows.shape[0], count), dtype=np.int32)
    for at, row in enumerate(rows):
        key = np.where(np.isnan(row), np.inf, row)
        # everything not below the count-th largest, so that equal values at the border are ordered by id too
        border = np.partition(key, row.size - count)[row.size - count]
        found = np.flatnonzero(key >= border)
        ids[at] = found[np.lexsort((found, -key[found], ~np.isnan(row[found])))][:count]
    return ids, np.take_along_axis(rows, ids, axis=1)


def _model(bundle: Bundle) -> dict[str, Any]:
    stated = bundle.manifest["model"]
    config = json.loads(bundle.config_text)
    nested = config.get("text_config")
    fields = {**config, **nested} if isinstance(nested, dict) else config
    plain = (str, int, float, bool, type(None))
    return {
        "config": {
            key: _finite(fields[key]) for key in CONFIG_FIELDS if key in fields and isinstance(fields[key], plain)
        },
        "config_sha256": stated["config_sha256"],
        "weights_used_sha256": stated.get("weights_used_sha256"),
        "rope_table_sha256": stated.get("rope_table_sha256"),
        "tensors": len(stated.get("weights") or {}),
        "embedded": len(bundle.weight_names()),
    }


def _row(sequence: BundleSequence) -> dict[str, Any]:
    return {
        "id": sequence.id,
        "stream": sequence.stream,
        "prompt_length": sequence.shape("prompt")[0],
        "n_tokens": sequence.shape("tokens")[0],
        "finish_reason": sequence.finish_reason,
        "arrays": [
            {"name": name, "dtype": sequence.dtype(name).name, "shape": list(sequence.shape(name))}
            for name in sequence.array_names()
        ],
    }


def _detail(sequence: BundleSequence) -> dict[str, Any]:
    names = sequence.array_names()
    detail: dict[str, Any] = {
        "id": sequence.id,
        "prompt": sequence.prompt.tolist(),
        "tokens": sequence.tokens.tolist(),
        "finish_reason": sequence.finish_reason,
        "ties": sequence.array("ties").tolist() if "ties" in names else [],
        "top_logits": {},
    }
    for name in names:
        group, _, base = name.partition("/")
        if group != "logits" or base.endswith(("_sha256", "_top_values", "_top_counts")):
            continue
        arithmetic = base.removesuffix("_top_ids")
        detail["top_logits"][arithmetic] = _top(sequence, name)
    return detail


def _top(sequence: BundleSequence, name: str) -> list[list[dict[str, Any]]]:
    """For each step the largest logits as {"id", "logit"}, from full logits or from those that were kept."""
    steps: list[list[dict[str, Any]]] = []
    if name.endswith("_top_ids"):
        ids, values = sequence.array(name), sequence.array(name.removesuffix("_top_ids") + "_top_values")
        counts = np.full(len(ids), ids.shape[1])
        if (path := name.removesuffix("_top_ids") + "_top_counts") in sequence.array_names():
            counts = sequence.array(path)
        nothing = np.arange(ids.shape[1]) >= counts[:, None]
        order = np.lexsort((ids, -values, nothing))[:, :_TOP]
        pairs = [(np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1))]
    else:
        counts = np.full(sequence.shape(name)[0], _TOP)
        pairs = [largest(block, _TOP) for _, block in sequence.blocks(name)]
    for ids, values in pairs:
        for step_ids, step_values in zip(ids.tolist(), values, strict=True):
            some = list(zip(step_ids, step_values, strict=True))[: int(counts[len(steps)])]
            steps.append([{"id": i, "logit": _number(v)} for i, v in some])
    return steps


def _finite(value: object) -> object:
    # Python's JSON accepts NaN in a config, but nobody else would accept it in ours
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: np.floating) -> float | str:
    """A number of the shortest digits that give the value back in its own dtype; a string if it is not finite."""
    return float(str(value)) if math.isfinite(value) else str(float(value))

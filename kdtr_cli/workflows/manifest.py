"""What a golden and a run say about themselves: the manifest entries that both share, built in one place."""

import hashlib
import re
from typing import Any

import numpy as np

from kdtr_cli import __version__
from kdtr_cli.errors import InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Decoding
from kdtr_cli.model.rope import rope_table, rope_table_sha256
from kdtr_cli.model.source import Model
from kdtr_cli.reference.arith import CONTRACT_VERSION, order

__all__ = ["common_manifest", "decoding_manifest", "logits_arrays", "parse_logits"]


def common_manifest(
    model: Model,
    choices: Choices,
    decoding: Decoding,
    *,
    positions: int,
    teacher_forced: bool,
    arithmetic: list[str],
    logits: str,
    score: bool,
    embedded: bool,
) -> dict[str, Any]:
    """Manifest of a bundle, without the datasets (the writer adds them) and without ``run``.

    The rotary tables' digest covers ``positions`` positions, which the manifest records, so that a run can be compared.
    """
    cos, sin = rope_table(model.config, positions, choices.rope_angles)
    digests = model.weights.digests()
    return {
        "producer": {"name": "kdtr", "version": __version__},
        "contract_version": CONTRACT_VERSION,
        "model": {
            "name": model.name,
            "config_sha256": hashlib.sha256(model.config_text.encode()).hexdigest(),
            "weights": digests.stored,
            "weights_used_sha256": digests.used,
            "rope_table_sha256": rope_table_sha256(cos, sin),
            "rope_positions": positions,
            "embedded": embedded,
        },
        "choices": {
            "latent_norm_eps": choices.latent_norm_eps,
            "rope_angles": choices.rope_angles,
            "tie_rule": "smallest-index",
        },
        "decoding": decoding_manifest(decoding, teacher_forced),
        "arithmetic": arithmetic,
        "tier": "exact",
        "logits": logits,
        "score": score,
    }


def decoding_manifest(decoding: Decoding, teacher_forced: bool) -> dict[str, Any]:
    """How tokens were chosen, one at a time."""
    return {
        "mode": "ar",
        "temperature": decoding.temperature,
        "seed": decoding.seed,
        "steps": decoding.steps,
        "ignore_eos": decoding.ignore_eos,
        "stop_ids": list(decoding.stop_ids),
        "teacher_forced": teacher_forced,
    }


def parse_logits(text: str, vocab_size: int) -> str:
    """Check ``full``, ``top:K`` or ``digest`` against the vocabulary; returns it in its one spelling."""
    if text in ("full", "digest"):
        return text
    top = re.fullmatch(r"top:([0-9]{1,9})", text)
    if top is None or not 1 <= int(top[1]) <= vocab_size:
        raise InputError(f"--logits {text}: full, digest, or top:K with K from 1 to the vocabulary's {vocab_size}")
    return f"top:{int(top[1])}"


def logits_arrays(group: str, arithmetic: str, logits: np.ndarray, form: str) -> dict[str, np.ndarray]:
    """The arrays that keep logits [T, V] under ``group``/``arithmetic`` in a form: all, the top K by rule 6, digests.

    A row's digest is the SHA-256 of its little-endian bytes; it stands beside the top K too.
    """
    path = f"{group}/{arithmetic}"
    if form == "full":
        return {path: logits}
    rows = np.ascontiguousarray(logits, logits.dtype.newbyteorder("<"))
    digests = [np.frombuffer(hashlib.sha256(row.data).digest(), np.uint8) for row in rows]
    out = {f"{path}_sha256": np.stack(digests)}
    if form != "digest":
        ids = order(logits, int(form.removeprefix("top:")))
        out |= {f"{path}_top_ids": ids, f"{path}_top_values": np.take_along_axis(logits, ids, -1)}
    return out

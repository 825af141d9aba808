"""Small bundles to read, damage and forge."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr_cli.bundle import BundleWriter, SequenceData

ZERO = "0" * 64


def make_manifest(**changes: Any) -> dict[str, Any]:
    """A manifest with everything that is required; `changes` replace top-level entries."""
    return {
        "producer": {"name": "kdtr", "version": "0.1.0"},
        "contract_version": 1,
        "model": {
            "config_sha256": ZERO,
            "weights": {"model.norm.weight": ZERO},
            "weights_used_sha256": ZERO,
            "rope_table_sha256": ZERO,
            "embedded": True,
        },
        "choices": {"latent_norm_eps": "hf", "rope_angles": "f64", "tie_rule": "smallest-index"},
        "decoding": {
            "mode": "ar",
            "temperature": 0.0,
            "seed": 0,
            "steps": 3,
            "ignore_eos": False,
            "stop_ids": [1],
            "teacher_forced": False,
        },
        "arithmetic": ["exact", "float64"],
        "tier": "exact",
        "logits": "full",
        "score": False,
        **changes,
    }


def make_sequences(n_sequences: int = 2, n_tokens: int = 3, vocab: int = 37) -> list[SequenceData]:
    """Sequences with logits, ties and a trace; always the same."""
    rng = np.random.default_rng(7)
    return [
        SequenceData(
            id=f"séq {index}",
            stream=index,
            prompt=np.arange(1 + index, 6 + index, dtype=np.int32),
            tokens=rng.integers(0, vocab, n_tokens).astype(np.int32),
            finish_reason=("length", "stop")[index % 2],
            arrays={
                "logits/exact": rng.standard_normal((n_tokens, vocab)).astype(np.float32),
                "logits/float64": rng.standard_normal((n_tokens, vocab)),
                "ties": np.array([1], dtype=np.int32),
                "trace/embed": np.full((4 + n_tokens, 2), 3.5, np.float32),
            },
        )
        for index in range(n_sequences)
    ]


def make_bundle(path: Path, kind: str = "golden", sequences: list[SequenceData] | None = None) -> Path:
    """Write a small bundle, over whatever is there."""
    with BundleWriter(path, kind, force=True) as writer:
        writer.add_config(json.dumps({"vocab_size": 37}))
        writer.add_weight("model.norm.weight", np.linspace(-2, 2, 9).astype(ml_dtypes.bfloat16))
        for sequence in make_sequences() if sequences is None else sequences:
            writer.add_sequence(sequence)
        writer.finish(make_manifest())
    return path


@pytest.fixture
def make() -> SimpleNamespace:
    """The functions of this file, as `make.bundle`, `make.manifest`, `make.sequences`."""
    return SimpleNamespace(bundle=make_bundle, manifest=make_manifest, sequences=make_sequences)


@pytest.fixture
def bundle_path(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "golden.h5")


@pytest.fixture
def leftovers() -> Callable[[Path], list[str]]:
    """The names in a folder."""
    return lambda folder: sorted(path.name for path in folder.iterdir())

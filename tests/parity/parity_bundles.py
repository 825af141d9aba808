"""The cases of parity_cases.py as bundles on disk."""

import json
from pathlib import Path

import numpy as np
from parity_cases import Side

from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.writer import BundleWriter
from kdtr_cli.parity.evidence import logits_of


def write_bundle(side: Side, path: Path) -> str:
    """Write a side as a bundle; returns its manifest's digest."""
    with BundleWriter(path, side.kind, force=True) as writer:
        writer.add_config(json.dumps({"vocab_size": side.vocab, "max_position_embeddings": 4096}))
        for s in side.seqs:
            arrays = dict(s.rounds)
            for group, held in (("logits", s.logits), ("prompt_logits", s.prompt_logits)):
                for name, values in held.items():
                    arrays |= reduced(f"{group}/{name}", values, s.form)
            if s.ties:
                arrays["ties"] = np.array(s.ties, np.int32)
            writer.add_sequence(SequenceData(s.id, s.stream, s.prompt, s.tokens, s.finish, arrays))
        return writer.finish(side.manifest)


def reduced(path: str, values: np.ndarray, form: str) -> dict[str, np.ndarray]:
    logits = logits_of(values, form)
    if form == "full":
        return {path: values}
    arrays = {f"{path}_sha256": logits.row_sha256(0, len(values))}
    if form != "digest":
        arrays[f"{path}_top_ids"] = logits.top_ids(0, len(values))
        arrays[f"{path}_top_values"] = logits.top_values(0, len(values))
    return arrays


def write_pair(golden: Side, run: Side, folder: Path) -> tuple[Path, Path]:
    """Both bundles; the run records the golden it was made from."""
    run.manifest["run"]["golden_manifest_sha256"] = write_bundle(golden, folder / "g.h5")
    write_bundle(run, folder / "r.h5")
    return folder / "g.h5", folder / "r.h5"

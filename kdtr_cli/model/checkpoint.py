"""A Hugging Face checkpoint: one safetensors file or many, with or without an index, under the model's own names.

Opening reads headers only; a tensor's bytes are read when asked for. Every tensor that the config calls for must be
there, once, in its shape, and nothing may be left over; what is skipped (rotary buffers, layers for multi-token
prediction, the vision half of Kimi-K2.5) is said in ``notes``. Pickled checkpoints (.bin, .pt) are never opened.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.model.config import ModelConfig, load_config
from kdtr_cli.model.fields import Fields, named, read_json, shown
from kdtr_cli.model.safetensors_file import DTYPES, MAX_ITEMS, Region, SafetensorsFile, is_name
from kdtr_cli.model.tensors import StoredTensor, each_stored, expected_tensors

__all__ = ["Checkpoint", "expected_tensors", "open_checkpoint", "to_float32"]

INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_FUSED = re.compile(r"(model\.layers\.[0-9]+\.mlp\.experts)\.(gate_up_proj|down_proj)")
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.")
_EXTRA_LAYERS = 8  # beyond num_hidden_layers, that get a note each
_VISION = ("vision_tower.", "mm_projector.", "multi_modal_projector.")

Found = dict[str, tuple[SafetensorsFile, Region]]


def to_float32(stored: np.ndarray) -> np.ndarray:
    """The float32 values of a bf16, fp16 or fp32 array, exactly (numerics.md rule 7); C-contiguous."""
    if stored.dtype == DTYPES["BF16"]:
        bits = np.ascontiguousarray(stored).view(np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return np.ascontiguousarray(stored, dtype=np.float32)


class Checkpoint:
    """Stored tensors by Hugging Face name without the config's tensor_prefix, one per expert also where experts are
    fused; of a quantised weight its parts, as tensors.stored_tensors names them.

    ``notes`` are lines about what the folder holds and kdtr does not read. A name that is not there is a KeyError.
    """

    def __init__(self, found: Found, notes: list[str]) -> None:
        self._found = found
        self.notes = notes

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._found)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape; a projection is [out, in]."""
        return self._found[name][1].shape

    def dtype(self, name: str) -> str:
        """'F32', 'F16' or 'BF16'; of quantised parts also 'I32', 'I64' and 'F8_E4M3'."""
        return self._found[name][1].dtype

    def nbytes(self, name: str) -> int:
        """Bytes as stored."""
        return self._found[name][1].length

    def stored(self, name: str) -> np.ndarray:
        """The values in their stored dtype (STORED_DTYPES says which array dtype that is), read now; read-only."""
        file, region = self._found[name]
        return file.array(name, region)

    def stored_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows first … last - 1 of ``stored(name)``, nothing else read."""
        file, region = self._found[name]
        row = region.length // region.shape[0]
        part = Region(region.start + first * row, (last - first) * row, region.dtype, (last - first, *region.shape[1:]))
        return file.array(name, part)

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor that is not quantised, as used: float32, exactly those stored, C-contiguous."""
        return to_float32(self.stored(name))

    def read_bytes(self, name: str) -> bytes:
        """The bytes as stored: little endian, row after row."""
        return b"".join(self._blocks(name))

    def sha256(self, name: str) -> str:
        """SHA-256 of read_bytes, without holding them."""
        digest = hashlib.sha256()
        for block in self._blocks(name):
            digest.update(block)
        return digest.hexdigest()

    def _blocks(self, name: str) -> Iterator[memoryview]:
        file, region = self._found[name]
        return file.blocks(name, region)


def open_checkpoint(folder: Path | str, config: ModelConfig | None = None) -> Checkpoint:
    """Open the safetensors files of a folder and check them against its config (read from the folder when not given).

    InputError, always one line: no such files, pickles only, a damaged file, a shard missing or outside the folder, a
    tensor twice, missing, left over, of another shape or of a dtype that kdtr does not compute with.
    """
    folder = Path(folder)
    if config is None:
        config, _ = load_config(folder)
    notes: list[str] = []
    raw: Found = {}
    for file in _open_files(folder, notes):
        for name, region in file.regions.items():
            if name in raw:
                raise InputError(f"{folder}: tensor {name} is in both {raw[name][0].path.name} and {file.path.name}")
            raw[name] = file, region
    found = _named(raw, config, folder, notes)
    _check(found, config, folder)
    return Checkpoint(found, notes)


def _open_files(folder: Path, notes: list[str]) -> list[SafetensorsFile]:
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    index = folder / INDEX
    if not os.path.lexists(index):
        if present:
            return [SafetensorsFile(folder / name) for name in present]
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        if pickled:
            raise InputError(
                f"{folder}: only pickled weights ({pickled[0]}), which kdtr never opens; convert to safetensors"
            )
        raise InputError(f"{folder}: no *.safetensors file; kdtr reads a Hugging Face folder of safetensors")
    fields = Fields(read_json(index, limit=256 << 20, items=MAX_ITEMS)[0], index)
    mapping = fields.table("weight_map") or {}
    if not mapping:
        raise InputError(f"{index}: weight_map is missing or empty")
    for name, shard in mapping.items():
        if not is_name(name):
            raise InputError(f"{index}: {shown(name)} is no name for a tensor")
        if not _is_shard(shard):
            raise InputError(
                f"{index}: tensor {name} is said to be in {shown(shard)}; needed: a *.safetensors file beside it"
            )
        if shard not in present:
            raise InputError(f"{folder}: shard {shard} is missing; {INDEX} says that it holds {name}")
    shards = sorted(set(mapping.values()))
    ignored = [name for name in present if name not in shards]
    if "model.safetensors" in ignored:
        raise InputError(f"{folder}: holds model.safetensors and an index of other files; remove one of them")
    if ignored:
        more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
        notes.append(f"not read, because the index does not name it: {', '.join(map(named, ignored[:3]))}{more}")
    files = [SafetensorsFile(folder / name) for name in shards]
    for file in files:
        for name in file.regions:
            if name not in mapping:
                raise InputError(f"{file.path}: holds tensor {name}, which {INDEX} does not name")
    held = {file.path.name: file.regions for file in files}
    for name, shard in mapping.items():
        if name not in held[shard]:
            raise InputError(f"{index}: says that tensor {name} is in {shard}, which does not hold it")
    return files


def _is_shard(shard: object) -> bool:
    """A file in the folder itself: no path leads out of it by an index."""
    name = isinstance(shard, str) and is_name(shard) and Path(shard).name == shard
    return name and shard.endswith(".safetensors") and "\\" not in shard


def _named(raw: Found, config: ModelConfig, folder: Path, notes: list[str]) -> Found:
    """Prefix taken off, fused experts cut up, what is not the model's skipped with a note."""
    found: Found = {}
    skipped: dict[str, int] = {}
    for full, (file, region) in raw.items():
        reason = _reason_to_skip(full, config)
        if reason:
            skipped[reason] = skipped.get(reason, 0) + 1
            continue
        if not full.startswith(config.tensor_prefix):
            raise InputError(
                f"{file.path}: tensor {full} has no place in this model ({config.tensor_prefix}… is expected)"
            )
        name = full.removeprefix(config.tensor_prefix)
        fused = _FUSED.fullmatch(name)
        parts = _cut(name, fused[1], fused[2], region, config, file) if fused else {name: region}
        for part, place in parts.items():
            if part in found:
                raise InputError(f"{folder}: tensor {part} is there twice, by itself and fused; keep one form")
            found[part] = file, place
    notes.extend(f"{count} tensor{'s' if count > 1 else ''} skipped: {why}" for why, count in sorted(skipped.items()))
    return found


def _reason_to_skip(full: str, config: ModelConfig) -> str | None:
    if config.tensor_prefix and full.startswith(_VISION):
        return "the vision tower"
    name = full.removeprefix(config.tensor_prefix)
    layer = _LAYER.match(name)
    if layer and int(layer[1]) >= config.num_hidden_layers:
        near = int(layer[1]) < config.num_hidden_layers + _EXTRA_LAYERS
        which = f"layer {int(layer[1])}" if near else "layers further up"
        return f"{which}, beyond num_hidden_layers (multi-token prediction)"
    if name.endswith(".rotary_emb.inv_freq"):
        return "rotary frequencies, which kdtr computes itself"
    return None


def _cut(
    name: str, experts: str, kind: str, region: Region, config: ModelConfig, file: SafetensorsFile
) -> dict[str, Region]:
    """The experts of one fused tensor: gate_up_proj is [E, 2·I, H], gate's rows first; down_proj is [E, H, I]."""
    count, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    shape = (count, 2 * width, hidden) if kind == "gate_up_proj" else (count, hidden, width)
    if region.shape != shape:
        raise InputError(
            f"{file.path}: tensor {name} has shape {shown(list(region.shape))}; the config needs {list(shape)}"
        )
    projections = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    part = (width, hidden) if kind == "gate_up_proj" else (hidden, width)
    length = region.length // (count * len(projections))
    return {
        f"{experts}.{e}.{projection}.weight": Region(
            region.start + (e * len(projections) + p) * length, length, region.dtype, part
        )
        for e in range(count)
        for p, projection in enumerate(projections)
    }


def _check(found: Found, config: ModelConfig, folder: Path) -> None:
    expected: set[str] = set()
    # not listed first: a config that calls for millions of tensors ends at the first that the files do not hold
    for name, tensor in ((part, tensor) for _, parts in each_stored(config) for part, tensor in parts.items()):
        expected.add(name)
        if name not in found:
            raise InputError(f"{folder}: tensor {config.tensor_prefix}{name} is missing{_instead(name, found)}")
        file, region = found[name]
        where = f"{file.path}: tensor {config.tensor_prefix}{name}"
        if region.shape != tensor.shape:
            raise InputError(f"{where} has shape {shown(list(region.shape))}; the config needs {list(tensor.shape)}")
        if region.dtype not in tensor.dtypes:
            raise InputError(f"{where} has dtype {region.dtype}; kdtr takes {_dtypes(tensor)}")
    tied = found.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    if tied is not None:
        _check_tied(*tied, *found["model.embed_tokens.weight"])
    for name, (file, _) in found.items():
        if name not in expected:
            raise InputError(f"{file.path}: tensor {config.tensor_prefix}{name} has no place in this model")


def _instead(name: str, found: Found) -> str:
    """Says so where a weight is stored in another form than quantization_config has it."""
    base, _, last = name.rpartition(".")
    if last == "weight" and f"{name}_packed" in found:
        return "; it is stored packed, but quantization_config does not quantise it"
    if last == "weight_packed" and f"{base}.weight" in found:
        return f"; {base}.weight is there, but quantization_config quantises it"
    return ""


def _dtypes(tensor: StoredTensor) -> str:
    first, last = ", ".join(tensor.dtypes[:-1]), tensor.dtypes[-1]
    return f"{first} and {last}" if first else f"{last} (quantization_config quantises it)"


def _check_tied(head_file: SafetensorsFile, head: Region, file: SafetensorsFile, embedding: Region) -> None:
    name = "lm_head.weight"
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and all(
        a == b
        for a, b in zip(head_file.blocks(name, head), file.blocks("model.embed_tokens.weight", embedding), strict=True)
    )
    if not same:
        raise InputError(f"{head_file.path}: tensor {name} differs from the embedding, but tie_word_embeddings is true")

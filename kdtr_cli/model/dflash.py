"""A DFlash drafter: its config.json and its weights, checked against the target model (docs/numerics.md rule 21).

A drafter is a small Qwen3-style stack that reads the target's layer outputs ("taps") of all committed positions and
proposes a whole block at once; embedding and lm_head are the target's. Source of fields and names: z-lab/dflash,
dflash/model.py, and the published Kimi drafters. A key that could change the network and is unknown is an error.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.model.checkpoint import to_float32
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.fields import Fields, read_json, shown
from kdtr_cli.model.rope import rope_table
from kdtr_cli.model.safetensors_file import DTYPES, Region, SafetensorsFile
from kdtr_cli.model.yarn import RopeScaling, parse_rope

__all__ = ["DFlashConfig", "Drafter", "draft_rope_table", "draft_tensors", "open_drafter", "parse_dflash"]

# Bookkeeping, training and generation keys, and those of weights that a drafter does not have.
_IRRELEVANT = """
    architectures auto_map model_type transformers_version _name_or_path name_or_path _commit_hash use_cache
    initializer_range attention_dropout torch_dtype dtype bos_token_id eos_token_id pad_token_id max_window_layers
    tie_word_embeddings output_attentions output_hidden_states return_dict torchscript use_bfloat16 id2label label2id
    num_labels problem_type chunk_size_feed_forward is_encoder_decoder is_decoder
"""
_MAX_LAYERS = 100
_MAX_BLOCK = 33


@dataclass(frozen=True)
class DFlashConfig:
    """Everything that decides the function of a drafter. Widths are in elements.

    block_size: rows of a block, the root and L = block_size - 1 masks; target_layer_ids: the target's layers (from 0)
    whose outputs are the features, in the order in which they are concatenated.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]

    @property
    def horizon(self) -> int:
        """L: how many tokens a block drafts."""
        return self.block_size - 1

    @property
    def qk_rope_head_dim(self) -> int:
        """The rotary width: the whole head (the name under which model/rope.py asks for it)."""
        return self.head_dim


@dataclass(frozen=True)
class Drafter:
    """An opened drafter: config, its text, float32 weights by name, and sha256 over config text and weights as used."""

    config: DFlashConfig
    config_text: str
    weights: Mapping[str, np.ndarray]
    sha256: str

    @property
    def identity(self) -> str:
        """What a bundle calls it: 'dflash:<sha256>'."""
        return f"dflash:{self.sha256}"


def draft_rope_table(config: DFlashConfig, n_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), float32 [n_positions, head_dim / 2]: float64 angles, rounded once; pair j is (j, j + head_dim / 2).

    A block may reach past the last position by rows that nobody will use, so a block more than max_position_embeddings
    is allowed; InputError for more.
    """
    longest = config.max_position_embeddings + _MAX_BLOCK
    if n_positions > longest:
        raise InputError(
            f"{n_positions} positions, a block included: the drafter ends at {config.max_position_embeddings} "
            "(its max_position_embeddings); decode fewer tokens or take another drafter"
        )
    return rope_table(replace(config, max_position_embeddings=longest), n_positions)


def draft_tensors(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """name → shape of every weight; a projection is [out, in]."""
    c = config
    hidden, width, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    out: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(c.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(c.num_hidden_layers):
        out |= {
            f"layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (width, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, width),
                "self_attn.q_norm": (c.head_dim,),
                "self_attn.k_norm": (c.head_dim,),
                "mlp.gate_proj": (c.intermediate_size, hidden),
                "mlp.up_proj": (c.intermediate_size, hidden),
                "mlp.down_proj": (hidden, c.intermediate_size),
            }.items()
        }
    return out


def parse_dflash(obj: dict[str, Any], target: ModelConfig, where: object = "config.json") -> DFlashConfig:
    """A DFlashConfig from a parsed config.json, checked against its target; InputError names the field."""
    f = Fields(obj, where)
    f.asked.update(_IRRELEVANT.split())
    if not f.has("dflash_config"):
        raise InputError(f"{where}: no DFlash drafter: dflash_config is missing, which every one has")
    f.only("hidden_act", "silu")
    f.only("attention_bias", False)
    f.only("mlp_bias", False)
    f.only("use_sliding_window", False)
    if f.has("quantization_config"):
        raise f.fail("quantization_config", "null: quantised drafters are not supported")
    hidden = f.integer("hidden_size")
    if hidden != target.hidden_size:
        raise f.fail("hidden_size", f"{target.hidden_size}, that of the target, whose embedding the drafter uses")
    f.only("vocab_size", target.vocab_size)
    f.only("num_target_layers", target.num_hidden_layers)
    layers = f.integer("num_hidden_layers", high=_MAX_LAYERS)
    types = f.raw("layer_types")
    if types is not None and types != ["full_attention"] * layers:
        raise f.fail("layer_types", f'"full_attention" for each of {layers} layers; kdtr has nothing else')
    if f.raw("use_sliding_window") is not False:
        f.only("sliding_window")
    f.asked.add("sliding_window")
    heads = f.integer("num_attention_heads")
    kv_heads = f.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise f.fail("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = f.integer("head_dim", low=2)
    if head_dim % 2:
        raise f.fail("head_dim", "an even number (rotary pairs)")
    theta, scaling = parse_rope(_known_yarn(f), head_dim)
    block = f.integer("block_size", low=2, high=_MAX_BLOCK)
    mask, taps = _parse_inner(f, target)
    config = DFlashConfig(
        hidden_size=hidden,
        intermediate_size=f.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=f.number("rms_norm_eps", above=0),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=f.integer("max_position_embeddings"),
        block_size=block,
        mask_token_id=mask,
        target_layer_ids=taps,
    )
    f.refuse_unknown()
    return config


def _known_yarn(f: Fields) -> Fields:
    """The rotary fields with "deepseek_yarn", as Kimi-K2.6's drafter spells it, read as the YaRN that it is."""
    names = ("rope_theta", "rope_scaling", "rope_parameters")
    f.asked.update(names)
    out = {name: f.obj[name] for name in names if name in f.obj}
    for name in names[1:]:
        if isinstance(out.get(name), dict):
            out[name] = {k: "yarn" if v == "deepseek_yarn" else v for k, v in out[name].items()}
    return Fields(out, f.where)


def _parse_inner(f: Fields, target: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """dflash_config: the mask token and the tapped layers."""
    table = f.table("dflash_config")
    if table is None:
        raise InputError(f"{f.where}: dflash_config is missing; needed: mask_token_id and target_layer_ids")
    inner = Fields(table, f.where, "dflash_config.")
    mask = inner.integer("mask_token_id", low=0, high=target.vocab_size - 1)
    taps = inner.raw("target_layer_ids")
    last = target.num_hidden_layers - 1
    if type(taps) is not list or not taps or any(type(t) is not int or not 0 <= t <= last for t in taps):
        raise inner.fail("target_layer_ids", f"a list of the target's layers, 0 to {last}")
    if len(set(taps)) < len(taps):
        raise inner.fail("target_layer_ids", "each layer once")
    inner.refuse_unknown()
    return mask, tuple(taps)


class _Tensors(Mapping[str, np.ndarray]):
    """Weights by name: float32, C-contiguous, read-only, read once, when asked for; InputError if not finite."""

    def __init__(self, found: dict[str, tuple[SafetensorsFile, Region]]) -> None:
        self._found = found
        self._kept: dict[str, np.ndarray] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._found))

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._kept:
            file, region = self._found[name]
            values = to_float32(file.array(name, region)).view()
            if not np.isfinite(values).all():
                raise InputError(f"{file.path}: tensor {name} holds a value that is not finite; the drafter is broken")
            values.flags.writeable = False
            self._kept[name] = values
        return self._kept[name]


def open_drafter(folder: Path | str, target: ModelConfig) -> Drafter:
    """Open a drafter's folder (config.json, *.safetensors) for a target; InputError says what is wrong."""
    folder = Path(folder)
    path = folder / "config.json"
    if not os.path.lexists(path):
        raise InputError(f"{folder}: no config.json; a DFlash drafter is a folder with config.json and *.safetensors")
    obj, text = read_json(path)
    config = parse_dflash(obj, target, path)
    files = [SafetensorsFile(file) for file in sorted(folder.glob("*.safetensors"))]
    if not files:
        raise InputError(
            f"{folder}: no *.safetensors file; a DFlash drafter is a folder of config.json and safetensors"
        )
    found: dict[str, tuple[SafetensorsFile, Region]] = {}
    for file in files:
        for name, region in file.regions.items():
            if name in found:
                raise InputError(f"{folder}: tensor {name} is in both {found[name][0].path.name} and {file.path.name}")
            found[name] = file, region
    expected = draft_tensors(config)
    for name, shape in expected.items():
        if name not in found:
            raise InputError(f"{folder}: tensor {name} is missing")
        file, region = found[name]
        if region.shape != shape:
            raise InputError(
                f"{file.path}: tensor {name} has shape {list(region.shape)}; the config needs {list(shape)}"
            )
        if region.dtype not in DTYPES:
            raise InputError(f"{file.path}: tensor {name} has dtype {region.dtype}; kdtr takes F32, F16 and BF16")
    for name in sorted(found):
        if name not in expected:
            raise InputError(f"{found[name][0].path}: tensor {shown(name)} has no place in a DFlash drafter")
    weights = _Tensors(found)
    digest = hashlib.sha256(text.encode())
    for name, values in weights.items():
        digest.update(f"{name} float32 {','.join(map(str, values.shape))}\n".encode())
        digest.update(np.ascontiguousarray(values, dtype="<f4").data)
    return Drafter(config, text, weights, digest.hexdigest())

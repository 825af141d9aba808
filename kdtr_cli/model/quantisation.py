"""How a checkpoint's weights are quantised: `quantization_config` of config.json, read strictly, and written.

Two layouts: compressed-tensors pack-quantized INT4 (Kimi-K2-Thinking, K2.5, K2.6) and FP8 e4m3 in blocks
(DeepSeek-V3). Both are read as weights only: activations and cache stay as the contract has them. Every other method,
format, width or scheme is an InputError that names the field.

Sources: compressed-tensors 0.20 (quantization/quant_args.py, utils/match.py); transformers 5.24 (quantizers_utils.py);
DeepSeek-V3's README_WEIGHTS.md.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from kdtr_cli.errors import InputError
from kdtr_cli.model.fields import Fields, named, shown

__all__ = ["FP8_BLOCK", "INT4_GROUP", "Quantisation", "fp8_config", "int4_config", "parse_quantisation"]

NAME = "quantization_config"
INT4_GROUP = 32  #: of the published Kimi checkpoints
FP8_BLOCK = (128, 128)  #: of the published DeepSeek checkpoints
_LINEAR = re.compile(r"(?:.*\.)?(?:\w+_proj|kv_a_proj_with_mqa|lm_head)\.weight")

# What does not change how stored tensors are read: how the scales were found, and bookkeeping.
_OBSERVED = ("observer", "observer_kwargs", "zp_dtype")
_BOOKKEEPING = ("version", "global_compression_ratio")
# A pattern of the ignore list is run on every module's name: what could take more than a moment is refused.
_MAX_PATTERN, _MAX_REPEATS, _MAX_PATTERNS, _MAX_IGNORED = 200, 3, 32, 1000
_COSTLY = re.compile(r"\)[*+?{]|\(\?|\\[1-9]")
_PLAIN = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")


@dataclass(frozen=True)
class Quantisation:
    """Which weights are quantised, and how.

    method: 'int4' or 'fp8'. group_size: 'int4', inputs that share a scale; 0 for 'fp8'. block: 'fp8', rows and columns
    that share a scale; (0, 0) for 'int4'. ignore: modules that are not quantised, as the config spells them.
    """

    method: str
    group_size: int = 0
    block: tuple[int, int] = (0, 0)
    ignore: tuple[str, ...] = ()

    def covers(self, name: str, prefix: str = "") -> bool:
        """Whether the weight of this name (without the config's tensor_prefix) is quantised.

        Linear layers are, unless ignored: projections, and for 'int4' lm_head; never the router, the embedding and the
        norms. An entry of the ignore list may mean the module's name with the prefix or without.

        'int4': 're:' and a pattern that matches from the name's start, or the whole name. 'fp8': a name that the
        module's begins or ends with, in whole components.
        """
        if not _LINEAR.fullmatch(name) or (self.method == "fp8" and name == "lm_head.weight"):
            return False
        module = name.removesuffix(".weight")
        names = {module, prefix + module}
        if self.method == "fp8":
            return not any(f"{m}.".startswith(f"{e}.") or f".{m}".endswith(f".{e}") for e in self.ignore for m in names)
        return not any(
            _compiled(entry[3:]).match(m) if entry.startswith("re:") else m == entry
            for entry in self.ignore
            for m in names
        )

    def described(self) -> dict[str, Any]:
        """The same as plain values, for `kdtr model show`."""
        grain = {"group_size": self.group_size} if self.method == "int4" else {"block": list(self.block)}
        return {"method": self.method, **grain, "ignore": list(self.ignore)}


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def parse_quantisation(f: Fields) -> Quantisation | None:
    """The quantization_config of a config.json object; None where there is none."""
    table = f.table(NAME)
    if table is None:
        return None
    inner = Fields(table, f.where, f"{f.prefix}{NAME}.")
    method = inner.choice("quant_method", ("compressed-tensors", "fp8"))
    return _parse_packed(inner) if method == "compressed-tensors" else _parse_fp8(inner)


def _parse_packed(f: Fields) -> Quantisation:
    f.asked.update(_BOOKKEEPING)
    f.choice("format", ("pack-quantized",))
    f.choice("quantization_status", ("compressed",), None)
    _nothing(f, "kv_cache_scheme", "a quantised cache is not supported")
    for name in ("sparsity_config", "transform_config"):
        _nothing(f, name, "kdtr reads plain packed weights")
    groups = f.table("config_groups")
    if groups is None or len(groups) != 1:
        raise f.fail("config_groups", "one group, the same for all quantised layers")
    (name, group), *_ = groups.items()
    if type(group) is not dict:
        raise f.fail("config_groups", "a JSON object by group")
    g = Fields(group, f.where, f"{f.prefix}config_groups.{named(name)}.")
    g.choice("format", ("pack-quantized",), None)
    for name in ("input_activations", "output_activations"):
        _nothing(g, name, "weights alone may be quantised")
    if g.raw("targets") != ["Linear"]:
        raise g.fail("targets", '["Linear"]')
    weights = g.table("weights")
    if weights is None:
        raise g.fail("weights", "how the weights are quantised, as a JSON object")
    w = Fields(weights, f.where, f"{g.prefix}weights.")
    w.asked.update(_OBSERVED)
    w.integer("num_bits")
    w.only("num_bits", 4)
    w.choice("type", ("int",))
    w.choice("strategy", ("group",))
    if not w.boolean("symmetric"):
        raise w.fail("symmetric", "true (no zero points)")
    if w.boolean("dynamic", False):
        raise w.fail("dynamic", "false (the scales stand in the checkpoint)")
    _nothing(w, "actorder", "columns are in their order")
    _nothing(w, "block_structure", "scales belong to groups")
    w.choice("scale_dtype", ("torch.bfloat16", "torch.float16", "torch.float32"), None)
    group_size = w.integer("group_size")
    for part in (w, g):
        part.refuse_unknown()
    ignore = _names(f, "ignore")
    if sum(entry.startswith("re:") for entry in ignore) > _MAX_PATTERNS:
        raise f.fail("ignore", f"at most {_MAX_PATTERNS} patterns")
    for entry in ignore:
        _check_pattern(f, entry)
    f.refuse_unknown()
    return Quantisation("int4", group_size=group_size, ignore=ignore)


def _check_pattern(f: Fields, entry: str) -> None:
    """An entry of the ignore list: a name, or a pattern that Python knows and that ends soon on any name."""
    if not entry.startswith("re:"):
        return
    where, pattern = f"{f.where}: {f.prefix}ignore has {shown(entry)}", entry[3:]
    repeats = len(re.findall(r"[*+{]", re.sub(r"\\.|\[[^\]]*\]", "", pattern)))
    if len(pattern) > _MAX_PATTERN or repeats > _MAX_REPEATS or _COSTLY.search(pattern):
        raise InputError(
            f"{where}: allowed: at most {_MAX_PATTERN} characters with {_MAX_REPEATS} repeats, no repeated group, no "
            "lookaround and no back-reference"
        )
    try:
        _compiled(pattern)
    except (re.error, OverflowError, RecursionError):
        raise InputError(f"{where}: not a regular expression") from None


def _parse_fp8(f: Fields) -> Quantisation:
    f.choice("fmt", ("e4m3",), None)
    f.choice("activation_scheme", ("dynamic",), None)
    f.only("dequantize", False)
    if f.has("scale_fmt"):
        raise f.fail("scale_fmt", "null: kdtr reads float32 scales (weight_scale_inv), ue8m0 ones never")
    block = f.raw("weight_block_size")
    if type(block) is not list or len(block) != 2 or any(type(n) is not int or not 0 < n < 2**31 for n in block):
        raise f.fail("weight_block_size", "two positive integers, rows and columns that share a scale")
    ignore = _names(f, "modules_to_not_convert")
    for entry in ignore:
        if not _PLAIN.fullmatch(entry):
            raise InputError(
                f"{f.where}: {f.prefix}modules_to_not_convert has {shown(entry)}; allowed: names of modules"
            )
    f.refuse_unknown()
    return Quantisation("fp8", block=(block[0], block[1]), ignore=ignore)


def _names(f: Fields, name: str) -> tuple[str, ...]:
    """A list of texts; empty when missing or null."""
    value = f.raw(name)
    if value is None:
        return ()
    if type(value) is not list or len(value) > _MAX_IGNORED or any(type(entry) is not str for entry in value):
        raise f.fail(name, f"a list of at most {_MAX_IGNORED} names")
    return tuple(value)


def _nothing(f: Fields, name: str, why: str) -> None:
    """A field that must be missing, null or empty."""
    if f.raw(name) not in (None, {}):
        raise f.fail(name, f"null: {why}")


def int4_config(ignore: tuple[str, ...], group_size: int = INT4_GROUP) -> dict[str, Any]:
    """A quantization_config as Kimi's checkpoints have it: only the ignore list differs between them."""
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": group_size,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def fp8_config(block: tuple[int, int] = FP8_BLOCK) -> dict[str, Any]:
    """A quantization_config as DeepSeek-V3's checkpoint has it."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }

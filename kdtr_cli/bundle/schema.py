"""What a bundle holds: names, dtypes, shapes and limits. The one place for them; docs/bundle.md says the same in prose.

Nothing here opens a file. Writer and reader both ask this module, so that what one writes the other accepts.
"""

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from kdtr_cli.errors import InputError

__all__ = [
    "ARITHMETICS",
    "DEFAULT_LIMITS",
    "DTYPES",
    "FINISH_REASONS",
    "KINDS",
    "LIMIT_VARIABLE",
    "MAX_ID_BYTES",
    "SCHEMA",
    "TEXT_DTYPE",
    "DType",
    "Limits",
    "SchemaError",
    "SequenceData",
    "array_rule",
    "check_id",
    "check_sequence_meta",
    "check_shapes",
    "check_values",
    "check_weight_name",
    "config_vocab",
    "dtype_name",
    "limits_from_environment",
    "sequence_name",
]

SCHEMA = "kdtr/1"
KINDS = ("golden", "run")
FINISH_REASONS = ("length", "stop")

#: The manifest's dtype of model/config, a scalar string; its shape is [number of bytes].
TEXT_DTYPE = "utf8"

#: The arithmetics whose logits a bundle of each kind may hold, and the dtype that holds them.
ARITHMETICS: Mapping[str, Mapping[str, str]] = {
    "golden": {"bf16": "float32", "exact": "float32", "float32": "float32", "float64": "float64"},
    "run": {"engine": "float32"},
}

#: The environment variable that replaces the two byte limits (an integer, with K, M, G or T for powers of 1024).
LIMIT_VARIABLE = "KDTR_BUNDLE_MAX_BYTES"

MAX_ID_BYTES = 256
MAX_STREAM = 2**32 - 1
MAX_SEQUENCES = 1_000_000


class SchemaError(InputError):
    """Content that breaks the format. The message names the place inside the bundle, not yet the file."""


@dataclass(frozen=True)
class DType:
    """How arrays of one dtype lie in the file.

    name: as in the manifest. array: what callers give and get. stored: little-endian numpy dtype in the file.
    marked: the dataset carries the attribute kdtr_dtype, as HDF5 has no such type.
    """

    name: str
    array: np.dtype
    stored: np.dtype
    marked: bool = False


def _plain(name: str) -> DType:
    return DType(name, np.dtype(name), np.dtype(name).newbyteorder("<"))


DTYPES: Mapping[str, DType] = {
    "int8": _plain("int8"),
    "uint8": _plain("uint8"),
    "int32": _plain("int32"),
    "int64": _plain("int64"),
    "float16": _plain("float16"),
    "float32": _plain("float32"),
    "float64": _plain("float64"),
    "bfloat16": DType("bfloat16", np.dtype(ml_dtypes.bfloat16), np.dtype("<u2"), marked=True),
    "float8_e4m3fn": DType("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), np.dtype("u1"), marked=True),
}


def dtype_name(array: np.ndarray) -> str:
    """The name in DTYPES of an array's dtype, whatever its byte order; SchemaError for any other."""
    name = array.dtype.name
    if name not in DTYPES:
        raise SchemaError(f"dtype {array.dtype} can't be stored; one of {', '.join(DTYPES)} can")
    return name


@dataclass(frozen=True)
class Limits:
    """What a reader accepts before it reads (bytes as declared by shape and dtype, thus after decompression)."""

    dataset_bytes: int = 16 << 30
    total_bytes: int = 64 << 30
    #: Declared over stored bytes of a compressed dataset above `small_bytes`; real logits stay below 2.
    ratio: int = 100
    small_bytes: int = 1 << 20
    chunk_bytes: int = 64 << 20
    objects: int = 1_000_000
    depth: int = 8
    manifest_bytes: int = 64 << 20
    config_bytes: int = 4 << 20

    @property
    def remedy(self) -> str:
        """What to do about a bundle above the byte limits."""
        return f"if it is right, set {LIMIT_VARIABLE}"


DEFAULT_LIMITS = Limits()


def limits_from_environment(limits: Limits = DEFAULT_LIMITS) -> Limits:
    """The limits, with the byte limits replaced by LIMIT_VARIABLE where it is set; InputError for a bad value."""
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not text:
        return limits
    match = re.fullmatch(r"([0-9]{1,18})([KMGT]?)", text)
    if match is None:
        raise InputError(f"{LIMIT_VARIABLE}={text!r} is not a number of bytes; write e.g. 200G")
    size = int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[match[2]]
    return replace(limits, dataset_bytes=size, total_bytes=size)


@dataclass(eq=False)
class SequenceData:
    """One sequence to write.

    id: any printable text, unique in the bundle. stream: sampling stream, 0 … 2³²−1 (contract rule 15).
    prompt: int32 [P], P ≥ 1. tokens: int32 [T]. finish_reason: 'length' or 'stop'.
    arrays: path inside the sequence, e.g. 'logits/exact', to array; `array_rule` says which paths there are.
    """

    id: str
    stream: int
    prompt: np.ndarray
    tokens: np.ndarray
    finish_reason: str
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


# A rule is (dtype names, dimensions). A dimension is a number or a symbol: P prompt length, T tokens, V vocabulary,
# K entries kept a row, R rounds, N tree nodes of all rounds without roots, Q = N + R, A accepted, L depth, any other
# symbol free. A symbol has one value in a sequence; V has one in the bundle; K stands for each logits base on its own.
# S is the number of positions that were fed, P + T - 1 (P where T is 0).
Rule = tuple[tuple[str, ...], tuple[int | str, ...]]

_COMPONENT = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
# the names of kdtr_cli.model.traces: float tensors by the symbol of their width, and the one of integers
_TRACE = re.compile(
    r"trace/(?:(embed|final_norm)|model\.layers\.(?:0|[1-9][0-9]{0,3})\."
    r"(hidden|self_attn\.(?:q_latent|q|kv_latent|k_rope|q_rope|attn_out)"
    r"|mlp\.(?:router_logits|expert_ids|expert_weights|shared_out|moe_out|mlp_out)))"
)
_HIDDEN = ("embed", "final_norm", "hidden", "self_attn.attn_out", "mlp.shared_out", "mlp.moe_out", "mlp.mlp_out")
_SLOTS = ("mlp.expert_ids", "mlp.expert_weights")
_LOGITS = re.compile(r"(prompt_logits|logits)/([a-z0-9]+?)(_top_ids|_top_values|_top_counts|_sha256)?")
_WEIGHT = re.compile(_COMPONENT)

_FIXED: Mapping[str, Rule] = {
    "prompt": (("int32",), ("P",)),
    "tokens": (("int32",), ("T",)),
    "ties": (("int32",), ("ties",)),
    "rounds/start": (("int32",), ("R",)),
    "rounds/root": (("int32",), ("R",)),
    "rounds/bonus": (("int32",), ("R",)),
    "rounds/n_nodes": (("int32",), ("R",)),
    "rounds/n_accepted": (("int32",), ("R",)),
    "rounds/tokens": (("int32",), ("N",)),
    "rounds/parents": (("int32",), ("N",)),
    "rounds/depths": (("int32",), ("N",)),
    "rounds/scores": (("float64",), ("N",)),
    "rounds/accepted": (("int32",), ("A",)),
    "rounds/posterior": (("int32",), ("Q",)),
    "rounds/draft_top_ids": (("int32",), ("R", "L", "K:draft")),
    "rounds/draft_top_logps": (("float32",), ("R", "L", "K:draft")),
    "rounds/draft_counts": (("int32",), ("R", "L")),
    "rounds/cache_digest": (("uint8",), ("R", 32)),
    "rounds/final_cache_digest": (("uint8",), (32,)),
    "drafts/top_ids": (("int32",), ("T", "L", "K:drafts")),
    "drafts/top_logps": (("float32",), ("T", "L", "K:drafts")),
    "drafts/counts": (("int32",), ("T", "L")),
}


def array_rule(kind: str, path: str) -> Rule | None:
    """Dtypes and dimensions of the dataset at `path` inside a sequence of a `kind` bundle; None: no such name."""
    if path in _FIXED:
        return _FIXED[path]
    if (match := _TRACE.fullmatch(path)) is not None:
        return _trace_rule(kind, match[1] or match[2])
    match = _LOGITS.fullmatch(path)
    if match is None:
        return None
    group, arithmetic, suffix = match.groups()
    dtype = ARITHMETICS[kind].get(arithmetic)
    if dtype is None:
        return None
    rows = "T" if group == "logits" else "P"
    kept = f"K:{group}/{arithmetic}"
    return {
        None: ((dtype,), (rows, "V")),
        "_top_ids": (("int32",), (rows, kept)),
        "_top_values": ((dtype,), (rows, kept)),
        "_top_counts": (("int32",), (rows,)),
        "_sha256": (("uint8",), (rows, 32)),
    }[suffix]


def _trace_rule(kind: str, name: str) -> Rule:
    """A trace's tensor, its layer left out. Values are of the arithmetic that chose the tokens."""
    width = "H" if name in _HIDDEN else "slots" if name in _SLOTS else name
    if name == "mlp.expert_ids":
        return ("int32",), ("S", width)
    return ("float32", "float64") if kind == "golden" else ("float32",), ("S", width)


def sequence_name(index: int) -> str:
    """The group name of the sequence at `index`: six digits."""
    if not 0 <= index < MAX_SEQUENCES:
        raise SchemaError(f"a bundle holds at most {MAX_SEQUENCES} sequences")
    return f"{index:06d}"


def check_weight_name(name: str) -> None:
    """A weight's dataset name: letters, digits, '_', '.', '-', at most 256 of them."""
    if not _WEIGHT.fullmatch(name) or len(name) > 256:
        raise SchemaError(f"weight name {name!r} can't be stored; letters, digits, '_', '.' and '-' can")


def check_id(text: str) -> None:
    """A sequence id: 1 to 256 bytes of UTF-8 without control characters, line separators or lone surrogates."""
    if not isinstance(text, str) or not text:
        raise SchemaError(f"a sequence id must be non-empty text, not {text!r}")
    if any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in text):
        raise SchemaError(f"sequence id {text!r} holds a control character")
    if len(text.encode()) > MAX_ID_BYTES:
        raise SchemaError(f"sequence id {text[:20]!r}… is longer than {MAX_ID_BYTES} bytes")


def check_sequence_meta(where: str, stream: object, finish_reason: object) -> None:
    """Stream and finish reason of one sequence."""
    if isinstance(stream, bool) or not isinstance(stream, int) or not 0 <= stream <= MAX_STREAM:
        raise SchemaError(f"{where}: stream {stream!r} is not an integer from 0 to {MAX_STREAM}")
    if finish_reason not in FINISH_REASONS:
        raise SchemaError(f"{where}: finish_reason {finish_reason!r} is not one of {', '.join(FINISH_REASONS)}")


def check_shapes(
    kind: str, where: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]], vocab: int | None
) -> int | None:
    """Check names, dtypes and shapes of one sequence's datasets against the rules and against each other.

    shapes: path inside the sequence → (dtype name, shape), with 'prompt' and 'tokens'. vocab: V where known.
    Returns V as known afterwards. SchemaError names the first dataset that is wrong.
    """
    known: dict[str, int] = {} if vocab is None else {"V": vocab}
    for path in ("prompt", "tokens"):
        if path not in shapes:
            raise SchemaError(f"{where}/{path} is missing")
    # prompt and tokens first: they fix P and T, so that a wrong logits array is blamed and not the tokens
    for path in ["prompt", "tokens", *sorted(shapes.keys() - {"prompt", "tokens"})]:
        dtype, shape = shapes[path]
        rule = array_rule(kind, path)
        if rule is None:
            raise SchemaError(f"{where}/{path}: a {kind} bundle has no such dataset")
        dtypes, dims = rule
        if dtype not in dtypes:
            raise SchemaError(f"{where}/{path} is {dtype}, not {' or '.join(dtypes)}")
        _match_dims(f"{where}/{path}", shape, dims, known)
        if path in ("prompt", "tokens"):
            known["S"] = known["P"] + max(known.get("T", 0), 1) - 1
    if known["P"] == 0:
        raise SchemaError(f"{where}/prompt is empty")
    if "Q" in known and known["Q"] != known.get("N", 0) + known.get("R", 0):
        raise SchemaError(f"{where}/rounds/posterior has {known['Q']} rows, not one for each node and root")
    _check_tops(where, shapes)
    return known.get("V")


def _match_dims(where: str, shape: tuple[int, ...], dims: tuple[int | str, ...], known: dict[str, int]) -> None:
    expected = [known.get(dim, dim) if isinstance(dim, str) else dim for dim in dims]
    fits = len(shape) == len(dims) and all(
        isinstance(want, str) or want == have for want, have in zip(expected, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(want).split(":")[0] for want in expected)
        raise SchemaError(f"{where} has shape {list(shape)}, not [{wanted}]")
    for dim, size in zip(dims, shape, strict=True):
        if isinstance(dim, str):
            known[dim] = size


def _check_tops(where: str, paths: Iterable[str]) -> None:
    for path in paths:
        for one, other in (
            ("_top_ids", "_top_values"), ("_top_values", "_top_ids"), ("_top_counts", "_top_ids"),
        ):  # fmt: skip
            if path.endswith(one) and path.startswith(("logits/", "prompt_logits/")):
                twin = path.removesuffix(one) + other
                if twin not in paths:
                    raise SchemaError(f"{where}/{path} stands without {twin}")


def check_values(where: str, path: str, array: np.ndarray, vocab: int | None, n_tokens: int) -> None:
    """Check what the integers of prompt, tokens, ties and *top_ids mean; other paths pass unread.

    array: the whole dataset or some of its rows. vocab: V where known. n_tokens: T.
    """
    if path == "ties":
        if array.size and (array[0] < 0 or array[-1] >= n_tokens or bool(np.any(np.diff(array.astype(np.int64)) <= 0))):
            raise SchemaError(f"{where}/ties must be ascending steps from 0 to {n_tokens - 1}")
        return
    if path not in ("prompt", "tokens") and not path.endswith("top_ids"):
        return
    if array.size == 0:
        return
    low, high = int(array.min()), int(array.max())
    bound = 2**31 if vocab is None else vocab
    if low < 0 or high >= bound:
        raise SchemaError(f"{where}/{path} holds token id {low if low < 0 else high}, outside 0 … {bound - 1}")


def config_vocab(text: str) -> int | None:
    """vocab_size of a Hugging Face config.json, `text_config` nesting included; None where it has none.

    SchemaError where the text is not a JSON object.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"model/config is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(config, dict):
        raise SchemaError("model/config is not a JSON object")
    nested = config.get("text_config")
    for part in (nested if isinstance(nested, dict) else {}, config):
        vocab = part.get("vocab_size")
        if isinstance(vocab, int) and not isinstance(vocab, bool):
            if not 0 < vocab < 2**31:
                raise SchemaError(f"model/config: vocab_size {vocab} is out of range")
            return vocab
    return None

"""Damage for model folders: a folder, a seed and a number give the same mutant everywhere.

JSON is changed as a tree of pairs, so that keys may stand twice and numbers may be what no serialiser would write;
safetensors files in the header's JSON, the header's length, the data, and as bytes.
"""

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Raw", "dump", "mutate", "parse"]


class Raw(str):
    """Text that goes into the JSON as it stands."""


class Pairs(list):
    """A JSON object as [key, value] pairs."""


def parse(text: str | bytes) -> Any:
    """JSON with every object as Pairs."""
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs([key, value] for key, value in pairs))


def dump(value: Any) -> str:
    """The JSON of a tree."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{dump(key)}:{dump(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)


def _nested(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)


NUMBERS = (
    0, 1, 2, 3, -1, 7, 64, 1000, 10_001, 10**6, 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**40,
    0.5, -0.0, 1.0, 1e-30, 1.0000000000000002, 1e30, 3e38, 4e38, 1e300, 1e308, Raw("1e-320"), Raw("1e400"),
    Raw("-1e9999"), Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("9" * 4000), Raw("9" * 5000),
    Raw("0x10"), Raw("01"),
)  # fmt: skip
OTHERS = (
    None, True, False, "", "x", "a\nb", "\0", "\x1b[31m", "\ud800", "re:(a+)+$", "re:.*.*.*x", "../x.safetensors",
    "a\nb.safetensors", "\u202e", "x" * 200, "x" * 100_000, Raw("[]"), Raw("{}"), Raw("[null]"), Raw("[0]"),
    Raw("[1,2,3]"), Raw('{"a":{"a":{"a":1}}}'), _nested(40), _nested(900), _nested(200_000),
    Raw("[" + "0," * 50_000 + "0]"), Raw("[" + "[]," * 300_000 + "[]]"), Raw("[" + "1," * 200 + "1]"),
    Raw("[" + "4611686018427387903," * 400 + "1]"),
    Raw("[" + "9" * 4000 + "]"), Raw('{"a":1,"a":2}'), Raw(""), Raw("]"), Raw('"\\ud83d"'),
)  # fmt: skip
NAMES = (
    "", "model.norm.weight", "lm_head.weight", "model.layers.9.input_layernorm.weight",
    "model.layers.1.mlp.experts.down_proj",
    f"model.layers.{'9' * 5000}.x", "model.layers.٣.x", "language_model.model.norm.weight", "vision_tower.x",
    "__metadata__",
    "a\nb", "x" * 5000, "\ud800", "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.0.mlp.gate_proj.weight_packed",
)  # fmt: skip
HEAVY = ("config.json", "model.safetensors.index.json")
SWAPS = ("a folder", "a dangling link", "a link to itself", "a FIFO", "a link to a device", "empty", "sparse")
DTYPES = (
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "I32",
    "I64",
    "U8",
    "BOOL",
    "F64",
    "C64",
    "F4",
    "f32",
    "",
)


def _places(value: Any) -> Iterator[tuple[list, int]]:
    """(container, index) of every value in a tree; in Pairs the index is that of the pair."""
    if isinstance(value, Pairs):
        for i, (_, item) in enumerate(value):
            yield value, i
            yield from _places(item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield value, i
            yield from _places(item)


def _set(container: list, i: int, value: Any) -> None:
    if isinstance(container, Pairs):
        container[i][1] = value
    else:
        container[i] = value


def _get(container: list, i: int) -> Any:
    return container[i][1] if isinstance(container, Pairs) else container[i]


def _mutate_tree(dice: random.Random, root: Any) -> Any:
    places = list(_places(root))
    if not places or dice.random() < 0.02:
        return dice.choice(OTHERS)
    container, i = dice.choice(places)
    value = _get(container, i)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match dice.randrange(9):
        case 0:
            del container[i]
        case 1 | 2:
            _set(container, i, dice.choice(NUMBERS))
        case 3:
            _set(container, i, dice.choice(OTHERS))
        case 4 if number:
            changed = (value + 1, value - 1, -value, value * 2, value * 10**6, value / 2, value // 2, value + 0.5)
            _set(container, i, dice.choice(changed))
        case 5 if isinstance(container, Pairs):
            container.insert(dice.randrange(len(container) + 1), [container[i][0], dice.choice((value, 1, None))])
        case 6 if isinstance(container, Pairs):
            container[i][0] = dice.choice((*NAMES, "unknown", container[i][0] + " ", container[i][0].upper()))
        case 7:
            _set(container, i, _get(*dice.choice(places)))
        case _:
            other = dice.choice(places)
            swapped = _get(*other)
            _set(*other, value)
            _set(container, i, swapped)
    return root


def _mutate_bytes(dice: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    at, length = dice.randrange(len(out) + 1), dice.randrange(1, 200)
    match dice.randrange(8):
        case 0:
            del out[at:]
        case 1:
            del out[at : at + length]
        case 2:
            for _ in range(dice.randrange(1, 20)):
                if out:
                    out[dice.randrange(len(out))] = dice.randrange(256)
        case 3:
            out[at:at] = dice.randbytes(length)
        case 4:
            out += dice.choice((b"\0", b" ", b"{}", b"x" * 9, out[:100]))
        case 5:
            out = bytearray()
        case 6:
            out[at : at + length] = bytes([dice.choice((0, 255))]) * len(out[at : at + length])
        case 7:
            out[:0] = dice.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"[", b"PK\3\4"))
    return bytes(out)


def _changed(dice: random.Random, data: bytes, change: Callable[[random.Random, bytes], bytes]) -> bytes:
    """``change``, or other bytes where an earlier change left nothing for it."""
    try:
        if dice.random() > 0.12:
            return change(dice, data)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, struct.error, RecursionError):
        pass
    return _mutate_bytes(dice, data)


def _mutate_json(dice: random.Random, data: bytes) -> bytes:
    encoding = "utf-16" if dice.random() < 0.01 else "utf-8"
    return dump(_mutate_tree(dice, parse(data))).encode(encoding, "surrogatepass")


def _mutate_safetensors(dice: random.Random, data: bytes) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + length], bytearray(data[8 + length :])
    tree = parse(header)
    entries = [pair for pair in tree if pair[0] != "__metadata__"]
    tensor = dice.choice(entries)
    fields = dict(tensor[1])
    begin, end = fields["data_offsets"]
    how = dice.randrange(1, 10)
    new_length = None
    if how == 1:
        near = (length - 1, length + 1, len(data), len(data) - 8)
        choices = (0, 1, 2, 7, *near, 100 << 20, (100 << 20) + 1, 2**31, 2**63, 2**64 - 1)
        new_length = dice.choice((*choices, dice.randrange(2**64)))
    elif how in (2, 3):
        tree = _mutate_tree(dice, tree)
    elif how == 4:
        _mutate_entry(dice, tensor, fields, len(body))
    elif how == 5:  # whole and consistent, but a tensor too few or too many
        tree, body = _rebuilt(dice, entries, body, tensor)
    elif how == 6 and end > begin:
        _mutate_values(dice, body, begin, end, fields["dtype"])
    elif how == 7:
        scales = [pair for pair in entries if "_scale" in pair[0] or "norm" in pair[0] or pair[0].endswith("_shape")]
        fields = dict((dice.choice(scales) if scales else tensor)[1])
        _mutate_values(dice, body, *fields["data_offsets"], fields["dtype"])
    elif how == 8:
        other = dice.choice(entries)
        tensor[0], other[0] = other[0], tensor[0]
    elif how == 9 and dice.random() < 0.1:
        many = Pairs([f"x{i}", Raw('{"dtype":"U8","shape":[0],"data_offsets":[0,0]}')] for i in range(100_000))
        tree = dice.choice((Pairs([*many, *tree]), Raw("[" + "[]," * 4_000_000 + "[]]"), Raw('{"a":' * 50_000)))
    else:
        tree = Pairs(pair for pair in tree if pair is not tensor)
    text = dump(tree).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text) if new_length is None else new_length) + text + body


def _mutate_entry(dice: random.Random, tensor: list, fields: dict[str, Any], size: int) -> None:
    begin, end = fields["data_offsets"]
    match dice.randrange(4):
        case 0:
            fields["dtype"] = dice.choice(DTYPES)
        case 1:
            shape = list(fields["shape"])
            changed = (
                shape[::-1],
                [*shape, 1],
                [1, *shape],
                [1] * 70 + shape,
                shape[:-1],
                [*shape, 0],
                [-1, *shape],
                [2**62] * 2000,
            )
            fields["shape"] = dice.choice(changed)
        case 2:
            spans = (
                [end, begin],
                [begin, end + 1],
                [begin - 1, end],
                [0, size],
                [0, size + 1],
                [begin, 2**63],
                [2**63, 2**63 + 4],
            )
            fields["data_offsets"] = dice.choice(
                (*spans, [begin, begin + 2**64], [begin, end, end], [0, 0], [-1, end - begin - 1])
            )
        case 3:
            tensor[0] = dice.choice((*NAMES, tensor[0] + "_scale_inv", tensor[0].replace(".0.", ".99.")))
    tensor[1] = Pairs([key, value] for key, value in fields.items())


def _rebuilt(dice: random.Random, entries: list, body: bytearray, tensor: list) -> tuple[Pairs, bytearray]:
    """The file anew without one tensor, or with one more under another name: the format is right, the model is not."""
    kept = (
        [pair for pair in entries if pair is not tensor]
        if dice.random() < 0.5
        else [*entries, [dice.choice(NAMES), tensor[1]]]
    )
    tree, out = Pairs(), bytearray()
    for name, entry in kept:
        fields = dict(entry)
        begin, end = fields["data_offsets"]
        fields["data_offsets"] = [len(out), len(out) + end - begin]
        out += body[begin:end]
        tree.append([name, Pairs([key, value] for key, value in fields.items())])
    return tree, out


_VALUES = {
    "BF16": (b"\x80\x7f", b"\xc0\x7f", b"\x80\xff", b"\0\0", b"\x7f\x7f", b"\x80\xbf", b"\1\0"),
    "F16": (b"\0\x7c", b"\0\x7e", b"\0\0", b"\xff\x7b", b"\0\xbc", b"\1\0"),
    "F32": (b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\0\0\0\0", b"\xff\xff\x7f\x7f", b"\0\0\x80\xbf", b"\1\0\0\0"),
}


def _mutate_values(dice: random.Random, body: bytearray, begin: int, end: int, dtype: str) -> None:
    """One value, some, or all: infinities, NaN, zero, the largest, negative, the smallest; else random bytes."""
    values = _VALUES.get(dtype, (b"\0", b"\xff", b"\x7f", b"\x80"))
    value = dice.choice(values)
    count = (end - begin) // len(value)
    if not count:
        return
    if dice.random() < 0.3:
        body[begin : begin + count * len(value)] = value * count
        return
    for _ in range(dice.choice((1, 1, 5))):
        at = begin + dice.randrange(count) * len(value)
        body[at : at + len(value)] = value


def _swap(dice: random.Random, path: Path) -> str:
    """Something else under the file's name."""
    path.unlink()
    how = dice.randrange(8)
    match how:
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to("nowhere")
        case 2:
            path.symlink_to(path.name)
        case 3:
            os.mkfifo(path)
        case 4:
            path.symlink_to(dice.choice(("/dev/zero", "/dev/null", "/proc/self/mem", "/")))
        case 5:
            path.touch()
        case 6:
            with open(path, "wb") as file:
                file.truncate(dice.choice((8, 1 << 20, 1 << 34)))  # sparse
        case _:
            return f"delete {path.name}"
    return f"swap {path.name} ({SWAPS[how]})"


def _copy(dice: random.Random, folder: Path, names: list[str]) -> str:
    """A file under another name beside the first: a second shard, an index, a pickle."""
    if not names:
        return "nothing"
    source = folder / dice.choice(names)
    name = dice.choice(
        ("z.safetensors", "model.safetensors", "model.safetensors.index.json", "a.bin", "generation_config.json")
    )
    if os.path.lexists(folder / name):
        return "nothing"
    (folder / name).write_bytes(source.read_bytes())
    return f"copy {source.name} to {name}"


def mutate(folder: Path, dice: random.Random) -> list[str]:
    """Change one to three things in a folder of links to good files; what was touched, in words."""
    touched, swapped = [], set()
    for _ in range(dice.choice((1, 1, 1, 1, 2, 3))):
        names = [path.name for path in sorted(folder.iterdir()) if path.name not in swapped]
        if not names or dice.random() < 0.03:
            touched.append(_copy(dice, folder, names))
            continue
        (name,) = dice.choices(names, [4 if name in HEAVY or name.endswith(".safetensors") else 1 for name in names])
        path = folder / name
        if dice.random() < 0.08:
            swapped.add(name)
            touched.append(_swap(dice, path))
            continue
        data = path.read_bytes()
        change = _mutate_safetensors if name.endswith(".safetensors") else _mutate_json
        path.unlink()  # a link to a good file
        path.write_bytes(_changed(dice, data, change))
        touched.append(f"change {name}")
    return touched

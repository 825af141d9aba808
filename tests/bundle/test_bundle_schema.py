"""What the writer refuses to write, and what the manifest must be."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kdtr_cli.bundle import BundleWriter, SequenceData
from kdtr_cli.bundle.manifest import check_manifest, decode_manifest, encode_manifest
from kdtr_cli.bundle.schema import (
    SchemaError,
    array_rule,
    check_id,
    check_shapes,
    config_vocab,
    limits_from_environment,
    sequence_name,
)
from kdtr_cli.errors import InputError

pytestmark = pytest.mark.quick


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def hidden(rows: int, width: int = 8) -> np.ndarray:
    return np.zeros((rows, width), np.float32)


def sequence(**changes) -> SequenceData:
    """A sequence of 3 tokens over a vocabulary of 37."""
    good = SequenceData("a", 0, ints(1, 2), ints(3, 4, 5), "length", {"logits/exact": np.zeros((3, 37), np.float32)})
    return replace(good, **changes)


def write(path: Path, *steps: Callable[[BundleWriter], object]) -> None:
    with BundleWriter(path, "golden") as writer:
        for step in steps:
            step(writer)


def config(text: str = '{"vocab_size": 37}') -> Callable[[BundleWriter], None]:
    return lambda writer: writer.add_config(text)


def add(**changes) -> Callable[[BundleWriter], None]:
    return lambda writer: writer.add_sequence(sequence(**changes))


def logits(**arrays) -> dict[str, np.ndarray]:
    return {f"logits/{name}": array for name, array in arrays.items()}


BAD_SEQUENCES = {
    "empty prompt": ({"prompt": ints()}, "prompt is empty"),
    "two-dimensional prompt": ({"prompt": np.zeros((2, 2), np.int32)}, r"prompt has shape \[2, 2\], not \[P\]"),
    "int64 tokens": ({"tokens": np.arange(3)}, "tokens is int64, not int32"),
    "token beyond the vocabulary": ({"tokens": ints(3, 4, 37)}, r"tokens holds token id 37, outside 0 … 36"),
    "negative prompt id": ({"prompt": ints(-1)}, "prompt holds token id -1"),
    "list for an array": ({"tokens": [1, 2, 3]}, "is a list, not an array"),
    "unknown reason": ({"finish_reason": "eos"}, "finish_reason 'eos'"),
    "negative stream": ({"stream": -1}, "stream -1"),
    "stream of 33 bits": ({"stream": 2**32}, "stream 4294967296"),
    "boolean stream": ({"stream": True}, "stream True"),
    "empty id": ({"id": ""}, "non-empty"),
    "newline in the id": ({"id": "a\nb"}, "control character"),
    "escape in the id": ({"id": "\x1b[31m"}, "control character"),
    "lone surrogate in the id": ({"id": "\ud800"}, "control character"),
    "long id": ({"id": "é" * 129}, "longer than 256 bytes"),
    "too few logits": ({"arrays": logits(exact=np.zeros((2, 37), np.float32))}, r"shape \[2, 37\], not \[3, 37\]"),
    "other vocabulary": ({"arrays": logits(exact=np.zeros((3, 36), np.float32))}, r"shape \[3, 36\], not \[3, 37\]"),
    "wrong precision": ({"arrays": logits(exact=np.zeros((3, 37)))}, "exact is float64, not float32"),
    "logits of a run": ({"arrays": logits(engine=np.zeros((3, 37), np.float32))}, "golden bundle has no such"),
    "unknown array": ({"arrays": {"notes": ints(1)}}, "notes: a golden bundle has no such dataset"),
    "array outside": ({"arrays": {"../x": ints(1)}}, "no such dataset"),
    "dot in a path": ({"arrays": {"trace/./embed": ints(1)}}, "no such dataset"),
    "text": ({"arrays": {"trace/embed": np.array(["a"])}}, "can't be stored"),
    "complex": ({"arrays": {"trace/embed": np.zeros(2, complex)}}, "can't be stored"),
    "objects": ({"arrays": {"trace/embed": np.array([None])}}, "can't be stored"),
    "a tensor of no table": ({"arrays": {"trace/model.layers.0.self_attn.k": hidden(4)}}, "no such dataset"),
    "a trace of too few rows": ({"arrays": {"trace/embed": hidden(3)}}, r"shape \[3, 8\], not \[4, "),
    "a trace of two widths": (
        {"arrays": {"trace/embed": hidden(4), "trace/final_norm": hidden(4, 9)}},
        r"not \[4, 8\]",
    ),
    "a trace of integers": ({"arrays": {"trace/embed": hidden(4).astype(np.int32)}}, "embed is int32, not float32"),
    "float ids": ({"arrays": {"trace/model.layers.0.mlp.expert_ids": hidden(4)}}, "ids is float32, not int32"),
    "ids without values": ({"arrays": logits(exact_top_ids=np.zeros((3, 2), np.int32))}, "stands without"),
    "short digest": ({"arrays": logits(exact_sha256=np.zeros((3, 31), np.uint8))}, r"not \[3, 32\]"),
    "unordered ties": ({"arrays": {"ties": ints(1, 0)}}, "ascending"),
    "a tie twice": ({"arrays": {"ties": ints(1, 1)}}, "ascending"),
    "a tie past the end": ({"arrays": {"ties": ints(3)}}, "steps from 0 to 2"),
    "prompt logits by tokens": (
        {"arrays": {"prompt_logits/exact": np.zeros((3, 37), np.float32)}},
        r"prompt_logits/exact has shape \[3, 37\], not \[2, 37\]",
    ),
    "kept id beyond the vocabulary": (
        {"arrays": logits(exact_top_ids=np.full((3, 1), 40, np.int32), exact_top_values=np.zeros((3, 1), np.float32))},
        "exact_top_ids holds token id 40",
    ),
    "posterior of other rounds": (
        {
            "arrays": {
                "rounds/start": ints(0, 1),
                "rounds/parents": ints(0, 0, 0),
                "rounds/posterior": ints(1, 2, 3, 4),
            }
        },
        "posterior has 4 rows",
    ),
    "rounds of other lengths": (
        {"arrays": {"rounds/bonus": ints(0, 1), "rounds/root": ints(0)}},
        r"rounds/root has shape \[1\], not \[2\]",
    ),
}


@pytest.mark.parametrize("case", BAD_SEQUENCES)
def test_bad_sequence_is_refused_and_nothing_stays(tmp_path, case):
    changes, message = BAD_SEQUENCES[case]
    with pytest.raises(InputError, match=message) as caught:
        write(tmp_path / "b.h5", config(), add(**changes))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_good_sequence_is_accepted(tmp_path, make):
    """The table above has no other fault than the one it names."""
    write(tmp_path / "b.h5", config(), add(), lambda writer: writer.finish(make.manifest()))


def test_vocabulary_is_one_in_a_bundle_even_where_the_config_is_silent(tmp_path):
    other = logits(exact=np.zeros((3, 38), np.float32))
    with pytest.raises(InputError, match="000001/logits/exact has shape"):
        write(tmp_path / "b.h5", config("{}"), add(), add(id="b", arrays=other))


def test_same_id_twice(tmp_path):
    with pytest.raises(InputError, match="'a' is already"):
        write(tmp_path / "b.h5", config(), add(), add())


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "é", "x" * 257])
def test_weight_names(tmp_path, name):
    with pytest.raises(InputError, match="weight name"):
        write(tmp_path / "b.h5", config(), lambda writer: writer.add_weight(name, ints(1)))


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "1 to"), ("{", "not JSON"), ("[1]", "not a JSON object"), ('{"a": "\0"}', "NUL"), ('"\ud800"', "Unicode")],
)
def test_configs(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        write(tmp_path / "b.h5", config(text))


def test_vocabulary_of_configs():
    assert config_vocab('{"vocab_size": 5}') == 5
    assert config_vocab('{"vocab_size": 5, "text_config": {"vocab_size": 7}}') == 7
    assert config_vocab('{"text_config": 3}') is None
    assert config_vocab('{"vocab_size": true}') is None
    with pytest.raises(SchemaError, match="out of range"):
        config_vocab('{"vocab_size": 0}')
    with pytest.raises(SchemaError, match="not JSON"):
        config_vocab('{"a":' * 100_000)


def test_calls_out_of_order_are_the_callers_fault(tmp_path, make):
    with BundleWriter(tmp_path / "b.h5", "golden") as writer:
        with pytest.raises(ValueError, match="config first"):
            writer.add_sequence(sequence())
        writer.add_config("{}")
        writer.add_weight("b", ints(1))
        with pytest.raises(ValueError, match="ascending"):
            writer.add_weight("a", ints(1))
        with pytest.raises(InputError, match="without sequences"):
            writer.finish(make.manifest())
        writer.add_sequence(sequence())
        with pytest.raises(ValueError, match="itself adds 'datasets'"):
            writer.finish(make.manifest(datasets={}))
        writer.finish(make.manifest())
        with pytest.raises(ValueError, match="not open"):
            writer.add_sequence(sequence(id="b"))
    with pytest.raises(ValueError, match="kind"):
        BundleWriter(tmp_path / "c.h5", "silver")


BAD_MANIFESTS = {
    "no producer": (lambda m: m.pop("producer"), "lacks 'producer'"),
    "version is a number": (lambda m: m["producer"].update(version=1), "'producer/version' must be text"),
    "contract is true": (lambda m: m.update(contract_version=True), "'contract_version' must be an integer"),
    "short digest": (lambda m: m["model"].update(config_sha256="00"), "'model/config_sha256' must be 64"),
    "upper-case digest": (lambda m: m["model"].update(config_sha256="A" * 64), "'model/config_sha256' must be 64"),
    "weights is a list": (lambda m: m["model"].update(weights=[]), "'model/weights' must be an object"),
    "a weight without digest": (lambda m: m["model"].update(weights={"a": None}), "'model/weights'"),
    "decoding is text": (lambda m: m.update(decoding="ar"), "'decoding' must be an object"),
    "stop id is text": (lambda m: m["decoding"].update(stop_ids=["1"]), "'decoding/stop_ids' must be a list"),
    "no mode": (lambda m: m["decoding"].pop("mode"), "lacks 'decoding/mode'"),
    "unknown logits": (lambda m: m.update(logits="top:0"), "'top:0' is not full"),
    "run is a list": (lambda m: m.update(run=[]), "'run' must be an object"),
    "batch is a float": (lambda m: m.update(run={"batch": 1.0}), "'run/batch' must be an integer"),
    "kind": (lambda m: m.update(kind="silver"), "kind 'silver'"),
    "newer schema": (lambda m: m.update(schema="kdtr/9"), "'kdtr/9', not 'kdtr/1'"),
    "sequence without id": (lambda m: m["sequences"][0].pop("id"), "must give id"),
    "sequence with more": (lambda m: m["sequences"][0].update(x=1), "must give id"),
    "same id twice": (lambda m: m["sequences"][1].update(id="a"), "same id 'a'"),
    "bad stream": (lambda m: m["sequences"][1].update(stream=1.5), "stream 1.5"),
    "entry without dtype": (lambda m: m["datasets"]["x"].pop("dtype"), "entry for x"),
    "entry with a list for dtype": (lambda m: m["datasets"]["x"].update(dtype=[]), "entry for x"),
    "unknown dtype": (lambda m: m["datasets"]["x"].update(dtype="complex64"), "entry for x"),
    "negative shape": (lambda m: m["datasets"]["x"].update(shape=[-1]), "entry for x"),
    "true shape": (lambda m: m["datasets"]["x"].update(shape=[True]), "entry for x"),
}


def whole_manifest(make) -> dict:
    return make.manifest(
        schema="kdtr/1",
        kind="run",
        sequences=[{"id": name, "stream": 0, "finish_reason": "stop"} for name in "ab"],
        datasets={"x": {"sha256": "0" * 64, "dtype": "int32", "shape": [1]}},
    )


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_bad_manifests(make, case):
    change, message = BAD_MANIFESTS[case]
    manifest = whole_manifest(make)
    change(manifest)
    with pytest.raises(SchemaError, match=message):
        check_manifest(manifest)


def test_good_manifest_with_more_keys_and_unknown_digests(make):
    manifest = whole_manifest(make)
    manifest["drafter"] = {"name": "ngram"}
    manifest["model"]["weights_used_sha256"] = None
    check_manifest(manifest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a JSON object"),
        ("", "not JSON"),
        ("{} x", "not JSON"),
        ('{"a": 1, "a": 2}', "key 'a' twice"),
        ('{"b": {"a": 1, "c": 0, "a": 2}}', "key 'a' twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ('{"a": 1e999}', "1e999"),
        ('{"a":' * 17 + "1" + "}" * 17, "deeper than 16"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "deep"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
        ('{"a": "\n"}', "not JSON"),
    ],
)
def test_manifests_are_strict_json(text, message):
    with pytest.raises(SchemaError, match=message):
        decode_manifest(text.encode())


def test_manifests_are_utf8():
    with pytest.raises(SchemaError, match="not JSON"):
        decode_manifest(b'{"a": "\xff"}')


def test_manifest_bytes_do_not_depend_on_order():
    assert encode_manifest({"b": np.float32(0.5), "a": {"é": 1, "d": [np.int64(2)]}}) == (
        '{"a":{"d":[2],"é":1},"b":0.5}'.encode()
    )
    with pytest.raises(ValueError, match="JSON"):
        encode_manifest({"a": float("nan")})
    with pytest.raises(TypeError):
        encode_manifest({"a": object()})


def test_finish_refuses_what_readers_would_refuse(tmp_path, make):
    manifest = make.manifest()
    del manifest["tier"]
    with pytest.raises(InputError, match="lacks 'tier'"):
        write(tmp_path / "b.h5", config(), add(), lambda writer: writer.finish(manifest))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "size"), [("1000", 1000), ("3K", 3072), ("2T", 2 << 40), ("", 16 << 30)])
def test_limit_from_the_environment(monkeypatch, text, size):
    monkeypatch.setenv("KDTR_BUNDLE_MAX_BYTES", text)
    assert limits_from_environment().dataset_bytes == size


@pytest.mark.parametrize("text", ["-1", "10GB", "many", "1.5G", "9" * 40])
def test_bad_limit_in_the_environment(monkeypatch, text):
    monkeypatch.setenv("KDTR_BUNDLE_MAX_BYTES", text)
    with pytest.raises(InputError, match="KDTR_BUNDLE_MAX_BYTES"):
        limits_from_environment()


def test_rules_of_paths():
    assert array_rule("golden", "logits/exact") == (("float32",), ("T", "V"))
    assert array_rule("run", "logits/engine_top_values") == (("float32",), ("T", "K:logits/engine"))
    for path in [
        "logits/engine",
        "logits",
        "logits/exact/x",
        "logits/exact_top",
        "logits/exact_sha256_sha256",
        "trace",
    ]:
        assert array_rule("golden", path) is None
    assert array_rule("golden", "trace/final_norm") == (("float32", "float64"), ("S", "H"))
    for path in ["logits/exact", "rounds/x", "", "trace/x", "trace/model.layers.01.hidden", "trace/embed/x"]:
        assert array_rule("run", path) is None


def test_rounds_of_a_ddtree_golden():
    """The shapes of design: R=2 rounds, N=3 nodes, Q=N+R, A accepted, L=4 levels, K=5 kept."""
    flat = dict.fromkeys(("start", "root", "bonus", "n_nodes", "n_accepted"), ("int32", (2,)))
    flat |= dict.fromkeys(("tokens", "parents", "depths"), ("int32", (3,)))
    flat |= {"scores": ("float64", (3,)), "accepted": ("int32", (4,)), "posterior": ("int32", (5,))}
    flat |= {"draft_top_ids": ("int32", (2, 4, 5)), "draft_top_logps": ("float32", (2, 4, 5))}
    flat |= {"cache_digest": ("uint8", (2, 32))}
    shapes = {"prompt": ("int32", (1,)), "tokens": ("int32", (4,))} | {f"rounds/{k}": v for k, v in flat.items()}
    assert check_shapes("golden", "s", shapes, 9) == 9
    for name, (dtype, shape) in flat.items():
        wrong = shapes | {f"rounds/{name}": (dtype, (*shape[:-1], shape[-1] + 1))}
        if name != "accepted":  # its length is known from values only
            with pytest.raises(SchemaError):
                check_shapes("golden", "s", wrong, 9)


def test_names_of_sequences():
    assert sequence_name(0) == "000000"
    assert sequence_name(999_999) == "999999"
    with pytest.raises(SchemaError, match="at most"):
        sequence_name(1_000_000)


def test_ids_may_be_any_script():
    for text in ["0", "prompt 1", "数学", "α/β", "🙂", "a'b\"c", "é" * 128]:
        check_id(text)

"""sweep.json and the look at a shard: what is written comes back, what is wrong is told."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kdtr_cli.bundle.integrity import array_sha256
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.sweep import (
    Shard,
    Sweep,
    check_shard,
    cut,
    difference,
    is_own,
    is_sweep,
    is_temporary,
    prompts_sha256,
    read_sweep,
    shared_manifest,
    write_sweep,
)
from kdtr_cli.bundle.writer import BundleWriter
from kdtr_cli.errors import InputError

pytestmark = pytest.mark.quick

CONFIG = '{"vocab_size": 11}'
PROMPTS = [np.array([1, 2, 3], np.int32), np.array([4], np.int32), np.array([5, 6], np.int32)]


def manifest(kind="golden", **model) -> dict:
    made = {
        "producer": {"name": "kdtr", "version": "0"},
        "contract_version": 1,
        "model": {"config_sha256": "a" * 64, "embedded": True, **model},
        "choices": {},
        "decoding": {
            "mode": "ar",
            "temperature": 0.5,
            "seed": 0,
            "steps": 2,
            "ignore_eos": False,
            "stop_ids": [2],
            "teacher_forced": False,
        },
        "arithmetic": ["exact"],
        "tier": "exact",
        "logits": "full",
    }
    if kind == "run":
        made["model"]["embedded"] = False
        made["run"] = {"device": "cpu", "golden_manifest_sha256": "b" * 64, "statistics": {"passes": 3}}
    return made


def plan(kind="golden") -> Sweep:
    prompts = [(f"s{i}", i, array_sha256(prompt)) for i, prompt in enumerate(PROMPTS)]
    shards = cut(prompts, 2)
    if kind == "run":
        shards = tuple(replace(shard, golden="b" * 64) for shard in shards)
    return Sweep(kind, shared_manifest(manifest(kind)), shards)


def write_shard(path, indices, kind="golden", prompts=PROMPTS, about=None) -> None:
    about = about or manifest(kind)
    if kind == "golden" and indices[0]:
        about["model"]["embedded"] = False
    with BundleWriter(path, kind) as writer:
        writer.add_config(CONFIG)
        for i in indices:
            writer.add_sequence(SequenceData(f"s{i}", i, prompts[i], np.array([1, 2], np.int32), "length"))
        writer.finish(about)


@pytest.fixture
def folder(tmp_path):
    sweep = plan()
    write_sweep(tmp_path, sweep)
    write_shard(tmp_path / "shard-000000.h5", [0, 1])
    write_shard(tmp_path / "shard-000001.h5", [2])
    return tmp_path


class TestPlan:
    def test_it_comes_back_as_it_was(self, tmp_path):
        for kind in ("golden", "run"):
            write_sweep(tmp_path, plan(kind))
            found = read_sweep(tmp_path)
            assert found.text() == plan(kind).text()
            assert (found.kind, found.shards, found.sequences) == (kind, plan(kind).shards, 3)
        assert [p.name for p in tmp_path.iterdir()] == ["sweep.json"]

    def test_the_text_is_the_same_for_numbers_of_numpy(self):
        sweep = plan()
        other = json.loads(json.dumps(sweep.manifest))
        other["decoding"]["steps"] = np.int64(2)
        assert Sweep("golden", other, sweep.shards).text() == sweep.text()

    @pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
    @pytest.mark.parametrize("size", [1, 2, 3, 7])
    def test_a_cut_covers_all_in_order(self, count, size):
        prompts = [(str(i), i, "0" * 64) for i in range(count)]
        shards = cut(iter(prompts), size)
        covered = [i for s in shards for i in range(s.first, s.first + s.count)]
        assert covered == list(range(count))
        assert [s.count for s in shards[:-1]] == [size] * (len(shards) - 1)
        assert [s.prompts_sha256 for s in shards] == [
            prompts_sha256(prompts[s.first : s.first + s.count]) for s in shards
        ]

    def test_a_digest_knows_ids_streams_prompts_and_their_order(self):
        one, two = ("a", 0, "0" * 64), ("b", 1, "1" * 64)
        others = [
            [one, two],
            [two, one],
            [one],
            [one, ("b", 2, "1" * 64)],
            [one, ("c", 1, "1" * 64)],
            [one, ("b", 1, "2" * 64)],
        ]
        assert len({prompts_sha256(o) for o in others}) == len(others)

    def test_names(self, tmp_path):
        assert Shard(3, 0, 1, "").name == "shard-000003.h5"
        assert is_own("shard-000003.h5")
        assert is_own("sweep.json")
        assert is_own(".shard-000003.h5.0123abcd.partial")
        assert is_temporary(".sweep.json.0123abcd.partial")
        for name in (
            "notes.txt",
            "shard-3.h5",
            "shard-000003.h5.bak",
            ".x.0123abcd.partial",
            "shard-000003.h5.partial",
        ):
            assert not is_own(name)
        assert not is_temporary("shard-000003.h5")
        assert is_sweep("new/")
        assert is_sweep(tmp_path)
        assert not is_sweep(tmp_path / "g.h5")


DAMAGE = [
    (lambda d: d.update(schema="kdtr.sweep/2"), "its schema is 'kdtr.sweep/2'"),
    (lambda d: d.update(kind="both"), "its kind is 'both'"),
    (lambda d: d.pop("manifest"), "lacks the shards' common manifest"),
    (lambda d: d.update(shards=[]), "lists no shards"),
    (lambda d: d.update(sequences=4), "hold 3 sequences, and it says 4"),
    (lambda d: d["shards"][1].update(first=1), "shard 1 begins at sequence 1, not 2"),
    (lambda d: d["shards"][1].update(count=0), "shard 1 has no proper first and count"),
    (lambda d: d["shards"][1].update(count=True), "shard 1 has no proper first and count"),
    (lambda d: d["shards"][0].update(prompts_sha256="x"), "prompts_sha256 is no SHA-256"),
    (lambda d: d["shards"][0].update(more=1), "shard 0 must have count, first, prompts_sha256"),
    (lambda d: d["shards"].__setitem__(0, 7), "shard 0 must have"),
]


class TestDamage:
    @pytest.mark.parametrize(("change", "said"), DAMAGE)
    def test_a_wrong_plan_is_one_line(self, folder, change, said):
        document = json.loads((folder / "sweep.json").read_text())
        change(document)
        (folder / "sweep.json").write_text(json.dumps(document))
        with pytest.raises(InputError) as error:
            read_sweep(folder)
        assert said in str(error.value)
        assert str(error.value).startswith(f"{folder}/sweep.json: damaged: ")

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"a": NaN}', '{"a": 1, "a": 1}', "\xff"])
    def test_what_is_no_plan(self, folder, text):
        (folder / "sweep.json").write_text(text, encoding="latin-1")
        with pytest.raises(InputError, match=r"sweep\.json: damaged: "):
            read_sweep(folder)

    def test_no_plan_and_no_directory(self, tmp_path):
        with pytest.raises(InputError, match=r"no sweep in it \(it has no sweep\.json\)"):
            read_sweep(tmp_path)
        with pytest.raises(InputError, match="no such directory"):
            read_sweep(tmp_path / "no")


class TestShard:
    def test_the_right_ones(self, folder):
        sweep = read_sweep(folder)
        for shard in sweep.shards:
            held = check_shard(folder, sweep, shard)
            assert len(held["sequences"]) == shard.count
        (folder / "shard-000001.h5").unlink()
        assert check_shard(folder, sweep, sweep.shards[1]) is None

    @pytest.mark.parametrize(
        ("shard", "said"),
        [
            (lambda path: write_shard(path, [1]), "it has other prompts"),
            (lambda path: write_shard(path, [1, 2]), "it has 2 sequences, not 1"),
            (lambda path: write_shard(path, [2], prompts=PROMPTS[::-1]), "it has other prompts"),
            (lambda path: write_shard(path, [2], "run"), "it is a run, not a golden"),
            (
                lambda path: write_shard(path, [2], about=manifest(weights_used_sha256="c" * 64)),
                "model.weights_used_sha256 is there, and should not be",
            ),
            (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + b"\0" * 900), "damaged bundle"),
            (lambda path: path.write_bytes(b""), "the file is empty"),
        ],
    )
    def test_another_file_under_its_name(self, folder, shard, said):
        path = folder / "shard-000001.h5"
        path.unlink()
        shard(path)
        sweep = read_sweep(folder)
        with pytest.raises(InputError) as error:
            check_shard(folder, sweep, sweep.shards[1])
        assert said in str(error.value)
        assert str(error.value).startswith(str(path))

    def test_weights_in_the_first_shard_only(self, folder):
        sweep = read_sweep(folder)
        assert sweep.expected(sweep.shards[0])["model"]["embedded"] is True
        assert sweep.expected(sweep.shards[1])["model"]["embedded"] is False

    def test_a_run_belongs_to_its_golden_whatever_it_cost(self, tmp_path):
        sweep = plan("run")
        about = manifest("run")
        about["run"]["statistics"] = {"passes": 99}
        write_shard(tmp_path / "shard-000000.h5", [0, 1], "run", about=about)
        assert check_shard(tmp_path, sweep, sweep.shards[0]) is not None
        about["run"]["golden_manifest_sha256"] = "d" * 64
        (tmp_path / "shard-000000.h5").unlink()
        write_shard(tmp_path / "shard-000000.h5", [0, 1], "run", about=about)
        with pytest.raises(InputError, match="run from another golden"):
            check_shard(tmp_path, sweep, sweep.shards[0])


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [
        ({"a": {"b": 8}}, {"a": {"b": 16}}, "a.b is 8, not 16"),
        ({"a": 1}, {"a": True}, "a is 1, not true"),
        ({"a": 1}, {"a": 1.0}, "a is 1, not 1.0"),
        ({}, {"a": 1}, "a is missing"),
        ({"a": 1}, {}, "a is there, and should not be"),
        ({"a": [1, 2]}, {"a": [2, 1]}, "a is [1, 2], not [2, 1]"),
        ({"a": [1, 2]}, {"a": [1, 2]}, None),
        ({"a": "x" * 99}, {"a": None}, 'a is "' + "x" * 23 + "…, not null"),
    ],
)
def test_the_first_difference_is_named(found, wanted, said):
    assert difference(found, wanted) == said

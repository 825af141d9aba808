"""Sweeps of goldens: the same content as in one piece, whatever stopped them, and nothing of others touched."""

import fcntl
import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.bundle.sweep import check_shard, read_sweep
from kdtr_cli.errors import DeviceError, InputError
from kdtr_cli.model.presets import write_model
from kdtr_cli.model.prompts import Prompt
from kdtr_cli.workflows import sweep as module
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.golden_rounds import DraftOptions
from kdtr_cli.workflows.inspect import describe_sweep, find_shard
from kdtr_cli.workflows.merge import merge_sweep
from kdtr_cli.workflows.prompts import PromptOptions
from kdtr_cli.workflows.sweep import SweepOptions, publish_shard
from kdtr_cli.workflows.sweep_golden import make_golden_shard, make_golden_sweep
from kdtr_cli.workflows.verify import verify_bundle, verify_sweep

pytestmark = pytest.mark.quick

SEVEN = PromptOptions(count=7, length=3)


@pytest.fixture(scope="module", autouse=True)
def threads():
    """Work in threads of this process: the same interface, and no start of processes. (The command line's tests use
    processes, Dask and MPI.)"""
    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patched:

        @contextmanager
        def opened(spec, jobs):
            yield pool, jobs or 1

        patched.setattr(module, "open_executor", opened)
        yield


def make(folder: Path, prompts=SEVEN, size=3, jobs=1, steps=2, model="tiny", progress=lambda *_: None, **options):
    asked = GoldenOptions(model, folder, prompts, steps, **options)
    return make_golden_sweep(asked, SweepOptions(size, jobs), progress)


def files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The golden of the seven prompts in one piece."""
    path = tmp_path_factory.mktemp("whole") / "g.h5"
    make_golden(GoldenOptions("tiny", path, SEVEN, 2))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, threads) -> Path:
    """A finished sweep that tests copy."""
    folder = tmp_path_factory.mktemp("finished") / "d"
    make(folder)
    return folder


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "d"))


class TestWhole:
    @pytest.mark.parametrize(("size", "jobs"), [(1, 3), (3, 1), (256, 2)])
    def test_merged_it_is_the_file_made_in_one_piece(self, tmp_path, whole, size, jobs):
        summary = make(tmp_path / "d", size=size, jobs=jobs)
        assert (summary.tokens, summary.found) == (14, 0)
        assert len(summary.sweep.shards) == -(-7 // size)
        merge_sweep(tmp_path / "d", tmp_path / "m.h5", False)
        assert (tmp_path / "m.h5").read_bytes() == whole.read_bytes()

    @pytest.mark.parametrize(
        "options",
        [
            {"logits": "top:5", "score": True, "bf16": True},
            {"logits": "digest", "embed_weights": False},
            {"temperature": 0.8, "ignore_eos": True},
            {"drafting": DraftOptions("ddtree", "ngram", 4)},
        ],
        ids=str,
    )
    def test_with_every_kind_of_content(self, tmp_path, options):
        prompts = PromptOptions(ids=("1 2 3",), count=2, length=2, seed=5)
        make(tmp_path / "d", prompts, size=2, steps=2, **options)
        make_golden(GoldenOptions("tiny", tmp_path / "g.h5", prompts, 2, **options))
        merge_sweep(tmp_path / "d", tmp_path / "m.h5", False)
        assert (tmp_path / "m.h5").read_bytes() == (tmp_path / "g.h5").read_bytes()

    def test_float64_alone_needs_the_groups_of_the_whole(self, tmp_path):
        with pytest.raises(InputError, match="--shard-size 33: with --no-exact a multiple of 32"):
            make(tmp_path / "d", size=33, exact=False)
        prompts = PromptOptions(count=34, length=1)
        make(tmp_path / "d", prompts, size=32, exact=False, bf16=True)
        make_golden(GoldenOptions("tiny", tmp_path / "g.h5", prompts, 2, exact=False, bf16=True))
        merge_sweep(tmp_path / "d", tmp_path / "m.h5", False)
        assert (tmp_path / "m.h5").read_bytes() == (tmp_path / "g.h5").read_bytes()

    def test_every_shard_is_a_bundle_of_its_own_and_the_first_holds_the_weights(self, finished):
        for shard in read_sweep(finished).shards:
            assert verify_bundle(finished / shard.name).ok
            with open_bundle(finished / shard.name) as bundle:
                assert bool(bundle.weight_names()) == (shard.index == 0)
                assert [s.id for s in bundle.sequences] == [str(shard.first + i) for i in range(shard.count)]
                assert [s.stream for s in bundle.sequences] == [shard.first + i for i in range(shard.count)]
        assert verify_sweep(finished).ok

    def test_a_model_folder_and_prompts_from_a_file_named_from_where_the_command_stands(self, tmp_path, monkeypatch):
        write_model(tmp_path / "m", "tiny")
        (tmp_path / "p.jsonl").write_text("".join(f'{{"id": "q{i}", "ids": [{i + 1}, 7]}}\n' for i in range(5)))
        monkeypatch.chdir(tmp_path)
        make(Path("d"), PromptOptions(file=Path("p.jsonl")), size=2, model="m")
        monkeypatch.chdir("/")
        with open_bundle(tmp_path / "d" / "shard-000002.h5") as bundle:
            assert [s.id for s in bundle.sequences] == ["q4"]

    def test_progress_counts_sequences(self, tmp_path):
        told = []
        make(tmp_path / "d", progress=lambda what, done, total: told.append((what, done, total)))
        assert [done for _, done, _ in told][::3] == [0, 7]
        assert sorted(told) == told
        assert {(what, total) for what, _, total in told} == {("golden", 7)}
        told.clear()
        make(tmp_path / "d", progress=lambda what, done, total: told.append((what, done, total)))
        assert told == [("golden", 7, 7)]


class TestResume:
    def test_what_is_there_stays_and_what_is_missing_is_made(self, copy, finished):
        (copy / "shard-000001.h5").unlink()
        kept = {name: os.stat(copy / name).st_mtime_ns for name in os.listdir(copy)}
        summary = make(copy)
        assert (summary.found, summary.tokens, len(summary.results)) == (2, 14, 1)
        assert files(copy) == files(finished)
        assert {name: os.stat(copy / name).st_mtime_ns for name in kept} == kept

    def test_a_finished_one_is_looked_at_and_left_alone(self, copy, finished, monkeypatch):
        monkeypatch.setattr(module, "open_executor", None)
        summary = make(copy)
        assert (summary.found, summary.tokens, summary.results) == (3, 14, [])
        assert files(copy) == files(finished)

    def test_the_number_of_jobs_is_no_option_of_the_content(self, copy, finished):
        (copy / "shard-000000.h5").unlink()
        make(copy, jobs=2)
        assert files(copy) == files(finished)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"steps": 3}, "decoding.steps is 2, not 3"),
            ({"prompts": replace(SEVEN, seed=1)}, "decoding.seed is 0, not 1"),
            ({"prompts": replace(SEVEN, length=4)}, "model.rope_positions is 4, not 5"),
            ({"prompts": replace(SEVEN, count=8)}, "it has 7 prompts, not 8"),
            ({"prompts": PromptOptions(ids=("1 2 3",) * 7)}, "its prompts 0 to 2 are others"),
            ({"size": 4}, "its shards have 3 sequences (--shard-size), not 4"),
            ({"logits": "digest"}, 'logits is "full", not "digest"'),
            ({"embed_weights": False}, "model.embedded is true, not false"),
            ({"model": "odd"}, "decoding.stop_ids is [511], not [256]"),
            ({"temperature": 0.5}, "decoding.temperature is 0.0, not 0.5"),
        ],
        ids=str,
    )
    def test_another_sweep_is_refused_by_what_differs(self, copy, finished, change, said):
        with pytest.raises(InputError) as error:
            make(copy, **change)
        assert f"{copy} holds another sweep: {said}" in str(error.value)
        assert "--force" in str(error.value)
        assert files(copy) == files(finished)

    def test_force_makes_all_anew_and_deletes_nothing_of_others(self, copy):
        (copy / "notes.txt").write_text("mine")
        (copy / "shard-000007.h5").write_bytes(b"an old one")
        summary = make(copy, steps=3, force=True)
        assert (summary.found, summary.tokens) == (0, 21)
        assert sorted(os.listdir(copy)) == [
            "notes.txt",
            "shard-000000.h5",
            "shard-000001.h5",
            "shard-000002.h5",
            "sweep.json",
        ]

    def test_force_that_is_interrupted_leaves_an_unfinished_old_sweep(self, copy, monkeypatch, finished):
        monkeypatch.setattr(module, "write_sweep", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make(copy, steps=3, force=True)
        monkeypatch.undo()
        assert os.listdir(copy) == ["sweep.json"]
        assert read_sweep(copy).text() == read_sweep(finished).text()

    def test_what_killed_runs_left_is_cleared_away(self, copy, finished):
        (copy / "shard-000002.h5").unlink()
        for name in (".shard-000002.h5.0123abcd.partial", ".sweep.json.89abcdef.partial"):
            (copy / name).write_bytes(b"half")
        make(copy)
        assert files(copy) == files(finished)

    def test_only_leftovers_are_an_empty_directory(self, tmp_path, finished):
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / ".sweep.json.89abcdef.partial").write_bytes(b"half")
        make(tmp_path / "d")
        assert files(tmp_path / "d") == files(finished)


class TestRefusals:
    def test_a_directory_of_something_else(self, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(InputError, match=r"holds notes\.txt and no sweep\.json"):
            make(tmp_path)
        assert os.listdir(tmp_path) == ["notes.txt"]

    def test_a_file_and_a_place_that_is_not_there(self, tmp_path):
        (tmp_path / "f").write_text("")
        with pytest.raises(InputError, match="is a file, not a directory"):
            make(tmp_path / "f")
        with pytest.raises(InputError, match="does not exist; create it first"):
            make(tmp_path / "no" / "d")

    def test_wrong_prompts_leave_no_directory(self, tmp_path):
        with pytest.raises(InputError, match="outside the vocabulary"):
            make(tmp_path / "d", PromptOptions(ids=("1 2 999",)))
        assert not (tmp_path / "d").exists()

    def test_a_damaged_shard_and_one_of_another_sweep_are_kept(self, copy):
        path = copy / "shard-000001.h5"
        path.write_bytes(path.read_bytes()[:-500])
        held = files(copy)
        with pytest.raises(InputError, match=r"shard-000001\.h5: .*; delete this file to have it made again"):
            make(copy)
        assert files(copy) == held
        shutil.copy(copy / "shard-000000.h5", path)
        with pytest.raises(InputError, match=r"shard-000001\.h5 is not of this sweep: model\.embedded is true"):
            make(copy)

    def test_two_at_once(self, copy):
        handle = os.open(copy, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            with pytest.raises(InputError, match="another kdtr is writing this sweep"):
                make(copy)
        finally:
            os.close(handle)
        make(copy)

    def test_without_locks_nobody_elses_files_are_cleared_away(self, copy, monkeypatch):
        def no_locks(*_):
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(fcntl, "flock", no_locks)
        (copy / "shard-000002.h5").unlink()
        (copy / ".shard-000002.h5.0123abcd.partial").write_bytes(b"somebody's")
        assert make(copy).found == 2
        assert (copy / ".shard-000002.h5.0123abcd.partial").exists()

    def test_a_worker_that_sees_another_directory(self, copy):
        sweep = read_sweep(copy)
        there = module._There(make_golden_shard, copy, "0" * 64)
        with pytest.raises(InputError, match=r"a worker on .* sees another sweep in this directory"):
            there((sweep.shards[0], None))
        there = module._There(make_golden_shard, copy / "no", sweep.sha256())
        with pytest.raises(InputError, match="does not see this directory; workers on several machines need one file"):
            there((sweep.shards[0], None))

    def test_a_worker_that_writes_elsewhere(self, tmp_path, monkeypatch):
        monkeypatch.setattr("kdtr_cli.workflows.sweep_golden.publish_shard", lambda *_: None)
        with pytest.raises(DeviceError, match=r"shard-00000[01]\.h5: a worker wrote it, and it is not here"):
            make(tmp_path / "d")

    def test_a_worker_with_another_model(self, copy):
        sweep = read_sweep(copy)
        options = GoldenOptions("tiny", Path(), PromptOptions(), 3)
        with pytest.raises(InputError, match=r"has another kdtr or another model: decoding\.steps is 3, not 2"):
            make_golden_shard(copy, sweep, sweep.shards[0], (options, [Prompt("0", np.array([1]), 0)]))

    def test_the_same_shard_twice_is_one_and_another_in_its_place_an_error(self, copy):
        sweep = read_sweep(copy)

        def exists(path):
            raise InputError(f"{path} exists")

        assert publish_shard(copy, sweep, sweep.shards[0], None) is None
        whole = (copy / "shard-000000.h5").rename(copy / "whole")

        def meanwhile(path):
            whole.rename(path)
            exists(path)

        assert publish_shard(copy, sweep, sweep.shards[0], meanwhile) is None
        shutil.copy(copy / "shard-000001.h5", copy / "shard-000000.h5")
        with pytest.raises(InputError, match="exists"):
            publish_shard(copy, sweep, sweep.shards[0], exists)


class TestMerge:
    def test_an_unfinished_sweep(self, copy, tmp_path):
        (copy / "shard-000001.h5").unlink()
        with pytest.raises(InputError, match=r"incomplete: 1 of 3 shards are missing, the first is shard-000001\.h5"):
            merge_sweep(copy, tmp_path / "m.h5", False)
        assert not (tmp_path / "m.h5").exists()

    def test_a_damaged_array(self, copy, tmp_path):
        path = copy / "shard-000002.h5"
        with open_bundle(path) as bundle:
            row = bundle.sequences[0].array("logits/exact")[0].tobytes()
        data = bytearray(path.read_bytes())
        data[data.index(row)] ^= 1
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"shard-000002\.h5: .* does not match its digest"):
            merge_sweep(copy, tmp_path / "m.h5", False)
        assert sorted(os.listdir(tmp_path)) == ["d"]
        assert not verify_sweep(copy).ok

    def test_an_output_that_is_there(self, copy, tmp_path):
        (tmp_path / "m.h5").write_text("mine")
        with pytest.raises(InputError, match="exists; use --force"):
            merge_sweep(copy, tmp_path / "m.h5", False)
        assert merge_sweep(copy, tmp_path / "m.h5", True).sequences == 7


class TestLook:
    def test_inspect_says_what_is_there(self, copy):
        assert describe_sweep(copy)["complete"]
        (copy / "shard-000001.h5").unlink()
        document = describe_sweep(copy)
        assert not document["complete"]
        assert (document["sequences"], document["sequences_made"]) == (7, 4)
        assert document["shards"][1] == {"name": "shard-000001.h5", "first": 3, "count": 3, "file_bytes": None}

    def test_a_sequence_is_found_in_its_shard(self, copy):
        assert find_shard(copy, "5") == copy / "shard-000001.h5"
        assert find_shard(copy, None) == copy / "shard-000000.h5"
        with pytest.raises(InputError, match="no sequence '9' in any of its 3 shards"):
            find_shard(copy, "9")

    def test_verify_names_all_that_is_wrong(self, copy):
        assert verify_sweep(copy).sequences == 7
        (copy / "shard-000001.h5").unlink()
        (copy / "shard-000002.h5").write_bytes(b"no bundle")
        problems = verify_sweep(copy).problems
        assert "1 of 3 shards are missing, first shard-000001.h5" in problems[0]
        assert "shard-000002.h5" in problems[1]
        assert not verify_sweep(copy / "no").ok

    def test_a_look_costs_no_data(self, copy, monkeypatch):
        monkeypatch.setattr("kdtr_cli.bundle.reader.Bundle.array", None)
        sweep = read_sweep(copy)
        assert all(check_shard(copy, sweep, shard) for shard in sweep.shards)

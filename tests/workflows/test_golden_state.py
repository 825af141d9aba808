"""A golden in bounded memory that was stopped goes on where it was, and ends in the same bytes."""

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kdtr_cli.cli.failures import explain
from kdtr_cli.errors import InputError
from kdtr_cli.model.presets import write_model
from kdtr_cli.workflows import golden as workflow
from kdtr_cli.workflows import golden_memory, golden_state
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.golden_state import SavedWork
from kdtr_cli.workflows.prompts import PromptOptions

PROMPTS = PromptOptions(ids=("1 2 3", "7 8", "5 6 7 8 9 10", "4"))
ENOUGH = 10**12  # whatever the test process itself has


class Stop(Exception):
    pass


def at_every_step(patch) -> None:
    """Every state is saved, two sequences a group."""
    patch(golden_state, "_LEAST_SECONDS", 0.0)
    patch(golden_state, "_SHARE", 0)
    real = golden_memory.make_budget

    def two(*args, **options):
        budget, prompts = real(*args, **options), args[2]
        return golden_memory.Budget([prompts[:2], prompts[2:]], budget.weights_limit, budget.working)

    patch(workflow, "make_budget", two)


@pytest.fixture(autouse=True)
def _saved_often(monkeypatch):
    at_every_step(monkeypatch.setattr)


def options(path: Path, **more) -> GoldenOptions:
    return GoldenOptions("tiny", path, PROMPTS, 3, memory_limit=ENOUGH, score=True, bf16=True, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "g.h5"
    make_golden(GoldenOptions("tiny", path, PROMPTS, 3, score=True, bf16=True))
    return path.read_bytes()


@pytest.mark.quick
class TestGoingOn:
    def stopped(self, path: Path, after: int) -> list[str]:
        """Run until ``after`` steps of progress are told; what was told."""
        told = []

        def tell(what, done, total):
            told.append(what)
            if len(told) == after:
                raise Stop

        with pytest.raises(Stop):
            make_golden(options(path), tell)
        assert not path.exists()
        return told

    def test_an_undisturbed_one_is_the_golden_without_a_limit(self, tmp_path, whole):
        make_golden(options(tmp_path / "g.h5"))
        assert (tmp_path / "g.h5").read_bytes() == whole
        assert [p.name for p in tmp_path.iterdir()] == ["g.h5"]

    def test_wherever_it_stops_the_bytes_are_the_same(self, tmp_path, whole):
        steps = []
        make_golden(options(tmp_path / "count.h5"), lambda what, done, total: steps.append(what))
        digests = steps.count("digests")
        assert len(steps) - digests > 20
        for after in range(digests, len(steps), 3):
            path = tmp_path / f"{after}.h5"
            self.stopped(path, after)
            told = []
            summary = make_golden(options(path), lambda what, done, total, told=told: told.append(what))
            assert path.read_bytes() == whole
            assert [len(r.tokens) for _, r in summary.sequences] == [3] * 4
            assert told[0].startswith("going on from")
            # no more than the layer under way is done twice
            again = [what for what in told if what != "digests" and not what.startswith("going on")]
            assert len(again) <= len(steps) - after + 1

    def test_a_trace_goes_on_too(self, tmp_path):
        steps = []
        traced = replace(options(tmp_path / "whole.h5"), trace="full")
        make_golden(traced, lambda what, done, total: steps.append(what))
        for after in (len(steps) // 4, len(steps) - 3):
            path = tmp_path / f"{after}.h5"
            told = []

            def tell(what, done, total, told=told, after=after):
                told.append(what)
                if len(told) == after:
                    raise Stop

            with pytest.raises(Stop):
                make_golden(replace(traced, output=path), tell)
            make_golden(replace(traced, output=path))
            assert path.read_bytes() == (tmp_path / "whole.h5").read_bytes()

    def test_a_summary_of_saved_groups_is_the_same(self, tmp_path):
        steps = []
        plain = make_golden(options(tmp_path / "a.h5"), lambda what, done, total: steps.append(what))
        self.stopped(tmp_path / "b.h5", len(steps) - 2)  # in the second group
        again = make_golden(options(tmp_path / "b.h5"))
        assert (again.floors, again.ties) == (plain.floors, plain.ties)

    def test_a_killed_process_loses_little(self, tmp_path, whole):
        path = tmp_path / "g.h5"
        code = (
            "import sys; from pathlib import Path; from tests.workflows.test_golden_state import *\n"
            "at_every_step(setattr); make_golden(options(Path(sys.argv[1])))"
        )
        child = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=Path(__file__).parents[2])
        partial = path.with_name("g.h5.partial")
        end = time.monotonic() + 60
        while not (partial / "state.npz").exists() and child.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        child.kill()
        child.wait()
        assert not path.exists()
        told = []
        make_golden(options(path), lambda what, done, total: told.append(what))
        assert told[0].startswith("going on from")
        assert path.read_bytes() == whole
        assert [p.name for p in tmp_path.iterdir()] == ["g.h5"]


@pytest.mark.quick
class TestRefusals:
    def test_another_golden_s_work_is_not_taken(self, tmp_path):
        TestGoingOn().stopped(tmp_path / "g.h5", 220)
        other = GoldenOptions("tiny", tmp_path / "g.h5", PROMPTS, 4, memory_limit=ENOUGH)
        with pytest.raises(
            InputError, match=r"work of another golden \(another: arithmetic, logits, steps\); give the same"
        ):
            make_golden(other)
        assert (tmp_path / "g.h5.partial").is_dir()

    def test_force_starts_anew(self, tmp_path, whole):
        TestGoingOn().stopped(tmp_path / "g.h5", 220)
        told = []
        make_golden(options(tmp_path / "g.h5", force=True), lambda what, done, total: told.append(what))
        assert not told[0].startswith("going on")
        assert (tmp_path / "g.h5").read_bytes() == whole

    def test_two_at_once(self, tmp_path):
        held = SavedWork(tmp_path / "g.h5", {"a": 1}, [1], False)
        for force in (False, True):
            with pytest.raises(InputError, match="another kdtr is at work"):
                SavedWork(tmp_path / "g.h5", {"a": 1}, [1], force)
        held.close()
        SavedWork(tmp_path / "g.h5", {"a": 1}, [1], False).remove()
        assert not any(tmp_path.iterdir())

    def test_a_lock_that_was_removed_meanwhile_is_no_lock(self, tmp_path, monkeypatch):
        first = SavedWork(tmp_path / "g.h5", {"a": 1}, [1], False)
        real, opened = os.open, []

        def late(path, *args):
            handle = real(path, *args)
            if not opened:
                opened.append(handle)
                first.remove()  # between the opening and the locking of the second
            return handle

        monkeypatch.setattr(golden_state.os, "open", late)
        second = SavedWork(tmp_path / "g.h5", {"a": 1}, [1], False)
        monkeypatch.undo()
        with pytest.raises(InputError, match="another kdtr is at work"):
            SavedWork(tmp_path / "g.h5", {"a": 1}, [1], False)
        second.remove()

    @pytest.mark.parametrize("name", ["state.npz", "group-000000.npz", "digests.json", "job.json"])
    def test_a_flipped_bit_is_seen_wherever_it_is(self, tmp_path, name):
        steps = []
        make_golden(options(tmp_path / "count.h5"), lambda what, done, total: steps.append(what))
        TestGoingOn().stopped(tmp_path / "g.h5", len(steps) - 3)
        path = tmp_path / "g.h5.partial" / name
        data = path.read_bytes()
        for at in (*range(0, len(data), max(1, len(data) // 40)), len(data) - 1):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            with pytest.raises(InputError, match=r"cannot be read; --force starts anew|another golden"):
                make_golden(options(tmp_path / "g.h5"))
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(InputError, match=r"cannot be read; --force starts anew"):
            make_golden(options(tmp_path / "g.h5"))
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(InputError, match=r"cannot be read; --force starts anew"):
            make_golden(options(tmp_path / "g.h5"))
        assert not (tmp_path / "g.h5").exists()

    @pytest.mark.parametrize("force", [False, True])
    def test_a_folder_that_is_not_kdtr_s_is_left_alone(self, tmp_path, force):
        other = tmp_path / "g.h5.partial"
        (other / "photos").mkdir(parents=True)
        with pytest.raises(InputError, match="holds 'photos', which is not kdtr's"):
            make_golden(options(tmp_path / "g.h5", force=force))
        assert [path.name for path in other.iterdir()] == ["photos"]
        link, target = tmp_path / "l.h5.partial", tmp_path / "target"
        target.mkdir()
        link.symlink_to(target)
        with pytest.raises(InputError, match="in the way"):
            make_golden(options(tmp_path / "l.h5", force=force))
        assert not any(target.iterdir())

    def test_work_without_its_job_is_not_taken(self, tmp_path):
        TestGoingOn().stopped(tmp_path / "g.h5", 232)
        (tmp_path / "g.h5.partial" / "job.json").unlink()
        with pytest.raises(InputError, match=r"job\.json: is missing; --force starts anew"):
            make_golden(options(tmp_path / "g.h5"))

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "g.h5.partial").write_text("in the way")
        with pytest.raises(InputError, match=r"g\.h5\.partial: in the way"):
            make_golden(options(tmp_path / "g.h5"))

    def test_a_model_that_changed_meanwhile(self, tmp_path):
        write_model(tmp_path / "m", "tiny")
        asked = replace(options(tmp_path / "g.h5"), model=str(tmp_path / "m"))

        def stopped() -> None:
            told = []

            def tell(what, done, total):
                told.append(what)
                if what == "prompts":
                    raise Stop

            with pytest.raises(Stop):
                make_golden(asked, tell)

        stopped()
        (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
        with pytest.raises(InputError, match="another: stop ids"):
            make_golden(asked)
        write_model(tmp_path / "m", "tiny", force=True)
        with pytest.raises(InputError, match="another: weight files"):
            make_golden(asked)
        asked = replace(asked, force=True)
        stopped()
        asked = replace(asked, force=False)
        weights = tmp_path / "m" / "model.safetensors"
        was, data = weights.stat(), bytearray(weights.read_bytes())
        data[-9] ^= 1
        with open(weights, "r+b") as file:
            file.write(data)
        os.utime(weights, ns=(was.st_atime_ns, was.st_mtime_ns))
        with pytest.raises(InputError, match="another: weight files"):
            make_golden(asked)


@pytest.mark.quick
def test_groups_are_those_of_the_first_start(tmp_path, whole, monkeypatch):
    """They follow from the memory that is there, which is never twice the same."""
    path, steps = tmp_path / "g.h5", []
    make_golden(options(tmp_path / "count.h5"), lambda what, done, total: steps.append(what))
    TestGoingOn().stopped(path, len(steps) - 3)
    real = golden_memory.make_budget

    def one_by_one(*args, **more):
        budget, prompts = real(*args, **more), args[2]
        return golden_memory.Budget([[p] for p in prompts], budget.weights_limit, budget.working)

    monkeypatch.setattr(workflow, "make_budget", one_by_one)
    make_golden(options(path))
    assert path.read_bytes() == whole


@pytest.mark.quick
def test_a_stop_says_that_the_work_is_kept(tmp_path):
    def tell(what, done, total):
        if what == "float64":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        make_golden(options(tmp_path / "g.h5"), tell)
    assert stopped.value.__notes__ == ["the same command goes on where this one stopped"]
    assert explain(stopped.value)[1] == ("interrupted before the end; the same command goes on where this one stopped")
    assert make_golden(options(tmp_path / "g.h5")).resumed
    assert not make_golden(options(tmp_path / "h.h5")).resumed


@pytest.mark.quick
def test_a_refused_limit_leaves_nothing(tmp_path, monkeypatch):
    """Also where the process has grown meanwhile: the memory is looked at once."""
    sizes = iter(range(50 * 10**6, 10**12, 10**6))
    monkeypatch.setattr(golden_memory, "_resident", lambda: next(sizes))
    for limit in (10**6, *range(80 * 10**6, 100 * 10**6, 10**6)):
        with contextlib.suppress(InputError):
            make_golden(GoldenOptions("tiny", tmp_path / f"{limit}.h5", PROMPTS, 3, memory_limit=limit))
    assert not any(path.suffix == ".partial" for path in tmp_path.iterdir())

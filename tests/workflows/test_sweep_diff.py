"""Sweeps of runs and their judgement: what one piece would say, and never a pass for what is not whole."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.sweep import read_sweep, shared_manifest, write_sweep
from kdtr_cli.bundle.writer import BundleWriter
from kdtr_cli.cli.main import main
from kdtr_cli.errors import InputError
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.json import report_document
from kdtr_cli.workflows import sweep as module
from kdtr_cli.workflows.diff import diff
from kdtr_cli.workflows.golden import GoldenOptions
from kdtr_cli.workflows.golden_rounds import DraftOptions
from kdtr_cli.workflows.merge import merge_sweep
from kdtr_cli.workflows.prompts import PromptOptions
from kdtr_cli.workflows.run import RunOptions, make_run
from kdtr_cli.workflows.sweep import SweepOptions
from kdtr_cli.workflows.sweep_diff import diff_sweeps
from kdtr_cli.workflows.sweep_golden import make_golden_sweep
from kdtr_cli.workflows.sweep_run import make_run_sweep

COUNT, SIZE = 7, 3


@pytest.fixture(scope="module", autouse=True)
def threads():
    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patched:

        @contextmanager
        def opened(spec, jobs):
            yield pool, jobs or 1

        patched.setattr(module, "open_executor", opened)
        yield


def golden_sweep(folder: Path, count=COUNT, size=SIZE, **options) -> None:
    prompts = PromptOptions(count=count, length=3)
    make_golden_sweep(GoldenOptions("tiny", folder, prompts, 3, **options), SweepOptions(size))


def run_sweep(golden: Path, folder: Path, **options):
    return make_run_sweep(RunOptions(golden, folder, device="cpu", **options), SweepOptions())


@pytest.fixture(scope="module")
def pair(tmp_path_factory, threads) -> Path:
    """A folder with the sweeps g and r, and both merged."""
    folder = tmp_path_factory.mktemp("pair")
    golden_sweep(folder / "g")
    run_sweep(folder / "g", folder / "r")
    for name in ("g", "r"):
        merge_sweep(folder / name, folder / f"{name}.h5", False)
    return folder


@pytest.fixture
def copy(pair, tmp_path) -> Path:
    return Path(shutil.copytree(pair, tmp_path / "pair"))


def rewrite(path: Path, change, about=lambda manifest: None) -> None:
    """Write a bundle anew with its sequences changed: `change` gets (number, SequenceData) and may return None."""
    with open_bundle(path) as bundle:
        manifest = json.loads(json.dumps(shared_manifest(bundle.manifest) | {"run": bundle.manifest.get("run")}))
        manifest = {key: value for key, value in manifest.items() if value is not None}
        about(manifest)
        held = [
            SequenceData(s.id, s.stream, s.prompt, s.tokens, s.finish_reason, {n: s.array(n) for n in s.array_names()})
            for s in bundle.sequences
        ]
        weights = {name: bundle.weight(name) for name in bundle.weight_names()}
        kind, config = bundle.kind, bundle.config_text
    with BundleWriter(path, kind, True) as writer:
        writer.add_config(config)
        for name, array in weights.items():
            writer.add_weight(name, array)
        for number, sequence in enumerate(held):
            if (new := change(number, sequence)) is not None:
                writer.add_sequence(new)
        writer.finish(manifest)


def other_token(sequence: SequenceData, step: int) -> SequenceData:
    tokens = sequence.tokens.copy()
    tokens[step] ^= 1
    return replace(sequence, tokens=tokens)


def other_logit(sequence: SequenceData, row: int, value: float) -> SequenceData:
    logits = sequence.arrays["logits/engine"].copy()
    logits[row, 5] = value
    return replace(sequence, arrays={"logits/engine": logits})


class TestRun:
    def test_a_run_of_a_sweep_has_the_content_of_a_run_of_the_whole(self, pair, tmp_path):
        make_run(RunOptions(pair / "g.h5", tmp_path / "r.h5", device="cpu"))
        with open_bundle(tmp_path / "r.h5") as one, open_bundle(pair / "r.h5") as merged:
            assert one.manifest["datasets"] == merged.manifest["datasets"]
            assert one.manifest["sequences"] == merged.manifest["sequences"]
            assert shared_manifest(one.manifest) == shared_manifest(merged.manifest)
            assert merged.manifest["run"]["golden_manifest_sha256"] is None

    def test_it_goes_on_where_it_stopped(self, copy, pair):
        (copy / "r" / "shard-000001.h5").unlink()
        kept = (copy / "r" / "shard-000000.h5").stat().st_mtime_ns
        assert run_sweep(copy / "g", copy / "r").found == 2
        assert (copy / "r" / "shard-000000.h5").stat().st_mtime_ns == kept
        for shard in read_sweep(pair / "r").shards:
            assert (copy / "r" / shard.name).read_bytes() == (pair / "r" / shard.name).read_bytes()

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"teacher_force": True}, "decoding.teacher_forced is false, not true"),
            ({"steps": 2}, "decoding.steps is 3, not 2"),
            ({"batch": 3}, "run.batch is 8, not 3"),
            ({"mode": "ddtree"}, 'decoding.mode is "ar", not "ddtree"'),
        ],
        ids=str,
    )
    def test_other_options_are_another_sweep(self, copy, options, said):
        with pytest.raises(InputError) as error:
            run_sweep(copy / "g", copy / "r", **options)
        assert f"holds another sweep: {said}" in str(error.value)

    def test_another_golden_is_another_sweep(self, copy):
        rewrite(copy / "g" / "shard-000001.h5", lambda n, s: other_token(s, 1))
        with pytest.raises(InputError, match=r"it was run from another golden \(shard-000001\.h5\)"):
            run_sweep(copy / "g", copy / "r")

    def test_other_kernels_are_another_sweep(self, copy, monkeypatch):
        monkeypatch.setattr("kdtr_cli.workflows.run._kernels_sha256", lambda replaced: "e" * 64)
        with pytest.raises(InputError, match=r"holds another sweep: run\.kernels_sha256 is"):
            run_sweep(copy / "g", copy / "r")

    def test_what_is_no_sweep_of_goldens(self, copy, tmp_path):
        with pytest.raises(InputError, match="is a sweep of runs; a run needs goldens"):
            run_sweep(copy / "r", tmp_path / "x")
        with pytest.raises(InputError, match="is the golden itself"):
            run_sweep(copy / "g", copy / "g")
        (copy / "g" / "shard-000002.h5").unlink()
        with pytest.raises(InputError, match="incomplete: 1 of 3 shards are missing"):
            run_sweep(copy / "g", tmp_path / "x")
        assert not (tmp_path / "x").exists()

    def test_rounds_of_a_sweep(self, tmp_path):
        golden_sweep(tmp_path / "g", 3, 2, drafting=DraftOptions("ddtree", "synthetic:0.6", 4))
        run_sweep(tmp_path / "g", tmp_path / "r", mode="ddtree")
        report = diff_sweeps(tmp_path / "g", tmp_path / "r")
        assert (report.verdict, report.rounds) == (Verdict.IDENTICAL, "compared")
        assert report.totals.rounds_equal == report.totals.rounds_judged > 3


def spoil_none(folder):
    pass


def spoil_tokens(folder):
    rewrite(folder / "shard-000000.h5", lambda n, s: other_token(s, 2) if n == 1 else s)
    rewrite(folder / "shard-000002.h5", lambda n, s: other_token(s, 0))


def spoil_nan(folder):
    rewrite(folder / "shard-000001.h5", lambda n, s: other_logit(s, 1, np.nan) if n == 2 else s)


def spoil_little(folder):
    rewrite(folder / "shard-000001.h5", lambda n, s: other_logit(s, 2, s.arrays["logits/engine"][2, 5] + 1e-4))


class TestDiff:
    @pytest.mark.parametrize("spoil", [spoil_none, spoil_tokens, spoil_nan, spoil_little])
    @pytest.mark.parametrize("asked", [{}, {"atol": 1e-3}, {"steps": 2}, {"select": ("5", "1")}], ids=str)
    def test_the_report_is_that_of_the_merged_bundles(self, copy, spoil, asked):
        spoil(copy / "r")
        merge_sweep(copy / "r", copy / "r.h5", True)
        options = JudgeOptions(**asked)
        shards = report_document(diff_sweeps(copy / "g", copy / "r", options))
        whole = report_document(diff(copy / "g.h5", copy / "r.h5", options))
        for document in (shards, whole):
            for side in ("golden", "run"):
                document["totals"][side].pop("name")
                # a digest of one file is none of a sweep's
                known = document["totals"][side]["provenance"]
                document["totals"][side]["provenance"] = [p for p in known if not p[0].endswith("manifest_sha256")]
            assert bool([p for p in known if p[0] == "choices.tie_rule"])
            document["findings"] = sorted(map(json.dumps, document["findings"]))
        assert shards == whole

    def test_progress_and_names(self, pair):
        told = []
        report = diff_sweeps(pair / "g", pair / "r", progress=lambda *values: told.append(values))
        assert told == [("diff", n, 7) for n in (3, 6, 7)]
        assert (report.golden.name, report.run.name) == (str(pair / "g"), str(pair / "r"))
        assert report.verdict is Verdict.IDENTICAL

    @pytest.mark.parametrize("side", ["g", "r"])
    def test_a_missing_shard_is_never_a_pass(self, copy, side):
        (copy / side / "shard-000002.h5").unlink()
        report = diff_sweeps(copy / "g", copy / "r")
        assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)
        assert f"{copy / side}: incomplete: 1 of 3 shards are missing" in report.reason

    @pytest.mark.parametrize("side", ["g", "r"])
    def test_no_shard_at_all_is_never_a_pass(self, copy, side):
        for path in (copy / side).glob("*.h5"):
            path.unlink()
        assert diff_sweeps(copy / "g", copy / "r").verdict is Verdict.INVALID

    @pytest.mark.parametrize("side", ["g", "r"])
    @pytest.mark.parametrize("name", ["shard-000001.h5", "sweep.json"])
    def test_what_is_damaged_is_never_a_pass(self, copy, side, name):
        path = copy / side / name
        path.write_bytes(path.read_bytes()[:-40])
        report = diff_sweeps(copy / "g", copy / "r")
        assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)
        assert name in report.reason

    def test_an_array_that_is_damaged_is_never_a_pass(self, copy):
        path = copy / "r" / "shard-000001.h5"
        with open_bundle(path) as bundle:
            row = bundle.sequences[0].array("logits/engine")[0].tobytes()
        data = bytearray(path.read_bytes())
        data[data.index(row)] ^= 1
        path.write_bytes(data)
        report = diff_sweeps(copy / "g", copy / "r")
        assert report.verdict is Verdict.INVALID
        assert "does not match its digest" in report.reason
        assert (report.totals.tokens_equal, report.totals.tokens) == (0, 21)

    def test_a_shard_of_another_place_is_never_a_pass(self, copy):
        for side in ("g", "r"):
            shutil.copy(copy / side / "shard-000001.h5", copy / side / "shard-000000.h5")
        report = diff_sweeps(copy / "g", copy / "r")
        assert report.verdict is Verdict.INVALID
        assert "shard-000000.h5 is not of this sweep" in report.reason

    def test_a_sequence_that_is_left_out_is_never_a_pass(self, copy):
        rewrite(copy / "r" / "shard-000001.h5", lambda n, s: s if n else None)
        report = diff_sweeps(copy / "g", copy / "r")
        assert report.verdict is Verdict.INVALID
        assert "it has 2 sequences, not 3" in report.reason

    def test_sweeps_of_other_shards(self, copy):
        golden_sweep(copy / "g4", size=4)
        report = diff_sweeps(copy / "g4", copy / "r")
        assert report.verdict is Verdict.INVALID
        assert "cut into other shards: golden 2 shards of 7 sequences, run 3 shards of 7" in report.reason

    def test_shards_of_other_rules_in_one_sweep(self, copy):
        """A shard whose manifest is another's: the plan says what it must be."""
        rewrite(copy / "r" / "shard-000001.h5", lambda n, s: s, lambda m: m["decoding"].update(seed=9))
        report = diff_sweeps(copy / "g", copy / "r")
        assert report.verdict is Verdict.INVALID
        assert "decoding.seed is 9, not 0" in report.reason

    def test_a_plan_of_another_model(self, copy):
        sweep = read_sweep(copy / "r")
        manifest = json.loads(json.dumps(sweep.manifest))
        manifest["model"]["weights_used_sha256"] = "f" * 64
        write_sweep(copy / "r", replace(sweep, manifest=manifest))
        assert diff_sweeps(copy / "g", copy / "r").verdict is Verdict.INVALID

    @pytest.mark.parametrize(("one", "other"), [("g", "g"), ("r", "r"), ("r", "g")])
    def test_the_wrong_pair(self, pair, one, other):
        report = diff_sweeps(pair / one, pair / other)
        assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)
        assert report.findings[0].code == "kinds"

    def test_two_sequences_of_one_name(self, copy):
        sweep = read_sweep(copy / "g")
        first = copy / "g" / "shard-000000.h5"
        os.unlink(copy / "g" / "shard-000001.h5")
        shutil.copy(first, copy / "g" / "shard-000001.h5")
        manifest = {**sweep.manifest, "model": {**sweep.manifest["model"], "embedded": False}}
        rewrite(copy / "g" / "shard-000001.h5", lambda n, s: s, lambda m: m["model"].update(embedded=False))
        rewrite(first, lambda n, s: s, lambda m: m["model"].update(embedded=False))
        shards = list(sweep.shards)
        shards[1] = replace(shards[1], prompts_sha256=shards[0].prompts_sha256)
        write_sweep(copy / "g", replace(sweep, manifest=manifest, shards=tuple(shards)))
        report = diff_sweeps(copy / "g", copy / "r")
        assert report.verdict is Verdict.INVALID
        assert report.reason == "the golden has two sequences with the id '0'"

    def test_a_bundle_beside_a_sweep_and_places_that_are_not_there(self, pair):
        with pytest.raises(InputError, match="is no sweep; a sweep is judged against a sweep"):
            diff_sweeps(pair / "g", pair / "r.h5")
        with pytest.raises(InputError, match="no such directory"):
            diff_sweeps(pair / "g", pair / "no")
        with pytest.raises(InputError, match="--select '99': the golden has no such sequence; it has: 0, 1"):
            diff_sweeps(pair / "g", pair / "r", JudgeOptions(select=("99",)))


class TestFormats:
    """`kdtr diff DIR1 DIR2` in the formats for machines."""

    def told(self, capsys, folder, form):
        code = main(["diff", str(folder / "g"), str(folder / "r"), "--format", form])
        return code, capsys.readouterr().out

    def test_a_whole_sweep(self, pair, capsys):
        code, out = self.told(capsys, pair, "junit")
        suite = ElementTree.fromstring(out).find("testsuite")
        assert (code, suite.get("tests"), suite.get("failures"), suite.get("errors")) == (0, str(COUNT), "0", "0")
        assert [c.get("name") for c in suite.iter("testcase")] == [str(i) for i in range(COUNT)]
        assert {c.get("classname") for c in suite.iter("testcase")} == {"kdtr.g.ar"}
        code, out = self.told(capsys, pair, "github")
        assert (code, out.splitlines()[-1]) == (0, self.told(capsys, pair, "text")[1].splitlines()[-1])

    def test_one_that_is_not_whole(self, copy, capsys):
        os.unlink(copy / "r" / "shard-000001.h5")
        code, out = self.told(capsys, copy, "junit")
        suite = ElementTree.fromstring(out).find("testsuite")
        assert (code, suite.get("tests"), suite.get("errors")) == (2, "1", "1")
        code, out = self.told(capsys, copy, "github")
        assert code == 2
        assert out.startswith("::error title=kdtr diff%3A INVALID [sweep]::")

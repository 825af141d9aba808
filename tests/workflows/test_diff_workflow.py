"""From two files to a report: lazy reading, broken bundles, the report file."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from parity_bundles import write_bundle, write_pair
from parity_cases import golden_side, make_tie, pair, perturb, run_side

from kdtr_cli.bundle.reader import BundleSequence, open_bundle
from kdtr_cli.bundle.scan import ArrayScan
from kdtr_cli.errors import DeviceError, Exit, InputError
from kdtr_cli.parity import logits
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.measure import Measure
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.json import report_document
from kdtr_cli.workflows import diff as workflow
from kdtr_cli.workflows.diff import bundle_evidence, check_report_target, diff, write_report

pytestmark = pytest.mark.quick


class TestFromFiles:
    @pytest.mark.parametrize("forms", [("full", "full"), ("top:5", "full"), ("digest", "top:5"), ("digest", "digest")])
    @pytest.mark.parametrize("size", [0.0, 1e-4])
    def test_a_bundle_is_judged_like_the_arrays_in_it(self, tmp_path, forms, size):
        golden, run = pair(score=True)
        perturb(run, size)
        golden.one.ties = (1, 3)
        for side, form in ((golden, forms[0]), (run, forms[1])):
            for s in side.seqs:
                s.form = form
        options = JudgeOptions(atol=1e-3, allow_partial=True)
        paths = write_pair(golden, run, tmp_path)
        from_files = report_document(diff(*paths, options))
        golden.sha256 = run.manifest["run"]["golden_manifest_sha256"]
        run.sha256 = dict(from_files["totals"]["run"]["provenance"])["manifest_sha256"]
        in_memory = report_document(judge(golden.evidence(), run.evidence(), options))
        for document in (from_files, in_memory):
            document["totals"]["golden"]["name"] = document["totals"]["run"]["name"] = ""
        assert from_files == in_memory
        assert from_files["verdict"] in ("IDENTICAL", "PASS", "INCONCLUSIVE")

    def test_what_makes_a_tie_comes_through(self, tmp_path):
        golden = golden_side()
        run = run_side(golden, teacher_forced=True)
        make_tie(golden, run, 2)
        golden.one.ties = (2,)
        report = diff(*write_pair(golden, run, tmp_path), JudgeOptions(atol=2e-3))
        assert report.verdict is Verdict.TIE_BREAK
        assert report.sequences[0].divergence.recorded_tie

    def test_another_golden_file_of_the_same_content_is_noted(self, tmp_path):
        golden, run = pair()
        paths = write_pair(golden, run, tmp_path)
        golden.manifest["producer"]["version"] = "1"
        write_bundle(golden, paths[0])
        report = diff(*paths)
        assert (report.verdict, [f.code for f in report.findings]) == (Verdict.IDENTICAL, ["origin"])

    def test_two_of_a_kind_and_one_with_itself(self, tmp_path):
        g, r = write_pair(*pair(), tmp_path)
        for wrong in ((g, g), (r, r), (r, g)):
            report = diff(*wrong)
            assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)

    @pytest.mark.parametrize("threads", [1, 3])
    def test_equal_files_are_read_once_and_their_metrics_are_not_taken(self, tmp_path, monkeypatch, threads):
        paths = write_pair(*pair(), tmp_path)
        read = []
        rows = ArrayScan.rows

        def spy(self, low, high, memory=None):
            read.append((self._path, high - low))
            return rows(self, low, high, memory)

        monkeypatch.setattr(ArrayScan, "rows", spy)
        monkeypatch.setattr(BundleSequence, "rows", None)  # nothing is read a second time
        monkeypatch.setattr(Measure, "full", None)
        monkeypatch.setattr(workflow, "_threads", lambda: threads)
        monkeypatch.setattr(logits, "BLOCK_VALUES", 80)  # two rows
        report = diff(*paths)
        assert report.verdict is Verdict.IDENTICAL
        assert report.totals.rows_identical == 12
        for index in range(2):
            for path in (f"sequences/{index:06d}/logits/exact", f"sequences/{index:06d}/logits/engine"):
                assert sum(n for name, n in read if name == path) == 6

    @pytest.mark.parametrize("which", [0, 1])
    def test_equal_digests_that_are_not_those_of_the_data_are_no_pass(self, tmp_path, which):
        golden, run = pair()
        paths = write_pair(golden, run, tmp_path)
        row = run.seqs[1].logits["engine"][3].tobytes()
        data = paths[which].read_bytes()
        paths[which].write_bytes(data.replace(row, (run.seqs[1].logits["engine"][3] + 1).tobytes()))
        assert diff(*paths).verdict is Verdict.INVALID

    def test_equal_digests_of_a_golden_that_is_not_finite(self, tmp_path):
        golden, run = pair()
        for side, name in ((golden, "exact"), (run, "engine")):
            side.seqs[1].logits[name][4, 7] = -np.inf
        report = diff(*write_pair(golden, run, tmp_path))
        assert report.verdict is Verdict.INVALID
        assert report.sequences[1].logits.golden_nonfinite.row == 4
        assert report.sequences[1].logits.rows_identical == 4

    def test_memory_stays_flat(self, tmp_path):
        golden, run = pair(sequences=1, steps=400, vocab=20_000)  # 32 MB a side
        run.one.logits["engine"] = np.nextafter(run.one.logits["engine"], np.float32(99))
        for s in golden.seqs:
            del s.logits["float64"]
        paths = write_pair(golden, run, tmp_path)
        tracemalloc.start()
        report = diff(*paths, JudgeOptions(atol=1e-3))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert report.totals.values_compared == 8_000_000
        # numpy reports its memory to tracemalloc: a whole side in float64 alone would be 64 MB
        assert peak < 48e6

    def test_the_process_stays_small_on_many_threads(self, tmp_path):
        """The largest resident memory that a process ever had, for 16 and for 64 MB a side."""
        code = (
            "import sys; from kdtr_cli.parity.tolerances import JudgeOptions; from kdtr_cli.workflows import diff\n"
            "diff._threads = lambda: 4\n"
            "assert diff.diff(*sys.argv[1:], JudgeOptions(atol=1e-3)).verdict.value == 'PASS'\n"
            "print([line for line in open('/proc/self/status') if line.startswith('VmHWM')][0].split()[1])"
        )
        peaks = []
        for steps in (80, 320):
            golden, run = pair(sequences=1, steps=steps, vocab=50_000)
            run.one.logits["engine"] = np.nextafter(run.one.logits["engine"], np.float32(99))
            del golden.one.logits["float64"]
            done = subprocess.run(
                [sys.executable, "-c", code, *map(str, write_pair(golden, run, tmp_path))],
                capture_output=True,
                text=True,
                check=True,
            )
            peaks.append(int(done.stdout) / 1024)
        assert peaks[1] < 400
        assert peaks[1] - peaks[0] < 32


class TestBroken:
    def damage(self, path, needle, replacement):
        data = path.read_bytes()
        assert data.count(needle) == 1
        path.write_bytes(data.replace(needle, replacement))

    @pytest.mark.parametrize("which", [0, 1])
    def test_a_changed_value_is_invalid_whenever_it_is_found(self, tmp_path, which):
        golden, run = pair()
        paths = write_pair(golden, run, tmp_path)
        row = (golden.seqs[1].logits["exact"], run.seqs[1].logits["engine"])[which][3]
        self.damage(paths[which], row.tobytes(), (row + 1).tobytes())
        report = diff(*paths, JudgeOptions(atol=100, allow_loose=True))
        assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)
        assert str(paths[which]) in report.reason
        assert "digest" in report.reason
        assert report.totals.tokens == 12
        assert "\n" not in report.reason

    def test_a_changed_token(self, tmp_path):
        golden, run = pair()
        paths = write_pair(golden, run, tmp_path)
        tokens = run.one.tokens
        self.damage(paths[1], tokens.tobytes(), (tokens ^ 1).tobytes())
        assert diff(*paths).verdict is Verdict.INVALID

    @pytest.mark.parametrize("which", [0, 1])
    @pytest.mark.parametrize("how", ["truncated", "text", "empty", "folder"])
    def test_what_is_no_bundle(self, tmp_path, which, how):
        paths = write_pair(*pair(), tmp_path)
        path = paths[which]
        if how == "folder":
            path.unlink()
            path.mkdir()
        else:
            data = {"truncated": path.read_bytes()[:3000], "text": b"hello\n" * 99, "empty": b""}[how]
            path.write_bytes(data)
        report = diff(*paths)
        assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)
        assert str(path) in report.reason
        assert report.findings[0].code == "bundle"

    @pytest.mark.parametrize("which", [0, 1])
    def test_a_file_that_is_not_there_is_a_mistake_in_the_command(self, tmp_path, which):
        paths = write_pair(*pair(), tmp_path)
        paths[which].unlink()
        with pytest.raises(InputError, match="no such file") as caught:
            diff(*paths)
        assert str(paths[which]) in str(caught.value)

    def test_an_unknown_selection_is_one_too(self, tmp_path):
        with pytest.raises(InputError, match="no such sequence"):
            diff(*write_pair(*pair(), tmp_path), JudgeOptions(select=("nope",)))


class TestReportFile:
    def test_is_written_whole(self, tmp_path):
        write_report(tmp_path / "out", "a\n\u00e9\n")
        assert (tmp_path / "out").read_bytes() == "a\n\u00e9\n".encode()
        assert os.listdir(tmp_path) == ["out"]

    def test_a_failure_is_kdtr_s_and_leaves_the_old_file(self, tmp_path, monkeypatch):
        (tmp_path / "out").write_text("old")

        def full(fd):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(workflow.os, "fsync", full)
        with pytest.raises(DeviceError, match="No space left") as caught:
            write_report(tmp_path / "out", "new")
        assert caught.value.exit_code is Exit.FAILED
        assert (tmp_path / "out").read_text() == "old"
        assert os.listdir(tmp_path) == ["out"]

    def test_an_interrupt_leaves_no_half_file(self, tmp_path, monkeypatch):
        def stop(fd):
            raise KeyboardInterrupt

        monkeypatch.setattr(workflow.os, "fsync", stop)
        with pytest.raises(KeyboardInterrupt):
            write_report(tmp_path / "out", "new")
        assert os.listdir(tmp_path) == []

    def test_refusals_come_before_any_work(self, tmp_path):
        there = tmp_path / "there"
        there.write_text("x")
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        for path, force, words in (
            (there, False, "use --force"),
            (tmp_path, True, "not a regular file"),
            (Path("/dev/null"), True, "not a regular file"),
            (tmp_path / "link", True, "not a regular file"),
            (tmp_path / "no" / "out", True, "does not exist"),
        ):
            with pytest.raises(InputError, match=words) as caught:
                check_report_target(path, force)
            assert str(path) in str(caught.value)
        check_report_target(there, True)
        check_report_target(tmp_path / "new", False)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_without_permission(self, tmp_path):
        (tmp_path / "shut").mkdir(mode=0o500)
        with pytest.raises(InputError, match="no permission"):
            check_report_target(tmp_path / "shut" / "out", False)

    def test_a_bundle_is_never_overwritten(self, tmp_path):
        g, r = write_pair(*pair(), tmp_path)
        (tmp_path / "hard").hardlink_to(g)
        for path in (g, r, tmp_path / "hard", tmp_path / "." / "r.h5"):
            with pytest.raises(InputError, match="one of the bundles"):
                check_report_target(path, True, (g, r))


def test_evidence_names_the_file_and_knows_the_vocabulary(tmp_path):
    g, _ = write_pair(*pair(), tmp_path)
    with open_bundle(g) as bundle:
        evidence = bundle_evidence(bundle)
        assert (evidence.kind, evidence.name, evidence.vocab_size) == ("golden", str(g), 40)
        assert evidence.manifest_sha256 == bundle.manifest_sha256
        logits = evidence.sequences[0].logits["exact"]
        assert (logits.form, logits.n_rows, logits.vocab, logits.dtype) == ("full", 6, 40, np.float32)

"""`kdtr diff` and its reports for people: terminal, HTML, PNG, texts of tokens. None changes a verdict."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from parity_bundles import write_pair
from parity_cases import golden_side, make_tie, run_side
from rounds_cases import round_pair, rounds_of

import kdtr_cli
from kdtr_cli.cli.main import main
from kdtr_cli.model.tokenizer import load_tokenizer

pytestmark = pytest.mark.quick

ROOT = Path(kdtr_cli.__file__).parents[1]
MODEL = Path(__file__).parents[2] / "fixtures" / "tiny-kimi"
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="no matplotlib: pip install 'kdtr[plot]'")


@pytest.fixture
def case(tmp_path, monkeypatch, capsys):
    """Writes a golden and a run into the current folder, calls `kdtr diff`, gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    class Case:
        golden = golden_side(vocab=64)
        run = run_side(golden)

        def __call__(self, *args):
            write_pair(self.golden, self.run, tmp_path)
            code = main(["diff", "g.h5", "r.h5", *args])
            out = capsys.readouterr()
            return code, out.out, out.err

    return Case()


def on_terminal(folder, *args, **more):
    """(exit code, what `kdtr diff` writes to a terminal of 80 columns)."""
    dropped = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "COLORTERM", "LC_ALL", "PYTHONIOENCODING")
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    environment |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PYTHONUTF8": "1", **more}
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "kdtr_cli", "diff", "g.h5", "r.h5", *args]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=follower, stderr=follower, close_fds=True)
    os.close(follower)
    seen = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:  # how Linux tells that the other side is closed
            break
        if not block:
            break
        seen += block
    os.close(leader)
    return process.wait(timeout=60), seen.decode()


class TestTerminal:
    @pytest.fixture
    def folder(self, tmp_path):
        golden = golden_side(steps=30, vocab=512)
        golden.one.id = "[red]x[/red]"
        run = run_side(golden)
        run.manifest["decoding"]["teacher_forced"] = True
        make_tie(golden, run, 9)
        write_pair(golden, run, tmp_path)
        return tmp_path

    def test_colours_and_marks_with_the_line_last_and_plain(self, folder):
        code, text = on_terminal(folder, "--atol", "1e-2")
        assert code == 1
        lines = text.splitlines()
        assert lines[-1].startswith("FAIL ar tokens=59/60 first_divergence=0:9 ")
        assert "\x1b" not in lines[-1]
        assert re.search("\x1b\\[3[26]m[■□]{9}\x1b\\[0m", text)
        assert "≈" in text
        assert "[red]x[/red]" in text

    def test_no_color(self, folder):
        code, text = on_terminal(folder, "--atol", "1e-2", NO_COLOR="1")
        assert code == 1
        assert "\x1b[3" not in text
        assert re.search("[■□]{9}≈ [■□]{10}", text)

    @pytest.mark.parametrize("more", [{"TERM": "dumb"}, {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}])
    def test_ascii_where_no_more_can_be_shown(self, folder, more):
        code, text = on_terminal(folder, "--atol", "1e-2", **more)
        assert code == 1
        assert text.isascii()
        assert re.search(r"[=.]{9}~ [=.]{10}", re.sub(r"\x1b\[[0-9;]*m", "", text))

    def test_no_line_is_wider_than_the_terminal_but_those_that_can_t_be_wrapped(self, folder):
        _, text = on_terminal(folder, "--atol", "1e-2", NO_COLOR="1")
        for line in text.splitlines():
            if line.strip().startswith(("steps", "step", "golden ", "run ", "#", "0 ", "1 ")) and "tier" not in line:
                assert len(line) <= 80

    def test_json_is_no_text_for_people(self, folder):
        code, text = on_terminal(folder, "--atol", "1e-2", "--format", "json")
        assert (code, text[0]) == (1, "{")
        assert "\x1b" not in text


class TestTokenTexts:
    def test_text_and_page_show_them(self, case):
        case.golden = golden_side(vocab=512, steps=20)
        case.run = run_side(case.golden)
        (expected,), (got,) = (load_tokenizer(MODEL).encode(text, rendered=True) for text in "ab")
        case.golden.one.tokens[4], case.run.one.tokens[4] = expected, got
        code, out, _ = case("--tokenizer", str(MODEL))
        assert code == 1
        assert f'first divergence at step 4: golden {expected} "a", run {got} "b"' in out
        assert out.isascii()
        assert out.splitlines()[-1] == case()[1].splitlines()[-1]
        page = case("--tokenizer", str(MODEL), "--format", "html")[1]
        assert f"<span>{expected} <bdi>a</bdi></span><span>{got} <bdi>b</bdi></span>" in page

    def test_a_folder_without_a_tokenizer_is_told_before_any_work(self, case):
        code, out, err = case("--tokenizer", ".", "--format", "html", "--output-file", "r.html")
        assert (code, out) == (2, "")
        assert "no tokenizer.json" in err
        assert not Path("r.html").exists()


class TestHtml:
    def test_the_page_goes_to_its_file_and_the_line_to_standard_output(self, case):
        case.run.one.tokens[3] ^= 1
        code, out, err = case("--format", "html", "--output-file", "r.html")
        assert (code, err) == (1, "")
        assert out.startswith("FAIL ar tokens=9/12 first_divergence=0:3 ")
        assert out.count("\n") == 1
        page = Path("r.html").read_text(encoding="utf-8")
        assert page.startswith("<!DOCTYPE html>")
        assert out.strip() in page

    def test_rounds_are_drawn(self, case):
        case.golden, case.run = round_pair(sequences=2, steps=24)
        a = rounds_of(case.run, 1)
        a["bonus"][2] = 7 if a["bonus"][2] != 7 else 8
        code, page, _ = case("--format", "html")
        assert code == 1
        assert '"difference":{"round":2,' in page

    @pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
    def test_the_page_is_utf_8_in_any_locale(self, case, tmp_path, encoding):
        write_pair(case.golden, case.run, tmp_path)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONIOENCODING": encoding,
        }
        command = [sys.executable, "-m", "kdtr_cli", "diff", "g.h5", "r.h5", "--format", "html"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
        assert done.returncode == 0
        assert "|run − golden| ≤ atol" in done.stdout.decode("utf-8")


class TestPlot:
    @needs_matplotlib
    @pytest.mark.parametrize(("wrong", "code"), [(False, 0), (True, 1)])
    def test_a_picture_beside_any_format_and_the_same_verdict(self, case, wrong, code):
        if wrong:
            case.run.one.tokens[3] ^= 1
        plain = case()
        assert case("--plot", "p.png") == plain
        assert plain[0] == code
        assert Path("p.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    @needs_matplotlib
    def test_a_file_that_is_there_is_kept_without_force(self, case):
        Path("p.png").write_text("old")
        code, out, err = case("--plot", "p.png")
        assert (code, out, Path("p.png").read_text()) == (2, "", "old")
        assert "--plot p.png exists; use --force" in err
        assert case("--plot", "p.png", "--force")[0] == 0
        assert Path("p.png").read_bytes().startswith(b"\x89PNG")

    @needs_matplotlib
    def test_written_whole_or_not_at_all(self, case, monkeypatch):
        def full(fd):
            raise OSError(28, "No space left on device")

        case()
        monkeypatch.setattr("kdtr_cli.workflows.diff.os.fsync", full)
        before = set(os.listdir())
        code = main(["diff", "g.h5", "r.h5", "--plot", "p.png"])
        assert code == 3
        assert set(os.listdir()) == before

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (["--plot", "p.svg"], "name a file that ends in .png"),
            (["--plot", "no/p.png"], "--plot no/p.png: the folder no does not exist"),
            (["--plot", "g.h5"], "--plot g.h5 is one of the bundles"),
            (["--plot", "p.png", "--output-file", "p.png"], "is the --output-file too"),
        ],
    )
    def test_what_can_t_be_drawn_to_is_told_before_any_work(self, case, args, said):
        code, out, err = case(*args)
        assert (code, out) == (2, "")
        assert said in err

    def test_without_matplotlib(self, case, monkeypatch):
        monkeypatch.setattr("kdtr_cli.report.plot.find_spec", lambda name: None)
        code, out, err = case("--plot", "p.png")
        assert (code, out) == (2, "")
        assert err == "kdtr: error: --plot needs matplotlib, which is not installed: pip install 'kdtr[plot]'\n"


class TestVerdict:
    """A report that breaks is kdtr's own failure; never a verdict, and nothing is left half written."""

    @pytest.mark.parametrize(
        ("args", "broken"),
        [
            (["--format", "html", "--output-file", "r.html"], "report_html"),
            (["--output-file", "r.txt"], "report_text"),
            pytest.param(["--output-file", "r.txt", "--plot", "p.png"], "report_png", marks=needs_matplotlib),
        ],
    )
    @pytest.mark.parametrize("wrong", [False, True])
    def test_a_crash_in_a_report_is_exit_3_and_no_verdict(self, case, monkeypatch, args, broken, wrong):
        def crash(*args):
            raise RuntimeError("boom")

        monkeypatch.setattr(f"kdtr_cli.cli.diff.{broken}", crash)
        if wrong:
            case.run.one.tokens[3] ^= 1
        code, out, err = case(*args)
        assert (code, out) == (3, "")
        assert "internal error: RuntimeError: boom" in err
        assert {name for name in os.listdir() if not name.endswith(".h5")} == set()

    @pytest.mark.parametrize("form", ["text", "html"])
    @pytest.mark.parametrize("what", ["nan", "missing", "names", "no steps"])
    def test_odd_evidence_ends_in_its_verdict(self, case, what, form):
        expected = 1
        if what == "nan":
            for s in case.run.seqs:
                s.logits["engine"][:] = np.nan
        elif what == "missing":
            del case.run.seqs[0]
        elif what == "names":
            for i, (g, r) in enumerate(zip(case.golden.seqs, case.run.seqs, strict=True)):
                g.id = r.id = f"</script>\u202e<!-- {i}"
            expected = 0
        else:
            case.golden = golden_side(steps=0)
            case.run = run_side(case.golden)
            expected = 2
        assert case("--format", form)[0] == expected

"""Goldens under a memory limit: how sequences are grouped, what is refused, and what the process really takes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from kdtr_cli.errors import InputError
from kdtr_cli.model.config import parse_config
from kdtr_cli.model.presets import PRESETS, new_weights
from kdtr_cli.model.prompts import Prompt
from kdtr_cli.model.traces import trace_bytes
from kdtr_cli.workflows import golden_memory
from kdtr_cli.workflows.golden_memory import BATCH, check_trace, make_budget, parse_size, shown_size

TINY = parse_config(PRESETS["tiny"], where="tiny")


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(str(i), np.zeros(n, np.int32), i) for i, n in enumerate(lengths)]


def lengths(groups) -> list[list[int]]:
    return [[len(p.ids) for p in group] for group in groups]


@pytest.mark.quick
class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [
            ("8G", 8 * 10**9),
            ("512m", 512 * 10**6),
            ("2.5GiB", 5 << 29),
            ("1Ti", 1 << 40),
            ("1000000", 10**6),
            ("3 kB", 3000),
        ],
    )
    def test_are_read(self, text, size):
        assert parse_size(text) == size

    @pytest.mark.parametrize("text", ["", "G", "-1G", "1e9", "8X", "1.G", "nan", "8GG", "١G", "9" * 99])
    def test_others_are_refused(self, text):
        with pytest.raises(InputError, match=r"--memory-limit .*a size such as 8G"):
            parse_size(text)

    def test_are_shown(self):
        assert [shown_size(n) for n in (0, 999, 1000, 999_499, 1.5e9, 2e12)] == [
            "0 B", "999 B", "1 kB", "999 kB", "1.5 GB", "2 TB",
        ]  # fmt: skip


@pytest.mark.quick
class TestGroups:
    @pytest.fixture(autouse=True)
    def a_small_process(self, monkeypatch):
        monkeypatch.setattr(golden_memory, "_resident", lambda: 10**8)

    def test_without_a_limit_by_count_and_tokens(self):
        groups = make_budget(None, TINY, prompts(*[10] * 70, 5000, 4000), 1, score=False, exact=True).groups
        assert lengths(groups) == [[10] * BATCH, [10] * BATCH, [*[10] * 6, 5000], [4000]]

    def test_without_exact_by_count_alone(self):
        for limit in (None, 10**11):
            groups = make_budget(limit, TINY, prompts(*[1] * 31, 9000, 9000), 1, score=False, exact=False).groups
            assert lengths(groups) == [[*[1] * 31, 9000], [9000]]

    def test_more_memory_takes_more_together_and_keeps_more(self):
        many = prompts(*range(1, 400))
        budgets = [make_budget(limit, TINY, many, 8, score=True, exact=True) for limit in (10**9, 2 * 10**9, 10**11)]
        counts = [len(budget.groups) for budget in budgets]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] > counts[-1] == 1
        assert [p for group in budgets[0].groups for p in group] == many
        for limit, budget in zip((10**9, 2 * 10**9, 10**11), budgets, strict=True):
            assert 0 < budget.weights_limit + budget.working <= limit * 0.9

    def test_a_limit_too_small_says_what_is_needed(self):
        one = prompts(300)
        with pytest.raises(InputError, match="a sequence of this model needs about") as caught:
            make_budget(10**7, TINY, one, 100, score=True, exact=True)
        needed = parse_size(re.search(r"about (.*) \(", str(caught.value))[1])
        assert make_budget(needed * 11 // 10, TINY, one, 100, score=True, exact=True).groups == [one]

    def test_a_trace_is_counted(self):
        one = prompts(300)
        need = [make_budget(None, TINY, one, 100, score=False, exact=True, trace=t).working for t in (None, "full")]
        assert need[1] - need[0] == 400 * trace_bytes(TINY, "full")

    def test_a_trace_that_does_not_fit_is_refused(self, monkeypatch):
        monkeypatch.setattr(golden_memory, "available", lambda: 10**6)
        size = trace_bytes(TINY, "full")
        assert check_trace(TINY, "full", 10**6 // size) <= 10**6
        assert check_trace(TINY, None, 10**9) == 0
        with pytest.raises(
            InputError, match=r"--trace full: .* positions of this model take 1(\.0\d)? MB .*--trace layers"
        ):
            check_trace(TINY, "full", 10**6 // size + 1)

    def test_ten_thousand_prompts_are_quick(self):
        many = prompts(*[20] * 10_000)
        assert sum(map(len, make_budget(10**12, TINY, many, 8, score=False, exact=True).groups)) == 10_000


PEAK = """
import sys, re
from kdtr_cli.cli.main import main
code = main(sys.argv[1:])
print("peak", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
sys.exit(code)
"""


@pytest.mark.slow
def test_the_process_stays_below_the_limit(tmp_path):
    """A model whose embedding and lm_head alone are 160 MB each in float32, 320 MB in float64."""
    text = json.dumps({**PRESETS["tiny"], "vocab_size": 40_000, "hidden_size": 1024})
    config = parse_config(json.loads(text), where="large")
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(text)
    safetensors.numpy.save_file(new_weights(config, 0), folder / "model.safetensors")
    peaks = {}
    for name, more in (("all", []), ("some", ["--memory-limit", "400M"])):
        made = subprocess.run(
            [sys.executable, "-c", PEAK, "golden", folder, "-o", tmp_path / f"{name}.h5", "--steps", "3", *more],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        )
        peaks[name] = int(re.search(r"peak (\d+)", made.stdout)[1]) * 1024
    assert (tmp_path / "all.h5").read_bytes() == (tmp_path / "some.h5").read_bytes()
    assert peaks["some"] < 400 * 10**6 < 600 * 10**6 < peaks["all"], peaks

"""The noise floor of a golden and its emulated bf16 logits: what is stored, that nothing but the content decides it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.cli.golden import golden
from kdtr_cli.cli.inspect import inspect
from kdtr_cli.errors import InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Prompt
from kdtr_cli.model.source import open_model
from kdtr_cli.parity.floor import add_floors, floors_of, measure_floor
from kdtr_cli.reference import bf16
from kdtr_cli.reference.generate import score
from kdtr_cli.reference.transformer import Model
from kdtr_cli.workflows.golden import GoldenOptions, make_golden, plan_golden
from kdtr_cli.workflows.prompts import PromptOptions
from kdtr_cli.workflows.verify import verify_bundle

pytestmark = pytest.mark.quick
FIXTURES = Path(__file__).parents[2] / "fixtures"
PROMPTS = PromptOptions(ids=("1 2 3", "7 8", "5 6 7 8 9 10"))


def make(path: Path, model: str = "tiny-v2", **options) -> Path:
    make_golden(GoldenOptions(model, path, PROMPTS, 5, **options))
    return path


def recomputed(path: Path, names: tuple[str, ...]) -> dict:
    found = {}
    with open_bundle(path) as bundle:
        for sequence in bundle.sequences:
            for group in ("logits", "prompt_logits"):
                for name in names:
                    if f"{group}/{name}" in sequence.array_names():
                        truth = sequence.array(f"{group}/float64")
                        part = measure_floor(sequence.array(f"{group}/{name}"), truth)
                        found[name] = add_floors(found.get(name), part)
        return found, floors_of(bundle.manifest)


@pytest.mark.parametrize("score_prompts", [False, True])
def test_it_is_the_floor_of_the_stored_logits(tmp_path, score_prompts):
    path = make(tmp_path / "g.h5", bf16=True, score=score_prompts)
    want, held = recomputed(path, ("exact", "bf16"))
    assert held == want
    assert {f.rows for f in held.values()} == {15 + (11 if score_prompts else 0)}
    assert 0 < held["exact"].max_abs < 1e-5 < 1e-2 < held["bf16"].max_abs
    assert 0 < held["exact"].max_kl < 1e-10 < held["bf16"].max_kl
    verify_bundle(path)


@pytest.mark.parametrize("model", ["tiny-v2", "tiny-groups"])
def test_beside_a_trace_both_are_what_they_are_alone(tmp_path, model):
    held = {}
    options = {"both": {"bf16": True, "trace": "full"}, "bf16": {"bf16": True}, "trace": {"trace": "full"}}
    for name, asked in options.items():
        with open_bundle(make(tmp_path / f"{name}.h5", model, **asked)) as bundle:
            arrays = [{n: s.array(n).tobytes() for n in s.array_names()} for s in bundle.sequences]
            held[name] = arrays, bundle.manifest["noise_floor"]
    of_trace = [{n: a for n, a in one.items() if n.startswith("trace/")} for one in held["trace"][0]]
    assert all(of_trace)
    assert held["both"][0] == [one | more for one, more in zip(held["bf16"][0], of_trace, strict=True)]
    assert held["both"][1] == held["bf16"][1]


@pytest.mark.parametrize("form", ["top:4", "digest"])
def test_what_is_kept_of_a_row_does_not_change_it(tmp_path, form):
    floors = []
    for kept in ("full", form):
        with open_bundle(make(tmp_path / f"{kept[:3]}.h5", bf16=True, logits=kept)) as bundle:
            floors.append(bundle.manifest["noise_floor"])
    assert floors[0] == floors[1]


def test_without_bf16_there_is_that_of_exact_and_with_float64_alone_that_of_bf16(tmp_path):
    held = {}
    for name, options in {"both": {}, "real": {"exact": False}, "real16": {"exact": False, "bf16": True}}.items():
        with open_bundle(make(tmp_path / f"{name}.h5", **options)) as bundle:
            held[name] = set(bundle.manifest.get("noise_floor", ())), bundle.manifest["arithmetic"]
    assert held == {
        "both": ({"exact"}, ["exact", "float64"]),
        "real": (set(), ["float64"]),
        "real16": ({"bf16"}, ["float64", "bf16"]),
    }
    want, found = recomputed(tmp_path / "real16.h5", ("bf16",))
    assert found == want


def test_the_bf16_logits_are_the_models_own_along_the_goldens_tokens(tmp_path):
    path = make(tmp_path / "g.h5", bf16=True, score=True)
    opened = open_model("tiny-v2")
    made = Model(opened.config, opened.weights, Choices(), 20, bf16)
    with open_bundle(path) as bundle:
        for sequence in bundle.sequences:
            prompt = Prompt(sequence.id, sequence.prompt, sequence.stream)
            along = score(made, prompt, sequence.tokens)
            split = len(prompt.ids) - 1
            # a product of other rows may round elsewhere in BLAS, and then in bf16
            for name, rows in (("logits", along[split:]), ("prompt_logits", along[: split + 1])):
                held = sequence.array(f"{name}/bf16")
                assert held.dtype == np.float32
                np.testing.assert_allclose(held, rows, rtol=0, atol=2e-2)


def test_tokens_and_the_other_logits_are_those_of_a_golden_without_it(tmp_path):
    paths = [make(tmp_path / f"{on}.h5", bf16=on) for on in (False, True)]
    held = []
    for path in paths:
        with open_bundle(path) as bundle:
            datasets = {k: v for k, v in bundle.manifest["datasets"].items() if not k.endswith("/bf16")}
            held.append((datasets, bundle.manifest["noise_floor"]["exact"]))
    assert held[0] == held[1]


def test_groups_and_a_memory_limit_change_nothing(tmp_path, monkeypatch):
    from kdtr_cli.workflows import golden as workflow
    from kdtr_cli.workflows import golden_memory

    want = make(tmp_path / "g.h5", bf16=True, score=True).read_bytes()
    real = golden_memory.make_budget

    def one_by_one(*args, **options):
        budget = real(*args, **options)
        return golden_memory.Budget([[prompt] for prompt in args[2]], 0, budget.working)

    monkeypatch.setattr(workflow, "make_budget", one_by_one)
    assert make(tmp_path / "one.h5", bf16=True, score=True).read_bytes() == want
    assert make(tmp_path / "limit.h5", bf16=True, score=True, memory_limit=10**12).read_bytes() == want


def test_inspect_shows_it(tmp_path):
    path = str(make(tmp_path / "g.h5", bf16=True))
    shown = CliRunner().invoke(inspect, [path]).output
    assert re.search(r"^noise bf16 +\S*max_abs=\S+", shown, re.M)
    assert re.search(r"^noise exact .*max_kl=\S+.* rows=15", shown, re.M)
    document = json.loads(CliRunner().invoke(inspect, [path, "--format", "json"]).output)
    with open_bundle(path) as bundle:
        assert document["noise_floor"] == bundle.manifest["noise_floor"]


def test_float32_is_no_truth_to_measure_against(tmp_path):
    with pytest.raises(InputError, match="--bf16 is measured against float64, which --arith float32 leaves out"):
        make(tmp_path / "g.h5", exact=False, single="float32", bf16=True)
    assert not any(tmp_path.iterdir())


def test_the_command_says_both_floors_and_the_plan_counts_the_pass(tmp_path):
    out = str(tmp_path / "g.h5")
    said = CliRunner().invoke(golden, ["tiny-v2", "-o", out, "--steps", "2", "--bf16"])
    assert said.exit_code == 0
    assert re.search(
        r" max_abs_exact_minus_float64=\d\.\d{3}e-0\d max_abs_bf16_minus_float64=\d\.\d{3}e-0\d ", said.output
    )
    asked = GoldenOptions("tiny-v2", tmp_path / "p.h5", PROMPTS, 5)
    plain, more = (plan_golden(o) for o in (asked, GoldenOptions("tiny-v2", tmp_path / "p.h5", PROMPTS, 5, bf16=True)))
    assert [line.what for line in more.lines] == [*(line.what for line in plain.lines), "all tokens, bf16"]
    assert more.packed_bytes == plain.packed_bytes // 3 * 4

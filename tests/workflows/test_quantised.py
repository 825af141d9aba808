"""Quantised checkpoints through golden, run and diff on the CPU device: IDENTICAL, embedded or not, drafted or not."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.errors import InputError
from kdtr_cli.model.config import parse_config
from kdtr_cli.model.fields import parse_json
from kdtr_cli.model.presets import write_model
from kdtr_cli.model.requantise import quantise_model
from kdtr_cli.model.source import open_model
from kdtr_cli.model.weights import Weights
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.workflows.diff import diff
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.golden_rounds import DraftOptions
from kdtr_cli.workflows.prompts import PromptOptions
from kdtr_cli.workflows.run import RunOptions, make_run
from kdtr_cli.workflows.verify import verify_bundle

FIXTURES = Path(__file__).parents[2] / "fixtures"
TEXTS = PromptOptions(texts=("class Stack:", "def fibonacci(n):\n    if n < 2:\n"))
NAMES = ["tiny-kimi-int4", "tiny-kimi-fp8"]


@pytest.fixture(scope="module", params=NAMES)
def golden(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "g.h5"
    return make_golden(GoldenOptions(str(FIXTURES / request.param), path, TEXTS, 8, score=True))


def test_embedded_weights_are_the_stored_parts(golden):
    model = golden.model
    assert golden.embedded
    with open_bundle(golden.path) as bundle:
        assert bundle.weight_names() == list(model.weights.stored_names)
        told = bundle.manifest["model"]
        assert list(told["weights"]) == list(model.weights.stored_names)
        for name in bundle.weight_names():
            stored = bundle.weight(name)
            assert stored.dtype == model.weights.stored(name).dtype
            assert stored.tobytes() == model.weights.stored(name).tobytes()
            assert told["weights"][name] == hashlib.sha256(stored.tobytes()).hexdigest()
        config = parse_config(parse_json(bundle.config_text, "config"))
        again = Weights.from_arrays({n: bundle.weight(n) for n in bundle.weight_names()}, config)
        assert again.used_sha256() == told["weights_used_sha256"] == model.weights.used_sha256()
    assert verify_bundle(golden.path).problems == ()


@pytest.mark.parametrize("model", [None, "folder"])
def test_the_engine_says_the_same_to_the_bit(golden, model, tmp_path):
    given = str(golden.model.folder) if model else None
    made = make_run(RunOptions(golden.path, tmp_path / "r.h5", device="cpu", model=given, batch=1 + bool(model)))
    report = diff(golden.path, tmp_path / "r.h5")
    assert (report.verdict, report.exit_code) == (Verdict.IDENTICAL, 0)
    assert report.totals.tokens == 16
    # a full-size layer as float32 would be 67 GB: a run keeps none of it
    weights = made.model.weights
    assert all(weights[name] is not weights[name] for name in weights.names[:3])
    assert [p.id for p, _ in made.sequences] == ["0", "1"]


def test_without_embedded_weights_the_folder_is_needed(golden, tmp_path):
    options = GoldenOptions(str(golden.model.folder), tmp_path / "g.h5", TEXTS, 2, embed_weights=False)
    make_golden(options)
    with pytest.raises(InputError, match=f"--model DIR .{golden.model.name}"):
        make_run(RunOptions(tmp_path / "g.h5", tmp_path / "r.h5", device="cpu"))
    make_run(RunOptions(tmp_path / "g.h5", tmp_path / "r.h5", device="cpu", model=str(golden.model.folder)))
    assert diff(tmp_path / "g.h5", tmp_path / "r.h5").verdict is Verdict.IDENTICAL


def test_another_quantisation_of_the_same_model_is_invalid_with_it(golden, tmp_path):
    other = FIXTURES / (NAMES[1] if golden.model.name == NAMES[0] else NAMES[0])
    make_run(RunOptions(golden.path, tmp_path / "r.h5", device="cpu", model=str(other)))
    report = diff(golden.path, tmp_path / "r.h5")
    assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)


def test_the_values_decide_and_not_how_they_are_stored(tmp_path):
    # int4 weights as bf16 are other weights; as float32 they would be the same
    quantise_model(FIXTURES / "tiny-kimi-int4", tmp_path / "bf16", "bf16")
    int4, bf16 = open_model(FIXTURES / "tiny-kimi-int4"), open_model(tmp_path / "bf16")
    assert int4.weights.used_sha256() != bf16.weights.used_sha256()
    wide = Weights.from_arrays({name: int4.weights[name] for name in int4.weights}, bf16.config)
    assert wide.used_sha256() == int4.weights.used_sha256()


@pytest.mark.parametrize("to", ["int4", "fp8"])
def test_cut_groups_and_blocks(to, tmp_path):
    # no width of `odd` is a multiple of 8: words, groups and blocks end in the middle
    write_model(tmp_path / "odd", "odd")
    quantise_model(tmp_path / "odd", tmp_path / "q", to)
    prompts = PromptOptions(ids=("1 2 3", "7"))
    make_golden(GoldenOptions(str(tmp_path / "q"), tmp_path / "g.h5", prompts, 4))
    make_run(RunOptions(tmp_path / "g.h5", tmp_path / "r.h5", device="cpu"))
    assert diff(tmp_path / "g.h5", tmp_path / "r.h5").verdict is Verdict.IDENTICAL


@pytest.mark.parametrize(
    ("name", "drafter"), [*((name, str(FIXTURES / "tiny-kimi-dflash")) for name in NAMES), (NAMES[0], "ngram")]
)
def test_draft_trees_over_a_quantised_target(name, drafter, tmp_path):
    drafting = DraftOptions("ddtree", drafter, 8, None)
    make_golden(GoldenOptions(str(FIXTURES / name), tmp_path / "g.h5", TEXTS, 8, drafting=drafting))
    make_run(RunOptions(tmp_path / "g.h5", tmp_path / "r.h5", device="cpu", mode="ddtree"))
    assert diff(tmp_path / "g.h5", tmp_path / "r.h5").verdict is Verdict.IDENTICAL


def test_int4_changes_what_the_model_says(golden, tmp_path):
    plain = make_golden(GoldenOptions(str(FIXTURES / "tiny-kimi"), tmp_path / "g.h5", TEXTS, 8))
    rows = []
    for made in (plain, golden):
        with open_bundle(made.path) as bundle:
            rows.append(bundle.sequences[0].array("logits/exact")[0])
    assert np.abs(rows[0] - rows[1]).max() > 1e-3

"""Traces of the engine on the CPU device: every tensor of every fed row is the NumPy model's, bit for bit, and asking
for them changes nothing else."""

from pathlib import Path

import numpy as np
import pytest

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.engine.recorder import Recorder
from kdtr_cli.errors import InputError
from kdtr_cli.model.config import parse_config
from kdtr_cli.model.fields import parse_json
from kdtr_cli.model.presets import PRESETS, write_model
from kdtr_cli.model.source import open_model
from kdtr_cli.model.traces import trace_tensors
from kdtr_cli.workflows import golden_memory
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.golden_rounds import DraftOptions
from kdtr_cli.workflows.prompts import PromptOptions
from kdtr_cli.workflows.run import RunOptions, make_run

KIMI = Path(__file__).parents[2] / "fixtures" / "tiny-kimi"
PROMPTS = PromptOptions(ids=("3 1 4 1 5 9 2 6 5 3 5", "7", "2 7 1 8 2 8"))
STEPS = 6


def arrays(path: Path, only_traces: bool = True) -> list[dict[str, np.ndarray]]:
    with open_bundle(path) as bundle:
        return [
            {name: s.array(name) for name in s.array_names() if name.startswith("trace/") or not only_traces}
            for s in bundle.sequences
        ]


def assert_same_bits(got: list[dict[str, np.ndarray]], wanted: list[dict[str, np.ndarray]]) -> None:
    assert [sorted(s) for s in got] == [sorted(s) for s in wanted]
    for one, other in zip(got, wanted, strict=True):
        parted = [n for n in other if (one[n].dtype, one[n].tobytes()) != (other[n].dtype, other[n].tobytes())]
        assert not parted


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "g.h5"
    make_golden(GoldenOptions("tiny", path, PROMPTS, STEPS, trace="full"))
    return path


@pytest.mark.parametrize("name", ["tiny", "tiny-groups", "tiny-v2", "odd", "tiny-kimi"])
def test_every_tensor_has_the_bits_of_the_numpy_model(name, tmp_path):
    model = str(KIMI) if name == "tiny-kimi" else name
    golden, run = tmp_path / "g.h5", tmp_path / "r.h5"
    made = make_golden(GoldenOptions(model, golden, PROMPTS, STEPS, trace="full", ignore_eos=True))
    make_run(RunOptions(golden, run, device="cpu", batch=2, prefill=4, trace="full"))
    wanted = arrays(golden)
    assert_same_bits(arrays(run), wanted)
    for (prompt, result), own in zip(made.sequences, wanted, strict=True):
        rows = len(prompt.ids) + len(result.tokens) - 1
        table = {f"trace/{t.name}": (rows, t.width) for t in trace_tensors(made.model.config, "full")}
        assert {n: a.shape for n, a in own.items()} == table


def test_projections_with_biases_and_models_without_experts(tmp_path):
    """What no preset has together: o_proj with a bias, no query latent, dense layers alone."""
    changes = {"attention_bias": True, "n_routed_experts": 0, "n_shared_experts": 0, "q_lora_rank": None}
    folder = write_config(tmp_path / "m", {**PRESETS["tiny-v2"], **changes})
    golden, run = tmp_path / "g.h5", tmp_path / "r.h5"
    make_golden(GoldenOptions(str(folder), golden, PROMPTS, 3, trace="full"))
    make_run(RunOptions(golden, run, device="cpu", trace="full"))
    assert_same_bits(arrays(run), arrays(golden))
    assert "trace/model.layers.0.mlp.mlp_out" in arrays(golden)[0]


def write_config(folder: Path, config: dict) -> Path:
    PRESETS["of-a-test"] = config
    try:
        write_model(folder, "of-a-test", seed=4)
    finally:
        del PRESETS["of-a-test"]
    return folder


@pytest.mark.parametrize(("mode", "drafter"), [("chain", "ngram"), ("chain", "synthetic:0.8"), ("ddtree", "ngram")])
def test_rounds_tell_their_committed_rows_by_position(tiny, tmp_path, mode, drafter):
    size = {"drafter": drafter, "budget": 6, "block_size": 4}
    run = tmp_path / "r.h5"
    make_run(RunOptions(tiny, run, mode, device="cpu", batch=2, prefill=4, trace="full", **size))
    assert_same_bits(arrays(run), arrays(tiny))


def test_of_a_tree_s_branches_the_accepted_one_is_told(tiny, tmp_path):
    """The golden's rows are those of plain decoding: other branches show nowhere."""
    size = {"drafter": "synthetic:0.6", "budget": 16, "block_size": 8}
    run = tmp_path / "r.h5"
    made = make_run(RunOptions(tiny, run, "ddtree", device="cpu", batch=2, prefill=4, trace="full", **size))
    scattered = [
        one.start + depth
        for (prompt, result), rounds in zip(made.sequences, made.rounds, strict=True)
        for one in rounds
        for depth, node in enumerate(one.accepted.tolist())
        if node != depth and one.start + depth < len(prompt.ids) + len(result.tokens) - 1
    ]
    assert scattered
    assert_same_bits(arrays(run), arrays(tiny))


def test_a_drafted_golden_traces_plain_decoding(tiny, tmp_path):
    golden = tmp_path / "g.h5"
    drafting = DraftOptions("ddtree", "synthetic:0.6", 6, 4)
    make_golden(GoldenOptions("tiny", golden, PROMPTS, STEPS, trace="full", drafting=drafting))
    assert_same_bits(arrays(golden), arrays(tiny))


@pytest.mark.parametrize("mode", ["ar", "ddtree"])
def test_asking_for_a_trace_changes_nothing_else(tiny, tmp_path, mode):
    paths = {}
    for level in (None, "layers", "full"):
        paths[level] = tmp_path / f"{level}.h5"
        make_run(RunOptions(tiny, paths[level], mode, device="cpu", batch=2, trace=level))
    plain = arrays(paths[None], only_traces=False)
    assert not any(name.startswith("trace/") for own in plain for name in own)
    for level in ("layers", "full"):
        rest = [{n: a for n, a in own.items() if n in plain[0]} for own in arrays(paths[level], only_traces=False)]
        assert_same_bits(rest, plain)
    full, layers = arrays(paths["full"]), arrays(paths["layers"])
    assert_same_bits([{n: own[n] for n in layers[0]} for own in full], layers)
    assert len(layers[0]) < len(full[0])


def test_a_teacher_forced_run_traces_the_given_tokens(tiny, tmp_path):
    run = tmp_path / "r.h5"
    make_run(RunOptions(tiny, run, device="cpu", teacher_force=True, trace="full"))
    assert_same_bits(arrays(run), arrays(tiny))


def test_the_manifest_says_the_level(tiny, tmp_path):
    make_run(RunOptions(tiny, tmp_path / "r.h5", device="cpu", trace="layers"))
    for path, level in ((tiny, "full"), (tmp_path / "r.h5", "layers")):
        with open_bundle(path) as bundle:
            assert bundle.manifest["trace"] == level


def test_nothing_is_taken_from_another_path(tiny, tmp_path, monkeypatch):
    """A recorder that reads the wrong cache row is caught: the rows are really read."""
    real = Recorder.watch

    def shifted(self, rows, tree=None):
        observe = real(self, rows, tree)
        self._places = self._places[::-1]
        return observe

    monkeypatch.setattr(Recorder, "watch", shifted)
    make_run(RunOptions(tiny, tmp_path / "r.h5", device="cpu", batch=1, trace="full"))
    one, other = arrays(tmp_path / "r.h5")[0], arrays(tiny)[0]
    parted = {n.rpartition(".")[2] for n in other if one[n].tobytes() != other[n].tobytes()}
    assert parted == {"kv_latent", "k_rope"}


def test_a_trace_that_does_not_fit_is_refused_before_the_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(golden_memory, "available", lambda: 10**5)
    with pytest.raises(InputError, match=r"--trace full: 33 positions of this model take \d+ kB of memory"):
        make_run(RunOptions(tiny, tmp_path / "r.h5", device="cpu", trace="full"))
    with pytest.raises(InputError, match="--trace full"):
        make_golden(GoldenOptions("tiny", tmp_path / "r.h5", PROMPTS, STEPS, trace="full"))
    assert not (tmp_path / "r.h5").exists()


def test_a_golden_in_one_arithmetic_traces_that_one(tmp_path):
    path = tmp_path / "g.h5"
    make_golden(GoldenOptions("tiny", path, PROMPTS, 3, exact=False, trace="full"))
    made = arrays(path)[0]
    assert {a.dtype for n, a in made.items() if not n.endswith("expert_ids")} == {np.dtype(np.float64)}
    with open_bundle(path) as bundle:
        config = parse_config(parse_json(bundle.config_text, "config"))
        assert config == open_model("tiny").config

"""`--tolerance auto` end to end: engines that round otherwise pass, engines that are wrong fail, on real models.

Runs come from the NumPy model in another arithmetic, fed the golden's tokens, written as any external engine's.
"""

import dataclasses
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kdtr_cli.bundle.reader import open_bundle, read_manifest
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.sweep import Sweep, read_sweep, shared_manifest, write_sweep
from kdtr_cli.bundle.writer import BundleWriter
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Prompt
from kdtr_cli.model.source import open_model
from kdtr_cli.parity.auto import FACTORS
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.reference import bf16, float32
from kdtr_cli.reference.generate import score_group
from kdtr_cli.reference.transformer import Model
from kdtr_cli.report.text import report_text
from kdtr_cli.workflows.diff import diff
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.merge import merge_sweep
from kdtr_cli.workflows.prompts import PromptOptions
from kdtr_cli.workflows.sweep import SweepOptions
from kdtr_cli.workflows.sweep_diff import diff_sweeps
from kdtr_cli.workflows.sweep_golden import make_golden_sweep

FIXTURES = Path(__file__).parents[2] / "fixtures"
PROMPTS = PromptOptions(ids=("51 281 282", "7", "100 100 100 100 100"))
AUTO = JudgeOptions(tolerance="auto")

pytestmark = pytest.mark.quick


def named(model: str) -> str:
    return str(FIXTURES / model) if model.startswith("tiny-kimi") else model


@pytest.fixture(scope="module")
def goldens(tmp_path_factory):
    """The golden of a model, with the floor of bf16, made once."""
    made = {}

    def of(model: str) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp(model) / "g.h5"
            make_golden(GoldenOptions(named(model), made[model], PROMPTS, 12, ignore_eos=True, bf16=True))
        return made[model]

    return of


def write_run(golden: Path, path: Path, ops: ModuleType, tier: str, model: str, **wrong) -> Path:
    """A teacher-forced run by the NumPy model in an arithmetic; ``wrong``: fields of the config that it gets wrong."""
    opened = open_model(named(model))
    engine = Model(dataclasses.replace(opened.config, **wrong), opened.weights, Choices(), 80, ops)
    with open_bundle(golden) as bundle, BundleWriter(path, "run", True) as writer:
        writer.add_config(bundle.config_text)
        sequences = list(bundle.sequences)
        prompts = [Prompt(s.id, s.prompt, s.stream) for s in sequences]
        made = score_group(engine, prompts, [s.tokens for s in sequences])
        for s, (_, logits) in zip(sequences, made, strict=True):
            arrays = {"logits/engine": logits.astype(np.float32)}
            writer.add_sequence(SequenceData(s.id, s.stream, s.prompt, s.tokens, s.finish_reason, arrays))
        kept = {k: v for k, v in bundle.manifest.items() if k not in ("datasets", "kind", "schema", "sequences")}
        kept["decoding"] = {**kept["decoding"], "teacher_forced": True}
        kept["model"] = {**kept["model"], "embedded": False}
        del kept["noise_floor"]
        own = {
            "arithmetic": ["engine"],
            "tier": tier,
            "run": {"device": "numpy", "golden_manifest_sha256": bundle.manifest_sha256},
        }
        writer.finish({**kept, **own})
    return path


@pytest.mark.parametrize(("model", "tier"), [("tiny", "exact"), ("tiny", "fp32"), ("tiny-kimi", "exact")])
def test_a_float32_engine_passes_and_uses_a_good_part_of_it(goldens, tmp_path, model, tier):
    report = diff(goldens(model), write_run(goldens(model), tmp_path / "r.h5", float32, tier, model), AUTO)
    assert report.verdict is Verdict.PASS, report.reason
    assert report.reference == ("exact" if tier == "exact" else "float64")
    # half of what the factor allows would be too little to justify it, all of it too much
    assert 0.05 < report.totals.max_share < 0.75


@pytest.mark.parametrize(
    "wrong",
    [{"routed_scaling_factor": 1.0}, {"num_experts_per_tok": 1}, {"rms_norm_eps": 2e-4}, {"rope_theta": 9000.0}],
    ids=str,
)
def test_a_float32_engine_that_is_wrong_fails(goldens, tmp_path, wrong):
    report = diff(
        goldens("tiny"), write_run(goldens("tiny"), tmp_path / "r.h5", float32, "exact", "tiny", **wrong), AUTO
    )
    assert report.verdict is Verdict.DIVERGED
    assert report.totals.max_share > 10


def test_a_bf16_engine_passes_and_one_with_a_wrong_scale_fails(goldens, tmp_path):
    golden = goldens("tiny-kimi")
    report = diff(golden, write_run(golden, tmp_path / "r.h5", bf16, "bf16", "tiny-kimi"), AUTO)
    assert report.verdict is Verdict.PASS, report.reason
    # it is the very emulation that the floor was measured with
    assert report.totals.max_share == pytest.approx(1 / FACTORS["bf16"], rel=0.2)
    wrong = write_run(golden, tmp_path / "w.h5", bf16, "bf16", "tiny-kimi", routed_scaling_factor=1.0)
    assert diff(golden, wrong, AUTO).verdict is Verdict.DIVERGED


def other_bf16() -> ModuleType:
    """Another right bf16 engine: norms and SwiGLU are rounded twice, attention's weights not at all."""
    made = ModuleType("other_bf16")
    made.__dict__.update({name: getattr(bf16, name) for name in (*bf16.__all__, "SHARED_PARTS")})
    made.attend = lambda *args: bf16.stored(float32.attend(*args))
    made.swiglu = lambda gate, up: bf16.stored(bf16.stored(gate * bf16.sigmoid(gate)) * up)
    made.rms_norm = lambda x, w, eps: bf16.stored(bf16.stored(float32.rms_norm(x, np.ones_like(w), eps)) * w)
    return made


def test_another_bf16_engine_passes_as_one_of_int4(goldens, tmp_path):
    golden = goldens("tiny-kimi-int4")
    report = diff(golden, write_run(golden, tmp_path / "r.h5", other_bf16(), "int4", "tiny-kimi-int4"), AUTO)
    assert report.verdict is Verdict.PASS, report.reason


def test_a_golden_without_the_floor_is_invalid_and_says_what_to_do(goldens, tmp_path):
    bare = tmp_path / "bare.h5"
    make_golden(GoldenOptions("tiny", bare, PROMPTS, 2))
    report = diff(bare, write_run(bare, tmp_path / "r.h5", bf16, "bf16", "tiny"), AUTO)
    assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)
    assert "holds no noise floor for tier bf16: make it anew with 'kdtr golden --bf16', or give --atol" in report.reason
    real = tmp_path / "real.h5"
    make_golden(GoldenOptions("tiny", real, PROMPTS, 2, exact=False, bf16=True))
    with open_bundle(real) as bundle:
        assert set(bundle.manifest["noise_floor"]) == {"bf16"}
    report = diff(real, write_run(real, tmp_path / "r2.h5", float32, "exact", "tiny"), AUTO)
    assert report.verdict is Verdict.INVALID
    assert "tier exact: make it anew with float64" in report.reason


def test_the_report_prints_each_bound_with_its_origin_and_what_was_used(goldens, tmp_path):
    golden = goldens("tiny")
    with open_bundle(golden) as bundle:
        floor = bundle.manifest["noise_floor"]["exact"]["max_abs"]
    text = report_text(diff(golden, write_run(golden, tmp_path / "r.h5", float32, "exact", "tiny"), AUTO))
    assert f"(auto: 8 x the golden's floor {floor:.2g}; --tolerance)" in text
    assert "(auto: 8^2 x the golden's floor" in text
    assert " % of atol, " in next(line for line in text.splitlines() if line.startswith("used    "))


def test_a_sweep_is_judged_by_the_floor_of_the_whole(tmp_path):
    """A shard of its own would be judged by its own, smaller floor."""
    folder = tmp_path / "g"
    make_golden_sweep(GoldenOptions("tiny", folder, PROMPTS, 4), SweepOptions(1, 1))
    merge_sweep(folder, tmp_path / "g.h5", False)
    runs = tmp_path / "r"
    runs.mkdir()
    shards = sorted(folder.glob("*.h5"))
    for shard in shards:
        write_run(shard, runs / shard.name, float32, "exact", "tiny")
    floors = []
    for path in (*shards, tmp_path / "g.h5"):
        with open_bundle(path) as bundle:
            floors.append(bundle.manifest["noise_floor"]["exact"]["max_abs"])
    assert floors[-1] == max(floors[:-1]) > min(floors)
    made = [diff(shard, runs / shard.name, AUTO).tolerance.atol for shard in shards]
    assert made == [FACTORS["exact"] * f for f in floors[:-1]]
    whole = write_run(tmp_path / "g.h5", tmp_path / "r.h5", float32, "exact", "tiny")
    want = diff(tmp_path / "g.h5", whole, AUTO)
    _write_plan(folder, runs)
    found = diff_sweeps(folder, runs, AUTO)
    assert found.reason is None
    assert (found.verdict, found.tolerance) == (want.verdict, want.tolerance)
    assert found.tolerance.atol == FACTORS["exact"] * floors[-1]
    chosen = diff_sweeps(folder, runs, dataclasses.replace(AUTO, select=("1",)))
    assert (chosen.verdict, chosen.tolerance) == (want.verdict, want.tolerance)


def _write_plan(golden: Path, runs: Path) -> None:
    """sweep.json of runs that were written one by one."""
    shards = []
    for shard in read_sweep(golden).shards:
        manifest, _ = read_manifest(runs / shard.name)
        shards.append(dataclasses.replace(shard, golden=manifest["run"]["golden_manifest_sha256"]))
    write_sweep(runs, Sweep("run", shared_manifest(manifest), tuple(shards)))

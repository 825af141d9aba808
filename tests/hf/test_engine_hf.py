"""transformers as an engine: its logits are the golden's within rounding, its weights are shown to be the golden's."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.errors import EngineError, InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.presets import write_model
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.line import verdict_line
from kdtr_cli.workflows.diff import diff
from kdtr_cli.workflows.engine_run import EngineRunOptions, make_engine_run
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.prompts import PromptOptions

pytestmark = pytest.mark.hf

FIXTURES = Path(__file__).parents[2] / "fixtures"
KIMI = FIXTURES / "tiny-kimi"
STEPS = 8
F32 = Choices(rope_angles="f32")


def golden_of(path: Path, model: str | Path = KIMI, prompts: PromptOptions | None = None, **options) -> Path:
    prompts = prompts or PromptOptions(texts=("class Stack:", "def f(x):\n    return"))
    made = GoldenOptions(str(model), path, prompts, STEPS, **{"choices": F32, **options})
    make_golden(made)
    return path


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """float64 logits alone, and the prompts' too."""
    path = tmp_path_factory.mktemp("hf") / "golden.h5"
    return golden_of(path, exact=False, score=True, embed_weights=False)


def run(golden: Path, output: Path, folder: Path | str = KIMI, **options):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return make_engine_run(EngineRunOptions(golden, output, f"hf:{folder}", **options))


class TestTinyKimi:
    @pytest.mark.parametrize("forced", [False, True])
    def test_every_logit_is_within_rounding_of_float64(self, golden, tmp_path, forced):
        made = run(golden, tmp_path / "r.h5", teacher_force=forced)
        assert (made.engine, made.logits) == ("hf:transformers", "full")
        report = diff(golden, tmp_path / "r.h5", JudgeOptions(atol=2e-4))
        assert report.verdict is Verdict.PASS
        assert report.totals.tokens_equal == 2 * STEPS
        assert 0 < report.totals.max_abs < 1e-4
        line = verdict_line(report)
        assert " reference=float64 " in line
        assert "weights=unverified" not in line

    def test_its_weights_are_the_golden_s_by_digest(self, golden, tmp_path):
        run(golden, tmp_path / "r.h5")
        with open_bundle(golden) as wanted, open_bundle(tmp_path / "r.h5") as got:
            assert got.manifest["model"]["weights_used_sha256"] == wanted.manifest["model"]["weights_used_sha256"]
            assert got.manifest["run"]["engine_name"] == "transformers"

    def test_one_other_weight_is_seen(self, golden, tmp_path):
        """An expert's matrix, whose name the stacked tensor in memory does not have."""
        import ml_dtypes
        from safetensors.numpy import load_file, save_file

        folder = tmp_path / "other"
        shutil.copytree(KIMI, folder)
        weights = load_file(folder / "model.safetensors")
        name = next(n for n in weights if n.endswith("layers.2.mlp.experts.3.up_proj.weight"))
        weights[name] = weights[name].copy()
        weights[name][0, 0] += ml_dtypes.bfloat16(1)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        run(golden, tmp_path / "r.h5", folder)
        report = diff(golden, tmp_path / "r.h5", JudgeOptions(atol=1e3, allow_loose=True))
        assert report.verdict is Verdict.INVALID
        assert "weights as used" in report.reason

    def test_a_sampled_golden_is_sampled_by_its_own_rule(self, tmp_path):
        golden = golden_of(tmp_path / "g.h5", temperature=0.8, embed_weights=False)
        run(golden, tmp_path / "r.h5")
        assert diff(golden, tmp_path / "r.h5", JudgeOptions(atol=2e-4)).verdict is Verdict.PASS

    def test_bfloat16_is_a_tier_of_its_own(self, golden, tmp_path):
        run(golden, tmp_path / "r.h5", tier="bf16", teacher_force=True)
        assert diff(golden, tmp_path / "r.h5", JudgeOptions(atol=2e-4)).verdict is Verdict.DIVERGED
        report = diff(golden, tmp_path / "r.h5", JudgeOptions(atol=1.0))
        assert report.totals.max_abs > 1e-3
        assert report.verdict in (Verdict.PASS, Verdict.TIE_BREAK)
        with open_bundle(tmp_path / "r.h5") as bundle:
            logits = bundle.sequences[0].array("logits/engine")
        assert not np.any(logits.view(np.uint32) & 0xFFFF)  # bfloat16 in float32


@pytest.mark.parametrize("preset", ["tiny", "tiny-groups", "tiny-v2"])
def test_the_weights_that_a_golden_embeds(tmp_path, preset):
    golden = golden_of(tmp_path / "g.h5", preset, PromptOptions(ids=("1 2 3", "7")))
    run(golden, tmp_path / "r.h5", "")
    report = diff(golden, tmp_path / "r.h5", JudgeOptions(atol=1e-3, rtol=0))
    assert report.verdict is Verdict.PASS
    assert report.unverified == ("rope",)


class TestRefused:
    def test_choices_that_are_not_its_own(self, tmp_path):
        for choices, word in ((Choices(), "--rope-angles f32"), (Choices("config", "f32"), "1e-6")):
            golden = golden_of(tmp_path / "g.h5", choices=choices, exact=False, embed_weights=False, force=True)
            with pytest.raises(InputError, match=word):
                run(golden, tmp_path / "r.h5")

    def test_folders_that_won_t_do(self, golden, tmp_path):
        write_model(tmp_path / "tiny", "tiny")
        (tmp_path / "empty").mkdir()
        for folder, word in (
            (tmp_path / "none", "not a folder"),
            (tmp_path / "tiny", "is not that of the golden"),
            (tmp_path / "empty", "config.json"),
            ("", "holds no weights"),
        ):
            with pytest.raises(InputError, match=word):
                run(golden, tmp_path / "r.h5", folder)

    def test_a_quantised_model_and_a_tier_that_it_lacks(self, golden, tmp_path):
        fp8 = golden_of(tmp_path / "g.h5", FIXTURES / "tiny-kimi-fp8", exact=False, embed_weights=False)
        with pytest.raises(InputError, match="it is quantised"):
            run(fp8, tmp_path / "r.h5", FIXTURES / "tiny-kimi-fp8")
        with pytest.raises(InputError, match="no tier int4"):
            run(golden, tmp_path / "r.h5", tier="int4")

    def test_a_tensor_that_is_not_there_is_not_made_up(self, golden, tmp_path):
        from safetensors.numpy import load_file, save_file

        folder = tmp_path / "less"
        shutil.copytree(KIMI, folder)
        weights = load_file(folder / "model.safetensors")
        del weights[next(n for n in weights if n.endswith("layers.1.self_attn.o_proj.weight"))]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(EngineError, match=r"missing_keys .*o_proj"):
            run(golden, tmp_path / "r.h5", folder)
        assert not (tmp_path / "r.h5").exists()

    def test_one_that_takes_too_long(self, golden, tmp_path):
        with pytest.raises(EngineError, match="--timeout"):
            run(golden, tmp_path / "r.h5", timeout=1e-3)
        assert list(tmp_path.iterdir()) == []

    def test_without_the_extra_it_says_what_to_install(self, golden, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(InputError, match=r"pip install 'kdtr\[hf\]'"):
            make_engine_run(EngineRunOptions(golden, tmp_path / "r.h5", f"hf:{KIMI}"))

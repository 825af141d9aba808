"""`kdtr run` on the CPU device: what it takes from a golden, what it writes, and what it refuses."""

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.engine.compile import source_text
from kdtr_cli.engine.devices import open_device
from kdtr_cli.errors import DeviceError, Exit, InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.presets import write_model
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.workflows import run as workflow
from kdtr_cli.workflows.diff import diff
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.prompts import PromptOptions, random_prompt
from kdtr_cli.workflows.run import RunOptions, make_run
from kdtr_cli.workflows.verify import verify_bundle

KIMI = Path(__file__).parents[2] / "fixtures" / "tiny-kimi"
THREE = PromptOptions(ids=("1 2 3", "7", "9 8 7 6 5 4 3 2 1"))


def run(golden: Path, output: Path, **options):
    return make_run(RunOptions(golden, output, **{"device": "cpu", **options}))


def golden_of(path: Path, model: str = "tiny", prompts: PromptOptions = THREE, steps: int = 4, **options) -> Path:
    make_golden(GoldenOptions(model, path, prompts, steps, **options))
    return path


def tokens_of(path: Path) -> list[list[int]]:
    with open_bundle(path) as bundle:
        return [s.tokens.tolist() for s in bundle.sequences]


def content(path: Path) -> list[dict[str, bytes]]:
    """Tokens and arrays of every sequence."""
    with open_bundle(path) as bundle:
        return [
            {"tokens": s.tokens.tobytes(), **{name: s.array(name).tobytes() for name in s.array_names()}}
            for s in bundle.sequences
        ]


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return golden_of(tmp_path_factory.mktemp("run") / "golden.h5", score=True)


@pytest.fixture(scope="module")
def made(golden):
    path = golden.parent / "run.h5"
    return path, run(golden, path)


class TestContent:
    def test_is_identical_to_the_golden(self, golden, made):
        path, summary = made
        report = diff(golden, path)
        assert (report.verdict, report.exit_code) == (Verdict.IDENTICAL, 0)
        assert report.totals.tokens == 12
        assert verify_bundle(path).problems == ()
        with open_bundle(golden) as wanted, open_bundle(path) as got:
            assert got.kind == "run"
            for a, b in zip(got.sequences, wanted.sequences, strict=True):
                assert (a.id, a.stream, a.finish_reason) == (b.id, b.stream, b.finish_reason)
                assert a.prompt.tolist() == b.prompt.tolist()
                assert a.tokens.tolist() == b.tokens.tolist()
                assert set(a.array_names()) == {"logits/engine", "prompt_logits/engine"}
                for group in ("logits", "prompt_logits"):
                    assert a.array(f"{group}/engine").tobytes() == b.array(f"{group}/exact").tobytes()
        assert [p.id for p, _ in summary.sequences] == ["0", "1", "2"]
        assert [r.tokens.tolist() for _, r in summary.sequences] == tokens_of(path)

    def test_the_manifest(self, golden, made):
        path, summary = made
        with open_bundle(golden) as wanted, open_bundle(path) as got:
            a, b = got.manifest, wanted.manifest
            for key in ("producer", "contract_version", "choices", "decoding", "tier", "logits", "score"):
                assert a[key] == b[key]
            assert a["arithmetic"] == ["engine"]
            assert a["model"].pop("embedded") is False
            assert b["model"].pop("embedded") is True
            assert a["model"] == b["model"]
            assert got.config_text == wanted.config_text
            assert got.weight_names() == []
            about = a["run"]
            assert about["golden_manifest_sha256"] == wanted.manifest_sha256
        assert about["batch"] == 8
        assert about["device"].startswith("cpu")
        assert about["compiler"]
        assert len(about["kernels_sha256"]) == 64
        assert all(about[key] == summary.device[key] for key in ("device", "driver", "compiler"))

    def test_the_kernel_digest_is_of_their_sources(self, monkeypatch):
        right = workflow._kernels_sha256({})
        assert right == workflow._kernels_sha256({})
        source_text = workflow.source_text
        monkeypatch.setattr(workflow, "source_text", lambda *file: source_text(*file) + "// another")
        assert workflow._kernels_sha256({}) != right

    def test_another_job_and_other_kernels_are_what_runs_and_the_bundle_says_what_was_asked(
        self, golden, made, tmp_path
    ):
        def shorter(job):
            return replace(job, decoding=replace(job.decoding, steps=1))

        text = source_text("embed.cu") + "// another"
        options = RunOptions(golden, tmp_path / "r.h5", device="cpu")
        workflow.run_changed(open_device("cpu", replaced={"embed.cu": text}), options, shorter)
        with open_bundle(tmp_path / "r.h5") as changed, open_bundle(made[0]) as plain:
            assert {len(s.tokens) for s in changed.sequences} == {1}
            ours, theirs = dict(changed.manifest), dict(plain.manifest)
            assert ours["decoding"] == theirs["decoding"]
            assert ours["model"] == theirs["model"]
            assert ours["run"]["kernels_sha256"] != theirs["run"]["kernels_sha256"]

    def test_batch_and_prefill_change_no_bit(self, golden, made, tmp_path):
        for options in ({"batch": 1}, {"batch": 2, "prefill": 1}, {"batch": 3, "prefill": 4}):
            run(golden, tmp_path / "r.h5", force=True, **options)
            assert content(tmp_path / "r.h5") == content(made[0])

    def test_again_it_is_the_same_file(self, golden, made, tmp_path):
        run(golden, tmp_path / "again.h5")
        assert (tmp_path / "again.h5").read_bytes() == made[0].read_bytes()

    def test_fewer_and_more_steps(self, golden, tmp_path):
        run(golden, tmp_path / "two.h5", steps=2)
        run(golden, tmp_path / "six.h5", steps=6)
        whole = tokens_of(golden)
        assert tokens_of(tmp_path / "two.h5") == [t[:2] for t in whole]
        six = tokens_of(tmp_path / "six.h5")
        assert [len(t) for t in six] == [6, 6, 6]
        assert [t[:4] for t in six] == whole
        with open_bundle(tmp_path / "two.h5") as bundle:
            assert bundle.manifest["decoding"]["steps"] == 2
        assert diff(golden, tmp_path / "two.h5", JudgeOptions(steps=2)).verdict is Verdict.IDENTICAL

    @pytest.mark.parametrize(
        ("options", "arrays"),
        [
            ({"logits": "top:3"}, {"logits/engine_top_ids", "logits/engine_top_values", "logits/engine_sha256"}),
            ({"logits": "digest"}, {"logits/engine_sha256"}),
            ({"exact": False}, {"logits/engine"}),
        ],
    )
    def test_a_run_takes_the_golden_s_form(self, tmp_path, options, arrays):
        golden = golden_of(tmp_path / "g.h5", steps=2, **options)
        run(golden, tmp_path / "r.h5")
        with open_bundle(tmp_path / "r.h5") as bundle:
            assert all(set(s.array_names()) == arrays for s in bundle.sequences)
        if options.get("logits") == "digest":
            assert diff(golden, tmp_path / "r.h5").verdict is Verdict.IDENTICAL

    def test_settings_come_from_the_golden(self, tmp_path):
        """Temperature, seed, stop ids, choices: nothing is asked again."""
        free = golden_of(tmp_path / "free.h5", steps=6, temperature=0.8)
        stop = tokens_of(free)[0][2]
        model = tmp_path / "model"
        write_model(model, "tiny")
        text = (model / "generation_config.json").read_text()
        (model / "generation_config.json").write_text(text.replace("511", str(stop)))
        config = (model / "config.json").read_text()
        (model / "config.json").write_text(config.replace('"eos_token_id": 511', f'"eos_token_id": {stop}'))
        prompts = PromptOptions(ids=THREE.ids, seed=0)
        options = {"temperature": 0.8, "choices": Choices("config", "f32"), "steps": 6}
        golden = golden_of(tmp_path / "g.h5", str(model), prompts, **options)
        assert any(len(t) < 6 for t in tokens_of(golden))
        run(golden, tmp_path / "r.h5")
        assert diff(golden, tmp_path / "r.h5").verdict is Verdict.IDENTICAL
        # --ignore-eos too
        on = golden_of(tmp_path / "on.h5", str(model), prompts, ignore_eos=True, **options)
        run(on, tmp_path / "ron.h5")
        assert {len(t) for t in tokens_of(tmp_path / "ron.h5")} == {6}
        assert diff(on, tmp_path / "ron.h5").verdict is Verdict.IDENTICAL

    def test_a_trained_checkpoint_from_text(self, tmp_path):
        prompts = PromptOptions(texts=("Once upon a time", "The dog"))
        golden = golden_of(tmp_path / "g.h5", str(KIMI), prompts, steps=5, embed_weights=False)
        run(golden, tmp_path / "r.h5", model=str(KIMI))
        assert diff(golden, tmp_path / "r.h5").verdict is Verdict.IDENTICAL

    def test_progress(self, golden, tmp_path):
        seen = []
        make_run(RunOptions(golden, tmp_path / "r.h5", device="cpu", steps=1), lambda *what: seen.append(what))
        assert seen == [("run", n, 3) for n in (1, 2, 3)]


class TestTeacherForcing:
    def test_along_sampled_tokens(self, tmp_path):
        other = golden_of(tmp_path / "other.h5", temperature=3.0, steps=6)
        run(other, tmp_path / "r.h5", teacher_force=True)
        with open_bundle(other) as wanted, open_bundle(tmp_path / "r.h5") as got:
            assert got.manifest["decoding"]["teacher_forced"] is True
            for a, b in zip(got.sequences, wanted.sequences, strict=True):
                # the same draws on the same logits: what it would have chosen itself
                assert a.array("logits/engine").tobytes() == b.array("logits/exact").tobytes()
                assert a.tokens.tolist() == b.tokens.tolist()

    def test_choices_that_differ_from_what_is_fed(self, golden, tmp_path, monkeypatch):
        given = [random_prompt(40 + i, 4, 512, 0) for i in range(3)]
        seen = []
        real = workflow.Request

        def forced(prompt, tokens):
            seen.append(None if tokens is None else tokens.tolist())
            return real(prompt, None if tokens is None else given[prompt.stream])

        monkeypatch.setattr(workflow, "Request", forced)
        run(golden, tmp_path / "r.h5", teacher_force=True)
        assert seen == tokens_of(golden)
        with open_bundle(tmp_path / "r.h5") as bundle:
            for sequence, tokens in zip(bundle.sequences, given, strict=True):
                own = sequence.array("logits/engine").argmax(-1).tolist()
                assert sequence.tokens.tolist() == own
                assert own != tokens.tolist()

    def test_without_it_the_engine_gets_no_token_of_the_golden(self, golden, tmp_path, monkeypatch):
        seen = []
        real = workflow.Request
        monkeypatch.setattr(workflow, "Request", lambda prompt, tokens: seen.append(tokens) or real(prompt, tokens))
        run(golden, tmp_path / "r.h5", steps=1)
        assert seen == [None, None, None]

    def test_a_prefix(self, golden, tmp_path):
        run(golden, tmp_path / "r.h5", teacher_force=True, steps=2)
        assert tokens_of(tmp_path / "r.h5") == [t[:2] for t in tokens_of(golden)]


class TestRefusals:
    def refused(self, words: str, *args, **options):
        with pytest.raises(InputError, match=words) as caught:
            run(*args, **options)
        assert caught.value.exit_code is Exit.UNJUDGED
        assert "\n" not in str(caught.value)

    def test_a_run_is_no_golden(self, made, tmp_path):
        self.refused("is a run, not a golden; make one with 'kdtr golden'", made[0], tmp_path / "r.h5")
        assert list(tmp_path.iterdir()) == []

    def test_the_golden_itself_is_never_overwritten(self, golden, tmp_path):
        before = golden.read_bytes()
        link = tmp_path / "link.h5"
        link.hardlink_to(golden)
        for output in (golden, link):
            self.refused("is the golden itself; give the run another name", golden, output, force=True)
        self.refused("use --force", golden, golden)
        assert golden.read_bytes() == before

    def test_no_weights_anywhere(self, tmp_path):
        golden = golden_of(tmp_path / "g.h5", steps=1, embed_weights=False)
        self.refused(r"holds no weights; give the checkpoint with --model DIR \(tiny\)", golden, tmp_path / "r.h5")
        run(golden, tmp_path / "r.h5", model="tiny")
        assert diff(golden, tmp_path / "r.h5").verdict is Verdict.IDENTICAL

    def test_another_model_runs_and_is_invalid(self, golden, tmp_path):
        write_model(tmp_path / "other", "tiny", seed=1)
        run(golden, tmp_path / "r.h5", model=str(tmp_path / "other"))
        report = diff(golden, tmp_path / "r.h5")
        assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)

    def test_files_that_are_no_bundle(self, tmp_path):
        text = tmp_path / "text.h5"
        text.write_text("hello")
        self.refused("text.h5", text, tmp_path / "r.h5")
        self.refused(r"none\.h5", tmp_path / "none.h5", tmp_path / "r.h5")
        assert [p.name for p in tmp_path.iterdir()] == ["text.h5"]

    def test_outputs_that_cannot_be_written(self, golden, tmp_path):
        there = tmp_path / "there.h5"
        there.write_text("mine")
        self.refused("use --force", golden, there)
        self.refused("does not exist; create it first", golden, tmp_path / "no" / "r.h5")
        assert there.read_text() == "mine"

    def test_steps_past_the_model_s_positions(self, golden, tmp_path):
        self.refused("need position 2048; the model ends at 2047", golden, tmp_path / "r.h5", steps=2041)

    def test_unknown_device_and_missing_gpu(self, golden, tmp_path):
        self.refused("unknown device 'tpu'", golden, tmp_path / "r.h5", device="tpu")
        assert list(tmp_path.iterdir()) == []

    def test_a_broken_weight_in_model_is_named(self, golden, tmp_path):
        write_model(tmp_path / "model", "tiny")
        file = tmp_path / "model" / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-2:] = b"\xc0\x7f"  # the last bf16 of the file is NaN now
        file.write_bytes(data)
        self.refused(
            r"tensor .* is nan: a weight must be finite", golden, tmp_path / "r.h5", model=str(tmp_path / "model")
        )

    def test_what_overflows_in_the_engine_is_the_device_s_failure(self, tmp_path):
        """--no-exact makes a golden of weights whose float32 arithmetic overflows; the run says where, with exit 3."""
        model = tmp_path / "model"
        write_model(model, "tiny")
        arrays = safetensors.numpy.load_file(model / "model.safetensors")
        name = "model.layers.0.mlp.down_proj.weight"
        arrays[name] = (arrays[name].astype(np.float32) * np.float32(3e38)).astype(ml_dtypes.bfloat16)
        safetensors.numpy.save_file(arrays, model / "model.safetensors")
        golden = golden_of(tmp_path / "g.h5", str(model), steps=1, exact=False)
        with pytest.raises(DeviceError, match=r"^model\.layers\.0\.hidden is not finite in row \d+ of ") as caught:
            run(golden, tmp_path / "r.h5")
        assert caught.value.exit_code is Exit.FAILED
        assert not (tmp_path / "r.h5").exists()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["g.h5", "model"]

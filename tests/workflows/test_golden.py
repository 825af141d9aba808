"""`kdtr golden`: what it writes, byte for byte again, and what it refuses before it writes."""

import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from kdtr_cli import __version__
from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.errors import Exit, InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.presets import preset_text, write_model
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.rope import rope_table, rope_table_sha256
from kdtr_cli.model.source import open_model
from kdtr_cli.model.tokenizer import load_tokenizer
from kdtr_cli.reference import exact, float64
from kdtr_cli.reference.arith import CONTRACT_VERSION, order
from kdtr_cli.reference.generate import generate, score
from kdtr_cli.reference.transformer import Model
from kdtr_cli.workflows import golden as workflow
from kdtr_cli.workflows import golden_groups, golden_memory
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.prompts import PromptOptions
from kdtr_cli.workflows.verify import verify_bundle

pytestmark = pytest.mark.quick

KIMI = Path(__file__).parents[2] / "fixtures" / "tiny-kimi"
TWO = PromptOptions(ids=("1 2 3", "7 8"))


def make(path: Path, model: str = "tiny", prompts: PromptOptions = TWO, steps: int = 3, **options):
    return make_golden(GoldenOptions(model, path, prompts, steps, **options))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A golden of `tiny` with two prompts, and what make_golden said about it."""
    path = tmp_path_factory.mktemp("golden") / "g.h5"
    return path, make(path)


def edited(folder: Path, tensor: str, change) -> Path:
    """A model folder of preset `tiny` in which one tensor is another."""
    write_model(folder, "tiny")
    file = folder / "model.safetensors"
    arrays = safetensors.numpy.load_file(file)
    arrays[tensor] = change(arrays[tensor].copy())
    safetensors.numpy.save_file(arrays, file)
    return folder


class TestContent:
    def test_tokens_and_logits_are_those_of_the_two_models(self, made):
        path, summary = made
        model = open_model("tiny")
        near, real = (Model(model.config, model.weights, Choices(), 8, ops) for ops in (exact, float64))
        apart = []
        with open_bundle(path) as bundle:
            assert bundle.kind == "golden"
            prompts = [prompt for prompt, _ in summary.sequences]
            wanted = generate(near, prompts, Decoding(3, (511,)))
            for sequence, prompt, result in zip(bundle.sequences, prompts, wanted, strict=True):
                assert sequence.prompt.tolist() == prompt.ids.tolist()
                assert sequence.tokens.tolist() == result.tokens.tolist()
                assert sequence.finish_reason == result.finish_reason
                assert (sequence.id, sequence.stream) == (prompt.id, prompt.stream)
                assert set(sequence.array_names()) == {"logits/exact", "logits/float64"}
                assert sequence.array("logits/exact").tobytes() == result.logits.tobytes()
                along = score(real, prompt, result.tokens)[len(prompt.ids) - 1 :]
                np.testing.assert_allclose(sequence.array("logits/float64"), along, rtol=0, atol=1e-12)
                apart.append(np.abs(result.logits - sequence.array("logits/float64")).max())
        assert summary.floors["exact"].max_abs == max(apart)
        assert 0 < summary.floors["exact"].max_abs < 1e-5
        assert summary.ties == 0
        assert summary.embedded

    def test_the_manifest_says_what_was_done(self, made):
        path, _ = made
        model = open_model("tiny")
        with open_bundle(path) as bundle:
            manifest, text = bundle.manifest, bundle.config_text
        assert text == preset_text("tiny")
        assert manifest["producer"] == {"name": "kdtr", "version": __version__}
        assert manifest["contract_version"] == CONTRACT_VERSION == 1
        cos, sin = rope_table(model.config, 5, "f64")
        assert manifest["model"] == {
            "name": "tiny",
            "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "weights": {n: hashlib.sha256(model.weights.stored(n).tobytes()).hexdigest() for n in model.weights.names},
            "weights_used_sha256": model.weights.used_sha256(),
            "rope_table_sha256": rope_table_sha256(cos, sin),
            "rope_positions": 5,  # 3 + 3 - 1
            "embedded": True,
        }
        assert manifest["choices"] == {"latent_norm_eps": "hf", "rope_angles": "f64", "tie_rule": "smallest-index"}
        assert manifest["decoding"] == {
            "mode": "ar",
            "temperature": 0.0,
            "seed": 0,
            "steps": 3,
            "ignore_eos": False,
            "stop_ids": [511],
            "teacher_forced": False,
        }
        assert (manifest["arithmetic"], manifest["tier"]) == (["exact", "float64"], "exact")
        assert (manifest["logits"], manifest["score"]) == ("full", False)
        assert "run" not in manifest

    def test_options_stand_in_it(self, tmp_path):
        options = {"temperature": 0.7, "ignore_eos": True, "choices": Choices("config", "f32"), "steps": 2}
        make(tmp_path / "g.h5", prompts=PromptOptions(ids=("4 5",), seed=2**63), **options)
        with open_bundle(tmp_path / "g.h5") as bundle:
            manifest = bundle.manifest
            assert manifest["choices"]["latent_norm_eps"] == "config"
            assert manifest["choices"]["rope_angles"] == "f32"
            decoding = manifest["decoding"]
            assert (decoding["temperature"], decoding["seed"], decoding["ignore_eos"]) == (0.7, 2**63, True)

    def test_weights_are_embedded_as_stored(self, made):
        path, _ = made
        weights = open_model("tiny").weights
        with open_bundle(path) as bundle:
            assert set(bundle.weight_names()) == set(weights.names)
            for name in weights.names:
                assert bundle.weight(name).dtype == weights.stored(name).dtype
                assert bundle.weight(name).tobytes() == weights.stored(name).tobytes()

    @pytest.mark.parametrize(("asked", "limit", "wanted"), [(None, 0, False), (True, 0, True), (False, 1 << 60, False)])
    def test_whether_weights_are_embedded(self, tmp_path, monkeypatch, asked, limit, wanted):
        monkeypatch.setattr(workflow, "EMBED_LIMIT", limit)
        summary = make(tmp_path / "g.h5", steps=1, embed_weights=asked)
        with open_bundle(tmp_path / "g.h5") as bundle:
            assert bool(bundle.weight_names()) == bundle.manifest["model"]["embedded"] == summary.embedded == wanted

    def test_the_limit_is_the_one_that_the_help_names(self):
        assert workflow.EMBED_LIMIT == 64 * 10**6

    def test_it_verifies(self, made):
        assert verify_bundle(made[0]).problems == ()

    def test_the_same_command_gives_the_same_bytes(self, made, tmp_path):
        path, _ = made
        make(tmp_path / "again.h5")
        assert (tmp_path / "again.h5").read_bytes() == path.read_bytes()

    def test_from_a_folder_it_is_the_preset_s_but_for_the_name(self, made, tmp_path):
        write_model(tmp_path / "copy", "tiny")
        make(tmp_path / "g.h5", str(tmp_path / "copy"))
        with open_bundle(tmp_path / "g.h5") as a, open_bundle(made[0]) as b:
            assert a.manifest["model"].pop("name") == "copy"
            b.manifest["model"].pop("name")
            assert a.manifest == b.manifest

    def test_no_path_is_inside(self, tmp_path):
        write_model(tmp_path / "copy", "tiny")
        make(tmp_path / "g.h5", str(tmp_path / "copy"), steps=1, embed_weights=False)
        assert str(tmp_path).encode() not in (tmp_path / "g.h5").read_bytes()

    def test_progress(self, tmp_path):
        seen = []
        make_golden(GoldenOptions("tiny", tmp_path / "g.h5", TWO, 2), lambda *what: seen.append(what))
        assert list(dict.fromkeys(what for what, _, _ in seen)) == ["digests", "prompts", "step 1 of 2", "float64"]
        done, totals = [done for _, done, _ in seen], {total for _, _, total in seen}
        assert done == sorted(done)
        assert len(totals) == 1
        assert done[-1] == pytest.approx(totals.pop(), rel=0.01)

    def test_groups_of_sequences_show_nowhere(self, made, tmp_path, monkeypatch):
        monkeypatch.setattr(golden_memory, "BATCH", 1)
        make(tmp_path / "g.h5")
        assert (tmp_path / "g.h5").read_bytes() == made[0].read_bytes()


class TestForms:
    def arrays(self, path: Path, index: int = 0) -> dict[str, np.ndarray]:
        with open_bundle(path) as bundle:
            sequence = bundle.sequences[index]
            return {name: sequence.array(name) for name in sequence.array_names()}

    @pytest.fixture(scope="class")
    @classmethod
    def full(cls, made):
        return cls().arrays(made[0])

    def test_top_k(self, full, tmp_path):
        make(tmp_path / "g.h5", logits="top:5")
        top = self.arrays(tmp_path / "g.h5")
        assert set(top) == {
            f"logits/{a}_{p}" for a in ("exact", "float64") for p in ("top_ids", "top_values", "sha256")
        }
        for arithmetic in ("exact", "float64"):
            rows = full[f"logits/{arithmetic}"]
            ids = top[f"logits/{arithmetic}_top_ids"]
            assert ids.dtype == np.int32
            assert ids.tolist() == order(rows, 5).tolist()
            assert top[f"logits/{arithmetic}_top_values"].tobytes() == np.take_along_axis(rows, ids, 1).tobytes()
            self.check_digests(top[f"logits/{arithmetic}_sha256"], rows)

    def check_digests(self, digests, rows):
        assert digests.shape == (len(rows), 32)
        little = rows.astype(rows.dtype.newbyteorder("<"))
        assert [d.tobytes() for d in digests] == [hashlib.sha256(row.tobytes()).digest() for row in little]

    def test_digest(self, full, tmp_path):
        make(tmp_path / "g.h5", logits="digest")
        digests = self.arrays(tmp_path / "g.h5")
        assert set(digests) == {"logits/exact_sha256", "logits/float64_sha256"}
        for arithmetic in ("exact", "float64"):
            self.check_digests(digests[f"logits/{arithmetic}_sha256"], full[f"logits/{arithmetic}"])

    def test_the_manifest_has_one_spelling(self, tmp_path):
        make(tmp_path / "g.h5", logits="top:007", steps=1)
        with open_bundle(tmp_path / "g.h5") as bundle:
            assert bundle.manifest["logits"] == "top:7"

    @pytest.mark.parametrize(
        "text", ["top:0", "top:513", "top:", "top:-1", "top:1.5", "top:\u0663", "top:" + "9" * 5000, "TOP:5", "all", ""]
    )
    def test_other_spellings_are_refused(self, tmp_path, text):
        with pytest.raises(InputError, match="full, digest, or top:K with K from 1 to the vocabulary's 512"):
            make(tmp_path / "g.h5", logits=text)
        assert list(tmp_path.iterdir()) == []

    def test_score_keeps_the_prompt_s_logits(self, full, tmp_path):
        make(tmp_path / "g.h5", score=True)
        scored = self.arrays(tmp_path / "g.h5")
        assert set(scored) == set(full) | {"prompt_logits/exact", "prompt_logits/float64"}
        assert scored["prompt_logits/exact"].shape == (3, 512)
        for arithmetic in ("exact", "float64"):
            # the prompt's last row is what the first token was chosen from
            last, first = scored[f"prompt_logits/{arithmetic}"][-1], full[f"logits/{arithmetic}"][0]
            np.testing.assert_allclose(last, first, rtol=0, atol=0 if arithmetic == "exact" else 1e-12)
        model = open_model("tiny")
        along = score(Model(model.config, model.weights, Choices(), 8, exact), *self.given(scored))
        assert np.concatenate([scored["prompt_logits/exact"], full["logits/exact"][1:]]).tobytes() == along.tobytes()

    def given(self, arrays):
        prompt = Prompt("0", np.array([1, 2, 3], np.int32), 0)
        return prompt, arrays["logits/exact"].argmax(-1).astype(np.int32)

    def test_score_in_the_other_forms(self, tmp_path):
        make(tmp_path / "g.h5", score=True, logits="top:2", steps=1)
        assert self.arrays(tmp_path / "g.h5")["prompt_logits/exact_top_ids"].shape == (3, 2)

    def test_without_exact_there_is_float64_alone(self, full, tmp_path):
        summary = make(tmp_path / "g.h5", exact=False, score=True)
        alone = self.arrays(tmp_path / "g.h5")
        assert set(alone) == {"logits/float64", "prompt_logits/float64"}
        np.testing.assert_allclose(alone["logits/float64"], full["logits/float64"], rtol=0, atol=1e-12)
        assert summary.floors == {}
        with open_bundle(tmp_path / "g.h5") as bundle:
            assert bundle.manifest["arithmetic"] == ["float64"]
            assert bundle.sequences[0].tokens.tolist() == full["logits/float64"].argmax(-1).tolist()

    def test_a_float64_choice_that_differs_is_recorded_as_a_tie(self, tmp_path, monkeypatch):
        real = golden_groups.scored

        def other(model, prompts, outputs, state, keep):
            of_prompt, logits = real(model, prompts, outputs, state, keep)[0]
            logits[2, (outputs[0][2] + 1) % 512] = logits.max() + 1
            return [(of_prompt, logits)]

        monkeypatch.setattr(golden_groups, "scored", other)
        summary = make(tmp_path / "g.h5", prompts=PromptOptions(ids=("1 2 3",)))
        assert summary.ties == 1
        assert self.arrays(tmp_path / "g.h5")["ties"].tolist() == [2]

    def test_ties_are_looked_for_among_the_draws_at_a_temperature(self, tmp_path):
        # greedy float64 choices would differ nearly everywhere
        summary = make(tmp_path / "g.h5", temperature=2.0, steps=8)
        assert summary.ties == 0
        assert "ties" not in self.arrays(tmp_path / "g.h5")


class TestRefusals:
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_a_weight_that_is_not_finite_is_named(self, tmp_path, value):
        def change(array):
            array[2, 7] = value
            return array

        name = "model.layers.2.mlp.experts.5.up_proj.weight"
        folder = edited(tmp_path / "model", name, change)
        with pytest.raises(InputError, match=r"a weight must be finite") as caught:
            make(tmp_path / "g.h5", str(folder))
        assert f"tensor {name}[2, 7] is {value}" in str(caught.value)
        assert caught.value.exit_code is Exit.UNJUDGED
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]

    def test_an_overflow_is_named_and_leaves_nothing(self, tmp_path):
        def change(array):
            return (array.astype(np.float32) * np.float32(3e38)).astype(ml_dtypes.bfloat16)

        folder = edited(tmp_path / "model", "model.layers.0.self_attn.q_b_proj.weight", change)
        with pytest.raises(InputError, match=r"^model\.layers\.0\.self_attn\.q is not finite in sequence '0' at"):
            make(tmp_path / "g.h5", str(folder))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
        # float64 holds it
        make(tmp_path / "g.h5", str(folder), exact=False, steps=1)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"prompts": PromptOptions(ids=("1", ""))}, "prompt '1' is empty"),
            ({"prompts": PromptOptions(ids=("1 512",))}, "token 512 at place 1 is outside the vocabulary"),
            ({"prompts": PromptOptions(ids=("-1",))}, "token -1 at place 0"),
            ({"prompts": PromptOptions(texts=("x",))}, "a preset has no tokenizer"),
            ({"steps": 2047, "prompts": PromptOptions(ids=("1 2 3",))}, "need position 2048; the model ends at 2047"),
            ({"steps": 0}, "--steps 0: at least 1"),
            ({"temperature": -1.0}, "--temperature"),
            ({"model": "tinny"}, "MODEL 'tinny' does not exist"),
        ],
    )
    def test_bad_input_is_said_before_anything_is_written(self, tmp_path, options, words):
        with pytest.raises(InputError, match=words) as caught:
            make(tmp_path / "g.h5", **options)
        assert caught.value.exit_code is Exit.UNJUDGED
        assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []

    def test_the_last_position_may_be_used(self, tmp_path):
        model = tmp_path / "model"
        write_model(model, "tiny")
        config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 6, "rope_scaling": None}
        (model / "config.json").write_text(json.dumps(config))
        make(tmp_path / "g.h5", str(model), PromptOptions(ids=("1 2 3",)), steps=4, ignore_eos=True)
        with pytest.raises(InputError, match="need position 6; the model ends at 5"):
            make(tmp_path / "h.h5", str(model), PromptOptions(ids=("1 2 3",)), steps=5)

    def test_an_existing_file_is_kept_unless_forced(self, tmp_path):
        path = tmp_path / "g.h5"
        path.write_text("mine")
        with pytest.raises(InputError, match="use --force to overwrite"):
            make(path, "no such model")  # said first: before the model is looked at
        assert path.read_text() == "mine"
        make(path, steps=1, force=True)
        assert verify_bundle(path).problems == ()

    def test_a_forced_golden_that_fails_keeps_the_old_one(self, made, tmp_path, monkeypatch):
        path = tmp_path / "g.h5"
        path.write_bytes(made[0].read_bytes())

        def stop(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(golden_groups, "scored", stop)
        with pytest.raises(KeyboardInterrupt):
            make(path, force=True)
        assert path.read_bytes() == made[0].read_bytes()
        assert [p.name for p in tmp_path.iterdir()] == ["g.h5"]

    def test_a_missing_folder(self, tmp_path):
        with pytest.raises(InputError, match="does not exist; create it first"):
            make(tmp_path / "no" / "g.h5")


class TestTrainedCheckpoint:
    def test_text_in_tokens_out(self, tmp_path):
        summary = make(tmp_path / "g.h5", str(KIMI), PromptOptions(texts=("Once upon a time",)), steps=4)
        prompt, result = summary.sequences[0]
        assert summary.model.name == "tiny-kimi"
        assert summary.floors["exact"].max_abs < 1e-4
        tokenizer = load_tokenizer(KIMI)
        assert tokenizer.decode(prompt.ids.tolist()) == "Once upon a time"
        assert tokenizer.decode(result.tokens.tolist()).isprintable()
        # a trained model is sure of itself: far from the flat 1 / 1024 of a wrong one
        with open_bundle(tmp_path / "g.h5") as bundle:
            row = bundle.sequences[0].array("logits/exact")[0].astype(np.float64)
        assert np.exp(row - row.max()).sum() < 20

    def test_stop_ids_come_from_the_checkpoint(self, tmp_path):
        summary = make(tmp_path / "g.h5", str(KIMI), PromptOptions(ids=("5",)), steps=1)
        config = summary.model.config
        with open_bundle(tmp_path / "g.h5") as bundle:
            assert bundle.manifest["decoding"]["stop_ids"] == list(config.eos_token_ids)
        assert 1002 in config.eos_token_ids

"""A run by a foreign engine is a bundle like any other, or nothing at all."""

import json
import os
import re
import tempfile
from importlib.metadata import EntryPoint
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from engine_cases import STEPS, VOCAB, copier, golden_of, right_answer, saved, shell
from safetensors.numpy import load_file

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.errors import EngineError, Exit, InputError
from kdtr_cli.model.presets import write_model
from kdtr_cli.parity.log_probabilities import log_softmax
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.workflows import engines
from kdtr_cli.workflows.diff import diff
from kdtr_cli.workflows.engine_run import EngineRunOptions, make_engine_run
from kdtr_cli.workflows.engines import Answer, AnswerSequence
from kdtr_cli.workflows.verify import verify_bundle


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return golden_of(tmp_path_factory.mktemp("engine run") / "golden.h5", embed_weights=False)


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    """Where the private folders are made; nothing may stay there. Its name has a space."""
    folder = tmp_path / "temporary files"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def run(golden: Path, output: Path, engine: str, **options):
    return make_engine_run(EngineRunOptions(golden, output, engine, **options))


def answered(golden: Path, folder: Path, about: str | None = None, **changes) -> Path:
    """A run whose engine answers with the golden's own outputs, changed."""
    arrays = {k: v for k, v in {**right_answer(golden), **changes}.items() if v is not None}
    run(golden, folder / "r.h5", copier(saved(folder / "answer", arrays, about)), force=True)
    return folder / "r.h5"


class TestBundle:
    def test_the_right_answer_is_identical(self, golden, tmp_path):
        path = answered(golden, tmp_path)
        assert verify_bundle(path).problems == ()
        report = diff(golden, path)
        assert (report.verdict, report.exit_code) == (Verdict.IDENTICAL, 0)
        assert report.unverified == ("weights", "rope")

    def test_the_manifest_says_what_is_known_and_no_path(self, golden, tmp_path):
        about = {"name": "mine", "version": "1.2", "device": "H200", "weights_used_sha256": "ab" * 32}
        path = answered(golden, tmp_path, json.dumps(about))
        with open_bundle(golden) as wanted, open_bundle(path) as got:
            a, b = got.manifest, wanted.manifest
            for key in ("producer", "contract_version", "choices", "decoding", "tier", "logits", "score"):
                assert a[key] == b[key]
            assert a["arithmetic"] == ["engine"]
            assert a["model"] == {
                "name": "tiny",
                "config_sha256": b["model"]["config_sha256"],
                "weights": None,
                "weights_used_sha256": "ab" * 32,
                "rope_table_sha256": None,
                "embedded": False,
            }
            assert a["run"] == {
                "engine": "command:sh",
                "engine_name": "mine",
                "engine_version": "1.2",
                "device": "H200",
                "driver": None,
                "compiler": None,
                "kernels_sha256": None,
                "batch": None,
                "golden_manifest_sha256": wanted.manifest_sha256,
            }
            assert str(tmp_path) not in json.dumps(a)
        assert diff(golden, path).verdict is Verdict.INVALID  # other weights than the golden's, it says

    def test_the_same_answer_is_the_same_file(self, golden, tmp_path):
        first = answered(golden, tmp_path).read_bytes()
        assert answered(golden, tmp_path).read_bytes() == first

    def test_choices_that_the_engine_made_otherwise_can_t_be_judged(self, golden, tmp_path):
        path = answered(golden, tmp_path, json.dumps({"choices": {"latent_norm_eps": "config"}}))
        report = diff(golden, path)
        assert report.verdict is Verdict.INVALID
        assert "latent_norm_eps" in report.reason

    def test_the_right_weights_digest_is_verified(self, golden, tmp_path):
        with open_bundle(golden) as bundle:
            digest = bundle.manifest["model"]["weights_used_sha256"]
        path = answered(golden, tmp_path, json.dumps({"weights_used_sha256": digest}))
        assert diff(golden, path).unverified == ("rope",)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_logits_that_are_not_finite_are_kept_and_diverge(self, golden, tmp_path, value):
        logits = right_answer(golden)["logits"].copy()
        logits[1, 5] = value
        path = answered(golden, tmp_path, logits=logits)
        with open_bundle(path) as bundle:
            np.testing.assert_equal(bundle.sequences[0].array("logits/engine")[1, 5], np.float32(value))
        report = diff(golden, path)
        assert (report.verdict, report.exit_code) == (Verdict.DIVERGED, 1)

    def test_fewer_tokens_than_steps_diverge(self, golden, tmp_path):
        right = right_answer(golden)
        short = {
            "tokens/ids": np.delete(right["tokens/ids"], STEPS - 1),
            "tokens/offsets": right["tokens/offsets"] - np.array([0, 1, 1]),
            "logits": np.delete(right["logits"], STEPS - 1, axis=0),
        }
        report = diff(golden, answered(golden, tmp_path, **short))
        assert report.verdict is Verdict.DIVERGED
        assert {f.code for f in report.findings} >= {"tokens.shorter"}

    def test_another_finish_reason_diverges(self, golden, tmp_path):
        report = diff(golden, answered(golden, tmp_path, finish=np.array([0, 1], np.int32)))
        assert report.verdict is Verdict.DIVERGED

    def test_bf16_needs_a_bound_and_gets_one(self, golden, tmp_path):
        arrays = right_answer(golden)
        arrays["logits"] = arrays["logits"].astype(ml_dtypes.bfloat16)
        run(golden, tmp_path / "r.h5", copier(saved(tmp_path / "answer", arrays)), tier="bf16")
        assert diff(golden, tmp_path / "r.h5").verdict is Verdict.INVALID
        assert diff(golden, tmp_path / "r.h5", JudgeOptions(atol=0.05)).verdict is Verdict.PASS
        assert diff(golden, tmp_path / "r.h5", JudgeOptions(atol=1e-4)).verdict is Verdict.DIVERGED

    def test_partial_logits_are_inconclusive_unless_allowed(self, golden, tmp_path):
        logits = right_answer(golden)["logits"]
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :20].astype(np.int32)
        top = {"logits": None, "top_ids": ids, "top_values": np.take_along_axis(logits, ids, 1)}
        path = answered(golden, tmp_path, **top)
        with open_bundle(path) as bundle:
            assert bundle.manifest["logits"] == "top:20"
        assert verify_bundle(path).problems == ()
        assert diff(golden, path).verdict is Verdict.INCONCLUSIVE
        assert diff(golden, path, JudgeOptions(allow_partial=True)).verdict is Verdict.PASS
        top["top_values"] = top["top_values"] + np.float32(1e-3)
        assert diff(golden, answered(golden, tmp_path, **top)).verdict is Verdict.DIVERGED

    def test_a_program_may_say_that_it_gives_log_probabilities(self, golden, tmp_path):
        rows = log_softmax(right_answer(golden)["logits"]).astype(np.float32)
        about = json.dumps({"values": "logprobs"})
        path = answered(golden, tmp_path, about, logits=rows)
        with open_bundle(path) as bundle:
            assert bundle.manifest["values"] == "logprobs"
        assert diff(golden, path, JudgeOptions(atol=1e-5)).verdict is Verdict.PASS
        assert diff(golden, path, JudgeOptions(atol=1e-5, max_kl=1e-9)).verdict is Verdict.PASS
        assert diff(golden, path).verdict is Verdict.INVALID
        assert (
            diff(golden, answered(golden, tmp_path, logits=rows), JudgeOptions(atol=1e-5)).verdict is Verdict.DIVERGED
        )
        with pytest.raises(EngineError, match="is no log-probability"):
            answered(golden, tmp_path, about)
        with pytest.raises(EngineError, match=r"about.values is \"odds\""):
            answered(golden, tmp_path, '{"values": "odds"}')

    def test_tokens_alone_are_inconclusive(self, golden, tmp_path):
        path = answered(golden, tmp_path, logits=None)
        with open_bundle(path) as bundle:
            assert bundle.manifest["logits"] == "none"
        assert verify_bundle(path).problems == ()
        assert diff(golden, path).verdict is Verdict.INCONCLUSIVE

    def test_a_golden_that_keeps_less_is_judged_by_what_it_keeps(self, golden, tmp_path):
        """The engine's full rows are kept, whatever the golden keeps of its own."""
        for form, verdict in (("digest", Verdict.IDENTICAL), ("top:5", Verdict.IDENTICAL)):
            less = golden_of(tmp_path / "less.h5", logits=form, force=True, embed_weights=False)
            answer = saved(tmp_path / "answer", right_answer(golden))
            run(less, tmp_path / "r.h5", copier(answer), force=True)
            assert diff(less, tmp_path / "r.h5").verdict is verdict
            wrong = right_answer(golden)
            wrong["logits"] = np.nextafter(wrong["logits"], np.float32(9))
            run(less, tmp_path / "r.h5", copier(saved(tmp_path / "wrong", wrong)), force=True)
            assert diff(less, tmp_path / "r.h5").verdict is Verdict.DIVERGED


class TestQuestion:
    def test_the_engine_sees_no_answer_in_any_file(self, tmp_path):
        """All that lies in the private folder is copied away and looked through for the golden's bytes."""
        golden = golden_of(tmp_path / "whole.h5", embed_weights=True)
        script = f'cp -r "$(dirname "$2")/.." "{tmp_path}/seen"; cp "$3" "$1"'
        answer = saved(tmp_path / "answer", right_answer(golden))
        run(golden, tmp_path / "r.h5", shell(script, answer))
        seen = sorted(p.relative_to(tmp_path / "seen") for p in (tmp_path / "seen").rglob("*") if p.is_file())
        assert [str(p) for p in seen] == [
            "engine/inputs.safetensors", "model/config.json", "model/model.safetensors",
        ]  # fmt: skip
        with open_bundle(golden) as bundle:
            answers = [s.array(name) for s in bundle.sequences for name in s.array_names() if "logits" in name]
            answers += [s.tokens for s in bundle.sequences]
            weights = {name: bundle.weight(name) for name in bundle.weight_names()}
        for path in seen:
            data = (tmp_path / "seen" / path).read_bytes()
            assert not any(array[0].tobytes() in data for array in answers if array.ndim == 2)
            assert not any(array.tobytes() in data for array in answers)
        stored = load_file(tmp_path / "seen" / "model" / "model.safetensors")
        assert {name: a.tobytes() for name, a in stored.items()} == {n: w.tobytes() for n, w in weights.items()}

    def test_an_engine_that_changes_its_inputs_changes_no_question(self, tmp_path):
        """It may overwrite all that it was given: what is judged is what the golden asked."""
        golden = golden_of(tmp_path / "whole.h5", embed_weights=True)
        before = golden.read_bytes()
        answer = saved(tmp_path / "answer", right_answer(golden))
        script = 'for f in "$2" "$(dirname "$2")"/../model/*; do head -c 99 /dev/zero > "$f"; done; cp "$3" "$1"'
        run(golden, tmp_path / "r.h5", shell(script, answer))
        assert golden.read_bytes() == before
        with open_bundle(golden) as a, open_bundle(tmp_path / "r.h5") as b:
            assert [s.prompt.tolist() for s in a.sequences] == [s.prompt.tolist() for s in b.sequences]
            assert a.manifest["decoding"] == b.manifest["decoding"]
        assert diff(golden, tmp_path / "r.h5").verdict is Verdict.IDENTICAL

    def test_the_private_folder_is_the_user_s_alone(self, golden, tmp_path):
        script = f'stat -c %a "$(dirname "$2")/.." > "{tmp_path}/mode"; cp "$3" "$1"'
        run(golden, tmp_path / "r.h5", shell(script, saved(tmp_path / "answer", right_answer(golden))))
        assert (tmp_path / "mode").read_text() == "700\n"

    def test_the_user_s_model_is_named(self, golden, tmp_path):
        model = tmp_path / "my model"
        write_model(model, "tiny")
        line = f'sh -c \'echo "$3" > "$4"; cp "$5" "$1"\' sh {{out}} {{inputs}} {{model}} \'{tmp_path}/said\' '
        answer = saved(tmp_path / "answer", right_answer(golden))
        run(golden, tmp_path / "r.h5", f"command:{line} '{answer}'", model=str(model))
        assert (tmp_path / "said").read_text() == f"{model}\n"

    def test_another_model_is_told_at_once_and_invalid(self, golden, tmp_path):
        write_model(tmp_path / "other", "tiny-groups")
        arrays = right_answer(golden)
        summary = run(golden, tmp_path / "r.h5", copier(saved(tmp_path / "a", arrays)), model=str(tmp_path / "other"))
        assert summary.notes
        assert diff(golden, tmp_path / "r.h5").verdict is Verdict.INVALID

    def test_fewer_steps_and_teacher_forcing(self, golden, tmp_path):
        right = right_answer(golden)
        keep = [0, 1, STEPS, STEPS + 1]
        two = {
            "tokens/ids": right["tokens/ids"][keep],
            "tokens/offsets": np.array([0, 2, 4]),
            "finish": right["finish"],
            "logits": right["logits"][keep],
        }
        script = f'cp "$2" "{tmp_path}/inputs"; cp "$3" "$1"'
        engine = shell(script, saved(tmp_path / "answer", two))
        run(golden, tmp_path / "r.h5", engine, steps=2, teacher_force=True)
        assert load_file(tmp_path / "inputs")["tokens/ids"].tolist() == two["tokens/ids"].tolist()
        report = diff(golden, tmp_path / "r.h5", JudgeOptions(steps=2))
        assert (report.verdict, report.teacher_forced) == (Verdict.IDENTICAL, True)


class TestNothing:
    """What fails leaves no bundle, and an old one as it was."""

    @pytest.mark.parametrize(
        ("script", "word"),
        [
            ("exit 3", "exit code 3"),
            ("kill -9 $$", "SIGKILL"),
            ("sleep 60", "did not end within"),
            (":", "wrote nothing"),
            ('echo garbage > "$1"', "neither npz"),
            ('head -c 200 "$3" > "$1"', "cut short"),
            ('cp "$3" "$1"; exit 1', "exit code 1"),
            ('cp "$3" "$1"; cp "$3" "$1.npz"', "one output is expected"),
        ],
    )
    def test_an_engine_that_fails(self, golden, tmp_path, script, word):
        engine = shell(script, saved(tmp_path / "answer", right_answer(golden)))
        timeout = 0.2 if "sleep" in script else 30
        with pytest.raises(EngineError, match=word) as caught:
            run(golden, tmp_path / "r.h5", engine, timeout=timeout)
        assert caught.value.exit_code is Exit.FAILED
        assert sorted(os.listdir(tmp_path)) == ["answer", "temporary files"]
        (tmp_path / "r.h5").write_bytes(b"old")
        with pytest.raises(EngineError):
            run(golden, tmp_path / "r.h5", engine, timeout=timeout, force=True)
        assert (tmp_path / "r.h5").read_bytes() == b"old"

    def test_a_fault_in_the_last_sequence(self, golden, tmp_path):
        arrays = right_answer(golden)
        arrays["tokens/ids"] = arrays["tokens/ids"].copy()
        arrays["tokens/ids"][-1] = VOCAB
        with pytest.raises(EngineError, match=f"id {VOCAB}"):
            run(golden, tmp_path / "r.h5", copier(saved(tmp_path / "answer", arrays)))
        assert sorted(os.listdir(tmp_path)) == ["answer", "temporary files"]

    @pytest.mark.parametrize("timeout", [float("nan"), float("inf"), 1e300, 0.0, -1.0])
    def test_a_time_limit_that_is_none(self, golden, tmp_path, timeout):
        with pytest.raises(InputError, match="--timeout"):
            run(golden, tmp_path / "r.h5", shell(f'touch "{tmp_path}/ran"'), timeout=timeout)
        assert os.listdir(tmp_path) == ["temporary files"]

    def test_targets_and_models_are_looked_at_first(self, golden, tmp_path):
        engine = shell(f'touch "{tmp_path}/ran"')
        write_model(tmp_path / "m", "tiny")
        (tmp_path / "r.h5").write_bytes(b"old")
        for word, options in (
            ("exists", {"output": tmp_path / "r.h5"}),
            ("golden itself", {"output": golden, "force": True}),
            ("not a folder", {"output": tmp_path / "n.h5", "model": "tiny"}),
            ("no config.json", {"output": tmp_path / "n.h5", "model": str(tmp_path)}),
            ("ends at", {"output": tmp_path / "n.h5", "steps": 1 << 20}),
            ("is a run", {"output": tmp_path / "n.h5", "golden": answered(golden, tmp_path)}),
        ):
            with pytest.raises(InputError, match=word):
                run(**{"golden": golden, "engine": engine, **options})
        assert not (tmp_path / "ran").exists()


def replay(argument, question):
    """An engine of another package: answers with zeros."""
    logits = np.zeros((2, question.vocab), np.float32)
    return Answer(f"replay {argument}", (AnswerSequence(np.zeros(2, int), "length", logits) for _ in question.prompts))


def broken(argument, question):
    raise ValueError("no\nluck")


def half(argument, question):
    def sequences():
        yield AnswerSequence(np.zeros(2, int), "length")
        raise OSError("gone")

    return Answer("half", sequences())


def none(argument, question):
    return None


def mixed(argument, question):
    logits = np.zeros((2, question.vocab), np.float32)
    some = [AnswerSequence(np.zeros(2, int), "length", given) for given in (logits, None)]
    return Answer("mixed", some)


NOTHING = 3


def documented(argument, question):
    """The engine of docs/engines.md, word for word."""
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(code, names)
    return names["engine"](argument, question)


class TestTable:
    @pytest.fixture(autouse=True)
    def points(self, monkeypatch):
        names = {"replay": "replay", "broken": "broken", "half": "half", "none": "none", "mixed": "mixed"}
        names |= {"documented": "documented", "nothing": "NOTHING", "gone": "no_such", "command": "replay"}
        points = [EntryPoint(n, f"{__name__}:{v}", engines.GROUP) for n, v in names.items()]
        points += [EntryPoint("twice", f"{__name__}:{v}", engines.GROUP) for v in ("replay", "half")]
        monkeypatch.setattr(engines, "entry_points", lambda group: [p for p in points if p.group == group])

    def test_a_package_s_engine_is_asked(self, golden, tmp_path):
        summary = run(golden, tmp_path / "r.h5", "replay:a:b", steps=2)
        assert summary.engine == "replay:replay a:b"
        assert [r.tokens.tolist() for _, r in summary.sequences] == [[0, 0], [0, 0]]
        assert diff(golden, tmp_path / "r.h5").verdict is Verdict.DIVERGED

    def test_the_engine_of_the_guide_takes_part(self, golden, tmp_path):
        assert run(golden, tmp_path / "r.h5", "documented").engine == "documented:my model"
        assert diff(golden, tmp_path / "r.h5").verdict is Verdict.DIVERGED

    def test_kdtr_s_own_name_can_t_be_taken(self):
        assert engines.find_engine("command:x")[2].__module__ == "kdtr_cli.workflows.engine_command"

    @pytest.mark.parametrize(
        ("engine", "error", "word"),
        [
            ("other", InputError, "'other': no such engine; there are: broken, command, documented, gone"),
            ("", InputError, "no such engine"),
            ("twice", InputError, "two packages"),
            ("gone", InputError, "can't be loaded"),
            ("nothing", InputError, "no function"),
            ("broken", EngineError, "broken failed: ValueError"),
            ("half", EngineError, "half failed: OSError: gone"),
            ("none", EngineError, "returned a NoneType"),
            ("mixed", EngineError, "other kinds of logits than the first"),
        ],
    )
    def test_one_that_does_not_work(self, golden, tmp_path, engine, error, word):
        with pytest.raises(error, match=word):
            run(golden, tmp_path / "r.h5", engine, steps=2)
        assert not (tmp_path / "r.h5").exists()

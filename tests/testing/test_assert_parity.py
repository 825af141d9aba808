"""assert_parity says what `kdtr diff` says, of bundles and of arrays in memory, and no more."""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.writer import BundleWriter
from kdtr_cli.errors import InputError
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.line import verdict_line
from kdtr_cli.testing import Output, ParityError, assert_parity, golden_inputs, golden_model
from kdtr_cli.testing.parity import replay_command
from kdtr_cli.workflows.diff import diff
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.prompts import PromptOptions

pytestmark = pytest.mark.quick

STEPS = 4


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("goldens") / "golden one.h5"
    make_golden(GoldenOptions("tiny", path, PromptOptions(ids=("1 2 3", "7", "9 9")), STEPS))
    return path


@pytest.fixture
def right(golden) -> dict[str, Output]:
    """What an engine that is right would hand over."""
    with open_bundle(golden) as bundle:
        return {s.id: Output(s.tokens.copy(), s.array("logits/exact").copy()) for s in bundle.sequences}


def refused(golden, run, **options) -> ParityError:
    with pytest.raises(ParityError) as caught:
        assert_parity(golden, run, **options)
    error = caught.value
    assert str(error).splitlines()[-1] == verdict_line(error.report)
    assert error.report.exit_code != 0
    return error


class TestMemory:
    def test_the_right_outputs_pass_and_the_report_is_returned(self, golden, right):
        assert assert_parity(golden, right).verdict is Verdict.IDENTICAL
        assert assert_parity(golden, list(right.values())).verdict is Verdict.IDENTICAL
        assert assert_parity(str(golden), dict(reversed(right.items()))).verdict is Verdict.IDENTICAL

    def test_without_a_bound_one_bit_fails(self, golden, right):
        logits = right["1"].logits
        logits[2, 5] = np.nextafter(logits[2, 5], np.float32(99))
        error = refused(golden, right)
        assert error.report.verdict is Verdict.DIVERGED
        assert "sequence '1'" in str(error)
        assert assert_parity(golden, right, max_ulp=1).verdict is Verdict.PASS
        assert assert_parity(golden, right, atol=1e-3, rtol=1e-3, max_kl=1e-3).verdict is Verdict.PASS

    def test_another_token_fails_and_is_named(self, golden, right):
        right["0"].tokens[1] ^= 1
        error = refused(golden, right, atol=1e-3)
        assert error.report.totals.first_divergence == (0, 1)
        assert "first_divergence=0:1" in str(error)

    def test_a_nan_never_passes(self, golden, right):
        right["0"].logits[0, 0] = np.nan
        loose = {"atol": 1e9, "allow_loose": True, "allow_partial": True, "on_tie": "pass"}
        assert refused(golden, right, **loose).report.verdict is Verdict.DIVERGED

    def test_a_missing_and_an_extra_sequence_fail(self, golden, right):
        right["new"] = right.pop("1")
        report = refused(golden, right).report
        assert (report.verdict, report.totals.missing, report.totals.extra) == (Verdict.DIVERGED, 1, 1)

    def test_a_list_of_another_length_is_not_cut_to_fit(self, golden, right):
        outputs = list(right.values())
        for wrong in (outputs[:2], [*outputs, outputs[0]], []):
            assert refused(golden, wrong).report.verdict is Verdict.INVALID

    def test_no_output_at_all_is_no_pass(self, golden):
        assert refused(golden, {}).report.totals.missing == 3

    def test_tokens_alone_are_inconclusive(self, golden, right):
        tokens = {name: Output(o.tokens.tolist()) for name, o in right.items()}
        assert refused(golden, tokens).report.verdict is Verdict.INCONCLUSIVE
        assert assert_parity(golden, tokens, allow_partial=True).verdict is Verdict.PASS

    def test_the_largest_logits_are_judged_as_partial_ones(self, golden, right):
        tops = {}
        for name, o in right.items():
            ids = np.argsort(-o.logits, axis=1, kind="stable")[:, :5]
            tops[name] = Output(o.tokens, top_ids=ids, top_values=np.take_along_axis(o.logits, ids, 1))
        assert refused(golden, tops, atol=1e-3).report.verdict is Verdict.INCONCLUSIVE
        report = assert_parity(golden, tops, atol=1e-3, allow_partial=True)
        assert "logits=top5" in verdict_line(report)
        tops["1"].top_values[1, 2] += np.float32(1)
        assert refused(golden, tops, atol=1e-3, allow_partial=True).report.verdict is Verdict.DIVERGED

    def test_prompt_logits_are_judged(self, right, tmp_path):
        golden = tmp_path / "scored.h5"
        make_golden(GoldenOptions("tiny", golden, PromptOptions(ids=("1 2 3", "7", "9 9")), STEPS, score=True))
        assert golden_inputs(golden).score
        assert refused(golden, right).report.verdict is Verdict.INCONCLUSIVE
        with open_bundle(golden) as bundle:
            held = {s.id: s.array("prompt_logits/exact").copy() for s in bundle.sequences}
        scored = {name: replace(o, prompt_logits=held[name]) for name, o in right.items()}
        assert assert_parity(golden, scored).totals.prompt_logits == "full"
        held["2"][0, 0] += np.float32(1)
        assert refused(golden, scored).report.verdict is Verdict.DIVERGED

    @pytest.mark.parametrize(
        "broken",
        [
            lambda o: replace(o, logits=o.logits[:-1]),
            lambda o: replace(o, logits=o.logits[:, :-1]),
            lambda o: replace(o, logits=o.logits.astype(np.float64)),
            lambda o: replace(o, tokens=o.tokens.astype(np.float32)),
            lambda o: replace(o, tokens=np.full(STEPS, 512)),
            lambda o: replace(o, logits=None),
            lambda o: replace(o, finish_reason="eos"),
            lambda o: o.tokens,
        ],
        ids=["rows", "vocabulary", "float64", "float tokens", "id", "other kinds", "reason", "no Output"],
    )
    def test_what_can_not_be_evidence_is_invalid_and_says_where(self, golden, right, broken):
        right["1"] = broken(right["1"])
        error = refused(golden, right, atol=1.0)
        assert error.report.verdict is Verdict.INVALID
        assert 'sequence "1"' in str(error)

    def test_fewer_steps_and_sequences_are_said(self, golden, right):
        short = {name: Output(o.tokens[:2], o.logits[:2]) for name, o in right.items()}
        assert refused(golden, short).report.verdict is Verdict.DIVERGED
        assert f"steps=6/{3 * STEPS}" in verdict_line(assert_parity(golden, short, steps=2))
        del right["1"]
        assert "sequences=2/3" in verdict_line(assert_parity(golden, right, select=["0", "2"]))
        assert "sequences=1/3" in verdict_line(assert_parity(golden, right, select="2"))

    def test_the_finish_reason_follows_from_the_last_token_unless_it_is_given(self, golden, right):
        assert assert_parity(golden, {n: replace(o, finish_reason="length") for n, o in right.items()})
        wrong = {n: replace(o, finish_reason="stop") for n, o in right.items()}
        assert refused(golden, wrong).report.verdict is Verdict.DIVERGED

    def test_a_rounded_tier_needs_a_bound(self, golden, right):
        rounded = {n: Output(o.tokens, o.logits.astype(ml_dtypes.bfloat16)) for n, o in right.items()}
        assert refused(golden, rounded, tier="bf16").report.verdict is Verdict.INVALID
        assert assert_parity(golden, rounded, tier="bf16", rtol=2.0**-8, atol=1e-6).verdict is Verdict.PASS

    def test_the_golden_s_own_noise_floor_is_a_bound(self, golden, right):
        with open_bundle(golden) as bundle:
            floor = bundle.manifest["noise_floor"]["exact"]["max_abs"]
        moved = {n: replace(o, logits=o.logits.copy()) for n, o in right.items()}
        moved["1"].logits[2, 5] += np.float32(4 * floor)
        assert refused(golden, moved).report.verdict is Verdict.DIVERGED
        report = assert_parity(golden, moved, tolerance="auto")
        assert (report.verdict, report.tolerance.atol) == (Verdict.PASS, 8 * floor)
        assert report.tolerance.origins["atol"].endswith("tolerance= of assert_parity")
        error = refused(golden, moved, tolerance="auto", tolerance_factor=2)
        assert error.report.verdict is Verdict.DIVERGED
        assert refused(golden, moved, tier="bf16", tolerance="auto").report.verdict is Verdict.INVALID
        with pytest.raises(InputError, match="leave one of the two out"):
            assert_parity(golden, moved, tolerance="auto", atol=1.0)

    def test_what_the_engine_says_of_its_weights_is_compared(self, golden, right):
        with open_bundle(golden) as bundle:
            used = bundle.manifest["model"]["weights_used_sha256"]
        assert "weights=unverified" in verdict_line(assert_parity(golden, right))
        verified = assert_parity(golden, right, about={"weights_used_sha256": used})
        assert "weights" not in verified.unverified
        assert refused(golden, right, about={"weights_used_sha256": "0" * 64}).report.verdict is Verdict.INVALID

    def test_forced_outputs_are_compared_at_every_step(self, golden, right):
        right["0"].logits[1] = right["0"].logits[0]
        right["0"].logits[3] += np.float32(9)
        report = refused(golden, right, atol=1e-3, teacher_forced=True).report
        assert (report.teacher_forced, report.totals.rows_compared, report.totals.rows_out) == (True, 3 * STEPS, 2)
        right["0"].tokens[0] ^= 1
        assert refused(golden, right, teacher_forced=True).report.verdict is Verdict.INVALID  # it was fed other tokens


class TestPaths:
    def test_a_bundle_is_judged_as_kdtr_diff_judges_it(self, golden, right, tmp_path):
        right["2"].tokens[0] ^= 1
        saved = tmp_path / "run.h5"
        error = refused(golden, right, atol=1e-4, save=saved)
        again = refused(golden, saved, atol=1e-4)
        line = verdict_line(diff(golden, saved, JudgeOptions(atol=1e-4)))
        assert [str(e).splitlines()[-1] for e in (error, again)] == [line, line]
        with pytest.raises(InputError, match="in memory"):
            assert_parity(golden, saved, tier="bf16")

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"atol": 1e-4, "rtol": 0.0},
            {"max_ulp": 0, "max_kl": 1e-9},
            {"tolerance": "auto"},
            {"tolerance": "auto", "tolerance_factor": 2.5, "max_ulp": 3},
            {"steps": 2, "select": ("0", "1"), "on_tie": "warn", "allow_partial": True, "allow_loose": True},
        ],
    )
    def test_the_printed_command_gives_the_same_verdict(self, golden, right, tmp_path, options):
        right["0"].logits[1, 1] += np.float32(1)
        saved = tmp_path / "it's a run.h5"
        error = refused(golden, right, save=saved, **options)
        assert error.saved == saved
        (command,) = [line for line in str(error).splitlines() if line.startswith("again: ")]
        words = shlex.split(command.removeprefix("again: "))
        assert words[:2] == ["kdtr", "diff"]
        done = subprocess.run([sys.executable, "-m", "kdtr_cli", *words[1:]], capture_output=True, text=True)
        assert done.returncode == error.report.exit_code
        assert done.stdout.splitlines()[-1] == str(error).splitlines()[-1]

    def test_a_sweep_is_judged_against_a_sweep(self, golden, tmp_path):
        whole, part = tmp_path / "golden", tmp_path / "run"
        for words in (
            ["golden", "tiny", "--num-prompts", "2", "--steps", "2", "--shard-size", "1", "-o", f"{whole}/"],
            ["run", str(whole), "-o", f"{part}/", "--device", "cpu"],
        ):
            subprocess.run([sys.executable, "-m", "kdtr_cli", *words], check=True, capture_output=True)
        assert assert_parity(whole, part).verdict is Verdict.IDENTICAL
        with pytest.raises(InputError, match="is no sweep"):
            assert_parity(whole, golden)
        with pytest.raises(InputError, match="kdtr merge"):
            assert_parity(whole, {})
        (part / "shard-000001.h5").unlink()
        assert refused(whole, part).report.verdict is Verdict.INVALID
        (whole / "shard-000001.h5").unlink()
        with pytest.raises(InputError, match="1 of 2 shards are missing"):
            assert_parity(whole, part)

    def test_nothing_is_saved_of_a_run_that_passes(self, golden, right, tmp_path):
        assert_parity(golden, right, save=tmp_path / "r.h5")
        assert not list(tmp_path.iterdir())

    def test_a_run_that_can_not_be_saved_keeps_its_verdict(self, golden, right, tmp_path):
        right["0"].tokens[0] ^= 1
        error = refused(golden, right, save=tmp_path / "no such folder" / "r.h5")
        assert error.report.verdict is Verdict.DIVERGED
        assert "not saved" in str(error)

    def test_a_broken_run_is_an_assertion_and_is_kept(self, golden, right, tmp_path):
        right["0"].tokens[0] ^= 1
        refused(golden, right, save=tmp_path / "r.h5")
        spoil(tmp_path / "r.h5", "logits/engine")
        error = refused(golden, tmp_path / "r.h5", save=tmp_path / "kept.h5")
        assert error.report.verdict is Verdict.INVALID
        assert (tmp_path / "kept.h5").read_bytes() == (tmp_path / "r.h5").read_bytes()


def spoil(path: Path, dataset: str) -> None:
    with h5py.File(path, "r+") as file:
        file[f"sequences/000000/{dataset}"][0, 0] += 1


class TestGoldenAtFault:
    """Nothing is known of the engine then: no AssertionError."""

    @pytest.mark.parametrize("in_memory", [False, True])
    def test_a_broken_golden(self, golden, right, tmp_path, in_memory):
        copy = tmp_path / "g.h5"
        copy.write_bytes(golden.read_bytes())
        right["0"].tokens[1] ^= 1
        refused(copy, right, save=tmp_path / "r.h5")
        spoil(copy, "logits/exact")
        with pytest.raises(InputError, match=r"g\.h5.*sha256|g\.h5.*SHA-256|g\.h5.*digest"):
            assert_parity(copy, right if in_memory else tmp_path / "r.h5", atol=1)

    @pytest.mark.parametrize("in_memory", [False, True])
    def test_a_golden_that_is_not_finite(self, golden, right, tmp_path, in_memory):
        """A NaN in the expected values would let anything pass or everything fail."""
        spoiled = tmp_path / "g.h5"
        with open_bundle(golden) as old, BundleWriter(spoiled, "golden") as new:
            new.add_config(old.config_text)
            for s in old.sequences:
                exact = s.array("logits/exact").copy()
                exact[1, 1] = np.nan
                arrays = {"logits/exact": exact, "logits/float64": s.array("logits/float64")}
                new.add_sequence(SequenceData(s.id, s.stream, s.prompt, s.tokens, s.finish_reason, arrays))
            own = ("schema", "kind", "sequences", "datasets")
            manifest = {k: v for k, v in old.manifest.items() if k not in own}
            new.finish({**manifest, "model": {**manifest["model"], "embedded": False}})
        right["0"].logits[1, 1] += np.float32(1)
        refused(golden, right, save=tmp_path / "r.h5")
        with pytest.raises(InputError, match=r"golden.*finite|finite.*golden"):
            assert_parity(spoiled, right if in_memory else tmp_path / "r.h5", atol=1)

    def test_a_golden_that_is_missing_or_a_run(self, golden, right, tmp_path):
        with pytest.raises(InputError, match="gone"):
            assert_parity(tmp_path / "gone.h5", right)
        right["0"].tokens[0] ^= 1
        refused(golden, right, save=tmp_path / "r.h5")
        for run in (right, tmp_path / "r.h5"):
            with pytest.raises(InputError, match="golden"):
                assert_parity(tmp_path / "r.h5", run)

    @pytest.mark.parametrize("options", [{"atol": -1}, {"on_tie": "never"}, {"steps": 0}, {"select": ["no"]}])
    def test_an_option_that_is_wrong(self, golden, right, options):
        with pytest.raises(InputError):
            assert_parity(golden, right, **options)

    def test_an_option_that_there_is_not(self, golden, right):
        with pytest.raises(TypeError, match="'tol'"):
            assert_parity(golden, right, tol=1)


class TestInputs:
    def test_they_hold_the_question_and_no_answer(self, golden):
        inputs = golden_inputs(golden)
        assert [p.ids.tolist() for p in inputs.prompts] == [[1, 2, 3], [7], [9, 9]]
        assert (inputs.steps, inputs.stop_ids, inputs.vocab, inputs.score) == (STEPS, (511,), 512, False)
        assert inputs.config["vocab_size"] == 512
        assert inputs.forced is None
        with open_bundle(golden) as bundle:
            answers = [s.tokens for s in bundle.sequences] + [s.array("logits/exact") for s in bundle.sequences]
        held = list(_arrays(inputs))
        assert held
        assert not any(np.array_equal(a, b) for a in held for b in answers)

    def test_an_engine_that_changes_its_inputs_changes_no_question(self, golden, right):
        inputs = golden_inputs(golden, teacher_force=True)
        for array in (inputs.prompts[0].ids, inputs.forced["0"]):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 5
        inputs.config["vocab_size"] = 3
        object.__setattr__(inputs.prompts[0], "ids", np.array([9], np.int32))  # by force
        assert assert_parity(golden, right).verdict is Verdict.IDENTICAL
        assert golden_inputs(golden).prompts[0].ids.tolist() == [1, 2, 3]

    def test_tokens_come_with_teacher_forcing_alone(self, golden):
        with open_bundle(golden) as bundle:
            tokens = {s.id: s.tokens.tolist() for s in bundle.sequences}
        forced = golden_inputs(golden, teacher_force=True).forced
        assert {name: ids.tolist() for name, ids in forced.items()} == tokens

    def test_the_model_is_written_without_the_answers(self, golden, tmp_path):
        model = golden_model(golden, tmp_path)
        assert {f.suffix for f in model.iterdir()} == {".json", ".safetensors"}
        again = tmp_path / "again.h5"
        make_golden(GoldenOptions(str(model), again, PromptOptions(ids=("1 2 3",)), STEPS))
        with open_bundle(golden) as a, open_bundle(again) as b:
            assert a.sequences[0].tokens.tolist() == b.sequences[0].tokens.tolist()


def _arrays(value):
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _arrays(part)
    elif hasattr(value, "__dict__"):
        yield from _arrays(list(vars(value).values()))
    elif isinstance(value, dict):
        yield from _arrays(list(value.values()))


def test_a_replay_names_only_what_was_said():
    assert replay_command(Path("g"), Path("r"), JudgeOptions()) == "kdtr diff g r"
    said = replay_command(Path("g"), Path("r"), JudgeOptions(atol=0.0, allow_loose=True, select=("a", "b c")))
    assert said == "kdtr diff g r --atol 0.0 --allow-loose --select 'a,b c'"

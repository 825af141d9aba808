"""What was compared with what, asked before any number: each mismatch is INVALID, names its field and both values."""

import copy

import numpy as np
import pytest
from parity_cases import SHA, golden_side, run_side

from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Level, Verdict

pytestmark = pytest.mark.quick

OTHER = "e" * 64

FIELDS = {
    "contract_version": 2,
    "model.config_sha256": OTHER,
    "model.weights_used_sha256": OTHER,
    "model.rope_table_sha256": OTHER,
    "choices.latent_norm_eps": "config",
    "choices.rope_angles": "f32",
    "choices.tie_rule": "last",
    "decoding.stop_ids": [2],
    "decoding.temperature": 0.5,
    "decoding.seed": 1,
    "decoding.ignore_eos": True,
}


def put(manifest: dict, path: str, value: object) -> None:
    *parents, key = path.split(".")
    for parent in parents:
        manifest = manifest[parent]
    manifest[key] = value


def drop(manifest: dict, path: str) -> None:
    *parents, key = path.split(".")
    for parent in parents:
        manifest = manifest[parent]
    del manifest[key]


def pair():
    golden = golden_side()
    return golden, run_side(golden)


def assert_untouched_by_numbers(report):
    assert report.verdict is Verdict.INVALID
    assert report.exit_code == 2
    assert report.sequences == ()
    assert report.totals.max_abs is None
    assert report.totals.tokens_equal == 0


class TestManifest:
    @pytest.mark.parametrize("path", FIELDS)
    def test_another_value_is_named_with_both(self, path):
        golden, run = pair()
        put(run.manifest, path, FIELDS[path])
        report = judge(golden.evidence(), run.evidence())
        assert_untouched_by_numbers(report)
        (finding,) = [f for f in report.findings if f.verdict is Verdict.INVALID]
        assert finding.code == f"provenance.{path}"
        assert path in finding.message
        assert finding.run == FIELDS[path] != finding.golden
        assert str(finding.golden)[:16] in finding.message
        assert str(finding.run)[:16] in finding.message
        assert report.reason == finding.message

    @pytest.mark.parametrize("path", FIELDS)
    @pytest.mark.parametrize("side", ["golden", "run"])
    def test_a_field_that_one_side_lacks_is_no_match(self, path, side):
        golden, run = pair()
        drop({"golden": golden, "run": run}[side].manifest, path)
        report = judge(golden.evidence(), run.evidence())
        if path in ("model.weights_used_sha256", "model.rope_table_sha256"):
            assert report.unverified
            return
        assert_untouched_by_numbers(report)
        assert f"the {side}'s manifest does not say {path}" in report.reason

    @pytest.mark.parametrize("path", ["choices", "decoding", "model"])
    def test_a_manifest_with_a_hole(self, path):
        golden, run = pair()
        run.manifest[path] = None
        assert_untouched_by_numbers(judge(golden.evidence(), run.evidence()))

    def test_both_lacking_a_field_is_no_match_either(self):
        golden, run = pair()
        for side in (golden, run):
            drop(side.manifest, "decoding.seed")
        assert_untouched_by_numbers(judge(golden.evidence(), run.evidence()))

    def test_a_choice_that_only_one_side_knows(self):
        golden, run = pair()
        run.manifest["choices"]["novel"] = "x"
        report = judge(golden.evidence(), run.evidence())
        assert_untouched_by_numbers(report)
        assert "choices.novel" in report.reason

    def test_all_mismatches_are_listed(self):
        golden, run = pair()
        for path, value in FIELDS.items():
            put(run.manifest, path, value)
        codes = {f.code for f in judge(golden.evidence(), run.evidence()).findings}
        assert codes == {f"provenance.{path}" for path in FIELDS}

    def test_a_golden_and_a_run_that_differ_in_a_choice_are_invalid_whatever_the_numbers(self):
        golden, run = pair()
        run.one.logits["engine"][:] = 0
        run.one.tokens[:] = 0
        put(run.manifest, "choices.rope_angles", "f32")
        assert_untouched_by_numbers(judge(golden.evidence(), run.evidence(), JudgeOptions(atol=100, allow_loose=True)))

    def test_true_is_not_one(self):
        golden, run = pair()
        run.manifest["decoding"]["ignore_eos"] = 0
        assert_untouched_by_numbers(judge(golden.evidence(), run.evidence()))

    def test_stop_ids_are_a_set(self):
        golden, run = pair()
        run.manifest["decoding"]["stop_ids"] = [5, 2, 2]
        assert judge(golden.evidence(), run.evidence()).verdict is Verdict.IDENTICAL

    @pytest.mark.parametrize("mode", ["ddtree", "chain"])
    def test_the_mode_may_differ_as_the_output_may_not(self, mode):
        golden, run = pair()
        run.manifest["decoding"]["mode"] = mode
        report = judge(golden.evidence(), run.evidence())
        assert (report.verdict, report.mode, report.rounds) == (Verdict.IDENTICAL, mode, "not-compared")

    def test_the_tier_may_differ_as_the_weights_may_not(self):
        golden, run = pair()
        golden.manifest["tier"] = "bf16"
        assert judge(golden.evidence(), run.evidence()).verdict is Verdict.IDENTICAL

    @pytest.mark.parametrize(
        ("path", "word"), [("model.weights_used_sha256", "weights"), ("model.rope_table_sha256", "rope")]
    )
    @pytest.mark.parametrize("side", ["golden", "run"])
    def test_a_digest_that_is_not_known_is_said_to_be_unverified(self, path, word, side):
        golden, run = pair()
        put({"golden": golden, "run": run}[side].manifest, path, None)
        report = judge(golden.evidence(), run.evidence())
        assert report.unverified == (word,)
        assert report.verdict is Verdict.IDENTICAL
        (finding,) = report.findings
        assert finding.level is Level.WARNING
        assert side in finding.message

    def test_rotary_digests_over_other_numbers_of_positions_can_not_be_compared(self):
        golden, run = pair()
        golden.manifest["model"]["rope_positions"] = run.manifest["model"]["rope_positions"] = 64
        run.manifest["model"]["rope_table_sha256"] = OTHER
        assert judge(golden.evidence(), run.evidence()).verdict is Verdict.INVALID
        run.manifest["model"]["rope_positions"] = 65
        report = judge(golden.evidence(), run.evidence())
        assert (report.verdict, report.unverified) == (Verdict.IDENTICAL, ("rope",))

    def test_other_weights_are_named_by_tensor(self):
        golden, run = pair()
        run.manifest["model"]["weights"]["b"] = OTHER
        run.manifest["model"]["weights_used_sha256"] = OTHER
        report = judge(golden.evidence(), run.evidence())
        note = next(f for f in report.findings if f.code == "weights.stored")
        assert note.message == "stored bytes of 1 of 2 weight tensors differ: b"

    def test_weights_stored_otherwise_but_used_alike_are_the_same(self):
        golden, run = pair()
        run.manifest["model"]["weights"]["b"] = OTHER
        report = judge(golden.evidence(), run.evidence())
        assert report.verdict is Verdict.IDENTICAL
        assert [f.level for f in report.findings] == [Level.NOTE]

    def test_a_run_made_from_another_file_of_the_same_content_is_noted(self):
        golden, run = pair()
        golden.sha256 = OTHER
        report = judge(golden.evidence(), run.evidence())
        assert report.verdict is Verdict.IDENTICAL
        (finding,) = report.findings
        assert (finding.code, finding.level, finding.run) == ("origin", Level.NOTE, SHA["golden"])

    def test_fewer_steps_asked_for_are_no_mismatch_by_themselves(self):
        golden, run = pair()
        run.manifest["decoding"]["steps"] = 99
        assert judge(golden.evidence(), run.evidence()).verdict is Verdict.IDENTICAL


class TestPrompts:
    def test_another_id(self):
        golden, run = pair()
        run.seqs[1].prompt[2] = (run.seqs[1].prompt[2] + 1) % 40
        report = judge(golden.evidence(), run.evidence())
        assert_untouched_by_numbers(report)
        (finding,) = report.findings
        assert (finding.code, finding.sequence) == ("provenance.prompt", "s1")
        assert "first at id 2" in finding.message
        assert (finding.golden, finding.run) == (int(golden.seqs[1].prompt[2]), int(run.seqs[1].prompt[2]))

    @pytest.mark.parametrize("cut", [0, 1, 3])
    def test_another_length(self, cut):
        golden, run = pair()
        run.one.prompt = run.one.prompt[:cut]
        report = judge(golden.evidence(), run.evidence())
        assert_untouched_by_numbers(report)
        assert f"golden 4, run {cut}" in report.reason

    def test_another_stream(self):
        golden, run = pair()
        run.seqs[1].stream = 7
        report = judge(golden.evidence(), run.evidence())
        assert_untouched_by_numbers(report)
        assert "golden 1, run 7" in report.reason

    def test_the_order_in_the_bundle_does_not_matter(self):
        golden, run = pair()
        run.seqs.reverse()
        assert judge(golden.evidence(), run.evidence()).verdict is Verdict.IDENTICAL

    def test_a_prompt_outside_the_selection_is_not_looked_at(self):
        golden, run = pair()
        run.seqs[1].prompt[0] ^= 1
        assert judge(golden.evidence(), run.evidence(), JudgeOptions(select=("s0",))).verdict is Verdict.IDENTICAL

    @pytest.mark.parametrize("side", ["golden", "run"])
    def test_an_id_twice(self, side):
        golden, run = pair()
        seqs = {"golden": golden, "run": run}[side].seqs
        seqs.append(copy.deepcopy(seqs[0]))
        report = judge(golden.evidence(), run.evidence())
        assert_untouched_by_numbers(report)
        assert "two sequences with the id 's0'" in report.reason


class TestKinds:
    @pytest.mark.parametrize(
        ("kinds", "words"),
        [
            (("golden", "golden"), "two goldens"),
            (("run", "run"), "two runs"),
            (("run", "golden"), "the wrong way round"),
            (("golden", "other"), "not a golden and a other"),
        ],
    )
    def test_a_golden_first_then_a_run(self, kinds, words):
        golden, run = pair()
        golden.kind, run.kind = kinds
        report = judge(golden.evidence(), run.evidence(), JudgeOptions(atol=1e9, allow_loose=True))
        assert_untouched_by_numbers(report)
        assert words in report.reason
        assert "\n" not in report.reason

    @pytest.mark.parametrize("side", ["golden", "run"])
    def test_a_bundle_with_itself(self, side):
        golden, run = pair()
        evidence = {"golden": golden, "run": run}[side].evidence()
        assert_untouched_by_numbers(judge(evidence, evidence))


class TestShapes:
    def test_another_vocabulary(self):
        golden, run = pair()
        run.vocab = None
        for s in run.seqs:
            s.logits["engine"] = s.logits["engine"][:, :39]
        report = judge(golden.evidence(), run.evidence())
        assert_untouched_by_numbers(report)
        assert "39 values a row, not 40" in report.reason

    @pytest.mark.parametrize("rows", [0, 5, 7])
    @pytest.mark.parametrize("side", ["golden", "run"])
    def test_other_rows_than_tokens(self, rows, side):
        golden, run = pair()
        seq, name = (golden.one, "exact") if side == "golden" else (run.one, "engine")
        seq.logits[name] = np.resize(seq.logits[name], (rows, 40))
        report = judge(golden.evidence(), run.evidence())
        assert_untouched_by_numbers(report)
        assert f"the {side} has {rows} rows of logits for 6 ids" in report.reason

    @pytest.mark.parametrize("side", ["golden", "run"])
    def test_other_rows_than_prompt_ids(self, side):
        golden = golden_side(score=True)
        run = run_side(golden)
        held = golden.one if side == "golden" else run.one
        name = next(iter(held.prompt_logits))
        held.prompt_logits[name] = held.prompt_logits[name][:-1]
        report = judge(golden.evidence(), run.evidence())
        assert_untouched_by_numbers(report)
        assert "rows of prompt logits" in report.reason

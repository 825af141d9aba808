"""What a report shows of where each side came from."""

import pytest
from parity_cases import golden_side, run_side

from kdtr_cli.parity.provenance import provenance_of

pytestmark = pytest.mark.quick


class TestProvenanceOf:
    def test_what_must_agree_and_who_made_it(self):
        golden = golden_side()
        pairs = dict(provenance_of(golden.evidence()))
        assert pairs["model.weights_used_sha256"] == golden.manifest["model"]["weights_used_sha256"]
        assert pairs["choices.rope_angles"] == "f64"
        assert pairs["decoding.stop_ids"] == "[2, 5]"
        assert pairs["producer.name"] == "kdtr"
        assert pairs["manifest_sha256"] == golden.sha256
        run = run_side(golden)
        run.manifest["run"]["statistics"] = {"passes": 3}
        pairs = dict(provenance_of(run.evidence()))
        assert pairs["run.device"] == "cpu"
        assert "run.statistics" not in pairs

    def test_what_is_not_known_is_left_out(self):
        run = run_side(golden_side())
        run.manifest["model"]["weights_used_sha256"] = None
        assert not {"model.weights_used_sha256", "manifest_sha256"} & set(dict(provenance_of(run.evidence())))

    @pytest.mark.parametrize(
        "manifest", [{}, {"model": 3, "choices": [], "run": "x"}, {"choices": {"a": {"b": [None]}}}]
    )
    def test_whatever_a_manifest_holds_strings_come_out(self, manifest):
        run = run_side(golden_side())
        run.manifest = manifest
        assert all(isinstance(text, str) for pair in provenance_of(run.evidence()) for text in pair)

"""`kdtr probe` on the CPU device: green on a right engine, and each probe goes red alone for its own kind of fault.

Sabotage is one bit of one logit in what the engine gives for a kind of job; and twice it is inside the engine, where
rows get their positions and where a round's logits are taken.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from kdtr_cli.engine import generate as ar
from kdtr_cli.engine import rounds as tree
from kdtr_cli.engine.generate import Request
from kdtr_cli.errors import DeviceError, InputError
from kdtr_cli.model.presets import write_model
from kdtr_cli.model.prompts import Decoding, Generated, Prompt
from kdtr_cli.workflows import decode as decoding
from kdtr_cli.workflows import probe as workflow
from kdtr_cli.workflows import probe_variations
from kdtr_cli.workflows.decode import Job
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.golden_rounds import DraftOptions
from kdtr_cli.workflows.probe import ProbeOptions, decode_afresh, probe
from kdtr_cli.workflows.probe_variations import PROBES
from kdtr_cli.workflows.prompts import PromptOptions

FIXTURES = Path(__file__).parents[2] / "fixtures"
IN_PROCESS = tuple(name for name in PROBES if name != "fresh-process")
PLACE = (1, 2, 17)  #: sequence, step and logit that the sabotage changes


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "golden.h5"
    make_golden(GoldenOptions("tiny", path, PromptOptions(ids=("1 2 3", "9 8 7 6 5 4 3")), 4))
    return path


@pytest.fixture
def few(monkeypatch):
    """One variation a probe, so that the tests stay cheap."""
    monkeypatch.setattr(probe_variations, "BUDGETS", (6,))
    monkeypatch.setattr(probe_variations, "DRAFTERS", ("synthetic:0.7",))
    monkeypatch.setattr(probe_variations, "PREFILL", (4,))


def probed(golden: Path, *probes: str, **options):
    return probe(ProbeOptions(golden, device="cpu", probes=probes, **options))


def flipped(result):
    """A result whose last bit of one logit is another; the token stays."""
    logits = result.logits.copy()
    logits.view(np.uint32)[PLACE[1:]] ^= 1
    return dataclasses.replace(result, logits=logits)


@pytest.fixture
def sabotage(monkeypatch, engine_results):
    """Change a bit of sequence "1" wherever ``wrong(job)`` is true; what is right is decoded once."""

    def spoil(wrong):
        def decode(device, job, statistics):
            ids = tuple(request.prompt.id for request in job.requests)
            key = (job.batch, job.prefill, ids, job.decoding.steps, job.draft and job.draft.settings)
            if key not in engine_results:
                engine_results[key] = decoding.decode(device, job, statistics)
            made = list(engine_results[key])
            if wrong(job):
                at = ids.index(str(PLACE[0]))
                made[at] = dataclasses.replace(made[at], generated=flipped(made[at].generated))
            return made

        monkeypatch.setattr(workflow, "decode", decode)

    return spoil


@pytest.fixture(scope="module")
def engine_results():
    return {}


def mode(job) -> str:
    return "ar" if job.draft is None else job.draft.settings.mode


def sabotaged_afresh(options):
    """Runs in the fresh process."""
    made = decode_afresh(options)
    made[PLACE[0]] = flipped(made[PLACE[0]])
    return made


def failing_afresh(options):
    raise DeviceError("no memory")


def dying_afresh(options):
    import os

    os._exit(7)


def red_at(report) -> list[tuple]:
    return [(row.probe, row.place, row.difference.step, row.difference.index) for row in report.rows if row.difference]


class TestGreen:
    def test_every_probe_on_tiny(self, golden, few):
        report = probed(golden)
        assert report.verdict == "DETERMINISTIC"
        assert report.exit_code == 0
        assert report.probes == dict.fromkeys(PROBES, "SAME")
        assert report.golden.verdict == "SAME"
        assert report.device.startswith("cpu")
        assert report.line == "PASS probes=7/7 tokens=56/56 golden=same verdict=DETERMINISTIC"

    def test_a_trained_model_with_drafts_of_its_own_and_digests_alone(self, tmp_path, few, monkeypatch):
        monkeypatch.setattr(probe_variations, "DRAFTERS", ())
        model, drafter = str(FIXTURES / "tiny-kimi"), str(FIXTURES / "tiny-kimi-dflash")
        make_golden(
            GoldenOptions(
                model,
                tmp_path / "g.h5",
                PromptOptions(texts=("def f(x):\n    ", "class Foo")),
                3,
                embed_weights=False,
                logits="digest",
                score=True,
                drafting=DraftOptions("ddtree", drafter, 8),
            )
        )
        names = [name for name in IN_PROCESS if name != "rerun"]
        report = probed(tmp_path / "g.h5", *names, model=model)
        assert report.exit_code == 0
        assert report.golden.verdict == "SAME"
        varied = [row.varied for row in report.rows if row.probe in ("ddtree", "chain")]
        assert varied == ["replay, budget 8, the golden's own", "replay, 7 ahead, the golden's own"]
        assert all("tau=" in row.note for row in report.rows if row.probe == "ddtree")
        assert probed(tmp_path / "g.h5", "rerun", model=str(FIXTURES / "tiny-kimi-int4")).golden.verdict == "SKIPPED"

    def test_a_lone_prompt_gets_company(self, golden, few, monkeypatch):
        seen = []
        monkeypatch.setattr(
            workflow, "decode", lambda device, job, s: seen.append(job) or decoding.decode(device, job, s)
        )
        report = probed(golden, "solo", "place", sequences=1)
        assert report.probes == {"solo": "SAME", "place": "SAME"}
        assert report.line.endswith(" selected=2/7 sequences=1/2 verdict=DETERMINISTIC")
        assert [(job.batch, [r.prompt.id for r in job.requests].index("0")) for job in seen] == [(1, 0), (3, 0), (3, 2)]


class TestVariations:
    def test_places_and_company(self):
        """Reversed and rotated, which are one for two prompts; alone, or beside two others."""

        def orders(n: int, probe: str):
            prompts = [Prompt(str(i), np.array([i, 1, 2], np.int32), 0) for i in range(n)]
            job = Job(None, None, [Request(p) for p in prompts], Decoding(2), 4, min(n, 8), None, False, None)
            base = [Generated(np.zeros(2, np.int32), np.zeros((2, 3), np.float32), None, "length")] * n
            made = probe_variations.variations(None, None, job, base, (probe,))
            for variation in made:
                for place, request in zip(variation.places, variation.job.requests, strict=True):
                    assert request.prompt.id == str(place) or (place is None and n == 1)
            return [(variation.job.batch, variation.places) for variation in made]

        assert orders(4, "place") == [(4, (3, 2, 1, 0)), (4, (1, 2, 3, 0))]
        assert orders(2, "place") == [(2, (1, 0))]
        assert orders(1, "place") == [(3, (None, None, 0))]
        assert orders(4, "solo") == [(1, (0, 1, 2, 3))]
        assert orders(1, "solo") == [(3, (0, None, None))]
        assert orders(9, "rerun") == [(8, tuple(range(9)))]


class TestRed:
    @pytest.mark.parametrize(
        ("red", "wrong"),
        [
            ("solo", lambda job: job.batch == 1),
            ("place", lambda job: job.requests[0].prompt.id != "0"),
            ("chunked-prefill", lambda job: job.prefill == 4),
            ("ddtree", lambda job: mode(job) == "ddtree"),
            ("chain", lambda job: mode(job) == "chain"),
        ],
    )
    def test_a_bit_that_hangs_on_one_thing(self, golden, few, sabotage, red, wrong):
        sabotage(wrong)
        report = probed(golden, *IN_PROCESS)
        assert report.exit_code == 1
        assert report.verdict == "NONDETERMINISTIC"
        assert set(red_at(report)) == {(red, *PLACE)}
        assert report.probes == {name: "DIFFERS" if name == red else "SAME" for name in IN_PROCESS}
        first = report.first
        assert (first.sequence, first.difference.part) == ("1", "logits")
        assert int(first.difference.base_bits, 16) ^ int(first.difference.other_bits, 16) == 1
        assert f" first={red} first_difference=1:2 verdict=NONDETERMINISTIC" in report.line
        assert report.golden.verdict == "SAME"

    def test_a_bit_that_hangs_on_the_second_run(self, golden, few, sabotage):
        runs = []
        sabotage(lambda job: runs.append(job) or len(runs) == 2)
        assert red_at(probed(golden, "rerun", "solo", "place")) == [("rerun", *PLACE)]

    def test_a_bit_that_hangs_on_the_process(self, golden, few, monkeypatch):
        monkeypatch.setattr(workflow, "decode_afresh", sabotaged_afresh)
        assert red_at(probed(golden, "rerun", "fresh-process", "solo")) == [("fresh-process", *PLACE)]

    def test_an_engine_that_is_steady_and_wrong(self, golden, few, sabotage):
        sabotage(lambda job: True)
        report = probed(golden, "rerun", "solo")
        assert (report.verdict, report.exit_code) == ("DIVERGED", 1)
        assert "golden=differs" in report.line
        assert "first=golden first_difference=1:2" in report.line
        assert report.golden.difference.index == PLACE[2]

    def test_positions_in_disorder_behind_the_first_piece_of_a_prompt(self, golden, few, monkeypatch):
        true = ar.prompt_rows

        def shifted(device, rows, slot, ids, first, most):
            used = true(device, rows, slot, ids, first, most)
            if first:
                device.write(used.positions, np.ascontiguousarray(device.read(used.positions)[::-1]))
            return used

        monkeypatch.setattr(ar, "prompt_rows", shifted)
        report = probed(golden, "rerun", "solo", "place", "chunked-prefill")
        # only the longer prompt is cut by pieces of four
        assert [(row.probe, row.place, row.difference.step) for row in report.rows if row.difference] == [
            ("chunked-prefill", 1, 0)
        ]

    def test_accepted_rows_read_as_if_they_were_a_prefix(self, golden, few, monkeypatch):
        true = tree._Session._accepted_logits

        def prefix(session, slot, way):
            return true(session, slot, np.arange(len(way)))

        monkeypatch.setattr(tree._Session, "_accepted_logits", prefix)
        report = probed(golden, "ddtree", "chain", "rerun")
        assert report.probes == {"rerun": "SAME", "ddtree": "DIFFERS", "chain": "SAME"}


class TestUnjudged:
    def test_one_token_a_sequence_leaves_nothing_to_probe(self, golden, few):
        report = probed(golden, "solo", "place", "ddtree", steps=1)
        assert report.probes == dict.fromkeys(("solo", "place", "ddtree"), "SKIPPED")
        assert (report.verdict, report.exit_code) == ("INCONCLUSIVE", 2)
        assert " skipped=solo,place,ddtree " in report.line

    def test_a_prompt_of_one_token_has_no_pieces(self, tmp_path, few):
        make_golden(GoldenOptions("tiny", tmp_path / "g.h5", PromptOptions(ids=("7",)), 2))
        report = probed(tmp_path / "g.h5", "chunked-prefill")
        assert report.probes == {"chunked-prefill": "SKIPPED"}
        assert report.exit_code == 2

    def test_a_golden_without_exact_logits_is_probed_all_the_same(self, tmp_path, few):
        make_golden(GoldenOptions("tiny", tmp_path / "g.h5", PromptOptions(ids=("7 8",)), 2, exact=False))
        report = probed(tmp_path / "g.h5", "rerun")
        assert report.golden.verdict == "SKIPPED"
        assert report.line == ("PASS probes=1/1 tokens=2/2 golden=not-compared selected=1/7 verdict=DETERMINISTIC")

    def test_drafts_that_are_not_there_are_skipped_with_the_reason(self, golden, few, monkeypatch):
        monkeypatch.setattr(probe_variations, "DRAFTERS", ("replay",))
        report = probed(golden, "ddtree")
        assert report.probes == {"ddtree": "SKIPPED"}
        assert "holds no marginals to replay" in report.line

    def test_a_fresh_process_that_fails_or_dies_is_no_difference(self, golden, monkeypatch):
        monkeypatch.setattr(workflow, "decode_afresh", failing_afresh)
        with pytest.raises(DeviceError, match=r"^fresh-process: no memory$"):
            probed(golden, "fresh-process", steps=1)
        monkeypatch.setattr(workflow, "decode_afresh", dying_afresh)
        with pytest.raises(DeviceError, match=r"^fresh-process: the process died"):
            probed(golden, "fresh-process", steps=1)

    def test_an_engine_failure_names_the_probe(self, golden, few, monkeypatch):
        def fail(*args, **settings):
            raise DeviceError("out of memory")

        monkeypatch.setattr(decoding, "generate_rounds", fail)
        with pytest.raises(DeviceError, match=r"^ddtree \(synthetic:0.7, budget 6\): out of memory$"):
            probed(golden, "ddtree", steps=2)

    def test_bad_input(self, golden, tmp_path):
        with pytest.raises(InputError, match="--probe nosuch: one of rerun, "):
            probed(golden, "nosuch")
        with pytest.raises(InputError):
            probed(tmp_path / "none.h5")

    def test_another_model_is_probed_against_itself(self, golden, few, tmp_path):
        write_model(tmp_path / "other", "tiny", seed=5)
        report = probed(golden, "ddtree", model=str(tmp_path / "other"))
        assert report.golden.note == "the weights are not the golden's"
        assert report.exit_code == 0
        # drafted around what this model says: the golden's tokens would never be accepted
        assert float(report.rows[0].note.partition("tau=")[2]) > 1

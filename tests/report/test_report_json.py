"""The JSON document: strict, complete, and the same verdict."""

import json

import numpy as np
import pytest
from parity_cases import make_tie, pair, perturb
from rounds_cases import round_pair, rounds_of

from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.report.json import report_document, report_json
from kdtr_cli.report.line import verdict_line

pytestmark = pytest.mark.quick

KEYS = ["schema", "verdict", "exit_code", "totals", "sequences", "tolerance", "findings"]


def document_of(golden, run, **options):
    report = judge(golden.evidence(), run.evidence(), JudgeOptions(**options))

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(report_json(report), parse_constant=refuse)
    assert list(document) == KEYS
    assert document["schema"] == "kdtr.diff/1"
    assert document["verdict"] == report.verdict.value
    assert document["exit_code"] == report.exit_code
    assert document["totals"]["line"] == verdict_line(report)
    assert document == report_document(report)
    return document


def cases():
    yield "identical", (*pair(), {})
    golden, run = pair(score=True)
    perturb(run, 1e-3)
    yield "pass", (golden, run, {"atol": 1e-2, "max_kl": 1, "max_ulp": 2**40, "allow_loose": True})
    golden, run = pair()
    make_tie(golden, run, 2)
    run.manifest["decoding"]["teacher_forced"] = True
    yield "tie", (golden, run, {"atol": 1e-2})
    golden, run = pair()
    run.one.logits["engine"][1, 1] = np.nan
    run.seqs[1].logits["engine"][1, 1] = -np.inf
    yield "not finite", (golden, run, {"atol": 1})
    golden, run = pair()
    del run.seqs[1]
    run.one.tokens[0] ^= 1
    yield "diverged", (golden, run, {"steps": 3, "select": ("s0", "s1")})
    golden, run = pair()
    for s in golden.seqs:
        s.form = "top:3"
    perturb(run, 1e-3)
    yield "partial", (golden, run, {"atol": 1e-2})
    golden, run = pair()
    run.manifest["choices"]["rope_angles"] = {"odd": [1, None]}
    yield "invalid", (golden, run, {})
    golden, run = round_pair()
    rounds_of(run, 1)["draft_top_logps"][1, 0, 0] = np.nan
    yield "rounds", (golden, run, {})
    yield "two goldens", (golden, golden, {})


CASES = dict(cases())


@pytest.mark.parametrize("name", CASES)
def test_every_verdict_is_one_strict_document(name):
    golden, run, options = CASES[name]
    document_of(golden, run, **options)


def test_numbers_that_are_not_finite_are_strings():
    golden, run, options = CASES["not finite"]
    document = document_of(golden, run, **options)
    assert document["totals"]["max_abs"] == "nan"
    assert document["sequences"][0]["logits"]["run_nonfinite"]["run"] == "nan"
    assert document["sequences"][1]["logits"]["run_nonfinite"]["run"] == "-inf"
    assert document["sequences"][1]["logits"]["max_abs"] == "inf"
    assert document["sequences"][1]["logits"]["max_ulp"] == "inf"


def test_tokens_and_counts_are_plain_numbers():
    document = document_of(*pair())
    golden, _ = pair()
    assert document["sequences"][0]["golden_tokens"] == golden.one.tokens.tolist()
    assert document["sequences"][0]["run_tokens"] == golden.one.tokens.tolist()
    assert document["totals"]["tokens"] == 12
    assert document["totals"]["exact"] is True
    assert document["totals"]["verdicts"] == {"IDENTICAL": 2}


def test_bounds_stand_with_their_origins():
    document = document_of(*pair(), atol=1e-3, max_kl=0.5, steps=3)
    assert document["tolerance"]["atol"] == {"value": 1e-3, "origin": "--atol"}
    assert document["tolerance"]["rtol"] == {"value": 0.0, "origin": "0 beside --atol"}
    assert document["tolerance"]["max_kl"] == {"value": 0.5, "origin": "--max-kl"}
    assert document["tolerance"]["max_ulp"] is None
    assert document["tolerance"]["reference"] == "exact"
    assert document["tolerance"]["steps"]["value"] == 3
    assert document["tolerance"]["on_tie"] == {"value": "fail", "origin": "default"}


def test_the_first_divergence_and_the_findings():
    golden, run, options = CASES["diverged"]
    document = document_of(golden, run, **options)
    first = document["sequences"][0]["divergence"]
    assert (first["step"], first["golden_token"], first["run_token"]) == (
        0,
        int(golden.one.tokens[0]),
        int(run.one.tokens[0]),
    )
    assert document["totals"]["first_divergence"] == [0, 0]
    codes = [f["code"] for f in document["findings"]]
    assert "tokens.diverged" in codes
    assert "sequence.missing" in codes
    assert {tuple(f) for f in document["findings"]} == {
        ("level", "code", "message", "verdict", "sequence", "step", "token", "golden", "run", "hint")
    }


def test_the_same_report_gives_the_same_text():
    golden, run, options = CASES["pass"]
    texts = {report_json(judge(golden.evidence(), run.evidence(), JudgeOptions(**options))) for _ in range(2)}
    assert len(texts) == 1
    assert next(iter(texts)).endswith("}\n")


def test_rounds():
    golden, run, options = CASES["rounds"]
    document = document_of(golden, run, **options)
    counts = [len(s.rounds["rounds/start"]) for s in golden.seqs]
    totals = document["totals"]
    assert (totals["rounds"], totals["rounds_judged"], totals["rounds_equal"], totals["first_round_difference"]) == (
        "compared",
        sum(counts),
        counts[0] + 1,
        [1, 1],
    )
    good, bad = (s["rounds"] for s in document["sequences"])
    tau = golden.one.rounds["rounds/n_accepted"].mean()
    assert good == {
        "compared": True,
        "golden_rounds": counts[0],
        "run_rounds": counts[0],
        "golden_tau": tau,
        "run_tau": tau,
        "judged": counts[0],
        "equal": counts[0],
        "first_difference": None,
        "first_open": None,
        "all_bits": True,
    }
    before = float(golden.seqs[1].rounds["rounds/draft_top_logps"][1, 0, 0])
    assert bad["first_difference"] == {
        "round": 1,
        "position": int(golden.seqs[1].rounds["rounds/start"][1]),
        "part": "marginals",
        "what": f"depth 1, rank 0 has log-probability nan, golden {np.float32(before)!s}",
        "golden": before,
        "run": "nan",
        "follows": False,
    }
    assert document["findings"][0]["code"] == "rounds.marginals"
    assert (document["findings"][0]["golden"], document["findings"][0]["run"]) == (before, "nan")


def test_without_rounds():
    document = document_of(*pair())
    assert document["totals"]["rounds"] is None
    assert document["totals"]["first_round_difference"] is None
    assert document["sequences"][0]["rounds"] is None

"""What the bundle and the judge promise, sentence by sentence (tests/promises.txt): each has tests that are there, and
those that belong to no other file are here."""

import ast
import itertools
from pathlib import Path

import numpy as np
import pytest
from parity_cases import golden_side, judged, make_tie, pair, perturb, run_side

from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.line import verdict_line

pytestmark = pytest.mark.quick

TESTS = Path(__file__).parents[1]


def promises() -> dict[str, list[str]]:
    """Sentence → its tests."""
    found: dict[str, list[str]] = {}
    for block in (TESTS / "promises.txt").read_text(encoding="utf-8").split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        sentence = " ".join(line.strip() for line in lines if "::" not in line)
        if sentence:
            found[sentence] = [line.strip() for line in lines if "::" in line]
    return found


def test_there_are_sentences_of_every_part():
    sections = [sentence.split()[0] for sentence in promises()]
    assert set(sections) == {"6", "7", "8"}
    assert len(sections) >= 43


@pytest.mark.parametrize("sentence", promises())
def test_every_sentence_has_its_tests(sentence):
    tests = promises()[sentence]
    assert tests
    for test in tests:
        path, _, name = test.partition("::")
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert name in names, f"{test} is not there"


#: As generous as a user can be.
GENEROUS = {"atol": 10.0, "rtol": 10.0, "allow_loose": True, "allow_partial": True, "on_tie": "pass"}


class Untouchable(dict):
    """Logits by name that may be counted and named, but not read."""

    def __init__(self, logits):
        super().__init__({name: values.view(_NoRows) for name, values in logits.items()})


class _NoRows(np.ndarray):
    def __getitem__(self, item):
        raise AssertionError("a logit was read before the provenance was compared")


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run.manifest["model"].update(config_sha256="0" * 64),
        lambda run: run.manifest["model"].update(weights_used_sha256="0" * 64),
        lambda run: run.manifest["decoding"].update(stop_ids=[3]),
        lambda run: run.manifest["choices"].update(latent_norm_eps="config"),
        lambda run: run.manifest.update(contract_version=2),
        lambda run: setattr(run.seqs[1], "prompt", run.seqs[1].prompt + 1),
        lambda run: setattr(run.seqs[1], "stream", 9),
    ],
    ids=["config", "weights", "stop ids", "choices", "contract", "prompt", "stream"],
)
def test_no_logit_is_read_before_provenance_agrees(change):
    golden, run = pair()
    for s in (*golden.seqs, *run.seqs):
        s.logits = Untouchable(s.logits)
    with pytest.raises(AssertionError, match="was read"):
        judged(golden, run)  # this would be noticed
    change(run)
    assert judged(golden, run).verdict is Verdict.INVALID


def spoil(golden, run, seq: int, verdict: Verdict) -> None:
    """Make a sequence be judged so, by a tolerance of 1e-3."""
    g, r = golden.seqs[seq], run.seqs[seq]
    match verdict:
        case Verdict.PASS:
            r.logits["engine"][0, 0] += np.float32(1e-5)
        case Verdict.TIE_BREAK:
            make_tie(golden, run, 5, gap=5e-4, seq=seq)  # the last step: none comes after it
        case Verdict.INCONCLUSIVE:
            r.form = "top:4"
            r.logits["engine"] = r.logits["engine"] + np.float32(1e-5)
        case Verdict.DIVERGED:
            r.tokens[2] ^= 1
        case Verdict.INVALID:
            g.logits["exact"][3, 3] = np.nan


@pytest.mark.parametrize(("first", "second"), list(itertools.product(Verdict, Verdict)), ids=lambda v: v.value)
def test_of_two_sequences_the_stronger_verdict_counts(first, second):
    golden, run = pair()
    spoil(golden, run, 0, first)
    spoil(golden, run, 1, second)
    report = judged(golden, run, atol=1e-3)
    order = ["IDENTICAL", "PASS", "TIE_BREAK", "INCONCLUSIVE", "DIVERGED", "INVALID"]
    assert [s.verdict for s in report.sequences] == [first, second]
    assert report.verdict.value == max(first.value, second.value, key=order.index)


def drop(golden, run):
    del run.seqs[1]


def add(golden, run):
    run.seqs.append(run_side(golden_side(sequences=3)).seqs[2])


def cut(side: str, to: int):
    def change(golden, run):
        s = (golden if side == "golden" else run).seqs[1]
        s.tokens, s.logits = s.tokens[:to], {k: v[:to] for k, v in s.logits.items()}

    return change


def put(side: str, bad: float):
    def change(golden, run):
        name = "exact" if side == "golden" else "engine"
        (golden if side == "golden" else run).seqs[1].logits[name][4, 4] = bad

    return change


def both_empty(golden, run):
    cut("golden", 0)(golden, run)
    cut("run", 0)(golden, run)


def nothing(golden, run):
    golden.seqs.clear()
    run.seqs.clear()


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (drop, Verdict.DIVERGED),
        (add, Verdict.DIVERGED),
        *((cut(side, to), Verdict.DIVERGED) for side in ("golden", "run") for to in (0, 1, 5)),
        *((put("run", bad), Verdict.DIVERGED) for bad in (np.nan, np.inf, -np.inf)),
        *((put("golden", bad), Verdict.INVALID) for bad in (np.nan, np.inf, -np.inf)),
        (both_empty, Verdict.INCONCLUSIVE),
        (nothing, Verdict.INCONCLUSIVE),
    ],
)
@pytest.mark.parametrize("options", [{}, GENEROUS, {"max_kl": 1e9, "allow_loose": True}], ids=["none", "all", "kl"])
def test_none_of_these_is_ever_a_pass(change, verdict, options):
    golden, run = pair()
    change(golden, run)
    report = judged(golden, run, **options)
    assert report.verdict is verdict
    assert report.exit_code != 0
    assert not verdict_line(report).startswith("PASS")


@pytest.mark.parametrize("change", [drop, add, cut("run", 5), cut("golden", 5), cut("run", 0)])
def test_exact_stands_only_if_all_tokens_are_equal(change):
    golden, run = pair()
    perturb(run, 1.0)
    assert " exact " in verdict_line(judged(golden, run))  # tokens are equal, whatever the logits are
    change(golden, run)
    assert " exact " not in verdict_line(judged(golden, run, **GENEROUS))

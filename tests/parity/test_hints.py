"""Every code of a hint is given for the fault that it names, on real traces and real sabotage, and for no other."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
from parity_cases import golden_side, make_tie, perturb, run_side
from rounds_cases import round_pair, rounds_of
from trace_cases import CONFIG, DENSE, MOE, PROMPT, noise, traced_pair

from kdtr_cli.parity.evidence import Logits
from kdtr_cli.parity.hints import HINTS, diagnose_logits
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.rows import Place
from kdtr_cli.parity.tally import LogitsResult
from kdtr_cli.parity.tolerances import JudgeOptions, TensorRule
from kdtr_cli.parity.verdicts import Verdict

pytestmark = pytest.mark.quick

HALF = CONFIG.qk_rope_head_dim // 2
ROWS = np.arange(PROMPT + 6)
DECODED = ROWS[:, None] >= PROMPT
FACTOR = CONFIG.routed_scaling_factor
ATTENTION, MLP = f"{MOE}self_attn.", f"{MOE}mlp."

Arrays = dict[str, np.ndarray]


def turned(x: np.ndarray, radians: np.ndarray) -> np.ndarray:
    """Rotary pairs turned by radians [rows, half] more."""
    pairs = x.reshape(len(x), -1, 2 * HALF).astype(np.float64)
    z = (pairs[..., :HALF] + 1j * pairs[..., HALF:]) * np.exp(1j * radians[:, None])
    return np.concatenate([z.real, z.imag], -1).reshape(x.shape).astype(np.float32)


def shifted(positions: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    rotary = traced_pair()[0].facts.rotary
    return lambda x: turned(x, positions[:, None] * rotary)


def plain_frequencies(x: np.ndarray) -> np.ndarray:
    """Rotated without YaRN's stretching of the slow pairs."""
    rotary = traced_pair()[0].facts.rotary
    plain = CONFIG.rope_theta ** (-2.0 * np.arange(HALF) / CONFIG.qk_rope_head_dim)
    return turned(x, ROWS[:, None] * (plain - rotary))


def halves(x: np.ndarray) -> np.ndarray:
    """Rotary pairs (2i, 2i + 1) taken for (i, i + half): unrotated, interleaved, paired anew, rotated."""
    angles = ROWS[:, None] * traced_pair()[0].facts.rotary
    pairs = turned(x, -angles).reshape(len(x), -1, 2, HALF)
    return turned(np.swapaxes(pairs, -1, -2).reshape(x.shape), angles)


def bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def where(mask: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.where(mask, change(x), x)


def served_by(expert: int) -> np.ndarray:
    ids = traced_pair()[0].one.trace[f"{MLP}expert_ids"]
    return (ids == expert).any(axis=1)[:, None]


def some_expert() -> int:
    """One that serves a few rows."""
    counts = [int(served_by(e).sum()) for e in range(CONFIG.n_routed_experts)]
    return next(e for e, n in enumerate(counts) if 3 <= n <= 8)


def other_experts(ids: np.ndarray) -> np.ndarray:
    return ((ids + 1) % CONFIG.n_routed_experts).astype(np.int32)


def softmax_scaled(x: np.ndarray) -> np.ndarray:
    return np.where(ROWS[:, None] == 0, x, noise(x))


#: name: tensor, what becomes of it, the hint, a word of the message.
SABOTAGE: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray], str, str]] = {
    "scaling twice": (f"{MLP}expert_weights", lambda x: x * np.float32(FACTOR), "constant-scale", "which is routed_"),
    "scaling missing": (
        f"{MLP}expert_weights",
        lambda x: x / np.float32(FACTOR),
        "constant-scale",
        "which is 1 / routed_scaling_factor",
    ),
    "a latent doubled": (f"{ATTENTION}q_latent", lambda x: 2 * x, "constant-scale", "times 2"),
    "attn_out without sqrt": (
        f"{ATTENTION}attn_out",
        lambda x: x * np.float32(math.sqrt(CONFIG.hidden_size)),
        "constant-scale",
        "the square root of hidden_size",
    ),
    "nothing comes out": (f"{MLP}moe_out", lambda x: 0 * x, "constant-scale", "times 0"),
    "amplitude in cos": (f"{ATTENTION}k_rope", lambda x: x * np.float32(1.37), "constant-scale", "times 1.37"),
    "biased weights": (f"{MLP}expert_weights", lambda x: x + np.float32(0.03), "router-bias", "same experts"),
    "not normalised": (f"{MLP}expert_weights", noise, "router-bias", "normalisation"),
    "other choice": (f"{MLP}expert_ids", other_experts, "router-choice", "other experts"),
    "other order": (f"{MLP}expert_ids", lambda x: x[:, ::-1].copy(), "router-choice", "another order"),
    "bf16 router": (f"{MLP}router_logits", bf16, "router-precision", "bfloat16 values"),
    "bf16 inputs": (f"{MLP}router_logits", lambda x: noise(x, 2e-4), "router-precision", "every row is off"),
    "key too early": (f"{ATTENTION}k_rope", shifted(-1 * (ROWS > 0)), "position", "1 position earlier"),
    "query too late": (f"{ATTENTION}q_rope", shifted(3 + 0 * ROWS), "position", "3 positions later"),
    "border": (f"{DENSE}self_attn.k_rope", shifted(1 * (ROWS >= PROMPT)), "position", "first decoded row on"),
    "tree by index": (
        f"{DENSE}self_attn.k_rope",
        shifted((ROWS >= PROMPT) * (ROWS % 3 + 1)),
        "position",
        "another number each row",
    ),
    "wrong angles": (f"{ATTENTION}k_rope", shifted(0.37 + 0 * ROWS), "position", "other angles"),
    "no YaRN": (f"{ATTENTION}k_rope", plain_frequencies, "yarn-scale", "frequencies"),
    "softmax scale": (f"{ATTENTION}attn_out", softmax_scaled, "yarn-scale", "softmax scale"),
    "halves": (f"{ATTENTION}k_rope", halves, "rope-layout", "position 0"),
    "halves of queries": (f"{ATTENTION}q_rope", halves, "rope-layout", "position 0"),
    "interleaved result": (
        f"{ATTENTION}k_rope",
        lambda x: np.swapaxes(x.reshape(-1, 2, HALF), 1, 2).reshape(x.shape),
        "rope-layout",
        "another order",
    ),
    "permuted weights": (f"{ATTENTION}q", lambda x: x[:, ::-1].copy(), "rope-layout", "another order"),
    "stale mask": (f"{ATTENTION}attn_out", where(DECODED, noise), "prefill-decode", "wrong from the first decoded"),
    "bad prefill": (f"{DENSE}mlp.mlp_out", where(~DECODED, noise), "prefill-decode", "right in every decoded row"),
    "one expert": (f"{MLP}moe_out", lambda x: where(served_by(some_expert()), noise)(x), "single-expert", "serves"),
    "a NaN": (f"{MOE}hidden", lambda x: np.where((ROWS == 4)[:, None], np.float32(np.nan), x), "nonfinite", "not fin"),
    "latent not normalised": (f"{ATTENTION}kv_latent", noise, "first-tensor", "no pattern"),
    "a key of noise": (f"{ATTENTION}k_rope", noise, "first-tensor", "no pattern"),
    "a query of noise": (f"{ATTENTION}q_rope", noise, "first-tensor", "no pattern"),
    "a router of noise": (f"{MLP}router_logits", noise, "first-tensor", "no pattern"),
    "one wrong gate": (
        f"{MLP}router_logits",
        lambda x: np.concatenate([x[:, :1] * np.float32(1.001), x[:, 1:]], 1),
        "first-tensor",
        "no pattern",
    ),
    "nibbles": (f"{MLP}moe_out", noise, "first-tensor", "no pattern"),
    "one row": (f"{MLP}moe_out", where((ROWS == 2)[:, None], noise), "first-tensor", "1 of 20 rows"),
    "every other row": (f"{ATTENTION}attn_out", where(ROWS[:, None] % 2 == 1, noise), "first-tensor", "10 of 20 rows"),
    "future key": (f"{ATTENTION}attn_out", noise, "first-tensor", "20 of 20 rows"),
    "embedding": ("embed", noise, "first-tensor", "no pattern"),
    "final norm": ("final_norm", noise, "first-tensor", "no pattern"),
}


def judged(name: str, then: str | None = None):
    tensor, change, *_ = SABOTAGE[name]
    golden, run = traced_pair()
    right = run.one.trace[tensor]
    run.one.trace[tensor] = change(right)
    if then is not None:
        first = np.argmax((run.one.trace[tensor] != right).any(axis=1))
        run.one.trace[then] = where(ROWS[:, None] >= first, noise)(run.one.trace[then])
    return judge(golden.evidence(), run.evidence())


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_sabotage_gets_its_hint(name):
    tensor, _, hint, word = SABOTAGE[name]
    report = judged(name)
    trace = report.sequences[0].trace
    assert (trace.first.name, trace.hint) == (tensor, hint), trace.message
    assert word in trace.message
    [finding] = report.findings
    assert (finding.code, finding.hint, finding.verdict) == ("trace.parted", hint, Verdict.DIVERGED)
    assert tensor in finding.message


@pytest.mark.parametrize("name", [n for n in SABOTAGE if SABOTAGE[n][0] != "final_norm"])
def test_what_follows_changes_no_hint(name):
    """A wrong tensor makes all later ones wrong."""
    assert judged(name, then="final_norm").sequences[0].trace.hint == SABOTAGE[name][2]


def test_shared_and_routed_experts_are_told_apart():
    for what, scale in (("the shared expert", 0.4), ("the routed experts' sum", FACTOR)):
        golden, run = traced_pair()
        trace = run.one.trace
        shared = trace[f"{MLP}shared_out"]
        part = shared if what == "the shared expert" else trace[f"{MLP}moe_out"] - shared
        trace[f"{MLP}moe_out"] = trace[f"{MLP}moe_out"] + np.float32(scale - 1) * part
        found = judge(golden.evidence(), run.evidence()).sequences[0].trace
        assert found.hint == "constant-scale"
        assert f"{what} is the golden's times {scale:g}" in found.message


def test_two_experts_are_named():
    a = some_expert()
    b = next(e for e in range(a + 1, CONFIG.n_routed_experts) if 2 <= served_by(e).sum() <= 8)
    golden, run = traced_pair()
    name = f"{MLP}moe_out"
    run.one.trace[name] = where(served_by(a) | served_by(b), noise)(run.one.trace[name])
    found = judge(golden.evidence(), run.evidence()).sequences[0].trace
    assert found.hint == "single-expert"
    assert f"{a} and {b}" in found.message


def test_one_row_that_is_off_accuses_no_expert():
    """Of a row whose experts serve no other row, each would do."""
    golden, run = traced_pair()
    for side in (golden, run):
        ids = side.one.trace[f"{MLP}expert_ids"]
        ids[:] = np.arange(ids.shape[1])
        ids[2] += ids.shape[1]
    run.one.trace[f"{MLP}moe_out"][2] = noise(run.one.trace[f"{MLP}moe_out"][2])
    assert judge(golden.evidence(), run.evidence()).sequences[0].trace.hint == "first-tensor"


def test_rows_whose_inputs_differ_are_no_evidence():
    """The scale is wrong everywhere, and a decoded row is off before that already."""
    golden, run = traced_pair()
    trace = run.one.trace
    trace["embed"][-1] += 1
    trace[f"{ATTENTION}q_latent"] *= 2
    trace[f"{ATTENTION}q_latent"][-1] = noise(trace[f"{ATTENTION}q_latent"][-1:])[0]
    found = judge(golden.evidence(), run.evidence()).sequences[0].trace
    assert (found.first.kind, found.hint) == ("q_latent", "constant-scale")


def test_without_facts_a_shift_is_not_looked_for():
    golden, run = traced_pair()
    golden.facts = None
    name = f"{ATTENTION}k_rope"
    run.one.trace[name] = shifted(0 * ROWS + 1)(run.one.trace[name])
    assert judge(golden.evidence(), run.evidence()).sequences[0].trace.hint == "first-tensor"


def test_bf16_noise_within_a_tolerance_gets_no_hint():
    golden, run = traced_pair()
    run.one.trace = {n: a if a.dtype.kind == "i" else noise(a, 1e-4) for n, a in run.one.trace.items()}
    perturb(run, 1e-4)
    report = judge(golden.evidence(), run.evidence(), JudgeOptions(atol=1.0, allow_loose=True))
    assert report.sequences[0].trace.hint is None


class TestNoise:
    """A run of fewer bits, each tensor with a rule of its own: the fault is told from the noise in it and before it."""

    def judged(self, name: str | None):
        golden, run = traced_pair()
        trace = run.one.trace
        if name is not None:
            trace[SABOTAGE[name][0]] = SABOTAGE[name][1](trace[SABOTAGE[name][0]])
        rules = []
        for tensor, values in golden.one.trace.items():
            if values.dtype.kind == "f":
                trace[tensor] = noise(trace[tensor], 2e-3)
                rules.append(TensorRule(tensor, atol=0.03 * float(np.abs(values).max())))
        options = JudgeOptions(atol=1.0, allow_loose=True, rules=tuple(rules))
        return judge(golden.evidence(), run.evidence(), options).sequences[0].trace

    def test_noise_alone_is_within(self):
        assert self.judged(None).first is None

    @pytest.mark.parametrize(
        "name",
        [
            "scaling twice",
            "a latent doubled",
            "biased weights",
            "other choice",
            "query too late",
            "border",
            "wrong angles",
            "no YaRN",
            "halves",
            "interleaved result",
            "one expert",
            "stale mask",
            "latent not normalised",
            "a key of noise",
            "a query of noise",
            "nibbles",
        ],
    )
    def test_the_hint_is_the_same(self, name):
        found = self.judged(name)
        assert (found.first.name, found.hint) == (SABOTAGE[name][0], SABOTAGE[name][2]), found.message


# ------------------------------------------------------------------------------------------------- without a trace


def hints(golden, run, **options) -> dict[str, str | None]:
    """The hints of all findings that have one, by the finding's code."""
    report = judge(golden.evidence(), run.evidence(), JudgeOptions(**options))
    return {f.code: f.hint for f in report.findings if f.hint is not None}


def test_sampler():
    golden, run = golden_side(), run_side(golden_side())
    run.one.tokens[-1] ^= 1
    assert hints(golden, run) == {"tokens.diverged": "sampler", "tokens.not_argmax": "sampler"}
    run.one.logits["engine"][-1] += np.linspace(0, 1, 40, dtype=np.float32)
    run.one.tokens[-1] = run.one.logits["engine"][-1].argmax()
    assert "sampler" not in hints(golden, run).values()


def test_within_a_tolerance_a_run_that_took_its_own_largest_logit_has_no_sampler_to_blame():
    for options in ({"atol": 1e-2}, {"max_kl": 1e-2}):
        golden = golden_side()
        run = run_side(golden)
        make_tie(golden, run, 3)
        report = judge(golden.evidence(), run.evidence(), JudgeOptions(**options))
        assert [(f.code, f.hint) for f in report.findings] == [("tokens.diverged", None)]


def test_stop():
    golden = golden_side()
    run = run_side(golden)
    golden.one.tokens, golden.one.finish = golden.one.tokens[:4], "stop"
    golden.one.logits = {name: values[:4] for name, values in golden.one.logits.items()}
    assert hints(golden, run) == {"tokens.longer": "stop"}
    again = run_side(golden_side())
    again.one.finish = "stop"
    assert hints(golden_side(), again) == {"finish_reason": "stop"}


def test_output():
    golden, run = golden_side(), run_side(golden_side())
    run.one.tokens = run.one.tokens[:4]
    run.one.logits = {"engine": run.one.logits["engine"][:4]}
    run.seqs[1].id = "other"
    assert hints(golden, run) == {
        "tokens.shorter": "output",
        "sequence.missing": "output",
        "sequence.extra": "output",
    }


@pytest.mark.parametrize(
    ("name", "code", "hint"),
    [
        ("parents", "rounds.tree", "tree"),
        ("bonus", "rounds.bonus", "tree"),
        ("posterior", "rounds.posterior", "tree"),
        ("draft_top_logps", "rounds.marginals", "drafter"),
        ("cache_digest", "rounds.cache", "cache"),
        ("final_cache_digest", "rounds.final_cache", "cache"),
    ],
)
def test_rounds(name, code, hint):
    golden, run = round_pair(sequences=1, steps=24)
    array = rounds_of(run)[name]
    if name == "parents":
        node = int(np.flatnonzero(array > 0)[0])
        array[node] = 0
    elif name == "draft_top_logps":
        array[1, 0, 0] -= np.float32(1e-3)
    else:
        array[(1,) + (0,) * (array.ndim - 1)] ^= 1
    assert hints(golden, run) == {code: hint}


def test_rounds_that_part_leave_no_blame_on_the_sampler():
    """An engine that emits a bonus twice has its logits right, and its tokens wrong."""
    golden, run = round_pair(sequences=1, steps=24)
    run.one.tokens[5] ^= 1
    rounds_of(run)["draft_top_logps"][1, 0, 0] -= np.float32(1e-3)
    assert set(hints(golden, run).values()) == {"drafter"}


def test_nonfinite():
    golden, run = golden_side(), run_side(golden_side())
    run.one.logits["engine"][2, 2] = np.nan
    assert hints(golden, run) == {"logits.nonfinite": "nonfinite"}


def test_weights():
    golden, run = golden_side(), run_side(golden_side())
    run.manifest["model"]["weights_used_sha256"] = "f" * 64
    run.manifest["model"]["weights"]["a"] = "e" * 64
    assert hints(golden, run) == {"provenance.model.weights_used_sha256": "weights", "weights.stored": "weights"}
    run = run_side(golden)
    run.manifest["model"]["config_sha256"] = "f" * 64
    assert hints(golden, run) == {}


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda x: x + np.float32(0.5), "shift"),
        (lambda x: x + np.arange(1, 7, dtype=np.float32)[:, None], "shift"),
        (lambda x: x * np.float32(1.5), "constant-scale"),
        (lambda x: np.concatenate([x[:1], x[:-1]]), "prefill-decode"),
        (lambda x: x + np.linspace(0, 1e-2, 40, dtype=np.float32), None),
        (lambda x: noise(x, 1e-4), None),
    ],
    ids=["constant", "constant of each row", "ratio", "one step late", "slope", "noise"],
)
def test_logits_alone(change, hint):
    golden = golden_side(sequences=1)
    run = run_side(golden)
    run.manifest["decoding"]["teacher_forced"] = True
    run.one.logits["engine"] = change(run.one.logits["engine"])
    run.one.tokens = golden.one.tokens
    wanted = {} if hint is None else {"logits.out_of_tolerance": hint}
    if hint == "shift":
        wanted["logits.shift"] = hint  # the note that says what the constant is
    assert hints(golden, run) == wanted


def test_every_code_is_shown_here_and_in_the_schema():
    here = {hint for _, _, hint, _ in SABOTAGE.values()}
    here |= {"sampler", "stop", "output", "tree", "cache", "drafter", "nonfinite", "weights", "shift"}
    assert here == set(HINTS)
    text = resources.files("kdtr_cli.report").joinpath("schema/diff-1.json").read_text(encoding="utf-8")
    assert json.loads(text)["$defs"]["hint"]["enum"] == [*HINTS, None]


def test_of_a_wide_vocabulary_few_rows_are_held():
    """A hint needs no more memory than the comparison, whatever the vocabulary."""
    vocab, asked = 1 << 20, []

    def rows(lo, hi):
        asked.append(hi - lo)
        return np.linspace(0, 1, (hi - lo) * vocab, dtype=np.float32).reshape(hi - lo, vocab)

    golden = Logits(n_rows=100, vocab=vocab, dtype=np.dtype(np.float32), rows=rows)
    run = replace(golden, rows=lambda lo, hi: rows(lo, hi) + np.float32(0.5))
    result = LogitsResult("full", 100, rows_compared=100, rows_out=97, first_out=Place(3, 5, 0.0, 0.5))
    assert diagnose_logits(golden, run, result) == "shift"
    assert max(asked) * vocab <= 1 << 21

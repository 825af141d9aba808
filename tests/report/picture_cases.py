"""Reports with all that a page can draw: curves, tensors, rounds. Numbers come from real judgements."""

from dataclasses import replace
from functools import cache

import numpy as np
from parity_cases import golden_side, make_tie, perturb, run_side
from rounds_cases import round_pair, rounds_of

from kdtr_cli.parity.curves import CurveBuilder, RowCurves, curve_block_size
from kdtr_cli.parity.drawn import lightened
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.metrics import kl_divergence, ulp_distance
from kdtr_cli.parity.results import Report
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.traces import TensorResult, TraceResult


def curves_of(golden: np.ndarray, run: np.ndarray, n: int) -> RowCurves:
    """The figures of the first `n` rows, taken anew."""
    g, r = golden[:n].astype(np.float64), run[:n].astype(np.float64)
    vocab = g.shape[1]
    size = curve_block_size(vocab)
    with np.errstate(all="ignore"):
        difference = np.abs(r - g)
        padded = np.pad(difference, ((0, 0), (0, -(-vocab // size) * size - vocab)))
        margins = [np.diff(np.sort(x, axis=1)[:, -2:], axis=1)[:, 0] for x in (g, r)]
        figures = {
            "max_abs": difference.max(axis=1),
            "max_ulp": ulp_distance(run[:n], golden[:n], np.dtype(np.float32)).max(axis=1).astype(float),
            "kl": kl_divergence(run[:n], golden[:n]),
            "golden_margin": margins[0],
            "run_margin": margins[1],
        }
    builder = CurveBuilder(n, vocab)
    same = (g.argmax(axis=1) == r.argmax(axis=1)).astype(np.int8)
    builder.add(figures, same, padded.reshape(n, -1, size).max(axis=2).astype(np.float32))
    return builder.curves()


def with_curves(report: Report, golden, run) -> Report:
    made = []
    by_id = {s.id: s for s in run.seqs}
    for result in report.sequences:
        g, r = golden.seqs[result.index], by_id.get(result.id)
        if r is not None and result.logits.rows_compared:
            curves = curves_of(g.logits["exact"], r.logits["engine"], result.logits.rows_compared)
            result = replace(result, logits=replace(result.logits, curves=curves))
            if result.prompt_logits is not None:
                g, r = g.prompt_logits["exact"], r.prompt_logits["engine"]
                result = replace(result, prompt_logits=replace(result.prompt_logits, curves=curves_of(g, r, len(g))))
        made.append(result)
    return replace(report, sequences=tuple(lightened(made)))


def drawn(golden, run, **options) -> Report:
    report = judge(golden.evidence(), run.evidence(), JudgeOptions(**options, keep_rounds=True))
    return with_curves(report, golden, run)


def pair(**kwargs):
    golden = golden_side(**{"sequences": 1, "steps": 24, "vocab": 512, **kwargs})
    return golden, run_side(golden)


def identical():
    return drawn(*pair())


def diverged():
    golden, run = pair(sequences=2)
    perturb(run, 1e-4)
    run.one.logits["engine"][:, 128:136] += np.float32(3e-3)
    make_tie(golden, run, 9)
    run.one.tokens[17] = (run.one.tokens[17] + 1) % 512
    run.one.tokens[9] = golden.one.tokens[9]
    run.one.logits["engine"][17, run.one.tokens[17]] = run.one.logits["engine"][17].max() + 1
    return drawn(golden, run, atol=1e-2)


@cache
def long(steps=2000, forced=True, vocab=1024):
    golden, run = pair(steps=steps, vocab=vocab)
    rng = np.random.default_rng(3)
    e = run.one.logits["engine"]
    e += (rng.normal(0, 1e-5, e.shape) * np.exp(np.linspace(0, 5, steps))[:, None]).astype(np.float32)
    e[900:, vocab // 3 : vocab // 3 + 30] += np.float32(2e-2)
    e[:300] = golden.one.logits["exact"][:300]
    run.manifest["decoding"]["teacher_forced"] = forced
    for s in (1200, 1500, 1777):
        run.one.tokens[s] = (run.one.tokens[s] + 1) % vocab
    return drawn(golden, run, atol=1e-1)


def trees(differ=True):
    golden, run = round_pair(budget=24, block_size=8, sequences=2, steps=64, vocab=512)
    if differ:
        a = rounds_of(run)
        at = int(a["n_nodes"][:3].sum()) + 4
        a["tokens"][at] = (a["tokens"][at] + 1) % 512
    return drawn(golden, run)


def odd():
    """What is not finite, in the run's logits and all over one row; an id and tokens with markup in them."""
    golden, run = pair(sequences=3, vocab=64)
    golden.one.id = run.one.id = "</script><b>\u202e\u2066\x1b[31m[red]"
    run.one.logits["engine"][5, 3] = np.nan
    run.one.logits["engine"][7] = np.nan
    run.seqs[1].logits["engine"][7, 60] = np.inf
    del run.seqs[2]
    return drawn(golden, run, atol=1)


def tie():
    golden, run = pair()
    make_tie(golden, run, 9)
    run.manifest["decoding"]["teacher_forced"] = True
    return drawn(golden, run, atol=1e-2)


def prompt():
    golden, run = pair(score=True)
    perturb(run, 1e-4)
    return drawn(golden, run, atol=1e-2)


def grouped():
    return long(5003, vocab=512)


def many():
    golden, run = pair(sequences=300, steps=6, vocab=32)
    for s in run.seqs[::7]:
        s.tokens[3] ^= 1
    return drawn(golden, run)


def partial():
    golden, run = pair()
    for s in golden.seqs:
        s.form = "top:5"
    perturb(run, 1e-4)
    return judge(golden.evidence(), run.evidence(), JudgeOptions(atol=1e-2, allow_partial=True, keep_rounds=True))


def traced():
    """The error of one tensor in layer 2 that all later ones inherit."""
    report = diverged()
    tensors = [TensorResult("embed", None, 27, 27, 0, 0.0, 0.0, None)]
    for layer in range(4):
        for i, kind in enumerate(("self_attn.q", "self_attn.k_rope", "self_attn.attn_out", "mlp.expert_ids", "hidden")):
            good = (layer, i) < (2, 1)
            ids = kind.endswith("ids")
            error = None if ids else 0.0 if good else 1e-3 * 3 ** (layer * 5 + i - 11)
            name = f"model.layers.{layer}.{kind}"
            bad = 0 if good else 27
            tensors.append(
                TensorResult(name, layer, 27, 27 - bad, bad, error, None if ids else 1e-8, 0 if bad else None)
            )
    first = next(t for t in tensors if t.rows_out)
    message = f"{first.name} is the first tensor that parts: a permutation of the golden's (RoPE layout)"
    trace = TraceResult(tuple(tensors), first, "rope-layout", message)
    return replace(report, sequences=tuple(replace(s, trace=trace) for s in report.sequences))

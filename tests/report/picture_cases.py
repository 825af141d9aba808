"""Reports with all that a page can draw: curves, tensors, rounds. Numbers come from real judgements."""

from dataclasses import dataclass, replace

import numpy as np
from parity_cases import golden_side, make_tie, perturb, run_side
from rounds_cases import round_pair, rounds_of

from kdtr_cli.parity.curves import CurveBuilder, RowCurves, curve_block_size
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.metrics import kl_divergence, ulp_distance
from kdtr_cli.parity.results import Report
from kdtr_cli.parity.tolerances import JudgeOptions


@dataclass(frozen=True)
class TensorResult:
    name: str
    layer: int | None
    rows: int
    rows_identical: int
    rows_out: int
    max_abs: float | None
    nmse: float | None
    first_row: int | None


@dataclass(frozen=True)
class TraceResult:
    tensors: tuple
    first: object | None
    hint: str | None
    message: str | None


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
            object.__setattr__(result.logits, "curves", curves)
        made.append(result)
    return replace(report, sequences=tuple(made))


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


def long(steps=2000, forced=True):
    golden, run = pair(steps=steps, vocab=2048)
    rng = np.random.default_rng(3)
    e = run.one.logits["engine"]
    e += (rng.normal(0, 1e-5, e.shape) * np.exp(np.linspace(0, 5, steps))[:, None]).astype(np.float32)
    e[900:, 700:760] += np.float32(2e-2)
    e[:300] = golden.one.logits["exact"][:300]
    run.manifest["decoding"]["teacher_forced"] = forced
    for s in (1200, 1500, 1777):
        run.one.tokens[s] = (run.one.tokens[s] + 1) % 2048
    return drawn(golden, run, atol=1e-1)


def trees(differ=True):
    golden, run = round_pair(budget=24, block_size=8, sequences=2, steps=64, vocab=512)
    if differ:
        a = rounds_of(run)
        at = int(a["n_nodes"][:3].sum()) + 4
        a["tokens"][at] = (a["tokens"][at] + 1) % 512
    return drawn(golden, run)

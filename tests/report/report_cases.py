"""Reports of every kind, for the tests of all formats: by name a function that makes one."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from parity_cases import golden_side, judged, make_tie, pair, perturb
from rounds_cases import round_pair, rounds_of
from trace_cases import MOE, noise, traced_pair

from kdtr_cli.parity.combine import Combined
from kdtr_cli.parity.judge import invalid
from kdtr_cli.parity.results import Report
from kdtr_cli.parity.tolerances import JudgeOptions, TensorRule
from kdtr_cli.parity.verdicts import Finding, Level, Verdict

__all__ = ["NASTY", "REPORTS", "many", "sweep"]

#: Ids that some format could trip over.
NASTY = (
    "a]]>&<b>\"'",
    "\x1b[31m\x00\ud800\ufffe",
    "line\nline\r\ttab",
    "|`*_[x](javascript:1)<img>@me",
    "##[error]100%:,::",
    "a\\|b\\*c*",
)


def identical() -> Report:
    return judged(*pair())


def within() -> Report:
    golden, run = pair(score=True)
    perturb(run, 1e-3)
    return judged(golden, run, atol=1e-2, max_kl=1, max_ulp=2**40, allow_loose=True)


def tie(on_tie="fail") -> Report:
    golden, run = pair()
    make_tie(golden, run, 2)
    run.manifest["decoding"]["teacher_forced"] = True
    return judged(golden, run, atol=1e-2, on_tie=on_tie)


def diverged() -> Report:
    golden, run = pair(sequences=3)
    run.one.tokens[2] ^= 1
    run.seqs[1].logits["engine"][4, 4] += np.float32(0.5)
    return judged(golden, run)


def missing_and_extra() -> Report:
    golden, run = pair(sequences=3)
    run.seqs[1].id = "other"
    return judged(golden, run)


def lengths() -> Report:
    golden, run = pair(sequences=3)
    for side, index in ((golden, 0), (run, 1)):
        s = side.seqs[index]
        s.tokens = s.tokens[:4]
        s.logits = {name: values[:4] for name, values in s.logits.items()}
    run.seqs[2].finish = "stop"
    return judged(golden, run)


def not_finite() -> Report:
    golden, run = pair(score=True)
    run.one.logits["engine"][1, 1] = np.nan
    run.seqs[1].logits["engine"][1, 1] = -np.inf
    return judged(golden, run, atol=1)


def golden_not_finite() -> Report:
    golden, run = pair()
    golden.one.logits["exact"][1, 1] = np.inf
    return judged(golden, run)


def partial(form="top:3", size=1e-3, **options) -> Report:
    golden, run = pair()
    for s in golden.seqs:
        s.form = form
    perturb(run, size)
    return judged(golden, run, **options)


def tokens_alone() -> Report:
    golden, run = pair()
    for s in run.seqs:
        s.logits.clear()
    return judged(golden, run)


def other_prompt() -> Report:
    golden, run = pair()
    run.seqs[1].prompt[0] ^= 1
    return judged(golden, run)


def other_choices() -> Report:
    golden, run = pair()
    run.manifest["choices"]["rope_angles"] = {"odd": [1, None]}
    return judged(golden, run)


def odd_choice() -> Report:
    golden, run = pair()
    run.manifest["choices"]["x,title=y::z..%\n\ud800##[error]w"] = 1
    return judged(golden, run)


def unverified() -> Report:
    golden, run = pair()
    run.manifest["model"] |= {"weights_used_sha256": None, "rope_table_sha256": None}
    return judged(golden, run, steps=3, select=("s0",))


def suggested(size=1e-3, **options) -> Report:
    golden, run = pair(score=True)
    perturb(run, size)
    floor = {"rows": 12, "values": 480, "max_abs": 1e-3, "max_ulp": 9, "max_kl": 1e-7}
    golden.manifest["noise_floor"] = {"exact": floor}
    return judged(golden, run, suggest=True, **options)


def nothing_to_suggest() -> Report:
    golden, run = pair()
    run.one.logits["engine"][1, 1] = np.nan
    return judged(golden, run, atol=1, suggest=True)


def nothing() -> Report:
    golden, run = pair(sequences=0)
    return judged(golden, run)


def rounds_equal() -> Report:
    return judged(*round_pair())


def rounds_differ() -> Report:
    golden, run = round_pair()
    rounds_of(run, 1)["draft_top_logps"][1, 0, 0] = np.nan
    return judged(golden, run)


def rounds_open() -> Report:
    golden, run = round_pair()
    rounds_of(run, 1)["draft_top_logps"][1, 0, 0] -= np.float32(1e-6)
    perturb(run, 1e-4)
    return judged(golden, run, atol=1e-2)


def rounds_not_compared() -> Report:
    golden, run = pair()
    run.manifest["decoding"]["mode"] = "ddtree"
    return judged(golden, run)


def traced() -> Report:
    return judged(*traced_pair())


def trace_parts(**options) -> Report:
    golden, run = traced_pair()
    trace = run.one.trace
    trace[f"{MOE}self_attn.q_latent"] = 2 * trace[f"{MOE}self_attn.q_latent"]
    for name in (f"{MOE}mlp.moe_out", "final_norm"):
        trace[name] = noise(trace[name])
    del trace["embed"]
    return judged(golden, run, **options)


def nasty() -> Report:
    golden, run = pair(sequences=len(NASTY))
    for i, name in enumerate(NASTY):
        golden.seqs[i].id = run.seqs[i].id = name
        run.seqs[i].tokens[i] ^= 1
    return judged(golden, run)


def many(count: int, wrong: int = 0, extra: int = 0) -> Report:
    """A report of `count` sequences, the first `wrong` of them another token, with `extra` more in the run."""
    golden, run = pair(sequences=count + extra, steps=2, vocab=8)
    for s in run.seqs[:wrong]:
        s.tokens[1] ^= 1
    del golden.seqs[count:]
    return judged(golden, run)


def sweep(shards: int = 3, size: int = 2, wrong: int = 0) -> Report:
    """The report of a sweep; in each of the first `wrong` shards all sequences differ."""
    combined = Combined()
    for i in range(shards):
        golden, run = pair(sequences=size, steps=2, vocab=8)
        for j, (g, r) in enumerate(zip(golden.seqs, run.seqs, strict=True)):
            g.id = r.id = f"q{i * size + j}"
            if i < wrong:
                r.tokens[1] ^= 1
        combined.add(judged(golden, run), i * size)
    return combined.report("g", "r")


def mixed_sweep() -> Report:
    combined = Combined()
    combined.add(identical(), 0)
    combined.add(within(), 2)
    return combined.report("g", "r")


def mixed_sweep_that_differs() -> Report:
    combined = Combined()
    combined.add(diverged(), 0)
    combined.add(within(), 3)
    return combined.report("g", "r")


def refused_sweep() -> Report:
    combined = Combined()
    combined.add(diverged(), 0)
    combined.add(other_prompt(), 3)
    return combined.report("g", "r")


def unopened() -> Report:
    return invalid([Finding(Level.ERROR, "bundle", "g.h5: broken", Verdict.INVALID)], JudgeOptions())


REPORTS: dict[str, Callable[[], Report]] = {
    "auto and suggested": lambda: suggested(tolerance="auto"),
    "suggested, too loose": lambda: suggested(8.0, rtol=1e-3),
    "nothing to suggest": nothing_to_suggest,
    "identical": identical,
    "within": within,
    "tie": tie,
    "tie warn": lambda: tie("warn"),
    "tie pass": lambda: tie("pass"),
    "diverged": diverged,
    "missing and extra": missing_and_extra,
    "lengths": lengths,
    "not finite": not_finite,
    "golden not finite": golden_not_finite,
    "partial": lambda: partial(atol=1e-2),
    "partial allowed": lambda: partial(atol=1e-2, allow_partial=True),
    "partial, wrong": lambda: partial(atol=1e-9),
    "digests": lambda: partial("digest", 0),
    "digests, other": lambda: partial("digest"),
    "digests, unmeasured": lambda: partial("digest", atol=1e-2),
    "loose": lambda: partial("full", atol=1000),
    "loose allowed": lambda: partial("full", atol=1000, allow_loose=True),
    "tokens alone": tokens_alone,
    "other prompt": other_prompt,
    "other choices": other_choices,
    "odd choice": odd_choice,
    "unverified": unverified,
    "nothing": nothing,
    "rounds equal": rounds_equal,
    "rounds differ": rounds_differ,
    "rounds open": rounds_open,
    "rounds not compared": rounds_not_compared,
    "traced": traced,
    "trace parts": trace_parts,
    "trace parts within": lambda: trace_parts(
        atol=1e-3, rules=(TensorRule("*.q_latent", max_ulp=2**40), TensorRule("logits", rtol=1e-3)), allow_loose=True
    ),
    "two goldens": lambda: judged(golden_side(), golden_side()),
    "nasty": nasty,
    "sweep": sweep,
    "sweep, wrong": lambda: sweep(wrong=1),
    "sweep, mixed": mixed_sweep,
    "sweep, mixed and wrong": mixed_sweep_that_differs,
    "sweep, refused": refused_sweep,
    "unopened": unopened,
    "without findings": lambda: replace(diverged(), findings=(), sequences=()),
}

"""Evidence in memory for the tests of judging: a golden, runs of it, and ways to spoil them."""

import copy
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kdtr_cli.parity.evidence import Evidence, EvidenceSequence, ModelFacts, RoundProblem, Rounds, Tensor, logits_of
from kdtr_cli.parity.judge import judge
from kdtr_cli.parity.results import Report
from kdtr_cli.parity.tolerances import JudgeOptions

SHA = {name: f"{i:x}" * 64 for i, name in enumerate(("config", "weights", "rope", "golden", "tensor"), start=1)}


@dataclass
class Seq:
    """A sequence that tests may change in place; `logits` and `prompt_logits` map arithmetic to an array, `form` says
    in which form each is given to the judge; `rounds` has the arrays of rounds/ by path (empty: none recorded), `trace`
    the tensors of a trace by name, in order of execution."""

    id: str
    stream: int
    prompt: np.ndarray
    tokens: np.ndarray
    logits: dict[str, np.ndarray] = field(default_factory=dict)
    prompt_logits: dict[str, np.ndarray] = field(default_factory=dict)
    finish: str = "length"
    form: str = "full"
    digest: bool = False
    ties: tuple[int, ...] = ()
    rounds: dict[str, np.ndarray] = field(default_factory=dict)
    problems: tuple[RoundProblem, ...] = ()
    trace: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class Side:
    """Golden or run as tests change it; `evidence()` gives what `judge` takes."""

    kind: str
    manifest: dict
    seqs: list[Seq]
    vocab: int | None = None
    sha256: str | None = None
    drafts_kept: int | None = None
    facts: ModelFacts | None = None

    def evidence(self) -> Evidence:
        return Evidence(
            self.kind,
            self.manifest,
            tuple(
                EvidenceSequence(
                    s.id,
                    s.stream,
                    s.prompt,
                    s.tokens,
                    s.finish,
                    {k: logits_of(v, s.form, digest=s.digest) for k, v in s.logits.items()},
                    {k: logits_of(v, s.form, digest=s.digest) for k, v in s.prompt_logits.items()},
                    s.ties,
                    partial(Rounds, s.rounds, s.problems) if s.rounds else None,
                    {name: tensor_of(values) for name, values in s.trace.items()},
                )
                for s in self.seqs
            ),
            name=f"{self.kind}.h5",
            manifest_sha256=self.sha256,
            vocab_size=self.vocab,
            drafts_kept=self.drafts_kept,
            facts=self.facts,
        )

    @property
    def one(self) -> Seq:
        return self.seqs[0]


def tensor_of(values: np.ndarray) -> Tensor:
    return Tensor(len(values), values.shape[1], values.dtype, lambda lo, hi: values[lo:hi])


def manifest(kind: str, tier: str = "exact", mode: str = "ar", teacher_forced: bool = False, steps: int = 6) -> dict:
    made = {
        "producer": {"name": "kdtr", "version": "0"},
        "contract_version": 1,
        "model": {
            "config_sha256": SHA["config"],
            "weights": {"a": SHA["tensor"], "b": SHA["tensor"]},
            "weights_used_sha256": SHA["weights"],
            "rope_table_sha256": SHA["rope"],
        },
        "choices": {"latent_norm_eps": "hf", "rope_angles": "f64", "tie_rule": "smallest-index"},
        "decoding": {
            "mode": mode,
            "temperature": 0.0,
            "seed": 0,
            "steps": steps,
            "ignore_eos": False,
            "stop_ids": [2, 5],
            "teacher_forced": teacher_forced,
        },
        "arithmetic": ["exact", "float64"] if kind == "golden" else ["engine"],
        "tier": tier,
        "logits": "full",
        "score": False,
    }
    if kind == "run":
        made["run"] = {"device": "cpu", "batch": 1, "golden_manifest_sha256": SHA["golden"]}
    return made


def golden_side(sequences: int = 2, steps: int = 6, vocab: int = 40, seed: int = 0, score: bool = False) -> Side:
    """A golden: float32 logits of normal size, tokens their argmax, float64 logits a little beside them."""
    rng = np.random.default_rng(seed)
    seqs = []
    for i in range(sequences):
        exact = rng.normal(0, 3, (steps, vocab)).astype(np.float32)
        prompt = rng.integers(0, vocab, 4 + i).astype(np.int32)
        seq = Seq(
            f"s{i}",
            i,
            prompt,
            exact.argmax(axis=1).astype(np.int32),
            {"exact": exact, "float64": exact.astype(np.float64) + rng.normal(0, 1e-7, exact.shape)},
        )
        if score:
            seq.prompt_logits = {"exact": rng.normal(0, 3, (len(prompt), vocab)).astype(np.float32)}
        seqs.append(seq)
    return Side("golden", manifest("golden", steps=steps), seqs, vocab, SHA["golden"])


def run_side(golden: Side, **kwargs: object) -> Side:
    """A run that agrees with the golden bit for bit; change it to taste. `kwargs` go to its manifest."""
    seqs = []
    for s in golden.seqs:
        new = copy.deepcopy(s)
        new.logits = {"engine": new.logits["exact"].copy()} if "exact" in new.logits else {}
        new.prompt_logits = {"engine": new.prompt_logits["exact"].copy()} if new.prompt_logits else {}
        new.ties = ()
        seqs.append(new)
    return Side("run", manifest("run", **kwargs), seqs, golden.vocab)


def make_tie(golden: Side, run: Side, step: int, gap: float = 1e-3, seq: int = 0) -> int:
    """Let the golden's two largest logits at `step` lie `gap` apart and the run choose the second, its logits as near.
    Returns the run's token."""
    row = golden.seqs[seq].logits["exact"][step]
    first, second = (int(i) for i in np.argsort(-row, kind="stable")[:2])
    row[second] = np.float32(row[first] - np.float32(gap))
    golden.seqs[seq].logits["float64"][step] = row
    other = run.seqs[seq].logits["engine"][step]
    other[:] = row
    other[second] = row[first]
    other[first] = row[second]
    run.seqs[seq].tokens[step] = second
    return second


def perturb(run: Side, size: float, seed: int = 1) -> None:
    """Add noise of at most `size` to every logit of the run, tokens left as they are."""
    rng = np.random.default_rng(seed)
    for s in run.seqs:
        x = s.logits["engine"]
        s.logits["engine"] = (x + rng.uniform(-size, size, x.shape)).astype(np.float32)


def pair(**kwargs: object) -> tuple[Side, Side]:
    """A golden, and a run that is identical."""
    golden = golden_side(**kwargs)
    return golden, run_side(golden)


def judged(golden: Side, run: Side, **options: object) -> Report:
    """The report on a run, by these JudgeOptions."""
    return judge(golden.evidence(), run.evidence(), JudgeOptions(**options))

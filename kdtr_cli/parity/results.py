"""What a judgement says: one tree of values that every report renders and none changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kdtr_cli.errors import Exit
from kdtr_cli.parity.distribution import Distribution
from kdtr_cli.parity.ranks import TOP_KS
from kdtr_cli.parity.rounds import RoundDifference
from kdtr_cli.parity.suggest import Suggestion
from kdtr_cli.parity.tally import LogitsResult, TopAgreement
from kdtr_cli.parity.tolerances import JudgeOptions, Tolerance
from kdtr_cli.parity.traces import TraceResult
from kdtr_cli.parity.verdicts import Finding, Verdict

__all__ = ["Report", "RoundsResult", "SequenceResult", "Side", "StepDetail", "Totals"]


@dataclass(frozen=True)
class StepDetail:
    """The step where the tokens part, from both sides. A token is None where that side had stopped; what the evidence
    does not hold is None or empty.

    Margins are largest minus second largest logit; `golden_logits` and `run_logits` are the side's logits of the
    golden's and the run's token; the tops are (id, logit), larger value first, then smaller id. `tie` says that the
    golden's logit of the run's token is within tolerance of its maximum, `recorded_tie` that the golden itself
    recorded a tie here, `own_argmax` whether the run's token is the argmax of the run's own logits.
    """

    step: int
    golden_token: int | None
    run_token: int | None
    golden_margin: float | None = None
    run_margin: float | None = None
    golden_logits: tuple[float | None, float | None] = (None, None)
    run_logits: tuple[float | None, float | None] = (None, None)
    golden_top: tuple[tuple[int, float], ...] = ()
    run_top: tuple[tuple[int, float], ...] = ()
    tie: bool = False
    recorded_tie: bool = False
    own_argmax: bool | None = None


@dataclass(frozen=True)
class RoundsResult:
    """What came of a sequence's rounds.

    `golden_rounds` and `run_rounds` were recorded, `golden_tau` and `run_tau` are the mean numbers of accepted rows,
    the root counted; None where a side has none that can be read. `compared`: the two sides' rounds are of the same
    drafting and were compared; then of `judged` rounds of the golden the first `equal` ones agree, `first_difference`
    follows them, and `first_open` is the first difference that a tolerance leaves undecided. `golden_arrays` and
    `run_arrays` are the rounds themselves, for a report that draws them; kept where `JudgeOptions.keep_rounds` says so.
    """

    compared: bool
    golden_rounds: int | None = None
    run_rounds: int | None = None
    golden_tau: float | None = None
    run_tau: float | None = None
    judged: int = 0
    equal: int = 0
    first_difference: RoundDifference | None = None
    first_open: RoundDifference | None = None
    all_bits: bool = False
    golden_arrays: Mapping[str, np.ndarray] | None = field(
        default=None, repr=False, compare=False, metadata={"json": False}
    )
    run_arrays: Mapping[str, np.ndarray] | None = field(
        default=None, repr=False, compare=False, metadata={"json": False}
    )


@dataclass(frozen=True, eq=False)
class SequenceResult:
    """One sequence of the golden. `index` is its place in the golden; tokens are int32 arrays cut to the judged steps
    (`run_tokens` is None where the run lacks the sequence). `tokens_equal` counts up to the first divergence, and
    over all steps where the run was teacher-forced. `golden_length` is the golden's whole length. `rounds` is None
    where neither side recorded any, `trace` where not both sides have one."""

    index: int
    id: str
    verdict: Verdict
    prompt_length: int
    golden_tokens: np.ndarray
    run_tokens: np.ndarray | None
    golden_length: int
    run_length: int | None
    golden_finish: str
    run_finish: str | None
    tokens_equal: int
    divergence: StepDetail | None
    logits: LogitsResult
    prompt_logits: LogitsResult | None
    rounds: RoundsResult | None
    findings: tuple[Finding, ...]
    trace: TraceResult | None = None

    @property
    def all_tokens(self) -> bool:
        """Whether both sides have the same tokens, in number too."""
        return self.run_tokens is not None and np.array_equal(self.golden_tokens, self.run_tokens)


@dataclass(frozen=True)
class Totals:
    """Counts and extremes over all judged sequences.

    `steps` of `steps_available` output steps and `sequences` of `sequences_available` were judged (they are fewer with
    --steps and --select). `exact`: all tokens equal, none missing, none extra. `first_divergence` is (the sequence's
    place in the golden, step), as is `first_logit_failure`, the first logit row out of tolerance;
    `first_round_difference` is (the sequence's place, round). Of `rounds_judged` rounds that were to be compared
    `rounds_equal` are, each sequence counted up to its first difference. `first_tensor` is (the sequence's place,
    position, name) of the first tensor that parts in the first sequence where traces do. Mean and percentile of
    the KL, the agreement of the largest ids and the smallest margins are over all rows, those of prompt logits too; no
    verdict looks at them. `max_share` is the largest |run − golden| / (atol + rtol · |golden|).
    """

    tokens_equal: int = 0
    tokens: int = 0
    exact: bool = False
    steps: int = 0
    steps_available: int = 0
    sequences: int = 0
    sequences_available: int = 0
    missing: int = 0
    extra: int = 0
    rows: int = 0
    rows_compared: int = 0
    rows_identical: int = 0
    rows_out: int = 0
    values_compared: int = 0
    values_out: int = 0
    max_abs: float | None = None
    max_ulp: int | float | None = None
    max_kl: float | None = None
    first_divergence: tuple[int, int] | None = None
    margin: float | None = None
    first_logit_failure: tuple[int, int] | None = None
    logits: str = "full"
    prompt_logits: str | None = None
    rounds_judged: int = 0
    rounds_equal: int = 0
    first_round_difference: tuple[int, int] | None = None
    verdicts: dict[str, int] = field(default_factory=dict)
    first_tensor: tuple[int, int, str] | None = None
    mean_kl: float | None = None
    p99_kl: float | None = None
    top: tuple[TopAgreement, ...] = tuple(TopAgreement(k) for k in TOP_KS)
    min_golden_margin: float | None = None
    min_run_margin: float | None = None
    rows_shifted: int = 0
    kl: Distribution | None = field(default=None, repr=False, compare=False, metadata={"json": False})
    max_share: float | None = None


@dataclass(frozen=True)
class Side:
    """What a report calls a side: name, tier, and what else the manifest says that a reader wants to see. `provenance`
    has, as (path in the manifest, value) pairs, what must agree before numbers count, and who made it."""

    name: str
    kind: str
    mode: str
    tier: str
    arithmetic: tuple[str, ...]
    details: tuple[tuple[str, str], ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Report:
    """The judgement. `mode` is the run's decoding mode; `reference` the golden's arithmetic that was compared with
    (None: none); `tolerance` the effective bounds (None: there were none to be had); `reason` the one line that made
    it INVALID or INCONCLUSIVE; `rounds` "compared", "not-compared", or None where there are none; `unverified` what no
    side could prove ("weights", "rope"); `values` as what the logits were compared, "logits" or "logprobs";
    `suggestion` the tightest tolerance, where it was asked for; `findings` all of them, the sequences' included, the
    ones that made the verdict first."""

    verdict: Verdict
    exit_code: Exit
    mode: str
    golden: Side | None
    run: Side | None
    options: JudgeOptions
    tolerance: Tolerance | None
    reference: str | None
    totals: Totals
    sequences: tuple[SequenceResult, ...]
    findings: tuple[Finding, ...]
    reason: str | None = None
    teacher_forced: bool = False
    rounds: str | None = None
    unverified: tuple[str, ...] = ()
    values: str = "logits"
    suggestion: Suggestion | None = None

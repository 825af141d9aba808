"""The bounds that a run must keep, each with where it came from, and the rule that applies them.

    |a − b| ≤ atol + rtol · |b|      in float64, a the run's value, b the golden's
    ULP distance ≤ max_ulp           in the type that the run stores
    KL(golden ‖ run) ≤ max_kl        in nats, over the full vocabulary

Every bound that is set must hold: a value passes only if a condition is *shown true*, so NaN passes none.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.parity.metrics import abs_difference, kl_divergence, ulp_distance
from kdtr_cli.parity.verdicts import ON_TIE

__all__ = ["EXACT_TIER", "JudgeOptions", "TensorRule", "Tolerance", "check_rules", "effective_tolerance"]
__all__ += ["tolerance_for"]

#: The only tier that is judged without being told a tolerance.
EXACT_TIER = "exact"

#: The bounds and the options that set them.
_BOUNDS = {"atol": "--atol", "rtol": "--rtol", "max_ulp": "--max-ulp", "max_kl": "--max-kl"}


@dataclass(frozen=True)
class TensorRule:
    """Bounds for the tensors whose names a pattern matches (`*`, `?` and `[...]`, as of file names; case counts):
    `logits`, `prompt_logits` and those of a trace. Of a list of rules the first that matches holds.

    Raises InputError for a bound out of range, and for a rule without any.
    """

    tensor: str
    atol: float | None = None
    rtol: float | None = None
    max_ulp: int | None = None
    origin: str = "--rule"

    def __post_init__(self) -> None:
        if not self.tensor:
            raise InputError(f"{self.origin}: a rule needs the pattern of a tensor's name")
        bounds = {name: getattr(self, name) for name in ("atol", "rtol", "max_ulp")}
        if all(value is None for value in bounds.values()):
            raise InputError(f"{self.origin}: the rule for {self.tensor!r} bounds nothing; give {', '.join(bounds)}")
        for name, value in bounds.items():
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InputError(f"{self.origin}: {name} of {self.tensor!r} is {value}; give a number from 0 on")

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.tensor)

    def tolerance(self, max_kl: float | None, kl_origin: str | None) -> "Tolerance":
        """The bounds on single values; that on whole rows of logits is the options'."""
        atol, rtol = self.atol, self.rtol
        if atol is not None or rtol is not None:
            atol, rtol = atol or 0.0, rtol or 0.0
        origins = dict.fromkeys(("atol", "rtol", "max_ulp"), f"rule {self.tensor}, {self.origin}")
        if kl_origin is not None:
            origins["max_kl"] = kl_origin
        return Tolerance(atol, rtol, self.max_ulp, max_kl, origins)


@dataclass(frozen=True)
class JudgeOptions:
    """What the user asked of a judgement. None: not said. `origins` may say where a value came from, by its name
    ("atol": "--atol, pyproject.toml"); the default is the option's own name. `keep_rounds` is no rule: it keeps the
    rounds themselves in the results, for a report that draws them. `threads` measure logits; nothing that is said
    depends on their number. `tolerance`: "auto" takes the bounds from the golden's noise floor, times
    `tolerance_factor` (auto.py). `suggest`: say what tolerance would do.

    Raises InputError for a bound that is negative or not finite and for any other value out of range.
    """

    atol: float | None = None
    rtol: float | None = None
    max_ulp: int | None = None
    max_kl: float | None = None
    on_tie: str = "fail"
    allow_partial: bool = False
    allow_loose: bool = False
    steps: int | None = None
    select: tuple[str, ...] | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[TensorRule, ...] = ()
    keep_rounds: bool = False
    threads: int = 1
    tolerance: str | None = None
    tolerance_factor: float | None = None
    suggest: bool = False

    def origin(self, name: str) -> str:
        """Where the value of the field `name` came from."""
        return self.origins.get(name, f"--{name.replace('_', '-')}")

    def __post_init__(self) -> None:
        for name, option in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InputError(f"{option} is {value}; give a finite number that is not negative")
        if self.max_ulp is not None and self.max_ulp != int(self.max_ulp):
            raise InputError(f"--max-ulp is {self.max_ulp}; give a whole number")
        self._check_auto()
        if self.on_tie not in ON_TIE:
            raise InputError(f"--on-tie is {self.on_tie!r}; allowed: {', '.join(ON_TIE)}")
        if self.steps is not None and self.steps < 1:
            raise InputError(f"--steps is {self.steps}; give a number from 1 on, or leave it out to judge every step")
        if self.select is not None and not self.select:
            raise InputError("--select names no sequence; give ids separated by commas, or leave it out to judge all")

    def _check_auto(self) -> None:
        if self.tolerance not in (None, "auto"):
            raise InputError(f"--tolerance is {self.tolerance!r}; allowed: auto")
        if self.tolerance is None and self.tolerance_factor is not None:
            raise InputError("--tolerance-factor needs --tolerance auto")
        factor = 1.0 if self.tolerance_factor is None else self.tolerance_factor
        if not (math.isfinite(factor) and factor >= 1):
            raise InputError(f"--tolerance-factor is {factor:g}; give a finite number from 1 on")
        for name in ("atol", "rtol", "max_kl") if self.tolerance else ():
            if getattr(self, name) is not None:
                raise InputError(
                    f"--tolerance auto ({self.origin('tolerance')}) sets what {_BOUNDS[name]} ({self.origin(name)}) "
                    "sets; leave one of the two out"
                )


@dataclass(frozen=True)
class Tolerance:
    """The effective bounds; None: this rule is not applied. `origins` says of each name where its value is from."""

    atol: float | None
    rtol: float | None
    max_ulp: int | None
    max_kl: float | None
    origins: Mapping[str, str]

    @property
    def is_zero(self) -> bool:
        """Whether only numerically equal logits can pass (or nothing but a shift of equal ones)."""
        return (self.atol == 0 and self.rtol == 0) or self.max_ulp == 0

    @property
    def has_values(self) -> bool:
        """Whether a rule looks at single values (KL looks at a whole row)."""
        return self.atol is not None or self.max_ulp is not None

    def bound(self, golden: np.ndarray | float) -> np.ndarray:
        """atol + rtol · |golden| in float64; infinite where no such rule is set."""
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.abs(np.asarray(golden, np.float64))
            if self.atol is None or self.rtol is None:
                return np.full_like(values, np.inf)
            # 0 · inf would be NaN, which is right for a golden that isn't finite: nothing passes
            return self.atol + self.rtol * values

    def values_within(self, difference: np.ndarray, golden: np.ndarray, ulps: np.ndarray | None) -> np.ndarray:
        """Which values keep the bounds on single values, from |a − b| float64, b and the ULP distances uint64 (read
        only where there is a bound on them). A value whose difference is not finite never passes."""
        ok = np.isfinite(difference) & (difference <= self.bound(golden))
        if self.max_ulp is not None:
            # the largest uint64 stands for "not finite", which no bound may let through
            ok &= ulps <= np.uint64(min(self.max_ulp, 2**64 - 2))
        return ok

    def values_pass(self, run: np.ndarray, golden: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Which values keep the bounds on single values: two arrays of one shape -> bool of that shape. `dtype` is the
        type the run stores."""
        ulps = None if self.max_ulp is None else ulp_distance(run, golden, dtype)
        return self.values_within(abs_difference(run, golden), golden, ulps)

    def rows_pass(self, run: np.ndarray, golden: np.ndarray, dtype: np.dtype, *, full: bool = True) -> np.ndarray:
        """Which rows keep every bound: two [n, V] -> bool [n]. `full`: the rows span the whole vocabulary, so that KL
        can be taken."""
        ok = self.values_pass(run, golden, dtype).all(axis=1)
        if full and self.max_kl is not None:
            ok &= kl_divergence(run, golden) <= self.max_kl
        return ok


def effective_tolerance(options: JudgeOptions, tier: str) -> Tolerance | None:
    """The bounds that apply to a run of this tier; None where the tier needs a bound and none was given.

    Tier exact is judged at 0 unless told otherwise. Of --atol and --rtol one alone sets the other to 0.
    """
    given = {name: getattr(options, name) for name in _BOUNDS if getattr(options, name) is not None}
    origins = {name: options.origin(name) for name in given}
    if not given:
        if tier != EXACT_TIER:
            return None
        given = {"atol": 0.0, "rtol": 0.0}
        origins = dict.fromkeys(given, "default of tier exact")
    elif ("atol" in given) != ("rtol" in given):
        named, other = ("atol", "rtol") if "atol" in given else ("rtol", "atol")
        given[other] = 0.0
        origins[other] = f"0 beside {_BOUNDS[named]}"
    return Tolerance(**{name: given.get(name) for name in _BOUNDS}, origins=origins)


def tolerance_for(name: str, rules: tuple[TensorRule, ...], base: Tolerance) -> tuple[Tolerance, bool]:
    """The bounds of a tensor, and whether they decide: those of the first rule that matches, else the options'. The
    options' bounds are made for logits: of a trace's tensors they decide at 0 alone."""
    rule = next((r for r in rules if r.matches(name)), None)
    is_logits = name in ("logits", "prompt_logits")
    if rule is not None:
        return rule.tolerance(base.max_kl if is_logits else None, base.origins.get("max_kl")), True
    return base if is_logits else replace(base, max_kl=None), is_logits or base.is_zero


def check_rules(rules: tuple[TensorRule, ...], names: Collection[str]) -> None:
    """InputError for a rule that holds for none of the tensors that are compared."""
    for i, rule in enumerate(rules):
        matched = [name for name in names if rule.matches(name)]
        if not matched:
            some = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
            raise InputError(
                f"{rule.origin}: the rule for {rule.tensor!r} matches no tensor that is compared: {some or 'none are'} "
                "(traces need kdtr golden --trace and kdtr run --trace)"
            )
        if all(any(earlier.matches(name) for earlier in rules[:i]) for name in matched):
            raise InputError(f"{rule.origin}: the rule for {rule.tensor!r} never holds: earlier rules match all of its")

"""`--tolerance auto`: bounds from the noise floor that the golden measured on its own rows, times a stated factor.

A run that is right rounds in another order than the reference, and lands about as far from it as the reference is from
the truth; one that is wrong lands elsewhere. Differences are bounded by the factor times the floor's; KL grows with
their square, and is bounded by the factor's square times the floor's. docs/log.md has what the factors were taken from.
"""

import math
from collections.abc import Mapping

from kdtr_cli.parity.floor import NoiseFloor, floors_of
from kdtr_cli.parity.tolerances import JudgeOptions, Tolerance

__all__ = ["FACTORS", "auto_tolerance"]

#: The floor that a run's tier is judged by: the arithmetic whose distance from float64 it is.
_FLOORS = {"exact": "exact", "fp32": "exact", "bf16": "bf16", "int4": "bf16"}

#: The factor unless told otherwise. Two float32 sums of one dot part by their order alone, and the longer one runs the
#: more; bf16 engines share the roundings that weigh most.
FACTORS = {"exact": 8.0, "bf16": 3.0}

_HOW = {"exact": "with float64 ('kdtr golden' without --arith)", "bf16": "with 'kdtr golden --bf16'"}

#: KL in float64 is known no better than this: sums over the vocabulary of terms that cancel.
_KL_RESOLUTION = 1e-14


def auto_tolerance(options: JudgeOptions, tier: str, manifest: Mapping[str, object]) -> Tolerance | str:
    """The bounds for a run of this tier, from the golden's manifest; or the line that says why there are none.

    With ``allow_partial`` there is none on KL, which partial logits don't have.
    """
    name = _FLOORS.get(tier)
    if name is None:
        known = ", ".join(_FLOORS)
        return f"--tolerance auto: a golden measures no noise floor for tier {tier} (but for {known}): give --atol"
    floor = floors_of(manifest).get(name)
    if floor is None or floor.rows < 1:
        said = "holds no noise floor"
    elif (fault := _fault(floor)) is not None:
        said = f"holds a noise floor that bounds nothing ({fault})"
    else:
        return _times(options, FACTORS[name] if options.tolerance_factor is None else options.tolerance_factor, floor)
    return f"--tolerance auto: the golden {said} for tier {tier}: make it anew {_HOW[name]}, or give --atol"


def _fault(floor: NoiseFloor) -> str | None:
    if not (math.isfinite(floor.max_abs) and floor.max_abs > 0):
        return f"max_abs {floor.max_abs:g}"
    if not (math.isfinite(floor.max_kl) and floor.max_kl >= 0):
        return f"max_kl {floor.max_kl:g}"
    return None


def _times(options: JudgeOptions, factor: float, floor: NoiseFloor) -> Tolerance | str:
    atol, kl = factor * floor.max_abs, factor * factor * max(floor.max_kl, _KL_RESOLUTION)
    if not (math.isfinite(atol) and math.isfinite(kl)):
        return f"--tolerance auto: {factor:g} x the golden's floor {floor.max_abs:.2g} is not finite"
    asked = options.origin("tolerance")
    bounds: dict[str, float | int | None] = {"atol": atol, "rtol": 0.0, "max_ulp": options.max_ulp, "max_kl": None}
    origins = {"atol": f"auto: {factor:g} x the golden's floor {floor.max_abs:.2g}; {asked}", "rtol": "0 beside auto"}
    if not options.allow_partial:
        bounds["max_kl"] = kl
        origins["max_kl"] = f"auto: {factor:g}^2 x the golden's floor {max(floor.max_kl, _KL_RESOLUTION):.2g}; {asked}"
    if options.max_ulp is not None:
        origins["max_ulp"] = options.origin("max_ulp")
    return Tolerance(**bounds, origins=origins)

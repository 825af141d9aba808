"""YaRN, the one rotary scaling of the DeepSeek and Kimi families: its parameters, ramp and magnitudes, and its reading.

Formulas: transformers 5.24, modeling_rope_utils._compute_yarn_parameters and yarn_get_mscale. Logarithms are taken in
decimal and rounded once, so that every machine has the same bits.
"""

import math
from dataclasses import dataclass
from decimal import Context, Decimal

from kdtr_cli.errors import InputError
from kdtr_cli.model.fields import Fields, shown

__all__ = ["RopeScaling", "get_mscale", "parse_rope", "yarn_ramp"]

# Far beyond what exists (1e8), so that no product of a config's numbers leaves float32.
_MAX_THETA = 1e12


def _ln(x: float) -> float:
    """Natural logarithm, correctly rounded."""
    return float(Decimal(x).ln(Context(prec=40)))


def get_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's magnitude 0.1 · mscale · ln(factor) + 1, and 1 for factor ≤ 1, float64."""
    if factor <= 1:
        return 1.0
    return 0.1 * mscale * _ln(factor) + 1.0


def yarn_ramp(yarn: "RopeScaling", theta: float, rope_dim: int) -> tuple[float, float]:
    """(low, high): the rotary pairs between which YaRN passes from the plain to the stretched frequency.

    Pair d·ln(orig / (2π n)) / (2 ln θ) turns n times over the original context; low is that of beta_fast, high that of
    beta_slow, floored and ceiled unless truncate is false, then clamped to [0, d − 1].
    """

    def pair(turns: float) -> float:
        return rope_dim * _ln(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * _ln(theta))

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, rope_dim - 1)


@dataclass(frozen=True)
class RopeScaling:
    """YaRN, the only rotary scaling of these families. ``None`` stands for a key that the config leaves out."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def amplitude(self) -> float:
        """What cos and sin are multiplied by (float64), as transformers' _compute_yarn_parameters has it.

        An explicit attention_factor wins; the quotient of the two magnitudes only where both mscale and mscale_all_dim
        are given and not 0; else get_mscale(factor). It is 1 for every published DeepSeek and Kimi checkpoint.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return get_mscale(self.factor, self.mscale) / get_mscale(self.factor, self.mscale_all_dim)
        return get_mscale(self.factor)


def parse_rope(f: Fields, rope_dim: int) -> tuple[float, RopeScaling | None]:
    """(rope_theta, YaRN or None) from both spellings, which must agree where both are there; null counts as absent."""
    thetas: dict[str, float] = {}
    scalings: dict[str, RopeScaling | None] = {}
    if f.has("rope_theta"):
        thetas["rope_theta"] = f.number("rope_theta", above=1, most=_MAX_THETA)
    for name in ("rope_scaling", "rope_parameters"):
        table = f.table(name)
        if table is not None:
            inner = Fields(table, f.where, f"{f.prefix}{name}.")
            if inner.has("rope_theta"):
                thetas[f"{name}.rope_theta"] = inner.number("rope_theta", above=1, most=_MAX_THETA)
            scalings[name] = _parse_scaling(inner)
    for found in (thetas, scalings):
        first, *others = list(found) or [""]
        for other in others:
            if found[other] != found[first]:
                raise InputError(f"{f.where}: {f.prefix}{first} and {f.prefix}{other} contradict each other; keep one")
    if not thetas:
        raise InputError(
            f"{f.where}: {f.prefix}rope_theta is missing; needed: a number above 1 (here or in rope_parameters)"
        )
    theta, scaling = next(iter(thetas.values())), next(iter(scalings.values()), None)
    if scaling is not None:
        low, high = yarn_ramp(scaling, theta, rope_dim)
        if low > high:
            name = f"{f.prefix}{next(iter(scalings))}"
            raise InputError(f"{f.where}: {name} gives no YaRN ramp: from pair {low:g} to {high:g} of {rope_dim // 2}")
    return theta, scaling


def _parse_scaling(f: Fields) -> RopeScaling | None:
    """One rope_scaling or rope_parameters object; None for rope type 'default'."""
    f.only("partial_rotary_factor", 1, 1.0)
    old, new = f.choice("type", ("default", "yarn"), None), f.choice("rope_type", ("default", "yarn"), None)
    if old and new and old != new:
        raise InputError(f"{f.where}: {f.prefix}type is {shown(old)} but {f.prefix}rope_type is {shown(new)}; keep one")
    kind = new or old
    if kind is None and f.unknown():
        raise InputError(f'{f.where}: {f.prefix}rope_type is missing; needed: "default" or "yarn"')
    if kind in (None, "default"):
        f.refuse_unknown()
        return None
    scaling = RopeScaling(
        factor=f.number("factor", least=1, most=1e9),
        original_max_position_embeddings=f.integer("original_max_position_embeddings"),
        beta_fast=f.number("beta_fast", 32.0, above=0, most=1e9),
        beta_slow=f.number("beta_slow", 1.0, above=0, most=1e9),
        mscale=f.number("mscale", None, least=0, most=1e4),
        mscale_all_dim=f.number("mscale_all_dim", None, least=0, most=1e4),
        attention_factor=f.number("attention_factor", None, above=0, most=1e4),
        truncate=f.boolean("truncate", True),
    )
    if scaling.beta_fast < scaling.beta_slow:
        raise f.fail("beta_fast", f"at least beta_slow ({scaling.beta_slow:g})")
    f.refuse_unknown()
    return scaling

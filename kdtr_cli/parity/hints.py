"""What the first tensor that parts says of the fault: a code and one sentence.

A hint is a guess from evidence, never a verdict. Each rule looks at the rows of the first tensor whose inputs agree on
both sides (rows where an earlier tensor parts already are left out), and asks for a pattern that a fault of another
kind is very unlikely to leave: values that are not a ratio, a rotation, a permutation to four digits get none of these.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kdtr_cli.parity.evidence import Logits, ModelFacts, Tensor
from kdtr_cli.parity.rotary import describe_rotation, is_permutation
from kdtr_cli.parity.tally import LogitsResult
from kdtr_cli.parity.traces import Masks, TraceResult

__all__ = ["HINTS", "ROUND_HINTS", "diagnose", "diagnose_logits", "round_hint"]

#: Every code that a finding or a trace may carry, and what it means.
HINTS: Mapping[str, str] = {
    "constant-scale": "every value is the golden's times one number",
    "router-bias": "the same experts, with other weights",
    "router-choice": "other experts from the same router logits",
    "router-precision": "router logits of fewer bits",
    "single-expert": "only rows that one or two experts serve are off",
    "position": "keys or queries are rotated by another position",
    "yarn-scale": "right at position 0 alone: the scale of attention, or the frequencies of the rotation",
    "rope-layout": "the right values in other places",
    "prefill-decode": "right in the prompt and wrong in decoded rows, or the other way round",
    "sampler": "the logits agree, the tokens do not",
    "stop": "the output ends at another place than the stop token or the limit",
    "tree": "the rounds part first in the tree or the walk",
    "cache": "the rounds part first in the cache that they leave",
    "drafter": "the rounds part first in what the drafter proposes",
    "nonfinite": "a value is NaN or infinite",
    "output": "an output is missing, extra or cut",
    "weights": "other weights",
    "shift": "all logits of a row are off by one constant",
    "first-tensor": "nothing more is known than the tensor",
}

_SAMPLE = 64  # rows that are looked at
_SAMPLE_VALUES = 1 << 21  # logits of them: some 16 MB a copy in float64, whatever the vocabulary
_CLOSE = 1e-3  # of a ratio, a shift: rounding of float32 sums stays far below, faults of another kind above
_NOISY = 8.0  # times the noise that a tolerance lets into the tensors before: closer than that nothing can be
_MOST = 0.05


@dataclass(frozen=True, eq=False)
class _Case:
    """The first tensor: the rows whose inputs agree, which of them are out, and both sides' values of some that are."""

    kind: str
    where: str
    prompt: int
    clean: np.ndarray
    bad: np.ndarray
    rows: np.ndarray
    golden: np.ndarray
    run: np.ndarray
    facts: ModelFacts | None
    close: float  # as near as values are that are the same but for rounding, a share of the row's largest

    @property
    def all_bad(self) -> bool:
        return bool(self.bad[self.clean].all())

    @property
    def phase(self) -> str | None:
        """Where in the sequence the rows lie that are out, where that is all of one side and none of the other."""
        at = np.arange(len(self.bad))
        for phase, inside in (("decode", at >= self.prompt), ("prompt", at < self.prompt)):
            inside, outside = inside & self.clean, ~inside & self.clean
            if inside.any() and outside.any() and self.bad[inside].all() and not self.bad[outside].any():
                return phase
        return None

    @property
    def only_past_zero(self) -> bool:
        """Whether position 0 alone is right, and every other row of the prompt is not. Under a tolerance that lets
        noise through, the first half may be right too: what grows from position 0 on begins small."""
        bad, clean = self.bad[: self.prompt], self.clean[: self.prompt]
        latest = max(1, self.prompt // 2) if self.close > _CLOSE else 1
        begin = int(np.argmax(bad)) if bad.any() else self.prompt
        return bool(clean[0] and 1 <= begin <= latest and bad[begin:][clean[begin:]].all())


def diagnose(
    found: TraceResult,
    masks: Masks,
    golden: Mapping[str, Tensor],
    run: Mapping[str, Tensor],
    prompt: int,
    facts: ModelFacts | None,
) -> tuple[str | None, str | None]:
    """The code and the sentence for the first tensor of `found`, None where there is none."""
    first = found.first
    if first is None:
        return None, None
    names = [t.name for t in found.tensors]
    clean = np.ones(first.rows, bool)
    for name in names[: names.index(first.name)]:
        clean &= ~masks.of(name)[: first.rows]
    bad = masks.of(first.name)[: first.rows] & clean
    rows = _sample(np.flatnonzero(bad))
    g, r = (_rows(side[first.name], rows) for side in (golden, run))
    noise = max((math.sqrt(t.nmse) for t in found.tensors[: names.index(first.name)] if t.nmse), default=0.0)
    close = min(max(_CLOSE, _NOISY * noise), _MOST)
    case = _Case(first.kind, _where(first.name, first.first_row, prompt), prompt, clean, bad, rows, g, r, facts, close)
    if g.dtype.kind == "f" and not np.isfinite(r).all():
        return "nonfinite", f"{case.where} is not finite in the run"
    code, said = _RULES.get(first.kind, _plain)(case)
    if first.kind == "moe_out":
        code, said = _mixture(case, first.name, golden) or _experts(case, first.name, golden) or (code, said)
    if case.phase is not None and code != "prefill-decode":
        said += f"; {_PHASES[case.phase]}"
    return code, f"{case.where} parts first: {said}"


_PHASES = {
    "decode": "right in the prompt and wrong from the first decoded row on",
    "prompt": "wrong in the prompt and right in every decoded row",
}


def _where(name: str, row: int, prompt: int) -> str:
    place = f"position {row}" + (" of the prompt" if row < prompt else f", decoded row {row - prompt}")
    return f"{name} ({place})"


def _sample(rows: np.ndarray) -> np.ndarray:
    """The first rows, and others evenly spread over the rest."""
    if len(rows) <= _SAMPLE:
        return rows
    return np.unique(np.concatenate([rows[:8], rows[np.linspace(8, len(rows) - 1, _SAMPLE - 8).astype(int)]]))


def _rows(tensor: Tensor, rows: np.ndarray) -> np.ndarray:
    """These rows, floats as float64."""
    values = np.concatenate([tensor.rows(int(row), int(row) + 1) for row in rows])
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64) if tensor.dtype.kind == "f" else values


# ---------------------------------------------------------------------------------------------------- kinds of tensors


def _plain(case: _Case) -> tuple[str, str]:
    scale = _scale(case)
    if scale is not None and case.all_bad:
        return "constant-scale", scale
    if case.phase is not None:
        return "prefill-decode", _PHASES[case.phase]
    if scale is not None:
        return "constant-scale", f"{scale}, in {int(case.bad.sum())} of {int(case.clean.sum())} rows"
    return "first-tensor", f"{int(case.bad.sum())} of {int(case.clean.sum())} rows, and no pattern that is known"


def _query(case: _Case) -> tuple[str, str]:
    if is_permutation(case.golden, case.run, _CLOSE).all():
        return "rope-layout", "the golden's values stand in another order"
    return _plain(case)


def _rotated(case: _Case) -> tuple[str, str]:
    """k_rope and q_rope: what they are made from agrees, so that a rotation or a layout is all that is between."""
    head = None if case.facts is None else 2 * len(case.facts.rotary)
    same = is_permutation(case.golden, case.run, case.close, head)
    if same.all():
        return "rope-layout", "the golden's values stand in another order"
    if case.bad[0] and same[0]:
        return "rope-layout", "at position 0, where nothing turns, the golden's values stand in another order"
    if (scale := _scale(case)) is not None:
        return "constant-scale", scale
    if case.facts is not None:
        turned = describe_rotation(case.golden, case.run, case.rows, case.facts.rotary, case.close)
        if turned.shift is not None:
            return "position", turned.shift
        if turned.rotation and case.only_past_zero:
            return "yarn-scale", "right at position 0 alone, and turned by no whole position: the rotary frequencies"
        if turned.rotation:
            return "position", "the pairs are turned by other angles than the position's"
    return _plain(case)


def _attention(case: _Case) -> tuple[str, str]:
    if case.only_past_zero and _scale(case) is None:
        return "yarn-scale", (
            "right at position 0 alone, where there is one key and no scale shows: the softmax scale "
            "(qk_head_dim^-1/2, YaRN's mscale squared) or the mask"
        )
    return _plain(case)


def _router(case: _Case) -> tuple[str, str]:
    bits = np.ascontiguousarray(case.run.astype(np.float32)).view(np.uint32)
    own = np.ascontiguousarray(case.golden.astype(np.float32)).view(np.uint32)
    if not (bits & 0xFFFF).any() and (own & 0xFFFF).any():
        close = np.abs(case.run - case.golden).max() <= 0.05 * np.abs(case.golden).max()
        return "router-precision", "the run's are bfloat16 values" + (
            "" if close else ", and not those nearest to the golden's"
        )
    plain = _plain(case)
    if plain[0] == "first-tensor" and case.all_bad:
        error = np.abs(case.run - case.golden).max(axis=1) / np.abs(case.golden).max(axis=1)
        many = (case.run != case.golden).mean(axis=1)
        if (error < 2**-6).all() and (many > 0.5).all() and np.median(error) > 2**-18:
            return "router-precision", f"every row is off by some {np.median(error):.1e} of its largest value"
    return plain


def _ids(case: _Case) -> tuple[str, str]:
    alike = (np.sort(case.golden, axis=1) == np.sort(case.run, axis=1)).all(axis=1)
    if alike.all():
        return "router-choice", "the same experts in another order, from router logits that agree"
    return "router-choice", "other experts, from router logits that agree: the bias of the choice, the groups, or ties"


def _weights(case: _Case) -> tuple[str, str]:
    if (scale := _scale(case)) is not None:
        return "constant-scale", scale
    return "router-bias", (
        "the same experts with other weights, from router logits that agree: a bias that entered the weights, or the "
        "normalisation"
    )


_RULES: Mapping[str, Callable[[_Case], tuple[str, str]]] = {
    "q": _query,
    "k_rope": _rotated,
    "q_rope": _rotated,
    "attn_out": _attention,
    "router_logits": _router,
    "expert_ids": _ids,
    "expert_weights": _weights,
}


def _mixture(case: _Case, name: str, golden: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Whether the shared expert or the routed ones alone are scaled; None: they are not."""
    tensor = golden.get(name.removesuffix("moe_out") + "shared_out")
    if tensor is None or not case.all_bad:
        return None
    shared = _rows(tensor, case.rows)
    for what, part in (("the shared expert", shared), ("the routed experts' sum", case.golden - shared)):
        ratio = _ratio(part, case.run - case.golden + part, case.close)
        if ratio is not None:
            return "constant-scale", f"{what} is the golden's times {_named(ratio, case.facts, case.close)}"
    return None


def _experts(case: _Case, name: str, golden: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Whether the rows that are out are just those that one expert, or two, serve; None: they are not."""
    tensor = golden.get(name.removesuffix("moe_out") + "expert_ids")
    if tensor is None or case.all_bad or not case.bad.any():
        return None
    ids = tensor.rows(0, len(case.bad))
    rows = {int(e): (ids == e).any(axis=1) & case.clean for e in np.unique(ids)}
    guilty = {e: served for e, served in rows.items() if served.any() and case.bad[served].all()}
    fits = [(e,) for e, served in guilty.items() if (served == case.bad).all()]
    count = int(case.bad.sum())
    if count == 1 and len(fits) > 1:
        return None  # one row that is off for any reason has experts that serve no other
    if not fits and count > 2:
        each = sorted(guilty)
        pairs = ((a, b) for i, a in enumerate(each) for b in each[i + 1 :])
        fits = [pair for pair in pairs if ((guilty[pair[0]] | guilty[pair[1]]) == case.bad).all()]
    if not fits:
        return None
    some = " or ".join(" and ".join(map(str, pair)) for pair in fits[:4])
    word = "expert" if len(fits[0]) == 1 else "experts"
    return "single-expert", f"all rows that {word} {some} serve{'s' if word == 'expert' else ''}, and no others"


# ------------------------------------------------------------------------------------------------------------- ratios


def _scale(case: _Case) -> str | None:
    """The constant ratio of run to golden, in words; None: there is none."""
    ratio = _ratio(case.golden, case.run, case.close)
    return None if ratio is None else f"every value is the golden's times {_named(ratio, case.facts, case.close)}"


def _ratio(golden: np.ndarray, run: np.ndarray, close: float = _CLOSE) -> float | None:
    """c where run = c · golden as near as ``close``, of the largest value of each row."""
    size = np.abs(golden)
    seen = size > 0.1 * size.max(axis=1, keepdims=True)
    if seen.sum() < 3:
        return None
    ratios = run[seen] / golden[seen]
    c = float(np.median(ratios))
    if not math.isfinite(c) or abs(c - 1) < close:
        return None
    near = np.abs(run - c * golden) <= close * abs(c) * size.max(axis=1, keepdims=True)
    return c if near.all() else None


def _named(ratio: float, facts: ModelFacts | None, close: float) -> str:
    """'2.5, which is routed_scaling_factor'."""
    known = [("0", 0.0), ("-1", -1.0)]
    for name, value in ({} if facts is None else facts.constants).items():
        if value > 0:
            powers = (("", 1.0), ("1 / ", -1.0), ("the square of ", 2.0), ("the square root of ", 0.5))
            powers += (("1 / the square root of ", -0.5), ("1 / the square of ", -2.0))
            known += [(prefix + name, value**power) for prefix, power in powers]
    match = next((name for name, value in known if math.isclose(ratio, value, rel_tol=close, abs_tol=1e-9)), None)
    return f"{ratio:.6g}" + ("" if match is None else f", which is {match}")


# ------------------------------------------------------------------------------------------- findings without a trace


def diagnose_logits(golden: Logits | None, run: Logits | None, result: LogitsResult) -> str | None:
    """What logits alone say, where they are out of tolerance: nonfinite, shift, constant-scale, prefill-decode."""
    if result.run_nonfinite is not None:
        return "nonfinite"
    place = result.first_out
    if place is None or golden is None or run is None or golden.rows is None or run.rows is None:
        return None
    sample = min(_SAMPLE, max(1, _SAMPLE_VALUES // max(1, golden.vocab or 1)))
    last = min(place.row + sample, result.rows_compared)
    g, r = (side.rows(place.row, last).astype(np.float64) for side in (golden, run))
    off = np.abs(r - g).max(axis=1) > 0
    g, r = g[off], r[off]
    shift = np.median(r - g, axis=1, keepdims=True)
    apart = np.abs(r - g - shift).max(axis=1)
    if (np.abs(shift[:, 0]) > 0).all() and (apart <= _CLOSE * np.abs(shift[:, 0])).all():
        return "shift"
    if _ratio(g, r) is not None:
        return "constant-scale"
    decoded = result.rows_compared - 1
    if place.row == 1 and decoded >= 2 and result.rows_out == decoded and result.rows_identical == 1:
        return "prefill-decode"
    return None


#: What rounds can say.
ROUND_HINTS = frozenset({"tree", "cache", "drafter"})

_ROUND_PARTS = {"marginals": "drafter", "cache": "cache", "final_cache": "cache"}


def round_hint(part: str) -> str:
    """The code for the first part of the rounds that differs."""
    return _ROUND_PARTS.get(part, "tree")

"""Inputs for every kernel of the table: ordinary and adversarial shapes and values, from a seed.

A case holds the kernel's named arguments as NumPy arrays and numbers, outputs poisoned. The same cases are run on every
device and by the NumPy twin; bits must agree over whole buffers.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kdtr_cli.engine import kernel_cases_attention as attention
from kdtr_cli.engine.kernel_case import Case, Maker, angles, normal, poison
from kdtr_cli.engine.kernel_cases_ddtree import DDTREE_CASES
from kdtr_cli.engine.kernel_cases_mma import MMA_CASES
from kdtr_cli.engine.kernel_cases_products import PRODUCT_CASES, expert_matmul
from kdtr_cli.engine.kernels import KERNELS, SPAN

__all__ = ["Case", "cases"]

f32, i32 = np.float32, np.int32


def _rmsnorm(rng: np.random.Generator) -> Iterator[Case]:
    for rows, n, pad, scale in (
        (1, 1, 0, 1.0),
        (3, 5, 3, 1.0),
        (2, 75, 1, 1.0),
        (4, 128, 0, 1.0),
        (1, 511, 2, 1e-20),
        (1, 513, 0, 1e18),
        # many rows: a sum in another order shows in the rounded root of a few rows only
        (24, 640, 0, 1.0),
        (24, 1027, 1, 1.0),
        (16, 7168, 0, 1.0),
        (16, 8193, 0, 1.0),
    ):
        x = normal(rng, rows, n + pad) * f32(scale)
        values = {"x": x, "weight": normal(rng, n), "y": poison(rows, n), "rows": rows, "n": n}
        yield Case(f"{rows}x{n} scale {scale:g}", {**values, "eps": 1e-6, "x_row": n + pad, "y_row": n})
    x = np.zeros((2, 16), f32)
    x[1] = -0.0
    values = {"x": x, "weight": normal(rng, 16), "y": poison(2, 16), "rows": 2, "n": 16, "eps": 1e-5}
    yield Case("zeros keep their sign", {**values, "x_row": 16, "y_row": 16})
    x = normal(rng, 2, 20)
    x[0, 7], x[1, 3] = np.nan, np.inf
    values = {"x": x, "weight": normal(rng, 20), "y": poison(2, 20), "rows": 2, "n": 20, "eps": 1e-5}
    yield Case("NaN and infinity spread", {**values, "x_row": 20, "y_row": 20})


def _rope_query(rng: np.random.Generator) -> Iterator[Case]:
    for rows, heads, nope, half, latent, interleaved in (
        (1, 1, 1, 1, 1, 1),
        (3, 4, 16, 4, 32, 1),
        (2, 3, 11, 3, 27, 0),
        (4, 64, 128, 32, 512, 1),
    ):
        q_row = heads * (nope + 2 * half) + 5
        values = {
            "q": normal(rng, rows, q_row),
            "positions": rng.integers(0, 50, rows).astype(i32),
            **angles(rng, 50, half),
        }
        values |= {
            "query": poison(rows, heads, latent + 2 * half),
            "rows": rows,
            "heads": heads,
            "nope": nope,
            "half": half,
        }
        yield Case(
            f"{rows} rows, {heads} heads of {2 * half}",
            {**values, "latent": latent, "interleaved": interleaved, "q_row": q_row},
        )


def _kv_append(rng: np.random.Generator) -> Iterator[Case]:
    for rows, latent, half, interleaved in ((1, 1, 1, 1), (3, 32, 4, 1), (4, 27, 3, 0), (12, 512, 32, 1)):
        capacity, sequences = 9, rows
        values = {"kv": normal(rng, rows, latent + 2 * half + 3), "weight": normal(rng, latent)}
        values |= {"positions": rng.integers(0, 50, rows).astype(i32), **angles(rng, 50, half)}
        values |= {
            "slots": rng.permutation(sequences).astype(i32),
            "places": rng.integers(0, capacity, rows).astype(i32),
        }
        values |= {
            "cache": poison(sequences, capacity, latent + 2 * half),
            "rows": rows,
            "latent": latent,
            "half": half,
        }
        values |= {"interleaved": interleaved, "capacity": capacity, "eps": 1e-6, "kv_row": latent + 2 * half + 3}
        yield Case(f"{rows} rows of {latent} + {2 * half}", values)


def _swiglu(rng: np.random.Generator) -> Iterator[Case]:
    # the last size is there for exp: a fault in a digit of its polynomial shows in one value of a thousand
    for rows, n in ((1, 1), (3, 75), (2, 128), (5, 300), (20, 2048)):
        values = {"gate_up": normal(rng, rows, 2 * n) * f32(30), "h": poison(rows, n), "rows": rows, "n": n}
        yield Case(f"{rows}x{n}", {**values, "two_n": 2 * n})
    edge = np.array([[0, -0.0, 87, -87, 88, -88, 100, -100, np.inf, -np.inf, np.nan, 1e-42]], f32)
    values = {"gate_up": np.concatenate([edge, np.ones_like(edge)], 1), "h": poison(1, 12), "rows": 1, "n": 12}
    yield Case("edges of exp", {**values, "two_n": 24})


def _router(rng: np.random.Generator) -> Iterator[Case]:
    def case(label: str, logits: np.ndarray, bias, slots: int, **more: Any) -> Case:
        rows, experts = logits.shape
        values = {
            "logits": logits,
            "bias": bias,
            "ids": poison(rows, slots, dtype=i32),
            "weights": poison(rows, slots),
        }
        values |= {"rows": rows, "experts": experts, "slots": slots, "groups": 1, "kept_groups": 1, "softmax": 0}
        return Case(label, {**values, "best_two": 1, "normalise": 1, "factor": 2.827, **more})

    yield case("one expert", normal(rng, 1, 1), None, 1)
    yield case("16 experts, negative bias", normal(rng, 5, 16), -np.abs(normal(rng, 16)), 4)
    yield case("384 experts", normal(rng, 3, 384), normal(rng, 384) * f32(0.1), 8)
    yield case("2048 experts, every lane full", normal(rng, 1, 2048), None, 128)
    yield case("7 experts, all chosen", normal(rng, 2, 7), normal(rng, 7), 7, normalise=0)
    groups = {"groups": 4, "kept_groups": 2}
    yield case("groups, all choices negative", normal(rng, 6, 16), f32(-3) - np.abs(normal(rng, 16)), 4, **groups)
    yield case("8 groups of 32", normal(rng, 3, 256), normal(rng, 256), 8, groups=8, kept_groups=4)
    yield case("softmax, all four groups of lanes", normal(rng, 16, 520), None, 6, softmax=1, best_two=0, normalise=0)
    yield case("softmax, no groups", normal(rng, 4, 64), None, 6, softmax=1, best_two=0, normalise=0, factor=1.0)
    yield case(
        "softmax, groups by maximum",
        normal(rng, 4, 64),
        None,
        6,
        softmax=1,
        best_two=0,
        normalise=0,
        groups=8,
        kept_groups=3,
    )
    yield case("ties go to the smaller index", np.zeros((2, 20), f32), None, 5)
    yield case("ties of groups", np.zeros((2, 16), f32), np.zeros(16, f32), 4, **groups)
    yield case("logits that saturate", np.array([[100, -100, 0, 90, -90, 88]], f32), None, 3)
    yield case("tiny scores", np.full((1, 8), -87, f32), None, 4)
    nan = normal(rng, 2, 12)
    nan[0, 7], nan[1, 2], nan[1, 9] = np.nan, np.inf, -np.inf
    yield case("NaN is chosen first", nan, None, 4)
    yield case("NaN under softmax", nan, None, 4, softmax=1, best_two=0, normalise=0)


def _combine(rng: np.random.Generator) -> Iterator[Case]:
    for rows, slots, n, shared in ((1, 1, 1, False), (3, 4, 75, True), (2, 8, 300, True), (4, 6, 128, False)):
        values = {
            "expert": normal(rng, rows, slots, n),
            "weights": normal(rng, rows, slots),
            "residual": normal(rng, rows, n),
        }
        values |= {"shared": normal(rng, rows, n) if shared else None, "y": poison(rows, n)}
        yield Case(
            f"{rows}x{n}, {slots} slots{', shared' if shared else ''}", {**values, "rows": rows, "slots": slots, "n": n}
        )


def _sample_parts(rng: np.random.Generator) -> Iterator[Case]:
    def case(label: str, logits: np.ndarray, temperature: float = 0.0, seed: int = 0) -> Case:
        rows, vocab = logits.shape
        parts = -(-vocab // SPAN)
        values = {
            "logits": logits,
            "positions": np.arange(rows, dtype=i32) * 7,
            "streams": np.arange(rows, dtype=i32)[::-1].copy(),
        }
        values |= {
            "values": poison(rows, parts),
            "indices": poison(rows, parts, dtype=i32),
            "bad": np.zeros(rows, i32),
        }
        values |= {"vocab": vocab, "temperature": temperature, "seed_low": seed & 0xFFFFFFFF, "seed_high": seed >> 32}
        return Case(label, {**values, "rows": rows, "parts": parts})

    for vocab in (1, 31, 257, 2047, 2048, 2049, 5000):
        yield case(f"vocabulary {vocab}", normal(rng, 3, vocab))
        yield case(f"vocabulary {vocab}, sampled", normal(rng, 3, vocab), 0.8, 0x123456789ABCDEF0)
    yield case("all equal: the first", np.zeros((2, 4097), f32))
    signed = np.zeros((1, 300), f32)
    signed[0, :200] = -0.0
    yield case("-0 and +0 are equal", signed)
    yield case("all -inf", np.full((1, 300), -np.inf, f32))
    last = np.zeros((1, 4097), f32)
    last[0, 4096] = 1
    yield case("the last id", last)
    nan = normal(rng, 2, 3000)
    nan[0, 2500] = np.nan
    yield case("NaN is seen and flagged", nan)


def _sample_final(rng: np.random.Generator) -> Iterator[Case]:
    for rows, parts, advance in ((1, 1, False), (3, 2, True), (2, 80, True), (4, 33, False)):
        indices = (np.arange(parts, dtype=i32) * SPAN + rng.integers(0, SPAN, (rows, parts))).astype(i32)
        scores = rng.integers(-2, 3, (rows, parts)).astype(f32)
        values = {
            "values": scores,
            "indices": indices,
            "chosen": poison(rows, dtype=i32),
            "rows": rows,
            "parts": parts,
        }
        on = {
            "tokens": np.arange(rows, dtype=i32),
            "positions": np.arange(rows, dtype=i32),
            "active": np.arange(rows, dtype=i32) % 2,
        }
        values |= on if advance else dict.fromkeys(on)
        yield Case(f"{rows} rows of {parts} parts{', advancing' if advance else ''}", values)


def _nonfinite(rng: np.random.Generator) -> Iterator[Case]:
    for n, at in ((1, 0), (1000, None), (5000, 4999), (200000, 131072)):
        x = normal(rng, n)
        if at is not None:
            x[at:] = np.nan
            x[at] = -np.inf
        yield Case(f"{n} elements, first at {at}", {"x": x, "first": np.array([2**64 - 1], np.uint64), "n": n})


_MAKERS: dict[str, Maker] = {
    "rmsnorm": _rmsnorm,
    "rope_query": _rope_query,
    "kv_append": _kv_append,
    "attn_scores": attention.attn_scores,
    "attn_chunks": attention.attn_chunks,
    "attn_combine": attention.attn_combine,
    "swiglu": _swiglu,
    "router": _router,
    "combine": _combine,
    "sample_parts": _sample_parts,
    "sample_final": _sample_final,
    "nonfinite": _nonfinite,
    **PRODUCT_CASES,
    **DDTREE_CASES,
}


def cases(name: str, seed: int = 0) -> Iterator[Case]:
    """The test cases of a kernel; the same for the same seed."""
    rng = np.random.default_rng(seed)
    twin = KERNELS[name].twin
    if twin.startswith("expert_matmul"):
        form = twin.removeprefix("expert_matmul").removeprefix("_") or "f32"
        return expert_matmul(rng, form, 1 if "_m1_" in name else 4)
    if twin in MMA_CASES:
        return MMA_CASES[twin](rng, name)
    return _MAKERS[twin](rng)

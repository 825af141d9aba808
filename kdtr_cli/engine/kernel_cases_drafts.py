"""Cases of the kernels that draft: marginals of logits, and of the drafters without weights."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kdtr_cli.engine.kernel_case import Case, Maker, normal, poison
from kdtr_cli.engine.kernels_ddtree import PART

__all__ = ["DRAFT_CASES"]

f32, i32 = np.float32, np.int32


# ---------------------------------------------------------------------------------------------------- marginals


def _logits(rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray, int]]:
    """(label, logits [rows, vocab], k)."""
    for rows, vocab, k in (
        (2, 1, 1),
        (3, 31, 1),
        (3, 31, 8),
        (2, 31, 31),
        (1, 257, 256),
        (3, 2049, 7),
        (2, 5000, 64),
        (1, 5000, 1024),
        (2, PART, 64),
        (2, PART + 1, 16),
        (1, 2 * PART + 1000, 1024),
        (1, 4 * PART + 77, 1000),
        (2, 5 * PART - 3, 2),
    ):
        yield f"{k} of {vocab}", normal(rng, rows, vocab), k
    yield "all equal: the first", np.zeros((2, PART + 900), f32), 70
    yield "all equal, all kept", np.full((1, 300), f32(-2)), 300
    yield "seven different values", rng.integers(-3, 4, (2, 2 * PART)).astype(f32), 256
    steps = np.arange(PART + 64, dtype=f32)
    yield "ascending and descending", np.stack([steps, -steps]), 64
    # two values share a part: the k-th is one of many equal ones
    few = np.where(rng.random((2, 3000)) < 0.01, f32(1), f32(0)).astype(f32)
    yield "more places than large values", few, 128
    signed = np.zeros((1, 700), f32)
    signed[0, :350] = -0.0
    yield "-0 and +0 are equal", signed, 400
    neighbours = (f32(1) + np.arange(4000, dtype=f32) * f32(2.0**-23)).astype(f32)
    for k in (33, 161):  # the last one kept is odd
        yield f"neighbouring numbers, {k} kept", rng.permutation(neighbours)[None], k
    wide = normal(rng, 2, 4000) * f32(1e-41)
    wide[1] = normal(rng, 4000) * f32(1e37)
    yield "subnormal and huge", wide, 16
    last = np.zeros((1, 3 * PART), f32)
    last[0, -1] = 1
    yield "the last id first", last, 3
    low = normal(rng, 2, 600)
    low[:, 100:] = -np.inf
    yield "-inf among the kept", low, 200
    yield "all -inf", np.full((1, 300), -np.inf, f32), 8
    bad = normal(rng, 4, PART + 500)
    bad[0, PART + 1], bad[1, 5], bad[2, 7], bad[2, 9] = np.nan, np.inf, np.nan, -np.inf
    yield "NaN and infinity are flagged", bad, 16


def _keys(logits: np.ndarray, k: int) -> np.ndarray:
    """uint64 [rows, parts, k] as topk_parts leaves them, by a full sort (rule 6)."""
    bits = (logits + f32(0)).view(np.uint32)
    value = np.where(bits >> 31 != 0, ~bits, bits | np.uint32(1 << 31))
    value = np.where(np.isnan(logits), np.uint32(0xFFFFFFFF), value).astype(np.uint64)
    unique = value << np.uint64(32) | (~np.arange(logits.shape[1], dtype=np.uint32)).astype(np.uint64)
    keys = np.zeros((len(logits), -(-logits.shape[1] // PART), k), np.uint64)
    for p in range(keys.shape[1]):
        found = np.sort(unique[:, p * PART : (p + 1) * PART], 1)[:, ::-1][:, :k]
        keys[:, p, : found.shape[1]] = found
    return keys


def _topk_parts(rng: np.random.Generator) -> Iterator[Case]:
    for label, logits, k in _logits(rng):
        rows, vocab = logits.shape
        values = {"logits": logits, "keys": poison(rows, -(-vocab // PART), k, dtype=np.uint64)}
        yield Case(label, {**values, "bad": np.zeros(rows, i32), "rows": rows, "vocab": vocab, "k": k})
    yield Case("a flag is not cleared", {**values, "bad": np.full(rows, 4, i32), "rows": rows, "vocab": vocab, "k": k})


def _topk_final(rng: np.random.Generator) -> Iterator[Case]:
    def case(label: str, logits: np.ndarray, k: int) -> Case:
        rows, vocab = logits.shape
        keys = _keys(logits, k)
        values = {"logits": logits, "keys": keys, "sums": poison(*keys.shape[:2]), "arrived": np.zeros(rows, i32)}
        values |= {"ids": poison(rows, k, dtype=i32), "logps": poison(rows, k), "rows": rows, "vocab": vocab, "k": k}
        return Case(label, values)

    for label, logits, k in _logits(rng):
        yield case(label, logits, k)
    # one large logit, the others' sum below 1: the order in which the parts are added shows in its log-probability
    low = normal(rng, 24, 5 * PART + 5) - f32(12)
    low[:, 7] = 0
    yield case("the order of the parts", low, 4)


# ---------------------------------------------------------------------------------------------------- drafters


def _marginals(batch: int, horizon: int, k: int) -> dict[str, Any]:
    """The outputs of every drafter, poisoned."""
    values = {"ids": poison(batch, horizon, k, dtype=i32), "logps": poison(batch, horizon, k)}
    values |= {"counts": poison(batch, horizon, dtype=i32)}
    return {**values, "batch": batch, "horizon": horizon, "k": k}


def _draft_ngram(rng: np.random.Generator) -> Iterator[Case]:
    def case(label: str, texts: list[list[int]], horizon: int, k: int) -> Case:
        history = poison(len(texts), max(map(len, texts)) + 2, dtype=i32)
        for b, text in enumerate(texts):
            history[b, : len(text)] = text
        values = {"history": history, "starts": np.array([len(t) - 1 for t in texts], i32)}
        return Case(label, {**values, "history_row": history.shape[1], **_marginals(len(texts), horizon, k)})

    yield case("nothing came before", [[5], [5, 6], [1, 2, 3, 4, 9]], 7, 4)
    yield case("one, two and three tokens match", [[1, 7, 2, 1], [4, 1, 7, 2, 4, 1], [3, 4, 1, 7, 0, 3, 4, 1]], 7, 4)
    yield case("the longest match wins", [[1, 2, 3, 9, 3, 8, 3, 8, 1, 2, 3]], 3, 8)
    yield case("a match may reach the root itself", [[2, 2, 2, 2, 2], [0, 0], [1, 1, 1]], 5, 3)
    # 8 stands before the root alone, so that one token matches
    yield case("equal votes: the smaller id first", [[9, 5, 9, 3, 9, 7, 9, 3, 9, 5, 8, 9]], 2, 8)
    yield case("fewer kept than found", [[9, 5, 9, 3, 9, 7, 9, 1, 9, 5, 8, 9]], 3, 2)
    yield case("a chain keeps one", [[9, 5, 9, 3, 9, 5, 8, 9], [0, 1, 0, 1, 0]], 7, 1)
    # nine places: the earliest has no vote
    yield case("the eight latest of nine", [[t for i in range(9) for t in (1, 100 + i)] + [1]], 3, 16)
    text = rng.integers(0, 3, 900).tolist()
    yield case("many matches", [text, text[:301], text[:129], text[:2]], 7, 8)
    yield case("32 depths over the end", [[1, 2, 3, 1, 2], [*range(40), 0, 1]], 32, 64)
    far = rng.integers(10, 500, 1500).tolist()
    yield case("all matches 128 apart", [[*(t for i in range(9) for t in (1, *range(10, 136), 300 + i)), 1]], 128, 8)
    yield case("matches far back", [[*far[:3], *far, *far[:3]], [7, *far, 7]], 15, 16)


def _draft_synthetic(rng: np.random.Generator) -> Iterator[Case]:
    def case(label: str, batch: int, horizon: int, k: int, vocab: int, rate: float, seed: int = 0) -> Case:
        row = 40
        values = {"known": rng.integers(0, vocab, (batch, row)).astype(i32)}
        values |= {"known_from": (np.arange(batch, dtype=i32) + 3), "known_count": np.full(batch, 30, i32)}
        values |= {"streams": np.arange(batch, dtype=i32)[::-1].copy(), "starts": np.arange(batch, dtype=i32) * 9 + 2}
        values |= {"known_row": row, "vocab": vocab, "rate": rate}
        values |= {"seed_low": seed & 0xFFFFFFFF, "seed_high": seed >> 32}
        return Case(f"{label}: {k} of {vocab}", {**values, **_marginals(batch, horizon, k)})

    yield case("every first hits", 3, 7, 4, 50, 1.0)
    yield case("no first hits", 3, 7, 4, 50, 0.0)
    yield case("seven of ten", 5, 15, 16, 163840, 0.7, 0x123456789ABCDEF0)
    yield case("a chain", 2, 7, 1, 512, 0.5, 1)
    yield case("one id", 2, 4, 1, 1, 0.5)
    yield case("two ids", 4, 9, 2, 2, 0.5)
    yield case("all ids", 6, 32, 13, 13, 0.3, 2**63)
    yield case("many ranks", 1, 2, 1024, 2000, 0.5, 5)
    values = dict(case("", 3, 8, 8, 99, 0.7).values)
    values["known_count"] = np.array([0, 2, 40], i32)
    values["starts"] = np.array([0, 2, 43], i32)  # before, at and past what is known
    yield Case("unknown continuations", values)
    # the fourth word of this draw is 2**32 - 713: adding a filler's number passes 32 bits
    values = dict(case("", 1, 1, 1024, 2000, 0.5, 20).values)
    yield Case("numbers past 32 bits", {**values, "starts": np.array([649927], i32)})
    # the first word of this draw gives exactly this rate, which is no hit
    values = dict(case("", 1, 1, 4, 50, float.fromhex("0x1.2a92c272p-2")).values)
    yield Case("a draw of the very rate", {**values, "starts": np.array([13], i32), "streams": np.array([1], i32)})


def _draft_replay(rng: np.random.Generator) -> Iterator[Case]:
    for label, k, kept in (
        ("as stored", 8, 8),
        ("fewer than stored", 3, 8),
        ("more than stored", 16, 5),
        ("one", 1, 1),
    ):
        batch, positions, horizon = 5, 6, 7
        shape = (batch, positions, horizon)
        values = {"top_ids": rng.integers(0, 1000, (*shape, kept)).astype(i32), "top_logps": -normal(rng, *shape, kept)}
        values |= {"top_counts": rng.integers(-1, kept + 3, shape).astype(i32)}
        values |= {"prompt_lengths": np.array([4, 4, 9, 1, 3], i32), "limits": np.array([6, 6, 3, 0, 6], i32)}
        # the first, the last, just past the limit, nothing stored, before the prompt's end
        values |= {"starts": np.array([4, 9, 12, 1, 2], i32), "positions": positions, "kept": kept}
        yield Case(label, {**values, **_marginals(batch, horizon, k)})


def _draft_rows(rng: np.random.Generator) -> Iterator[Case]:
    for batch, block in ((1, 2), (3, 8), (5, 33), (64, 16)):
        values = {"starts": rng.integers(0, 9000, batch).astype(i32), "roots": rng.integers(0, 500, batch).astype(i32)}
        values["roots"][0] = 0
        values |= {name: poison(batch, block, dtype=i32) for name in ("tokens", "positions", "slots", "last")}
        yield Case(f"{batch} blocks of {block}", {**values, "batch": batch, "block": block, "mask_id": 163838})


def _draft_qkv(rng: np.random.Generator) -> Iterator[Case]:
    for rows, heads, kv_heads, head_dim, pad in (
        (1, 1, 1, 2, 0),
        (3, 4, 2, 48, 0),
        (4, 3, 1, 6, 1),
        (2, 64, 8, 128, 0),
        (3, 0, 2, 48, 0),
        (5, 0, 1, 10, 3),
        (2, 2, 1, 514, 4),
    ):
        half, capacity, sequences = head_dim // 2, 9, rows
        angle = rng.uniform(0, 6.3, (50, half))
        row = (heads + 2 * kv_heads) * head_dim + pad
        values = {"qkv": normal(rng, rows, row), "k_weight": normal(rng, head_dim), "qkv_row": row}
        values |= {"q_weight": normal(rng, head_dim) if heads else None}
        values |= {"query": poison(rows, heads, head_dim) if heads else None}
        values |= {"cos": np.cos(angle).astype(f32), "sin": np.sin(angle).astype(f32)}
        values |= {"positions": rng.integers(0, 50, rows).astype(i32), "slots": rng.permutation(rows).astype(i32)}
        values |= {"places": rng.integers(0, capacity, rows).astype(i32)}
        values |= {"cache": poison(sequences, capacity, 2 * kv_heads * head_dim), "capacity": capacity, "eps": 1e-5}
        values |= {"rows": rows, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        yield Case(f"{rows} rows of {heads} and 2 x {kv_heads} heads of {head_dim}", values)


#: kernel → maker of its cases
DRAFT_CASES: dict[str, Maker] = {
    "topk_parts": _topk_parts,
    "topk_final": _topk_final,
    "draft_ngram": _draft_ngram,
    "draft_synthetic": _draft_synthetic,
    "draft_replay": _draft_replay,
    "draft_rows": _draft_rows,
    "draft_qkv": _draft_qkv,
}

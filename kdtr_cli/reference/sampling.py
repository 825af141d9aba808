"""Drawing tokens: Philox-4x32-10 keyed by position, Gumbel noise, and the choice of a token (rule 15).

A draw depends on the seed, the sequence's stream, the position of the drawn token and the token id alone, never on a
batch, a step count or a mode: so AR and speculative decoding draw the same token at the same position.
"""

import numpy as np

from kdtr_cli.reference.arith import argmax, log64

__all__ = ["PURPOSE_DRAFT", "PURPOSE_PROMPT", "PURPOSE_SAMPLE", "choose", "gumbel", "philox4x32", "uniform_words"]

PURPOSE_SAMPLE, PURPOSE_PROMPT, PURPOSE_DRAFT = 0, 1, 2

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox-4x32 of 10 rounds (Salmon et al., SC 2011): counter uint32 [..., 4], key two 32-bit words -> [..., 4]."""
    c0, c1, c2, c3 = (np.asarray(counter[..., i], np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], -1).astype(np.uint32)


def uniform_words(count: int, position: int, stream: int, purpose: int, seed: int) -> np.ndarray:
    """uint32 [count], a word for each id below count: counter (id // 4, position, stream, purpose), word id mod 4."""
    counter = np.empty((-(-count // 4), 4), np.uint32)
    counter[:, 0] = np.arange(counter.shape[0])
    counter[:, 1:] = position, stream, purpose
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    return philox4x32(counter, key).reshape(-1)[:count]


def gumbel(count: int, position: int, stream: int, seed: int, purpose: int = PURPOSE_SAMPLE) -> np.ndarray:
    """Gumbel noise float32 [count]: -log(-log u) in float64, u = (word + 0.5) * 2**-32, rounded once."""
    u = (uniform_words(count, position, stream, purpose, seed).astype(np.float64) + 0.5) * 2.0**-32
    return (-log64(-log64(u))).astype(np.float32)


def choose(
    logits: np.ndarray, positions: np.ndarray, streams: np.ndarray, *, temperature: float = 0.0, seed: int = 0
) -> np.ndarray:
    """The token of each row of logits [M, V]: argmax, or at a temperature argmax of float32(logit / T) + gumbel.

    positions [M] are those of the drawn tokens, streams [M] the sequences' streams. float64 logits (golden
    ``--no-exact``) are chosen from in float64. Returns int32 [M].
    """
    if temperature == 0:
        return argmax(logits)
    dtype = logits.dtype.type
    noisy = np.empty_like(logits)
    for row, (position, stream) in enumerate(zip(positions, streams, strict=True)):
        noise = gumbel(logits.shape[-1], int(position), int(stream), seed)
        noisy[row] = logits[row] / dtype(np.float32(temperature)) + noise
    return argmax(noisy)

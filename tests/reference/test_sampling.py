"""Philox against its published answers, Gumbel noise against its distribution, draws against softmax (rule 15)."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kdtr_cli.reference import sampling
from kdtr_cli.reference.sampling import (
    PURPOSE_DRAFT,
    PURPOSE_PROMPT,
    PURPOSE_SAMPLE,
    choose,
    gumbel,
    philox4x32,
    uniform_words,
)

pytestmark = pytest.mark.quick

M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85


def scalar_philox(counter, key) -> list[int]:
    """Philox-4x32-10 in whole numbers, from the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = M0 * c[0], M1 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + W0) & 0xFFFFFFFF, (k[1] + W1) & 0xFFFFFFFF]
    return c


class TestPhilox:
    @pytest.mark.parametrize(
        ("counter", "key", "answer"),
        [
            ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
            ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
            ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
        ],
    )
    def test_known_answers_of_random123(self, counter, key, answer):
        words = [[int(w, 16) for w in text.split()] for text in (counter, key, answer)]
        assert philox4x32(np.array(words[0], np.uint32), tuple(words[1])).tolist() == words[2]
        assert scalar_philox(words[0], words[1]) == words[2]

    u32 = st.integers(0, 2**32 - 1)

    @given(st.lists(st.tuples(u32, u32, u32, u32), min_size=1, max_size=4), st.tuples(u32, u32))
    def test_any_counters(self, counters, key):
        got = philox4x32(np.array(counters, np.uint32), key)
        assert got.tolist() == [scalar_philox(c, key) for c in counters]

    @given(
        count=st.integers(1, 30),
        position=st.integers(0, 2**31 - 1),
        stream=st.integers(0, 2**31 - 1),
        purpose=st.integers(0, 2),
        seed=st.integers(0, 2**64 - 1),
    )
    def test_words_are_keyed_as_rule_15_says(self, count, position, stream, purpose, seed):
        key = (seed % 2**32, seed // 2**32)
        wanted = [scalar_philox((i // 4, position, stream, purpose), key)[i % 4] for i in range(count)]
        assert uniform_words(count, position, stream, purpose, seed).tolist() == wanted

    def test_purposes_and_both_halves_of_a_seed_count(self):
        assert (PURPOSE_SAMPLE, PURPOSE_PROMPT, PURPOSE_DRAFT) == (0, 1, 2)
        keys = [(5, 1, 0, 0), (6, 1, 0, 0), (5, 2, 0, 0), (5, 1, 1, 0), (5, 1, 2, 0), (5, 1, 0, 1), (5, 1, 0, 1 << 32)]
        assert len({uniform_words(8, *key).tobytes() for key in keys}) == len(keys)


class TestGumbel:
    def test_moments(self):
        g = gumbel(1_000_000, 3, 1, 7).astype(np.float64)
        # mean 0.5772 and variance pi**2 / 6, each within five standard errors
        assert abs(g.mean() - np.euler_gamma) < 5 * math.sqrt(math.pi**2 / 6 / g.size)
        assert abs(g.var() - math.pi**2 / 6) < 5 * math.sqrt(5.4 - 1) * math.pi**2 / 6 / math.sqrt(g.size)
        assert abs(stats.skew(g) - 1.13955) < 0.02

    def test_distribution(self):
        assert stats.kstest(gumbel(100_000, 0, 0, 1), stats.gumbel_r.cdf).pvalue > 1e-3
        # along positions, as a decode draws
        along = np.concatenate([gumbel(8, p, 0, 1) for p in range(2000)])
        assert stats.kstest(along, stats.gumbel_r.cdf).pvalue > 1e-3

    def test_is_the_formula_in_float64_rounded_once(self):
        words = uniform_words(4000, 9, 2, PURPOSE_SAMPLE, 5).tolist()
        real = np.array([-math.log(-math.log((w + 0.5) / 2**32)) for w in words])
        got = gumbel(4000, 9, 2, 5)
        assert got.dtype == np.float32
        assert (got == real.astype(np.float32)).mean() > 0.999
        np.testing.assert_allclose(got, real, rtol=2e-7, atol=1e-14)

    def test_the_extreme_words_give_finite_noise(self, monkeypatch):
        words = np.array([0, 1, 2**32 - 2, 2**32 - 1], np.uint32)
        monkeypatch.setattr(sampling, "uniform_words", lambda *_: words)
        g = gumbel(4, 0, 0, 0)
        assert np.isfinite(g).all()
        assert (np.diff(g) > 0).all()
        np.testing.assert_allclose(g[[0, 3]], [-math.log(33 * math.log(2)), 33 * math.log(2)], rtol=1e-6)

    def test_a_larger_vocabulary_begins_with_the_same_noise(self):
        assert gumbel(37, 4, 2, 9).tobytes() == gumbel(1000, 4, 2, 9)[:37].tobytes()

    def test_drafts_draw_other_noise(self):
        assert not np.isin(gumbel(64, 4, 2, 9), gumbel(64, 4, 2, 9, PURPOSE_DRAFT)).any()


LOGITS = np.array([0.0, 1.5, -0.7, 2.0, 2.0, -3.0, 0.4], np.float32)


class TestChoose:
    @pytest.mark.parametrize(("temperature", "along"), [(0.5, "positions"), (0.8, "streams"), (1.7, "positions")])
    def test_frequencies_are_softmax_of_logits_over_temperature(self, temperature, along):
        count = 4000
        moving, still = np.arange(count), np.full(count, 3)
        keys = (moving, still) if along == "positions" else (still, moving)
        drawn = choose(np.tile(LOGITS, (count, 1)), *keys, temperature=temperature, seed=11)
        p = np.exp(LOGITS.astype(np.float64) / temperature)
        wanted = p / p.sum() * count
        rare = wanted < 8
        seen = np.bincount(drawn, minlength=len(LOGITS)).astype(float)
        if rare.any():
            seen, wanted = (np.append(v[~rare], v[rare].sum()) for v in (seen, wanted))
        assert stats.chisquare(seen, wanted).pvalue > 1e-3

    def test_neighbouring_draws_are_independent(self):
        drawn = choose(np.zeros((4001, 3), np.float32), np.arange(4001), np.zeros(4001, int), temperature=1, seed=2)
        pairs = np.bincount(drawn[:-1] * 3 + drawn[1:], minlength=9)
        assert stats.chisquare(pairs).pvalue > 1e-3

    def test_temperature_zero_is_argmax_whatever_the_seed(self):
        rows = np.stack([LOGITS, LOGITS[::-1]])
        for seed in (0, 5):
            assert choose(rows, np.array([1, 2]), np.array([0, 0]), seed=seed).tolist() == [3, 2]

    @settings(deadline=None)
    @given(st.permutations(range(6)), st.integers(0, 2**64 - 1))
    def test_a_row_draws_the_same_in_any_company(self, order, seed):
        rng = np.random.default_rng(0)
        logits = rng.standard_normal((6, 300)).astype(np.float32)
        positions, streams = np.array([0, 0, 5, 5, 9, 1000]), np.array([0, 1, 0, 1, 7, 3])
        whole = choose(logits, positions, streams, temperature=0.8, seed=seed)
        order = np.array(order)
        assert choose(logits[order], positions[order], streams[order], temperature=0.8, seed=seed).tolist() == (
            whole[order].tolist()
        )
        one = choose(logits[2:3], positions[2:3], streams[2:3], temperature=0.8, seed=seed)
        assert one.tolist() == whole[2:3].tolist()

    def test_the_choice_is_float32_division_and_addition(self):
        logits = np.random.default_rng(1).standard_normal((1, 500)).astype(np.float32)
        drawn = choose(logits, np.array([7]), np.array([2]), temperature=0.3, seed=4)
        noisy = logits[0] / np.float32(0.3) + gumbel(500, 7, 2, 4)
        assert noisy.dtype == np.float32
        assert drawn.dtype == np.int32
        assert drawn.tolist() == [int(np.argmax(noisy))]

    def test_float64_logits_are_chosen_from_in_float64(self):
        # apart by less than float32 can tell: only float64 sees that the second is larger
        logits = np.array([[1.0, 1.0 + 1e-12]])
        assert choose(logits, np.array([0]), np.array([0])).tolist() == [1]
        assert choose(logits.astype(np.float32), np.array([0]), np.array([0])).tolist() == [0]
        noise = gumbel(2, 5, 0, 3).astype(np.float64)
        level = np.array([[0.0, (noise[0] - noise[1]) * float(np.float32(0.7)) + 1e-9]])
        assert choose(level, np.array([5]), np.array([0]), temperature=0.7, seed=3).tolist() == [1]
        assert choose(level - [[0, 2e-9]], np.array([5]), np.array([0]), temperature=0.7, seed=3).tolist() == [0]

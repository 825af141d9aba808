"""Each drafter against its definition, written a second time; the DFlash drafter against torch, and with mistakes."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from drafting_cases import FIXTURES, plain, prompts, text_prompt, trained_drafter, trained_model
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr_cli.ddtree.rounds import DraftSettings, statistics
from kdtr_cli.ddtree.tree import build_tree
from kdtr_cli.errors import InputError
from kdtr_cli.model.dflash import draft_rope_table
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.reference import rounds
from kdtr_cli.reference.arith import exp, log, log_softmax, order
from kdtr_cli.reference.drafters.dflash import DFlashDrafter
from kdtr_cli.reference.drafters.ngram import NgramDrafter, ngram_marginals
from kdtr_cli.reference.drafters.replay import ReplayDrafter
from kdtr_cli.reference.drafters.synthetic import SyntheticDrafter, synthetic_marginals
from kdtr_cli.reference.rounds import generate_rounds
from kdtr_cli.reference.sampling import philox4x32
from kdtr_cli.reference.transformer import Rows

f32 = np.float32


class TestNgram:
    def plain(self, history, horizon, k):
        """Rule 22, word by word."""
        start = len(history) - 1
        for n in (3, 2, 1):
            tail = history[start + 1 - n : start + 1] if start + 1 >= n else None
            places = [i for i in range(start - n + 1) if tail is not None and history[i : i + n] == tail]
            if places:
                break
        else:
            return [[] for _ in range(horizon)]
        latest = sorted(places)[-8:]
        out = []
        for d in range(1, horizon + 1):
            votes = Counter(history[i + n + d - 1] for i in latest if i + n + d - 1 <= start)
            total = sum(votes.values())
            best = sorted(votes, key=lambda t: (-votes[t], t))[:k]
            out.append([(t, float(log(f32(votes[t]) / f32(total)))) for t in best])
        return out

    @settings(deadline=None)
    @given(
        st.lists(st.integers(0, 1), max_size=60).flatmap(lambda x: st.just([*x, 2, *x[:20]]))
        | st.lists(st.integers(0, 3), min_size=1, max_size=60),
        st.integers(1, 6),
        st.integers(1, 5),
    )
    def test_is_the_rule(self, history, horizon, k):
        ids, logps, counts = ngram_marginals(np.array(history, np.int32), horizon, k)
        for d, want in enumerate(self.plain(history, horizon, k)):
            assert counts[d] == len(want)
            assert [(int(t), float(p)) for t, p in zip(ids[d], logps[d], strict=True)][: counts[d]] == want
        assert ids.shape == logps.shape == (horizon, k)

    def test_the_longest_context_wins_and_the_end_of_the_text_ends_a_draft(self):
        #          0  1  2  3  4  5  6  7  8  9
        history = [5, 6, 7, 1, 9, 7, 2, 5, 6, 7]
        ids, logps, counts = ngram_marginals(np.array(history, np.int32), 8, 4)
        assert counts.tolist() == [1] * 7 + [0]  # 5 6 7 stood once before: 1 9 7 2 5 6 7 followed, and then nothing
        assert ids[:7, 0].tolist() == [1, 9, 7, 2, 5, 6, 7]
        assert not logps.any()  # log 1

    def test_votes_are_counted(self):
        history = [1, 2, 1, 3, 1, 2, 1]
        ids, logps, counts = ngram_marginals(np.array([*history], np.int32), 2, 4)
        assert counts[0] == 1  # "1 2 1" was there, with 3 after it
        history = [1, 2, 9, 1, 3, 8, 1, 2, 7, 1]
        ids, logps, counts = ngram_marginals(np.array(history, np.int32), 1, 4)
        assert ids[0, :2].tolist() == [2, 3]
        assert logps[0, :2].tolist() == [log(f32(2) / f32(3)), log(f32(1) / f32(3))]

    def test_only_the_eight_latest_places_vote(self):
        for latest, want in ((8, [6]), (7, [6, 5])):
            history = [1, 2, 3, 5] * 4 + [1, 2, 3, 6] * latest + [1, 2, 3]
            ids, _, counts = ngram_marginals(np.array(history, np.int32), 1, 9)
            assert ids[0, : counts[0]].tolist() == want

    @pytest.mark.parametrize("history", [[4], [4, 5], [1, 2, 3]])
    def test_nothing_to_look_up(self, history):
        assert not ngram_marginals(np.array(history, np.int32), 3, 2)[2].any()

    def test_the_drafter_looks_at_committed_tokens_before_the_root(self):
        drafter = NgramDrafter(3)
        drafter.reset(0, Prompt("a", np.array([1, 2], np.int32), 0))
        drafter.extend(0, np.array([1, 2, 3], np.int32), None)
        drafter.extend(0, np.array([1, 9, 9], np.int32), None)
        for start, root in ((4, 2), (6, 3)):
            history = np.array([*[1, 2, 3, 1, 9, 9][:start], root], np.int32)
            for one, two in zip(drafter.marginals(0, start, root, 4), ngram_marginals(history, 3, 4), strict=True):
                assert one.tolist() == two.tolist()
        drafter.reset(0, Prompt("b", np.array([7], np.int32), 0))
        assert not drafter.marginals(0, 0, 7, 4)[2].any()


class TestSynthetic:
    def plain(self, text, first, start, stream, rate, seed, horizon, vocab, k):
        """Rule 23, word by word, in Python's integers and NumPy's scalars."""
        out = []
        for d in range(1, horizon + 1):
            p = start + d
            counter = np.array([0, p, stream, 2], np.uint32)
            w = [int(x) for x in philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))]
            t = text[p - first] if 0 <= p - first < len(text) else w[3] % vocab
            rank = 0 if (w[0] + 0.5) / 2**32 < rate else 1 + w[1] % k
            fillers = [(t + 1 + ((w[3] + j) % (vocab - 1))) % vocab for j in range(vocab - 1)]
            row = fillers[:k] if rank >= k else [*fillers[:rank], t, *fillers[rank:]][:k]
            q = f32(0.3) + f32(0.6) * f32((w[2] >> 8) / 2**24)
            lps = [log(q)] + [f32(log(f32(1) - q) - f32(f32(r) * f32(0.69314718))) for r in range(1, k)]
            out.append((row, [float(x) for x in lps[: len(row)]]))
        return out

    @settings(deadline=None)
    @given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(2, 40), st.integers(1, 40))
    def test_is_the_rule(self, seed, stream, vocab, k):
        k = min(k, vocab)
        text = np.arange(7, dtype=np.int32) % vocab
        for rate in (0.0, 0.5, 1.0):
            ids, logps, counts = synthetic_marginals(
                text, 5, 3, stream, rate=rate, seed=seed, horizon=9, vocab=vocab, k=k
            )
            want = self.plain(text.tolist(), 5, 3, stream, rate, seed, 9, vocab, k)
            for d, (row, lps) in enumerate(want):
                assert counts[d] == len(row)
                assert ids[d, : counts[d]].tolist() == row
                assert logps[d, : counts[d]].astype(float).tolist() == lps
                assert len(set(row)) == len(row)
                assert 0 <= min(row, default=0) <= max(row, default=0) < vocab
            assert np.isfinite(logps).all()

    @pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 1.0])
    def test_hits_as_often_as_asked(self, rate):
        text = np.random.default_rng(0).integers(0, 500, 4000).astype(np.int32)
        hits = np.mean(
            [
                synthetic_marginals(text, 0, p, 0, rate=rate, seed=7, horizon=1, vocab=500, k=4)[0][0, 0] == text[p + 1]
                for p in range(3999)
            ]
        )
        assert abs(hits - rate) < 4 * math.sqrt(0.25 / 3999)

    def test_a_chain_has_the_right_token_or_a_wrong_one(self):
        """K = 1: a miss leaves the right token out."""
        text = np.full(100, 3, np.int32)
        ids, _, counts = synthetic_marginals(text, 0, 0, 0, rate=0.5, seed=1, horizon=60, vocab=9, k=1)
        assert set(counts.tolist()) == {1}
        assert 0 < (ids == 3).sum() < 60

    def test_a_vocabulary_smaller_than_the_budget_never_repeats_an_id(self):
        found = set()
        for start in range(300):
            ids, _, counts = synthetic_marginals(
                np.zeros(0, np.int32), 0, start, 0, rate=0.2, seed=1, horizon=1, vocab=4, k=4
            )
            assert len(set(ids[0, : counts[0]].tolist())) == counts[0]
            found.add(int(counts[0]))
        assert found == {3, 4}

    def test_the_drafter_is_keyed_by_prompt_stream_and_seed(self):
        known = {"a": np.array([5, 6, 7, 8], np.int32)}
        drafter = SyntheticDrafter(1.0, 3, 3, 50, known)
        drafter.reset(1, Prompt("a", np.array([1, 2], np.int32), 9))
        assert drafter.marginals(1, 2, 5, 2)[0][:, 0].tolist() == [6, 7, 8]
        drafter.reset(1, Prompt("b", np.array([1, 2], np.int32), 9))
        unknown = drafter.marginals(1, 2, 5, 2)[0][:, 0].tolist()
        drafter.reset(1, Prompt("b", np.array([1, 2], np.int32), 10))
        assert drafter.marginals(1, 2, 5, 2)[0][:, 0].tolist() != unknown
        other = SyntheticDrafter(1.0, 4, 3, 50, known)
        other.reset(1, Prompt("b", np.array([1, 2], np.int32), 9))
        assert other.marginals(1, 2, 5, 2)[0][:, 0].tolist() != unknown


class TestReplay:
    def drafter(self):
        rng = np.random.default_rng(0)
        ids, logps = rng.integers(0, 9, (4, 3, 5)).astype(np.int32), rng.normal(size=(4, 3, 5)).astype(f32)
        counts = np.array([[5, 4, 0], [1, 2, 3], [5, 5, 5], [0, 0, 0]], np.int32)
        drafter = ReplayDrafter(3, {"a": (ids, logps, counts)})
        drafter.reset(0, Prompt("a", np.zeros(10, np.int32), 0))
        return drafter, ids, logps, counts

    @pytest.mark.parametrize("k", [1, 5, 8])
    def test_gives_what_is_stored_as_far_as_it_goes(self, k):
        drafter, ids, logps, counts = self.drafter()
        for t in range(4):
            got = drafter.marginals(0, 10 + t, 0, k)
            kept = min(k, 5)
            assert [part.shape for part in got] == [(3, k), (3, k), (3,)]
            assert got[0][:, :kept].tolist() == ids[t, :, :kept].tolist()
            assert got[1][:, :kept].tolist() == logps[t, :, :kept].tolist()
            assert got[2].tolist() == np.minimum(counts[t], k).tolist()

    @pytest.mark.parametrize("start", [9, 14, 1000])
    def test_nothing_is_stored_elsewhere(self, start):
        assert not self.drafter()[0].marginals(0, start, 0, 4)[2].any()


# ---------------------------------------------------------------------------------------------------- DFlash


LENGTH = 40


@cache
def context() -> tuple[np.ndarray, np.ndarray]:
    """(ids [41], features [41, taps * hidden]) of a piece of code, by the target's own observed layer outputs."""
    model = trained_model()
    ids = text_prompt(
        "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def read(self):\n"
    ).ids
    ids = np.resize(ids, LENGTH + 1)
    seen = {}
    rows = Rows(ids, np.zeros(len(ids), np.int32), np.arange(len(ids)))
    model.forward(rows, model.cache([len(ids)]), lambda name, value: seen.__setitem__(name, value))
    return ids, np.concatenate([seen[f"model.layers.{i}.hidden"] for i in (0, 1, 2)], -1)


def fed(length: int = LENGTH, horizon: int = 7, cuts=(), checkpoint=None) -> DFlashDrafter:
    ids, features = context()
    drafter = DFlashDrafter(checkpoint or trained_drafter(), trained_model(), horizon, 256)
    drafter.reset(0, Prompt("0", ids, 0))
    edges = [0, *cuts, length]
    for a, b in pairwise(edges):
        drafter.extend(0, ids[a:b], features[a:b])
    return drafter


def plain_dflash(config, weights, embedding, head, features, root, start, horizon):
    """The drafter a second time, in float64: logits [horizon, V]. Every position its own loop, rotations as complex."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    half = config.head_dim // 2
    yarn = config.rope_scaling
    frequency = config.rope_theta ** (-np.arange(half) / half)

    def pair(turns):
        return (
            config.head_dim
            * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(config.rope_theta))
        )

    low, high = math.floor(pair(yarn.beta_fast)), math.ceil(pair(yarn.beta_slow))
    ramp = np.clip((np.arange(half) - low) / (high - low), 0, 1)
    frequency = frequency / yarn.factor * ramp + frequency * (1 - ramp)

    def norm(x, name):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + config.rms_norm_eps) * w[f"{name}.weight"]

    def turned(x, name, position):
        x = norm(x, name)
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * position * frequency)
        return np.concatenate([z.real, z.imag], -1)

    ctx = norm(features[:start].astype(np.float64) @ w["fc.weight"].T, "hidden_norm")
    h = np.stack([embedding[root], *[embedding[config.mask_token_id]] * horizon]).astype(np.float64)
    group = config.num_attention_heads // config.num_key_value_heads
    for i in range(config.num_hidden_layers):
        a = f"layers.{i}.self_attn"
        x = norm(h, f"layers.{i}.input_layernorm")
        source = np.concatenate([ctx, x])
        keys = (source @ w[f"{a}.k_proj.weight"].T).reshape(len(source), -1, config.head_dim)
        keys = np.stack([turned(k, f"{a}.k_norm", p) for p, k in enumerate(keys)])
        values = (source @ w[f"{a}.v_proj.weight"].T).reshape(len(source), -1, config.head_dim)
        query = (x @ w[f"{a}.q_proj.weight"].T).reshape(len(x), -1, config.head_dim)
        out = np.empty_like(query)
        for row, q in enumerate(query):
            q = turned(q, f"{a}.q_norm", start + row)
            for head_index in range(config.num_attention_heads):
                score = keys[:, head_index // group] @ q[head_index] / math.sqrt(config.head_dim)
                p = np.exp(score - score.max())
                out[row, head_index] = (p / p.sum()) @ values[:, head_index // group]
        h = h + out.reshape(len(x), -1) @ w[f"{a}.o_proj.weight"].T
        x = norm(h, f"layers.{i}.post_attention_layernorm")
        gate, up = (x @ w[f"layers.{i}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        h = h + (gate / (1 + np.exp(-gate)) * up) @ w[f"layers.{i}.mlp.down_proj.weight"].T
    return norm(h, "norm")[1:] @ np.asarray(head, np.float64).T


class TestDFlash:
    def test_weights_that_overflow_come_to_the_tree_s_check(self):
        checkpoint = trained_drafter()
        name = "layers.0.self_attn.k_proj.weight"
        huge = {**checkpoint.weights, name: np.full_like(checkpoint.weights[name], 3e38)}
        # no warning on the way, which would be an error here
        marginals = fed(checkpoint=replace(checkpoint, weights=huge)).marginals(0, LENGTH, 1, 8)
        assert np.isnan(marginals[1]).all()
        with pytest.raises(InputError, match="nan"):
            build_tree(1, *marginals, 8, 1000)

    @pytest.mark.parametrize(("start", "horizon"), [(LENGTH, 7), (1, 7), (0, 7), (17, 3), (LENGTH, 1)])
    def test_is_the_network(self, start, horizon):
        model, checkpoint = trained_model(), trained_drafter()
        ids, features = context()
        got = fed(horizon=horizon).logits(0, start, int(ids[start]))
        table = model.weights["model.embed_tokens.weight"]
        want = plain_dflash(
            checkpoint.config,
            checkpoint.weights,
            table,
            model.weights["lm_head.weight"],
            features,
            int(ids[start]),
            start,
            horizon,
        )
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)

    def test_across_a_chunk_of_256_positions(self):
        checkpoint, model = trained_drafter(), trained_model(300)
        rng = np.random.default_rng(1)
        features = (rng.normal(size=(260, 576)) * 0.5).astype(f32)
        drafter = DFlashDrafter(checkpoint, model, 7, 300)
        drafter.reset(0, Prompt("0", np.zeros(1, np.int32), 0))
        drafter.extend(0, np.zeros(260, np.int32), features)
        table = model.weights["model.embed_tokens.weight"]
        head = model.weights["lm_head.weight"]
        for start in (249, 252, 256, 260):
            want = plain_dflash(checkpoint.config, checkpoint.weights, table, head, features, 9, start, 7)
            np.testing.assert_allclose(drafter.logits(0, start, 9), want, rtol=0, atol=1e-4)

    def test_bits_do_not_depend_on_how_the_context_came(self):
        ids, _ = context()
        whole = fed().logits(0, LENGTH, int(ids[-1]))
        assert fed(cuts=(1, 2, 30)).logits(0, LENGTH, int(ids[-1])).tobytes() == whole.tobytes()
        short = fed(20).logits(0, 20, int(ids[20]))
        assert fed().logits(0, 20, int(ids[20])).tobytes() == short.tobytes()

    def test_slots_do_not_mix(self):
        ids, features = context()
        alone = fed().logits(0, LENGTH, 5)
        drafter = fed()
        drafter.reset(3, Prompt("1", ids, 1))
        drafter.extend(3, ids[:9], features[9:18])
        assert drafter.logits(0, LENGTH, 5).tobytes() == alone.tobytes()
        assert drafter.logits(3, 9, 5).tobytes() != fed(9).logits(0, 9, 5).tobytes()
        drafter.reset(3, Prompt("1", ids, 1))
        drafter.extend(3, ids[:9], features[:9])
        assert drafter.logits(3, 9, 5).tobytes() == fed(9).logits(0, 9, 5).tobytes()

    def test_marginals_are_the_first_ids_and_their_log_probabilities(self):
        drafter = fed()
        logits = drafter.logits(0, LENGTH, 5)
        ids, logps, counts = drafter.marginals(0, LENGTH, 5, 12)
        assert ids.tolist() == order(logits, 12).tolist()
        assert logps.tobytes() == np.take_along_axis(log_softmax(logits), ids, -1).tobytes()
        assert counts.tolist() == [12] * 7
        full = drafter.marginals(0, LENGTH, 5, 5000)
        assert full[0].shape == (7, 1024)
        np.testing.assert_allclose(exp(full[1]).sum(-1), 1, rtol=1e-4)

    def test_the_root_stands_in_the_block(self):
        """With MASK in its place a block does not know what it continues."""
        drafter = fed()
        assert not np.array_equal(drafter.logits(0, LENGTH, 5), drafter.logits(0, LENGTH, 6))

    def test_tables_are_those_of_the_rule(self):
        """float64 angles with YaRN's blend over the whole head, amplitude 1, one rounding."""
        config = trained_drafter().config
        cos, sin = draft_rope_table(config, 2048)
        half = np.arange(24)
        plain_frequency = 50000.0 ** (-half / 24)
        low, high = (math.floor(48 * math.log(512 / (32 * 2 * math.pi)) / (2 * math.log(50000))), None)
        high = math.ceil(48 * math.log(512 / (2 * math.pi)) / (2 * math.log(50000)))
        ramp = np.clip((half - low) / (high - low), 0, 1)
        angle = np.arange(2048)[:, None] * (plain_frequency / 4 * ramp + plain_frequency * (1 - ramp))
        np.testing.assert_allclose(cos, np.cos(angle), rtol=0, atol=1e-7)
        np.testing.assert_allclose(sin, np.sin(angle), rtol=0, atol=1e-7)


@pytest.mark.hf
@pytest.mark.parametrize("start", [3, LENGTH])
def test_dflash_against_torch(start):
    """The published network in torch's own operations, float32."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file
    from torch.nn import functional as F

    config, model = trained_drafter().config, trained_model()
    ids, features = context()
    w = {name: t.float() for name, t in load_file(FIXTURES / "tiny-kimi-dflash" / "model.safetensors").items()}
    cos, sin = (torch.from_numpy(t.copy()) for t in draft_rope_table(config, 64))

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], config.rms_norm_eps)

    def heads(x, name, positions):
        x = norm(x.view(len(x), -1, config.head_dim), name)
        a, b = x.chunk(2, -1)
        c, s = cos[positions][:, None], sin[positions][:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    with torch.no_grad():
        ctx = norm(torch.from_numpy(features[:start].copy()) @ w["fc.weight"].T, "hidden_norm")
        table = torch.from_numpy(model.weights["model.embed_tokens.weight"].copy())
        h = table[[int(ids[start]), *[config.mask_token_id] * 7]]
        for i in range(config.num_hidden_layers):
            a = f"layers.{i}.self_attn"
            x = norm(h, f"layers.{i}.input_layernorm")
            source = torch.cat([ctx, x])
            at = torch.arange(start + 8)
            query = heads(x @ w[f"{a}.q_proj.weight"].T, f"{a}.q_norm", at[start:])
            keys = heads(source @ w[f"{a}.k_proj.weight"].T, f"{a}.k_norm", at)
            values = (source @ w[f"{a}.v_proj.weight"].T).view(len(source), -1, config.head_dim)
            group = config.num_attention_heads // config.num_key_value_heads
            out = F.scaled_dot_product_attention(
                query.transpose(0, 1),
                keys.repeat_interleave(group, 1).transpose(0, 1),
                values.repeat_interleave(group, 1).transpose(0, 1),
            )
            h = h + out.transpose(0, 1).reshape(8, -1) @ w[f"{a}.o_proj.weight"].T
            x = norm(h, f"layers.{i}.post_attention_layernorm")
            mlp = f"layers.{i}.mlp"
            gate, up = x @ w[f"{mlp}.gate_proj.weight"].T, x @ w[f"{mlp}.up_proj.weight"].T
            h = h + (F.silu(gate) * up) @ w[f"{mlp}.down_proj.weight"].T
        want = norm(h, "norm")[1:] @ torch.from_numpy(model.weights["lm_head.weight"].copy()).T
    np.testing.assert_allclose(fed().logits(0, start, int(ids[start])), want.numpy(), rtol=0, atol=1e-4)


# ------------------------------------------------------------------------------- what the trained pair accepts


SETTINGS = DraftSettings("ddtree", "dflash", 8, 8)
TEXTS = ("def read(path):\n    ", "class Foo")


def asked() -> list[Prompt]:
    return [text_prompt(text, str(i), i) for i, text in enumerate(TEXTS)]


def decode(drafter=None, settings=SETTINGS, steps=40):
    model = trained_model()
    drafter = drafter or DFlashDrafter(trained_drafter(), model, settings.horizon, 256)
    drafted = generate_rounds(model, asked(), Decoding(steps, model.config.eos_token_ids), drafter, settings)
    return drafted, statistics([one for each in drafted for one in each.rounds], 2)["tau"]


@cache
def right() -> tuple[list, float]:
    return decode()


LONGER = (
    "class Reader:\n    def __init__(self, path):\n        self.path = path\n",
    "import os\n\ndef main(",
    "    for key, value in ",
)


@cache
def observed() -> list[tuple[Prompt, np.ndarray, dict[str, np.ndarray]]]:
    """For each text: the prompt, prompt and greedy continuation, the layer outputs along it."""
    model, out = trained_model(), []
    for text in LONGER:
        prompt, seen = text_prompt(text), {}
        [result], _ = plain(model, [prompt], Decoding(40, model.config.eos_token_ids))
        ids = np.concatenate([prompt.ids, result.tokens])
        rows = Rows(ids, np.zeros(len(ids), np.int32), np.arange(len(ids)))
        model.forward(rows, model.cache([len(ids)]), seen.__setitem__)
        out.append((prompt, ids, seen))
    return out


@cache
def hit_log_probability(taps: tuple[int, ...]) -> float:
    """Mean log-probability that the drafter gives to what the target goes on to say, from every third position."""
    checkpoint = replace(trained_drafter(), config=replace(trained_drafter().config, target_layer_ids=taps))
    means = []
    for prompt, ids, seen in observed():
        drafter, found = DFlashDrafter(checkpoint, trained_model(), 7, 256), []
        drafter.reset(0, prompt)
        drafter.extend(0, ids, np.concatenate([seen[f"model.layers.{i}.hidden"] for i in taps], -1))
        for start in range(6, len(ids) - 7, 3):
            logps = log_softmax(drafter.logits(0, start, int(ids[start])))
            found += [logps[d, ids[start + 1 + d]] for d in range(7)]
        means.append(np.mean(found))
    return float(np.mean(means))


class TestTrainedPair:
    def test_accepts_more_than_a_token_and_gathers_scattered_rows(self):
        drafted, tau = right()
        assert tau > 2.5
        every = [one for each in drafted for one in each.rounds]
        assert sum((np.diff(one.accepted) > 1).any() for one in every) > len(every) / 4

    def test_output_is_that_of_plain_decoding(self):
        model = trained_model()
        results, digests = plain(model, asked(), Decoding(40, model.config.eos_token_ids))
        for result, digest, one in zip(results, digests, right()[0], strict=True):
            assert result.logits.tobytes() == one.generated.logits.tobytes()
            assert one.final_cache_digest == digest

    def test_a_tree_accepts_more_than_the_chain_of_the_same_drafter(self):
        _, chain = decode(settings=DraftSettings("chain", "dflash", 7, 8))
        _, wide = decode(settings=DraftSettings("ddtree", "dflash", 32, 8))
        assert chain < right()[1] < wide

    def test_features_of_the_first_rows_instead_of_the_accepted_lower_acceptance(self, monkeypatch):
        """The output stays right, so nothing but the acceptance shows it."""
        monkeypatch.setattr(rounds, "_committed", lambda features, accepted: features[: len(accepted)])
        drafted, tau = decode()
        for one, two in zip(drafted, right()[0], strict=True):
            assert one.generated.tokens.tolist() == two.generated.tokens.tolist()
        assert tau < right()[1] - 0.3

    def test_a_masked_root_lowers_acceptance(self):
        class Masked(DFlashDrafter):
            def logits(self, slot, start, root):
                return super().logits(slot, start, self.config.mask_token_id)

        _, tau = decode(Masked(trained_drafter(), trained_model(), 7, 256))
        assert tau < right()[1] / 1.5

    def test_taps_off_by_one_change_the_rounds(self):
        config = replace(trained_drafter().config, target_layer_ids=(1, 2, 3))
        checkpoint = replace(trained_drafter(), config=config)
        drafted, tau = decode(DFlashDrafter(checkpoint, trained_model(), 7, 256))
        assert tau != right()[1]
        assert [one.generated.tokens.tolist() for one in drafted] == [
            one.generated.tokens.tolist() for one in right()[0]
        ]

    @pytest.mark.parametrize("taps", [(1, 2, 3), (1, 1, 2), (0, 2, 2), (0, 0, 2), (0, 1, 3), (0, 1, 1), (2, 1, 0)])
    def test_each_tap_is_the_output_of_its_layer(self, taps):
        """One tap off by one layer: the drafter is less sure of what comes. (Acceptance alone hardly shows it.)"""
        assert hit_log_probability(taps) < hit_log_probability((0, 1, 2)) - 0.02

    @pytest.mark.parametrize("horizon", [1, 3])
    def test_a_shorter_block(self, horizon):
        settings = DraftSettings("ddtree", "dflash", 12, horizon + 1)
        drafted, _ = decode(settings=settings, steps=12)
        assert max(max(one.tree.depths) for each in drafted for one in each.rounds) == horizon
        model = trained_model()
        results, _ = plain(model, asked(), Decoding(12, model.config.eos_token_ids))
        assert [o.generated.tokens.tolist() for o in drafted] == [r.tokens.tolist() for r in results]


def test_features_come_with_the_tokens_that_they_belong_to():
    """Prompt and rounds alike: as many rows of features as tokens, all taps wide."""
    model = trained_model()
    drafter = DFlashDrafter(trained_drafter(), model, 7, 256)
    sizes = []
    extend = drafter.extend
    drafter.extend = lambda slot, tokens, features: (
        sizes.append((len(tokens), features.shape)),
        extend(slot, tokens, features),
    )
    generate_rounds(model, prompts(5, vocab=1024), Decoding(6), drafter, SETTINGS)
    assert sizes[0] == (5, (5, 576))
    assert all(shape == (count, 576) for count, shape in sizes)

"""The NumPy model: against a plain decoder written here, and against itself in every way of feeding the same tokens."""

from dataclasses import replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from kdtr_cli.errors import InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import ModelConfig, parse_config
from kdtr_cli.model.presets import PRESETS, new_weights
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.rope import rope_table64
from kdtr_cli.model.weights import Weights
from kdtr_cli.reference import attention, exact, float64
from kdtr_cli.reference.arith import argmax, exp, sum128
from kdtr_cli.reference.generate import generate, score
from kdtr_cli.reference.sampling import choose
from kdtr_cli.reference.transformer import Model, Rows, route
from kdtr_cli.workflows.prompts import random_prompt

pytestmark = pytest.mark.quick

#: Beside the presets: what none of them has.
CONFIGS = {
    **PRESETS,
    "v2-groups": {**PRESETS["tiny-v2"], "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "all-dense-no-yarn": {**PRESETS["tiny"], "n_routed_experts": 0, "n_shared_experts": 0, "rope_scaling": None},
    "no-shared-expert": {**PRESETS["odd"], "n_shared_experts": 0, "rope_interleave": False},
}


def make_config(name: str, layers: int | None = None) -> ModelConfig:
    config = parse_config(CONFIGS[name])
    return replace(config, num_hidden_layers=layers) if layers else config


def make_model(config: ModelConfig, ops, positions: int = 64, choices: Choices | None = None, seed: int = 0) -> Model:
    weights = Weights.from_arrays(new_weights(config, seed), config)
    return Model(config, weights, choices or Choices(), positions, ops)


def random_ids(vocab: int, length: int, stream: int = 0) -> np.ndarray:
    return random_prompt(stream, length, vocab, 0)


def feed(model: Model, cache, ids, first: int = 0, slot: int = 0) -> np.ndarray:
    """Feed ids at first, first + 1, ...: their logits [len, vocab]."""
    n = len(ids)
    rows = Rows(np.asarray(ids, np.int32), np.full(n, slot, np.int32), np.arange(first, first + n, dtype=np.int32))
    return model.logits(model.forward(rows, cache))


def whole(model: Model, ids) -> np.ndarray:
    return feed(model, model.cache([len(ids)]), ids)


def in_parts(model: Model, ids, cuts) -> np.ndarray:
    cache = model.cache([len(ids)])
    edges = [0, *cuts, len(ids)]
    return np.concatenate([feed(model, cache, ids[a:b], a) for a, b in pairwise(edges)])


# ---------------------------------------------------------------------------------------- a plain decoder in float64


def plain_norm(x, w, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * w


def plain_rope(x, angle_cos, angle_sin, interleaved):
    """Complex multiplication of the pairs; the layout of the result does not matter to a dot of two of them."""
    half = x.shape[-1] // 2
    z = x[..., 0::2] + 1j * x[..., 1::2] if interleaved else x[..., :half] + 1j * x[..., half:]
    z = z * (angle_cos + 1j * angle_sin)
    return np.concatenate([z.real, z.imag], -1)


def plain_mlp(x, w, name):
    gate, up = x @ w(f"{name}.gate_proj.weight").T, x @ w(f"{name}.up_proj.weight").T
    return (gate / (1 + np.exp(-gate)) * up) @ w(f"{name}.down_proj.weight").T


def plain_moe(c, x, w, name):
    logits = x @ w(f"{name}.gate.weight").T
    out = np.zeros_like(x)
    for row, z in enumerate(logits):
        sigmoid = c.scoring_func == "sigmoid"
        s = 1 / (1 + np.exp(-z)) if sigmoid else np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        bias = f"{name}.gate.e_score_correction_bias"
        choice = s + w(bias) if c.topk_method == "noaux_tc" else s.copy()
        if c.n_group > 1 and c.topk_method != "greedy":
            groups = choice.reshape(c.n_group, -1)
            best = np.sort(groups, -1)[:, -2:].sum(-1) if c.topk_method == "noaux_tc" else groups.max(-1)
            lost = np.argsort(-best, kind="stable")[c.topk_group :]
            groups[lost] = -np.inf if c.topk_method == "noaux_tc" else 0
        chosen = np.argsort(-choice, kind="stable")[: c.num_experts_per_tok]
        weight = s[chosen]
        if c.norm_topk_prob and not c.is_v2:
            weight = weight / (weight.sum() + 1e-20)
        for e, g in zip(chosen, weight * c.routed_scaling_factor, strict=True):
            out[row] += g * plain_mlp(x[row], w, f"{name}.experts.{e}")
    return out + plain_mlp(x, w, f"{name}.shared_experts") if c.n_shared_experts else out


def plain_attention(c, x, w, name, cos, sin, latent_eps):
    """The naive form: keys and values of every head are expanded out of the latent by kv_b_proj."""
    n, heads = len(x), c.num_attention_heads

    def product(v, tensor):
        y = v @ w(f"{name}.{tensor}.weight").T
        return y + w(f"{name}.{tensor}.bias") if c.attention_bias and tensor not in ("q_proj", "q_b_proj") else y

    if c.q_lora_rank is None:
        q = product(x, "q_proj")
    else:
        q = product(plain_norm(product(x, "q_a_proj"), w(f"{name}.q_a_layernorm.weight"), latent_eps), "q_b_proj")
    q = q.reshape(n, heads, c.qk_nope_head_dim + c.qk_rope_head_dim)
    compressed = product(x, "kv_a_proj_with_mqa")
    latent = plain_norm(compressed[:, : c.kv_lora_rank], w(f"{name}.kv_a_layernorm.weight"), latent_eps)
    k_rope = plain_rope(compressed[:, c.kv_lora_rank :], cos, sin, c.rope_interleave)
    kv = (latent @ w(f"{name}.kv_b_proj.weight").T).reshape(n, heads, c.qk_nope_head_dim + c.v_head_dim)
    q_rope = plain_rope(q[..., c.qk_nope_head_dim :], cos[:, None], sin[:, None], c.rope_interleave)
    out = np.empty((n, heads, c.v_head_dim))
    for h in range(heads):
        query = np.concatenate([q[:, h, : c.qk_nope_head_dim], q_rope[:, h]], -1)
        key = np.concatenate([kv[:, h, : c.qk_nope_head_dim], k_rope], -1)
        s = query @ key.T * c.softmax_scale() + np.triu(np.full((n, n), -np.inf), 1)
        p = np.exp(s - s.max(-1, keepdims=True))
        out[:, h] = p / p.sum(-1, keepdims=True) @ kv[:, h, c.qk_nope_head_dim :]
    return product(out.reshape(n, -1), "o_proj")


def plain_decoder(c: ModelConfig, weights: Weights, ids: np.ndarray, latent_eps: float = 1e-6) -> np.ndarray:
    def w(name):
        return weights[name].astype(np.float64)

    cos, sin = rope_table64(c, len(ids))
    h = w("model.embed_tokens.weight")[ids]
    for i in range(c.num_hidden_layers):
        name = f"model.layers.{i}"
        x = plain_norm(h, w(f"{name}.input_layernorm.weight"), c.rms_norm_eps)
        h = h + plain_attention(c, x, w, f"{name}.self_attn", cos, sin, latent_eps)
        x = plain_norm(h, w(f"{name}.post_attention_layernorm.weight"), c.rms_norm_eps)
        h = h + (plain_moe(c, x, w, f"{name}.mlp") if c.is_moe_layer(i) else plain_mlp(x, w, f"{name}.mlp"))
    return plain_norm(h, w("model.norm.weight"), c.rms_norm_eps) @ w("lm_head.weight").T


# ------------------------------------------------------------------------------- rules 9, 10 and 13, step by step


def one_by_one_attention(query, keys, visible, scale, latent):
    """Rule 10 for one head of one row: query [D], keys [S, D] -> [latent], one rounded operation at a time."""
    f32 = np.float32
    scores = [sum128(query * keys[i]) * f32(scale) for i in range(visible)]
    p = [exp(s - max(scores)) for s in scores]
    total, vector = f32(0), np.zeros(latent, f32)
    for start in range(0, visible, 256):
        inside = range(start, min(start + 256, visible))
        chunk = np.zeros(latent, f32)
        for i in inside:
            chunk = chunk + p[i] * keys[i, :latent]
        total = total + sum128(np.array([p[i] for i in inside], f32))
        vector = vector + chunk
    return vector / total


class TestRules:
    @pytest.mark.parametrize("visible", [(1, 2, 3), (255, 256, 257), (511, 512, 513), (600, 30, 769)])
    def test_attention_is_rule_10(self, visible):
        rng = np.random.default_rng(visible[0])
        heads, latent, width, size = 2, 5, 7, max(visible) + 3
        query = rng.standard_normal((3, heads, width)).astype(np.float32)
        keys = rng.standard_normal((size, width)).astype(np.float32)
        out = exact.attend(query, keys, np.array(visible), 0.37, latent)
        for m, seen in enumerate(visible):
            for h in range(heads):
                assert out[m, h].tobytes() == one_by_one_attention(query[m, h], keys, seen, 0.37, latent).tobytes()

    def test_many_rows_are_cut_into_tiles_that_show_nowhere(self, monkeypatch):
        rng = np.random.default_rng(0)
        query = rng.standard_normal((10, 3, 20)).astype(np.float32)
        keys = rng.standard_normal((300, 20)).astype(np.float32)
        visible = rng.integers(1, 301, 10)
        out = exact.attend(query, keys, visible, 0.1, 16)
        for tile_bytes in (1, 50_000, 100_000):
            monkeypatch.setattr(attention, "_ROWS_BYTES", tile_bytes)
            assert exact.attend(query, keys, visible, 0.1, 16).tobytes() == out.tobytes()

    @pytest.mark.parametrize("interleaved", [True, False])
    def test_rotary_is_rule_9(self, interleaved):
        rng = np.random.default_rng(1)
        x, angle = rng.standard_normal((3, 10)).astype(np.float32), rng.standard_normal((3, 5))
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        out = exact.rotate(x, cos, sin, interleaved)
        for r in range(3):
            for i in range(5):
                a, b = x[r, [2 * i, 2 * i + 1] if interleaved else [i, i + 5]]
                c, s = cos[r, i], sin[r, i]
                assert out[r, i] == a * c - b * s
                assert out[r, i + 5] == b * c + a * s

    def test_routing_is_rule_13(self):
        logits = np.array([[0, 1, 2, 3, 2, -1], [1, 1, 1, 1, 1, 1]], np.float32)
        bias = np.array([0, 0, -2, 0, 0.25, 0], np.float32)
        v3 = {"slots": 3, "groups": 1, "kept_groups": 1, "softmax": False, "best_two": True, "factor": 2.5}
        ids, weights = route(exact, logits, bias, normalise=True, **v3)
        s = exact.sigmoid(logits)
        # the bias keeps expert 2 out of the choice, and out of ties; it is in no weight
        assert ids.tolist() == [[4, 3, 1], [4, 0, 1]]
        chosen = np.take_along_axis(s, ids, -1)
        total = (chosen[:, 0] + chosen[:, 1]) + chosen[:, 2] + np.float32(1e-20)
        assert weights.tolist() == (chosen / total[:, None] * np.float32(2.5)).tolist()
        _, plain = route(exact, logits, bias, normalise=False, **v3)
        assert plain.tolist() == (chosen * np.float32(2.5)).tolist()

    def test_groups_are_rule_13(self):
        # group 0 holds the best expert, group 1 the best pair
        logits = np.array([[5, -9, -9, 2, 2, -9]], np.float32)
        shape = {"slots": 4, "groups": 2, "kept_groups": 1, "softmax": False, "normalise": False, "factor": 1.0}
        bias = np.full(6, -1, np.float32)
        assert route(exact, logits, bias, best_two=True, **shape)[0].tolist() == [[3, 4, 5, 0]]
        # all choices are negative: V2's 0 for the others stands before them
        assert route(exact, logits, bias, best_two=False, **shape)[0].tolist() == [[3, 4, 5, 0]]
        assert route(exact, logits, None, best_two=False, **shape)[0][0, 0] == 0


class TestAgainstFloat64:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_the_absorbed_form_equals_the_naive_one(self, name):
        config = make_config(name)
        model = make_model(config, float64)
        ids = random_ids(config.vocab_size, 23)
        real = plain_decoder(config, model.weights, ids)
        np.testing.assert_allclose(whole(model, ids), real, atol=1e-11, rtol=0)

    def test_the_choice_of_the_latent_eps_counts(self):
        config = make_config("tiny", 2)
        ids = random_ids(512, 9)
        hf, own = (whole(make_model(config, float64, choices=Choices(c)), ids) for c in ("hf", "config"))
        model = make_model(config, float64)
        np.testing.assert_allclose(own, plain_decoder(config, model.weights, ids, config.rms_norm_eps), atol=1e-11)
        assert np.abs(hf - own).max() > 1e-7

    def test_float32_angles_are_another_table(self):
        config = make_config("tiny", 1)
        ids = random_ids(512, 40)
        a, b = (whole(make_model(config, exact, choices=Choices(rope_angles=r)), ids) for r in ("f64", "f32"))
        assert 0 < np.abs(a - b).max() < 1e-3

    def test_exact_is_within_1e_5_of_float64_on_tiny(self):
        config = make_config("tiny")
        weights = Weights.from_arrays(new_weights(config, 0), config)
        near, real = (Model(config, weights, Choices(), 64, ops) for ops in (exact, float64))
        prompts = [Prompt(str(i), random_ids(512, 16, i), i) for i in range(8)]
        apart = []
        for prompt, result in zip(prompts, generate(near, prompts, Decoding(24)), strict=True):
            along = score(real, prompt, result.tokens)[15:]
            apart.append(np.abs(result.logits - along).max())
            assert np.abs(along).max() > 1  # nothing to agree on otherwise
        assert max(apart) < 1e-5
        assert max(apart) > 1e-8  # two arithmetics were compared


class TestRowsAreThemselves:
    """Bits of a row depend on its own sequence alone, however it is fed."""

    @pytest.mark.parametrize("name", CONFIGS)
    def test_prefill_chunks_and_decode_are_the_same(self, name):
        config = make_config(name)
        model = make_model(config, exact)
        ids = random_ids(config.vocab_size, 21)
        once = whole(model, ids)
        assert once.dtype == np.float32
        assert in_parts(model, ids, range(1, 21)).tobytes() == once.tobytes()
        assert in_parts(model, ids, [1, 9, 16]).tobytes() == once.tobytes()
        assert whole(model, ids[:13]).tobytes() == once[:13].tobytes()

    def test_across_the_border_of_an_attention_chunk(self):
        config = make_config("tiny", 2)
        model = make_model(config, exact, 520)
        ids = random_ids(512, 515)
        once = whole(model, ids)
        for cuts in ([250, *range(254, 260)], [255], [256], [257], [64, 128, 192, 256, 320, 511, 512, 513]):
            assert in_parts(model, ids, cuts).tobytes() == once.tobytes()
        real = plain_decoder(config, model.weights, ids[:260])
        np.testing.assert_allclose(once[:260], real, atol=1e-5)

    def test_a_cache_row_is_the_same_however_it_was_fed(self):
        config = make_config("odd")
        model = make_model(config, exact)
        ids = random_ids(257, 12)
        a, b = model.cache([12]), model.cache([20])
        feed(model, a, ids)
        for i, token in enumerate(ids):
            feed(model, b, [token], i)
        for x, y in zip(a.rows, b.rows, strict=True):
            assert x[0].tobytes() == y[0][:12].tobytes()
            assert np.isnan(y[0][12:]).all()

    def test_rows_of_several_sequences_in_one_pass(self):
        config = make_config("tiny-groups")
        model = make_model(config, exact)
        sequences = [random_ids(512, n, n) for n in (3, 17, 1, 9)]
        cache = model.cache([20] * 4)
        slots = np.repeat([2, 0, 3, 1], [len(s) for s in sequences]).astype(np.int32)
        positions = np.concatenate([np.arange(len(s)) for s in sequences]).astype(np.int32)
        logits = model.logits(model.forward(Rows(np.concatenate(sequences), slots, positions), cache))
        first = 0
        for ids in sequences:
            assert logits[first : first + len(ids)].tobytes() == whole(model, ids).tobytes()
            first += len(ids)

    def test_a_neighbour_that_is_not_finite_does_not_spread(self):
        config = make_config("tiny", 2)
        model = make_model(config, exact)
        ids = random_ids(512, 6)
        cache = model.cache([8, 8])
        feed(model, cache, ids, slot=0)
        for layer in cache.rows:
            layer[1][:] = np.nan
        rows = Rows(np.array([5, 5], np.int32), np.array([0, 1], np.int32), np.array([6, 6], np.int32))
        logits = model.logits(model.forward(rows, cache))
        assert np.isnan(logits[1]).all()
        assert logits[0].tobytes() == whole(model, [*ids, 5])[6].tobytes()

    def test_the_observer_sees_every_tensor_rows_first(self):
        config = make_config("tiny", 2)
        model = make_model(config, exact)
        seen = {}
        rows = Rows(random_ids(512, 3), np.zeros(3, np.int32), np.arange(3, dtype=np.int32))
        hidden = model.forward(rows, model.cache([3]), lambda name, value: seen.update({name: value.shape}))
        assert all(shape[0] == 3 for shape in seen.values())
        assert hidden.shape == (3, 128)
        for name in (
            "embed",
            "model.layers.0.self_attn.q_latent",
            "model.layers.0.hidden",
            "model.layers.1.mlp.moe_out",
        ):
            assert name in seen
        assert list(seen)[-1] == "final_norm"


@pytest.fixture(scope="module")
def model():
    """`tiny` with a dense layer and a MoE layer."""
    return make_model(make_config("tiny", 2), exact, 320)


class TestGenerate:
    def prompts(self, *lengths):
        return [Prompt(f"p{i}", random_ids(512, n, i), i) for i, n in enumerate(lengths)]

    def test_alone_and_among_others(self, model):
        prompts = self.prompts(5, 1, 19, 8)
        together = generate(model, prompts, Decoding(7))
        for prompt, result in zip(prompts, together, strict=True):
            alone = generate(model, [prompt], Decoding(7))[0]
            assert alone.tokens.tolist() == result.tokens.tolist()
            assert alone.logits.tobytes() == result.logits.tobytes()
            assert result.finish_reason == "length"
            assert result.prompt_logits is None

    def test_is_greedy_and_the_same_each_time(self, model):
        prompt = self.prompts(6)
        a, b = (generate(model, prompt, Decoding(9))[0] for _ in range(2))
        assert a.tokens.dtype == np.int32
        assert a.tokens.tolist() == b.tokens.tolist() == argmax(a.logits).tolist()
        assert a.logits.tobytes() == b.logits.tobytes()

    def test_logits_are_those_of_the_sequence_fed_at_once(self, model):
        prompt = self.prompts(11)[0]
        result = generate(model, [prompt], Decoding(6), keep_prompt_logits=True)[0]
        ids = np.concatenate([prompt.ids, result.tokens[:-1]])
        once = whole(model, ids)
        assert result.logits.tobytes() == once[10:].tobytes()
        assert result.prompt_logits.tobytes() == once[:11].tobytes()
        assert score(model, prompt, result.tokens).tobytes() == once.tobytes()

    def test_score_along_given_tokens(self, model):
        prompt, tokens = self.prompts(4)[0], np.array([7, 7, 400], np.int32)
        logits = score(model, prompt, tokens)
        assert logits.shape == (6, 512)
        assert logits.tobytes() == whole(model, [*prompt.ids, 7, 7]).tobytes()

    def test_a_prompt_longer_than_a_pass(self, model):
        # passes of 256 rows; the token after the prompt stands at 300
        prompt = self.prompts(300)[0]
        result = generate(model, [prompt], Decoding(2), keep_prompt_logits=True)[0]
        once = whole(model, np.concatenate([prompt.ids, result.tokens[:1]]))
        assert np.concatenate([result.prompt_logits, result.logits[1:]]).tobytes() == once.tobytes()
        assert generate(model, [prompt], Decoding(2))[0].logits.tobytes() == result.logits.tobytes()

    def test_stop_ids_end_a_sequence_and_no_other(self, model):
        prompts = self.prompts(5, 6, 7)
        free = generate(model, prompts, Decoding(8))
        stop = int(free[1].tokens[2])
        assert stop not in free[1].tokens[:2]
        held = generate(model, prompts, Decoding(8, stop_ids=(500, stop)))
        for a, b in zip(free, held, strict=True):
            ends = np.flatnonzero(np.isin(a.tokens, (500, stop)))
            n = int(ends[0]) + 1 if len(ends) else 8
            assert b.tokens.tolist() == a.tokens[:n].tolist()
            assert b.logits.tobytes() == a.logits[:n].tobytes()
            assert b.finish_reason == ("stop" if len(ends) else "length")
        assert held[1].tokens.tolist() == free[1].tokens[:3].tolist()

    def test_the_first_token_may_stop_and_so_may_the_last(self, model):
        prompt = self.prompts(5)
        free = generate(model, prompt, Decoding(4))[0].tokens.tolist()
        first = generate(model, prompt, Decoding(4, stop_ids=(free[0],)))[0]
        assert (first.tokens.tolist(), first.finish_reason) == (free[:1], "stop")
        assert free[3] not in free[:3]
        last = generate(model, prompt, Decoding(4, stop_ids=(free[3],)))[0]
        assert (last.tokens.tolist(), last.finish_reason) == (free, "stop")

    def test_ignore_eos(self, model):
        prompt = self.prompts(5)
        free = generate(model, prompt, Decoding(4))[0]
        stop = (int(free.tokens[1]),)
        on = generate(model, prompt, Decoding(4, stop_ids=stop, ignore_eos=True))[0]
        assert (on.tokens.tolist(), on.finish_reason) == (free.tokens.tolist(), "length")

    def test_sampling_is_keyed_by_position_and_stream(self, model):
        prompts = self.prompts(5, 9)
        decoding = Decoding(12, temperature=0.8, seed=3)
        together = generate(model, prompts, decoding)
        for prompt, result in zip(prompts, together, strict=True):
            at = len(prompt.ids) + np.arange(12)
            drawn = choose(result.logits, at, np.full(12, prompt.stream), temperature=0.8, seed=3)
            assert result.tokens.tolist() == drawn.tolist()
            assert result.tokens.tolist() != argmax(result.logits).tolist()
        alone = generate(model, prompts[1:], decoding)[0]
        assert alone.tokens.tolist() == together[1].tokens.tolist()
        other = generate(model, [replace(prompts[1], stream=5)], decoding)[0]
        assert other.tokens.tolist() != alone.tokens.tolist()

    def test_one_step(self, model):
        result = generate(model, self.prompts(3), Decoding(1))[0]
        assert result.logits.shape == (1, 512)
        assert result.finish_reason == "length"


def scaled(config: ModelConfig, tensor: str, factor: float) -> Weights:
    """Weights of which one tensor is scaled: all finite, but not what float32 arithmetic makes of them."""
    arrays = new_weights(config, 0)
    arrays[tensor] = (arrays[tensor].astype(np.float32) * np.float32(factor)).astype(ml_dtypes.bfloat16)
    return Weights.from_arrays(arrays, config)


class TestOverflow:
    @pytest.mark.parametrize(
        ("tensor", "named"),
        [
            ("model.layers.0.self_attn.q_b_proj.weight", "model.layers.0.self_attn.q"),
            ("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", "model.layers.1.self_attn.k_rope"),
            ("model.layers.0.self_attn.kv_b_proj.weight", "model.layers.0.self_attn.attn_out"),
            ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.mlp_out"),
            ("model.layers.1.mlp.gate.weight", "model.layers.1.mlp.router_logits"),
            ("model.layers.1.mlp.shared_experts.down_proj.weight", "model.layers.1.mlp.shared_out"),
            ("lm_head.weight", "logits"),
        ],
    )
    def test_is_refused_by_the_tensor_s_name(self, tensor, named):
        config = make_config("tiny", 2)
        weights = scaled(config, tensor, 3e38)
        prompts = [Prompt("short", random_ids(512, 1), 0), Prompt("long", random_ids(512, 40), 1)]
        with pytest.raises(InputError, match=r"is not finite in sequence '(short|long)' at position \d+: ") as caught:
            generate(Model(config, weights, Choices(), 64, exact), prompts, Decoding(2))
        assert str(caught.value).startswith(f"{named} is not finite")
        assert "overflow float32" in str(caught.value)
        assert "\n" not in str(caught.value)
        # float64 has room for it
        generate(Model(config, weights, Choices(), 64, float64), prompts, Decoding(2))

    def test_names_the_sequence_and_the_position(self):
        config = make_config("tiny", 2)
        arrays = new_weights(config, 0)
        # one hidden unit takes the square of element 0, which is sqrt(128) for token 77 and 3.5 at most for others
        gate, up, down = (arrays[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        for matrix in (arrays["model.layers.0.self_attn.o_proj.weight"], gate, up, down):
            matrix[:] = 0
        arrays["model.layers.0.post_attention_layernorm.weight"][:] = 1
        gate[0, 0] = up[0, 0] = 1
        down[0, 0] = 1e37
        arrays["model.embed_tokens.weight"][77] = np.eye(128)[0] * 1e18
        model = Model(config, Weights.from_arrays(arrays, config), Choices(), 64, exact)
        clean = Prompt("clean", np.array([1, 2, 3], np.int32), 0)
        dirty = Prompt("dirty", np.array([1, 2, 77, 3], np.int32), 1)
        with pytest.raises(InputError, match="mlp_out is not finite in sequence 'dirty' at position 2:"):
            generate(model, [clean, dirty], Decoding(1))

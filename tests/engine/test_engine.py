"""The engine on the CPU device against the NumPy model, bit for bit, in every way of joining, feeding and stopping."""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kdtr_cli.engine.devices import Device, DeviceArray, open_device
from kdtr_cli.engine.generate import Request, generate
from kdtr_cli.engine.kernels import KERNELS, sources
from kdtr_cli.engine.transformer import Rows, Transformer, prefill_rows
from kdtr_cli.engine.weights import DeviceWeights, upload_weights
from kdtr_cli.errors import DeviceError, InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import ModelConfig, parse_config
from kdtr_cli.model.presets import PRESETS, new_weights
from kdtr_cli.model.prompts import Decoding, Generated, Prompt
from kdtr_cli.model.weights import Weights
from kdtr_cli.reference import exact
from kdtr_cli.reference.generate import generate as reference_generate
from kdtr_cli.reference.transformer import Model
from kdtr_cli.workflows.prompts import random_prompt

LENGTHS = (1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257)
#: What no preset has: V2's router with groups, no shared expert, a dense model, rotary pairs apart, no YaRN.
VARIANTS = {
    "v2-groups": {**PRESETS["tiny-v2"], "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "no-shared-expert": {**PRESETS["odd"], "n_shared_experts": 0, "rope_interleave": False},
    "all-dense": {**PRESETS["tiny"], "n_routed_experts": 0, "n_shared_experts": 0, "rope_scaling": None},
    "no-q-lora-biases": {**PRESETS["tiny-v2"], "attention_bias": True, "topk_method": "greedy"},
}


@dataclass(frozen=True)
class Loaded:
    """A model in both forms: in NumPy, and uploaded to the module's device."""

    config: ModelConfig
    reference: Model
    weights: DeviceWeights


@pytest.fixture(scope="module")
def device():
    with open_device("cpu") as d:
        d.compile(sources("cpu"))
        yield d


@pytest.fixture(scope="module")
def load(device):
    """name (of a preset or a variant) → Loaded, each once; a number after a colon cuts the layers."""
    made: dict[str, Loaded] = {}

    def make(name: str) -> Loaded:
        if name not in made:
            base, _, layers = name.partition(":")
            config = parse_config({**PRESETS, **VARIANTS}[base])
            if layers:
                config = replace(config, num_hidden_layers=int(layers))
            weights = Weights.from_arrays(new_weights(config, 0), config)
            reference = Model(config, weights, Choices(), 300, exact)
            made[name] = Loaded(config, reference, upload_weights(device, config, weights))
        return made[name]

    return make


def transformer(device: Device, model: Loaded, *, batch=3, prefill=64, capacity=300, weights=None) -> Transformer:
    return Transformer(
        device,
        model.config,
        weights or model.weights,
        Choices(),
        rows=max(batch, prefill),
        slots=batch,
        capacity=capacity,
    )


def prompts_of(model: Loaded, *lengths: int) -> list[Prompt]:
    vocab = model.config.vocab_size
    return [Prompt(f"p{i}", random_prompt(i, n, vocab, 0), i) for i, n in enumerate(lengths)]


def run(
    device, model, prompts, decoding, *, batch=3, prefill=64, capacity=None, forced=None, **options
) -> list[Generated]:
    """Results in the order of the prompts; guard zones are checked."""
    capacity = capacity or max(len(p.ids) for p in prompts) + decoding.steps - 1
    engine = transformer(device, model, batch=batch, prefill=prefill, capacity=capacity)
    requests = [Request(p, f) for p, f in zip(prompts, forced or [None] * len(prompts), strict=True)]
    results = dict(generate(engine, requests, decoding, batch=batch, prefill=prefill, **options))
    device.check_guards()
    assert sorted(results) == list(range(len(prompts)))
    return [results[i] for i in range(len(prompts))]


def assert_same(got: list[Generated], wanted: list[Generated]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert a.tokens.dtype == np.int32
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.finish_reason == b.finish_reason
        assert a.logits.dtype == np.float32
        assert a.logits.tobytes() == b.logits.tobytes()
        assert (a.prompt_logits is None) == (b.prompt_logits is None)
        if a.prompt_logits is not None:
            assert a.prompt_logits.tobytes() == b.prompt_logits.tobytes()


class TestAgainstNumpy:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", PRESETS)
    def test_prompts_of_every_length(self, device, load, name):
        model = load(name)
        prompts = prompts_of(model, *LENGTHS)
        decoding = Decoding(3, model.config.eos_token_ids)
        assert_same(
            run(device, model, prompts, decoding, batch=4), reference_generate(model.reference, prompts, decoding)
        )

    @pytest.mark.parametrize("name", ["tiny:2", "tiny-groups:2", "tiny-v2:2", "odd:2"])
    def test_short_prompts_and_the_borders_of_a_warp(self, device, load, name):
        model = load(name)
        prompts = prompts_of(model, 1, 2, 31, 32, 33)
        decoding = Decoding(4, model.config.eos_token_ids)
        assert_same(run(device, model, prompts, decoding), reference_generate(model.reference, prompts, decoding))

    def test_across_an_attention_chunk(self, device, load):
        model = load("odd:2")
        prompts = prompts_of(model, 254, 257)
        got = run(device, model, prompts, Decoding(4))
        assert_same(got, reference_generate(model.reference, prompts, Decoding(4)))

    @pytest.mark.parametrize("name", VARIANTS)
    def test_what_no_preset_has(self, device, load, name):
        model = load(f"{name}:2")
        prompts = prompts_of(model, 1, 7, 19)
        decoding = Decoding(5)
        assert_same(run(device, model, prompts, decoding), reference_generate(model.reference, prompts, decoding))

    @pytest.mark.parametrize("choices", [Choices("config", "f64"), Choices("hf", "f32")])
    def test_choices(self, device, load, choices):
        model = load("tiny:2")
        prompts = prompts_of(model, 60)
        wanted = reference_generate(
            Model(model.config, model.reference.weights, choices, 64, exact), prompts, Decoding(2)
        )
        engine = Transformer(device, model.config, model.weights, choices, rows=64, slots=1, capacity=64)
        got = dict(generate(engine, [Request(prompts[0])], Decoding(2), batch=1, prefill=64))
        assert_same([got[0]], wanted)
        assert got[0].logits.tobytes() != run(device, model, prompts, Decoding(2))[0].logits.tobytes()


@pytest.fixture(scope="module")
def small(load):
    return load("tiny:2")


@pytest.fixture(scope="module")
def mixed(small):
    """Nine prompts of other lengths, stop ids, and what the NumPy model makes of them in up to 8 steps."""
    prompts = prompts_of(small, 5, 1, 40, 3, 17, 2, 65, 9, 8)
    free = reference_generate(small.reference, prompts, Decoding(8))
    # three sequences end early, at different steps; the others wherever they meet one of these
    stops = tuple(int(free[i].tokens[at]) for i, at in ((1, 0), (3, 2), (5, 5)))
    decoding = Decoding(8, stops)
    wanted = reference_generate(small.reference, prompts, decoding)
    assert len({len(r.tokens) for r in wanted}) >= 4
    assert {r.finish_reason for r in wanted} == {"stop", "length"}
    assert len(wanted[1].tokens) == 1
    return prompts, decoding, wanted


class TestJoiningAndLeaving:
    @pytest.mark.parametrize("batch", [1, 2, 3, 8, 9])
    def test_any_batch(self, device, small, mixed, batch):
        # with fewer slots than sequences every slot is used again, by a longer or a shorter sequence
        prompts, decoding, wanted = mixed
        assert_same(run(device, small, prompts, decoding, batch=batch), wanted)

    @pytest.mark.parametrize("prefill", [1, 7, 64])
    def test_any_prefill(self, device, small, mixed, prefill):
        prompts, decoding, wanted = mixed
        assert_same(run(device, small, prompts, decoding, prefill=prefill), wanted)

    def test_alone_and_among_others(self, device, small, mixed):
        prompts, decoding, wanted = mixed
        for i in (0, 6):
            assert_same(run(device, small, [prompts[i]], decoding), [wanted[i]])

    def test_in_another_order(self, device, small, mixed):
        prompts, decoding, wanted = mixed
        assert_same(run(device, small, prompts[::-1], decoding, batch=2), wanted[::-1])

    def test_the_second_shorter(self, device, small):
        prompts = prompts_of(small, 30, 4)
        wanted = reference_generate(small.reference, prompts, Decoding(6))
        assert_same(run(device, small, prompts, Decoding(6), batch=2), wanted)
        assert_same(run(device, small, prompts, Decoding(6), batch=1), wanted)

    def test_more_slots_than_sequences_and_more_room_than_needed(self, device, small, mixed):
        prompts, decoding, wanted = mixed
        assert_same(run(device, small, prompts[:2], decoding, batch=4, capacity=290), wanted[:2])

    def test_a_sequence_is_given_as_soon_as_it_ends(self, device, small, mixed):
        prompts, decoding, _ = mixed
        engine = transformer(device, small, batch=3, capacity=80)
        order = [i for i, _ in generate(engine, [Request(p) for p in prompts], decoding, batch=3, prefill=64)]
        assert order[0] == 1  # stops with its first token
        assert sorted(order) == list(range(9))

    def test_no_requests(self, device, small):
        engine = transformer(device, small, batch=1, capacity=8, prefill=4)
        assert list(generate(engine, [], Decoding(3), batch=1, prefill=4)) == []

    def test_prompt_logits(self, device, small):
        prompts = prompts_of(small, 70, 3)
        wanted = reference_generate(small.reference, prompts, Decoding(2), keep_prompt_logits=True)
        for prefill in (5, 64):
            got = run(device, small, prompts, Decoding(2), prefill=prefill, keep_prompt_logits=True)
            assert_same(got, wanted)


class TestStopping:
    def test_the_first_token_stops(self, device, small, mixed):
        prompts, _, _ = mixed
        first = reference_generate(small.reference, prompts[:1], Decoding(1))[0]
        stop = Decoding(5, (int(first.tokens[0]),))
        (got,) = run(device, small, prompts[:1], stop)
        assert (got.tokens.tolist(), got.finish_reason) == (first.tokens.tolist(), "stop")
        (ignored,) = run(device, small, prompts[:1], replace(stop, ignore_eos=True))
        assert (len(ignored.tokens), ignored.finish_reason) == (5, "length")

    def test_the_last_token_stops(self, device, small, mixed):
        prompts, _, _ = mixed
        free = reference_generate(small.reference, prompts[:1], Decoding(4))[0]
        decoding = Decoding(4, (int(free.tokens[3]),))
        assert_same(
            run(device, small, prompts[:1], decoding), reference_generate(small.reference, prompts[:1], decoding)
        )

    def test_one_step(self, device, small, mixed):
        prompts, _, _ = mixed
        wanted = reference_generate(small.reference, prompts, Decoding(1))
        assert {r.finish_reason for r in wanted} == {"length"}
        assert_same(run(device, small, prompts, Decoding(1), batch=2), wanted)


class TestSampling:
    @pytest.mark.parametrize("seed", [3, 0xFEDCBA9876543210])
    def test_draws_are_those_of_the_numpy_model(self, device, small, mixed, seed):
        prompts, _, _ = mixed
        decoding = Decoding(6, temperature=0.8, seed=seed)
        wanted = reference_generate(small.reference, prompts, decoding)
        for batch in (1, 4):
            assert_same(run(device, small, prompts, decoding, batch=batch), wanted)
        assert any(r.tokens.tolist() != r.logits.argmax(-1).tolist() for r in wanted)

    def test_a_stream_belongs_to_its_sequence_not_to_its_slot(self, device, small, mixed):
        prompts = [replace(p, stream=100 - p.stream) for p in mixed[0][:4]]
        decoding = Decoding(6, temperature=1.5, seed=1)
        wanted = reference_generate(small.reference, prompts, decoding)
        assert_same(run(device, small, prompts, decoding, batch=2), wanted)
        assert_same(run(device, small, prompts[2:], decoding, batch=2), wanted[2:])


class TestTeacherForcing:
    def test_given_tokens_are_fed_and_the_own_choices_kept(self, device, small, mixed):
        prompts, _, _ = mixed
        given = [random_prompt(50 + i, 6, 512, 0) for i in range(3)]
        got = run(device, small, prompts[:3], Decoding(6), batch=2, forced=given)
        for prompt, tokens, result in zip(prompts, given, got, strict=False):
            sequence = np.concatenate([prompt.ids, tokens[:-1]])
            (along,) = reference_generate(
                small.reference, [Prompt("x", sequence, 0)], Decoding(1), keep_prompt_logits=True
            )
            assert result.logits.tobytes() == along.prompt_logits[len(prompt.ids) - 1 :].tobytes()
            assert result.tokens.tolist() == result.logits.argmax(-1).tolist()
            assert result.tokens.tolist() != tokens.tolist()
            assert result.finish_reason == "length"

    def test_along_its_own_tokens_nothing_changes(self, device, small, mixed):
        prompts, decoding, wanted = mixed
        assert_same(run(device, small, prompts, decoding, forced=[r.tokens for r in wanted]), wanted)

    def test_a_stop_in_the_middle_does_not_stop_and_one_at_the_end_does(self, device, small, mixed):
        prompts, _, _ = mixed
        given = np.array([9, 4, 9, 7], np.int32)
        for stop, reason in (((4,), "length"), ((9,), "length"), ((7,), "stop")):
            (got,) = run(device, small, prompts[:1], Decoding(4, stop), forced=[given])
            assert (len(got.tokens), got.finish_reason) == (4, reason)

    def test_fewer_steps_than_tokens(self, device, small, mixed):
        prompts, _, wanted = mixed
        (got,) = run(device, small, prompts[:1], Decoding(3), forced=[wanted[0].tokens[:5]])
        assert got.logits.tobytes() == wanted[0].logits[:3].tobytes()


# ---- failures --------------------------------------------------------------------------------------------------------


@contextmanager
def broken(device: Device, array: DeviceArray, index: int, value: float = np.inf):
    """For a while, one element of a weight on the device is not finite."""
    right = device.read(array)
    wrong = right.copy()
    stored = np.float32(value) if right.dtype == np.float32 else np.float32(value).view(np.uint32) >> 16  # bfloat16
    wrong.reshape(-1)[index] = stored
    device.write(array, wrong)
    try:
        yield
    finally:
        device.write(array, right)


class TestFailures:
    @pytest.mark.parametrize(
        ("pick", "named"),
        [
            (lambda w: (w.layers[0].qkv_a.w, 5), r"model\.layers\.0\.self_attn\.qkv_a"),
            (lambda w: (w.layers[0].o.w, 3 * 64), r"model\.layers\.0\.self_attn\.hidden"),
            (lambda w: (w.layers[0].down.w, 7), r"model\.layers\.0\.hidden"),
            (lambda w: (w.layers[1].kv_norm, 2), r"model\.layers\.1\.self_attn\.\w+"),
            (lambda w: (w.layers[1].router.w, 11 * 128, np.nan), r"model\.layers\.1\.mlp\.router_logits"),
            (lambda w: (w.layers[1].down.w, 1), r"model\.layers\.1\.mlp\.shared_out"),
            (lambda w: (w.norm, 0), "final_norm"),
            (lambda w: (w.lm_head.w, 8), "logits"),
        ],
    )
    def test_what_is_not_finite_after_a_prompt_is_named(self, device, small, mixed, pick, named):
        wrong = pytest.raises(DeviceError, match=rf"^{named}\b.* (is|are) not finite")
        with broken(device, *pick(small.weights)), wrong as caught:
            run(device, small, mixed[0][2:3], Decoding(1))
        assert "'p2'" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_and_in_a_decode_step(self, device, small, mixed):
        """Only one token's embedding is broken, and the model comes to that token after some steps."""
        prompts, _, _ = mixed
        free = reference_generate(small.reference, prompts, Decoding(8))
        tokens = free[0].tokens.tolist()
        at = next(i for i in range(1, 7) if tokens[i] not in tokens[:i])
        others = {int(t) for r in free[1:3] for t in r.tokens} | {int(t) for p in prompts[:3] for t in p.ids}
        assert tokens[at] not in others
        wrong = pytest.raises(DeviceError, match=r"^embed is not finite in row 0 of ")
        with broken(device, small.weights.embed.w, tokens[at] * 128 + 3), wrong as caught:
            run(device, small, prompts[:3], Decoding(8), batch=3)
        assert f"step {at + 1} " in str(caught.value)
        assert "sequence 'p0'" in str(caught.value)

    def test_the_device_works_on_after_a_failure(self, device, small, mixed):
        prompts, decoding, wanted = mixed
        assert_same(run(device, small, prompts[:1], decoding), wanted[:1])

    def test_guard_zones_see_a_row_too_many(self, load, mixed):
        prompts, decoding, _ = mixed
        model = load("tiny:2")
        with open_device("cpu") as own:
            weights = upload_weights(own, model.config, model.reference.weights)
            engine = transformer(own, model, batch=1, prefill=8, capacity=20, weights=weights)
            list(generate(engine, [Request(prompts[0])], decoding, batch=1, prefill=8))
            own.check_guards()
            # what a wrong capacity would do: cache row 20 of 20
            rows = Rows(*(own.upload(n, np.array([v], np.int32)) for n, v in (("t", 1), ("p", 0), ("s", 1))))
            engine.forward(rows, 1)
            with pytest.raises(DeviceError, match=r"a kernel wrote outside cache"):
                own.check_guards()

    @pytest.mark.parametrize(
        ("field", "value"), [("n_routed_experts", 2049), ("num_experts_per_tok", 129), ("n_group", 1025)]
    )
    def test_limits(self, device, small, field, value):
        config = replace(small.config, **{field: value})
        with pytest.raises(InputError, match=rf"^{field} is {value}: the engine's kernels hold at most {value - 1}$"):
            Transformer(device, config, small.weights, Choices(), rows=1, slots=1, capacity=8)


class TestSizes:
    def test_prefill_rows_shrink_with_the_context(self):
        tiny = parse_config(PRESETS["tiny"])
        assert prefill_rows(tiny, 2048) == 64
        kimi = replace(tiny, num_attention_heads=64, kv_lora_rank=512)
        rows = [prefill_rows(kimi, n) for n in (256, 8192, 131072)]
        assert rows == sorted(rows, reverse=True)
        assert 1 <= rows[-1] < 64
        # what it bounds: bytes of scores, peaks, sums and vectors of one pass
        assert rows[-1] * 64 * 512 * 4 * (256 + 512 + 2) <= 1 << 29

    @pytest.mark.parametrize("name", ["tiny:2", "all-dense:2"])
    def test_kernels_are_loaded_before_a_capture(self, device, load, name):
        names = transformer(device, load(name), capacity=8, prefill=4).kernel_names()
        assert {"embed_bf16", "sample_parts", "sample_final", "nonfinite"} <= set(names) <= set(KERNELS)
        assert any(n.startswith("expert_matmul") for n in names) == (name == "tiny:2")

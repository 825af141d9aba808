"""Tier bf16: the same bits in any company, near the float64 model, from weights as the checkpoint stores them."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from kdtr_cli.engine.devices import open_device
from kdtr_cli.engine.devices.gpu import gpu_missing
from kdtr_cli.engine.drafters import NgramDrafter, Sequence, SyntheticDrafter
from kdtr_cli.engine.fragments import pack_fragments, pack_pairs
from kdtr_cli.engine.generate import Request, generate
from kdtr_cli.engine.rounds import generate_rounds
from kdtr_cli.engine.transformer_bf16 import Bf16Transformer
from kdtr_cli.engine.weights_bf16 import upload_bf16
from kdtr_cli.errors import DeviceError, InputError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import parse_config
from kdtr_cli.model.presets import PRESETS, new_weights
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.weights import Weights
from kdtr_cli.parity.metrics import kl_divergence
from kdtr_cli.reference import float64
from kdtr_cli.reference.generate import generate as reference_generate
from kdtr_cli.reference.transformer import Model
from kdtr_cli.workflows.prompts import random_prompt

LENGTHS = (1, 9, 17, 260)  # around tiles of 8 and 16 rows, and into a second range of positions
STEPS = 5
WIDE = 16  # rows of a tree
#: What mla_decode.cu is made for: absorbed widths of Kimi-K2, the rest small.
KIMI_HEADS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 16}


class Engine:
    """A preset's first layers on a device, prompts, and what float64 says."""

    def __init__(self, kind: str, name: str) -> None:
        more = KIMI_HEADS if name == "kimi-heads" else {}
        self.config = replace(parse_config({**PRESETS.get(name, PRESETS["tiny"]), **more}), num_hidden_layers=2)
        self.weights = Weights.from_arrays(new_weights(self.config, 0), self.config)
        self.device = open_device(kind)
        self.uploaded = upload_bf16(self.device, self.config, self.weights)
        vocab = self.config.vocab_size
        self.requests = [Request(Prompt(f"p{i}", random_prompt(i, n, vocab, 0), i)) for i, n in enumerate(LENGTHS)]

    def transformer(self, batch: int, rows: int) -> Bf16Transformer:
        size = {"rows": rows, "slots": batch, "capacity": max(LENGTHS) + STEPS + 2 * WIDE}
        return Bf16Transformer(self.device, self.config, self.uploaded, Choices(), **size)

    def ar(self, batch: int = 4, prefill: int = 64, forced=None, **decoding) -> list:
        requests = (
            self.requests
            if forced is None
            else [replace(r, forced=f) for r, f in zip(self.requests, forced, strict=True)]
        )
        model = self.transformer(batch, max(batch, prefill))
        found = dict(generate(model, requests, Decoding(STEPS, **decoding), batch=batch, prefill=prefill))
        self.device.check_guards()
        return [found[i] for i in range(len(LENGTHS))]


def bits(results: list) -> list[bytes]:
    return [r.tokens.tobytes() + r.logits.tobytes() for r in results]


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(gpu_missing()), reason="no GPU")]),
    ],
)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def engine(kind):
    made: dict[str, Engine] = {}

    def of(name: str) -> Engine:
        if name not in made:
            made[name] = Engine(kind, name)
            made[name].plain = made[name].ar()
        return made[name]

    yield of
    for one in made.values():
        one.device.free_all()


@pytest.fixture(params=["tiny", "tiny-groups", "tiny-v2", "kimi-heads"])
def name(request, kind):
    if request.param == "kimi-heads" and kind == "cpu":
        pytest.skip("mla_decode.cu is for a GPU alone, and without it these heads are the others' larger and slower")
    return request.param


class TestBits:
    @pytest.mark.parametrize(("batch", "prefill"), [(1, 64), (3, 1), (2, 7), (4, 16)])
    def test_neither_batch_nor_prefill_changes_one(self, engine, name, batch, prefill):
        one = engine(name)
        assert bits(one.ar(batch, prefill)) == bits(one.plain)

    @pytest.mark.parametrize("drafter", ["ngram", "synthetic:0.6"])
    @pytest.mark.parametrize("budget", [1, 7, WIDE - 1])
    def test_draft_trees_change_none(self, engine, name, drafter, budget):
        one, batch, horizon = engine(name), 2, 7
        model = one.transformer(batch, max(16, batch * (budget + 1)))
        if drafter == "ngram":
            drafts = NgramDrafter(one.device, batch, horizon, budget)
        else:
            size = {"rate": 0.6, "seed": 5, "vocab": one.config.vocab_size, "known": STEPS}
            drafts = SyntheticDrafter(one.device, batch, horizon, budget, **size)
        known = [
            Sequence(r.prompt.ids, r.prompt.stream, p.tokens) for r, p in zip(one.requests, one.plain, strict=True)
        ]
        asked = list(zip(one.requests, known, strict=True))
        decoding = Decoding(STEPS)
        decoded = generate_rounds(model, drafts, asked, decoding, batch=batch, budget=budget, prefill=16)
        found = {index: result for index, result, *_ in decoded}
        one.device.check_guards()
        assert bits([found[i] for i in range(len(LENGTHS))]) == bits(one.plain)

    def test_near_the_float64_model(self, engine, name):
        one = engine(name)
        reference = Model(one.config, one.weights, Choices(), 300, float64)
        truth = reference_generate(reference, [r.prompt for r in one.requests], Decoding(STEPS))
        forced = one.ar(forced=[t.tokens for t in truth])
        for got, wanted in zip(forced, truth, strict=True):
            assert np.isfinite(got.logits).all()
            assert kl_divergence(got.logits, wanted.logits).max() < 2e-3
            rms = np.sqrt(np.mean((got.logits - wanted.logits) ** 2, -1) / np.mean(wanted.logits**2, -1))
            assert 1e-4 < rms.max() < 0.06, "bf16 it is, and no worse"


def test_sampling_is_the_same_in_any_batch(engine):
    one = engine("tiny")
    hot = {"temperature": 0.9, "seed": 3}
    assert bits(one.ar(1, **hot)) == bits(one.ar(4, **hot)) != bits(one.plain)


def test_a_value_that_is_not_finite_is_named(kind):
    one = Engine(kind, "tiny")
    layer = one.uploaded.layers[1]
    one.device.write(layer.o.w, np.full(layer.o.w.shape, 0x7F80, np.uint16))
    with pytest.raises(DeviceError, match=r"model\.layers\.1\.self_attn\.hidden is not finite in row"):
        one.ar()
    one.device.free_all()


class TestWeights:
    def test_every_matrix_holds_the_checkpoints_values(self, engine):
        one = engine("tiny")
        w, layers = one.weights, one.uploaded.layers

        def stored(name: str) -> np.ndarray:
            return np.ascontiguousarray(w[name].astype(ml_dtypes.bfloat16)).view(np.uint16)

        def same(fragments, wanted) -> None:
            assert (one.device.read(fragments.w).reshape(-1) == wanted.reshape(-1)).all()

        a, m = "model.layers.1.self_attn.", "model.layers.1.mlp."
        both = np.concatenate([stored(f"{a}q_a_proj.weight"), stored(f"{a}kv_a_proj_with_mqa.weight")])
        same(layers[1].qkv_a, pack_fragments(both))
        same(layers[1].o, pack_fragments(stored(f"{a}o_proj.weight")))
        gate, up = (stored(f"{m}shared_experts.{p}_proj.weight") for p in ("gate", "up"))
        same(layers[1].gate_up, pack_pairs(gate, up))
        experts = range(one.config.n_routed_experts)
        gates, ups = ([stored(f"{m}experts.{e}.{p}_proj.weight") for e in experts] for p in ("gate", "up"))
        same(layers[1].experts_gate_up, pack_pairs(np.stack(gates), np.stack(ups)))
        same(
            layers[1].experts_down,
            pack_fragments(np.stack([stored(f"{m}experts.{e}.down_proj.weight") for e in experts])),
        )
        same(one.uploaded.lm_head, pack_fragments(stored("lm_head.weight")))
        assert layers[1].experts_down.shape == (one.config.n_routed_experts, 128, 64)
        assert layers[0].router is None

    def test_a_value_that_bf16_does_not_hold_is_refused(self, kind):
        config = replace(parse_config(PRESETS["tiny"]), num_hidden_layers=2)
        arrays = {n: a.astype(np.float32) for n, a in new_weights(config, 0).items()}
        with open_device(kind) as device:
            upload_bf16(device, config, Weights.from_arrays(arrays, config))  # float32 that holds bf16 will do
            name = "model.layers.1.mlp.experts.3.up_proj.weight"
            arrays[name][5, 7] = np.float32(1 + 2**-9)
            with pytest.raises(InputError, match=f"tensor {name} holds values that bf16 does not"):
                upload_bf16(device, config, Weights.from_arrays(arrays, config))
            arrays[name][5, 7] = 1
            # the router stays as it is read
            arrays["model.layers.1.mlp.gate.weight"][0, 0] = np.float32(1 + 2**-9)
            upload_bf16(device, config, Weights.from_arrays(arrays, config))

    def test_a_width_that_no_lane_can_read_is_refused(self, kind):
        config = parse_config(PRESETS["odd"])
        with (
            open_device(kind) as device,
            pytest.raises(InputError, match="hidden_size is 75: tier bf16 takes multiples of 8"),
        ):
            upload_bf16(device, config, Weights.from_arrays(new_weights(config, 0), config))

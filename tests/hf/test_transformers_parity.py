"""The NumPy model against Hugging Face transformers on the CPU: same folder, same tokens, same logits.

transformers is the independent witness: its code shares nothing with kdtr's. Under plain ``.double()`` it still takes
norms, softmax, router and rotary tables in float32, which moves logits of this size by about 1e-6 (limit 1e-4). With
those casts widened (``hf_models.float64_everywhere``) two right implementations differ by rounding only, about 1e-14
(limit 1e-9), while one float32 anywhere would show as 1e-7: that is the comparison which proves the formulas.

Needs transformers 5.17 or newer: 5.0 masks dropped groups with 0 and leaves m² out of DeepSeek-V2's scale.
"""

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")  # pip install 'kdtr[hf]'
pytest.importorskip("transformers")

import safetensors.torch
import torch
import transformers
from hf_models import (
    CASES,
    check_weights,
    decode,
    double,
    float64_everywhere,
    freeze_rotary,
    load,
    prefill,
    rotary_tables,
    write_folder,
)

from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.presets import PRESETS, write_model
from kdtr_cli.model.prompts import Decoding, Generated, Prompt, check_prompts
from kdtr_cli.model.rope import rope_table, rope_table64
from kdtr_cli.model.source import Model, open_model
from kdtr_cli.model.tokenizer import load_tokenizer
from kdtr_cli.reference import exact, float64
from kdtr_cli.reference import transformer as reference
from kdtr_cli.reference.generate import generate, score
from kdtr_cli.reference.transformer import route

pytestmark = pytest.mark.hf

FIXTURE = Path(__file__).parents[2] / "fixtures" / "tiny-kimi"
PROMPT, STEPS = 64, 12  # the prompt is longer than YaRN's original context of 32 in the CASES
PLAIN, WIDENED, FLOAT32 = 1e-4, 1e-9, 1e-3  # limits on the largest difference of a logit
VISIBLE = 1e-3  # what a wrong formula must at least cost, or the limits above prove nothing


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    """One folder opened by kdtr and by transformers (float32), and the prompt."""

    name: str
    folder: Path
    model: Model
    theirs: Any
    report: dict[str, Any]
    ids: np.ndarray


def open_case(name: str, place: Path) -> Case:
    """``name`` is one of CASES, a preset, or the trained checkpoint tiny-kimi."""
    folder = FIXTURE if name == "tiny-kimi" else place / name
    if name in CASES:
        write_folder(folder, CASES[name])
    elif name in PRESETS:
        write_model(folder, name)
    model = open_model(folder)
    theirs, report = load(folder, None if model.config.is_v2 else "deepseek_v3")
    if name == "tiny-kimi":
        ids = np.array(load_tokenizer(folder).encode("def fibonacci(n):\n    if n < 2:\n"), np.int32)
    else:
        ids = np.random.default_rng(5).integers(0, model.config.vocab_size, PROMPT).astype(np.int32)
    return Case(name, folder, model, theirs, report, ids)


@pytest.fixture(scope="module", params=[*CASES, *PRESETS, "tiny-kimi"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return open_case(request.param, tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def golden(case: Case) -> Generated:
    """kdtr's float64 tokens and logits."""
    return ours(case, float64)


def ours(case: Case, ops: ModuleType, choices: Choices | None = None) -> Generated:
    """kdtr's greedy continuation and prompt logits, by its own generate."""
    config = case.model.config
    prompt = Prompt("prompt", case.ids, 0)
    positions = check_prompts([prompt], config, STEPS)
    model = reference.Model(config, case.model.weights, choices or Choices(), positions, ops)
    return generate(model, [prompt], Decoding(STEPS, config.eos_token_ids), keep_prompt_logits=True)[0]


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference; infinite if any is NaN."""
    assert a.shape == b.shape
    gap = np.abs(a.astype(np.float64) - b)
    return float(gap.max()) if np.isfinite(gap).all() else np.inf


def assert_same(case: Case, model: Any, golden: Generated, limit: float) -> None:
    """Tokens equal, and logits of the prompt (no cache) and of every cached step within the limit."""
    tokens, logits = decode(model, case.ids, STEPS)
    assert tokens.tolist() == golden.tokens.tolist()
    assert apart(prefill(model, case.ids), golden.prompt_logits) < limit
    assert apart(logits, golden.logits) < limit


# ------------------------------------------------------------------------------------------------------- every model


def test_transformers_holds_every_weight_bit_by_bit_and_no_random_one(case: Case) -> None:
    check_weights(case.theirs, case.report, {name: case.model.weights[name] for name in case.model.weights})


def test_float64_is_transformers_under_plain_double(case: Case, golden: Generated) -> None:
    assert_same(case, double(case.theirs), golden, PLAIN)


def test_float64_is_transformers_once_its_float32_casts_are_widened(case: Case, golden: Generated) -> None:
    with float64_everywhere():
        assert_same(case, double(case.theirs), golden, WIDENED)


def test_exact_is_transformers_in_float32(case: Case) -> None:
    assert_same(case, case.theirs, ours(case, exact), FLOAT32)


def test_continuations_are_not_one_token_over_and_over(golden: Generated) -> None:
    # equal tokens would mean little if a model said the same one at every step
    assert len(set(golden.tokens.tolist())) >= 3


# ------------------------------------------------------------------------------------------------------- the choices


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Opens a case by name, once."""
    place, known = tmp_path_factory.mktemp("named"), {}

    def get(name: str) -> Case:
        if name not in known:
            known[name] = open_case(name, place)
        return known[name]

    return get


def test_latent_norm_eps_config_differs_and_is_what_transformers_gives_with_that_eps(
    opened: Callable[[str], Case],
) -> None:
    case = opened("v3-eps-1e-5")
    config = ours(case, float64, Choices(latent_norm_eps="config"))
    with float64_everywhere():
        theirs = double(case.theirs)
        assert apart(prefill(theirs, case.ids), config.prompt_logits) > VISIBLE  # it takes 1e-6, not rms_norm_eps
        for layer in theirs.model.layers:
            layer.self_attn.q_a_layernorm.variance_epsilon = case.model.config.rms_norm_eps
            layer.self_attn.kv_a_layernorm.variance_epsilon = case.model.config.rms_norm_eps
        assert_same(case, theirs, config, WIDENED)


@pytest.mark.parametrize("name", ["v3", "v3-no-yarn", "v3-amplitude", "v3-no-mscale", "v2-greedy"])
def test_rotary_tables_f32_are_transformers_and_f64_are_the_widened_ones(
    opened: Callable[[str], Case], name: str
) -> None:
    case, positions = opened(name), 2048
    config = case.model.config
    f32, f64 = rope_table(config, positions, "f32"), rope_table(config, positions, "f64")
    for theirs, close, far in zip(rotary_tables(case.theirs, positions), f32, f64, strict=True):
        assert theirs.dtype == np.float32
        assert apart(theirs, close) < 1.3e-7  # torch's pow and cos may be a last bit away from ours
        assert apart(theirs, far) > 1e-5
    with float64_everywhere():
        widened = rotary_tables(double(case.theirs), positions)
    for theirs, true in zip(widened, rope_table64(config, positions), strict=True):
        assert theirs.dtype == np.float64
        assert apart(theirs, true) < 1e-12


@pytest.mark.parametrize("name", ["v3", "v2-greedy"])
def test_rope_angles_f32_is_nearer_to_transformers_than_f64_is(opened: Callable[[str], Case], name: str) -> None:
    case = opened(name)
    ids = np.random.default_rng(6).integers(0, case.model.config.vocab_size, 600).astype(np.int32)
    logits = {}
    for angles in ("f32", "f64"):
        model = reference.Model(case.model.config, case.model.weights, Choices(rope_angles=angles), len(ids), float64)
        logits[angles] = score(model, Prompt("long", ids, 0), np.zeros(1, np.int32))
    plain = prefill(double(case.theirs), ids)
    assert apart(plain, logits["f64"]) < PLAIN
    assert apart(plain, logits["f32"]) < apart(plain, logits["f64"])
    frozen = freeze_rotary(case.theirs, len(ids))
    with float64_everywhere():  # and with nothing in float32 but the tables
        tables = prefill(frozen, ids)
    assert apart(tables, logits["f32"]) < apart(tables, logits["f64"]) / 10


# ------------------------------------------------------------------------------------------- prompts, files, stopping


def test_exact_is_transformers_in_float32_over_three_chunks_of_attention(opened: Callable[[str], Case]) -> None:
    case = opened("tiny")
    ids = np.random.default_rng(7).integers(0, case.model.config.vocab_size, 530).astype(np.int32)
    model = reference.Model(case.model.config, case.model.weights, Choices(), len(ids), exact)
    logits = score(model, Prompt("long", ids, 0), np.zeros(1, np.int32))
    assert apart(prefill(case.theirs, ids), logits) < FLOAT32


def test_trained_checkpoint_reads_and_continues_text_as_transformers_does(opened: Callable[[str], Case]) -> None:
    case = opened("tiny-kimi")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(case.folder / "tokenizer.json"))
    text = 'class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        """'
    ids = np.array(load_tokenizer(case.folder).encode(text), np.int32)
    assert ids.tolist() == tokenizer.encode(text)
    golden = ours(replace(case, ids=ids), float64)
    tokens, _ = decode(double(case.theirs), ids, STEPS)
    assert tokens.tolist() == golden.tokens.tolist()
    continued = load_tokenizer(case.folder).decode(golden.tokens.tolist())
    assert continued == tokenizer.decode(tokens.tolist())
    assert continued.strip()
    assert "\ufffd" not in continued


def test_stop_ids_end_both_at_the_same_token(opened: Callable[[str], Case], tmp_path: Path) -> None:
    free = ours(opened("v3"), float64).tokens.tolist()
    stops = [free[7], 3]
    folder = write_folder(tmp_path / "stopping", CASES["v3"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    model, (theirs, _) = open_model(folder), load(folder)
    case = replace(opened("v3"), model=model, theirs=theirs)
    golden = ours(case, float64)
    expected = free[: next(i for i, token in enumerate(free) if token in stops) + 1]
    assert golden.tokens.tolist() == expected
    assert golden.finish_reason == "stop"
    assert_same(case, double(theirs), golden, PLAIN)


@pytest.mark.parametrize("name", ["v3-groups", "v3-rope-halves", "v3-tied", "v3-no-mscale", "v2-groups", "v2-greedy"])
def test_kdtr_reads_a_folder_that_transformers_saved(opened: Callable[[str], Case], name: str, tmp_path: Path) -> None:
    # transformers 5 writes rope_parameters, dtype and its own defaults; weights in float32, one tensor per expert
    case = opened(name)
    case.theirs.save_pretrained(tmp_path / "saved")
    saved = open_model(tmp_path / "saved")
    assert replace(saved.config, torch_dtype="bfloat16") == case.model.config
    assert saved.weights.used_sha256() == case.model.weights.used_sha256()


@pytest.mark.parametrize("name", ["v3-groups", "v2-groups"])
def test_kdtr_reads_experts_stacked_as_transformers_holds_them(
    opened: Callable[[str], Case], name: str, tmp_path: Path
) -> None:
    case = opened(name)
    folder = write_folder(tmp_path / "stacked", CASES[name])
    safetensors.torch.save_file(case.theirs.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    assert open_model(folder).weights.used_sha256() == case.model.weights.used_sha256()


# ------------------------------------------------------------------------------------- the harness is not blind itself


def test_experts_left_random_are_caught_with_and_without_a_report(opened: Callable[[str], Case]) -> None:
    # what transformers 5.24 does to a folder of model_type kimi_k2 that is loaded as it stands
    case = opened("tiny")
    weights = {name: case.model.weights[name] for name in case.model.weights}
    name = "model.layers.3.mlp.experts.down_proj"
    with pytest.raises(AssertionError, match="missing_keys"):
        check_weights(case.theirs, {**case.report, "missing_keys": {name}}, weights)
    theirs = copy.deepcopy(case.theirs)
    torch.nn.init.normal_(theirs.get_parameter(name), std=0.02)
    with pytest.raises(AssertionError, match=r"layers\.3\.mlp\.experts\.0\.down_proj"):
        check_weights(theirs, case.report, weights)


def test_one_flipped_bit_of_a_weight_is_caught(opened: Callable[[str], Case]) -> None:
    case = opened("tiny")
    weights = {name: case.model.weights[name].copy() for name in case.model.weights}
    weights["model.layers.2.mlp.experts.5.up_proj.weight"].view(np.uint32)[3, 7] ^= 1 << 16
    with pytest.raises(AssertionError, match=r"experts\.5\.up_proj"):
        check_weights(case.theirs, case.report, weights)


def _scale_by(m_squared: float) -> Callable[[ModelConfig], ModelConfig]:
    """The config with this factor in the softmax scale where m² belongs, and its rotary amplitude of 1."""

    def change(c: ModelConfig) -> ModelConfig:
        yarn = c.rope_scaling
        slope = (math.sqrt(m_squared) - 1.0) / (0.1 * math.log(yarn.factor))
        return replace(c, rope_scaling=replace(yarn, mscale_all_dim=slope, attention_factor=1.0))

    return change


WRONG_CONFIGS: list[tuple[str, str, Callable[[ModelConfig], ModelConfig]]] = [
    ("v3", "scale without m²", _scale_by(1.0)),
    ("v3", "scale times m", _scale_by(0.1 * math.log(4.0) + 1.0)),
    ("v2-greedy", "scale without m²", _scale_by(1.0)),
    ("v3-amplitude", "no amplitude", lambda c: replace(c, rope_scaling=replace(c.rope_scaling, attention_factor=1.0))),
    ("v3", "no YaRN", lambda c: replace(c, rope_scaling=None)),
    ("v3", "rotary halves for interleaved pairs", lambda c: replace(c, rope_interleave=False)),
    ("v3-rope-halves", "interleaved pairs for rotary halves", lambda c: replace(c, rope_interleave=True)),
    ("v3-groups", "no groups", lambda c: replace(c, n_group=1, topk_group=1)),
    ("v3-groups", "one group too many", lambda c: replace(c, topk_group=3)),
    ("v2-groups", "no groups", lambda c: replace(c, n_group=1, topk_group=1)),
    ("v3", "weights not normalised", lambda c: replace(c, norm_topk_prob=False)),
    ("v3", "no scaling factor", lambda c: replace(c, routed_scaling_factor=1.0)),
    ("v2-greedy", "no scaling factor", lambda c: replace(c, routed_scaling_factor=1.0)),
    ("v2-greedy-norm-topk-prob", "V2 with normalised weights", lambda c: replace(c, is_v2=False)),
    ("v3", "one expert fewer", lambda c: replace(c, num_experts_per_tok=3)),
    ("v3", "rms_norm_eps 1e-3", lambda c: replace(c, rms_norm_eps=1e-3)),
]


def wrong_by(case: Case, config: ModelConfig) -> float:
    """How far the prompt logits of a wrong kdtr lie from those of transformers, plain double."""
    model = reference.Model(config, case.model.weights, Choices(), len(case.ids), float64)
    return apart(prefill(double(case.theirs), case.ids), score(model, Prompt("p", case.ids, 0), np.zeros(1, np.int32)))


@pytest.mark.parametrize(("name", "what", "change"), WRONG_CONFIGS, ids=[f"{n}: {w}" for n, w, _ in WRONG_CONFIGS])
def test_a_wrong_config_shows(
    opened: Callable[[str], Case], name: str, what: str, change: Callable[[ModelConfig], ModelConfig]
) -> None:
    case = opened(name)
    assert wrong_by(case, change(case.model.config)) > VISIBLE


Routed = tuple[np.ndarray, np.ndarray]


def _bias_in_the_weights(ops: ModuleType, logits: np.ndarray, bias: np.ndarray, **router: Any) -> Routed:
    ids, _ = route(ops, logits, bias, **router)
    chosen = np.take_along_axis(ops.sigmoid(logits) + bias, ids, -1)
    return ids, chosen / (ops.total(chosen) + 1e-20)[:, None] * router["factor"]


def _bias_ignored(ops: ModuleType, logits: np.ndarray, bias: np.ndarray, **router: Any) -> Routed:
    return route(ops, logits, None, **router)


def _dropped_groups_masked_with_0(ops: ModuleType, logits: np.ndarray, bias: np.ndarray, **router: Any) -> Routed:
    kept = router["kept_groups"] * (logits.shape[1] // router["groups"])
    inside, _ = route(ops, logits, bias, **{**router, "slots": kept})
    choice = np.zeros_like(logits)
    scores = ops.sigmoid(logits)
    np.put_along_axis(choice, inside, np.take_along_axis(scores + bias, inside, -1), -1)
    ids = ops.order(choice, router["slots"])
    weights = np.take_along_axis(scores, ids, -1)
    return ids, weights / ops.total(weights)[:, None] * router["factor"]


def _groups_by_their_best_expert(ops: ModuleType, logits: np.ndarray, bias: np.ndarray, **router: Any) -> Routed:
    return route(ops, logits, bias, **{**router, "best_two": False})


@pytest.mark.parametrize(
    "wrong", [_bias_in_the_weights, _bias_ignored, _dropped_groups_masked_with_0, _groups_by_their_best_expert]
)
def test_a_wrong_router_shows(
    opened: Callable[[str], Case], wrong: Callable[..., Routed], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = opened("v3-groups")
    assert wrong_by(case, case.model.config) < PLAIN
    monkeypatch.setattr(reference, "route", wrong)
    assert wrong_by(case, case.model.config) > VISIBLE


def test_one_tensor_rounded_to_float32_shows_against_the_widened_limit(opened: Callable[[str], Case]) -> None:
    case = opened("v3")
    with float64_everywhere():
        theirs = double(case.theirs)
        true = prefill(theirs, case.ids)
        norm = theirs.model.layers[0].self_attn.kv_a_layernorm
        norm.register_forward_hook(lambda module, args, out: out.to(torch.float32).to(torch.float64))
        assert apart(prefill(theirs, case.ids), true) > WIDENED

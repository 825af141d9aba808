"""`kdtr bisect` on the CPU device: a right engine is identical in every operation, and each planted fault stands alone.

Faults are mistakes in the source of one kernel at a time, in the weights that lie on the device, and in what the engine
tells its kernels.
"""

from pathlib import Path

import numpy as np
import pytest
from planted import plant

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.engine.transformer import Transformer
from kdtr_cli.engine.weights import upload_weights
from kdtr_cli.errors import DeviceError, InputError
from kdtr_cli.model.presets import PRESETS, write_model
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.reference import exact
from kdtr_cli.workflows import bisect as workflow
from kdtr_cli.workflows.bisect import BisectOptions, bisect
from kdtr_cli.workflows.bisect_operations import OPERATIONS
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.prompts import PromptOptions
from kdtr_cli.workflows.run import RunOptions, make_run

FIXTURES = Path(__file__).parents[2] / "fixtures"

#: Two layers, a dense one and a MoE one; V2's manner with groups, without q_lora, without shared experts, with biases.
MODELS = {
    "v3": {**PRESETS["tiny"], "num_hidden_layers": 2},
    "v2": {
        **PRESETS["tiny-v2"],
        "num_hidden_layers": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "n_shared_experts": 0,
    },
}


@pytest.fixture(scope="module")
def golden_of(tmp_path_factory):
    """name of MODELS → a golden of it with two prompts of three and seven ids and four tokens each."""
    made = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("bisect") / f"{name}.h5"
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(PRESETS, name, MODELS[name])
                prompts = PromptOptions(ids=("1 2 3", "9 8 7 6 5 4 3"))
                make_golden(GoldenOptions(name, made[name], prompts, 4))
        return made[name]

    return make


@pytest.fixture
def golden(golden_of) -> Path:
    return golden_of("v3")


def bisected(golden: Path, **options):
    return bisect(BisectOptions(golden, device="cpu", **options))


class TestRight:
    def test_every_operation_is_identical(self, golden, monkeypatch):
        fed, feed = [], workflow.Grafting.feed
        monkeypatch.setattr(workflow.Grafting, "feed", lambda self, one, see: (fed.append(one), feed(self, one, see)))
        report = bisected(golden)
        assert report.line == "PASS bisect operations=39/39 identical verdict=IDENTICAL"
        assert (report.exit_code, report.hint, report.unseen) == (0, None, ())
        # 16 positions in pieces; the last two and the last five together; the first and the last of the steps alone
        passes = [(one.form, one.first, one.count) for one in fed]
        for count, alone in ((6, (3, 5)), (10, (7, 9))):
            wanted = [("prefill", 0, count), ("batch", count - 2, 2), ("batch", count - 5, 5)]
            assert passes[:5] == [*wanted, *(("decode", first, 1) for first in alone)]
            del passes[:5]
        rows = {"prefill": 16, "batch": 2 * 2 + 2 * 5, "decode": 2 * 2}
        for operation, layer in report.operations:
            for form, count in rows.items():
                here = [r for r in report.rows if (r.operation, r.layer, r.form) == (operation, layer, form)]
                assert sum(row.rows for row in here) == sum(row.rows_identical for row in here) == count
        assert {name for name, _ in report.operations} == {op.name for op in OPERATIONS}
        assert [report.rows[0].operation, report.rows[-1].operation] == ["embed", "token_choice"]

    def test_v2_with_groups_without_q_lora_and_shared_experts(self, golden_of):
        report = bisected(golden_of("v2"))
        assert report.verdict is Verdict.IDENTICAL
        missing = {"q_norm", "q_b", "shared_gate_up", "shared_swiglu", "shared_down"}
        assert {name for name, _ in report.operations} == {op.name for op in OPERATIONS} - missing

    def test_a_trained_model_of_top_logits_drawn_by_chance_every_position_alone(self, tmp_path):
        model, golden = str(FIXTURES / "tiny-kimi"), tmp_path / "g.h5"
        prompts = PromptOptions(texts=("def f(x):\n",))
        make_golden(GoldenOptions(model, golden, prompts, 2, embed_weights=False, logits="top:5", temperature=0.8))
        report = bisected(golden, model=model, positions="all")
        assert report.verdict is Verdict.IDENTICAL
        with open_bundle(golden) as bundle:
            fed = len(bundle.sequences[0].prompt) + len(bundle.sequences[0].tokens) - 1
        assert {row.rows for row in report.rows if row.form == "decode"} == {fed}
        with pytest.raises(InputError, match="holds no weights; give the checkpoint with --model DIR"):
            bisected(golden)
        with pytest.raises(InputError, match="another config than tiny-kimi-int4's"):
            bisected(golden, model=str(FIXTURES / "tiny-kimi-int4"))

    def test_a_golden_with_a_trace_is_held_to_it_too(self, tmp_path, monkeypatch):
        make_golden(GoldenOptions("odd", tmp_path / "g.h5", PromptOptions(ids=("7 8 9",)), 2, trace="full"))
        assert bisected(tmp_path / "g.h5").verdict is Verdict.IDENTICAL
        true = exact.swiglu
        monkeypatch.setattr(exact, "swiglu", lambda gate, up: true(gate, up) * np.float32(1.0001))
        with pytest.raises(InputError, match=r"trace/model\.layers\.0\.mlp\.mlp_out of sequence '0' is not what this"):
            bisected(tmp_path / "g.h5")

    def test_a_prompt_of_one_token_leaves_variants_unseen_and_says_so(self, tmp_path):
        make_golden(GoldenOptions("odd", tmp_path / "g.h5", PromptOptions(ids=("7",)), 1))
        report = bisected(tmp_path / "g.h5")
        assert report.verdict is Verdict.IDENTICAL
        assert report.unseen == ("expert_matmul_bf16_w1_m4_r2", "matmul_bf16_w1_m16_r1", "matmul_bf16_w1_m4_r2")
        assert f" unseen={','.join(report.unseen)} verdict=IDENTICAL" in report.line


# ---- planted faults --------------------------------------------------------------------------------------------------

#: Kernel, file, what stands there, what stands there instead, the operations at fault, and no
#: other, and the hint.
FAULTS = {
    "eps outside the root": (
        "rmsnorm",
        "rmsnorm.cuh",
        "sqrtf(sum / (float)n + eps)",
        "(sqrtf(sum / (float)n) + eps)",
        ("input_norm@layer0-1", "q_norm@layer0-1", "post_norm@layer0-1", "final_norm"),
        "first-tensor",
    ),
    "queries turn back": (
        "rope_query",
        "rope.cuh",
        "b * c + a * s",
        "b * c - a * s",
        ("rope_query@layer0-1",),
        "first-tensor",
    ),
    "keys take the angle of their row": (
        "kv_append",
        "kv_append.cu",
        "(i64)positions[row] * half",
        "(i64)row * half",
        ("kv_append@layer0-1:batch+decode",),
        "position",
    ),
    "keys get into another sequence as well": (
        "kv_append",
        "kv_append.cu",
        "  norm_any(kv, weight, out,",
        "  if (threadIdx.x == 0) cache[0] = 0.f;\n  norm_any(kv, weight, out,",
        ("kv_append@layer0-1",),
        "first-tensor",
    ),
    "values of the first sequence": (
        "attn_chunks",
        "attention.cuh",
        "(i64)slots[row] * capacity",
        "(i64)0 * capacity",
        ("attention@layer0-1",),
        "nonfinite",
    ),
    "no softmax scale": (
        "attn_scores",
        "attention_scores.cu",
        "s[r] = s[r] * scale;",
        "s[r] = s[r];",
        ("attention@layer0-1",),
        "first-tensor",
    ),
    "the bias gets into the weights": (
        "router",
        "router.cu",
        "chosen[rank] = score[i];",
        "chosen[rank] = choice[i];",
        ("router@layer1",),
        "router-bias",
    ),
    "ids one too large": (
        "router",
        "router.cu",
        "ids[(i64)row * slots + rank] = i;",
        "ids[(i64)row * slots + rank] = (i + 1) % experts;",
        ("router@layer1",),
        "router-choice",
    ),
    "no routed scaling": (
        "router",
        "router.cu",
        ": chosen[j]) * factor",
        ": chosen[j])",
        ("router@layer1",),
        "constant-scale",
    ),
    "swiglu without the sigmoid": (
        "swiglu",
        "swiglu.cu",
        "exact_silu(row[i])",
        "row[i]",
        ("mlp_swiglu@layer0", "experts_swiglu@layer1", "shared_swiglu@layer1"),
        "first-tensor",
    ),
    "tiles that are too long": (
        "group_experts",
        "group_experts.cu",
        "min(tile, count[e] - first)",
        "tile",
        ("group_experts@layer1:prefill+batch",),
        "prefill-decode",
    ),
    "the shared expert counts twice": (
        "combine",
        "combine.cu",
        "sum = sum + shared[row * n + i]",
        "sum = sum + 2.f * shared[row * n + i]",
        ("moe_combine@layer1",),
        "first-tensor",
    ),
    "a step's experts read the row before": (
        "expert_matmul_bf16_w1_m1_r4",
        "weights.cuh",
        "{w + (i64)e * n * k, k}",
        "{w + ((i64)e * n - 1) * k, k}",
        ("experts_gate_up@layer1:decode", "experts_down@layer1:decode"),
        "prefill-decode",
    ),
    "the smallest logit wins": (
        "sample_parts",
        "sample.cu",
        "? b : a; }",
        "? a : b; }",
        ("token_choice",),
        "first-tensor",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernel_stands_alone(golden, fault, tmp_path, monkeypatch):
    *where, operations, hint = FAULTS[fault]
    plant(monkeypatch, tmp_path, *where)
    report = bisected(golden, judge=JudgeOptions(select=("1",)))
    assert report.faulty == operations
    assert (report.verdict, report.exit_code, report.hint) == (Verdict.DIVERGED, 1, hint)
    good = sum(status == "identical" for status in report.operations.values())
    found = f"operations={good}/39 faulty={','.join(operations)} hint={hint}"
    assert report.line == f"FAIL bisect {found} sequences=1/2 verdict=DIVERGED"


@pytest.fixture
def spoil(monkeypatch):
    """Weights on the device are others: ``spoil(pick, change)``: an array of a model's, and what becomes of it."""

    def planted(pick, change) -> None:
        def upload(device, config, weights):
            made = upload_weights(device, config, weights)
            array = pick(made)
            device.write(array, np.ascontiguousarray(change(device.read(array))))
            return made

        monkeypatch.setattr(workflow, "upload_weights", upload)

    return planted


class TestOtherFaults:
    def test_heads_of_w_uv_swapped_in_one_layer(self, golden, spoil):
        spoil(lambda w: w.layers[1].w_uv.w, lambda heads: heads[::-1])
        assert bisected(golden).faulty == ("w_uv@layer1",)

    def test_lm_head_off_by_one_row(self, golden, spoil):
        spoil(lambda w: w.lm_head.w, lambda rows: np.roll(rows, 1, 0))
        assert bisected(golden).faulty == ("lm_head",)

    def test_one_expert(self, golden, spoil):
        twice = np.uint16(1 << 7)  # one more in a bfloat16's exponent
        chosen = np.arange(16) == 2  # an expert that some rows choose
        spoil(lambda w: w.layers[1].experts_down.w, lambda w: w + twice * chosen[:, None, None].astype(np.uint16))
        report = bisected(golden)
        assert [name.partition(":")[0] for name in report.faulty] == ["experts_down@layer1"]
        assert report.hint == "single-expert"

    def test_a_value_that_is_not_finite(self, golden, spoil):
        nan = np.uint16(0x7FC0)
        spoil(lambda w: w.layers[0].down.w, lambda rows: np.where(np.arange(rows.size).reshape(rows.shape), rows, nan))
        report = bisected(golden)
        assert report.faulty == ("mlp_down@layer0",)
        assert report.hint == "nonfinite"
        row = next(row for row in report.rows if row.operation == "mlp_down")
        assert np.isnan(row.max_abs)
        assert row.nonfinite == row.rows == 16
        assert row.first_row == ("0", 0)

    def test_a_kernel_that_is_not_launched(self, golden, monkeypatch):
        """What was there before is no right answer."""
        launch = workflow.Grafting

        class Lazy(launch):
            def feed(self, one, see):
                true = self.device.launch

                def most(kernel, *args, **rest):
                    if kernel.entry != "kv_append":
                        true(kernel, *args, **rest)

                self.device.launch = most
                super().feed(one, see)
                self.device.launch = true

        monkeypatch.setattr(workflow, "Grafting", Lazy)
        assert bisected(golden).faulty == ("kv_append@layer0-1",)

    def test_a_head_that_a_step_leaves_out(self, tmp_path, monkeypatch):
        """The same row was made by the pass before, and lies there still."""
        make_golden(GoldenOptions("odd", tmp_path / "g.h5", PromptOptions(ids=("7",)), 1))
        for name in ("head", "choose"):
            true, calls = getattr(Transformer, name), []

            def once(self, *args, true=true, calls=calls, **options):
                calls.append(args)
                if len(calls) == 1:
                    return true(self, *args, **options)
                return self.logits.view(0, (1, self.config.vocab_size))

            monkeypatch.setattr(Transformer, name, once)
        assert bisected(tmp_path / "g.h5").faulty == ("lm_head:decode", "token_choice:decode")

    def test_a_step_that_adds_chunks_which_no_position_is_in(self, tmp_path, monkeypatch):
        """A captured step covers the whole capacity, a piece of a prompt as much as it sees."""
        monkeypatch.setitem(PRESETS, "flat", {**PRESETS["odd"], "num_hidden_layers": 1})
        prompt = " ".join(str(i % 200) for i in range(262))
        make_golden(GoldenOptions("flat", tmp_path / "g.h5", PromptOptions(ids=(prompt,)), 1))
        plant(
            monkeypatch,
            tmp_path,
            "attn_combine",
            "attention_combine.cu",
            "c < chunk_count(positions[blockIdx.z])",
            "c < chunks",
        )
        assert bisected(tmp_path / "g.h5", positions=(5, 261)).faulty == ("attention@layer0:decode",)

    def test_what_writes_outside_its_array(self, golden, tmp_path, monkeypatch):
        """The device fails, and the message has the operations that were at fault by then."""
        right = "h[(i64)blockIdx.y * n + i] ="
        plant(
            monkeypatch,
            tmp_path,
            "swiglu",
            "swiglu.cu",
            right,
            f"if (i == 0 && blockIdx.y == 0) h[-1] = 1.f;\n  {right} 2.f *",
        )
        with pytest.raises(DeviceError, match=r"^a kernel wrote outside .*; at fault by then: mlp_swiglu@layer0, "):
            bisected(golden)

    def test_a_launch_that_belongs_to_no_operation(self, golden, monkeypatch):
        true = Transformer._mlp

        def more(self, layer, m, *rest):
            self.launch.norm(self.hidden, layer.post_norm, self.normed, m, 1e-5)
            true(self, layer, m, *rest)

        monkeypatch.setattr(Transformer, "_mlp", more)
        with pytest.raises(RuntimeError, match=r"before model\.layers\.0\.mlp\.gate_up belong to no operation"):
            bisected(golden)

    def test_a_tolerance_lets_small_differences_pass(self, golden, tmp_path, monkeypatch):
        plant(
            monkeypatch,
            tmp_path,
            "combine",
            "combine.cu",
            "int j = 0; j < slots; ++j",
            "int j = slots - 1; j >= 0; --j",
        )
        judge = {"select": ("0",)}
        exactly = bisected(golden, judge=JudgeOptions(**judge))
        assert exactly.faulty == ("moe_combine@layer1",)
        report = bisected(golden, judge=JudgeOptions(atol=1e-5, **judge))
        assert (report.verdict, report.exit_code) == (Verdict.PASS, 0)
        assert report.line == "PASS bisect operations=39/39 sequences=1/2 verdict=PASS"
        assert set(report.operations.values()) == {"identical", "within"}
        assert bisected(golden, judge=JudgeOptions(atol=1e-9, **judge)).faulty == exactly.faulty


class TestGoldensThatCannotBeUsed:
    def test_inputs_that_are_not_the_golden_s_own(self, golden, monkeypatch):
        """The reference does not give again what the golden holds: nothing is judged by it."""
        true = exact.swiglu
        monkeypatch.setattr(exact, "swiglu", lambda gate, up: true(gate, up) * np.float32(1.0001))
        with pytest.raises(InputError, match=r"logits/exact of sequence '0' is not what this kdtr's reference gives"):
            bisected(golden)

    def test_a_reference_that_is_not_finite(self, golden, monkeypatch):
        """Said of an inner tensor, before anything is compared with it."""
        true = exact.attend

        def attend(*args):
            out = true(*args)
            out[-1, 0, 0] = np.inf
            return out

        monkeypatch.setattr(exact, "attend", attend)
        wrong = r"^model\.layers\.0\.self_attn\.latent_out is not finite in sequence '0' at position 5"
        with pytest.raises(InputError, match=wrong):
            bisected(golden)

    def test_other_weights(self, golden, tmp_path, monkeypatch):
        monkeypatch.setitem(PRESETS, "v3", MODELS["v3"])
        write_model(tmp_path / "other", "v3", seed=5)
        with pytest.raises(InputError, match=r"was made with other weights than other's \(weights_used_sha256 differs"):
            bisected(golden, model=str(tmp_path / "other"))

    def test_another_contract(self, golden, monkeypatch):
        monkeypatch.setattr(workflow, "CONTRACT_VERSION", 99)
        with pytest.raises(InputError, match=r"is of version \d+ of the numerics contract, this kdtr of 99; "):
            bisected(golden)

    def test_no_exact_logits(self, tmp_path):
        make_golden(GoldenOptions("odd", tmp_path / "g.h5", PromptOptions(ids=("7 8",)), 1, exact=False))
        with pytest.raises(InputError, match=r"holds no exact logits \(float64\)"):
            bisected(tmp_path / "g.h5")

    def test_a_run(self, golden, tmp_path):
        make_run(RunOptions(golden, tmp_path / "r.h5", device="cpu", steps=1))
        with pytest.raises(InputError, match="is a run, not a golden"):
            bisected(tmp_path / "r.h5")

    def test_what_is_not_in_it(self, golden):
        with pytest.raises(InputError, match=r"--select 7: no such sequence in .*; it has 0, 1$"):
            bisected(golden, judge=JudgeOptions(select=("0", "7")))
        with pytest.raises(InputError, match=r"--positions 6: the sequences feed positions 0 to 5$"):
            bisected(golden, judge=JudgeOptions(select=("0",)), positions=(0, 6))

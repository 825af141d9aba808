"""The sabotages of `kdtr selftest`: classic bugs of inference engines, each as one small change to the real engine.

A sabotage of kind `engine` replaces text of kernel files, in memory, on a device of its own; `host` changes what the
engine is asked to do while the bundle still says what it was asked; `output` changes the run bundle of a healthy
engine.
"""

from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.workflows import selftest_jobs as jobs
from kdtr_cli.workflows import selftest_outputs as outputs
from kdtr_cli.workflows.selftest_sabotage import Edit, Sabotage

__all__ = ["SABOTAGES"]

#: Of the 'border' golden a decode step is a pass of one row, a prefill pass one of several.
_ONE_ROW_APPEND, _ONE_ROW_QUERY = "(gridDim.x == 1)", "(gridDim.y == 1)"
_VISIBLE = "return min(CHUNK, position + 1 - chunk * CHUNK);"
_ANGLE = "(i64)positions[row] * half + i"
#: A float rounded to bfloat16, halves up.
_BF16 = "__uint_as_float((__float_as_uint({}) + 0x8000u) & 0xffff0000u)"

SABOTAGES: dict[str, Sabotage] = {
    # ---- the router
    "biased-weights": Sabotage(
        "expert weights taken from the biased scores",
        "vllm #11971, transformers PR #41647",
        "groups",
        ("router-bias",),
        edits=(Edit("router.cu", "chosen[rank] = score[i];", "chosen[rank] = choice[i];"),),
    ),
    "bias-ignored": Sabotage(
        "experts chosen without the correction bias",
        "",
        "groups",
        ("router-choice",),
        edits=(Edit("router.cu", "bias ? score[i] + bias[i] : score[i]", "score[i]"),),
    ),
    "mask-zero": Sabotage(
        "experts of groups left out get the score 0, not -inf",
        "transformers PR #45441, sglang PR #3705",
        "groups",
        ("router-choice",),
        edits=(Edit("router.cu", "best_two ? -infinity() : 0.f", "0.f"),),
    ),
    "group-max": Sabotage(
        "a group scored by its best expert, not its best two",
        "vllm PR #13474",
        "groups",
        ("router-choice",),
        edits=(Edit("router.cu", "return best_two ? a + b : a;", "return a;"),),
    ),
    "bias-cancellation": Sabotage(
        "the score recovered as (score + bias) - bias",
        "flashinfer PR #3875",
        "offset",
        ("router-bias",),
        edits=(
            Edit("router.cu", "chosen[rank] = score[i];", "chosen[rank] = bias ? choice[i] - bias[i] : choice[i];"),
        ),
    ),
    "bf16-router": Sabotage(
        "router logits rounded to bfloat16",
        "sglang PR #37133, vllm PR #23640",
        "offset",
        ("router-precision",),
        edits=(
            # of this model's products without heads the router's alone has 16 outputs
            Edit(
                "matmul_bf16.cu",
                "y[at] = residual ? residual[at] + dot : dot;",
                f"y[at] = residual ? residual[at] + dot : n == 16 && gridDim.z == 1 ? {_BF16.format('dot')} : dot;",
            ),
        ),
    ),
    "bf16-bias": Sabotage(
        "scores and biases added in bfloat16",
        "sglang #31213, vllm PR #14027",
        "offset",
        ("router-choice",),
        edits=(
            Edit(
                "router.cu",
                "choice[i] = bias ? score[i] + bias[i] : score[i];",
                f"choice[i] = {_BF16.format('score[i] + bias[i]')};",
            ),
        ),
    ),
    "expert-ties": Sabotage(
        "equal experts: the last one wins",
        "sglang PR #8125, rMLX #373",
        "ties",
        ("router-choice",),
        edits=(Edit("router.cu", "<< 32 | (u32)~i;", "<< 32 | (u32)i;"),),
    ),
    "scaling-twice": Sabotage(
        "routed_scaling_factor applied twice",
        "vllm PR #45037, kvcache-ai/sglang PR #86",
        "groups",
        ("constant-scale",),
        job=jobs.scaled_to_the(2),
        place="config",
    ),
    "scaling-missing": Sabotage(
        "routed_scaling_factor not applied",
        "sglang PR #8364, #12998",
        "groups",
        ("constant-scale",),
        job=jobs.scaled_to_the(0),
        place="config",
    ),
    # ---- experts
    "swapped-expert": Sabotage(
        "one expert computed with another's weights",
        "sglang PR #8125",
        "groups",
        ("single-expert",),
        edits=(Edit("group_experts.cu", "tiles[3 * j] = e;", "tiles[3 * j] = e == 3 ? 4 : e;"),),
    ),
    "shared-scaled": Sabotage(
        "the shared expert scaled by 0.4",
        "sglang PR #28237",
        "groups",
        ("constant-scale",),
        edits=(Edit("combine.cu", "sum + shared[row * n + i]", "sum + 0.4f * shared[row * n + i]"),),
    ),
    "int4-nibbles": Sabotage(
        "int4 weights unpacked in another order",
        "ktransformers #2076, sglang #24091",
        "int4",
        ("first-tensor",),
        edits=(
            Edit(
                "expert_matmul_int4.cu",
                "nibble<0>(v) * s, nibble<1>(v) * s",
                "nibble<1>(v) * s, nibble<0>(v) * s",
            ),
        ),
    ),
    "int4-offset": Sabotage(
        "int4 weights stored as q + 8 read as q + 7",
        "vllm #40357, sglang #23264",
        "int4",
        ("first-tensor",),
        edits=(Edit("expert_matmul_int4.cu", "(8u << 4 * I)", "(7u << 4 * I)"),),
    ),
    # ---- attention
    "softmax-scale": Sabotage(
        "scores scaled by 1/sqrt of the nope width alone",
        "maxtext #1370",
        "groups",
        ("yarn-scale",),
        job=jobs.other_scale(lambda c: c.softmax_scale() * (c.qk_head_dim / c.qk_nope_head_dim) ** 0.5),
        place="config",
    ),
    "mscale-missing": Sabotage(
        "YaRN's mscale squared missing in the softmax scale",
        "onnxruntime/mobius PR #548, Megatron-LM #1429",
        "groups",
        ("yarn-scale",),
        job=jobs.other_scale(lambda c: c.qk_head_dim**-0.5),
        place="config",
    ),
    "rope-layout": Sabotage(
        "half-split instead of interleaved rotary pairs",
        "transformers #39687, vllm #26995",
        "groups",
        ("rope-layout",),
        job=jobs.other_config(rope_interleave=False),
        place="config",
    ),
    "latent-norm": Sabotage(
        "the cached latent not normalised",
        "",
        "groups",
        ("first-tensor",),
        edits=(
            Edit(
                "kv_append.cu",
                "norm_any(kv, weight, out, latent, eps, kv_row | 2 * half, part);",
                "for (int i = threadIdx.x; i < latent; i += 128) out[i] = kv[i];",
            ),
        ),
    ),
    "border-position": Sabotage(
        "decode goes on from the prompt's last position instead of the next",
        "",
        "border",
        ("position",),
        edits=(
            Edit("kv_append.cu", _ANGLE, f"((i64)positions[row] - {_ONE_ROW_APPEND}) * half + i"),
            Edit("rope_query.cu", _ANGLE, f"((i64)positions[row] - {_ONE_ROW_QUERY}) * half + i"),
        ),
    ),
    "stale-mask": Sabotage(
        "a decode step masked as the one before: its own key is not seen",
        "openvino.genai PR #3451",
        "border",
        ("prefill-decode",),
        edits=(
            Edit(
                "attention_chunks.cu",
                _VISIBLE,
                "return min(CHUNK, position + (gridDim.z > 1) - chunk * CHUNK);",
            ),
        ),
    ),
    "future-key": Sabotage(
        "a prompt row sees one key too many",
        "",
        "border",
        ("first-tensor",),
        edits=(
            Edit(
                "attention_scores.cu",
                "const int position = positions[row];",
                "const int position = positions[row] + (blockIdx.z + 1 < gridDim.z);",
            ),
            Edit(
                "attention_chunks.cu",
                "const int position = positions[row];",
                "const int position = positions[row] + (row + 1 < (int)gridDim.z / blocks);",
            ),
        ),
    ),
    # ---- choosing tokens
    "argmax-tie": Sabotage(
        "equal logits: the larger id is chosen",
        "lattice #280, vllm PR #54403",
        "ties",
        ("sampler",),
        edits=(Edit("sample.cu", "if (is_nan(a) || a == b) return i < j;", "if (is_nan(a) || a == b) return i > j;"),),
    ),
    "argmax-tie-forced": Sabotage(
        "the same, with the golden's tokens fed",
        "lattice #280, vllm PR #54403",
        "ties",
        ("sampler",),
        Verdict.TIE_BREAK,
        edits=(Edit("sample.cu", "if (is_nan(a) || a == b) return i < j;", "if (is_nan(a) || a == b) return i > j;"),),
        run=(("teacher_force", True),),
    ),
    "stop-ignored": Sabotage(
        "a stop token inside an accepted run is not honoured",
        "sglang PR #33758, koboldcpp #1276",
        "tree",
        ("stop",),
        job=jobs.never_stops,
        place="decoding",
    ),
    "limit-overrun": Sabotage(
        "three tokens more than the limit",
        "antonellof/ferrox PR #311, vllm #56101",
        "tree",
        ("stop",),
        job=jobs.runs_on,
        place="decoding",
    ),
    # ---- rounds
    "tree-position": Sabotage(
        "a tree node's key rotated by its index, not its depth",
        "lablup/mlxcel PR #1214",
        "tree",
        ("tree", "position"),
        edits=(Edit("kv_append.cu", _ANGLE, "(i64)places[row] * half + i"),),
    ),
    "cache-prefix": Sabotage(
        "accepted rows scattered over the tree read as its first ones: compaction forgotten",
        "sglang PR #15360, aprender PR #2014",
        "tree",
        ("cache",),
        edits=(Edit("compact_cache.cu", "rows[(i64)from[k + j] * width]", "rows[(i64)(k + j) * width]"),),
    ),
    "bonus-twice": Sabotage(
        "a round's bonus committed again as the first token of the next",
        "antirez/ds4 #750",
        "tree",
        ("tree",),
        Verdict.INVALID,
        edits=(
            Edit(
                "accept.cu",
                "accepted[b * (horizon + 1) + k] = last;",
                "if (k < horizon) accepted[b * (horizon + 1) + k + 1] = last;",
            ),
            Edit(
                "accept.cu",
                "accepted[b * (horizon + 1)] = 0;",
                "accepted[b * (horizon + 1)] = accepted[b * (horizon + 1) + 1] = 0;",
            ),
            Edit("accept.cu", "n_accepted[b] = count + 1;", "n_accepted[b] = min(count + 2, horizon + 1);"),
        ),
    ),
    "drafter-features": Sabotage(
        "the drafter reads the features of the tree's first rows, not of the accepted ones",
        "warpfront/hipfire PR #483",
        "drafter",
        ("drafter",),
        edits=(
            # the other call gathers the mask rows: one less than the block, of a block's rows
            Edit("gather_rows.cu", "index[row];", "(rows_in > rows_out + 1 ? (int)(row % rows_out) : index[row]);"),
        ),
    ),
    # ---- what comes out
    "nan": Sabotage(
        "one logit is NaN",
        "JustVugg/colibri #369, tensara #87",
        "groups",
        ("nonfinite",),
        output=outputs.one_nan,
        place="logits",
    ),
    "shift": Sabotage(
        "all logits shifted by a constant",
        "",
        "groups",
        ("shift",),
        output=outputs.shifted,
        place="logits",
    ),
    "previous-step": Sabotage(
        "the logits of the step before",
        "KernelBench #165",
        "groups",
        ("prefill-decode",),
        output=outputs.one_step_late,
        place="logits",
    ),
    "truncated": Sabotage(
        "a sequence ends one token early",
        "vLLM check_logprobs_close",
        "groups",
        ("output",),
        output=outputs.truncated,
        place="tokens",
    ),
    "dropped-sequence": Sabotage(
        "a sequence is missing",
        "Polygraphy compare",
        "groups",
        ("output",),
        output=outputs.dropped,
        place="sequences",
    ),
    "other-weights": Sabotage(
        "another checkpoint of the same shape",
        "",
        "groups",
        ("weights",),
        Verdict.INVALID,
        other_weights=True,
        place="--model",
    ),
}

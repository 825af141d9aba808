"""Speed of tier `exact` on an NVIDIA GPU: each matrix product against cuBLAS fp32, and a step of one Kimi-K2 layer.

    python tests/bench/exact_gpu.py [matrices] [step]

Needs CuPy, a GPU, and PyTorch for the cuBLAS side (graphs on both sides, so that launches cost neither). Times are the
median of graph replays over rotated weights; every share is of the copy bandwidth measured in the same run. Outputs are
compared with a float64 product before and after timing.
"""

import sys
from functools import partial
from types import SimpleNamespace

import cupy as cp
import numpy as np
from random_weights import RandomWeights, as_cupy, randomise

from kdtr_cli.engine.devices import open_device
from kdtr_cli.engine.kernels import CHUNK, KERNELS, matmul
from kdtr_cli.engine.launch import Launcher
from kdtr_cli.engine.transformer import Rows, Transformer
from kdtr_cli.engine.weights import place_weights
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import parse_config

MATRICES = (
    ("dense gate or up", 18432, 7168),
    ("dense down", 7168, 18432),
    ("o_proj", 7168, 8192),
    ("q_b", 12288, 1536),
    ("q_a", 1536, 7168),
    ("kv_a", 576, 7168),
)
ROWS = (1, 4, 8, 16)
ROTATED_BYTES = 6e8  # several times the second-level cache

KIMI_LAYER = {
    "model_type": "kimi_k2",
    "vocab_size": 1024,
    "hidden_size": 7168,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "eos_token_id": 0,
}


def median_us(stream, replay, count: int, repeats: int = 25) -> float:
    """Median microseconds of one of the `count` pieces of work that replay() puts on the stream."""
    for _ in range(3):
        replay()
    start, stop, times = cp.cuda.Event(), cp.cuda.Event(), []
    for _ in range(repeats):
        start.record(stream)
        replay()
        stop.record(stream)
        stop.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, stop) * 1e3 / count)
    return float(np.median(times))


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy of 2 GiB, bytes read and written."""
    a = cp.empty(1 << 29, cp.float32)
    b = cp.empty_like(a)
    a[:] = 1
    stream = cp.cuda.get_current_stream()
    us = median_us(stream, lambda: cp.copyto(b, a), 1, 15)
    return 2 * a.nbytes / us / 1e6


def stream_of(stream):
    """CuPy's view of a PyTorch stream."""
    return cp.cuda.Stream.from_external(stream)


def cublas_us(weights, x) -> tuple[float, np.ndarray]:
    """cuBLAS fp32 (TF32 off) through PyTorch, as a captured graph over the same rotated weights."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    ws, xt = [torch.as_tensor(w, device="cuda") for w in weights], torch.as_tensor(x, device="cuda")
    y = torch.empty(xt.shape[0], ws[0].shape[0], device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for w in ws:
            torch.mm(xt, w.t(), out=y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for w in ws:
            torch.mm(xt, w.t(), out=y)
    with torch.cuda.stream(stream):
        us = median_us(stream_of(stream), graph.replay, len(ws))
    return us, y.cpu().numpy()


def products(launch, name: str, ws: list, x, y, size: dict) -> None:
    """One product with each matrix."""
    for w in ws:
        launch(name, x=x, w=w, bias=None, residual=None, y=y, **size)


def bench_matrices(device, copy: float) -> None:
    launch = Launcher(device)
    names = [n for n, kernel in KERNELS.items() if kernel.twin == "matmul"]
    launch.load(names)
    print(f"{'matrix':<18} rows  {'kernel':<18} us      share   cuBLAS  ratio   others")
    ahead = []
    for label, n, k in MATRICES:
        count = max(2, min(12, int(ROTATED_BYTES / (n * k * 4)) + 1))
        ws = [device.alloc("w", (n, k), np.float32) for _ in range(count)]
        for w in ws:
            randomise(device, w)
        for rows in ROWS:
            x, y = device.alloc("x", (rows, k), np.float32), device.alloc("y", (rows, n), np.float32)
            randomise(device, x)
            size = {
                "rows": rows,
                "n": n,
                "k": k,
                "heads": 1,
                "x_row": k,
                "y_row": n,
                "x_head": 0,
                "w_head": 0,
                "y_head": 0,
            }
            times, bits = {}, None
            truth = as_cupy(x).astype(cp.float64) @ as_cupy(ws[-1]).astype(cp.float64).T
            for name in names:
                of_rows = int(name.split("_m")[1].split("_")[0])
                if of_rows > max(4, rows) or rows > 2 * of_rows:
                    continue
                graph = device.capture(partial(products, launch, name, ws, x, y, size))
                times[name] = median_us(device._stream, graph.replay, count)
                got = device.read(y)
                error = float(cp.linalg.norm(cp.asarray(got) - truth) / cp.linalg.norm(truth))
                assert error < 1e-6, (name, error)
                bits = got if bits is None else bits
                assert np.array_equal(bits.view(np.uint32), got.view(np.uint32)), name
            blas, _ = cublas_us([as_cupy(w) for w in ws], as_cupy(x))
            chosen = matmul("gpu", rows, n, k)
            us = times[chosen]
            ahead.append(blas / us)
            ranked = sorted(times, key=times.get)
            others = " ".join(f"{m.removeprefix('matmul_')}={times[m]:.1f}" for m in ranked)
            mark = "" if times[ranked[0]] > 0.97 * us else " <- not the best"
            print(
                f"{label:<18} {rows:>4}  {chosen.removeprefix('matmul_'):<18} {us:7.1f} "
                f"{4 * n * k / us / 1e6 / copy:6.0%} {blas:8.1f} {blas / us:6.2f}   {others}{mark}",
                flush=True,
            )
        device.free_all()
    won = sum(r > 1 for r in ahead)
    print(f"matrices: ahead of cuBLAS fp32 on {won} of {len(ahead)}, ratios {min(ahead):.2f} to {max(ahead):.2f}")


def bench_step(device, copy: float, context: int, label: str, placing: RandomWeights) -> None:
    config = parse_config(KIMI_LAYER)
    weights = place_weights(config, {}, placing)
    model = Transformer(device, config, weights, Choices(), rows=1, slots=1, capacity=context)
    for cache in model.caches:
        randomise(device, cache)
    rows = Rows(*(device.upload(n, np.array([v], np.int32)) for n, v in (("t", 7), ("p", context - 1), ("s", 0))))
    graph = device.capture(lambda: model.forward(rows, context))
    stream = device._stream
    graph.replay()
    first = device.read(model.normed)
    us = median_us(stream, graph.replay, 1, 50)
    assert np.isfinite(first).all()
    assert np.array_equal(first.view(np.uint32), device.read(model.normed).view(np.uint32))
    c = config
    layer = weights.layers[0]
    dense = (layer.qkv_a, layer.q_b, layer.w_uk, layer.w_uv, layer.o, layer.router, layer.gate_up, layer.down)
    per_expert = (layer.experts_gate_up.nbytes + layer.experts_down.nbytes) / c.n_routed_experts
    touched = len(set(device.read(model.ids)[0, : c.num_experts_per_tok].tolist()))
    total = sum(w.nbytes for w in dense) + touched * per_expert + context * c.latent_dim * 4
    print(
        f"step: one Kimi-K2 layer, {label}, 1 row, context {context}, {touched} of {c.n_routed_experts} experts, "
        f"{graph.launches} launches: {us:.1f} us, {total / 1e9:.3f} GB, {total / us / 1e6:.2f} TB/s = "
        f"{total / us / 1e6 / copy:.1%} of copy"
    )
    profile(model, rows, context, stream)
    device.free_all()


class Recorder(Launcher):
    """Notes the launches that it is asked for, and makes none."""

    def __init__(self, device) -> None:
        super().__init__(device)
        self.calls = []

    def __call__(self, name, **values) -> None:
        self.calls.append((name, values))


def profile(model, rows, context, stream) -> None:
    """Time of each launch of a step by itself, as a graph of eight copies of it."""
    inner, recorder = model.launch, Recorder(model.device)
    model.launch = recorder
    model.forward(rows, context)
    model.launch = inner
    parts = []
    for name, values in recorder.calls:
        graph = model.device.capture(lambda n=name, v=values: [inner(n, **v) for _ in range(8)])
        parts.append((median_us(stream, graph.replay, 8, 15), name, values))
    print("  each launch alone (us, weights from cache where they fit):")
    for us, name, v in parts:
        what = f" {v['n']}x{v['k']}" + (f" x{v['heads']}" if v.get("heads", 1) > 1 else "") if "k" in v else ""
        print(f"    {us:7.2f} {name}{what}")


def main() -> None:
    wanted = sys.argv[1:] or ["matrices", "step"]
    with open_device("gpu") as device:
        print(SimpleNamespace(**device.describe()))
        copy = copy_bandwidth()
        cp.get_default_memory_pool().free_all_blocks()
        print(f"copy {copy:.3f} TB/s")
        if "matrices" in wanted:
            bench_matrices(device, copy)
            cp.get_default_memory_pool().free_all_blocks()
        if "step" in wanted:
            for context in (1024, 4 * CHUNK * 8):
                bench_step(device, copy, context, "float32", RandomWeights(device))
        print(f"copy {copy_bandwidth():.3f} TB/s (again)")


if __name__ == "__main__":
    main()

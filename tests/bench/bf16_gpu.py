"""Speed of tier `bf16` on an NVIDIA GPU: matrix products against cuBLAS bf16, and the step of two Kimi-K2 layers.

    python tests/bench/bf16_gpu.py [matrices] [attention] [step]

Needs CuPy, a GPU, and PyTorch for the cuBLAS side (graphs on both sides). Times are the median of graph replays over
rotated weights; every share is of the copy bandwidth measured in the same run. Outputs are compared with a float64
product after timing, and a row's bits with the same row alone.
"""

import sys
from types import SimpleNamespace

import cupy as cp
import numpy as np
from exact_gpu import KIMI_LAYER, copy_bandwidth, median_us, stream_of
from random_weights import as_cupy, randomise

from kdtr_cli.engine.devices import open_device
from kdtr_cli.engine.kernels_mma import MLA_LATENT, MLA_WIDTH, mla_decode, mla_ranges, mma_matmul
from kdtr_cli.engine.launch import Launcher
from kdtr_cli.engine.matrices import Matrix
from kdtr_cli.engine.transformer import Rows
from kdtr_cli.engine.transformer_bf16 import Bf16Transformer
from kdtr_cli.engine.weights import place_weights
from kdtr_cli.engine.weights_bf16 import Fragments
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.config import parse_config

MATRICES = (
    ("q_a with kv_a", 2112, 7168),
    ("q_a", 1536, 7168),
    ("kv_a", 576, 7168),
    ("q_b", 12288, 1536),
    ("o_proj", 7168, 8192),
    ("dense gate or up", 18432, 7168),
    ("lm_head", 163840, 7168),
)
ROWS = (1, 8, 16, 17, 32, 64)
SCALE = 192**-0.5 * np.log2(np.e)
ROTATED_BYTES = 4e8


def bits(normal):
    """float32 -> the bits of bf16, rounded to even."""
    u = normal.view(cp.uint32)
    return ((u + cp.uint32(0x7FFF) + ((u >> cp.uint32(16)) & cp.uint32(1))) >> cp.uint32(16)).astype(cp.uint16)


def wide(array):
    """Bits of bf16 -> float32."""
    return (array.astype(cp.uint32) << cp.uint32(16)).view(cp.float32)


def packed(w):
    """Bits [n, k] in fragment order, on the GPU."""
    n, k = w.shape
    parts = w.reshape(n // 16, 2, 8, k // 64, 2, 4, 8)
    return cp.ascontiguousarray(parts.transpose(0, 3, 4, 1, 2, 5, 6)).reshape(1, n // 16, k // 64, 1024)


class Placed:
    """Random bf16 arrays on the device."""

    def __init__(self, device) -> None:
        self.device = device
        self.block = bits(cp.random.standard_normal(1 << 26, dtype=cp.float32) * cp.float32(0.02))

    def array(self, name: str, shape: tuple[int, ...]):
        array = self.device.alloc(name, shape, np.uint16)
        self.device.synchronize()
        flat = as_cupy(array).reshape(-1)
        for i in range(0, flat.size, self.block.size):
            part = flat[i : i + self.block.size]
            part[:] = cp.roll(self.block, 1 + i // 4099 % 1000003)[: part.size]
        cp.cuda.runtime.deviceSynchronize()
        return array

    def vector(self, name, size, values):
        array = self.device.alloc(name, (size,), np.float32)
        randomise(self.device, array, 0.1)
        return array

    def matrix(self, name, shape, *tensors, cut=None):
        *of, n, k = shape
        if name == "embed":
            return Matrix.plain("bf16", self.array(name, shape))
        if name.endswith("router"):
            array = self.device.alloc(name, shape, np.float32)
            randomise(self.device, array, 0.02)
            return Matrix.plain("f32", array)
        tiles, units = -(-n // 16), -(-k // 64)
        if name.endswith("gate_up"):
            return Fragments((*of, n // 2, k), self.array(name, (*of, tiles // 2, 2, units, 1024)))
        return Fragments(shape, self.array(name, (*(of or [1]), tiles, units, 1024)))


def cublas_us(weights, x) -> float:
    """cuBLAS bf16 through PyTorch, a captured graph over the same rotated weights (in plain order)."""
    import torch

    ws = [torch.as_tensor(w.view(cp.int16), device="cuda").view(torch.bfloat16) for w in weights]
    xt = torch.as_tensor(x.view(cp.int16), device="cuda").view(torch.bfloat16)
    y = torch.empty(xt.shape[0], ws[0].shape[0], device="cuda", dtype=torch.bfloat16)
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
        return median_us(stream_of(stream), graph.replay, len(ws))


def bench_matrices(device, copy: float) -> None:
    launch = Launcher(device)
    print(f"{'matrix':<18} rows  {'kernel':<28}    us  share  cuBLAS  ratio  error")
    for label, n, k in MATRICES:
        count = max(2, min(40, int(ROTATED_BYTES / (2 * n * k)) + 1))
        plain = [bits(cp.random.standard_normal((n, k), dtype=cp.float32) * cp.float32(0.02)) for _ in range(count)]
        ws = []
        for w in plain:
            ws.append(device.alloc("w", (1, n // 16, k // 64, 1024), np.uint16))
            device.synchronize()
            as_cupy(ws[-1])[:] = packed(w)
        cp.cuda.runtime.deviceSynchronize()
        alone = {}
        for rows in ROWS:
            x, y = device.alloc("x", (rows, k), np.uint16), device.alloc("y", (rows, n), np.float32)
            device.synchronize()
            cp.random.seed(1)
            as_cupy(x)[:] = bits(cp.random.standard_normal((64, k), dtype=cp.float32))[:rows]
            cp.cuda.runtime.deviceSynchronize()
            size = {"rows": rows, "n": n, "k": k, "heads": 1, "x_row": k, "y_row": n, "x_head": 0, "y_head": 0}
            kernel = mma_matmul(rows, n, k)

            def work(ws=ws, x=x, y=y, size=size, kernel=kernel):
                for w in ws:
                    launch(kernel, x=x, w=w, bias=None, residual=None, y32=y, y16=None, **size)

            work()
            graph = device.capture(work)
            us = median_us(device._stream, graph.replay, count)
            got = device.read(y)
            xs, error, norm = wide(as_cupy(x)).astype(cp.float64), 0.0, 0.0
            for i in range(0, n, 8192):
                truth = xs @ wide(plain[-1][i : i + 8192]).astype(cp.float64).T
                error += float(((cp.asarray(got[:, i : i + 8192]) - truth) ** 2).sum())
                norm += float((truth**2).sum())
            error = (error / norm) ** 0.5
            assert error < 3e-6, error
            alone.setdefault("bits", got[0].view(np.uint32))
            assert (alone["bits"] == got[0].view(np.uint32)).all(), "a row's bits depend on the number of rows"
            blas = cublas_us(plain, as_cupy(x))
            print(
                f"{label:<18} {rows:>4}  {kernel:<28} {us:7.2f} {2 * n * k / us / 1e6 / copy:5.0%} {blas:7.2f} "
                f"{blas / us:6.2f}  {error:.1e}",
                flush=True,
            )
        device.free_all()
        del plain


def attention_call(device, rows: int, context: int, caches: list):
    """A function that launches the attention of `rows` tree rows over each cache, and its arrays by name."""
    heads, ranges = 64, mla_ranges(context)
    query = device.alloc("query", (rows, heads, MLA_WIDTH), np.uint16)
    device.synchronize()
    cp.random.seed(2)
    as_cupy(query)[:] = bits(cp.random.standard_normal((64, heads, MLA_WIDTH), dtype=cp.float32))[:rows]
    cp.cuda.runtime.deviceSynchronize()
    start = context - rows
    # a chain of nodes with siblings: node i hangs on node i - 1 or i - 2
    ways = [[0]]
    for i in range(1, rows):
        ways.append([*ways[max(0, i - 1 - i % 2)], i])
    paths = np.zeros((rows, rows), np.int32)
    for i, way in enumerate(ways):
        paths[i, : len(way)] = start + np.array(way)
    ints = {
        "positions": np.array([start + len(way) - 1 for way in ways], np.int32),
        "slots": np.zeros(rows, np.int32),
        "tree_starts": np.full(rows, start, np.int32),
        "paths": paths,
    }
    arrays = {name: device.upload(name, values) for name, values in ints.items()}
    arrays |= {"query": query, "o": device.alloc("o", (rows, heads, MLA_LATENT), np.uint16)}
    arrays["states"] = device.alloc("states", (rows, heads, ranges, 2), np.float32)
    arrays["vectors"] = device.alloc("vectors", (rows, heads, ranges, MLA_LATENT), np.float32)
    launch = Launcher(device)
    kernel = mla_decode(rows, context, heads, device.shared_bytes)
    size = {"heads": heads, "ranges": ranges, "rows": rows}
    first = ("query", "positions", "slots", "tree_starts", "paths", "states", "vectors")

    def work() -> None:
        for cache in caches:
            given = {name: arrays[name] for name in first}
            launch(kernel, cache=cache, capacity=context, path_row=rows, scale=SCALE, **given, **size)
            given = {name: arrays[name] for name in ("states", "vectors", "positions", "o")}
            launch("mla_combine", **given, **size)

    return work, arrays, ways, start


def bench_attention(device, copy: float) -> None:
    print("context  rows     us   error")
    for context in (1024, 8192, 32768, 131072):
        count = max(3, min(300, int(ROTATED_BYTES / (context * MLA_WIDTH * 2))))
        caches = [device.alloc("cache", (1, context, MLA_WIDTH), np.uint16) for _ in range(count)]
        device.synchronize()
        for cache in caches:
            as_cupy(cache)[:] = bits(cp.random.standard_normal((1, context, MLA_WIDTH), dtype=cp.float32))
        cp.cuda.runtime.deviceSynchronize()
        for rows in (1, 17):
            work, arrays, ways, start = attention_call(device, rows, context, caches)
            work()
            us = median_us(device._stream, device.capture(work).replay, count)
            got = device.read(arrays["o"])
            keys, query = (
                wide(as_cupy(caches[-1])[0]).astype(cp.float64),
                wide(as_cupy(arrays["query"])).astype(cp.float64),
            )
            error = norm = 0.0
            for i, way in enumerate(ways):
                seen = cp.concatenate([keys[:start], keys[start + cp.array(way)]])
                scores = query[i] @ seen.T * (SCALE / np.log2(np.e))
                p = cp.exp(scores - scores.max(-1, keepdims=True))
                truth = p @ seen[:, :MLA_LATENT] / p.sum(-1, keepdims=True)
                error += float(((wide(cp.asarray(got[i])).astype(cp.float64) - truth) ** 2).sum())
                norm += float((truth**2).sum())
            error = (error / norm) ** 0.5
            assert error < 4e-3, error
            print(f"{context:>7} {rows:>5} {us:7.2f} {error:.1e}", flush=True)
        device.free_all()


def bench_step(device, copy: float, context: int) -> None:
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 32, "vocab_size": 163840}
    config = parse_config({**KIMI_LAYER, **layers})
    weights = place_weights(config, {}, Placed(device))
    model = Bf16Transformer(device, config, weights, Choices(), rows=1, slots=1, capacity=context)
    for cache in model.caches:
        device.write(cache, np.full(cache.shape, 0x3C00, np.uint16))
    rows = Rows(*(device.upload(n, np.array([v], np.int32)) for n, v in (("t", 7), ("p", context - 1), ("s", 0))))

    def step():
        model.forward(rows, context)
        model.head(0, 1)

    step()
    graph = device.capture(step)
    us = median_us(device._stream, graph.replay, 1)
    launch, calls = model.launch, []

    class Recorder(Launcher):
        def __call__(self, name, **values):
            calls.append((name, values))

    model.launch = Recorder(device)
    step()
    model.launch = launch
    alone = {}
    for name in dict.fromkeys(name for name, _ in calls):
        own = [values for called, values in calls if called == name]

        def again(name=name, own=own):
            for _ in range(5):
                for values in own:
                    launch(name, **values)

        alone[name] = (median_us(device._stream, device.capture(again).replay, 5), len(own))
    for name, (time, times) in sorted(alone.items(), key=lambda item: -item[1][0]):
        print(f"  {name:<28} {times:>3} x {time / times:8.2f} us")
    print(f"  all by themselves: {sum(time for time, _ in alone.values()):.0f} us")
    assert np.isfinite(device.read(model.logits)).all()
    c, used = config, 0
    for layer in weights.layers:
        for m in (layer.qkv_a, layer.q_b, layer.w_uk, layer.w_uv, layer.o, layer.gate_up, layer.down):
            used += m.nbytes
        if layer.experts_down is not None:
            share = c.num_experts_per_tok / c.n_routed_experts
            used += share * (layer.experts_gate_up.nbytes + layer.experts_down.nbytes) + layer.router.nbytes
    used += weights.lm_head.nbytes + context * c.latent_dim * 2 * c.num_hidden_layers
    print(
        f"step, 1 dense + 1 MoE layer of 32 experts + lm_head, context {context}: {us:.0f} us for {used / 1e6:.0f} MB: "
        f"{used / us / 1e6 / copy:.0%} of the copy ({graph.launches} launches)",
        flush=True,
    )
    device.free_all()


def main() -> None:
    wanted = SimpleNamespace(
        **{name: not sys.argv[1:] or name in sys.argv[1:] for name in ("matrices", "attention", "step")}
    )
    copy = copy_bandwidth()
    with open_device("gpu") as device:
        print(f"{device.describe()['device']}, copy {copy:.2f} TB/s")
        if wanted.matrices:
            bench_matrices(device, copy)
        if wanted.attention:
            bench_attention(device, copy)
        if wanted.step:
            for context in (512, 8192):
                bench_step(device, copy, context)
    print(f"copy at the end {copy_bandwidth():.2f} TB/s")


if __name__ == "__main__":
    main()

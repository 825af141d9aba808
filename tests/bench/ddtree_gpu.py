"""Speed of the DDTree kernels on an NVIDIA GPU: marginals, tree, compaction, and a whole round's host time.

    python tests/bench/ddtree_gpu.py [DRAFTER]

Needs CuPy, a GPU, and PyTorch for the reference: torch.topk and logsumexp, a device-to-host copy and Python's heapq, as
the public DDTree code does it. Times are medians; kernels by graphs of eight launches each. DRAFTER is the folder of a
DFlash drafter for fixtures/tiny-kimi (default fixtures/tiny-kimi-dflash).
"""

import heapq
import sys
import time
from pathlib import Path

import cupy as cp
import numpy as np
from exact_gpu import as_cupy, median_us, randomise

from kdtr_cli.engine.devices import open_device
from kdtr_cli.engine.dflash import DFlashDrafter
from kdtr_cli.engine.drafters import Sequence
from kdtr_cli.engine.generate import Request
from kdtr_cli.engine.launch import Launcher
from kdtr_cli.engine.rounds import _Running, _Session
from kdtr_cli.engine.transformer import Transformer
from kdtr_cli.engine.weights import upload_weights
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.dflash import open_drafter
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.source import open_model
from kdtr_cli.model.tokenizer import load_tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures"
VOCAB, HORIZON, BUDGET = 163840, 7, 64  # Kimi's vocabulary, a block of 8
COPIES = 8


def heap_tree(top_ids, logps, budget: int) -> list[tuple[int, int]]:
    """The public code's build: a heap of (-score, ranks, parent, depth, rank, score), float64 scores."""
    depth_count, width = logps.shape
    heap = [(-float(logps[0][0]), (0,), 0, 1, 0, float(logps[0][0]))]
    nodes = []
    while heap and len(nodes) < budget:
        _, ranks, parent, depth, rank, score = heapq.heappop(heap)
        nodes.append((int(top_ids[depth - 1][rank]), parent))
        if rank + 1 < width:
            next_score = score - float(logps[depth - 1][rank]) + float(logps[depth - 1][rank + 1])
            heapq.heappush(heap, (-next_score, (*ranks[:-1], rank + 1), parent, depth, rank + 1, next_score))
        if depth < depth_count:
            child = score + float(logps[depth][0])
            heapq.heappush(heap, (-child, (*ranks, 0), len(nodes), depth + 1, 0, child))
    return nodes


def python_us(logits) -> tuple[float, list]:
    """Median of torch.topk, logsumexp, the copy to the host, and the heap."""
    import torch

    x = torch.as_tensor(logits, device="cuda")
    times, nodes = [], []
    for _ in range(30):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        values, ids = torch.topk(x, BUDGET, dim=-1)
        logps = (values - torch.logsumexp(x, dim=-1, keepdim=True)).cpu().numpy()
        nodes = heap_tree(ids.cpu().numpy(), logps, BUDGET)
        times.append((time.perf_counter() - begin) * 1e6)
    return float(np.median(times)), nodes


def bench_builder(device) -> None:
    launch = Launcher(device)
    names = ["topk_parts", "topk_final", "build_tree"]
    launch.load(names)
    i32, nodes, block = np.int32, BUDGET + 1, HORIZON + 1
    logits = device.alloc("logits", (HORIZON, VOCAB), np.float32)
    randomise(device, logits, 3.0)
    parts = -(-VOCAB // 8192)
    keys = device.alloc("keys", (HORIZON, parts, BUDGET), np.uint64)
    sums = device.alloc("sums", (HORIZON, parts), np.float32)
    bad = device.upload("bad", np.zeros(HORIZON, i32))
    ids, logps = device.alloc("ids", (HORIZON, BUDGET), i32), device.alloc("logps", (HORIZON, BUDGET), np.float32)
    found = {"sums": sums, "arrived": device.upload("arrived", np.zeros(HORIZON, i32)), "ids": ids, "logps": logps}
    starts, roots = device.upload("starts", np.array([1000], i32)), device.upload("roots", np.array([5], i32))
    out = {
        name: device.alloc(name, (nodes,), i32)
        for name in ("tokens", "parents", "depths", "positions", "places", "slots", "tree_starts")
    }
    out |= {"scores": device.alloc("scores", (nodes,), np.float64), "paths": device.alloc("paths", (nodes, block), i32)}
    out |= {"visible": device.alloc("visible", (nodes, 3), np.uint32), "n_nodes": device.upload("n", np.zeros(1, i32))}
    out |= {"bad": device.upload("bad_tree", np.zeros(1, i32)), "ids": ids, "logps": logps}
    size = {"rows": HORIZON, "vocab": VOCAB, "k": BUDGET}

    def marginals() -> None:
        launch("topk_parts", logits=logits, keys=keys, bad=bad, **size)
        launch("topk_final", logits=logits, keys=keys, **found, **size)

    def tree(budget: int = BUDGET) -> None:
        limit = {"horizon": HORIZON, "k": BUDGET, "budget": budget, "last_position": 1 << 20, "batch": 1}
        launch("build_tree", counts=None, starts=starts, roots=roots, **limit, **out)

    def timed(*work) -> float:
        graph = device.capture(lambda: [w() for _ in range(COPIES) for w in work])
        return median_us(device._stream, graph.replay, COPIES)

    both, alone, first = timed(marginals, tree), timed(tree), timed(marginals)
    by_budget = ", ".join(f"{n} nodes {timed(lambda n=n: tree(n)):.1f}" for n in (1, 8, 16, 32))
    print(f"  build_tree, us: {by_budget}")
    for name, own in (
        ("topk_parts", {"bad": bad}),
        ("topk_final", found),
    ):
        us = timed(lambda n=name, o=own: launch(n, logits=logits, keys=keys, **o, **size))
        print(f"  {name}: {us:.1f} us")
    python, nodes_python = python_us(as_cupy(logits))
    got = list(zip(device.read(out["tokens"])[1:].tolist(), device.read(out["parents"])[1:].tolist(), strict=True))
    assert got == nodes_python, "the tree differs from the public algorithm's"
    print(
        f"builder, {HORIZON} x {VOCAB}, {BUDGET} nodes: tree {alone:.1f} us, marginals {first:.1f} us, "
        f"both {both:.1f} us; "
        f"torch + copy + heapq {python:.0f} us = {python / both:.1f} x"
    )
    device.free_all()


def bench_compaction(device) -> None:
    launch = Launcher(device)
    launch.load(["compact_cache"])
    layers, width, capacity, count = 61, 576, 1024, 16
    cache = device.alloc("cache", (layers, 1, capacity, width), np.float32)
    randomise(device, cache)
    way = np.arange(count, dtype=np.int32) * 3
    way[0] = 0
    args = {
        "cache": cache,
        "starts": device.upload("starts", np.array([900], np.int32)),
        "accepted": device.upload("accepted", way),
        "n_accepted": device.upload("n", np.array([count], np.int32)),
    }
    size = {"layers": layers, "sequences": 1, "capacity": capacity, "width": width, "horizon": count - 1, "batch": 1}
    graph = device.capture(lambda: [launch("compact_cache", **args, **size) for _ in range(COPIES)])
    us = median_us(device._stream, graph.replay, COPIES)
    moved = 2 * layers * width * 4 * (count - 1)
    print(f"compaction of {count} rows x {layers} layers x {width}: {us:.1f} us, {moved / 1e6:.2f} MB")
    device.free_all()


def bench_round(device, drafter: str, budget: int = 16) -> None:
    model = open_model(str(FIXTURES / "tiny-kimi"))
    opened = open_drafter(drafter, model.config)
    text = (FIXTURES / "train" / "pack.py").read_text()[:600]
    ids = np.array(load_tokenizer(model.folder).encode(text), np.int32)
    steps = 400
    weights = upload_weights(device, model.config, model.weights)
    rows = max(64, budget + 1)
    size = {"rows": rows, "slots": 1, "capacity": len(ids) + steps + budget + 16}
    target = Transformer(device, model.config, weights, Choices(), **size)
    horizon = opened.config.horizon
    device_drafter = DFlashDrafter(device, target, opened, 1, horizon, budget, budget + 1)
    session = _Session(target, device_drafter, Decoding(steps), batch=1, budget=budget, prefill=64)
    sequence = _Running(0, Request(Prompt("0", ids, 0)), steps, model.config.vocab_size)
    session.start(0, sequence, Sequence(ids, 0), False)
    for _ in range(5):
        session.step(None)
    rounds, host = 40, []
    for _ in range(rounds):
        device.synchronize()
        begin = time.perf_counter()
        session.graph.replay()
        launched = time.perf_counter()
        device.synchronize()
        done = time.perf_counter()
        session._read_report()
        read = time.perf_counter()
        host.append((launched - begin + read - done, done - begin))
    host_us, round_us = (float(np.median([h[i] for h in host])) * 1e6 for i in (0, 1))
    print(
        f"round of tiny-kimi with DFlash, budget {budget}: one graph of {session.graph.launches} launches, "
        f"{round_us:.0f} us; host: launch and read {host_us:.0f} us"
    )
    device.free_all()


def main() -> None:
    drafter = sys.argv[1] if len(sys.argv) > 1 else str(FIXTURES / "tiny-kimi-dflash")
    with open_device("gpu") as device:
        print(device.describe()["device"])
        bench_builder(device)
        bench_compaction(device)
        bench_round(device, drafter)
    cp.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()

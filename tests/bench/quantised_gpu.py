"""Packed weights on an NVIDIA GPU: bits and speed of the int4, fp8, fp16, bf16 and float32 kernels at Kimi-K2's sizes.

    python tests/bench/quantised_gpu.py [check] [dense] [experts] [step] [registers]

Needs CuPy and a GPU with about 60 GB; all parts take some minutes, most of it compiling. What the parts print:

check      `kdtr kernels test` for every kernel that reads weights: elements that differ from the NumPy twins, wanted 0.
registers  registers, shared and spilled bytes of a thread, for each of these kernels: spills cost speed.
dense      y = x W^T: microseconds of the kernel that the engine would choose, the median of graph replays over rotated
           matrices; `share` is the bytes of weights, x and y by time, as a share of the copy bandwidth measured in this
           run; `of f32` how many times as fast as the float32 kernel; `others` the other variants.
experts    the same for 8 of 384 experts a row (gate over up, and down), over four sets of experts.
step       a decode step of one whole layer, as `exact_gpu.py step` has it: all float32, all bf16, int4 experts in a
           bf16 layer (K2.6), all fp8 (DeepSeek-V3).

Before timing, each product is compared bit for bit with the float32 kernel over the float32 values of the same weights,
which CuPy works out by itself. The exit code is 1 if any bit differed or a part failed; other parts run all the same.
"""

import re
import sys
import traceback
from functools import partial
from types import SimpleNamespace

import cupy as cp
import numpy as np
from exact_gpu import bench_step, copy_bandwidth, median_us
from random_weights import RandomWeights, as_cupy, float32_values, randomise

from kdtr_cli.engine.devices import open_device
from kdtr_cli.engine.kernels import FORMS, KERNELS, expert_matmul, matmul, most_tiles
from kdtr_cli.engine.launch import Launcher
from kdtr_cli.workflows.kernels import check_kernels

PARTS = ("check", "registers", "dense", "experts", "step")
DENSE = (("gate over up", 4096, 7168), ("down", 7168, 2048), ("dense gate over up", 36864, 7168))
EXPERTS, SLOTS = 384, 8
EXPERT_MATRICES = (("gate over up", 4096, 7168, SLOTS), ("down", 7168, 2048, 1))
ROWS = (1, 4, 16)
SETS = 4  # of experts, so that none is found in the second-level cache
ROTATED_BYTES = 4e8

STEPS = (
    ("all float32", lambda name: "f32"),
    ("all bf16", lambda name: "bf16"),
    ("int4 experts, else bf16", lambda name: "int4" if ".experts." in name else "bf16"),
    ("all fp8", lambda name: "bf16" if name in ("embed", "lm_head") or name.endswith("router") else "fp8"),
)


def readers() -> list[str]:
    """Every kernel that reads weights."""
    return [name for name in KERNELS if name.startswith(("matmul_", "expert_matmul_", "embed"))]


def same_bits(a, b) -> bool:
    return bool((a.view(cp.uint32) == b.view(cp.uint32)).all())


def check(device) -> None:
    differing = compared = cases = 0
    for result in check_kernels(device, [KERNELS[name] for name in readers()]):
        cases, compared, differing = cases + 1, compared + result.compared, differing + result.differing
        if result.differing:
            print(f"  DIFFERS {result.kernel} ({result.label}): {result.differing} elements, {result.first}")
    print(f"check: {differing} of {compared:,} elements differ over {len(readers())} kernels and {cases} cases")
    assert differing == 0, "kernels differ from their twins"


def registers(device) -> None:
    print(f"{'kernel':<34} registers  shared  spilled")
    for name in readers():
        a = device.kernel(KERNELS[name].file, name).attributes()
        print(f"{name:<34} {a['registers']:>9} {a['shared_bytes']:>7} {a['local_bytes']:>8}")


def time_of(device, work, pieces: int) -> float:
    graph = device.capture(work)
    return median_us(device._stream, graph.replay, pieces)


# ---- dense -----------------------------------------------------------------------------------------------------------


def dense(device, copy: float, weights: RandomWeights) -> None:
    launch = Launcher(device)
    launch.load([name for name in readers() if name.startswith("matmul_")])
    print(f"{'matrix':<20}{'n':>6}{'k':>6}  form rows  {'variant':<14}     us   share of copy  of f32   others (us)")
    for label, n, k in DENSE:
        plain: dict[int, float] = {}
        for form in FORMS:
            first = weights.random("w", (n, k), form)
            count = max(2, min(16, int(ROTATED_BYTES / first.nbytes) + 1))
            matrices = [first, *(weights.random("w", (n, k), form) for _ in range(count - 1))]
            wide = float32_values(matrices[-1])
            reference = device.alloc("wide", (n, k), np.float32)
            device.synchronize()
            as_cupy(reference)[:] = wide
            cp.cuda.runtime.deviceSynchronize()
            for rows in ROWS:
                x, y = device.alloc("x", (rows, k), np.float32), device.alloc("y", (rows, n), np.float32)
                randomise(device, x)
                size = {"rows": rows, "n": n, "k": k, "heads": 1, "x_row": k, "y_row": n}
                size |= {"x_head": 0, "w_head": 0, "y_head": 0, "bias": None, "residual": None}
                launch(matmul("gpu", rows, n, k), x=x, w=reference, y=y, **size)
                wanted = cp.asarray(device.read(y))
                times = {}
                for name in (m for m in KERNELS if KERNELS[m].twin == f"matmul_{form}".removesuffix("_f32")):
                    of_rows = int(re.search(r"_m(\d+)_", name)[1])
                    if of_rows > max(4, rows) or rows > 4 * of_rows:
                        continue
                    launch(name, x=x, y=y, **matrices[-1].arguments, **size)
                    assert same_bits(cp.asarray(device.read(y)), wanted), f"{name} differs from the float32 kernel"
                    work = partial(_products, launch, name, matrices, x, y, size)
                    times[name] = time_of(device, work, count)
                chosen = matmul("gpu", rows, n, k, form)
                us = times[chosen]
                plain.setdefault(rows, us)
                share = (first.nbytes + 4 * rows * (n + k)) / us / 1e6 / copy
                short = {name: re.search(r"w\d_m.*", name)[0] for name in times}
                others = " ".join(f"{short[m]}={times[m]:.1f}" for m in sorted(times, key=times.get) if m != chosen)
                faster = " <- a faster one" if min(times.values()) < 0.97 * us else ""
                print(
                    f"{label:<20}{n:>6}{k:>6}  {form:>4} {rows:>4}  {short[chosen]:<14}{us:>7.1f} {share:>14.0%} "
                    f"{plain[rows] / us:>8.2f}  {others}{faster}",
                    flush=True,
                )
            device.free_all()
            cp.get_default_memory_pool().free_all_blocks()


def _products(launch, name: str, matrices: list, x, y, size: dict) -> None:
    for matrix in matrices:
        launch(name, x=x, y=y, **matrix.arguments, **size)


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts(device, copy: float, weights: RandomWeights) -> None:
    launch = Launcher(device)
    launch.load(["group_experts", *(name for name in readers() if "matmul_" in name)])
    rng = np.random.default_rng(0)
    print(
        f"{'matrix':<14}{'n':>6}{'k':>6}  form rows  touched  {'variant':<10}"
        "     us   share of copy  of f32   others (us)"
    )
    for label, n, k, a_row in EXPERT_MATRICES:
        plain: dict[int, float] = {}
        for form in FORMS:
            matrix = weights.random("experts", (EXPERTS, n, k), form)
            for rows in ROWS:
                items, tile = rows * SLOTS, 1 if rows == 1 else 4
                places = most_tiles(items, EXPERTS, tile)
                x = device.alloc("x", (items // a_row, k), np.float32)
                y = device.alloc("y", (items, n), np.float32)
                randomise(device, x)
                sets = []
                order = rng.permutation(EXPERTS)  # for one row the sets share no expert
                for s in range(SETS):
                    chosen = [
                        order[s * SLOTS : (s + 1) * SLOTS],
                        *(rng.permutation(EXPERTS)[:SLOTS] for _ in range(rows - 1)),
                    ]
                    ids = np.concatenate(chosen).astype(np.int32)
                    lists = {
                        "items": device.alloc("items", (items,), np.int32),
                        "tiles": device.alloc("tiles", (places, 3), np.int32),
                        "tile_count": device.alloc("tile_count", (1,), np.int32),
                    }
                    size = {"item_count": items, "experts": EXPERTS, "tile": tile}
                    launch("group_experts", ids=device.upload("ids", ids), **lists, **size)
                    sets.append((ids, lists))
                size = {"n": n, "k": k, "items_a_row": a_row, "tile_places": places}
                times, bits = {}, None
                for name in (m for m in KERNELS if KERNELS[m].twin == f"expert_matmul_{form}".removesuffix("_f32")):
                    if ("_m1_" in name) != (tile == 1):
                        continue
                    launch(name, x=x, y=y, **matrix.arguments, **size, **sets[0][1])
                    got = device.read(y)
                    if bits is None:
                        bits = got
                        _check_experts(device, launch, matrix, x, sets[0][0], a_row, got)
                    assert np.array_equal(bits.view(np.uint32), got.view(np.uint32)), f"{name} has other bits"
                    work = partial(_expert_products, launch, name, matrix, x, y, size, sets)
                    times[name] = time_of(device, work, SETS)
                name = expert_matmul("gpu", tile, k, form)
                us = times[name]
                plain.setdefault(rows, us)
                touched = float(np.mean([len(set(ids.tolist())) for ids, _ in sets]))
                share = (matrix.nbytes / EXPERTS * touched + 4 * items * (n + k)) / us / 1e6 / copy
                short = {m: re.search(r"w\d_m.*", m)[0] for m in times}
                others = " ".join(f"{short[m]}={times[m]:.1f}" for m in sorted(times, key=times.get) if m != name)
                faster = " <- a faster one" if min(times.values()) < 0.97 * us else ""
                print(
                    f"{label:<14}{n:>6}{k:>6}  {form:>4} {rows:>4} {touched:>8.1f}  {short[name]:<10}"
                    f"{us:>7.1f} {share:>14.0%} {plain[rows] / us:>8.2f}  {others}{faster}",
                    flush=True,
                )
            device.free_all()
            cp.get_default_memory_pool().free_all_blocks()


def _expert_products(launch, name: str, matrix, x, y, size: dict, sets: list) -> None:
    for _, lists in sets:
        launch(name, x=x, y=y, **matrix.arguments, **size, **lists)


def _check_experts(device, launch, matrix, x, ids: np.ndarray, a_row: int, got: np.ndarray) -> None:
    """Every item of a few experts against the dense float32 kernel over that expert's float32 values."""
    n, k = matrix.shape[1:]
    rows = x.shape[0]
    wide, y = device.alloc("wide", (n, k), np.float32), device.alloc("wanted", (rows, n), np.float32)
    for expert in sorted(set(ids.tolist()))[:8]:
        device.synchronize()
        as_cupy(wide)[:] = float32_values(matrix, expert)
        cp.cuda.runtime.deviceSynchronize()
        size = {"rows": rows, "n": n, "k": k, "heads": 1, "x_row": k, "y_row": n, "x_head": 0, "w_head": 0, "y_head": 0}
        launch("matmul_w4_m1_r4", x=x, w=wide, y=y, bias=None, residual=None, **size)
        wanted = device.read(y)
        for item in np.flatnonzero(ids == expert):
            same = np.array_equal(got[item].view(np.uint32), wanted[item // a_row].view(np.uint32))
            assert same, f"{matrix.form}: item {item} of expert {expert} differs from the float32 kernel"


# ---- all -------------------------------------------------------------------------------------------------------------


def step(device, copy: float) -> None:
    for label, form_of in STEPS:
        bench_step(device, copy, 1024, label, RandomWeights(device, form_of))
        device.free_all()
        cp.get_default_memory_pool().free_all_blocks()


def main() -> int:
    wanted = sys.argv[1:] or PARTS
    if unknown := set(wanted) - set(PARTS):
        print(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
        return 2
    failed = []
    with open_device("gpu") as device:
        print(SimpleNamespace(**device.describe()))
        copy = copy_bandwidth()
        cp.get_default_memory_pool().free_all_blocks()
        print(f"copy {copy:.3f} TB/s")
        work = {
            "check": lambda: check(device),
            "registers": lambda: registers(device),
            "dense": lambda: dense(device, copy, RandomWeights(device)),
            "experts": lambda: experts(device, copy, RandomWeights(device)),
            "step": lambda: step(device, copy),
        }
        for part in PARTS:
            if part not in wanted:
                continue
            print(f"\n== {part}", flush=True)
            try:
                work[part]()
            except Exception:
                traceback.print_exc(file=sys.stdout)
                failed.append(part)
            device.free_all()
            cp.get_default_memory_pool().free_all_blocks()
        print(f"\ncopy {copy_bandwidth():.3f} TB/s (again)")
    print(f"FAILED: {', '.join(failed)}" if failed else "all parts ran, every bit as wanted")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

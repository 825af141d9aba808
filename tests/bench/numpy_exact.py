"""Speed of the NumPy contract: multiply-adds a second of `linear` on one 2048 x 7168 matrix, and against plain BLAS.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python tests/bench/numpy_exact.py

The packed form is what a model keeps; the plain one packs on the way, as a first use does.
"""

import time

import numpy as np

from kdtr_cli.reference.arith import linear, pack


def best_seconds(work, repeats: int = 7) -> float:
    """Best of several runs: the machine's noise only ever adds."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((2048, 7168), np.float32)
    packed = pack(w)
    for rows in (1, 16):
        x = rng.standard_normal((rows, 7168), np.float32)
        seconds = {
            "packed": best_seconds(lambda x=x: linear(x, packed)),
            "plain": best_seconds(lambda x=x: linear(x, w)),
        }
        blas = best_seconds(lambda x=x: x @ w.T)
        for name, s in seconds.items():
            print(
                f"{rows:>2} rows, {name}: {rows * w.size / s:.2e} multiply-adds a second, {s / blas:.1f} x BLAS's time"
            )


if __name__ == "__main__":
    main()

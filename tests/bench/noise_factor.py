"""How far right engines lie from a golden, in noise floors of it: what the factors of `--tolerance auto` rest on.

    python tests/bench/noise_factor.py [MODEL...] [--goldens N] [--sequences S]

Each engine is the NumPy model with other sums, or with its bf16 roundings elsewhere, fed the golden's tokens. For
float32 the reference is `exact`, for bf16 `float64`. Per engine: the median and the largest ratio over the goldens, of
max |a - b| and of the square root of max KL, and how many goldens keep both within 2, 3, 4 and 8.
"""

import argparse
from types import ModuleType

import numpy as np

from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.source import open_model
from kdtr_cli.parity.floor import measure_floor
from kdtr_cli.reference import bf16, exact, float32, float64
from kdtr_cli.reference.generate import generate, score_group
from kdtr_cli.reference.transformer import Model
from kdtr_cli.workflows.prompts import random_prompt

MODELS = ["tiny", "tiny-groups", "tiny-v2", "odd", "fixtures/tiny-kimi", "fixtures/tiny-kimi-int4"]
MODELS += ["fixtures/tiny-kimi-fp8"]
STEPS = 24


def variant(base: ModuleType, **other: object) -> ModuleType:
    """An arithmetic with some operations replaced."""
    made = ModuleType("variant")
    made.__dict__.update({name: getattr(base, name) for name in (*base.__all__, "SHARED_PARTS")} | other)
    return made


def reversed_sums(x: np.ndarray, w: np.ndarray, bias: None = None) -> np.ndarray:
    return float32.linear(np.ascontiguousarray(x[:, ::-1]), np.ascontiguousarray(w[:, ::-1]))


def tiled_sums(x: np.ndarray, w: np.ndarray, bias: None = None) -> np.ndarray:
    y = np.zeros((len(x), len(w)), np.float32)
    for k in range(0, x.shape[1], 16):
        y += x[:, k : k + 16] @ w[:, k : k + 16].T
    return y


def running_sums(x: np.ndarray, w: np.ndarray, bias: None = None) -> np.ndarray:
    y = np.zeros((len(x), len(w)), np.float32)
    for k in range(x.shape[1]):
        y += x[:, k, None] * w[None, :, k]
    return y


def norm_twice(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return bf16.stored(bf16.stored(float32.rms_norm(x, np.ones_like(weight), eps)) * weight)


def swiglu_twice(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return bf16.stored(bf16.stored(gate * bf16.sigmoid(gate)) * up)


def attend_unrounded(*args: object) -> np.ndarray:
    return bf16.stored(float32.attend(*args))


ENGINES = {
    "exact": {
        "float32, BLAS": float32,
        "float32, reversed": variant(float32, linear=reversed_sums),
        "float32, tiles of 16": variant(float32, linear=tiled_sums),
        "float32, one running sum": variant(float32, linear=running_sums),
    },
    "bf16": {
        "bf16, tiles of 16": variant(bf16, linear=tiled_sums),
        "bf16, one running sum": variant(bf16, linear=running_sums),
        "bf16, rounded elsewhere": variant(bf16, attend=attend_unrounded, rms_norm=norm_twice, swiglu=swiglu_twice),
    },
}


def ratios(name: str, seed: int, sequences: int) -> dict[str, tuple[float, float]]:
    """One golden: by engine, the ratio of max abs and of the square root of max KL."""
    opened = open_model(name)
    vocab = opened.config.vocab_size
    length = (1, 8, 16)[seed % 3]
    ids = [random_prompt(1000 * seed + i, length, vocab, 0) for i in range(sequences)]
    prompts = [Prompt(str(i), one, i) for i, one in enumerate(ids)]

    def model(ops: ModuleType) -> Model:
        return Model(opened.config, opened.weights, Choices(), length + STEPS, ops)

    made = generate(model(exact), prompts, Decoding(STEPS, ignore_eos=True))
    tokens = [one.tokens for one in made]

    def along(ops: ModuleType) -> np.ndarray:
        return np.concatenate([own for _, own in score_group(model(ops), prompts, tokens)])

    truth, ours = along(float64), np.concatenate([one.logits for one in made])
    found = {}
    for floor, reference, logits in (("exact", ours.astype(np.float64), ours), ("bf16", truth, along(bf16))):
        noise = measure_floor(logits, truth)
        for engine, ops in ENGINES[floor].items():
            apart = measure_floor(along(ops), reference)
            found[engine] = (apart.max_abs / noise.max_abs, (apart.max_kl / noise.max_kl) ** 0.5)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--goldens", type=int, default=12)
    parser.add_argument("--sequences", type=int, default=8)
    asked = parser.parse_args()
    print(f"{'model':<24}{'engine':<26}{'max abs':>16}{'sqrt max KL':>16}   <= 2, 3, 4, 8 of {asked.goldens}")
    for name in asked.models:
        every = [ratios(name, seed, asked.sequences) for seed in range(asked.goldens)]
        for engine in every[0]:
            values = np.array([one[engine] for one in every])
            shown = "".join(f"{np.median(v):>8.2f}{v.max():>8.2f}" for v in values.T)
            kept = [int((values.max(axis=1) <= k).sum()) for k in (2, 3, 4, 8)]
            print(f"{name:<24}{engine:<26}{shown}   {kept}", flush=True)


if __name__ == "__main__":
    main()

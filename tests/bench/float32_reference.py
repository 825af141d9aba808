"""The float32 reference against transformers on torch CPU: prefill and decoding of a model of real widths, in one run.

    kdtr model new deepseek-v2-lite --layers 2 -o DIR
    OMP_NUM_THREADS=2 OPENBLAS_NUM_THREADS=2 python tests/bench/float32_reference.py DIR

Both sides take float32 weights, the same prompts and two threads; transformers runs eager attention with its cache.
Sides take turns; a figure is the best of the turns. The largest difference of the logits and the tokens are printed
too: a fast answer that is wrong would be worth nothing.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from kdtr_cli.model.choices import Choices
from kdtr_cli.model.source import open_model
from kdtr_cli.reference import float32
from kdtr_cli.reference.transformer import Model, Rows
from kdtr_cli.workflows.prompts import random_prompt

Step = tuple[float, list[float], np.ndarray, np.ndarray]


def ours(model: Model, prompts: np.ndarray, steps: int) -> Step:
    """Seconds of prefill and of each step, logits of the prompts' ends, and tokens [batch, steps + 1]."""
    batch, length = prompts.shape
    cache = model.cache([length + steps] * batch)
    slots = np.repeat(np.arange(batch, dtype=np.int32), length)
    positions = np.tile(np.arange(length, dtype=np.int32), batch)
    begun = time.perf_counter()
    hidden = model.forward(Rows(prompts.reshape(-1), slots, positions), cache)
    first = logits = model.logits(hidden[length - 1 :: length])
    prefill, taken = time.perf_counter() - begun, []
    tokens = [logits.argmax(-1).astype(np.int32)]
    for step in range(steps):
        begun = time.perf_counter()
        rows = Rows(tokens[-1], np.arange(batch, dtype=np.int32), np.full(batch, length + step, np.int32))
        tokens.append(model.logits(model.forward(rows, cache)).argmax(-1).astype(np.int32))
        taken.append(time.perf_counter() - begun)
    return prefill, taken, first, np.stack(tokens, 1)


@torch.inference_mode()
def theirs(model: torch.nn.Module, prompts: np.ndarray, steps: int) -> Step:
    """The same of transformers."""
    ids = torch.from_numpy(prompts.astype(np.int64))
    begun = time.perf_counter()
    out = model(ids, use_cache=True, logits_to_keep=1)
    first = out.logits[:, -1]
    prefill, taken = time.perf_counter() - begun, []
    tokens = [first.argmax(-1)]
    for _ in range(steps):
        begun = time.perf_counter()
        out = model(tokens[-1][:, None], cache=out.past_key_values, use_cache=True)
        tokens.append(out.logits[:, -1].argmax(-1))
        taken.append(time.perf_counter() - begun)
    return prefill, taken, first.numpy(), torch.stack(tokens, 1).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="*", default=(1, 8))
    parser.add_argument("--length", type=int, default=128)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    opened = open_model(given.folder)
    mine = Model(opened.config, opened.weights, Choices(), given.length + given.steps, float32)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        given.folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    print(f"numpy {np.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
    for batch in given.batch:
        prompts = np.stack([random_prompt(i, given.length, opened.config.vocab_size, 0) for i in range(batch)])
        turns: tuple[list[Step], list[Step]] = [], []
        ours(mine, prompts, 2), theirs(other, prompts, 2)  # weights are packed when first used
        for _ in range(given.turns):
            turns[0].append(ours(mine, prompts, given.steps))
            turns[1].append(theirs(other, prompts, given.steps))
        prefill = [min(turn[0] for turn in side) for side in turns]
        decode = [min(min(turn[1]) for turn in side) for side in turns]
        mean = [min(sum(turn[1]) for turn in side) / given.steps for side in turns]
        apart = np.abs(turns[0][0][2] - turns[1][0][2]).max() / np.abs(turns[1][0][2]).max()
        equal = (turns[0][0][3] == turns[1][0][3]).mean()
        for what, (a, b) in (("prefill", prefill), ("fastest step", decode), ("mean step", mean)):
            print(f"batch {batch} {what}: ours {1e3 * a:.1f} ms, transformers {1e3 * b:.1f} ms, ratio {b / a:.2f}")
        print(f"batch {batch}: logits apart by {apart:.1e} of the largest, tokens equal {equal:.0%}", flush=True)


if __name__ == "__main__":
    main()

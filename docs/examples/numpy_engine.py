"""An engine for `kdtr run --engine`, complete: kdtr's own NumPy model behind the contract of docs/engines.md.

    kdtr run golden.h5 -o run.h5 --engine command:"python numpy_engine.py {inputs} {out} {model}"

Put your engine in the place of `generate`. It decodes greedily or samples as the inputs say, and answers everything
that can be answered; a diff against a golden of tier exact says IDENTICAL.
"""

import json
import sys

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.source import open_model
from kdtr_cli.reference import exact
from kdtr_cli.reference.generate import generate
from kdtr_cli.reference.transformer import Model


def main(inputs: str, out: str, folder: str) -> None:
    with safe_open(inputs, "np") as file:
        said = file.metadata()
        ids, offsets = file.get_tensor("prompts/ids"), file.get_tensor("prompts/offsets")
        streams = file.get_tensor("streams")
    assert said["schema"] == "kdtr.inputs/1"
    assert said["teacher_forced"] == "false", "this example decodes freely"
    names = json.loads(said["sequence_ids"])
    prompts = [
        Prompt(name, ids[low:high], int(stream))
        for name, low, high, stream in zip(names, offsets[:-1], offsets[1:], streams, strict=True)
    ]
    decoding = Decoding(
        steps=int(said["steps"]),
        stop_ids=tuple(map(int, said["stop_ids"].split())),
        ignore_eos=said["ignore_eos"] == "true",
        temperature=float(said["temperature"]),
        seed=int(said["seed"]),
    )
    choices = json.loads(said["choices"])
    opened = open_model(folder)
    positions = max(len(prompt.ids) for prompt in prompts) + decoding.steps - 1
    model = Model(
        opened.config,
        opened.weights,
        Choices(choices["latent_norm_eps"], choices["rope_angles"]),
        positions,
        exact,
    )
    results = generate(model, prompts, decoding, keep_prompt_logits=said["score"] == "true")

    lengths = [len(result.tokens) for result in results]
    answer = {
        "tokens/ids": np.concatenate([result.tokens for result in results]).astype(np.int32),
        "tokens/offsets": np.cumsum([0, *lengths], dtype=np.int64),
        "finish": np.array([result.finish_reason == "stop" for result in results], np.int32),
        "logits": np.concatenate([result.logits for result in results]),
    }
    if said["score"] == "true":
        answer["prompt_logits"] = np.concatenate([result.prompt_logits for result in results])
    about = {"name": "numpy example", "weights_used_sha256": opened.weights.digests().used}
    save_file(answer, out, {"about": json.dumps(about)})


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The engine ``hf``: Hugging Face transformers, on the CPU or on a GPU that PyTorch has.

An implementation that shares nothing with kdtr's but the folder: full float32 logits of every step, so that a golden
can be held against it, or it against another run. The digest of the weights is taken from the model that is in
memory, after transformers has stacked and converted them, not from the files.
"""

import inspect
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from kdtr_cli.errors import EngineError, InputError
from kdtr_cli.model.config import ModelConfig, load_config
from kdtr_cli.model.fields import shown
from kdtr_cli.model.prompts import Prompt
from kdtr_cli.model.weights import Weights
from kdtr_cli.reference.sampling import choose
from kdtr_cli.workflows.engine_logprobs import finish_of
from kdtr_cli.workflows.engines import Answer, AnswerSequence, Question

__all__ = ["hf"]

_DTYPES = {"exact": "float32", "bf16": "bfloat16", "fp16": "float16"}  # of a tier
_V2 = "deepseek_v2"
_V3 = ("deepseek_v3", "kimi_k2")


def hf(argument: str, question: Question) -> Answer:
    """Run the model folder ``argument``, or where that is empty the one that the question names.

    InputError: transformers is not installed, no such folder, a model that it can't take, or choices that are not its.
    """
    end = None if question.timeout is None else time.monotonic() + question.timeout
    torch, transformers = _libraries()
    folder = Path(argument) if argument else question.model
    if folder is None:
        raise InputError("--engine hf: the golden holds no weights; give the folder: hf:DIR")
    config = _check(folder, question)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _load(torch, transformers, folder, config, _DTYPES[question.tier]).to(device)
    about = {
        "name": "transformers",
        "version": transformers.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "compiler": f"torch {torch.__version__}",
        "weights_used_sha256": Weights.from_arrays(_Held(model), config, cache=False).digests().used,
    }
    cache = transformers.DynamicCache
    sequences = (_decode(torch, cache, model, question, i, end) for i in range(len(question.prompts)))
    return Answer("transformers", sequences, about)


def _libraries() -> tuple[ModuleType, ModuleType]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(f"--engine hf needs torch and transformers ({error}); pip install 'kdtr[hf]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return torch, transformers


def _check(folder: Path, question: Question) -> ModelConfig:
    """The folder's config, where it is the golden's and one of those that transformers computes as the golden did."""
    if not folder.is_dir():
        raise InputError(f"--engine hf:{folder}: not a folder; give one with config.json and *.safetensors")
    config, text = load_config(folder)
    if text != question.config_text:
        raise InputError(f"--engine hf: config.json of {folder} is not that of the golden, or of --model")
    kind = json.loads(text).get("model_type")
    if config.quantisation is not None or kind not in (_V2, *_V3):
        what = "it is quantised" if config.quantisation is not None else f"its model_type is {shown(kind)}"
        raise InputError(
            f"--engine hf: {folder} must be an unquantised {_V2}, {' or '.join(_V3)}; {what} "
            "('kdtr model quantize DIR --to bf16' writes another folder, which is another model)"
        )
    if question.tier not in _DTYPES:
        raise InputError(f"--engine hf: it has no tier {question.tier}; there are {', '.join(_DTYPES)}")
    if question.choices.get("rope_angles") != "f32":
        raise InputError(
            "--engine hf: transformers takes rotary angles in float32, the golden in float64: make it with "
            "'kdtr golden --rope-angles f32'"
        )
    if question.choices.get("latent_norm_eps") != "hf":
        raise InputError("--engine hf: transformers has 1e-6 as eps of the latent norms, the golden the config's")
    return config


def _load(torch: ModuleType, transformers: ModuleType, folder: Path, config: ModelConfig, dtype: str) -> Any:
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    family = "DeepseekV2" if kind == _V2 else "DeepseekV3"
    settings = getattr(transformers, f"{family}Config").from_pretrained(folder, local_files_only=True)
    # transformers finds the rule that stacks single experts by this name, and has none for kimi_k2
    settings.model_type = _V2 if kind == _V2 else _V3[0]
    model, report = getattr(transformers, f"{family}ForCausalLM").from_pretrained(
        folder,
        config=settings,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(map(str, report.get(what) or ())):
            raise EngineError(f"transformers could not load {folder.name}: {what} {shown(names[0])}")
    return model.eval()


class _Held(Mapping[str, np.ndarray]):
    """The weights of a model in memory by the names of a checkpoint, as float32, one expert at a time."""

    def __init__(self, model: Any) -> None:
        self._tensors: dict[str, Any] = {}
        state = model.state_dict()
        if model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        for name, tensor in state.items():
            if name.endswith(".experts.gate_up_proj"):  # [E, 2I, H], gate first
                for expert, both in enumerate(tensor):
                    for part, matrix in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                        self._tensors[f"{name.removesuffix('gate_up_proj')}{expert}.{part}.weight"] = matrix
            elif name.endswith(".experts.down_proj"):  # [E, H, I]
                for expert, matrix in enumerate(tensor):
                    self._tensors[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = matrix
            else:
                self._tensors[name] = tensor
        self._last: tuple[str, np.ndarray] | None = None  # asked for block by block

    def __getitem__(self, name: str) -> np.ndarray:
        if self._last is None or self._last[0] != name:
            self._last = name, self._tensors[name].float().cpu().contiguous().numpy()
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _decode(
    torch: ModuleType, cache_type: Any, model: Any, question: Question, index: int, end: float | None
) -> AnswerSequence:
    """One sequence by itself, with transformers' cache: the prompt in one pass, then token by token."""
    prompt, decoding = question.prompts[index], question.decoding
    forced = None if question.forced is None else question.forced[index]
    limit = decoding.steps if forced is None else len(forced)
    tokens: list[int] = []
    logits: list[np.ndarray] = []
    prompt_logits = None
    # renamed in transformers 5.24, where the old name warns
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    feed, cache = prompt.ids, {name: cache_type(config=model.config)}
    with torch.inference_mode():
        while len(tokens) < limit or (not tokens and question.score):
            out = model(
                input_ids=torch.tensor(feed.astype(np.int64)[None], device=model.device),
                use_cache=True,
                logits_to_keep=0 if question.score and prompt_logits is None else 1,
                **cache,
            )
            rows = out.logits[0].float().cpu().numpy()
            if end is not None and time.monotonic() > end:
                raise EngineError(f"transformers took longer than {question.timeout:g} s (--timeout)")
            if question.score and prompt_logits is None:
                prompt_logits = rows
            if len(tokens) == limit:
                break
            token = _next(rows[-1], prompt, len(tokens), question) if forced is None else int(forced[len(tokens)])
            logits.append(rows[-1])
            tokens.append(token)
            feed = np.array([token], np.int32)
            if forced is None and finish_of(tokens, decoding) == "stop":
                break
    held = np.stack(logits) if logits else np.zeros((0, question.vocab), np.float32)
    made = np.array(tokens, np.int64)
    return AnswerSequence(made, finish_of(tokens, decoding), held, prompt_logits=prompt_logits)


def _next(row: np.ndarray, prompt: Prompt, step: int, question: Question) -> int:
    """The token by the golden's own rule, be it greedy or sampled: what is compared is the model."""
    position = np.array([len(prompt.ids) + step])
    decoding = question.decoding
    chosen = choose(
        row[None], position, np.array([prompt.stream]), temperature=decoding.temperature, seed=decoding.seed
    )
    return int(chosen[0])

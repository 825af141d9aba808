"""MODEL on the command line: the name of a preset, or a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path

from kdtr_cli.errors import InputError
from kdtr_cli.model.checkpoint import Checkpoint, open_checkpoint
from kdtr_cli.model.config import ModelConfig, load_config, parse_config
from kdtr_cli.model.presets import PRESETS, new_weights, preset_text
from kdtr_cli.model.published import PUBLISHED
from kdtr_cli.model.weights import Weights

__all__ = ["Model", "open_model"]


@dataclass(frozen=True)
class Model:
    """An opened model. ``config_text`` is the config.json as read; ``folder`` and ``checkpoint`` are None for a preset.

    ``name`` is the preset's name or the folder's last part; never a path, since it may go into a bundle.
    """

    config: ModelConfig
    config_text: str
    weights: Weights
    folder: Path | None
    name: str
    checkpoint: Checkpoint | None = None


def open_model(spec: str | Path, seed: int = 0, cache: bool = True) -> Model:
    """Open a preset (weights made in memory from ``seed``) or a folder (weights read when used).

    A bare preset name is always the preset, whatever lies in the current folder, so that a command means the same
    everywhere; a folder of that name is written ./tiny. InputError for anything else.
    """
    text = str(spec)
    if text in PRESETS and not isinstance(spec, Path):
        config = parse_config(PRESETS[text], where=f"preset {text}")
        weights = Weights.from_arrays(new_weights(config, seed), config, cache)
        return Model(config, preset_text(text), weights, None, text)
    if text in PUBLISHED and not isinstance(spec, Path):
        raise InputError(
            f"MODEL {text!r} is of real size, too large to be made in memory: write it with "
            f"'kdtr model new {text} --layers N --experts M -o DIR' and give DIR"
        )
    folder = Path(spec)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise InputError(
            f"MODEL {text!r} {what}: give a preset ({', '.join(PRESETS)}) or a Hugging Face folder "
            "(config.json and *.safetensors)"
        )
    config, config_text = load_config(folder)
    checkpoint = open_checkpoint(folder, config)
    weights = Weights.from_checkpoint(checkpoint, config, cache)
    return Model(config, config_text, weights, folder, folder.resolve().name, checkpoint)

"""MODEL is a preset or a folder; a preset's name always means the preset."""

import os
from pathlib import Path

import pytest

from kdtr_cli.errors import InputError
from kdtr_cli.model.presets import PRESETS, preset_text, write_model
from kdtr_cli.model.source import open_model

pytestmark = pytest.mark.quick
TINY_KIMI = Path(__file__).parents[2] / "fixtures" / "tiny-kimi"


@pytest.mark.parametrize("name", list(PRESETS))
def test_preset_in_memory_equals_its_folder(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / "m", name)
    memory, folder = open_model(name), open_model(str(tmp_path / "m"))
    assert memory.config == folder.config
    assert memory.config_text == folder.config_text == preset_text(name)
    assert memory.weights.used_sha256() == folder.weights.used_sha256()
    assert (memory.folder, memory.name) == (None, name)
    assert (folder.folder, folder.name) == (tmp_path / "m", "m")


def test_preset_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "tiny", "odd")
    assert open_model("tiny").config.vocab_size == 512
    assert open_model("./tiny").config.vocab_size == 257
    assert open_model(Path("tiny")).config.vocab_size == 257


def test_seed_is_taken() -> None:
    assert open_model("odd", seed=1).weights.used_sha256() != open_model("odd").weights.used_sha256()


def test_name_is_never_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TINY_KIMI)
    for spec in (".", str(TINY_KIMI), f"{TINY_KIMI}{os.sep}"):
        assert open_model(spec).name == "tiny-kimi"


def test_unknown_model_lists_the_presets(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        open_model("tinny")
    for word in ("'tinny'", *PRESETS, "Hugging Face folder"):
        assert word in str(caught.value)
    (tmp_path / "x.gguf").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        open_model(str(tmp_path / "x.gguf"))


def test_weights_are_read_when_used_only() -> None:
    model = open_model(TINY_KIMI)
    assert model.checkpoint is not None
    reads = []
    real = model.checkpoint.stored_rows
    model.checkpoint.stored_rows = lambda name, *rows: reads.append(name) or real(name, *rows)
    model.weights["model.norm.weight"]
    model.weights["model.norm.weight"]
    assert reads == ["model.norm.weight"]

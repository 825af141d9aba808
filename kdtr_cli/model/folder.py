"""A new model folder on disk: it appears complete or not at all, and never replaces what kdtr did not write."""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kdtr_cli.errors import InputError

__all__ = ["TOKENIZER_FILES", "check_place", "new_folder", "write_synced"]

#: what comes with a checkpoint for its text, by name: copied as it is
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
_OWN = {"config.json", "generation_config.json", "model.safetensors.index.json", *TOKENIZER_FILES}
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@contextmanager
def new_folder(folder: Path, force: bool) -> Iterator[Path]:
    """A temporary folder beside the place, to be filled; it takes the place when the block ends well, else it goes.

    An existing path is refused without ``force``; with it, only a folder that holds nothing but a model's files (or
    nothing at all) is replaced. InputError for every refusal and for a place that cannot be written.
    """
    check_place(folder, force)
    temporary = folder.absolute().parent / f".{folder.name}.{secrets.token_hex(4)}.tmp"
    try:
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        if folder.is_dir():
            _replace(folder, temporary)
        else:
            temporary.rename(folder)
        _sync(folder.absolute().parent)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(folder: Path, new: Path) -> None:
    """Two renames: for a moment nothing stands under the name, but never something half-written."""
    old = new.with_suffix(".old")
    folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    shutil.rmtree(old)


def check_place(folder: Path, force: bool) -> None:
    """Whether new_folder may go there, before any work."""
    if folder.name in ("", ".."):
        raise InputError(f"{folder}: name a new folder for the model")
    if not folder.absolute().parent.is_dir():
        raise InputError(f"{folder}: the folder above it does not exist; create it first")
    if not folder.is_symlink() and not folder.exists():
        return
    if not force:
        raise InputError(f"{folder}: already exists; pass --force to replace it")
    if folder.is_symlink() or not folder.is_dir():
        raise InputError(f"{folder}: not a folder; remove it or choose another name")
    foreign = sorted(entry.name for entry in folder.iterdir() if not _own(entry))
    if foreign:
        raise InputError(f"{folder}: holds {foreign[0]}, which `kdtr model` did not write; remove the folder yourself")


def _own(entry: Path) -> bool:
    return entry.is_file() and (entry.name in _OWN or _WEIGHTS.fullmatch(entry.name) is not None)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

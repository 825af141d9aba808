"""Work of an unfinished golden on disk, so that Ctrl-C, a kill or a crash loses little of it.

OUTPUT.partial/ is a folder of files that each appear whole or not at all: ``job.json`` (what the work belongs to),
``digests.json``, ``group-N.npz`` of every finished group, and ``state.npz`` of the one under way. It is removed when
the bundle stands. One process at a time holds it (a lock on the file ``lock``).
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.errors import DeviceError, InputError
from kdtr_cli.model.weights import Digests
from kdtr_cli.reference.generate import Decode, Scoring

__all__ = ["SavedWork", "pack_state", "unpack_state"]

_LEAST_SECONDS = 20.0  # between two saved states
_SHARE = 20  # and at least this many times what the last one took


class SavedWork:
    """The folder of one golden. ``job``: everything that decides its bytes, as JSON values."""

    def __init__(self, output: Path, job: Mapping[str, Any], force: bool) -> None:
        self.folder = output.with_name(output.name + ".partial")
        self._job = json.loads(json.dumps(job))
        self._saved_at = time.monotonic()
        self._took = 0.0
        try:
            if force and self.folder.is_dir():
                shutil.rmtree(self.folder)
            self.folder.mkdir(exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be written ({error.strerror})") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise InputError(f"{self.folder}: another kdtr is at work on this golden") from None
        try:
            self._check_job()
        except BaseException:
            self.close()
            raise

    def _check_job(self) -> None:
        known = self._read_json("job.json")
        if known is None:
            self._write("job.json", lambda path: path.write_text(json.dumps(self._job)))
        elif known != self._job:
            parts = sorted(key for key in self._job.keys() | known.keys() if self._job.get(key) != known.get(key))
            raise InputError(
                f"{self.folder}: holds the unfinished work of another golden (another: {', '.join(parts)}); give the "
                "same options to go on, or --force to start anew"
            )

    @property
    def resumed(self) -> bool:
        """Whether there is work to go on from."""
        return any(self.folder.glob("*.npz")) or (self.folder / "digests.json").exists()

    def digests(self) -> Digests | None:
        """Those of the weights, if they were made."""
        found = self._read_json("digests.json")
        return None if found is None else Digests(found["stored"], found["used"])

    def save_digests(self, digests: Digests) -> None:
        """Keep them."""
        text = json.dumps({"stored": digests.stored, "used": digests.used})
        self._write("digests.json", lambda path: path.write_text(text))

    def group(self, number: int) -> dict[str, np.ndarray] | None:
        """The arrays of a finished group."""
        return self._load(f"group-{number:06d}.npz")

    def save_group(self, number: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep a finished group; the state under way was its own and goes."""
        self._write(f"group-{number:06d}.npz", lambda path: _save(path, arrays))
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "state.npz").unlink()

    def state(self, number: int) -> dict[str, np.ndarray] | None:
        """The arrays of the state under way, if it is this group's."""
        found = self._load("state.npz")
        return found if found is not None and int(found["group"]) == number else None

    def save_state(self, number: int, arrays: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Keep the state under way, where the last one is old enough to be worth the time."""
        began = time.monotonic()
        if began - self._saved_at < max(_LEAST_SECONDS, _SHARE * self._took):
            return
        self._write("state.npz", lambda path: _save(path, {**arrays(), "group": np.array(number)}))
        self._saved_at = time.monotonic()
        self._took = self._saved_at - began

    def remove(self) -> None:
        """The bundle stands: nothing of this is needed any more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Leave the work for another time."""
        os.close(self._lock)

    def _read_json(self, name: str) -> Any:
        path = self.folder / name
        try:
            found = json.loads(path.read_text()) if path.exists() else None
            if not isinstance(found, dict | None):
                raise ValueError
            return found
        except (OSError, ValueError):
            raise InputError(f"{path}: cannot be read; --force starts anew") from None

    def _load(self, name: str) -> dict[str, np.ndarray] | None:
        path = self.folder / name
        if not path.exists():
            return None
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                return dict(arrays)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise InputError(f"{path}: cannot be read; --force starts anew") from None

    def _write(self, name: str, write: Callable[[Path], Any]) -> None:
        temporary = self.folder / f"{name}.new"
        try:
            write(temporary)
            os.replace(temporary, self.folder / name)
        except OSError as error:
            raise DeviceError(f"{self.folder / name}: cannot be written ({error.strerror})") from None


def _save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def pack_state(decode: Decode, scoring: Scoring | None) -> dict[str, np.ndarray]:
    """A group's state as arrays. While it is scored the cache is not needed any more."""
    arrays = {
        "tokens": decode.tokens,
        "lengths": decode.lengths,
        "stopped": decode.stopped,
        "step": np.array(decode.step),
        "layer": np.array(decode.layer if scoring is None else scoring.layer),
        "scoring": np.array(scoring is not None),
    }
    for slot, (logits, made) in enumerate(zip(decode.logits, decode.lengths, strict=True)):
        arrays[f"logits/{slot}"] = logits[:made]
    for slot, logits in enumerate(decode.prompt_logits):
        arrays[f"prompt_logits/{slot}"] = logits
    for part, hidden in enumerate((scoring or decode).hidden):
        arrays[f"hidden/{part}"] = hidden
    if scoring is None:
        for layer, rows in enumerate(decode.cache.rows):
            for slot, values in enumerate(rows):
                arrays[f"cache/{layer}/{slot}"] = values
    return arrays


def unpack_state(arrays: Mapping[str, np.ndarray], decode: Decode) -> Scoring | None:
    """Put a packed state into ``decode``, which has just begun; returns the scoring that was under way."""
    decode.tokens[:], decode.lengths[:], decode.stopped[:] = arrays["tokens"], arrays["lengths"], arrays["stopped"]
    decode.step = int(arrays["step"])
    for slot, made in enumerate(decode.lengths):
        decode.logits[slot][:made] = arrays[f"logits/{slot}"]
    decode.prompt_logits = _numbered(arrays, "prompt_logits")
    if arrays["scoring"]:
        return Scoring(int(arrays["layer"]), _numbered(arrays, "hidden"))
    decode.layer, decode.hidden = int(arrays["layer"]), _numbered(arrays, "hidden")
    for layer, rows in enumerate(decode.cache.rows):
        for slot, values in enumerate(rows):
            values[:] = arrays[f"cache/{layer}/{slot}"]
    return None


def _numbered(arrays: Mapping[str, np.ndarray], name: str) -> list[np.ndarray]:
    found = []
    while f"{name}/{len(found)}" in arrays:
        found.append(arrays[f"{name}/{len(found)}"])
    return found

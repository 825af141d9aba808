"""Work of an unfinished golden on disk, so that Ctrl-C, a kill or a crash loses little of it.

OUTPUT.partial/ is a folder of files that each appear whole or not at all, and carry the SHA-256 of what they hold:
``job.json`` (what the work belongs to, and how the prompts are grouped), ``digests.json``, ``group-N.npz`` of every
finished group, and ``state.npz`` of the one under way. It is removed when the bundle stands. One process at a time
holds it, by a lock on the file ``lock``. A folder with anything else in it is left alone.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kdtr_cli.errors import DeviceError, InputError
from kdtr_cli.model.weights import Digests
from kdtr_cli.reference.generate import Decode, Scoring

__all__ = ["SavedWork", "Scored", "pack_state", "unpack_state"]

_LEAST_SECONDS = 20.0  # between two saved states
_SHARE = 20  # and at least this many times what the last one took
_OWN = re.compile(r"(lock|job\.json|digests\.json|state\.npz|group-\d{6,}\.npz)(\.new)?")
_DIGEST = 32  # bytes in front of an .npz
_DAMAGED = (OSError, ValueError, TypeError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)


class SavedWork:
    """The folder of one golden. ``job``: everything that decides its bytes, as JSON values.

    ``groups``: how many prompts each group has. Those of the work that is there hold: they follow from the memory that
    a process had when it began, and are asked for as ``self.groups``.
    """

    def __init__(self, output: Path, job: Mapping[str, Any], groups: list[int], force: bool) -> None:
        self.folder = output.with_name(output.name + ".partial")
        self.groups = groups
        self._saved_at = time.monotonic()
        self._took = 0.0
        self._lock = self._enter()
        try:
            if force:
                self._clear()
            self._check_job(json.loads(json.dumps(job)))
        except BaseException:
            self.close()
            raise

    def _enter(self) -> int:
        """Make the folder, see that it is kdtr's, and take the lock; its descriptor."""
        try:
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir()
            if self.folder.is_symlink() or not self.folder.is_dir():
                raise InputError(f"{self.folder}: in the way: kdtr keeps unfinished work there; move it away")
            alien = sorted(path.name for path in self.folder.iterdir() if not _OWN.fullmatch(path.name))
            if alien:
                raise InputError(f"{self.folder}: holds {alien[0]!r}, which is not kdtr's; move the folder away")
            while True:
                handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(handle)
                    raise InputError(f"{self.folder}: another kdtr is at work on this golden") from None
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(handle), os.stat(self.folder / "lock")):
                        return handle
                os.close(handle)  # of a lock that its owner has removed meanwhile
                self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be written ({error.strerror})") from None

    def _check_job(self, job: Any) -> None:
        known = self._read_json("job.json")
        if known is None:
            if any(self.folder.glob("*.npz")) or (self.folder / "digests.json").exists():
                raise InputError(f"{self.folder / 'job.json'}: is missing; --force starts anew")
            self._write_json("job.json", {"job": job, "groups": self.groups})
            return
        was = known["job"]
        if was != job:
            parts = sorted(key for key in job.keys() | was.keys() if job.get(key) != was.get(key))
            raise InputError(
                f"{self.folder}: holds the unfinished work of another golden (another: {', '.join(parts)}); give the "
                "same options to go on, or --force to start anew"
            )
        self.groups = known["groups"]

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
        self._write_json("digests.json", {"stored": digests.stored, "used": digests.used})

    def group(self, number: int) -> dict[str, np.ndarray] | None:
        """The arrays of a finished group."""
        return self._load(_group_name(number))

    def save_group(self, number: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep a finished group; the state under way was its own and goes."""
        self._write(_group_name(number), lambda file: _save(file, arrays))
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
        self._write("state.npz", lambda file: _save(file, {**arrays(), "group": np.array(number)}))
        self._saved_at = time.monotonic()
        self._took = self._saved_at - began

    def remove(self) -> None:
        """The bundle stands: nothing of this is needed any more. The lock goes last, and is let go."""
        with contextlib.suppress(OSError):
            self._clear()
            (self.folder / "lock").unlink()
            self.folder.rmdir()
        self.close()

    def close(self) -> None:
        """Let the lock go and leave the work for another time."""
        os.close(self._lock)

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name != "lock" and _OWN.fullmatch(path.name):
                path.unlink()

    def _read_json(self, name: str) -> Any:
        data = self._read(name)
        if data is None:
            return None
        with self._reading(name):
            text = json.loads(data)
            if text["sha256"] != hashlib.sha256(text["holds"].encode()).hexdigest():
                raise ValueError
            return json.loads(text["holds"])

    def _read(self, name: str) -> bytes | None:
        path = self.folder / name
        with self._reading(name):
            if not os.path.lexists(path):
                return None
            if not path.is_file() or path.is_symlink():
                raise ValueError
            return path.read_bytes()

    def _load(self, name: str) -> dict[str, np.ndarray] | None:
        path = self.folder / name
        with self._reading(name):
            if not os.path.lexists(path):
                return None
            if not path.is_file() or path.is_symlink():
                raise ValueError
            with open(path, "rb") as file:
                wanted = file.read(_DIGEST)
                # before NumPy looks: of a header that was changed it reads less than the zip file's own sum covers
                if hashlib.file_digest(file, "sha256").digest() != wanted:
                    raise ValueError
                file.seek(_DIGEST)
                with np.load(file, allow_pickle=False) as arrays:
                    return dict(arrays)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except _DAMAGED:
            raise InputError(f"{self.folder / name}: cannot be read; --force starts anew") from None

    def _write_json(self, name: str, value: Any) -> None:
        text = json.dumps(value)
        whole = json.dumps({"holds": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
        self._write(name, lambda file: file.write(whole.encode()))

    def _write(self, name: str, write: Callable[[BinaryIO], Any]) -> None:
        temporary = self.folder / f"{name}.new"
        try:
            with open(temporary, "w+b") as file:
                write(file)
            os.replace(temporary, self.folder / name)
        except OSError as error:
            raise DeviceError(f"{self.folder / name}: cannot be written ({error.strerror})") from None


def _group_name(number: int) -> str:
    return f"group-{number:06d}.npz"


def _save(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """An .npz behind the SHA-256 of its bytes."""
    file.write(bytes(_DIGEST))
    np.savez(file, **arrays)
    file.seek(_DIGEST)
    digest = hashlib.file_digest(file, "sha256").digest()
    file.seek(0)
    file.write(digest)


#: For each sequence the prompt's logits, where they are kept, and the outputs' (`reference.generate.scored`).
Scored = list[tuple[np.ndarray | None, np.ndarray]]


def pack_state(decode: Decode, scoring: Scoring | None, scored: Mapping[str, Scored]) -> dict[str, np.ndarray]:
    """A group's state as arrays: ``scored`` has the arithmetics that are done, ``scoring`` is of the next one. While a
    group is scored its cache is not needed any more."""
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
    for slot, trace in enumerate(decode.traces):
        arrays |= {f"trace/{slot}/{name}": array for name, array in trace.pack().items()}
    for part, hidden in enumerate((scoring or decode).hidden):
        arrays[f"hidden/{part}"] = hidden
    for name, results in scored.items():
        for slot, (of_prompt, own) in enumerate(results):
            arrays[f"scored/{name}/{slot}"] = own
            if of_prompt is not None:
                arrays[f"scored_prompt/{name}/{slot}"] = of_prompt
    if scoring is None:
        for layer, rows in enumerate(decode.cache.rows):
            for slot, values in enumerate(rows):
                arrays[f"cache/{layer}/{slot}"] = values
    return arrays


def unpack_state(arrays: Mapping[str, np.ndarray], decode: Decode) -> tuple[Scoring | None, dict[str, Scored]]:
    """Put a packed state into ``decode``, which has just begun; returns the scoring that was under way, and what had
    been scored before it.

    ValueError where it is of another group.
    """
    if arrays["tokens"].shape != decode.tokens.shape:
        raise ValueError("the state of another group")
    decode.tokens[:], decode.lengths[:], decode.stopped[:] = arrays["tokens"], arrays["lengths"], arrays["stopped"]
    decode.step = int(arrays["step"])
    for slot, made in enumerate(decode.lengths):
        decode.logits[slot][:made] = arrays[f"logits/{slot}"]
    decode.prompt_logits = _numbered(arrays, "prompt_logits")
    for slot, trace in enumerate(decode.traces):
        inside = f"trace/{slot}/"
        trace.unpack({name.removeprefix(inside): a for name, a in arrays.items() if name.startswith(inside)})
    if arrays["scoring"]:
        names = sorted({key.split("/")[1] for key in arrays if key.startswith("scored/")})
        scored: dict[str, Scored] = {}
        for name in names:
            own, prompts = _numbered(arrays, f"scored/{name}"), _numbered(arrays, f"scored_prompt/{name}")
            scored[name] = list(zip(prompts or [None] * len(own), own, strict=True))
        return Scoring(int(arrays["layer"]), _numbered(arrays, "hidden")), scored
    decode.layer, decode.hidden = int(arrays["layer"]), _numbered(arrays, "hidden")
    for layer, rows in enumerate(decode.cache.rows):
        for slot, values in enumerate(rows):
            values[:] = arrays[f"cache/{layer}/{slot}"]
    return None, {}


def _numbered(arrays: Mapping[str, np.ndarray], name: str) -> list[np.ndarray]:
    found = []
    while f"{name}/{len(found)}" in arrays:
        found.append(arrays[f"{name}/{len(found)}"])
    return found

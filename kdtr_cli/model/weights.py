"""A model's weights as used: float32 arrays by Hugging Face name, read when asked for (numerics.md rule 7).

bf16 and fp16 values are float32 values, so the conversion is exact; quantised weights are dequantised to float32 when
they are read (kdtr_cli.model.quant). The float64 reference starts from the same numbers.

A quantised weight has one name here and several stored tensors: what is said of stored tensors goes by their own names
(``stored_names``), which are the weights' names where nothing is quantised.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.model.checkpoint import Checkpoint, to_float32
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.quant import dequantise
from kdtr_cli.model.safetensors_file import DTYPES, STORED_DTYPES
from kdtr_cli.model.tensors import StoredTensor, expected_tensors, stored_tensors

__all__ = ["BLOCK_ELEMENTS", "Digests", "Weights", "block_rows", "to_float32"]

BLOCK_ELEMENTS = 1 << 23  #: of a block of rows, see block_rows

_STORED = {dtype: name for name, dtype in STORED_DTYPES.items()}
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_BLOCK = 1 << 20  # elements looked at a time


@dataclass(frozen=True)
class Digests:
    """SHA-256 of each stored tensor's bytes, by its name, and of all values as used."""

    stored: dict[str, str]
    used: str


class _Arrays:
    """Stored arrays in memory, with the methods of a Checkpoint that Weights uses."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def stored(self, name: str) -> np.ndarray:
        view = np.ascontiguousarray(self._arrays[name]).view()
        view.flags.writeable = False
        return view

    def stored_rows(self, name: str, first: int, last: int) -> np.ndarray:
        return self.stored(name)[first:last]

    def dtype(self, name: str) -> str:
        return _STORED[self._arrays[name].dtype]

    def nbytes(self, name: str) -> int:
        return self._arrays[name].nbytes

    def sha256(self, name: str) -> str:
        return hashlib.sha256(self.stored(name).view(np.uint8).data).hexdigest()


class Weights:
    """``w[name]`` is a float32, C-contiguous, read-only array of the shape that expected_tensors says.

    With ``cache`` (the default) an array is kept once read; without, each access reads and converts again. With tied
    embeddings ``w['lm_head.weight']`` is the embedding, and ``names`` has the embedding only. A tensor with a NaN or an
    infinity is an InputError at its first read, by name. A name that the model does not have is a KeyError.
    """

    def __init__(self, source: Checkpoint | _Arrays, config: ModelConfig, cache: bool = True) -> None:
        self.config = config
        self.shapes = expected_tensors(config)
        self.names: tuple[str, ...] = tuple(sorted(self.shapes))
        self._parts = {name: tuple(parts) for name, parts in stored_tensors(config).items()}
        self.stored_names: tuple[str, ...] = tuple(sorted(part for parts in self._parts.values() for part in parts))
        self._stored = frozenset(self.stored_names)
        self._source = source
        self._cache: dict[str, np.ndarray] | None = {} if cache else None
        self._checked: set[tuple[str, int, int]] = set()
        self.known_digests: Digests | None = None  # as made, or as known from before

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, config: ModelConfig, cache: bool = True) -> "Weights":
        """Weights that read from an open checkpoint, tensor by tensor."""
        return cls(checkpoint, config, cache)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], config: ModelConfig, cache: bool = True) -> "Weights":
        """Weights from arrays in their stored dtype (float32, float16, ml_dtypes.bfloat16), one per expert.

        Of a quantised weight its parts: int32 and int64, ml_dtypes.float8_e4m3fn, and scales. InputError for a missing
        or left-over name, a wrong shape, another dtype.
        """
        expected = {part: tensor for parts in stored_tensors(config).values() for part, tensor in parts.items()}
        for name, tensor in expected.items():
            if name not in arrays:
                raise InputError(f"tensor {name} is missing")
            _check_array(name, arrays[name], tensor)
        for name in arrays:
            if name not in expected:
                raise InputError(f"tensor {name} has no place in this model")
        return cls(_Arrays(arrays), config, cache)

    def __contains__(self, name: object) -> bool:
        return self._alias(name) in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, name: str) -> np.ndarray:
        name = self._own(name)
        if self._cache is None:
            return self._load(name)
        if name not in self._cache:
            self._cache[name] = self._load(name)
        return self._cache[name]

    def _load(self, name: str) -> np.ndarray:
        return self.rows(name, 0, self.shapes[name][0])

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows first … last - 1 of ``self[name]``; no more than these are read and dequantised, and none is kept."""
        name = self._own(name)
        if self._cache is not None and name in self._cache:
            return self._cache[name][first:last]
        return self._used(name, self._stored_rows(name, first, last), first, last)

    def _stored_rows(self, name: str, first: int, last: int) -> dict[str, np.ndarray]:
        """What is stored of rows first … last - 1: of fp8 the scales of all blocks that they touch."""
        parts, how = {}, self.config.quantisation
        for index, part in enumerate(self._parts[name]):
            if index == 2:  # weight_shape
                parts[part] = self._source.stored(part)
            elif index == 1 and how.method == "fp8":
                parts[part] = self._source.stored_rows(part, first // how.block[0], -(-last // how.block[0]))
            else:
                parts[part] = self._source.stored_rows(part, first, last)
        return parts

    def _used(self, name: str, parts: dict[str, np.ndarray], first: int, last: int) -> np.ndarray:
        if len(parts) > 1:
            values = dequantise(self.config.quantisation, name, self.shapes[name], parts, first)
        else:
            values = to_float32(parts[name]).view()
        if (name, first, last) not in self._checked:
            _check_finite(name, values, first)
            self._checked.add((name, first, last))
        values.flags.writeable = False
        return values

    def digests(self, progress: Callable[[int], None] = lambda stored_bytes: None) -> "Digests":
        """Read every tensor once, in blocks of rows: the digests of what is stored and of what is used.

        InputError for the first value that is not finite. ``progress`` gets the bytes that were read since the last
        call. Used: over all names in sorted order; a tensor adds the line 'NAME float32 D0,D1,…\\n' and its
        little-endian float32 bytes.
        """
        if self.known_digests is not None:
            return self.known_digests
        used, stored = hashlib.sha256(), {name: hashlib.sha256() for name in self.stored_names}
        # hashing leaves the interpreter lock: the next block is read and dequantised meanwhile
        with ThreadPoolExecutor(1) as used_thread, ThreadPoolExecutor(1) as stored_thread:
            waiting: list[Future] = []
            for name in self.names:
                shape = self.shapes[name]
                waiting.append(
                    used_thread.submit(used.update, f"{name} float32 {','.join(map(str, shape))}\n".encode())
                )
                step = block_rows(shape)
                for first in range(0, shape[0], step):
                    last = min(first + step, shape[0])
                    parts = self._stored_rows(name, first, last)
                    values = self._used(name, parts, first, last)
                    for future in waiting:
                        future.result()
                    waiting = [used_thread.submit(used.update, np.ascontiguousarray(values, dtype="<f4").data)]
                    for index, (part, array) in enumerate(parts.items()):
                        if index < 2 or first == 0:  # weight_shape comes with every block
                            data = np.ascontiguousarray(array).view(np.uint8).data
                            waiting.append(stored_thread.submit(stored[part].update, data))
                    progress(sum(array.nbytes for array in parts.values()))
        self.known_digests = Digests({name: digest.hexdigest() for name, digest in stored.items()}, used.hexdigest())
        return self.known_digests

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the stored tensors that make a weight: its own, or a quantised one's parts, the values first."""
        return self._parts[self._own(name)]

    def checked(self, name: str) -> dict[str, np.ndarray]:
        """The stored tensors that make a weight, in the order of ``parts``; InputError as for its values."""
        name = self._own(name)
        step = block_rows(self.shapes[name])
        for first in range(0, self.shapes[name][0], step):
            last = min(first + step, self.shapes[name][0])
            if not self._checked & {(name, first, last), (name, 0, self.shapes[name][0])}:
                self.rows(name, first, last)
        return {part: self._source.stored(part) for part in self._parts[name]}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of ``self[name]``, without reading it."""
        return self.shapes[self._own(name)]

    def stored(self, name: str) -> np.ndarray:
        """A stored tensor in its stored dtype (STORED_DTYPES), read-only; KeyError for a packed weight's own name."""
        return self._source.stored(self._own_stored(name))

    def stored_dtype(self, name: str) -> str:
        """'BF16', 'F16' or 'F32'; of quantised parts also 'I32', 'I64' and 'F8_E4M3'."""
        return self._source.dtype(self._own_stored(name))

    def stored_nbytes(self, name: str) -> int:
        """Bytes of a stored tensor."""
        return self._source.nbytes(self._own_stored(name))

    def stored_sha256(self, name: str) -> str:
        """SHA-256 of a stored tensor's bytes (little endian, row after row)."""
        return self._source.sha256(self._own_stored(name))

    def used_sha256(self) -> str:
        """SHA-256 of the values as used (see ``digests``)."""
        return self.digests().used

    def _alias(self, name: object) -> object:
        return _TIED.get(name, name) if self.config.tie_word_embeddings else name

    def _own(self, name: str) -> str:
        name = self._alias(name)
        if name not in self.shapes:
            raise KeyError(name)
        return name

    def _own_stored(self, name: str) -> str:
        name = self._alias(name)
        if name not in self._stored:
            raise KeyError(name)
        return name


def _check_array(name: str, array: np.ndarray, tensor: StoredTensor) -> None:
    if tuple(array.shape) != tensor.shape:
        raise InputError(f"tensor {name} has shape {list(array.shape)}; the config needs {list(tensor.shape)}")
    if _STORED.get(array.dtype) not in tensor.dtypes:
        takes = "float32, float16 and bfloat16" if set(tensor.dtypes) == set(DTYPES) else ", ".join(tensor.dtypes)
        raise InputError(f"tensor {name} has dtype {array.dtype}; kdtr takes {takes}")


def block_rows(shape: tuple[int, ...]) -> int:
    """Rows of a tensor that are read, dequantised and packed at a time: a multiple of 256, about 32 MB of float32.

    It depends on the shape alone, so that a product in float64 is cut in the same places whatever memory there is.
    """
    return max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])) // 256) * 256


def _check_finite(name: str, values: np.ndarray, first_row: int) -> None:
    flat = values.reshape(-1)
    for at in range(0, flat.size, _BLOCK):
        finite = np.isfinite(flat[at : at + _BLOCK])
        if not finite.all():
            first = at + int(np.argmin(finite))
            at_row, *rest = np.unravel_index(first, values.shape)
            where = ", ".join(str(int(i)) for i in (at_row + first_row, *rest))
            raise InputError(
                f"tensor {name}[{where}] is {flat[first]}: a weight must be finite; the checkpoint is broken"
            )

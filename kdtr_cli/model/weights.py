"""A model's weights as used: float32 arrays by Hugging Face name, read when asked for (numerics.md rule 7).

bf16 and fp16 values are float32 values, so the conversion is exact; quantised weights are dequantised to float32 when
they are read (kdtr_cli.model.quant). The float64 reference starts from the same numbers.

A quantised weight has one name here and several stored tensors: what is said of stored tensors goes by their own names
(``stored_names``), which are the weights' names where nothing is quantised.
"""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.model.checkpoint import Checkpoint, to_float32
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.quant import dequantise
from kdtr_cli.model.safetensors_file import DTYPES, STORED_DTYPES
from kdtr_cli.model.tensors import StoredTensor, expected_tensors, stored_tensors

__all__ = ["Weights", "to_float32"]

_STORED = {dtype: name for name, dtype in STORED_DTYPES.items()}
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_BLOCK = 1 << 20  # elements looked at a time


class _Arrays:
    """Stored arrays in memory, with the methods of a Checkpoint that Weights uses."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def stored(self, name: str) -> np.ndarray:
        view = np.ascontiguousarray(self._arrays[name]).view()
        view.flags.writeable = False
        return view

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
        self._checked: set[str] = set()

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
        parts = {part: self._source.stored(part) for part in self._parts[name]}
        if self.config.quantisation is not None and len(parts) > 1:
            values = dequantise(self.config.quantisation, name, self.shapes[name], parts)
        else:
            values = to_float32(parts[name]).view()
        if name not in self._checked:
            _check_finite(name, values.reshape(-1), values.shape)
            self._checked.add(name)
        values.flags.writeable = False
        return values

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the stored tensors that make a weight: its own, or a quantised one's parts, the values first."""
        return self._parts[self._own(name)]

    def checked(self, name: str) -> dict[str, np.ndarray]:
        """The stored tensors that make a weight, in the order of ``parts``; InputError as for its values."""
        name = self._own(name)
        if name not in self._checked:
            for _ in self._blocks(name):
                pass
        return {part: self._source.stored(part) for part in self._parts[name]}

    def _blocks(self, name: str) -> Iterator[np.ndarray]:
        """The float32 values of a weight in order, checked; some at a time where they are stored by themselves."""
        kept = self._cache is not None and name in self._cache
        if kept or len(self._parts[name]) > 1:
            yield self._cache[name] if kept else self._load(name)
            return
        flat = self._source.stored(name).reshape(-1)
        for at in range(0, flat.size, _BLOCK):
            values = to_float32(flat[at : at + _BLOCK])
            _check_finite(name, values, self.shapes[name], at)
            yield values
        self._checked.add(name)

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
        """SHA-256 over all names in sorted order of the values as used, at most one tensor in memory at a time.

        A tensor adds the line 'NAME float32 D0,D1,…\\n' and its little-endian float32 bytes.
        """
        digest = hashlib.sha256()
        for name in self.names:
            digest.update(f"{name} float32 {','.join(map(str, self.shapes[name]))}\n".encode())
            for values in self._blocks(name):
                digest.update(np.ascontiguousarray(values, dtype="<f4").data)
        return digest.hexdigest()

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


def _check_finite(name: str, flat: np.ndarray, shape: tuple[int, ...], before: int = 0) -> None:
    """Elements ``before``, … of a weight of this shape; InputError naming the first that is not finite."""
    for at in range(0, flat.size, _BLOCK):
        finite = np.isfinite(flat[at : at + _BLOCK])
        if not finite.all():
            first = at + int(np.argmin(finite))
            where = ", ".join(str(int(i)) for i in np.unravel_index(before + first, shape))
            raise InputError(
                f"tensor {name}[{where}] is {flat[first]}: a weight must be finite; the checkpoint is broken"
            )

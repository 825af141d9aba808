"""A model's weights on a device for tier bf16: matrices in fragment order, norms and router as tier exact has them.

Weights are taken as they are: a matrix with a value that bf16 does not hold is refused, so that golden and run have the
same weights. One tensor of the checkpoint is in host memory at a time, of a stacked matrix all of its parts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from kdtr_cli.engine.devices import Device, DeviceArray
from kdtr_cli.engine.fragments import pack_fragments, pack_pairs
from kdtr_cli.engine.matrices import Matrix, upload_matrix
from kdtr_cli.engine.weights import DeviceWeights, place_weights, upload_vector
from kdtr_cli.errors import InputError
from kdtr_cli.model.config import ModelConfig
from kdtr_cli.model.weights import Weights

__all__ = ["Fragments", "check_widths", "upload_bf16"]

_WIDTH = 8  # elements that a lane reads at once


@dataclass(frozen=True, eq=False)
class Fragments:
    """A matrix [n, k] or several [count, n, k] as mma_matmul.cuh wants them; of gate and up in turn, n is one's."""

    shape: tuple[int, ...]
    w: DeviceArray

    @property
    def nbytes(self) -> int:
        """Bytes on the device, padding included."""
        return self.w.nbytes


def check_widths(config: ModelConfig) -> None:
    """InputError for a model with a row that is no multiple of 8 elements: a lane reads 16 bytes at once."""
    for field in (
        "hidden_size",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "intermediate_size",
        "moe_intermediate_size",
    ):
        value = getattr(config, field) or 0
        if value % _WIDTH:
            raise InputError(f"{field} is {value}: tier bf16 takes multiples of {_WIDTH} alone; --tier exact takes any")


@dataclass(frozen=True)
class _Upload:
    """Placing of a checkpoint's weights."""

    device: Device
    weights: Weights

    def vector(self, name: str, size: int, values: Callable[[], np.ndarray]) -> DeviceArray:
        return upload_vector(self.device, name, size, values())

    def matrix(
        self,
        name: str,
        shape: tuple[int, ...],
        *tensors: str,
        cut: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Matrix | Fragments:
        if name.endswith("router"):
            return upload_matrix(self.device, name, shape, self.weights, tensors, cut)
        if name == "embed":
            return Matrix.plain("bf16", self.device.upload(name, self._bits(tensors[0])))
        if name.endswith("gate_up"):
            return self._pairs(name, shape, tensors)
        if "experts." in name:
            return self._each(name, shape, [lambda t=t: pack_fragments(self._bits(t)) for t in tensors])
        whole = np.concatenate([self._bits(t, cut) for t in tensors], axis=0)
        return Fragments(shape, self.device.upload(name, pack_fragments(whole.reshape(-1, *shape[-2:]))))

    def _pairs(self, name: str, shape: tuple[int, ...], tensors: tuple[str, ...]) -> Fragments:
        shape = (*shape[:-2], shape[-2] // 2, shape[-1])
        pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
        return self._each(name, shape, [lambda g=g, u=u: pack_pairs(self._bits(g), self._bits(u)) for g, u in pairs])

    def _each(self, name: str, shape: tuple[int, ...], makers: list[Callable[[], np.ndarray]]) -> Fragments:
        """Matrices one after another, each made when it is written."""
        array = None
        for i, make in enumerate(makers):
            packed = make()
            if array is None:
                of = (len(makers),) if len(shape) == 3 else ()
                array = self.device.alloc(name, (*of, *packed.shape), np.uint16)
            self.device.write(array.view(i * packed.size, packed.shape), packed)
        return Fragments(shape, array)

    def _bits(self, tensor: str, cut: Callable[[np.ndarray], np.ndarray] | None = None) -> np.ndarray:
        stored = self.weights[tensor]
        values = np.ascontiguousarray(stored if cut is None else cut(stored))
        rounded = values.astype(ml_dtypes.bfloat16)
        if not np.array_equal(rounded.astype(np.float32), values):
            raise InputError(
                f"tensor {tensor} holds values that bf16 does not: tier bf16 takes weights that are bf16; "
                "--tier exact takes any"
            )
        return rounded.view(np.uint16)


def upload_bf16(device: Device, config: ModelConfig, weights: Weights) -> DeviceWeights:
    """Upload a model for tier bf16. InputError for widths and values that it can't take."""
    check_widths(config)
    return place_weights(config, weights, _Upload(device, weights))

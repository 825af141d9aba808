"""Arrays of any framework become NumPy's, their values and types kept, and no framework is imported for it."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from kdtr_cli.errors import InputError
from kdtr_cli.testing.arrays import as_numpy

pytestmark = pytest.mark.quick


class OnlyDlpack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnlyArray:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class Cupy(OnlyDlpack):
    """As CuPy's arrays: they are on a device, and refuse to become NumPy's by themselves."""

    __cuda_array_interface__: dict = {}  # noqa: RUF012

    def __dlpack__(self, **keywords):
        raise BufferError("on a device")

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def get(self):
        return self.array


@pytest.mark.parametrize("wrap", [lambda a: a, OnlyDlpack, OnlyArray, Cupy])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_values_shape_and_type_are_kept(wrap, dtype):
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    got = as_numpy(wrap(array), "x")
    assert got.dtype == dtype
    assert got.tolist() == array.tolist()


def test_bfloat16_of_ml_dtypes_stays_what_it_is():
    array = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    assert as_numpy(OnlyArray(array), "x").dtype == ml_dtypes.bfloat16


def test_lists_of_numbers():
    assert as_numpy([1, 2], "x").dtype == np.int64
    assert as_numpy([], "x").size == 0


@pytest.mark.parametrize("wrong", [["a"], object(), "12", [[1], [2, 3]], {"a": 1}, OnlyArray(3)])
def test_what_is_no_array_is_named(wrong):
    with pytest.raises(InputError, match=r"tokens of 'x'"):
        as_numpy(wrong, "tokens of 'x'")


def test_no_framework_is_imported():
    code = "import sys, kdtr_cli.testing; print(sorted({'torch', 'cupy', 'jax', 'pytest'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.hf
class TestTorch:
    def test_tensors_on_the_graph_and_off_it(self):
        torch = pytest.importorskip("torch")
        for tensor in (torch.tensor([1.5, 2.5]), torch.tensor([1.5, 2.5], requires_grad=True)):
            assert as_numpy(tensor, "x").tolist() == [1.5, 2.5]
        assert as_numpy(torch.tensor([3, 4]), "x").dtype == np.int64
        turned = torch.arange(6, dtype=torch.float16).reshape(2, 3).T
        assert as_numpy(turned, "x").tolist() == [[0, 3], [1, 4], [2, 5]]

    def test_bfloat16_loses_no_bit(self):
        torch = pytest.importorskip("torch")
        bits = torch.arange(-(2**15), 2**15).to(torch.int16)
        got = as_numpy(bits.view(torch.bfloat16), "x")
        assert got.dtype == np.float32
        assert np.array_equal(got.view(np.uint32) >> 16, bits.numpy().view(np.uint16))

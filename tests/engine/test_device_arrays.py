"""Arrays on a device and the guard zones around them, on the CPU device."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr_cli.engine.devices import open_device
from kdtr_cli.engine.devices.cpu import CpuDevice
from kdtr_cli.engine.devices.device import GUARD_BYTES, Device
from kdtr_cli.errors import DeviceError

CU = Path(__file__).parent / "cu"
OPS = CU / "intrinsics.cu"
f32, i32 = np.float32, np.int32


@pytest.fixture
def device():
    with open_device("cpu", threads=2) as d:
        yield d


def fill(device, array, value, grid=2):
    device.launch(device.kernel(OPS, "fill"), grid, 64, [array, f32(value), i32(array.size)])


# ---- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [f32, np.float64, np.float16])
def test_new_memory_is_nan_aligned_and_counted(device, dtype):
    a = device.alloc("a", (3, 5), dtype)
    b = device.alloc("b", 7, dtype)
    assert np.isnan(device.read(a)).all()
    assert a.ptr % 256 == b.ptr % 256 == 0
    assert (a.name, a.shape, a.dtype, a.size) == ("a", (3, 5), np.dtype(dtype), 15)
    assert a.nbytes == 15 * np.dtype(dtype).itemsize
    assert b.shape == (7,)
    assert device.bytes_allocated == a.nbytes + b.nbytes


def test_new_memory_of_integers_is_minus_one(device):
    assert device.read(device.alloc("a", 9, np.int64)).tolist() == [-1] * 9


def test_an_array_of_no_elements_can_be_made_written_and_read(device):
    a = device.upload("a", np.zeros((4, 0), f32))
    device.write(a, np.zeros((0, 4), f32))
    assert device.read(a).shape == (4, 0)
    device.check_guards()


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float64"])
def test_arrays_come_back_as_they_went(device, dtype):
    x = np.random.default_rng(0).integers(0, 2, (3, 4, 5)).astype(dtype)
    a = device.upload("a", x.transpose(2, 0, 1))
    assert np.array_equal(device.read(a), x.transpose(2, 0, 1))
    assert device.read(a).dtype == x.dtype


def test_a_bf16_array_can_be_uploaded(device):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.arange(5).astype(ml_dtypes.bfloat16)
    assert np.array_equal(device.read(device.upload("a", x)), x)


def test_what_was_read_does_not_change_when_the_device_writes_on(device):
    a = device.upload("a", np.zeros(8, f32))
    before = device.read(a)
    fill(device, a, 3)
    assert before.tolist() == [0.0] * 8
    source = np.ones(8, f32)
    device.write(a, source)
    source[:] = 7
    assert device.read(a).tolist() == [1.0] * 8


@pytest.mark.parametrize("wrong", [np.zeros(7, f32), np.zeros(9, f32), np.zeros(8, np.float64), np.zeros(8, np.int32)])
def test_a_write_of_another_size_or_dtype_is_refused(device, wrong):
    a = device.alloc("weights.x", 8, f32)
    with pytest.raises(DeviceError, match=r"weights\.x is float32\[8\]"):
        device.write(a, wrong)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(-3, 45), st.lists(st.integers(0, 8), min_size=1, max_size=3))
def test_a_view_is_numpys_slice_or_an_error(size, offset, shape):
    with CpuDevice(threads=1) as d:
        x = np.arange(size, dtype=np.int64)
        a = d.upload("a", x)
        n = math.prod(shape)
        if offset < 0 or offset + n > size:
            with pytest.raises(DeviceError, match="does not lie inside a"):
                a.view(offset, shape)
        else:
            v = a.view(offset, shape)
            assert v.shape == tuple(shape)
            assert np.array_equal(d.read(v), x[offset : offset + n].reshape(shape))


def test_a_view_shares_memory_with_its_array_and_takes_offsets_past_32_bits(device):
    a = device.upload("a", np.zeros(10, f32))
    v = a.view(np.int32(4), (3,)).view(1, 2)
    device.write(v, np.array([5, 6], f32))
    assert device.read(a).tolist() == [0, 0, 0, 0, 0, 5, 6, 0, 0, 0]
    with pytest.raises(DeviceError, match="does not lie inside"):
        a.view(2**33, 1)
    with pytest.raises(DeviceError, match="does not lie inside"):
        a.view(0, (2**33, 2**33))


def test_objects_and_negative_shapes_are_refused(device):
    with pytest.raises(TypeError, match="Python objects"):
        device.upload("a", np.array([object()]))
    with pytest.raises(DeviceError, match="shape"):
        device.alloc("a", (3, -1), f32)


# ---- guard zones -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "side"), [(-1, "before"), (-64, "before"), (10, "after"), (10 + 63, "after")])
def test_a_write_beside_an_array_is_found_and_named(device, at, side):
    device.upload("first", np.zeros(10, f32))
    device.upload("second", np.zeros(10, f32))
    third = device.upload("third", np.zeros(10, f32))
    device.check_guards()
    device.launch(device.kernel(CU / "shared_memory.cu", "store_at"), 1, 1, [third, np.int64(at)])
    with pytest.raises(DeviceError, match=rf"outside third \(40 bytes\): \d bytes {side} it") as e:
        device.check_guards()
    assert "\n" not in str(e.value)
    device.free_all()
    device.check_guards()


def test_the_guard_zone_starts_at_the_very_byte_after_an_array_of_odd_size(device):
    a = device.upload("odd", np.zeros(5, np.uint8))
    device.check_guards()
    past = device.alloc("wide", 1, np.uint8)
    object.__setattr__(past, "ptr", a.ptr + 5)
    device.write(past, np.array([1], np.uint8))
    with pytest.raises(
        DeviceError, match=r"outside odd .* 1 bytes after it, the nearest 1 bytes after its last element"
    ):
        device.check_guards()


def test_a_guard_zone_reads_as_nan():
    assert GUARD_BYTES == 256
    with CpuDevice(threads=1) as d:
        a = d.upload("a", np.zeros(4, f32))
        for offset in (-4, 16):
            beside = d.alloc("beside", 1, f32)
            object.__setattr__(beside, "ptr", a.ptr + offset)
            assert np.isnan(d.read(beside)).all()


@pytest.mark.quick
@pytest.mark.parametrize("missing", sorted(Device.__abstractmethods__))
def test_a_device_that_lacks_an_operation_is_refused_before_it_runs(missing):
    brought = {name: lambda self: None for name in Device.__abstractmethods__ - {missing}}
    with pytest.raises(TypeError, match=rf"abstract method '?{missing}'?$"):
        type("Half", (Device,), brought)("cpu")

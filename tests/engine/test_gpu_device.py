"""The GPU device: its logic against a stand-in for CuPy, everywhere; and the device itself, where there is a GPU."""

import builtins
import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_cupy import Fake

from kdtr_cli.engine.devices import gpu, open_device
from kdtr_cli.engine.devices.cpu import CpuDevice
from kdtr_cli.errors import DeviceError, InputError

CU = Path(__file__).parent / "cu"
OPS = CU / "intrinsics.cu"
f32, i32 = np.float32, np.int32


def floats(address, n):
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (n,))


@pytest.fixture
def fake(monkeypatch):
    fake = Fake(memory=1 << 26)

    def fill(x, v, n):
        floats(x, n)[:] = v

    def add(x, v, n):
        floats(x, n)[:] += v

    def store_at(x, at):
        floats(x + 4 * at, 1)[:] = 1

    fake.kernels = {"fill": fill, "add": add, "store_at": store_at}
    monkeypatch.setitem(sys.modules, "cupy", fake.cupy)
    monkeypatch.setattr(gpu, "_parameter_widths", lambda function: None)
    return fake


@pytest.fixture
def device(fake):
    with gpu.GpuDevice() as d:
        yield d


# ---- against the stand-in --------------------------------------------------------------------------------------------


def test_memory_is_nan_aligned_guarded_and_given_back(fake, device):
    a = device.alloc("a", (3, 50), f32)
    assert a.ptr % 256 == 0
    assert np.isnan(device.read(a)).all()
    device.check_guards()
    device.launch(device.kernel(CU / "shared_memory.cu", "store_at"), 1, 1, [a, np.int64(150)])
    with pytest.raises(
        DeviceError, match=r"outside a \(600 bytes\): \d bytes after it, the nearest \d bytes after its last"
    ):
        device.check_guards()
    held = fake.used
    device.free_all()
    assert fake.used < held - 600


@pytest.mark.parametrize("size", [1, 1000, 16384, 16385, 100000])
def test_a_source_may_change_as_soon_as_write_returns_and_writes_keep_their_order(device, size):
    arrays = [device.alloc(f"a{i}", size, f32) for i in range(40)]
    source = np.zeros(size, f32)
    for i, a in enumerate(arrays):  # together more than the staging ring holds, for the larger sizes
        source[:] = i
        device.write(a, source)
        source[:] = -1
        device.launch(device.kernel(OPS, "add"), 1, 1, [a, f32(100), i32(size)])
    for i, a in enumerate(arrays):
        assert (device.read(a) == 100 + i).all()
        device.write(a, np.full(size, 7, f32))
        assert (device.read(a) == 7).all()


def test_many_arrays_keep_their_guards_and_contents(device):
    arrays = [device.upload(f"a{i}", np.full(i * 37, i, f32)) for i in range(120)]
    device.check_guards()
    assert all((device.read(a) == i).all() for i, a in enumerate(arrays))


def test_out_of_memory_names_the_array(device):
    with pytest.raises(DeviceError, match=r"taking \d+ bytes of GPU memory for experts failed: Out of memory"):
        device.alloc("experts", 1 << 26, f32)


def test_arguments_reach_cupy_as_numpy_scalars_and_null_as_an_address(fake, device):
    got = []
    fake.kernels["every_kind"] = lambda *values: got.append(values)
    i = device.upload("i", np.zeros(1, i32))
    kernel = device.kernel(OPS, "every_kind")
    args = [None, i, i, None, None, i32(-5), np.uint32(6), np.int64(7), f32(0.5), np.float64(0.25), np.bool_(True)]
    device.launch(kernel, 1, 1, args)
    device.synchronize()
    assert got == [(0, i.ptr, i.ptr, 0, 0, -5, 6, 7, 0.5, 0.25, True)]
    with pytest.raises(TypeError, match="argument 5 is a int"):
        device.launch(kernel, 1, 1, [*args[:5], -5, *args[6:]])


def test_parameter_widths_of_the_driver_are_checked(monkeypatch, device):
    monkeypatch.setattr(gpu, "_parameter_widths", lambda function: (8, 4, 4))
    a = device.upload("a", np.zeros(4, f32))
    kernel = device.kernel(OPS, "fill")
    with pytest.raises(TypeError, match="kernel fill takes 3 arguments, 2 given"):
        device.launch(kernel, 1, 1, [a, f32(1)])
    with pytest.raises(TypeError, match="kernel fill: argument 2 has 8 bytes, 4 are wanted"):
        device.launch(kernel, 1, 1, [a, f32(1), np.int64(4)])
    device.launch(kernel, 1, 1, [a, f32(1), i32(4)])
    assert device.read(a).tolist() == [1.0] * 4


def test_an_empty_grid_launches_nothing(fake, device):
    a = device.upload("a", np.zeros(4, f32))
    device.launch(device.kernel(OPS, "fill"), (4, 0), 32, [a, f32(1), i32(4)])
    assert device.read(a).tolist() == [0.0] * 4
    assert not [e for e in fake.log if e[0] == "fill"]


def test_large_dynamic_shared_memory_is_asked_for_once_and_only_when_needed(fake, device):
    a = device.upload("a", np.zeros(4, f32))
    fake.attributes[1] = 0
    kernel = device.kernel(OPS, "fill")
    for shared in (0, 48 << 10, 49 << 10, 49 << 10, 90 << 10, 60 << 10):
        device.launch(kernel, 1, 32, [a, f32(1), i32(4)], shared)
    assert [e for e in fake.log if e[0] == "set"] == [("set", 8, 49 << 10), ("set", 8, 90 << 10)]


def test_static_shared_memory_counts_towards_what_must_be_asked_for(fake, device):
    # 13 kB static and 40 kB dynamic are refused by the driver unless the dynamic part has been asked for
    a = device.upload("a", np.zeros(4, f32))
    fake.attributes[1] = 13 << 10
    kernel = device.kernel(OPS, "fill")
    for shared in (0, 35 << 10, 40 << 10):
        device.launch(kernel, 1, 32, [a, f32(1), i32(4)], shared)
    assert [e for e in fake.log if e[0] == "set"] == [("set", 8, 40 << 10)]


def test_a_graph_repeats_its_launches_and_replays_in_stream_order(fake, device):
    a = device.upload("a", np.zeros(4, f32))
    kernel = device.kernel(OPS, "add")
    graph = device.capture(lambda: [device.launch(kernel, 1, 4, [a, f32(v), i32(4)]) for v in (1, 10)])
    assert graph.launches == 2
    assert device.read(a).tolist() == [0.0] * 4
    graph.replay()
    device.write(a, np.full(4, 100, f32))
    graph.replay()
    graph.replay()
    assert device.read(a).tolist() == [122.0] * 4


def test_memory_and_loading_are_refused_inside_a_capture_and_it_ends_cleanly(fake, device):
    a = device.upload("a", np.zeros(4, f32))
    kernel = device.kernel(OPS, "fill")
    for call in (
        lambda: device.read(a), lambda: device.write(a, np.zeros(4, f32)), lambda: device.alloc("b", 1, f32),
        lambda: device.kernel(OPS, "add"), device.check_guards, device.free_all,
    ):  # fmt: skip
        with pytest.raises(DeviceError, match="inside a capture"):
            device.capture(call)
        assert fake.stream.captured is None
    device.launch(kernel, 1, 4, [a, f32(3), i32(4)])
    assert device.read(a).tolist() == [3.0] * 4


def test_cudas_errors_name_the_kernel(fake, device):
    a = device.upload("a", np.zeros(4, f32))
    kernel = device.kernel(OPS, "fill")
    with pytest.raises(
        DeviceError, match=r"^kernel fill: launch of .* failed: CUDA_ERROR_INVALID_VALUE: invalid argument$"
    ):
        device.launch(kernel, 1, 1025, [a, f32(1), i32(4)])
    device.launch(kernel, 1, 4, [a, f32(1), i32(4)])
    fake.fail_next_synchronize = "cudaErrorIllegalAddress: an illegal memory access was encountered"
    with pytest.raises(DeviceError, match=r"^waiting for the GPU failed: cudaErrorIllegalAddress: .* \(after fill\)$"):
        device.read(a)
    graph = device.capture(lambda: device.launch(kernel, 1, 4, [a, f32(1), i32(4)]))
    graph.replay()
    fake.fail_next_synchronize = "cudaErrorLaunchFailure: unspecified launch failure"
    with pytest.raises(DeviceError, match=r"after .*graph of fill"):
        device.synchronize()


def test_an_unknown_kernel_is_told_with_its_file(device):
    with pytest.raises(
        DeviceError, match=r"finding kernel nothing_here in intrinsics\.cu failed: CUDA_ERROR_NOT_FOUND"
    ):
        device.kernel(OPS, "nothing_here")


def test_kernels_are_compiled_through_the_cache_and_loaded_once(fake, device, monkeypatch, tmp_path):
    device.compile([OPS, CU / "shared_memory.cu"])
    kernel = device.kernel(OPS, "fill")
    assert device.kernel(OPS, "fill") is kernel
    device.kernel(OPS, "add")
    assert fake.log.count("load") == 2
    monkeypatch.setattr(gpu, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    with gpu.GpuDevice() as other:
        other.kernel(OPS, "fill")


def test_a_gpu_newer_than_nvrtc_gets_ptx(monkeypatch):
    fake = Fake(compute_capability="999")
    monkeypatch.setitem(sys.modules, "cupy", fake.cupy)
    with gpu.GpuDevice() as d:
        image = d._image(OPS)
    assert b".visible .entry fill" in image
    assert image.endswith(b"\0")


def test_attributes_and_description(device):
    assert device.kernel(OPS, "fill").attributes() == {
        "registers": 32, "shared_bytes": 16, "local_bytes": 0, "constant_bytes": 8, "max_threads": 1024,
    }  # fmt: skip
    text = device.describe()
    assert text["device"] == "Fake H200 (sm_90)"
    assert text["driver"].endswith("CUDA 13.1")
    assert text["compiler"].startswith("NVRTC ")
    assert "--fmad=false" in text["compiler"]
    assert all("/" not in v for v in text.values())


def test_open_device_takes_the_gpu_if_there_is_one(fake, monkeypatch):
    monkeypatch.setattr("kdtr_cli.engine.devices.gpu_missing", lambda: None)
    for name in ("auto", "gpu"):
        with open_device(name) as d:
            assert d.kind == "gpu"


# ---- what is missing -------------------------------------------------------------------------------------------------


def missing_with(monkeypatch, *, driver=True, cupy=None):
    def load(name, *args, **kwargs):
        if not driver:
            raise OSError("libcuda.so.1: cannot open shared object file")

    real = builtins.__import__

    def no_cupy(name, *args, **kwargs):
        if name == "cupy":
            raise ImportError("No module named 'cupy'\nlong story")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(gpu.ctypes, "CDLL", load)
    if cupy is None:
        monkeypatch.delitem(sys.modules, "cupy", raising=False)
        monkeypatch.setattr(builtins, "__import__", no_cupy)
    else:
        monkeypatch.setitem(sys.modules, "cupy", cupy)
    return gpu.gpu_missing()


def test_what_is_missing_is_named(monkeypatch):
    with monkeypatch.context() as m:
        assert missing_with(m, driver=False) == "there is no NVIDIA driver here (libcuda.so.1)"
    with monkeypatch.context() as m:
        assert (
            missing_with(m)
            == "CuPy can't be imported (No module named 'cupy'): pip install 'kdtr[cuda13]' (or 'kdtr[cuda12]')"
        )
    fake = Fake()
    with monkeypatch.context() as m:
        assert missing_with(m, cupy=fake.cupy) is None
        fake.cupy.cuda.runtime.getDeviceCount = lambda: 0
        assert "lists no device" in gpu.gpu_missing()

        def too_old():
            raise RuntimeError("cudaErrorInsufficientDriver: too old\nmore")

        fake.cupy.cuda.runtime.getDeviceCount = too_old
        assert gpu.gpu_missing() == "the NVIDIA driver gives none (cudaErrorInsufficientDriver: too old)"
        fake.cupy.cuda.runtime.getDeviceCount = lambda: 1
        m.setattr(gpu, "nvrtc_version", lambda: (_ for _ in ()).throw(DeviceError("no nvrtc: pip install it")))
        assert gpu.gpu_missing() == "no nvrtc: pip install it"


@pytest.mark.skipif(gpu.gpu_missing() is None, reason="there is a GPU here")
def test_asking_for_a_gpu_that_is_not_there_is_one_line_with_a_way_out():
    with pytest.raises(InputError, match=r"^no GPU: [^\n]+; use --device cpu to run without one$"):
        open_device("gpu")


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def real():
    if missing := gpu.gpu_missing():
        pytest.skip(missing)
    with open_device("gpu") as d:
        yield d


@pytest.mark.gpu
class TestOnAGpu:
    def test_arrays_guards_and_copies(self, real):
        rng = np.random.default_rng(0)
        for size in (1, 1000, 16384, 16385, 3_000_001):
            x = rng.standard_normal(size).astype(f32)
            a = real.upload("x", x)
            assert a.ptr % 256 == 0
            assert np.array_equal(real.read(a), x)
            assert np.isnan(real.read(real.alloc("n", size, f32))).all()
        real.check_guards()
        past = real.upload("past", np.zeros(10, f32))
        real.launch(real.kernel(CU / "shared_memory.cu", "store_at"), 1, 1, [past, np.int64(10)])
        with pytest.raises(DeviceError, match=r"outside past .* after it"):
            real.check_guards()

    def test_arguments_of_every_kind_and_null_arrive(self, real):
        i = real.upload("i", np.zeros(1, i32))
        args = [
            real.upload("f", np.zeros(1, f32)), i, real.upload("b", np.ones(1, np.uint8)), None,
            real.upload("d", np.full(1, 10.0)),
            i32(100), np.uint32(1000), np.int64(10000), f32(100000), np.float64(1000000), np.bool_(True),
        ]  # fmt: skip
        kernel = real.kernel(OPS, "every_kind")
        real.launch(kernel, 1, 1, args)
        assert real.read(i)[0] == 1111112
        assert kernel.handle.widths in (None, (8, 8, 8, 8, 8, 4, 4, 8, 4, 8, 1))
        if kernel.handle.widths:
            with pytest.raises(TypeError, match="takes 11 arguments, 10 given"):
                real.launch(kernel, 1, 1, args[:-1])

    def test_arithmetic_and_reductions_have_the_cpu_devices_bits(self, real):
        rng = np.random.default_rng(1)
        a, b, c = (rng.integers(0, 2**32, (3, 4096), dtype=np.uint64).astype(np.uint32)).view(f32)
        x = rng.standard_normal((37, 1028)).astype(f32)
        got = []
        for d in (real, CpuDevice()):
            y, s = d.alloc("y", (8, 4096), f32), d.alloc("s", 37, f32)
            arrays = [d.upload(n, v) for n, v in (("a", a), ("b", b), ("c", c))]
            d.launch(d.kernel(OPS, "float_ops"), 64, 64, [*arrays, y, i32(4096)])
            d.launch(d.kernel(CU / "reduction.cu", "block_sum"), 37, 128, [d.upload("x", x), s, i32(1028)])
            got.append((d.read(y), d.read(s)))
        (y0, s0), (y1, s1) = got
        assert np.array_equal(np.isnan(y0), np.isnan(y1))
        assert np.array_equal(y0.view(np.uint32)[~np.isnan(y0)], y1.view(np.uint32)[~np.isnan(y1)])
        assert s0.tobytes() == s1.tobytes()

    def test_votes_shuffles_bits_and_atomics_match_the_cpu_device(self, real):
        rng = np.random.default_rng(2)
        x, u = rng.integers(-2, 4, 64).astype(i32), rng.integers(0, 2**32, (2, 64), dtype=np.uint64).astype(np.uint32)
        v = rng.integers(1, 16, 5000).astype(i32)
        got = []
        for d in (real, CpuDevice()):
            y, s, w = (
                d.upload("y", np.zeros((2, 16), i32)),
                d.alloc("s", (4, 32), i32),
                d.alloc("w", (64, 14), np.uint32),
            )
            h, total = d.upload("h", np.zeros(20, i32)), d.upload("t", np.zeros(1, np.uint64))
            d.launch(d.kernel(CU / "reduction.cu", "votes"), 1, 64, [d.upload("x", x), y])
            d.launch(d.kernel(CU / "reduction.cu", "shuffles"), 1, 32, [d.upload("x", x), s, i32(3), i32(8)])
            d.launch(d.kernel(OPS, "bit_ops"), 1, 1, [d.upload("a", u[0]), d.upload("b", u[1]), w, i32(64)])
            d.launch(d.kernel(OPS, "histogram"), 40, 128, [d.upload("v", v), h, total, i32(5000)])
            got.append([d.read(r).tobytes() for r in (y, s, w, h, total)])
        assert got[0] == got[1]

    def test_large_dynamic_shared_memory_and_a_launch_that_is_refused(self, real):
        x = real.upload("x", np.zeros(4, f32))
        kernel = real.kernel(OPS, "fill")
        real.launch(kernel, 1, 32, [x, f32(1), i32(4)], shared=96 << 10)
        assert real.read(x).tolist() == [1.0] * 4
        with pytest.raises(DeviceError, match="kernel fill: launch of"):
            real.launch(kernel, 1, 1025, [x, f32(2), i32(4)])
        assert real.read(x).tolist() == [1.0] * 4

    def test_a_graph_replays_in_order(self, real):
        a = real.upload("a", np.zeros(1000, f32))
        kernel = real.kernel(OPS, "add")
        graph = real.capture(lambda: [real.launch(kernel, 4, 64, [a, f32(v), i32(1000)]) for v in (1, 10)])
        assert (real.read(a) == 0).all()
        for _ in range(50):
            graph.replay()
        real.write(a.view(0, 10), np.full(10, 1000, f32))
        graph.replay()
        assert real.read(a).tolist() == [1011.0] * 10 + [561.0] * 990
        with pytest.raises(DeviceError, match="inside a capture"):
            real.capture(lambda: real.read(a))
        graph.replay()
        real.synchronize()

    def test_attributes_and_description(self, real):
        attributes = real.kernel(CU / "reduction.cu", "block_sum").attributes()
        assert attributes["registers"] > 0
        assert attributes["shared_bytes"] == 16
        assert attributes["local_bytes"] == 0
        assert {k: bool(v) for k, v in real.describe().items()} == {"device": True, "driver": True, "compiler": True}

    def test_a_fault_on_the_gpu_is_a_device_error_with_the_kernels_name(self, real):
        # an illegal access ruins the process's context: it happens in a process of its own
        script = (
            "import sys, numpy as np\nfrom pathlib import Path\nfrom kdtr_cli.engine.devices import open_device\n"
            "from kdtr_cli.errors import DeviceError\n"
            "try:\n"
            "    with open_device('gpu') as d:\n"
            "        x = d.upload('x', np.zeros(4, np.float32))\n"
            "        d.launch(d.kernel(Path(sys.argv[1]), 'store_at'), 1, 1, [x, np.int64(1 << 40)])\n"
            "        d.read(x)\n"
            "except DeviceError as e:\n"
            "    print(e)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, CU / "shared_memory.cu"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert "IllegalAddress" in done.stdout
        assert "(after store_at)" in done.stdout

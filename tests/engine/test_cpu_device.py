"""The device interface, on the CPU device: arguments, launches, capture, the pool of threads, opening."""

import concurrent.futures
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kdtr_cli.engine.compile import source_text
from kdtr_cli.engine.devices import open_device
from kdtr_cli.engine.devices.cpu import CpuDevice
from kdtr_cli.engine.devices.gpu import NO_DRIVER
from kdtr_cli.engine.host_compiler import kernel_text
from kdtr_cli.engine.launch import Launcher
from kdtr_cli.errors import DeviceError, InputError

CU = Path(__file__).parent / "cu"
OPS = CU / "intrinsics.cu"
f32, i32 = np.float32, np.int32


@pytest.fixture
def device():
    with open_device("cpu", threads=2) as d:
        yield d


def fill(device, array, value, grid=2):
    device.launch(device.kernel(OPS, "fill"), grid, 64, [array, f32(value), i32(array.size)])


# ---- arguments -------------------------------------------------------------------------------------------------------


def _every_kind(device, **changed):
    args = {
        "f": device.upload("f", np.zeros(1, f32)),
        "i": device.upload("i", np.zeros(1, i32)),
        "b": device.upload("b", np.full(1, 1, np.uint8)),
        "any": None,
        "d": device.upload("d", np.full(1, 10.0)),
        "n": i32(100),
        "u": np.uint32(1000),
        "l": np.int64(10000),
        "s": f32(100000),
        "e": np.float64(1000000),
        "on": np.bool_(True),
    }
    return [*{**args, **changed}.values()]


def test_arguments_of_every_kind_arrive(device):
    out = device.upload("i", np.zeros(1, i32))
    device.launch(device.kernel(OPS, "every_kind"), 1, 1, _every_kind(device, i=out))
    assert device.read(out)[0] == 1111100 + 1 + 1 + 10  # n u l s e, on, b[0], d[0]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("n", 100, "argument 5 is a int, which has no fixed width"),
        ("s", 1.0, "argument 8 is a float, which has no fixed width"),
        ("on", True, "argument 10 is a bool"),
        ("f", np.zeros(1, f32), "argument 0 is a ndarray"),
        ("n", np.int64(1), "argument 5 is int64, where an int of 4 bytes is wanted"),
        ("l", i32(1), "argument 7 is int32, where an int of 8 bytes is wanted"),
        ("n", f32(1), "argument 5 is float32, where an int of 4 bytes is wanted"),
        ("s", i32(1), "argument 8 is int32, where a float of 4 bytes is wanted"),
        ("e", f32(1), "argument 9 is float32, where a float of 8 bytes is wanted"),
        ("f", np.uint64(0), "argument 0 is the number .*, where a pointer is wanted"),
        ("n", None, "argument 5 is None"),
        ("f", "int array", "argument 0 is i of int32, where a pointer to a float of 4 bytes is wanted"),
        ("d", "float array", "argument 4 is f of float32, where a pointer to a float of 8 bytes is wanted"),
        ("n", "int array", "argument 5 is the array i"),
    ],
)
def test_an_argument_that_does_not_fit_its_parameter_is_a_type_error(device, name, value, says):
    if isinstance(value, str):
        kind = value.split()[0]
        value = device.upload(kind[0], np.zeros(1, f32 if kind == "float" else i32))
    with pytest.raises(TypeError, match=rf"kernel every_kind: {says}"):
        device.launch(device.kernel(OPS, "every_kind"), 1, 1, _every_kind(device, **{name: value}))


def test_too_few_and_too_many_arguments_are_a_type_error(device):
    args = _every_kind(device)
    for wrong in (args[:-1], [*args, i32(0)], []):
        with pytest.raises(TypeError, match=rf"kernel every_kind takes 11 arguments, {len(wrong)} given"):
            device.launch(device.kernel(OPS, "every_kind"), 1, 1, wrong)


def test_a_pointer_must_be_aligned_for_what_it_points_to(device):
    kernel = device.kernel(OPS, "vectors")
    x, sizes = device.upload("x", np.zeros(64, f32)), device.alloc("sizes", 16, i32)
    device.launch(kernel, 1, 8, [x.view(4, 32), x.view(0, 32), sizes])
    with pytest.raises(TypeError, match="argument 0 is x at an address that is not a multiple of 16"):
        device.launch(kernel, 1, 8, [x.view(1, 32), x.view(0, 32), sizes])


def test_arrays_and_kernels_of_another_device_are_refused(device):
    with CpuDevice(threads=1) as other:
        theirs = other.upload("theirs", np.zeros(4, f32))
        with pytest.raises(DeviceError, match="theirs lies in another device's memory"):
            fill(device, theirs, 1)
        with pytest.raises(DeviceError, match="another device"):
            device.launch(other.kernel(OPS, "fill"), 1, 1, [device.alloc("a", 1, f32), f32(1), i32(1)])


# ---- launches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [0, (0, 5), (3, 0, 2), (2, 2, 0)])
def test_a_grid_with_a_zero_dimension_launches_nothing(device, grid):
    a = device.upload("a", np.zeros(4, f32))
    device.launch(device.kernel(OPS, "fill"), grid, 64, [a, f32(1), i32(4)])
    assert device.read(a).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("grid", "block", "shared", "says"),
    [
        (1, 0, 0, "a block of 0x1x1 threads"),
        (1, 1025, 0, "a block of 1025x1x1 threads"),
        (1, (64, 32), 0, "a block of 64x32x1 threads"),
        (1, (1, 1, 65), 0, "a block of 1x1x65 threads"),
        ((1, 65536), 1, 0, "a grid of 1x65536x1 blocks"),
        (1, 32, 227 * 1024 + 1, "232449 bytes of dynamic shared memory"),
        (-1, 1, 0, "not a grid or block"),
        ((1, 1, 1, 1), 1, 0, "not a grid or block"),
    ],
)
def test_a_launch_that_no_gpu_would_take_is_refused(device, grid, block, shared, says):
    a = device.upload("a", np.zeros(4, f32))
    with pytest.raises(DeviceError, match=f"kernel fill: .*{says}"):
        device.launch(device.kernel(OPS, "fill"), grid, block, [a, f32(1), i32(4)], shared)


def test_the_largest_allowed_launch_runs(device):
    a = device.upload("a", np.zeros(4, f32))
    device.launch(device.kernel(OPS, "fill"), (1, 1, 1), (1024,), [a, f32(1), i32(4)], shared=227 * 1024)
    assert device.read(a).tolist() == [1.0] * 4


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_os_threads_gives_the_same_bits(threads):
    x = np.random.default_rng(1).standard_normal((60, 260)).astype(f32)
    with CpuDevice(threads=threads) as d, CpuDevice(threads=1) as one:
        got = []
        for dev in (d, one):
            y = dev.alloc("y", 60, f32)
            dev.launch(dev.kernel(CU / "reduction.cu", "block_sum"), 60, 128, [dev.upload("x", x), y, i32(260)])
            got.append(dev.read(y).tobytes())
        assert got[0] == got[1]


def test_devices_may_be_used_from_several_python_threads_at_once():
    def work(seed):
        x = np.random.default_rng(seed).standard_normal((40, 128)).astype(f32)
        with CpuDevice(threads=2) as d:
            a, y = d.upload("x", x), d.alloc("y", (40, 128), f32)
            for _ in range(20):
                d.launch(d.kernel(CU / "shared_memory.cu", "reversed"), 40, 128, [a, y, i32(1)])
            return np.array_equal(d.read(y), x[:, ::-1])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == [True] * 8


def test_the_child_of_a_fork_has_threads_of_its_own(tmp_path):
    script = tmp_path / "fork.py"
    script.write_text(
        "import os, sys, numpy as np\n"
        "from pathlib import Path\n"
        "from kdtr_cli.engine.devices.cpu import CpuDevice\n"
        "d = CpuDevice(threads=3)\n"
        "k = d.kernel(Path(sys.argv[1]), 'fill')\n"
        "a = d.upload('a', np.zeros(100000, np.float32))\n"
        "def go(v):\n"
        "    d.launch(k, 100, 128, [a, np.float32(v), np.int32(a.size)])\n"
        "    return bool((d.read(a) == v).all())\n"
        "def helpers():\n"
        "    return len(os.listdir('/proc/self/task')) - 1\n"
        "before = helpers()\n"
        "assert go(1) and helpers() == before + 2\n"
        "pid = os.fork()\n"
        "ok = all(go(v) for v in range(2, 50)) and (pid or helpers() == 2)\n"
        "if pid == 0:\n"
        "    os._exit(0 if ok else 1)\n"
        "assert ok and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", script, OPS], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_stays_flat_over_many_launches_failing_ones_and_captures_included(device):
    a = device.upload("a", np.zeros(4096, f32))
    x = device.upload("x", np.zeros(64, f32))
    good, bad = device.kernel(CU / "reduction.cu", "in_header"), device.kernel(CU / "divergence.cu", "two_barriers")

    def some(n):
        for _ in range(n):
            fill(device, a, 1, grid=32)
            device.launch(good, 1, 64, [x])
        for _ in range(n // 5):
            with pytest.raises(DeviceError):
                device.launch(bad, 1, 64, [x])
        device.capture(lambda: device.launch(good, 1, 64, [x])).replay()

    some(100)
    before = _resident()
    some(1500)
    assert _resident() - before < 4 << 20


# ---- capture ---------------------------------------------------------------------------------------------------------


def test_a_graph_repeats_its_launches_with_frozen_arguments_on_live_arrays(device):
    a = device.upload("a", np.zeros(8, f32))
    add = device.kernel(OPS, "add")
    step = f32(2)

    def body():
        nonlocal step
        device.launch(add, 1, 4, [a, step, i32(8)])
        device.launch(add, (1, 0), 4, [a, step, i32(8)])  # an empty grid: nothing to capture
        device.launch(add, 1, 4, [a.view(0, 4), f32(10), i32(4)])
        step = f32(100)

    graph = device.capture(body)
    assert device.read(a).tolist() == [0.0] * 8, "capturing must not run anything"
    assert graph.launches == 2
    graph.replay()
    graph.replay()
    assert device.read(a).tolist() == [24.0] * 4 + [4.0] * 4
    device.write(a, np.full(8, 1000, f32))
    graph.replay()
    assert device.read(a).tolist() == [1012.0] * 4 + [1002.0] * 4


def test_only_launches_are_allowed_inside_a_capture(device):
    a = device.upload("a", np.zeros(8, f32))
    graph = device.capture(lambda: None)
    forbidden = {
        "read": lambda: device.read(a),
        "write": lambda: device.write(a, np.zeros(8, f32)),
        "allocate": lambda: device.alloc("b", 1, f32),
        "upload": lambda: device.upload("b", np.zeros(1, f32)),
        "load kernel": lambda: device.kernel(OPS, "fill"),
        "compile": lambda: device.compile([OPS]),
        "free": lambda: device.free_all(),
        "guard": lambda: device.check_guards(),
        "replay": graph.replay,
        "capture": lambda: device.capture(lambda: None),
    }
    for name, call in forbidden.items():
        with pytest.raises(DeviceError, match="inside a capture"):
            device.capture(call)
        assert device.read(a).tolist() == [0.0] * 8, f"after {name} the device must be out of the capture"


def test_an_error_inside_a_capture_leaves_the_device_usable(device):
    a = device.upload("a", np.zeros(8, f32))
    kernel = device.kernel(OPS, "fill")

    def body():
        device.launch(kernel, 1, 1, [a, f32(9), i32(8)])
        raise KeyError("mine")

    with pytest.raises(KeyError):
        device.capture(body)
    fill(device, a, 1)
    assert device.read(a).tolist() == [1.0] * 8
    device.capture(lambda: None).replay()
    assert device.read(a).tolist() == [1.0] * 8


def test_a_fault_in_a_replayed_launch_names_its_kernel(device):
    x = device.upload("x", np.zeros(64, f32))
    kernel = device.kernel(CU / "divergence.cu", "two_barriers")
    graph = device.capture(lambda: device.launch(kernel, 1, 64, [x]))
    with pytest.raises(DeviceError, match=r"kernel two_barriers: divergence\.cu:"):
        graph.replay()


def test_freed_memory_can_not_be_used(device):
    a = device.upload("a", np.zeros(8, f32))
    kernel = device.kernel(OPS, "fill")
    graph = device.capture(lambda: device.launch(kernel, 1, 1, [a, f32(1), i32(8)]))
    device.free_all()
    assert device.bytes_allocated == 0
    for use in (
        lambda: device.read(a),
        lambda: device.write(a, np.zeros(8, f32)),
        lambda: fill(device, a, 1),
        graph.replay,
    ):
        with pytest.raises(DeviceError, match=r"a.* has been freed"):
            use()


# ---- opening ---------------------------------------------------------------------------------------------------------


def test_the_description_names_device_and_compiler_and_holds_nothing_of_this_run(device):
    with CpuDevice(threads=1, schedule=3) as other:
        assert device.describe() == other.describe()
    text = device.describe()
    assert set(text) == {"device", "driver", "compiler"}
    assert text["device"].startswith("cpu")
    assert "-ffp-contract=off" in text["compiler"]
    assert all(isinstance(v, str) and v and "/" not in v for v in text.values())
    assert not re.search(r"20\d\d-\d\d|\d\d:\d\d", " ".join(text.values()))


def test_kernels_have_no_attributes_on_the_cpu(device):
    assert device.kernel(OPS, "fill").attributes() == {}
    assert device.kernel(OPS, "fill") is device.kernel(OPS, "fill")


def test_a_device_is_its_own_context_and_frees_its_memory():
    with open_device("cpu") as d:
        assert d.kind == "cpu"
        a = d.alloc("a", 4, f32)
    assert d.bytes_allocated == 0
    with pytest.raises(DeviceError, match="freed"):
        d.read(a)


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("kdtr_cli.engine.devices.gpu_missing", lambda: NO_DRIVER)
    assert open_device().kind == "cpu"
    assert open_device().notes == ()
    monkeypatch.setattr("kdtr_cli.engine.devices.gpu_missing", lambda: "no driver")
    assert open_device().notes == ("running on the CPU: no driver",)
    assert open_device("cpu").notes == ()
    with pytest.raises(InputError, match="no GPU: no driver; use --device cpu"):
        open_device("gpu")


@pytest.mark.parametrize(("how", "says"), [({"threads": 0}, "0 threads"), ({"schedule": -1}, "schedule -1")])
def test_settings_out_of_range_are_refused(how, says):
    with pytest.raises(InputError, match=says):
        open_device("cpu", **how)


def test_an_unknown_device_is_refused():
    with pytest.raises(InputError, match="unknown device 'tpu': use auto, gpu or cpu"):
        open_device("tpu")


# ---- other texts for kernel files ------------------------------------------------------------------------------------


def test_a_replaced_file_is_compiled_on_its_own_device_alone():
    """Beside it, and in the cache, the file of that name stays what it is."""
    text = source_text("combine.cu")
    assert text.count("residual[row * n + i] + sum") == 1
    replaced = {"combine.cu": text.replace("residual[row * n + i] + sum", "residual[row * n + i] - sum")}

    def combined(device):
        y = device.alloc("y", (1, 2), f32)
        arrays = {"expert": np.ones((1, 1, 2)), "weights": np.full((1, 1), 3), "residual": np.full((1, 2), 10)}
        given = {name: device.upload(name, value.astype(f32)) for name, value in arrays.items()}
        Launcher(device)("combine", **given, shared=None, y=y, rows=1, slots=1, n=2)
        return device.read(y).tolist()

    with open_device("cpu", replaced=replaced) as other, open_device("cpu") as device:
        assert combined(other) == [[7, 7]]
        assert combined(device) == [[13, 13]]


def test_a_file_elsewhere_is_not_replaced_whatever_it_is_called(tmp_path):
    (tmp_path / "combine.cu").write_text("mine\n")
    assert "mine" in kernel_text(tmp_path / "combine.cu", {"combine.cu": "other"})
    assert kernel_text("combine.cu", {"combine.cu": "other"}).endswith("\nother")


def test_a_replaced_text_that_does_not_compile_is_said_with_its_line():
    broken = {"combine.cu": '#line 1 "combine.cu"\nextern "C" __global__ void combine() { no_such_name; }'}
    says = r"combine\.cu:1: .*no_such_name"
    with open_device("cpu", replaced=broken) as device, pytest.raises(DeviceError, match=says):
        device.compile(broken)

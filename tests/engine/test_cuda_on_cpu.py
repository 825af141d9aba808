"""The runtime that runs CUDA kernels on the CPU: in what order it runs lanes, and which faults it names."""

import ctypes
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from kdtr_cli.engine.devices.cpu import CpuDevice
from kdtr_cli.engine.host_compiler import find_compiler
from kdtr_cli.errors import DeviceError

CU = Path(__file__).parent / "cu"
UCONTEXT = ("-DKDTR_UCONTEXT",)
f32 = np.float32


@pytest.fixture(scope="module", params=[(), UCONTEXT], ids=["swap", "ucontext"])
def device(request):
    with CpuDevice(threads=2, defines=request.param) as d:
        yield d


@pytest.fixture(scope="module")
def plain():
    with CpuDevice(threads=2) as d:
        yield d


def marked(file, name):
    """file:line of the comment "at: name" in a test kernel."""
    for number, line in enumerate((CU / file).read_text().splitlines(), 1):
        if re.search(rf"// at: {name}$", line):
            return f"{file}:{number}"
    raise AssertionError(f"no mark for {name} in {file}")


def run(device, file, entry, block, *args, grid=1, shared=0):
    device.launch(device.kernel(CU / file, entry), grid, block, args, shared)


# ---- faults ----------------------------------------------------------------------------------------------------------

FAULTS = [
    ("two_barriers", 64, "threads of one block reached different __syncthreads"),
    ("barrier_against_shuffle", 32, "deadlock: thread (0,0,0) waits at __syncthreads"),
    ("early_exit", 32, "thread"),
    ("tail_warp", 40, "names a lane that has exited or does not exist"),
    ("not_in_mask", 32, "not in the mask"),
    ("reads_outside_mask", 32, "reads a lane outside its mask"),
    ("two_shuffles", 32, "met in different warp operations"),
    ("shuffle_against_vote", 32, "met in different warp operations"),
    ("never_all", 32, "deadlock"),
]


@pytest.mark.parametrize(("entry", "block", "says"), FAULTS, ids=[f[0] for f in FAULTS])
def test_a_divergent_kernel_is_an_error_that_names_kernel_block_thread_file_and_line(device, entry, block, says):
    x = device.upload("x", np.zeros(64, f32))
    with pytest.raises(DeviceError) as e:
        run(device, "divergence.cu", entry, block, x)
    message = str(e.value)
    assert message.startswith(f"kernel {entry}: {marked('divergence.cu', entry)}: ")
    assert says in message
    assert re.search(r"block \(0,0,0\) thread \(\d+,0,0\)$", message)
    assert "\n" not in message


def test_both_places_of_a_divergent_barrier_are_named(plain):
    with pytest.raises(
        DeviceError, match=r"thread \(0,0,0\) is at the one in divergence\.cu:\d+, block .* thread \(32,0,0\)"
    ):
        run(plain, "divergence.cu", "two_barriers", 64, plain.upload("x", np.zeros(1, f32)))


@pytest.mark.parametrize("schedule", [0, 1, 2, 3])
def test_faults_are_found_under_every_schedule(schedule):
    with CpuDevice(threads=1, schedule=schedule) as d:
        for entry, block, _ in FAULTS:
            with pytest.raises(DeviceError, match=entry):
                run(d, "divergence.cu", entry, block, d.upload("x", np.zeros(64, f32)))


def test_a_fault_in_an_included_header_names_the_header(plain):
    x = plain.upload("x", np.zeros(64, f32))
    with pytest.raises(DeviceError, match=re.escape(marked("fold.cuh", "in_header"))):
        run(plain, "reduction.cu", "in_header", 40, x)


def test_the_block_of_a_fault_is_named(plain):
    x = plain.upload("x", np.zeros(1, f32))
    with pytest.raises(DeviceError, match=r"__trap\(\), block \(2,0,0\) thread \(5,0,0\)"):
        run(plain, "divergence.cu", "trapped", 32, x, grid=4)


def test_after_a_fault_the_device_computes_as_before(device):
    x = device.upload("x", np.zeros(64, f32))
    for _ in range(50):
        with pytest.raises(DeviceError):
            run(device, "divergence.cu", "two_barriers", 64, x)
    run(device, "divergence.cu", "exit_then_barrier", 64, x)
    assert device.read(x)[:40].tolist() == [1.0] * 40


def test_a_thread_that_overruns_its_stack_is_reported_and_one_that_does_not_is_not(device):
    x = device.upload("x", np.zeros(32, f32))
    run(device, "divergence.cu", "deep", 32, x, np.int32(20))
    with pytest.raises(DeviceError, match="kernel deep: a thread overran its stack of 64 KiB"):
        # frames of some 2 KiB: 30 of them and what lies above end inside the 4 KiB of the canary page
        run(device, "divergence.cu", "deep", 32, x, np.int32(_frames_to_the_canary(device)))
    run(device, "divergence.cu", "deep", 32, x, np.int32(20))


def _frames_to_the_canary(device):
    # a frame's size is the compiler's choice; the stack is measured rather than guessed, one frame at a time
    x = device.upload("probe", np.zeros(32, f32))
    for n in range(24, 34):
        try:
            run(device, "divergence.cu", "deep", 1, x, np.int32(n))
        except DeviceError:
            return n
    raise AssertionError("66 KiB of frames fit into a stack of 64 KiB")


# ---- shared memory ---------------------------------------------------------------------------------------------------


def test_unwritten_shared_memory_is_nan_in_every_block_on_every_thread(device):
    y = device.upload("y", np.zeros((64, 128), f32))
    run(device, "shared_memory.cu", "unwritten", 64, y, grid=64, shared=256)
    assert np.isnan(device.read(y)).all()


def test_unwritten_shared_memory_is_nan_in_the_first_block_of_a_fresh_thread():
    got = []

    def work():
        with CpuDevice(threads=1) as d:
            y = d.upload("y", np.zeros(128, f32))
            run(d, "shared_memory.cu", "unwritten", 64, y, shared=256)
            got.append(d.read(y))

    for _ in range(3):
        t = threading.Thread(target=work)
        t.start()
        t.join()
    assert len(got) == 3
    assert np.isnan(got).all()


def test_nothing_is_left_over_in_shared_memory_from_the_launch_before(device):
    y = device.alloc("y", (2, 64), f32)
    run(device, "shared_memory.cu", "left_over", 64, y, np.int32(1), shared=256)
    assert (device.read(y) == [[1.0], [2.0]]).all()
    run(device, "shared_memory.cu", "left_over", 64, y, np.int32(0), shared=256)
    assert np.isnan(device.read(y)).all()


def test_a_missing_barrier_shows_under_every_schedule_and_a_present_one_gives_the_same_bits():
    x = np.arange(1024, dtype=f32).reshape(4, 256)
    for schedule in (0, 1, 2, 3):
        with CpuDevice(threads=2, schedule=schedule) as d:
            for barrier in (1, 0):
                y = d.alloc("y", (4, 256), f32)
                run(d, "shared_memory.cu", "reversed", 256, d.upload("x", x), y, np.int32(barrier), grid=4)
                if barrier:
                    assert np.array_equal(d.read(y), x[:, ::-1])
                else:
                    assert np.isnan(d.read(y)).any(), f"the race is hidden under schedule {schedule}"


def test_shared_memory_of_a_template_is_its_modules_own(device):
    x = device.upload("x", np.arange(64, dtype=f32))
    y = device.alloc("y", 64, f32)
    run(device, "shared_memory.cu", "templated", 64, x, y)
    assert device.read(y).tolist() == list(range(63, -1, -1))


# ---- schedules -------------------------------------------------------------------------------------------------------


def sum128(x):
    """The contract's sum of a row of at most 8,192 elements, written apart from the package."""
    lanes = np.zeros((128,), f32)
    for k in range(len(x)):
        lanes[(k // 4) % 128] += x[k]
    groups = lanes.reshape(4, 32)
    for o in (16, 8, 4, 2, 1):
        groups = groups + groups[:, np.arange(32) ^ o]
    g = groups[:, 0]
    return (g[0] + g[1]) + (g[2] + g[3])


@pytest.mark.parametrize("defines", [(), UCONTEXT], ids=["swap", "ucontext"])
@pytest.mark.parametrize("schedule", [0, 1, 2, 3, 12345])
def test_a_reduction_has_the_contracts_bits_under_every_schedule(schedule, defines):
    x = np.random.default_rng(5).standard_normal((9, 1028)).astype(f32)
    with CpuDevice(threads=2, schedule=schedule, defines=defines) as d:
        y = d.alloc("y", 9, f32)
        run(d, "reduction.cu", "block_sum", 128, d.upload("x", x), y, np.int32(1028), grid=9)
        assert d.read(y).tobytes() == np.array([sum128(row) for row in x]).tobytes()


def order(schedule, blocks=1, threads=64):
    with CpuDevice(threads=1, schedule=schedule) as d:
        out = d.alloc("order", (2, blocks * threads), np.int32)
        run(d, "reduction.cu", "tickets", threads, d.upload("next", np.zeros(1, np.int32)), out, grid=blocks)
        return d.read(out)


def test_schedules_are_what_they_are_called():
    first, second = order(0)
    assert first.tolist() == list(range(64))
    assert sorted(second.tolist()) == list(range(64, 128))
    assert order(1)[0].tolist() == list(range(63, -1, -1))
    seeded = order(2)
    assert np.array_equal(seeded, order(2))
    assert not np.array_equal(seeded, order(3))
    assert sorted(seeded.ravel().tolist()) == list(range(128))
    # each warp's lanes come in their own order, and the warps do not come one after the other
    assert seeded[0].tolist() not in (list(range(64)), list(range(63, -1, -1)))
    assert seeded[0][:32].max() > seeded[0][32:].min()
    assert seeded[0][32:].max() > seeded[0][:32].min()


def test_schedule_1_takes_the_blocks_in_reverse():
    assert order(0, blocks=3, threads=1)[0].tolist() == [0, 2, 4]
    assert order(1, blocks=3, threads=1)[0].tolist() == [4, 2, 0]


# ---- what the exact tier asks of the machine -------------------------------------------------------------------------


@pytest.mark.skipif(find_compiler().target == "default", reason="mxcsr is a register of x86")
@pytest.mark.parametrize(("bit", "says"), [(0x8000, "subnormal"), (0x0040, "subnormal"), (0x2000, "nearest even")])
def test_a_thread_with_another_floating_point_mode_is_refused(plain, tmp_path, bit, says):
    import subprocess

    source = (
        "unsigned get(void) { return __builtin_ia32_stmxcsr(); } void set(unsigned m) { __builtin_ia32_ldmxcsr(m); }"
    )
    out = tmp_path / "mode.so"
    subprocess.run(
        [*find_compiler().command, "-O1", "-x", "c", "-shared", "-fPIC", "-o", out, "-"],
        input=source,
        text=True,
        check=True,
    )
    mode = ctypes.CDLL(str(out))
    mode.get.restype, mode.set.argtypes = ctypes.c_uint, [ctypes.c_uint]
    x = plain.upload("x", np.zeros(64, f32))
    kernel = plain.kernel(CU / "divergence.cu", "exit_then_barrier")
    before = mode.get()
    try:
        mode.set(before | bit)
        with pytest.raises(DeviceError, match=says):
            plain.launch(kernel, 1, 64, [x])
        with pytest.raises(DeviceError, match=says):
            CpuDevice()
    finally:
        mode.set(before)
    plain.launch(kernel, 1, 64, [x])

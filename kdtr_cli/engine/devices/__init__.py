"""The two devices of the engine: an NVIDIA GPU through CuPy, and the machine's processor running the same kernels.

device = open_device("auto")
x = device.upload("x", np.ones((4, 64), np.float32))
y = device.alloc("y", (4, 64), np.float32)
device.launch(device.kernel("swiglu.cu", "swiglu"), grid=4, block=128, args=[x, y, np.int32(64)])
device.read(y)
"""

from collections.abc import Mapping

from kdtr_cli.engine.compile import KERNELS_AS_THEY_ARE
from kdtr_cli.engine.devices.cpu import CpuDevice
from kdtr_cli.engine.devices.device import Arg, Device, DeviceArray, Graph, Kernel
from kdtr_cli.engine.devices.gpu import NO_DRIVER, GpuDevice, gpu_missing
from kdtr_cli.errors import InputError

__all__ = ["Arg", "Device", "DeviceArray", "Graph", "Kernel", "open_device"]


def open_device(
    name: str = "auto",
    *,
    threads: int | None = None,
    schedule: int = 0,
    replaced: Mapping[str, str] = KERNELS_AS_THEY_ARE,
) -> Device:
    """Opens a device.

    name: "gpu", "cpu", or "auto" for a GPU if this process can use one, else the CPU.
    threads: OS threads of the CPU device (None: as many as this process may use); a GPU does not care.
    schedule: the order in which the CPU device runs the lanes of a block: 0 lowest first, 1 highest first, from 2 on
    seeded random. A kernel without races gives the same bits in any order.
    replaced: texts to compile in place of the kernel files of these names (compile.source_text).

    InputError for an unknown name and for "gpu" where there is none (the message says what is missing); DeviceError
    when the CPU device has no compiler or does not know this machine.
    """
    if name not in ("auto", "gpu", "cpu"):
        raise InputError(f"unknown device {name!r}: use auto, gpu or cpu")
    missing = None if name == "cpu" else gpu_missing()
    if name != "cpu" and not missing:
        return GpuDevice(replaced)
    if name == "gpu":
        raise InputError(f"no GPU: {missing}; use --device cpu to run without one")
    device = CpuDevice(threads=threads, schedule=schedule, replaced=replaced)
    if missing and missing != NO_DRIVER:  # a GPU may well be there, and only a package be missing
        device.notes += (f"running on the CPU: {missing}",)
    return device

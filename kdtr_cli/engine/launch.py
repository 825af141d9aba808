"""Launching kernels by the table: named arguments in, the C++ argument order and the grid out."""

from typing import Any

from kdtr_cli.engine.devices import Device, DeviceArray
from kdtr_cli.engine.kernels import DTYPES, KERNELS

__all__ = ["Launcher"]


class Launcher:
    """Calls kernels of the table on one device: ``launch("embed", rows=8, n=128, ids=..., table=..., x=...)``.

    Scalars and extra dimensions are Python numbers; arrays are DeviceArrays or, where the table allows it, None.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._loaded: dict[str, Any] = {}

    def load(self, names: list[str]) -> None:
        """Compile and load these kernels before the first launch, files side by side: a capture can load none."""
        self.device.compile(list(dict.fromkeys(KERNELS[n].file for n in names)))
        for name in names:
            self._loaded[name] = self.device.kernel(KERNELS[name].file, name)

    def __call__(self, name: str, **values: Any) -> None:
        kernel = KERNELS[name]
        if name not in self._loaded:
            self._loaded[name] = self.device.kernel(kernel.file, name)
        args = []
        for arg in kernel.args:
            value = values[arg.name]
            if arg.shape is None:
                value = DTYPES[arg.dtype].type(value)
            elif value is None:
                if not arg.nullable:
                    raise ValueError(f"{name}: {arg.name} may not be null")
            elif not isinstance(value, DeviceArray) or value.dtype != DTYPES[arg.dtype]:
                raise TypeError(f"{name}: {arg.name} must be a {arg.dtype} array on the device")
            args.append(value)
        self.device.launch(self._loaded[name], kernel.grid(values), kernel.block, args, kernel.shared(values))

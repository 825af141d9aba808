"""Launching kernels by the table: named arguments in, the C++ argument order and the grid out; the common products."""

from collections.abc import Callable
from typing import Any

from kdtr_cli.engine.devices import Device, DeviceArray
from kdtr_cli.engine.kernels import DTYPES, KERNELS, embed, matmul, matmuls
from kdtr_cli.engine.matrices import Matrix

__all__ = ["Launcher"]


class Launcher:
    """Calls kernels of the table on one device: ``launch("embed", rows=8, n=128, ids=..., table=..., x=...)``.

    Scalars and extra dimensions are Python numbers; arrays are DeviceArrays or, where the table allows it, None.
    ``launched`` is called with the name of each kernel.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.launched: Callable[[str], None] = lambda name: None
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
        self.launched(name)
        grid, shared = kernel.grid(values), kernel.shared(values)
        self.device.launch(self._loaded[name], grid, kernel.block, args, shared, overlap=kernel.overlaps)

    def embed(self, ids: DeviceArray, table: Matrix, x: DeviceArray, rows: int) -> None:
        """x = table[ids], for a table [vocab, n]."""
        self(embed(table.form), ids=ids, table=table.w, x=x, rows=rows, n=table.shape[1])

    def matmul(
        self,
        x: DeviceArray,
        w: Matrix,
        y: DeviceArray,
        rows: int,
        *,
        bias: DeviceArray | None = None,
        residual: DeviceArray | None = None,
        heads: int = 1,
        x_row: int | None = None,
        y_row: int | None = None,
        x_head: int = 0,
        y_head: int = 0,
    ) -> None:
        """y = x w^T (+ bias) (+ residual) for w [n, k], or [heads, n, k] with a step between heads in x and y."""
        n, k = w.shape[-2:]
        self(
            matmul(self.device.kind, rows, n, k, w.form),
            x=x,
            **w.arguments,
            bias=bias,
            residual=residual,
            y=y,
            rows=rows,
            n=n,
            k=k,
            heads=heads,
            x_row=x_row or k,
            y_row=y_row or n,
            x_head=x_head,
            w_head=n * k if heads > 1 else 0,
            y_head=y_head,
        )

    def matmul_names(self, w: Matrix, rows: int) -> set[str]:
        """The kernels that ``matmul`` may launch for this form, for up to this many rows."""
        return matmuls(self.device.kind, rows, w.form)

    def norm(
        self, x: DeviceArray, weight: DeviceArray, y: DeviceArray, rows: int, eps: float, x_row: int | None = None
    ) -> None:
        """y = RMSNorm of the first n elements of each row of x, n that of the weight."""
        n = weight.size
        self("rmsnorm", x=x, weight=weight, y=y, rows=rows, n=n, eps=eps, x_row=x_row or n, y_row=n)

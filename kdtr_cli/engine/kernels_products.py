"""The kernels that read weights: matrix products, routed experts and the embedding, for every form of weights.

A form says how a matrix lies in device memory (kernels_cu/weights.cuh): f32, bf16 and f16 as they are; int4 and fp8
packed, with scales. A product's name is `matmul_FORM_VARIANT`, without FORM for f32; a variant wW_mM_rR_gG has W warps
a dot product, M rows of x and R rows of w at a time, and G teams. The bits depend on the weights' values alone.
"""

from collections.abc import Callable

from kdtr_cli.engine.kernel_table import Dims, Kernel, args, up

__all__ = ["FORMS", "PLAIN", "PRODUCTS", "embed", "expert_matmul", "matmul", "matmuls"]

#: How a matrix may lie in device memory, and of those what an element is by itself: one array and no scales.
FORMS = ("f32", "bf16", "f16", "int4", "fp8")
PLAIN = ("f32", "bf16", "f16")

#: variant → rows of x, outputs of a block
_MATMULS = {
    "w1_m1_r4": (1, 16),
    "w1_m4_r2": (4, 8),
    "w1_m16_r1": (16, 4),
    "w4_m1_r1": (1, 1),
    "w4_m1_r4": (1, 4),
    "w4_m4_r4": (4, 4),
    "w4_m8_r4": (8, 4),
    "w4_m16_r4_g2": (16, 8),
}
_EXPERT_MATMULS = {"w1_m1_r4": 16, "w1_m4_r2": 8, "w4_m1_r2": 2, "w4_m1_r4": 4, "w4_m4_r4": 4}
_PACKED_ONLY = ("w4_m1_r4",)  # of these

_SCALES = {
    "int4": "in bf16 scale16?[{of}, n, groups]\nin f32 scale32?[{of}, n, groups]",
    "fp8": "in f32 scale[{of}, row_blocks, column_blocks]",
}
_WEIGHTS = {
    **{form: f"in {form} w[{{of}}, n, k]" for form in PLAIN},
    "int4": f"in u16 w[{{of}}, n, quads]\n{_SCALES['int4']}",
    "fp8": f"in u8 w[{{of}}, n, k]\n{_SCALES['fp8']}",
}
_NUMBERS = {"int4": "i32 group\n", "fp8": "i32 block_rows\ni32 block_columns\n"}


def _weights(form: str, of: str) -> str:
    """The array arguments that hold the weights: [of, n, k], or [n, k] for no `of`."""
    return _WEIGHTS[form].format(of=of).replace("[, ", "[")


def _weight_bytes(form: str) -> Callable[[Dims], int]:
    """Bytes of a matrix [n, k] with its scales."""
    if form == "int4":
        return lambda d: d["n"] * (4 * up(d["k"], 8) + (4 if d.get("scale16") is None else 2) * up(d["k"], d["group"]))
    if form == "fp8":
        return lambda d: d["n"] * d["k"] + 4 * up(d["n"], d["block_rows"]) * up(d["k"], d["block_columns"])
    return lambda d: (4 if form == "f32" else 2) * d["n"] * d["k"]


def _named(kernel: str, form: str, variant: str = "") -> str:
    return "_".join(part for part in (kernel, "" if form == "f32" else form, variant) if part)


def _matmul_kernel(form: str, variant: str) -> Kernel:
    heads = form in PLAIN
    rows, outputs = _MATMULS[variant]
    of_weights = _weight_bytes(form)
    ends = "i64 x_head\ni64 w_head\ni64 y_head" if heads else ""
    file = f"matmul_{form}.cu" if form != "f32" else "matmul_warp.cu" if variant[:2] == "w1" else "matmul_block.cu"
    return Kernel(
        _named("matmul", form, variant),
        file,
        args(f"""
in f32 x[rows, x_row]
{_weights(form, "heads" if heads else "")}
in f32 bias?[n]
in f32 residual?[rows, y_row]
out f32 y[rows, y_row]
i32 rows
i32 n
i32 k
{_NUMBERS.get(form, "")}i64 x_row
i64 y_row
{ends}
"""),
        lambda d: (up(d["n"], outputs), up(d["rows"], rows), d["heads"]),
        _named("matmul", form),
        block=(128, 2 if variant.endswith("_g2") else 1, 1),
        bytes=lambda d: d["heads"] * (of_weights(d) + 4 * d["rows"] * (d["n"] + d["k"])),
        flops=lambda d: 2 * d["heads"] * d["rows"] * d["n"] * d["k"],
    )


def _expert_kernel(form: str, variant: str) -> Kernel:
    outputs, of_weights = _EXPERT_MATMULS[variant], _weight_bytes(form)
    return Kernel(
        _named("expert_matmul", form, variant),
        f"{_named('expert_matmul', form)}.cu",
        args(f"""
in f32 x[x_rows, k]
{_weights(form, "experts")}
in i32 items[item_count]
in i32 tiles[tile_places, 3]
in i32 tile_count[1]
out f32 y[item_count, n]
i32 n
i32 k
{_NUMBERS.get(form, "")}i32 items_a_row
"""),
        lambda d: (up(d["n"], outputs), d["tile_places"], 1),
        _named("expert_matmul", form),
        bytes=lambda d: d["touched"] * of_weights(d) + 4 * d["item_count"] * (d["n"] + d["k"]),
        flops=lambda d: 2 * d["item_count"] * d["n"] * d["k"],
    )


def _embed_kernel(form: str) -> Kernel:
    return Kernel(
        _named("embed", form),
        "embed.cu",
        args(f"""
in i32 ids[rows]
in {form} table[vocab, n]
out f32 x[rows, n]
i32 n
"""),
        lambda d: (up(d["n"], 128), d["rows"], 1),
        _named("embed", form),
        bytes=lambda d: (8 if form == "f32" else 6) * d["rows"] * d["n"],
    )


#: The rows of the table.
PRODUCTS = (
    *(_embed_kernel(form) for form in PLAIN),
    *(_matmul_kernel(form, variant) for form in FORMS for variant in _MATMULS),
    *(
        _expert_kernel(form, variant)
        for form in FORMS
        for variant in _EXPERT_MATMULS
        if form not in PLAIN or variant not in _PACKED_ONLY
    ),
)


def embed(form: str) -> str:
    """The kernel that reads rows of an embedding of this form, one of PLAIN."""
    return _named("embed", form)


def matmul(kind: str, rows: int, n: int, k: int, form: str = "f32") -> str:
    """The kernel for a matrix product of this size on a device of this kind; the bits are the same for all."""
    return _named("matmul", form, _variant(kind, rows, n, k))


def _variant(kind: str, rows: int, n: int, k: int) -> str:
    # the CPU device's cost is one collective a warp (14 ns a lane), so as many results as fit share it;
    # on a GPU one warp holds all the quads of a short k: three of four would idle
    if kind == "cpu" or k <= 128:
        return "w1_m1_r4" if rows == 1 else "w1_m4_r2" if rows <= 4 else "w1_m16_r1"
    # measured in float32 on an H200 (docs/log.md): few outputs want one a team; 16 rows want two teams on a wide matrix
    if rows == 1:
        return "w4_m1_r1" if n < 4096 else "w4_m1_r4"
    if rows <= 4:
        return "w4_m4_r4"
    return "w4_m8_r4" if rows <= 8 or n < 4096 else "w4_m16_r4_g2"


def matmuls(kind: str, rows: int, form: str) -> set[str]:
    """Every kernel that products of up to so many rows may launch, whatever their sizes."""
    sizes = (1, 1 << 20)
    return {matmul(kind, m, n, k, form) for m in range(1, rows + 1) for n in sizes for k in sizes}


def expert_matmul(kind: str, tile: int, k: int, form: str = "f32") -> str:
    """The kernel for expert tiles of at most this many rows of k elements."""
    if kind == "cpu":
        return _named("expert_matmul", form, "w1_m1_r4" if tile == 1 else "w1_m4_r2")
    # measured on an H200 (docs/log.md): a short row has too few quads for four warps; a byte a weight wants a warp, too
    one = "w4_m1_r4" if form == "int4" else "w1_m1_r4" if form == "fp8" or k <= 4096 else "w4_m1_r2"
    return _named("expert_matmul", form, one if tile == 1 else "w4_m4_r4")

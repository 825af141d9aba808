"""Twins of the kernels that read weights: the values that the checkpoint reader gives, then the contract's product.

Arrays come as the kernels take them: 16-bit values as their bits, four 4-bit weights in a uint16, e4m3 as bytes.
"""

import ml_dtypes
import numpy as np

from kdtr_cli.model.checkpoint import to_float32
from kdtr_cli.model.quant import dequantise_fp8, dequantise_int4
from kdtr_cli.reference import arith

__all__ = ["PRODUCT_TWINS"]

BF16 = np.dtype(ml_dtypes.bfloat16)


def embed(ids, table, x, **_):
    x[:] = table[ids]


def embed_bf16(table, **rest):
    embed(table=_bf16(table), **rest)


def embed_f16(table, **rest):
    embed(table=_f16(table), **rest)


def matmul(x, w, bias, residual, y, rows, n, k, x_row, y_row, x_head, y_head, heads, **_):
    flat_x, flat_y = x.reshape(-1), y.reshape(-1)
    for h in range(heads):
        out = arith.linear(_rows(flat_x, h * x_head, rows, x_row, k), w[h], bias)
        place = _rows(flat_y, h * y_head, rows, y_row, n)
        if residual is not None:
            out = _rows(residual.reshape(-1), h * y_head, rows, y_row, n) + out
        place[:] = out


def _rows(flat, first, rows, stride, width):
    """View of rows x width elements, `stride` apart, from element `first` of a flat array."""
    size = flat.itemsize
    assert first + (rows - 1) * stride + width <= flat.size
    return np.lib.stride_tricks.as_strided(flat[first:], (rows, width), (stride * size, size))


def matmul_bf16(w, **rest):
    matmul(w=_bf16(w), **rest)


def matmul_f16(w, **rest):
    matmul(w=_f16(w), **rest)


def matmul_int4(w, scale16, scale32, k, group, **rest):
    matmul(w=_int4(w, scale16, scale32, k, group)[None], k=k, x_head=0, y_head=0, **rest)


def matmul_fp8(w, scale, block_rows, block_columns, **rest):
    matmul(w=_fp8(w, scale, block_rows, block_columns)[None], x_head=0, y_head=0, **rest)


def expert_matmul(x, w, items, tiles, tile_count, y, items_a_row, **_):
    for expert, first, count in tiles[: tile_count[0]]:
        these = items[first : first + count]
        y[these] = arith.linear(x[these // items_a_row], w[expert])


def expert_matmul_bf16(w, **rest):
    expert_matmul(w=_bf16(w), **rest)


def expert_matmul_f16(w, **rest):
    expert_matmul(w=_f16(w), **rest)


def expert_matmul_int4(w, scale16, scale32, k, group, **rest):
    flat = [a if a is None else a.reshape(-1, a.shape[-1]) for a in (w, scale16, scale32)]
    expert_matmul(w=_int4(*flat, k, group).reshape(*w.shape[:2], k), **rest)


def expert_matmul_fp8(w, scale, block_rows, block_columns, **rest):
    wide = [_fp8(*of_one, block_rows, block_columns) for of_one in zip(w, scale, strict=True)]
    expert_matmul(w=np.stack(wide), **rest)


def _bf16(bits):
    return to_float32(bits.view(BF16))


def _f16(bits):
    return to_float32(bits.view(np.float16))


def _int4(w, scale16, scale32, k, group):
    return dequantise_int4(w.view(np.int32), scale32 if scale16 is None else _bf16(scale16), k, group)


def _fp8(w, scale, block_rows, block_columns):
    return dequantise_fp8(w.view(ml_dtypes.float8_e4m3fn), scale, (block_rows, block_columns))


#: twin name → function, as the kernel table names them
PRODUCT_TWINS = {
    f.__name__: f
    for f in (
        embed,
        embed_bf16,
        embed_f16,
        matmul,
        matmul_bf16,
        matmul_f16,
        matmul_int4,
        matmul_fp8,
        expert_matmul,
        expert_matmul_bf16,
        expert_matmul_f16,
        expert_matmul_int4,
        expert_matmul_fp8,
    )
}

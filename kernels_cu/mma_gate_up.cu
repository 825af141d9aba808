// mma_gate_up.cu: h = SiLU(x G^T) * (x U^T) for bf16 rows and weights, sums in float32 (tier bf16).
//
// in   x        bf16 [rows, x_row]                        x_row a multiple of 8
//      w        bf16 [tile_pairs, 2, units, 1024]         G and U [n, k] in fragment order, tile by tile in turn: 16 outputs of
//                                                         G, the same 16 of U; mma_matmul.cuh has the order within
// out  h        bf16 [rows, n]
//
// launch  grid (ceil(n / 16), ceil(rows / (8 M))), block 32 W, shared memory 1024 W M; variants as in mma_matmul.cu
// work    mma_matmul.cuh with two tiles a block: the gate's and the up projection's
// order   mma_matmul.cuh; the SiLU is the contract's (common.cuh), the product is rounded once
// bytes   4 n k + rows (2 k + 2 n)
#include "mma_matmul.cuh"

template <int W, int M, int D, int K>
__device__ __forceinline__ void gate_up(const bf16* x, const bf16* w, bf16* h, int rows, int n, int k, i64 x_row) {
  const int row = blockIdx.y * 8 * M, g = (threadIdx.x & 31) >> 2;
  const i64 tile_step = (i64)(((K ? K : k) + 63) / 64) * 1024;
  const bf16* mine[M];
#pragma unroll
  for (int m = 0; m < M; ++m) mine[m] = row + 8 * m + g < rows ? x + (row + 8 * m + g) * x_row : nullptr;
  mma_product<W, M, 2, D, K>(w + 2 * blockIdx.x * tile_step, tile_step, 2, mine, k);
  for (int j = threadIdx.x; j < M * 128; j += W * 32) {
    const Place p = place_at(j);
    const int output = blockIdx.x * 16 + p.output;
    if (output >= n || row + p.row >= rows) continue;
    const float gate = sum_at<W, M>(0, j), up = sum_at<W, M>(1, j);
    h[(i64)(row + p.row) * n + output] = round_bf16(exact_silu(gate) * up);
  }
}

#define KERNEL(name, W, M, D, K, BLOCKS)                                                                       \
  extern "C" __global__ void __launch_bounds__(32 * W, BLOCKS)                                                 \
      name(const bf16* x, const bf16* w, bf16* h, int rows, int n, int k, i64 x_row) {                            \
    gate_up<W, M, D, K>(x, w, h, rows, n, k, x_row);                                                           \
  }
KERNEL(mma_gate_up_w1_m1, 1, 1, 1, 0, 16)
KERNEL(mma_gate_up_w1_m2, 1, 2, 1, 0, 16)
KERNEL(mma_gate_up_w1_m4, 1, 4, 1, 0, 16)
KERNEL(mma_gate_up_w4_m1, 4, 1, 2, 0, 4)
KERNEL(mma_gate_up_w4_m2, 4, 2, 1, 0, 4)
KERNEL(mma_gate_up_w4_m4, 4, 4, 1, 0, 2)
KERNEL(mma_gate_up_w8_m1, 8, 1, 2, 0, 2)
KERNEL(mma_gate_up_w8_m2, 8, 2, 2, 0, 2)
KERNEL(mma_gate_up_w8_m4, 8, 4, 1, 0, 2)
KERNEL(mma_gate_up_w8_m1_k7168, 8, 1, 2, 7168, 2)
KERNEL(mma_gate_up_w8_m2_k7168, 8, 2, 2, 7168, 2)
KERNEL(mma_gate_up_w8_m4_k7168, 8, 4, 1, 7168, 2)

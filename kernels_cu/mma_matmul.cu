// mma_matmul.cu: y = x W^T (+ bias) (+ residual) for bf16 rows and weights, sums in float32 (tier bf16).
//
// in   x        bf16 [rows, x_row]                        x_row and x_head multiples of 8
//      w        bf16 [heads, tiles, units, 1024]          one matrix [n, k] a head in fragment order; mma_matmul.cuh has it
//      bias     float32 [n] or null; residual float32 [rows, y_row] or null (it may be y32 itself)
// out  y32      float32 [rows, y_row] or null;  y16 bf16 [rows, y_row] or null: the same sum, rounded once
//
// launch  grid (ceil(n / 16 / T), ceil(rows / (8 M)), heads), block 32 W, shared memory 512 W M T
// work    mma_matmul.cuh
// order   mma_matmul.cuh; then + bias, then + residual
// bytes   2 n k + rows (2 k + 4 n), the weights once for every 8 M rows
#include "mma_matmul.cuh"

template <int W, int M, int T, int D, int K>
__device__ __forceinline__ void matmul(const bf16* x, const bf16* w, const float* bias, const float* residual, float* y32, bf16* y16,
                                       int rows, int n, int k, i64 x_row, i64 y_row, i64 x_head, i64 y_head) {
  const int tiles = (n + 15) / 16, tile = blockIdx.x * T, row = blockIdx.y * 8 * M, g = (threadIdx.x & 31) >> 2;
  const i64 tile_step = (i64)((K ? K : k) + 63) / 64 * 1024;
  const bf16* mine[M];
#pragma unroll
  for (int m = 0; m < M; ++m)
    mine[m] = row + 8 * m + g < rows ? x + blockIdx.z * x_head + (row + 8 * m + g) * x_row : nullptr;
  mma_product<W, M, T, D, K>(w + ((i64)blockIdx.z * tiles + tile) * tile_step, tile_step, tiles - tile, mine, k);
#pragma unroll
  for (int r = 0; r < T; ++r)
    for (int j = threadIdx.x; j < M * 128; j += W * 32) {
      const Place p = place_at(j);
      const int output = (tile + r) * 16 + p.output;
      if (output >= n || row + p.row >= rows) continue;
      const i64 at = blockIdx.z * y_head + (row + p.row) * y_row + output;
      float sum = sum_at<W, M>(r, j);
      if (bias) sum = sum + bias[output];
      if (residual) sum = residual[at] + sum;
      if (y32) y32[at] = sum;
      if (y16) y16[at] = round_bf16(sum);
    }
}

#define KERNEL(name, W, M, T, D, K, BLOCKS)                                                                                  \
  extern "C" __global__ void __launch_bounds__(32 * W, BLOCKS)                                                               \
      name(const bf16* x, const bf16* w, const float* bias, const float* residual, float* y32, bf16* y16, int rows, int n, int k, \
           i64 x_row, i64 y_row, i64 x_head, i64 y_head) {                                                                   \
    matmul<W, M, T, D, K>(x, w, bias, residual, y32, y16, rows, n, k, x_row, y_row, x_head, y_head);                         \
  }
// short rows: a warp has all of k
KERNEL(mma_matmul_w1_m1_t1, 1, 1, 1, 2, 0, 16)
KERNEL(mma_matmul_w1_m2_t1, 1, 2, 1, 2, 0, 16)
KERNEL(mma_matmul_w1_m4_t1, 1, 4, 1, 1, 0, 16)
// k from 512 on
KERNEL(mma_matmul_w4_m1_t1, 4, 1, 1, 3, 0, 4)
KERNEL(mma_matmul_w4_m2_t1, 4, 2, 1, 2, 0, 5)
KERNEL(mma_matmul_w4_m4_t2, 4, 4, 2, 1, 0, 2)
KERNEL(mma_matmul_w4_m1_t1_k1536, 4, 1, 1, 3, 1536, 4)
KERNEL(mma_matmul_w4_m2_t1_k1536, 4, 2, 1, 2, 1536, 5)
KERNEL(mma_matmul_w4_m4_t2_k1536, 4, 4, 2, 1, 1536, 2)
KERNEL(mma_matmul_w4_m1_t1_k2048, 4, 1, 1, 3, 2048, 4)
KERNEL(mma_matmul_w4_m2_t1_k2048, 4, 2, 1, 2, 2048, 5)
KERNEL(mma_matmul_w4_m4_t2_k2048, 4, 4, 2, 1, 2048, 2)
// large matrices: from 9 rows on two tiles a block halve the reads of x
KERNEL(mma_matmul_w8_m1_t1, 8, 1, 1, 4, 0, 2)
KERNEL(mma_matmul_w8_m2_t2, 8, 2, 2, 2, 0, 2)
KERNEL(mma_matmul_w8_m3_t2, 8, 3, 2, 1, 0, 2)
KERNEL(mma_matmul_w8_m4_t2, 8, 4, 2, 1, 0, 2)
KERNEL(mma_matmul_w8_m1_t1_k7168, 8, 1, 1, 4, 7168, 2)
KERNEL(mma_matmul_w8_m2_t2_k7168, 8, 2, 2, 2, 7168, 2)
KERNEL(mma_matmul_w8_m3_t2_k7168, 8, 3, 2, 1, 7168, 2)
KERNEL(mma_matmul_w8_m4_t2_k7168, 8, 4, 2, 1, 7168, 2)
KERNEL(mma_matmul_w8_m1_t1_k8192, 8, 1, 1, 4, 8192, 2)
KERNEL(mma_matmul_w8_m2_t2_k8192, 8, 2, 2, 2, 8192, 2)
KERNEL(mma_matmul_w8_m3_t2_k8192, 8, 3, 2, 1, 8192, 2)
KERNEL(mma_matmul_w8_m4_t2_k8192, 8, 4, 2, 1, 8192, 2)
// few outputs of a long k: 16 warps a tile
KERNEL(mma_matmul_w16_m1_t1, 16, 1, 1, 4, 0, 1)
KERNEL(mma_matmul_w16_m2_t1, 16, 2, 1, 2, 0, 1)
KERNEL(mma_matmul_w16_m4_t1, 16, 4, 1, 1, 0, 1)
KERNEL(mma_matmul_w16_m4_t2, 16, 4, 2, 1, 0, 1)
KERNEL(mma_matmul_w16_m1_t1_k7168, 16, 1, 1, 4, 7168, 1)
KERNEL(mma_matmul_w16_m2_t1_k7168, 16, 2, 1, 2, 7168, 1)
KERNEL(mma_matmul_w16_m4_t1_k7168, 16, 4, 1, 1, 7168, 1)
KERNEL(mma_matmul_w16_m4_t2_k7168, 16, 4, 2, 1, 7168, 1)

// norm16.cu: y = x / sqrt(mean(x * x) + eps) * weight, read in float32 and given in bf16 (tier bf16).
//
// in   x      float32 [rows, x_row]    the first n of each row; x_row a multiple of 4
//      weight float32 [n]
// out  y16    bf16 [rows, n]           rounded once;  y32 float32 [rows, n] or null: not rounded, for the router
//
// launch  grid (rows), block 256
// work    a thread takes quads t, t + 256, ... twice: for the sum and for the product (from cache)
// order   a thread's quads ascending, each (a + b) + (c + d) of its squares; lanes by the fold of common.cuh, the eight warps by
//         tree_sum
// bytes   rows n (4 + 2 + 4 if y32) + 4 n
#include "mma.cuh"

extern "C" __global__ void __launch_bounds__(256)
    norm16(const float* x, const float* weight, bf16* y16, float* y32, int n, float eps, i64 x_row) {
  __shared__ float part[8];
  const int t = threadIdx.x, quads = n / 4;
  wait_for_inputs();
  start_dependents();
  const float* row = x + blockIdx.x * x_row;
  float sum[1] = {0.f};
  for (int q = t; q < quads; q += 256) {
    const float4 v = ((const float4*)row)[q];
    sum[0] = sum[0] + ((v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w));
  }
  for (int i = 4 * quads + t; i < n; i += 256) sum[0] = sum[0] + row[i] * row[i];
  fold32(sum);
  if ((t & 31) == 0) part[t >> 5] = sum[0];
  __syncthreads();
  float all[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) all[i] = part[i];
  const float r = 1.0f / sqrtf(tree_sum(all) / (float)n + eps);
  for (int i = t; i < n; i += 256) {
    const float y = (row[i] * r) * weight[i];
    const i64 at = (i64)blockIdx.x * n + i;
    y16[at] = round_bf16(y);
    if (y32) y32[at] = y;
  }
}

// norm16.cu: y = x / sqrt(mean(x * x) + eps) * weight, read in float32 and given in bf16 (tier bf16).
//
// in   x      float32 [rows, x_row]    the first n of each row; x_row a multiple of 4
//      weight float32 [n]
// out  y16    bf16 [rows, n]           rounded once;  y32 float32 [rows, n] or null: not rounded, for the router
//
// launch  grid (rows), block 1024: one row is one block's work, so its latency is what counts
// work    a thread takes quads t, t + 1024, ...; the first two of them, all of a row of 8192, stay in registers
// order   a thread's quads ascending, each (a + b) + (c + d) of its squares; lanes by the fold of common.cuh, the 32 warps by
//         tree_sum
// bytes   rows n (4 + 2 + 4 if y32) + 4 n
#include "mma.cuh"

#define KEPT 2

extern "C" __global__ void __launch_bounds__(1024)
    norm16(const float* x, const float* weight, bf16* y16, float* y32, int n, float eps, i64 x_row) {
  __shared__ float part[32];
  const int t = threadIdx.x, quads = n / 4;
  const bool whole = (n & 3) == 0 && (x_row & 3) == 0;
  wait_for_inputs();
  start_dependents();
  const float* row = x + blockIdx.x * x_row;
  auto quad = [&](int q) {
    if (whole) return ((const float4*)row)[q];
    return float4{row[4 * q], row[4 * q + 1], row[4 * q + 2], row[4 * q + 3]};
  };
  float sum[1] = {0.f};
  float4 kept[KEPT];
#pragma unroll
  for (int i = 0; i < KEPT; ++i)
    if (t + 1024 * i < quads) kept[i] = quad(t + 1024 * i);
  auto add = [&](float4 v) { sum[0] = sum[0] + ((v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w)); };
#pragma unroll
  for (int i = 0; i < KEPT; ++i)
    if (t + 1024 * i < quads) add(kept[i]);
  for (int q = t + 1024 * KEPT; q < quads; q += 1024) add(quad(q));
  for (int i = 4 * quads + t; i < n; i += 1024) sum[0] = sum[0] + row[i] * row[i];
  fold32(sum);
  if ((t & 31) == 0) part[t >> 5] = sum[0];
  __syncthreads();
  float all[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) all[i] = part[i];
  const float r = 1.0f / sqrtf(tree_sum(all) / (float)n + eps);
  const i64 out = (i64)blockIdx.x * n;
  auto put = [&](int i, float v) {
    const float y = (v * r) * weight[i];
    y16[out + i] = round_bf16(y);
    if (y32) y32[out + i] = y;
  };
  auto put_quad = [&](int q, float4 v) {
    put(4 * q, v.x);
    put(4 * q + 1, v.y);
    put(4 * q + 2, v.z);
    put(4 * q + 3, v.w);
  };
#pragma unroll
  for (int i = 0; i < KEPT; ++i)
    if (t + 1024 * i < quads) put_quad(t + 1024 * i, kept[i]);
  for (int q = t + 1024 * KEPT; q < quads; q += 1024) put_quad(q, quad(q));
  for (int i = 4 * quads + t; i < n; i += 1024) put(i, row[i]);
}

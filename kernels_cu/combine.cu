// combine.cu: the weighted sum of a token's experts, the shared expert and the residual (rules 12, 13).
//
// in   expert   float32 [rows, slots, n]      each item's expert output
//      weights  float32 [rows, slots]
//      shared   float32 [rows, n] or null     the shared expert's output
//      residual float32 [rows, n]
// out  y        float32 [rows, n]             may be the residual itself
//
// launch  grid (ceil(n / 128), rows), block 128; one element a thread
// order   +0, then + w * E in slot order, then + shared, then residual + that
// bytes   4 * rows * n * (slots + 3)
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
    combine(const float* expert, const float* weights, const float* shared, const float* residual, float* y, int slots, int n) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= n) return;
  const i64 row = blockIdx.y;
  float sum = 0.f;
  for (int j = 0; j < slots; ++j) sum = sum + weights[row * slots + j] * expert[(row * slots + j) * n + i];
  if (shared) sum = sum + shared[row * n + i];
  y[row * n + i] = residual[row * n + i] + sum;
}

// expert_matmul.cuh: y[item] = x[item / items_a_row] W_e^T for every (token, slot) item of every touched expert.
//
// in   x      float32 [items / items_a_row, k]   items_a_row = slots for gate+up (one row a token), 1 for down
//      w      [experts, n, k]                    in one of the forms of weights.cuh, each expert a matrix of its own:
//               float32, bf16 or f16 [experts, n, k]
//               int4: w uint16 [experts, n, 2 ceil(k / 8)], scale16 bf16 or scale32 float32 [experts, n, ceil(k / group)]
//               fp8:  w uint8 [experts, n, k], scale float32 [experts, ceil(n / block_rows), ceil(k / block_columns)]
//      items  int32 [items]                      item numbers sorted by expert      } made by group_experts
//      tiles  int32 [tiles, 3]                   expert, first place in items, rows } on the device
//      tile_count int32 [1]
// out  y      float32 [items, n]
//
// work    one tile: up to M rows of one expert, by one warp (w1) or four (w4) as in matmul.cuh
// order   sum128 (rules 3, 4)
// bytes   tiles * n * k * b + 4 * items * (k + n), b bytes a weight as in matmul.cuh
#pragma once
#include "matmul.cuh"

// The body of a kernel; `all` are the experts' matrices.
#define EXPERT_TILE(M, all, ...)                                                                         \
  if ((int)blockIdx.y >= *tile_count) return;                                                            \
  const int* tile = tiles + 3 * blockIdx.y;                                                              \
  const int expert = tile[0], first = tile[1], count = tile[2];                                          \
  const float* in[M];                                                                                    \
  for (int m = 0; m < M; ++m) in[m] = x + (i64)(items[first + min(m, count - 1)] / items_a_row) * k;     \
  auto put = [&](int m, int column, float dot) {                                                         \
    if (m < count) y[(i64)items[first + m] * n + column] = dot;                                          \
  };                                                                                                     \
  const auto weights = all.matrix(expert, n);                                                            \
  BY_QUADS_OR_NOT(aligned_quads(x, k, 0), weights, in, n, k, put, __VA_ARGS__)

#define EXPERT_MATMUL(name, T, M, ...)                                                                                  \
  extern "C" __global__ void __launch_bounds__(128)                                                                     \
      name(const float* x, const T* w, const int* items, const int* tiles, const int* tile_count, float* y, int n,      \
           int k, int items_a_row) {                                                                                    \
    const Plain<T> all = {w, k};                                                                                        \
    EXPERT_TILE(M, all, __VA_ARGS__)                                                                                    \
  }

#define INT4_EXPERT_MATMUL(name, M, ...)                                                                                \
  extern "C" __global__ void __launch_bounds__(128)                                                                     \
      name(const float* x, const u16* w, const bf16* scale16, const float* scale32, const int* items, const int* tiles, \
           const int* tile_count, float* y, int n, int k, int group, int items_a_row) {                                 \
    const Int4 all = {w, scale16, scale32, k, group};                                                                   \
    EXPERT_TILE(M, all, __VA_ARGS__)                                                                                    \
  }

#define FP8_EXPERT_MATMUL(name, M, ...)                                                                                 \
  extern "C" __global__ void __launch_bounds__(128)                                                                     \
      name(const float* x, const u8* w, const float* scale, const int* items, const int* tiles, const int* tile_count,  \
           float* y, int n, int k, int block_rows, int block_columns, int items_a_row) {                                \
    const Fp8 all = {w, scale, k, block_rows, block_columns};                                                           \
    EXPERT_TILE(M, all, __VA_ARGS__)                                                                                    \
  }

// matmul.cuh: y = x W^T in the contract's order: the two work splits that every matrix kernel is made of.
//
// in   x  float32 [rows, k]     row stride x_row; head h starts at h * x_head
//      w  float32 [n, k]        row stride k;     head h starts at h * w_head
//      bias float32 [n] or null; residual float32 [rows, n] or null, laid out as y
// out  y  float32 [rows, n]     row stride y_row; head h starts at h * y_head
//
// work    one_warp:   a warp computes R outputs for M rows;   outputs a block = 4 R, no shared memory, no barrier
//         four_warps: a team of 128 threads computes R outputs for M rows; outputs a block of G teams = G R,
//                     16 R M bytes of shared memory a team
//
//            k ->  0        128      256      384      512
//         W row n |g0 lanes |g1 lanes|g2 lanes|g3 lanes|g0 ...      one float4 a lane
//
// order   sum128 (rules 3, 4); y = residual + (dot + bias): a bias after the dot, the residual after y is complete
// bytes   4 * heads * (n * k * ceil(rows / M) + rows * (k + n)): the weights once for each M rows
//
// Which variant serves which number of rows stands in the kernel table, as measured; bits do not depend on it.
#pragma once
#include "dot.cuh"

// put(m, n, value) stores output n of row m; it is called once for each element of the block's tile inside [0, n_size).
template <int M, int R, bool VEC, class Put>
__device__ __forceinline__ void one_warp(const float* w, const float* const (&x)[M], int n_size, int k_size, Put put) {
  constexpr int D = R * M, B = (D + 7) / 8, SHARE = 32 / (D < 8 ? D : 8);  // lanes that hold one dot
  const int n0 = (blockIdx.x * 4 + (threadIdx.x >> 5)) * R, lane = threadIdx.x & 31;
  if (n0 >= n_size) return;
  const float* rows[R];
#pragma unroll
  for (int r = 0; r < R; ++r) rows[r] = w + (i64)min(n0 + r, n_size - 1) * k_size;
  float total[B];
  warp_dots<M, R, VEC>(rows, x, k_size, total);
  if (lane % SHARE) return;
#pragma unroll
  for (int b = 0; b < B; ++b) {
    const int i = b * 8 + lane / SHARE;
    if (n0 + i / M < n_size) put(i % M, n0 + i / M, total[b]);
  }
}

// G teams of 128 threads walk the same x side by side, each for its own R outputs: x is read from the second-level cache
// once for G teams.
template <int M, int R, bool VEC, int G, class Put>
__device__ __forceinline__ void four_warps(const float* w, const float* const (&x)[M], int n_size, int k_size, Put put) {
  __shared__ float part[G][R * M][4];
  const int team = threadIdx.y, n0 = (blockIdx.x * G + team) * R, t = threadIdx.x;
  const float* rows[R];
#pragma unroll
  for (int r = 0; r < R; ++r) rows[r] = w + (i64)min(n0 + r, n_size - 1) * k_size;
  const float total = block_dots<M, R, VEC>(t, rows, x, k_size, part[team]);
  if (t < R * M && n0 + t / M < n_size) put(t % M, n0 + t / M, total);
}

// A quad is one aligned float4 if every row of x and w starts on 16 bytes: the same answer for the whole launch.
__device__ __forceinline__ bool aligned_quads(const float* x, const float* w, int k_size, i64 x_strides, i64 w_strides) {
  return ((k_size | x_strides | w_strides) & 3) == 0 && (((u64)x | (u64)w) & 15) == 0;
}

// A kernel of TEAMS teams of 128 threads and M rows; what follows is its work split, one_warp<...> or four_warps<...>, with
// VEC where it says whether quads are aligned.
#define MATMUL(name, TEAMS, M, ...)                                                                                     \
  extern "C" __global__ void __launch_bounds__(128 * TEAMS)                                                             \
      name(const float* x, const float* w, const float* bias, const float* residual, float* y, int rows, int n, int k,  \
           i64 x_row, i64 y_row, i64 x_head, i64 w_head, i64 y_head) {                                                  \
    const i64 h = blockIdx.z;                                                                                           \
    const int m0 = blockIdx.y * M;                                                                                      \
    const float* in[M]; /* rows past the end repeat the last one: their results are not stored */                       \
    for (int m = 0; m < M; ++m) in[m] = x + h * x_head + (i64)min(m0 + m, rows - 1) * x_row;                            \
    auto put = [&](int m, int column, float dot) {                                                                      \
      if (m0 + m >= rows) return;                                                                                       \
      const i64 at = h * y_head + (i64)(m0 + m) * y_row + column;                                                       \
      if (bias) dot = dot + bias[column];                                                                               \
      y[at] = residual ? residual[at] + dot : dot;                                                                      \
    };                                                                                                                  \
    if (aligned_quads(x, w, k, x_row | x_head, w_head)) {                                                               \
      constexpr bool VEC = true;                                                                                        \
      __VA_ARGS__(w + h * w_head, in, n, k, put);                                                                       \
    } else {                                                                                                            \
      constexpr bool VEC = false;                                                                                       \
      __VA_ARGS__(w + h * w_head, in, n, k, put);                                                                       \
    }                                                                                                                   \
  }

#define EXPERT_MATMUL(name, M, ...)                                                                                     \
  extern "C" __global__ void __launch_bounds__(128)                                                                     \
      name(const float* x, const float* w, const int* items, const int* tiles, const int* tile_count, float* y, int n,  \
           int k, int items_a_row) {                                                                                    \
    if ((int)blockIdx.y >= *tile_count) return;                                                                         \
    const int* tile = tiles + 3 * blockIdx.y;                                                                           \
    const int expert = tile[0], first = tile[1], count = tile[2];                                                       \
    const float* in[M];                                                                                                 \
    for (int m = 0; m < M; ++m) in[m] = x + (i64)(items[first + min(m, count - 1)] / items_a_row) * k;                  \
    const float* matrix = w + (i64)expert * n * k;                                                                      \
    auto put = [&](int m, int column, float dot) {                                                                      \
      if (m < count) y[(i64)items[first + m] * n + column] = dot;                                                       \
    };                                                                                                                  \
    if (aligned_quads(x, w, k, 0, 0)) {                                                                                 \
      constexpr bool VEC = true;                                                                                        \
      __VA_ARGS__(matrix, in, n, k, put);                                                                               \
    } else {                                                                                                            \
      constexpr bool VEC = false;                                                                                       \
      __VA_ARGS__(matrix, in, n, k, put);                                                                               \
    }                                                                                                                   \
  }

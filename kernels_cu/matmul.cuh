// matmul.cuh: y = x W^T in the contract's order: the two work splits that every matrix kernel is made of.
//
// in   x  float32 [rows, k]     row stride x_row; head h starts at h * x_head
//      w  [n, k]                in one of the forms of weights.cuh:
//           float32, bf16 or f16 [n, k], head h starts at h * w_head
//           int4: w uint16 [n, 2 ceil(k / 8)] (four weights each), scale16 bf16 or scale32 float32 [n, ceil(k / group)]
//           fp8:  w uint8 [n, k], scale float32 [ceil(n / block_rows), ceil(k / block_columns)]
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
// bytes   heads * (n * k * ceil(rows / M) * b + 4 * rows * (k + n)): the weights once for each M rows, b bytes a weight:
//         float32 4, bf16 and f16 2, int4 1/2 + 2 / group (4 / group with scale32), fp8 1 + 4 / (rows * columns of a block)
//
// Which variant serves which number of rows stands in the kernel table, as measured; bits do not depend on it.
#pragma once
#include "dot.cuh"

// put(m, n, value) stores output n of row m; it is called once for each element of the block's tile inside [0, n_size).
template <int M, int R, bool VEC, class Weights, class Put>
__device__ __forceinline__ void one_warp(const Weights& w, const float* const (&x)[M], int n_size, int k_size, Put put) {
  constexpr int D = R * M, B = (D + 7) / 8, SHARE = 32 / (D < 8 ? D : 8);  // lanes that hold one dot
  const int n0 = (blockIdx.x * 4 + (threadIdx.x >> 5)) * R, lane = threadIdx.x & 31;
  if (n0 >= n_size) return;
  decltype(w.row(0)) rows[R];
#pragma unroll
  for (int r = 0; r < R; ++r) rows[r] = w.row(min(n0 + r, n_size - 1));
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
template <int M, int R, bool VEC, int G, class Weights, class Put>
__device__ __forceinline__ void four_warps(const Weights& w, const float* const (&x)[M], int n_size, int k_size, Put put) {
  __shared__ float part[G][R * M][4];
  const int team = threadIdx.y, n0 = (blockIdx.x * G + team) * R, t = threadIdx.x;
  decltype(w.row(0)) rows[R];
#pragma unroll
  for (int r = 0; r < R; ++r) rows[r] = w.row(min(n0 + r, n_size - 1));
  const float total = block_dots<M, R, VEC>(t, rows, x, k_size, part[team]);
  if (t < R * M && n0 + t / M < n_size) put(t % M, n0 + t / M, total);
}

// Every row of x starts on 16 bytes and ends with a whole quad: the same answer for the whole launch.
__device__ __forceinline__ bool aligned_quads(const float* x, int k_size, i64 x_strides) {
  return ((k_size | x_strides) & 3) == 0 && ((u64)x & 15) == 0;
}

// What follows the name, teams and rows of a kernel is its work split, one_warp<...> or four_warps<...>, with VEC where it
// says whether quads are read as one.
#define BY_QUADS_OR_NOT(x_aligned, weights, in, n, k, put, ...) \
  if (x_aligned && weights.by_quads()) {                        \
    constexpr bool VEC = true;                                  \
    __VA_ARGS__(weights, in, n, k, put);                        \
  } else {                                                      \
    constexpr bool VEC = false;                                 \
    __VA_ARGS__(weights, in, n, k, put);                        \
  }

// The body of a kernel: a tile of y = x W^T for the head's weights.
#define MATMUL_TILE(M, weights, ...)                                                                  \
  const i64 h = blockIdx.z;                                                                           \
  const int m0 = blockIdx.y * M;                                                                      \
  const float* in[M]; /* rows past the end repeat the last one: their results are not stored */       \
  for (int m = 0; m < M; ++m) in[m] = x + h * x_head + (i64)min(m0 + m, rows - 1) * x_row;            \
  auto put = [&](int m, int column, float dot) {                                                      \
    if (m0 + m >= rows) return;                                                                       \
    const i64 at = h * y_head + (i64)(m0 + m) * y_row + column;                                       \
    if (bias) dot = dot + bias[column];                                                               \
    y[at] = residual ? residual[at] + dot : dot;                                                      \
  };                                                                                                  \
  BY_QUADS_OR_NOT(aligned_quads(x, k, x_row | x_head), weights, in, n, k, put, __VA_ARGS__)

// A kernel of TEAMS teams of 128 threads and M rows, for weights of type T as they are: float, bf16 or f16.
#define MATMUL(name, T, TEAMS, M, ...)                                                                                  \
  extern "C" __global__ void __launch_bounds__(128 * TEAMS)                                                             \
      name(const float* x, const T* w, const float* bias, const float* residual, float* y, int rows, int n, int k,      \
           i64 x_row, i64 y_row, i64 x_head, i64 w_head, i64 y_head) {                                                  \
    const Plain<T> weights = {w + (i64)blockIdx.z * w_head, k};                                                         \
    MATMUL_TILE(M, weights, __VA_ARGS__)                                                                                \
  }

// For packed weights; these have one head.
#define INT4_MATMUL(name, TEAMS, M, ...)                                                                                \
  extern "C" __global__ void __launch_bounds__(128 * TEAMS)                                                             \
      name(const float* x, const u16* w, const bf16* scale16, const float* scale32, const float* bias,                  \
           const float* residual, float* y, int rows, int n, int k, int group, i64 x_row, i64 y_row) {                  \
    const i64 x_head = 0, y_head = 0;                                                                                   \
    const Int4 weights = {w, scale16, scale32, k, group};                                                               \
    MATMUL_TILE(M, weights, __VA_ARGS__)                                                                                \
  }

#define FP8_MATMUL(name, TEAMS, M, ...)                                                                                 \
  extern "C" __global__ void __launch_bounds__(128 * TEAMS)                                                             \
      name(const float* x, const u8* w, const float* scale, const float* bias, const float* residual, float* y,         \
           int rows, int n, int k, int block_rows, int block_columns, i64 x_row, i64 y_row) {                           \
    const i64 x_head = 0, y_head = 0;                                                                                   \
    const Fp8 weights = {w, scale, k, block_rows, block_columns};                                                       \
    MATMUL_TILE(M, weights, __VA_ARGS__)                                                                                \
  }

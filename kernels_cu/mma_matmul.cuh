// mma_matmul.cuh: the product of up to 32 rows of bf16 with a streamed bf16 matrix, on matrix units (tier bf16).
//
// mma_matmul_*.cu and mma_expert_*.cu say what is multiplied; this file has the contract.
//
// weights  fragment order: [n / 16, k / 64, 4, 32, 8] bf16, n padded to 16 (or to the tiles of a block) and k to 64 with zeros.
//          A unit, 16 outputs x 64 of k, is 2 kB in a row. Of its four quarters j holds k half q = j / 2 and output half r =
//          j % 2; there lane (g, t) holds output 8 r + g, k = 32 q + 8 t .. + 7. These 16 bytes are the words of two
//          instructions, and eight elements of a row of x have the same order: neither has to move.
// x        bf16, rows 16 bytes aligned, k a multiple of 8: what lies behind a row's k is never read
// work     a block: T tiles of 16 outputs x M tiles of 8 rows; warp v of W takes units v, v + W, ...; D units of weights are in
//          flight a warp, the first ones asked for before the wait for x; x rides beside them
// order    a warp: units ascending, in a unit q = 0, 1, in q the words x y, then z w; then the W sums by tree_sum. k and W decide
//          the bits, so W is part of the numerics and the table keeps one for a matrix (kernels_mma.py); M, T, D, K and the
//          number of rows don't.
// K        a k known to the compiler (a multiple of 64 W) saves predicates: 2 to 15 % (docs/log.md); 0: any
#pragma once
#include "mma.cuh"

// x: of each row tile m this lane's row, or null for none. weights: of the block's first tile; tile_step: elements from a tile to
// the next. tiles: how many of the T exist. Leaves the warps' sums in shared memory, where sum_at adds them up.
template <int W, int M, int T, int D, int K>
__device__ __forceinline__ void mma_product(const bf16* weights, i64 tile_step, int tiles, const bf16* const (&x)[M], int k_given) {
  extern __shared__ float partial[];  // [T][W][M][128]
  static_assert(K % (64 * W) == 0, "a fixed K gives each warp as many units");
  const int k = K ? K : k_given, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
  const int units = (k + 63) / 64, rounds = (units + W - 1) / W;
  const bf16* wp = weights + warp * 1024 + lane * 8;
  const int first_k = warp * 64 + t * 8;
  float acc[T][M][4];
#pragma unroll
  for (int r = 0; r < T; ++r)
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[r][m][c] = 0.f;

  Words a[D][T][4], b[D][M][2];
  auto fetch_weights = [&](int d, int i) {
    const bool there = K ? i < rounds : warp + i * W < units;
#pragma unroll
    for (int r = 0; r < T; ++r)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        a[d][r][j] = load_weights(wp + (i64)i * (W * 1024) + r * tile_step + j * 256, there && (T == 1 || r < tiles));
  };
  auto fetch_x = [&](int d, int i) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int at = first_k + i * (W * 64) + 32 * q;
        b[d][m][q] = load_activations(x[m] + at, x[m] && (K ? i < rounds : at + 8 <= k));
      }
  };
#pragma unroll
  for (int d = 0; d < D; ++d) fetch_weights(d, d);
  start_dependents();
  wait_for_inputs();
#pragma unroll
  for (int d = 0; d < D; ++d) fetch_x(d, d);
  constexpr int STEPS = K && K / 64 / W <= 16 ? (K / 64 / W + D - 1) / D : 1;
#pragma unroll STEPS
  for (int i = 0; i < rounds; i += D) {
#pragma unroll
    for (int d = 0; d < D; ++d) {
      if (K && i + d >= rounds) continue;
#pragma unroll
      for (int q = 0; q < 2; ++q)
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int r = 0; r < T; ++r) {
            const Words low = a[d][r][2 * q], high = a[d][r][2 * q + 1], v = b[d][m][q];
            mma(acc[r][m], low.x, high.x, low.y, high.y, v.x, v.y);
            mma(acc[r][m], low.z, high.z, low.w, high.w, v.z, v.w);
          }
      if (!K || i + d + D < rounds) {
        fetch_weights(d, i + d + D);
        fetch_x(d, i + d + D);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < T; ++r)
#pragma unroll
    for (int m = 0; m < M; ++m)
      *(float4*)&partial[((r * W + warp) * M + m) * 128 + lane * 4] = {acc[r][m][0], acc[r][m][1], acc[r][m][2], acc[r][m][3]};
  __syncthreads();
}

// Place j of the M * 128 of a tile: its output within the tile and its row within the block.
struct Place { int output, row; };
__device__ __forceinline__ Place place_at(int j) {
  const int lane = (j & 127) >> 2, c = j & 3;
  return {(lane >> 2) + 8 * (c >> 1), 2 * (lane & 3) + (c & 1) + 8 * (j >> 7)};
}
template <int W, int M> __device__ __forceinline__ float sum_at(int tile, int j) {
  extern __shared__ float partial[];
  float v[W];
#pragma unroll
  for (int i = 0; i < W; ++i) v[i] = partial[(tile * W + i) * M * 128 + j];
  return tree_sum(v);
}

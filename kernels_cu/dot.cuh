// dot.cuh: dot products in the contract's order (rules 3 and 4), the inner loop of every matrix product and score.
//
// Element k of a sum belongs to lane (k / 4) mod 128. Quad q = k / 4 is loaded as one; VEC says that every row of x starts
// on 16 bytes, K is a multiple of 4 and rows of w can be read by quads (weights.cuh), else a quad is four guarded loads
// (+0 past the end adds nothing).
//
//   warp_dots: one warp, four accumulators a lane           quads  0..31 -> accumulator 0, 32..63 -> 1, 64..95 -> 2, ...
//   block_dots: four warps, one accumulator a lane          warp g is group g; partial sums meet in shared memory
//
// Both give (g0 + g1) + (g2 + g3) per block of 8192 elements, so a kernel chooses by speed alone.
#pragma once
#include "weights.cuh"

template <bool VEC> __device__ __forceinline__ float4 load_quad(const float* p, int q, int k_size) {
  if (VEC) return ((const float4*)p)[q];
  const int k = 4 * q;
  float4 v = {0.f, 0.f, 0.f, 0.f};
  v.x = p[k];
  if (k + 1 < k_size) v.y = p[k + 1];
  if (k + 2 < k_size) v.z = p[k + 2];
  if (k + 3 < k_size) v.w = p[k + 3];
  return v;
}

// The same of a row of weights in any form.
template <bool VEC, class Row> __device__ __forceinline__ float4 stream_quad(const Row& w, int q, int k_size) {
  return VEC ? quad_of(w, q) : guarded_quad(w, q, k_size);
}

__device__ __forceinline__ float add_products(float s, float4 a, float4 b) {
  s = s + a.x * b.x;
  s = s + a.y * b.y;
  s = s + a.z * b.z;
  return s + a.w * b.w;
}

// Dots of R rows w and M rows x over k_size elements, dot i = r * M + m, by one warp. With D = R * M dots, a power of
// two, and d = min(D, 8): lane l gets dot b * 8 + l * d / 32 in total[b].
template <int M, int R, bool VEC, class Row>
__device__ __forceinline__ void warp_dots(const Row (&w)[R], const float* const (&x)[M], int k_size,
                                          float (&total)[(R * M + 7) / 8]) {
  constexpr int D = R * M, B = (D + 7) / 8, LANES = 32 / (4 * (D < 8 ? D : 8));  // lanes that hold one folded value
  const int lane = threadIdx.x & 31, quads = (k_size + 3) / 4;
#pragma unroll
  for (int b = 0; b < B; ++b) total[b] = 0.f;
  for (int first = 0; first < quads; first += BLOCK_QUADS) {
    const int end = min(quads, first + BLOCK_QUADS);
    float a[D * 4];
#pragma unroll
    for (int i = 0; i < D * 4; ++i) a[i] = 0.f;
    for (int b = first; b < end; b += 128) {
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const int q = b + 32 * g + lane;
        if (q < end) {
          float4 wq[R];
#pragma unroll
          for (int r = 0; r < R; ++r) wq[r] = stream_quad<VEC>(w[r], q, k_size);
#pragma unroll
          for (int m = 0; m < M; ++m) {
            const float4 xq = load_quad<VEC>(x[m], q, k_size);
#pragma unroll
            for (int r = 0; r < R; ++r) a[(r * M + m) * 4 + g] = add_products(a[(r * M + m) * 4 + g], wq[r], xq);
          }
        }
      }
    }
    float part[B];
    fold_scatter(a, part);
#pragma unroll
    for (int b = 0; b < B; ++b) {
      part[b] = part[b] + __shfl_xor_sync(FULL_WARP, part[b], LANES);      // g0 + g1, g2 + g3
      part[b] = part[b] + __shfl_xor_sync(FULL_WARP, part[b], 2 * LANES);  // (g0 + g1) + (g2 + g3)
      total[b] = total[b] + part[b];
    }
  }
}

// The same by 128 threads t, R * M <= 128 dots; thread i gets dot i. `part` is shared memory of these 128 threads; all
// threads of the block must call this together.
template <int M, int R, bool VEC, class Row>
__device__ __forceinline__ float block_dots(int t, const Row (&w)[R], const float* const (&x)[M], int k_size,
                                            float (&part)[R * M][4]) {
  constexpr int D = R * M, B = (D + 31) / 32, n = D < 32 ? D : 32;
  const int quads = (k_size + 3) / 4, lane = t & 31;
  float total = 0.f;
  for (int first = 0; first < quads; first += BLOCK_QUADS) {
    const int end = min(quads, first + BLOCK_QUADS);
    float a[D];
#pragma unroll
    for (int i = 0; i < D; ++i) a[i] = 0.f;
#pragma unroll(VEC ? 4 : 1)  // guarded loads are slow anyway, and code of that size takes long to compile
    for (int q = first + t; q < end; q += 128) {
      float4 wq[R];
#pragma unroll
      for (int r = 0; r < R; ++r) wq[r] = stream_quad<VEC>(w[r], q, k_size);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const float4 xq = load_quad<VEC>(x[m], q, k_size);
#pragma unroll
        for (int r = 0; r < R; ++r) a[r * M + m] = add_products(a[r * M + m], wq[r], xq);
      }
    }
    float sum[B];
    fold_scatter(a, sum);
    if (lane % (32 / n) == 0)
#pragma unroll
      for (int b = 0; b < B; ++b) part[b * 32 + lane * n / 32][t >> 5] = sum[b];
    __syncthreads();
    if (t < D) total = total + ((part[t][0] + part[t][1]) + (part[t][2] + part[t][3]));
    __syncthreads();
  }
  return total;
}

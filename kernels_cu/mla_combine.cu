// mla_combine.cu: the ranges of mla_decode.cu joined (tier bf16).
//
// in   states    float32 [rows, heads, ranges, 2]          maximum of a range's scores * log2(e), sum of 2^(score - maximum)
//      vectors   float32 [rows, heads, ranges, 512]        sum of 2^(score - maximum) * latent
//      positions int32 [rows]                              row i sees positions 0..positions[i]
// out  o         bf16 [rows, heads, 512]
//
// launch  grid (heads, rows, 4), block 128; a column a thread
// work    every block makes the weights of all ranges, 128 at a time, in shared memory
// order   the maximum is exact in any order; vectors by ascending range, by fused multiply-add; sums by range modulo 128, then
//         lanes and warps by a tree
// bytes   rows * heads * (4 * ranges * (512 + 8) + 2 * 512)
#include "mla.cuh"

#define RANGES_AT_ONCE 128

extern "C" __global__ void __launch_bounds__(128)
    mla_combine(const float* states, const float* vectors, const int* positions, bf16* o, int heads, int ranges) {
  __shared__ float weights[RANGES_AT_ONCE];
  __shared__ float tops[4], totals[4];
  const int head = blockIdx.x, row = blockIdx.y, column = blockIdx.z * 128 + threadIdx.x, t = threadIdx.x;
  wait_for_inputs();
  start_dependents();
  const int length = positions[row] + 1, count = (length + range_size(length) - 1) / range_size(length);
  const i64 first = ((i64)row * heads + head) * ranges;
  const float2* state = (const float2*)states + first;
  float top = -1e30f;
  for (int r = t; r < count; r += 128) top = fmaxf(top, state[r].x);
#pragma unroll
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, o));
  if ((t & 31) == 0) tops[t >> 5] = top;
  __syncthreads();
  top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
  float total = 0.f, sum = 0.f;
  for (int done = 0; done < count; done += RANGES_AT_ONCE) {
    const int here = min(RANGES_AT_ONCE, count - done);
    __syncthreads();
    if (t < here) {
      const float2 s = state[done + t];
      weights[t] = exp2_fast(s.x - top);
      total = fmaf(weights[t], s.y, total);
    }
    __syncthreads();
    const float* v = vectors + (first + done) * LATENT + column;
#pragma unroll 8
    for (int r = 0; r < here; ++r) sum = fmaf(weights[r], v[(i64)r * LATENT], sum);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) total = total + __shfl_xor_sync(FULL_WARP, total, o);
  if ((t & 31) == 0) totals[t >> 5] = total;
  __syncthreads();
  total = (totals[0] + totals[1]) + (totals[2] + totals[3]);
  o[((i64)row * heads + head) * LATENT + column] = round_bf16(sum / total);
}

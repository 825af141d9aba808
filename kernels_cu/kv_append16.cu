// kv_append16.cu: one bf16 cache row a token: the normalised latent and the rotated shared key (tier bf16).
//
// in   kv        float32 [rows, latent + 2 half]   row stride kv_row: the sums of kv_a_proj_with_mqa
//      weight    float32 [latent]                  kv_a_layernorm
//      positions int32 [rows]; slots int32 [rows] (which sequence); places int32 [rows] (which cache row of it)
//      cos, sin  float32 [max_positions, half]
// out  cache     bf16 [slots, capacity, latent + 2 half]; row (slots[i], places[i]) is written
//
// launch  grid (rows), block 128
// order   a thread's elements ascending, lanes by the fold of common.cuh, the four warps by tree_sum
// bytes   rows * 6 * (latent + 2 half) + 4 latent
#include "mma.cuh"

extern "C" __global__ void __launch_bounds__(128)
    kv_append16(const float* kv, const float* weight, const int* positions, const int* slots, const int* places, const float* cos,
                const float* sin, bf16* cache, int latent, int half, int interleaved, int capacity, float eps, i64 kv_row) {
  __shared__ float part[4];
  const int row = blockIdx.x, t = threadIdx.x;
  wait_for_inputs();
  start_dependents();
  kv += row * kv_row;
  bf16* out = cache + ((i64)slots[row] * capacity + places[row]) * (latent + 2 * half);
  float sum[1] = {0.f};
  for (int i = t; i < latent; i += 128) sum[0] = sum[0] + kv[i] * kv[i];
  fold32(sum);
  if ((t & 31) == 0) part[t >> 5] = sum[0];
  __syncthreads();
  float all[4] = {part[0], part[1], part[2], part[3]};
  const float r = 1.0f / sqrtf(tree_sum(all) / (float)latent + eps);
  for (int i = t; i < latent; i += 128) out[i] = round_bf16((kv[i] * r) * weight[i]);
  const float* x = kv + latent;
  for (int i = t; i < half; i += 128) {
    const i64 angle = (i64)positions[row] * half + i;
    const float c = cos[angle], s = sin[angle];
    const float a = interleaved ? x[2 * i] : x[i], b = interleaved ? x[2 * i + 1] : x[i + half];
    out[latent + i] = round_bf16(a * c - b * s);
    out[latent + half + i] = round_bf16(b * c + a * s);
  }
}

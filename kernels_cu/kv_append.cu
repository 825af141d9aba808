// kv_append.cu: one cache row a token: the normalised latent and the rotated shared key (rules 8, 9).
//
// in   kv        float32 [rows, latent + 2 half]   row stride kv_row: the output of kv_a_proj_with_mqa
//      weight    float32 [latent]                  kv_a_layernorm
//      positions int32 [rows]; slots int32 [rows] (which sequence); places int32 [rows] (which cache row of it)
//      cos, sin  float32 [max_positions, half]
// out  cache     float32 [slots, capacity, latent + 2 half]; row (slots[i], places[i]) is written
//
// launch  grid (rows), block 128
// order   sum128 for the norm
// bytes   4 * rows * 2 * (latent + 2 half) + 4 latent
#include "rmsnorm.cuh"
#include "rope.cuh"

extern "C" __global__ void __launch_bounds__(128)
    kv_append(const float* kv, const float* weight, const int* positions, const int* slots, const int* places, const float* cos,
              const float* sin, float* cache, int latent, int half, int interleaved, int capacity, float eps, i64 kv_row) {
  __shared__ float part[4];
  const int row = blockIdx.x;
  kv += (i64)row * kv_row;
  float* out = cache + ((i64)slots[row] * capacity + places[row]) * (latent + 2 * half);
  norm_any(kv, weight, out, latent, eps, kv_row | 2 * half, part);
  for (int i = threadIdx.x; i < half; i += 128) {
    const i64 angle = (i64)positions[row] * half + i;
    rotate_pair(kv + latent, out + latent, i, half, interleaved, cos[angle], sin[angle]);
  }
}

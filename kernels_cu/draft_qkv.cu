// draft_qkv.cu: a draft layer's queries, and one cache row of keys and values a token (rules 8, 9 and 21).
//
// in   qkv       float32 [rows, qkv_row]       q heads (none when heads is 0) | kv_heads of k | kv_heads of v
//      q_weight  float32 [head_dim] or null; k_weight float32 [head_dim]   norms over each head
//      positions, slots, places int32 [rows]   of the rotation; which request; which cache row of it
//      cos, sin  float32 [max_positions, head_dim / 2]
// out  query     float32 [rows, heads, head_dim] or null: normed and rotated
//      cache     float32 [slots, capacity, 2 * kv_heads * head_dim]: row (slot, place) = k heads, normed and rotated | v heads
//
// launch  grid (ceil((heads + 2 kv_heads) / 4), rows), block 128; a warp a head; head_dim even
// order   sum128 for the norm; y = (x * r) * w, then the pairs (i, i + head_dim / 2) are rotated; v is copied
// bytes   4 * rows * head_dim * (2 heads + 4 kv_heads + 1)
#include "dot.cuh"
#include "rope.cuh"

template <bool VEC> __device__ __forceinline__ float square_sum(const float* x, int n) {
  const float* const one[1] = {x};
  float total[1];
  warp_dots<1, 1, VEC>(one, one, n, total);
  return total[0];
}

extern "C" __global__ void __launch_bounds__(128)
    draft_qkv(const float* qkv, const float* q_weight, const float* k_weight, const int* positions, const int* slots,
              const int* places, const float* cos, const float* sin, float* query, float* cache, int heads, int kv_heads,
              int head_dim, int capacity, float eps, i64 qkv_row) {
  const int part = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, row = blockIdx.y, half = head_dim / 2;
  if (part >= heads + 2 * kv_heads) return;
  const float* x = qkv + row * qkv_row + (i64)part * head_dim;
  float* y = part < heads ? query + ((i64)row * heads + part) * head_dim
                          : cache + (((i64)slots[row] * capacity + places[row]) * 2 * kv_heads + part - heads) * head_dim;
  if (part >= heads + kv_heads) {
    for (int i = lane; i < head_dim; i += 32) y[i] = x[i];
    return;
  }
  const bool vec = ((head_dim | qkv_row) & 3) == 0 && ((u64)qkv & 15) == 0;
  const float sum = vec ? square_sum<true>(x, head_dim) : square_sum<false>(x, head_dim);
  const float r = 1.0f / sqrtf(sum / (float)head_dim + eps);
  const float *w = part < heads ? q_weight : k_weight, *c = cos + (i64)positions[row] * half, *s = sin + (i64)positions[row] * half;
  for (int i = lane; i < half; i += 32) put_rotated((x[i] * r) * w[i], (x[i + half] * r) * w[i + half], y, i, half, c[i], s[i]);
}

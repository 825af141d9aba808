// attention16.cu: absorbed attention over a bf16 latent cache for any widths, softmax and sums in float32 (tier bf16).
//
// The readable form, for models whose widths mla_decode.cu is not made for, and for the CPU device.
//
// attn16 ranges of positions, each by itself
// in   query     bf16 [rows, heads, width]                 absorbed latent query | rotated query
//      cache     bf16 [slots, capacity, width]             latent (the first n) | rotated key
//      positions int32 [rows], slots int32 [rows]          row i sees positions 0..positions[i] of slot slots[i]
//      tree_starts int32 [rows] or null, paths int32 [rows, path_row] or null
//                                                          position p lies in cache row p, from tree_starts[i] on in row
//                                                          paths[i, p - tree_starts[i]]
// out  states    float32 [rows, heads, ranges, 2]          maximum of the range's scores, sum of exp(score - maximum)
//      vectors   float32 [rows, heads, ranges, n]          sum of exp(score - maximum) * latent
//
// attn16_combine
// in   states, vectors, positions
// out  o         bf16 [rows, heads, n]
//
// launch  attn16: grid (ranges, heads, rows), block 128, ranges past a row's position end at once.
//         attn16_combine: grid (ceil(n / 128), heads, rows), block 128
// work    a warp takes keys w, w + 4, ... for the scores, then a thread owns columns t, t + 128, ...
// order   by position, in ranges of 256 from position 0: a score is a lane's elements ascending, then the fold of common.cuh; exp
//         is rounded to bf16 before it is summed and before it is multiplied, in ascending position; ranges ascending.
//         A row's bits depend on its own keys alone.
// bytes   rows * heads * (ranges * 256 * 2 * width + ...): a key is read for every head, from cache
#include "mma.cuh"

#define RANGE 256

extern "C" __global__ void __launch_bounds__(128)
    attn16(const bf16* query, const bf16* cache, const int* positions, const int* slots, const int* tree_starts, const int* paths,
           float* states, float* vectors, int heads, int width, int n, int capacity, int ranges, int path_row, float scale) {
  __shared__ float p[RANGE];
  const int range = blockIdx.x, h = blockIdx.y, row = blockIdx.z, t = threadIdx.x, lane = t & 31;
  wait_for_inputs();
  start_dependents();
  const int position = positions[row], first = range * RANGE, keys = min(RANGE, position + 1 - first);
  if (keys <= 0) return;
  const int start = tree_starts ? tree_starts[row] : 0x7fffffff;
  const bf16* base = cache + (i64)slots[row] * capacity * width;
  auto key = [&](int i) {
    const int at = first + i;
    return base + (i64)(at < start ? at : paths[(i64)row * path_row + at - start]) * width;
  };
  const bf16* q = query + ((i64)row * heads + h) * width;
  for (int i = t >> 5; i < keys; i += 4) {
    const bf16* k = key(i);
    float dot[1] = {0.f};
    for (int j = lane; j < width; j += 32) dot[0] = dot[0] + widen(q[j]) * widen(k[j]);
    fold32(dot);
    if (lane == 0) p[i] = dot[0] * scale;
  }
  __syncthreads();
  float top = -infinity();
  for (int i = lane; i < keys; i += 32) top = max_nan(top, p[i]);
#pragma unroll
  for (int o = 16; o; o >>= 1) top = max_nan(top, __shfl_xor_sync(FULL_WARP, top, o));
  __syncthreads();
  for (int i = t; i < keys; i += 128) p[i] = widen(round_bf16(exact_exp(p[i] - top)));
  __syncthreads();
  const i64 out = ((i64)row * heads + h) * ranges + range;
  if (t < 32) {
    float sum[1] = {0.f};
    for (int i = lane; i < keys; i += 32) sum[0] = sum[0] + p[i];
    fold32(sum);
    if (lane == 0) {
      states[2 * out] = top;
      states[2 * out + 1] = sum[0];
    }
  }
  for (int c = t; c < n; c += 128) {
    float sum = 0.f;
    for (int i = 0; i < keys; ++i) sum = sum + p[i] * widen(key(i)[c]);
    vectors[out * n + c] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(128)
    attn16_combine(const float* states, const float* vectors, const int* positions, bf16* o, int heads, int n, int ranges) {
  const int c = blockIdx.x * 128 + threadIdx.x, h = blockIdx.y, row = blockIdx.z;
  wait_for_inputs();
  start_dependents();
  if (c >= n) return;
  const int count = positions[row] / RANGE + 1;
  const i64 first = ((i64)row * heads + h) * ranges;
  float top = -infinity(), total = 0.f, sum = 0.f;
  for (int r = 0; r < count; ++r) top = max_nan(top, states[2 * (first + r)]);
  for (int r = 0; r < count; ++r) {
    const float w = exact_exp(states[2 * (first + r)] - top);
    total = total + w * states[2 * (first + r) + 1];
    sum = sum + w * vectors[(first + r) * n + c];
  }
  o[((i64)row * heads + h) * n + c] = round_bf16(sum / total);
}

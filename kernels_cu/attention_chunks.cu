// attention_chunks.cu: softmax weights and their sum over values, chunk by chunk (rules 10, 11 and 21).
//
// in   scores    float32 [rows, heads, span]; peaks float32 [rows, heads, span / 32]   from attn_scores
//      cache     float32 [slots, capacity, key_row]         a row's values of kv head g start at g * key_head; MLA: the
//                                                           latent, the first n elements of the row
//      positions int32 [rows], slots int32 [rows], tree_starts, paths                  as attn_scores has them
// out  sums      float32 [rows, heads, chunks]              sum of exp(score - max) over the chunk
//      vectors   float32 [rows, heads, chunks, n]           sum of exp(score - max) * value over the chunk
//
// launch  grid (chunks, kv_heads * ceil(heads / kv_heads / 8), rows * ceil(n / 128)), block 128; chunks past a row's position
//         end at once
// work    weights of eight heads in shared memory, made by every block of a chunk; then a thread owns one column
// order   max over all visible keys; the chunk's sum is sum128 over its own positions (lanes 64..127 stay +0);
//         vectors add p * value in ascending position from +0, one rounded product and one rounded addition a key
// bytes   4 * rows * (heads / 8 * chunks * 256 * n + heads * (span + chunks * (n + 1)))
#include "attention.cuh"

// The maximum of the scores that head h sees, by one warp; all lanes get it.
__device__ __forceinline__ float head_peak(const float* peaks, int count) {
  float peak = -infinity();
  for (int i = threadIdx.x & 31; i < count; i += 32) peak = max_nan(peak, peaks[i]);
#pragma unroll
  for (int o = 16; o; o >>= 1) peak = max_nan(peak, __shfl_xor_sync(FULL_WARP, peak, o));
  return peak;
}

// sum128 over the chunk's own 256 positions by warp 0: group g holds positions 128 g + 4 lane ... + 3; g 2 and 3 stay +0.
__device__ __forceinline__ void chunk_sums(const float (&p)[CHUNK][HEADS], float* sums, int heads_here, int chunks) {
  const int lane = threadIdx.x;
  float g[2 * HEADS], total[1];
#pragma unroll
  for (int j = 0; j < 2 * HEADS; ++j) {
    g[j] = 0.f;
#pragma unroll
    for (int k = 0; k < 4; ++k) g[j] = g[j] + p[128 * (j % 2) + 4 * lane + k][j / 2];
  }
  fold_scatter(g, total);  // lane 2 j and 2 j + 1: head j / 2, group j % 2
  const float both = total[0] + __shfl_xor_sync(FULL_WARP, total[0], 2);
  if (lane % 4 == 0 && lane / 4 < heads_here) sums[(i64)(lane / 4) * chunks] = both;
}

__device__ __forceinline__ float4 add_weighted(float4 a, float4 w, float v) {
  return {a.x + w.x * v, a.y + w.y * v, a.z + w.z * v, a.w + w.w * v};
}

extern "C" __global__ void __launch_bounds__(128)
    attn_chunks(const float* scores, const float* peaks, const float* cache, const int* positions, const int* slots,
                const int* tree_starts, const int* paths, float* sums, float* vectors, int heads, int kv_heads, int n, int capacity,
                int chunks, int path_row, i64 key_row, i64 key_head) {
  __shared__ float4 weights[CHUNK][2];  // of eight heads at each position
  __shared__ float peak[HEADS];
  float(&p)[CHUNK][HEADS] = *(float(*)[CHUNK][HEADS])weights;
  const int blocks = (n + 127) / 128, row = blockIdx.z / blocks, column = blockIdx.z % blocks * 128 + threadIdx.x;
  const int chunk = blockIdx.x, t = threadIdx.x, warp = t >> 5;
  const int position = positions[row];
  if (chunk >= chunk_count(position)) return;
  const HeadBlock here = head_block(heads, kv_heads);
  const int span = chunks * CHUNK, segments = span / SEGMENT, keys_here = chunk_keys(position, chunk);
  const i64 first_head = (i64)row * heads + here.first;
#pragma unroll
  for (int h = warp; h < HEADS; h += 4) {
    const float m = head_peak(peaks + (first_head + min(h, here.count - 1)) * segments, position / SEGMENT + 1);
    if ((t & 31) == 0) peak[h] = m;
  }
  __syncthreads();
  for (int i = t; i < CHUNK; i += 128)
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
      p[i][h] = h < here.count && i < keys_here ? exact_exp(scores[(first_head + h) * span + chunk * CHUNK + i] - peak[h]) : 0.f;
  __syncthreads();
  if (column < 32) chunk_sums(p, sums + first_head * chunks + chunk, here.count, chunks);
  if (column >= n) return;
  const Keys keys = row_keys(cache + column, slots, tree_starts, paths, row, here.kv, capacity, path_row, key_row, key_head);
  float4 a = {0.f, 0.f, 0.f, 0.f}, b = a;
  auto add = [&](int i, float v) {
    a = add_weighted(a, weights[i][0], v);
    b = add_weighted(b, weights[i][1], v);
  };
  // positions before the tree lie one after another; those of the tree take two loads each, so four at a time
  const int first = chunk * CHUNK, plain = min(keys_here, max(0, keys.tree_start - first));
  const float* key = keys.base + first * key_row;
#pragma unroll 8
  for (int i = 0; i < plain; ++i) add(i, key[i * key_row]);
  for (int i = plain; i < keys_here; i += 4) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = *keys.at(first + min(i + j, keys_here - 1));
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (i + j < keys_here) add(i + j, v[j]);
  }
  const float out[HEADS] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int h = 0; h < HEADS; ++h)
    if (h < here.count) vectors[((first_head + h) * chunks + chunk) * n + column] = out[h];
}

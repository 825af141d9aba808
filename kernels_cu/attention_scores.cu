// attention_scores.cu: scaled attention scores of each query and the maximum of each segment (rules 10, 11 and 21).
//
// in   query     float32 [rows, heads, width]               MLA: absorbed latent query | rotated query
//      cache     float32 [slots, capacity, key_row]         a row's keys of kv head g start at g * key_head
//      positions int32 [rows], slots int32 [rows]           row i sees positions 0..positions[i] of slot slots[i]
//      tree_starts int32 [rows] or null, paths int32 [rows, path_row] or null
//                                                           position p lies in cache row p, from tree_starts[i] on in row
//                                                           paths[i, p - tree_starts[i]]
// out  scores    float32 [rows, heads, span]                span = chunks * 256; visible positions are written
//      peaks     float32 [rows, heads, span / 32]           maximum of each visible segment of 32, NaN if any score is
//
// launch  grid (span / 32, kv_heads * ceil(heads / kv_heads / 8), rows), block 128; segments past a row's position end at once
// work    warp w takes keys w, w + 4, ... two at a time for eight heads of one kv head: a key is read once for eight heads
// order   score = scale * sum128 over the whole width (MLA: latent and rotary part together); a maximum is exact in any order
// bytes   4 * rows * (chunks * 256 * width * heads / 8 + heads * (width + span))
#include "attention.cuh"
#include "dot.cuh"

template <bool VEC>
__device__ __forceinline__ void score_segment(const float* query, const Keys& keys, int first, float* scores, int keys_here,
                                              int heads_here, int width, int span, float scale, float (&peak)[2]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, h = lane / 4;  // a lane holds head h's dots of both keys
  const float *q[HEADS], *k[2];
#pragma unroll
  for (int i = 0; i < HEADS; ++i) q[i] = query + (i64)min(i, heads_here - 1) * width;
  for (int i = 2 * warp; i < keys_here; i += 8) {
#pragma unroll
    for (int r = 0; r < 2; ++r) k[r] = keys.at(first + min(i + r, keys_here - 1));
    float s[2];
    warp_dots<HEADS, 2, VEC>(k, q, width, s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      s[r] = s[r] * scale;
      if (i + r >= keys_here) continue;
      peak[r] = max_nan(peak[r], s[r]);
      if (lane % 4 == 0 && h < heads_here) scores[(i64)h * span + i + r] = s[r];
    }
  }
}

extern "C" __global__ void __launch_bounds__(128)
    attn_scores(const float* query, const float* cache, const int* positions, const int* slots, const int* tree_starts,
                const int* paths, float* scores, float* peaks, int heads, int kv_heads, int width, int capacity, int chunks,
                int path_row, i64 key_row, i64 key_head, float scale) {
  __shared__ float best[4][HEADS];
  const int first = blockIdx.x * SEGMENT, row = blockIdx.z, t = threadIdx.x;
  const int position = positions[row];
  if (first > position) return;
  const HeadBlock here = head_block(heads, kv_heads);
  const int span = chunks * CHUNK, keys_here = min(SEGMENT, position + 1 - first);
  const i64 first_head = (i64)row * heads + here.first;
  const float* q = query + first_head * width;
  const Keys keys = row_keys(cache, slots, tree_starts, paths, row, here.kv, capacity, path_row, key_row, key_head);
  float* s = scores + first_head * span + first;
  float peak[2] = {-infinity(), -infinity()};
  if (((width | key_row | key_head) & 3) == 0 && (((u64)query | (u64)cache) & 15) == 0)
    score_segment<true>(q, keys, first, s, keys_here, here.count, width, span, scale, peak);
  else
    score_segment<false>(q, keys, first, s, keys_here, here.count, width, span, scale, peak);
  if (t % 4 == 0) best[t >> 5][(t & 31) / 4] = max_nan(peak[0], peak[1]);
  __syncthreads();
  if (t < here.count)
    peaks[(first_head + t) * (span / SEGMENT) + blockIdx.x] = max_nan(max_nan(best[0][t], best[1][t]), max_nan(best[2][t], best[3][t]));
}

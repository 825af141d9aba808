// topk_final.cu: the k first ids of a row out of its parts' lists, and their log-probabilities (rules 6, 14 and 17).
//
// in   logits float32 [rows, vocab]             k <= min(vocab, 1024)
//      keys   uint64 [rows, parts, k]           as topk_parts leaves them
// out  sums   float32 [rows, parts]             sum of exp(logit - max of the row) over the part
//      arrived int32 [rows]                     blocks that are done: 0 before and after
//      ids int32, logps float32 [rows, k]       logp = logit - (max + log(sum))
//
// launch  grid (ceil(vocab / 8192) + 1, rows), block 128
// work    a block a part adds its exponentials, while one block a row merges the lists: each part's ceil(k / parts)-th key
//         bounds the candidates; the place of one is the number of candidates before it. The row's last block to end adds
//         the parts' sums and turns logits into log-probabilities
// order   choice: exact in any order. Sum: sum128, whose blocks of 8192 are the parts, added in ascending order from +0
// bytes   4 * rows * vocab + 8 * rows * (parts + 1) * k
#include "topk.cuh"

// The row's maximum, from the first key of each of its parts, by a warp.
__device__ __forceinline__ float row_peak(const u64* keys, int parts, int k) {
  u32 top = 0;
  for (int p = threadIdx.x & 31; p < parts; p += 32) top = max(top, (u32)(keys[(i64)p * k] >> 32));
  return key_value(__reduce_max_sync(FULL_WARP, top));
}

// sum128 of exp(x - peak) of a part's n elements, by 128 threads; every thread gets it. A thread's 16 quads go in batches:
// the next one is under way while one is added, the first while the peak is looked for. (All at once would be a code too
// long to be read once.)
#define BATCH 4
template <bool VEC> __device__ __forceinline__ float exp_sum(const float* x, int n, const u64* keys, int parts, int k) {
  __shared__ float part[4];
  const int t = threadIdx.x;
  float4 next[BATCH];
  auto load = [&](int q0) {
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      next[j] = float4{0.f, 0.f, 0.f, 0.f};
      if (4 * (q0 + j * 128) < n) next[j] = load_quad<VEC>(x, q0 + j * 128, n);
    }
  };
  load(t);
  const float peak = row_peak(keys, parts, k);
  float a[1] = {0.f};
#pragma unroll 1
  for (int q0 = t; 4 * q0 < n; q0 += BATCH * 128) {
    float4 v[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) v[j] = next[j];
    load(q0 + BATCH * 128);
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int i = 4 * (q0 + j * 128);
      const float4 e = {exact_exp(v[j].x - peak), exact_exp(v[j].y - peak), exact_exp(v[j].z - peak), exact_exp(v[j].w - peak)};
      a[0] = a[0] + (i < n ? e.x : 0.f);  // +0 adds nothing
      a[0] = a[0] + (i + 1 < n ? e.y : 0.f);
      a[0] = a[0] + (i + 2 < n ? e.z : 0.f);
      a[0] = a[0] + (i + 3 < n ? e.w : 0.f);
    }
  }
  fold32(a);
  if ((t & 31) == 0) part[t >> 5] = a[0];
  __syncthreads();
  return (part[0] + part[1]) + (part[2] + part[3]);
}

// How many keys of a list in descending order stand before this one.
__device__ __forceinline__ int keys_before(const u64* list, int n, u64 key) {
  int low = 0;
  while (n > 0) {
    const int half = n / 2;
    if (list[low + half] > key) {
      low += half + 1;
      n -= half + 1;
    } else {
      n = half;
    }
  }
  return low;
}

// The k first of a row's lists, by one block: their ids, and their logits in place of log-probabilities.
#define LOADED 16  // keys of a thread that are under way at once
__device__ __forceinline__ void merge_lists(const float* logits, const u64* keys, int* ids, float* logps, int parts, int k) {
  __shared__ u64 chosen[MOST];
  __shared__ u32 bound;
  __shared__ int taken;
  const int t = threadIdx.x, all = parts * k, share = (k + parts - 1) / parts;
  auto put = [&](int place, u64 key) {
    const int id = (int)~(u32)key;
    ids[place] = id;
    logps[place] = logits[id];
  };
  if (t == 0) {
    bound = 0xffffffffu;
    taken = 0;
  }
  __syncthreads();
  for (int first = 0; first < all; first += LOADED * 128) {
    u64 key[LOADED];
#pragma unroll
    for (int j = 0; j < LOADED; ++j) key[j] = first + j * 128 + t < all ? keys[first + j * 128 + t] : 0;
    if (first == 0) {
      // at least k keys reach the least of the parts' share-th keys; a part with fewer than that has a 0 there: no bound
      u32 least = 0xffffffffu;
      for (int p = t; p < parts; p += 128) least = min(least, (u32)(keys[(i64)p * k + share - 1] >> 32));
      least = __reduce_min_sync(FULL_WARP, least);
      if ((t & 31) == 0) atomicMin(&bound, least);
      __syncthreads();
    }
    const u32 least = max(bound, 1u);  // 0 is no key
    int mine = 0;
#pragma unroll
    for (int j = 0; j < LOADED; ++j) mine += (u32)(key[j] >> 32) >= least;
    int at = reserve(taken, mine);
#pragma unroll
    for (int j = 0; j < LOADED; ++j)
      if ((u32)(key[j] >> 32) >= least) {
        if (at < MOST) chosen[at] = key[j];
        ++at;
      }
  }
  __syncthreads();
  if (taken <= MOST) {
    for (int i = t; i < taken; i += 256) {  // two at a time: one read of the list serves both
      const int other = min(i + 128, taken - 1);
      const u64 a = chosen[i], b = chosen[other];
      int place = 0, place_other = 0;
#pragma unroll 8
      for (int j = 0; j < taken; ++j) {
        const u64 key = chosen[j];
        place += key > a;
        place_other += key > b;
      }
      if (place < k) put(place, a);
      if (place_other < k && i + 128 < taken) put(place_other, b);
    }
    return;
  }
  // many equal values, or a part with fewer than its share
  for (int i = t; i < all; i += 128) {
    const u64 key = keys[i];
    if (!key) continue;
    int place = i % k;
    for (int p = 0; p < parts && place < k; ++p)
      if (p != i / k) place += keys_before(keys + (i64)p * k, k, key);
    if (place < k) put(place, key);
  }
}

extern "C" __global__ void __launch_bounds__(128)
    topk_final(const float* logits, const u64* keys, float* sums, int* arrived, int* ids, float* logps, int vocab, int k) {
  __shared__ bool last;
  const int t = threadIdx.x, row = blockIdx.y, parts = gridDim.x - 1;
  logits += (i64)row * vocab;
  keys += (i64)row * parts * k;
  sums += (i64)row * parts;
  ids += (i64)row * k;
  logps += (i64)row * k;
  if ((int)blockIdx.x < parts) {
    const int first = blockIdx.x * PART, size = min(PART, vocab - first);
    const bool quads = (vocab & 3) == 0 && ((u64)logits & 15) == 0;
    const float sum = quads ? exp_sum<true>(logits + first, size, keys, parts, k) : exp_sum<false>(logits + first, size, keys, parts, k);
    if (t == 0) sums[blockIdx.x] = sum;
  } else {
    merge_lists(logits, keys, ids, logps, parts, k);
  }
  __threadfence();
  __syncthreads();
  if (t == 0) last = atomicInc((u32*)arrived + row, parts) == parts;  // back to 0 with the last one
  __syncthreads();
  if (!last) return;
  __threadfence();
  const float peak = row_peak(keys, parts, k);
  float sum = 0.f;
  for (int first = 0; first < parts; first += 32) {  // +0 past the last part adds nothing
    const int p = first + (t & 31);
    const float mine = p < parts ? sums[p] : 0.f;
#pragma unroll
    for (int i = 0; i < 32; ++i) sum = sum + __shfl_sync(FULL_WARP, mine, i);
  }
  const float log_z = peak + exact_log(sum);
  for (int i = t; i < k; i += 128) logps[i] = logps[i] - log_z;
}

// topk.cu: the k first ids of each row of logits and their log-probabilities (rules 6, 14 and 17).
//
// in   logits float32 [rows, vocab]             k <= min(vocab, 1024)
// out  keys   uint64 [rows, parts, k]           of each part of 8192 logits its k first, in order: value and index as one
//                                               integer (unique_key); 0 behind the last where a part has fewer
//      bad    int32 [rows]                      set to 1 if a logit is not finite; never cleared here
//      sums   float32 [rows, parts]             sum of exp(logit - max of the row) over the part
//      arrived int32 [rows]                     blocks of topk_final that are done: 0 before and after
//      ids int32, logps float32 [rows, k]       logp = logit - (max + log(sum))
//
// launch  topk_parts: grid (parts, rows);  topk_final: grid (parts + 1, rows);  parts = ceil(vocab / 8192); blocks 256, 128
// work    topk_parts holds 32 keys a thread in registers. For k <= 128 the k-th largest of 128 maxima bounds the
//         candidates to a handful; else, or where many are equal, the k-th key is found by halving the range of keys, one
//         count of the block a bit (ties: the same over indices). A chosen key's place is the number of keys before it.
//         topk_final: a block a part adds its exponentials, while one block a row merges the lists: each part's
//         ceil(k / parts)-th key bounds the candidates; the place of one is the number of candidates before it. The
//         row's last block to end adds the parts' sums and turns logits into log-probabilities
// order   choice: NaN first, then the larger value, then the smaller id: exact in any order
//         sum: sum128, whose blocks of 8192 are the parts, added in ascending order from +0
// bytes   8 * rows * vocab + 16 * rows * parts * k
#include "dot.cuh"

#define PART 8192
#define PARTS_THREADS 256             // of a block of topk_parts
#define HELD (PART / PARTS_THREADS)  // keys of one of its threads
#define MOST 1024

// The value of a key; -0 has become +0.
__device__ __forceinline__ float key_value(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// The block's sum of a number of each thread; every thread gets it. One barrier: three counters take turns, and the one
// that is cleared for the next call was read two calls ago.
struct Counter {
  int (&cell)[3];
  int turn;
  __device__ __forceinline__ int sum(int mine) {
    const int warp = __reduce_add_sync(FULL_WARP, mine), next = turn == 2 ? 0 : turn + 1;
    if ((threadIdx.x & 31) == 0) atomicAdd(&cell[turn], warp);
    if (threadIdx.x == 0) cell[next] = 0;
    __syncthreads();
    const int all = cell[turn];
    turn = next;
    return all;
  }
};

// Room for `mine` more entries of each thread in a list of `taken`, by one atomic a warp; returns where the thread's begin.
__device__ __forceinline__ int reserve(int& taken, int mine) {
  const int lane = threadIdx.x & 31;
  int upto = mine;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const int below = __shfl_up_sync(FULL_WARP, upto, o);
    if (lane >= o) upto += below;
  }
  int base = 0;
  if (lane == 31) base = atomicAdd(&taken, upto);
  return __shfl_sync(FULL_WARP, base, 31) + upto - mine;
}

// Collects all keys that reach the kept-th largest of 128 maxima, each of two threads' keys: at least `kept` do, and as a
// rule few more. False where they are more than the list holds (many equal keys).
__device__ __forceinline__ bool few_candidates(const u32 (&key)[HELD], int first, int kept, u64 (&chosen)[MOST], u32 (&maxima)[128],
                                               u32& bound, int& taken) {
  const int t = threadIdx.x;
  u32 most = 0;
#pragma unroll
  for (int j = 0; j < HELD; ++j) most = max(most, key[j]);
  if (t >= 128) maxima[t - 128] = most;
  __syncthreads();
  if (t < 128) maxima[t] = max(maxima[t], most);
  __syncthreads();
  if (t < 128) {
    const u32 own = maxima[t];
    int rank = 0;
#pragma unroll 16
    for (int i = 0; i < 128; ++i) rank += maxima[i] > own | (maxima[i] == own & i < t);
    if (rank == kept - 1) bound = max(own, 1u);  // 0 is no key
  }
  __syncthreads();
  const u32 least = bound;
  int mine = 0;
#pragma unroll
  for (int j = 0; j < HELD; ++j) mine += key[j] >= least;
  int at = reserve(taken, mine);
#pragma unroll
  for (int j = 0; j < HELD; ++j)
    if (key[j] >= least) {
      if (at < MOST) chosen[at] = (u64)key[j] << 32 | (u32) ~(first + j * PARTS_THREADS + t);
      ++at;
    }
  __syncthreads();
  const bool few = taken <= MOST;
  __syncthreads();
  return few;
}

extern "C" __global__ void __launch_bounds__(PARTS_THREADS) topk_parts(const float* logits, u64* keys, int* bad, int vocab, int k) {
  __shared__ u64 chosen[MOST];
  __shared__ u32 maxima[128], bound;
  __shared__ int cells[3], taken;
  const int t = threadIdx.x, row = blockIdx.y, first = blockIdx.x * PART, size = min(PART, vocab - first), kept = min(k, size);
  logits += (i64)row * vocab + first;
  if (t == 0) cells[0] = taken = 0;
  const int own = (size - t + PARTS_THREADS - 1) / PARTS_THREADS;  // elements of this thread
  float x[HELD];
#pragma unroll
  for (int j = 0; j < HELD; ++j) x[j] = j < own ? logits[j * PARTS_THREADS + t] : 0.f;
  u32 key[HELD];
  bool broken = false;
#pragma unroll
  for (int j = 0; j < HELD; ++j) {
    key[j] = j < own ? order_key(x[j]) : 0;  // 0: below every number
    broken |= !is_finite(x[j]);
  }
  if (broken) atomicOr(bad + row, 1);
  keys += ((i64)row * gridDim.x + blockIdx.x) * k;
  __syncthreads();
  if (kept <= 128 && few_candidates(key, first, kept, chosen, maxima, bound, taken)) {
    for (int i = t; i < taken; i += PARTS_THREADS) {
      const int place = rank_of(chosen, taken, chosen[i]);
      if (place < kept) keys[place] = chosen[i];
    }
    for (int i = kept + t; i < k; i += PARTS_THREADS) keys[i] = 0;
    return;
  }
  if (t == 0) taken = 0;
  __syncthreads();
  Counter counter = {cells, 0};
  // the largest value that at least `kept` keys reach, from its top bit down
  u32 value = 0;
  int reached = size;
  for (u32 bit = 0x80000000u; bit && reached != kept; bit >>= 1) {
    int mine = 0;
#pragma unroll
    for (int j = 0; j < HELD; ++j) mine += key[j] >= (value | bit);
    const int all = counter.sum(mine);
    if (all >= kept) {
      value |= bit;
      reached = all;
    }
  }
  // more equal keys than places: those below the largest index that lets in no key too many
  int limit = PART;
  if (reached != kept) {
    limit = 0;
    int inside = 0;
    for (int bit = PART / 2; bit && inside != kept; bit >>= 1) {
      int mine = 0;
#pragma unroll
      for (int j = 0; j < HELD; ++j) mine += key[j] > value || (key[j] == value && j * PARTS_THREADS + t < (limit | bit));
      const int all = counter.sum(mine);
      if (all <= kept) {
        limit |= bit;
        inside = all;
      }
    }
  }
  if (value == 0) value = 1;  // all of the part are kept, and no empty place
#pragma unroll
  for (int j = 0; j < HELD; ++j) {
    const int i = j * PARTS_THREADS + t;
    if (key[j] > value || (key[j] == value && i < limit)) chosen[atomicAdd(&taken, 1)] = (u64)key[j] << 32 | (u32) ~(first + i);
  }
  __syncthreads();
  for (int i = t; i < kept; i += PARTS_THREADS) keys[rank_of(chosen, kept, chosen[i])] = chosen[i];
  for (int i = kept + t; i < k; i += PARTS_THREADS) keys[i] = 0;
}

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

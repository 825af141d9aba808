// topk_parts.cu: of each part of a row of logits its k first ids, in order (rules 6 and 17). topk_final merges them.
//
// in   logits float32 [rows, vocab]             k <= min(vocab, 1024)
// out  keys   uint64 [rows, parts, k]           of each part of 8192 logits its k first, in order: value and index as one
//                                               integer (unique_key); 0 behind the last where a part has fewer
//      bad    int32 [rows]                      set to 1 if a logit is not finite; never cleared here
//
// launch  grid (ceil(vocab / 8192), rows), block 256
// work    a thread holds 32 keys in registers. For k <= 128 the k-th largest of 128 maxima bounds the candidates to a
//         handful; else, or where many are equal, the k-th key is found by halving the range of keys, one count of the
//         block a bit (ties: the same over indices). A chosen key's place is the number of keys before it
// order   NaN first, then the larger value, then the smaller id: exact in any order
// bytes   4 * rows * vocab + 8 * rows * parts * k
#include "topk.cuh"

#define PARTS_THREADS 256             // of a block
#define HELD (PART / PARTS_THREADS)  // keys of one of its threads

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

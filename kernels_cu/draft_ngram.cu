// draft_ngram.cu: what followed the last 3, else 2, else 1 tokens before (rule 22).
//
// in   history int32 [batch, history_row]          tokens by position, the root at starts[b] the last
//      starts  int32 [batch]
// out  ids int32, logps float32 [batch, horizon, k]  past the count: id 0, log-probability 0
//      counts int32 [batch, horizon]                 different candidates of a depth, at most k (and 8)
//
// launch  grid (batch), block 128; horizon <= 128
// work    a thread looks for matches at every 128th place, from the latest back; the eight latest of all vote, and a thread
//         counts the votes of one depth
// order   integers only; log(votes / all votes of the depth) in float64, rounded once
// bytes   4 * batch * (start + horizon * (2 k + 1))
#include "common.cuh"

#define MATCHES 8

// The tokens before position i are the same as those before the end, n of them.
__device__ __forceinline__ bool same_tail(const int* history, int i, int end, int n) {
  for (int j = 1; j <= n; ++j)
    if (history[i - j] != history[end - j]) return false;
  return true;
}

// Candidates of one depth: the tokens at best[j] + d that are there, by votes, then by id; returns how many were kept.
__device__ __forceinline__ int count_votes(const int* history, const int* best, int matches, int d, int start, int k, int* ids,
                                           float* logps) {
  int token[MATCHES], votes[MATCHES], total = 0, distinct = 0;
  bool first[MATCHES];
#pragma unroll
  for (int j = 0; j < MATCHES; ++j) {
    const bool there = j < matches && best[j] + d <= start;
    token[j] = there ? history[best[j] + d] : -1;
    total += there;
  }
#pragma unroll
  for (int j = 0; j < MATCHES; ++j) {
    votes[j] = 0;
    first[j] = token[j] >= 0;
#pragma unroll
    for (int l = 0; l < MATCHES; ++l) {
      votes[j] += token[l] == token[j];
      if (l < j && token[l] == token[j]) first[j] = false;
    }
    distinct += first[j];
  }
#pragma unroll
  for (int j = 0; j < MATCHES; ++j) {
    int rank = 0;
#pragma unroll
    for (int l = 0; l < MATCHES; ++l)
      rank += first[l] && (votes[l] > votes[j] || (votes[l] == votes[j] && token[l] < token[j]));
    if (first[j] && rank < k) {
      ids[rank] = token[j];
      logps[rank] = exact_log((float)votes[j] / (float)total);
    }
  }
  return min(distinct, k);
}

extern "C" __global__ void __launch_bounds__(128)
    draft_ngram(const int* history, const int* starts, int* ids, float* logps, int* counts, int horizon, int k, int history_row) {
  __shared__ int found[4], place[128 * MATCHES], best[MATCHES];
  const int b = blockIdx.x, t = threadIdx.x, start = starts[b];
  history += (i64)b * history_row;
  ids += (i64)b * horizon * k;
  logps += (i64)b * horizon * k;
  for (int i = t; i < horizon * k; i += 128) {
    ids[i] = 0;
    logps[i] = 0.f;
  }
  if (t < 4) found[t] = 0;
  __syncthreads();
  int matches = 0;
  for (int n = 3; n > 0 && !matches; --n) {
    // places right after a match: n tokens stand before, and one follows, for a place is at most start
    for (int i = start - t, own = 0; i >= n && own < MATCHES; i -= 128)
      if (same_tail(history, i, start + 1, n)) {
        place[atomicAdd(found + n, 1)] = i;
        ++own;
      }
    __syncthreads();
    matches = found[n];
  }
  for (int i = t; i < matches; i += 128) {
    int later = 0;
    for (int j = 0; j < matches; ++j) later += place[j] > place[i];
    if (later < MATCHES) best[later] = place[i];
  }
  __syncthreads();
  if (t < horizon) counts[b * horizon + t] = count_votes(history, best, matches, t, start, k, ids + t * k, logps + t * k);
}

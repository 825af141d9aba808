// router.cu: expert scores, the choice of experts and their weights (rules 6 and 13).
//
// in   logits  float32 [rows, experts]
//      bias    float32 [experts] or null       e_score_correction_bias: for the choice only, never in a weight
// out  ids     int32 [rows, slots]             slots ordered by choice
//      weights float32 [rows, slots]
//
// launch  grid (rows), block 256, shared 16 * experts + 12 * groups bytes; experts <= 2048, groups <= 1024, slots <= 128
// work    a token is a block. An expert's slot is its rank: the number of experts that stand before it, counted by one
//         thread over all; no rounds, no exchange. Choices are compared as integers in the contract's order.
// order   softmax: exact maximum, sum128, one division each; normaliser: sum128 of the chosen scores in slot order
//         choice: NaN first, then larger, then smaller index
// bytes   4 * rows * (experts + 2 slots)
#include "common.cuh"

#define THREADS 256

// sum128 of v [n], n <= 8192, by one warp with four accumulators a lane; all its lanes get it.
__device__ __forceinline__ float warp_sum128(const float* v, int n) {
  const int lane = threadIdx.x & 31;
  float a[4] = {0.f, 0.f, 0.f, 0.f};
  for (int b = 0; 4 * b < n; b += 128)
#pragma unroll
    for (int g = 0; g < 4; ++g)
      for (int k = 4 * (b + 32 * g + lane); k < min(n, 4 * (b + 32 * g + lane) + 4); ++k) a[g] = a[g] + v[k];
  fold32(a);
  return (a[0] + a[1]) + (a[2] + a[3]);
}

// score = softmax(logits); `sum` is shared memory.
__device__ __forceinline__ void softmax_scores(const float* logits, float* score, int n, float& sum) {
  float peak = -infinity();  // every thread looks at all: exact in any order
  for (int i = 0; i < n; ++i) peak = max_nan(peak, logits[i]);
  for (int i = threadIdx.x; i < n; i += THREADS) score[i] = exact_exp(logits[i] - peak);
  __syncthreads();
  if (threadIdx.x < 32) {
    const float s = warp_sum128(score, n);
    if (threadIdx.x == 0) sum = s;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += THREADS) score[i] = score[i] / sum;
}

// Score of a group of n experts: the sum of its two best choices (V3), or its best alone (V2).
__device__ __forceinline__ float group_score(const float* choice, int n, bool best_two) {
  float a = choice[0], b = -infinity();
  for (int i = 1; i < n; ++i) {
    const float c = choice[i];
    if (before(c, 1, a, 0)) {
      b = a;
      a = c;
    } else if (i == 1 || before(c, 1, b, 0)) {
      b = c;
    }
  }
  return best_two ? a + b : a;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    router(const float* logits, const float* bias, int* ids, float* weights, int experts, int slots, int groups, int kept_groups,
           int softmax, int best_two, int normalise, float factor) {
  extern __shared__ u64 shared[];
  __shared__ float chosen[128], sum;
  u64 *keys = shared, *group_keys = shared + experts;
  float *score = (float*)(shared + experts + groups), *choice = score + experts;
  int* group_rank = (int*)(choice + experts);
  const int t = threadIdx.x, row = blockIdx.x;
  logits += (i64)row * experts;
  if (softmax)
    softmax_scores(logits, score, experts, sum);
  else
    for (int i = t; i < experts; i += THREADS) score[i] = exact_sigmoid(logits[i]);
  for (int i = t; i < experts; i += THREADS) choice[i] = bias ? score[i] + bias[i] : score[i];
  const int size = experts / groups;
  const bool all = kept_groups >= groups;
  if (!all) {
    __syncthreads();
    for (int g = t; g < groups; g += THREADS) group_keys[g] = unique_key(group_score(choice + g * size, size, best_two), g);
    __syncthreads();
    for (int g = t; g < groups; g += THREADS) group_rank[g] = rank_of(group_keys, groups, group_keys[g]);
    __syncthreads();
  }
  // V3 takes the experts of other groups out; V2 gives them the score 0, as transformers 5 does
  for (int i = t; i < experts; i += THREADS) {
    const bool kept = all || group_rank[i / size] < kept_groups;
    keys[i] = unique_key(kept ? choice[i] : best_two ? -infinity() : 0.f, i);
  }
  __syncthreads();
  for (int i = t; i < experts; i += THREADS) {
    const int rank = rank_of(keys, experts, keys[i]);
    if (rank < slots) {
      chosen[rank] = score[i];
      ids[(i64)row * slots + rank] = i;
    }
  }
  __syncthreads();
  if (t < 32) {
    const float total = warp_sum128(chosen, slots) + 1e-20f;
    for (int j = t; j < slots; j += 32) weights[(i64)row * slots + j] = (normalise ? chosen[j] / total : chosen[j]) * factor;
  }
}

// sample.cu: the next token of each row: argmax, or argmax of logit / T + Gumbel noise (rules 6 and 15).
//
// in   logits    float32 [rows, vocab]
//      positions int32 [rows]     position of the token fed; the drawn token stands at the next one
//      streams   int32 [rows]
// out  values    float32 [rows, parts], indices int32 [rows, parts]   the first of each span of 2048 logits
//      bad       int32 [rows]     set to 1 if a logit is not finite; never cleared here
//      chosen    int32 [rows]
//      tokens, positions          advanced for active rows if tokens is not null: the input of the next step
//
// launch  sample_parts: grid (ceil(vocab / 2048), rows), block 128;  sample_final: grid (rows), block 32
// work    a thread looks at every 128th logit of its span; warps, then the block, then the parts are compared
// order   NaN first, then the larger value, then the smaller id: exact in any order
// noise   Philox-4x32-10, counter (id / 4, position, stream, 0), word id mod 4; -log(-log u) in float64, rounded once
// bytes   4 * rows * vocab
#include "philox.cuh"

constexpr int SPAN = 2048;

struct Choice {
  float value;
  int index;
};

__device__ __forceinline__ Choice better(Choice a, Choice b) { return before(b.value, b.index, a.value, a.index) ? b : a; }

__device__ __forceinline__ Choice warp_best(Choice b) {
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    const float v = __shfl_xor_sync(FULL_WARP, b.value, o);
    const int i = __shfl_xor_sync(FULL_WARP, b.index, o);
    b = better(b, {v, i});
  }
  return b;
}

__device__ __forceinline__ float gumbel(int id, int position, int stream, u32 seed_low, u32 seed_high) {
  const Words w = philox((u32)id / 4, (u32)position, (u32)stream, PURPOSE_SAMPLE, seed_low, seed_high);
  const int word = id & 3;
  const double u = uniform(word == 0 ? w.x : word == 1 ? w.y : word == 2 ? w.z : w.w);
  return (float)(-exact_log64(-exact_log64(u)));
}

extern "C" __global__ void __launch_bounds__(128)
    sample_parts(const float* logits, const int* positions, const int* streams, float* values, int* indices, int* bad, int vocab,
                 float temperature, u32 seed_low, u32 seed_high) {
  __shared__ Choice best[4];
  const int t = threadIdx.x, row = blockIdx.y, first = blockIdx.x * SPAN;
  logits += (i64)row * vocab;
  Choice b = {-infinity(), 0x7fffffff};
  int broken = 0;
  for (int i = first + t; i < min(vocab, first + SPAN); i += 128) {
    float v = logits[i];
    broken |= !is_finite(v);
    if (temperature > 0.f) v = v / temperature + gumbel(i, positions[row] + 1, streams[row], seed_low, seed_high);
    b = b.index == 0x7fffffff ? Choice{v, i} : better(b, {v, i});
  }
  if (broken) atomicOr(bad + row, 1);
  b = warp_best(b);
  if ((t & 31) == 0) best[t >> 5] = b;
  __syncthreads();
  if (t == 0) {
    b = better(better(best[0], best[1]), better(best[2], best[3]));
    values[(i64)row * gridDim.x + blockIdx.x] = b.value;
    indices[(i64)row * gridDim.x + blockIdx.x] = b.index;
  }
}

extern "C" __global__ void __launch_bounds__(32)
    sample_final(const float* values, const int* indices, int* chosen, int* tokens, int* positions, const int* active, int parts) {
  const int t = threadIdx.x, row = blockIdx.x;
  Choice b = {-infinity(), 0x7fffffff};
  for (int i = t; i < parts; i += 32) b = better(b, {values[(i64)row * parts + i], indices[(i64)row * parts + i]});
  b = warp_best(b);
  if (t == 0) {
    chosen[row] = b.index;
    // a row that has ended keeps its token and position: the next step writes the same cache row again
    if (tokens && active[row]) {
      tokens[row] = b.index;
      positions[row] = positions[row] + 1;
    }
  }
}

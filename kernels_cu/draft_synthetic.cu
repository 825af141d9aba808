// draft_synthetic.cu: seeded marginals around a known continuation that hit with a given rate (rule 23).
//
// in   known       int32 [batch, known_row]   known tokens; known[b, 0] stands at position known_from[b]
//      known_from, known_count, streams, starts int32 [batch]
//      vocab, rate (of rank 0 being the known token), seed
// out  ids int32, logps float32 [batch, horizon, k]     past the count: id 0, log-probability 0
//      counts int32 [batch, horizon]                    min(k, different ids there are)
//
// launch  grid (horizon, batch), block 128; a thread makes ranks t, t + 128, ...
// draws   four Philox words of counter (0, position, stream, purpose 2): hit, rank of the token if missed, q, token and fillers
// order   each operation rounded; log in float64, rounded once
// bytes   4 * batch * horizon * (2 k + 1)
#include "philox.cuh"

extern "C" __global__ void __launch_bounds__(128)
    draft_synthetic(const int* known, const int* known_from, const int* known_count, const int* streams, const int* starts, int* ids,
                    float* logps, int* counts, int horizon, int k, int vocab, int known_row, u32 seed_low, u32 seed_high,
                    double rate) {
  const int d = blockIdx.x, b = blockIdx.y, position = starts[b] + 1 + d, at = position - known_from[b];
  if ((int)threadIdx.x >= k) return;
  const i64 row = (i64)b * horizon + d;
  const Words w = philox(0u, (u32)position, (u32)streams[b], PURPOSE_DRAFT, seed_low, seed_high);
  const bool is_known = at >= 0 && at < min(known_row, known_count[b]);
  const int token = is_known ? known[(i64)b * known_row + at] : (int)(w.w % (u32)vocab);
  const int rank = uniform(w.x) < rate ? 0 : 1 + (int)(w.y % (u32)k);  // k or more: the token is not proposed
  const int count = min(k, rank < k ? vocab : vocab - 1);              // the fillers are vocab - 1 different ids
  const float q = 0.3f + 0.6f * ((float)(w.z >> 8) * 5.9604644775390625e-8f), first = exact_log(q), rest = exact_log(1.f - q);
  for (int r = threadIdx.x; r < k; r += 128) {
    const u32 filler = (u32)(r > rank ? r - 1 : r);
    // ids after the token, round the vocabulary; w.w + filler as 64 bits, for it must not wrap
    const int id = r == rank ? token : (int)(((u64)token + 1 + ((u64)w.w + filler) % (u64)max(1, vocab - 1)) % (u64)vocab);
    ids[row * k + r] = r < count ? id : 0;
    logps[row * k + r] = r >= count ? 0.f : r == 0 ? first : rest - (float)r * 0.69314718f;
  }
  if (threadIdx.x == 0) counts[row] = count;
}

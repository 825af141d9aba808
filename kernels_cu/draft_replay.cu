// draft_replay.cu: marginals stored in a golden, by output position (rule 24).
//
// in   top_ids        int32 [batch, positions, horizon, kept]    best first
//      top_logps      float32 [batch, positions, horizon, kept]
//      top_counts     int32 [batch, positions, horizon]          how many of `kept` there are
//      prompt_lengths int32 [batch]
//      limits         int32 [batch]                              output positions stored, <= positions
//      starts         int32 [batch]                              position of the root; output position start - prompt length
// out  ids int32, logps float32 [batch, horizon, k]              past the count: id 0, log-probability 0
//      counts int32 [batch, horizon]                             min(k, stored); 0 where nothing is stored for this position
//
// launch  grid (horizon, batch), block 128; a thread copies ranks t, t + 128, ...
// order   none: a copy
// bytes   8 * batch * horizon * (2 k + 1)
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
    draft_replay(const int* top_ids, const float* top_logps, const int* top_counts, const int* prompt_lengths, const int* limits,
                 const int* starts, int* ids, float* logps, int* counts, int horizon, int k, int positions, int kept) {
  const int d = blockIdx.x, b = blockIdx.y, at = starts[b] - prompt_lengths[b];
  const bool stored = at >= 0 && at < min(positions, limits[b]);
  const i64 row = (i64)b * horizon + d, from = stored ? ((i64)b * positions + at) * horizon + d : 0;
  const int count = stored ? max(0, min(min(k, kept), top_counts[from])) : 0;
  for (int r = threadIdx.x; r < k; r += 128) {
    ids[row * k + r] = r < count ? top_ids[from * kept + r] : 0;
    logps[row * k + r] = r < count ? top_logps[from * kept + r] : 0.f;
  }
  if (threadIdx.x == 0) counts[row] = count;
}

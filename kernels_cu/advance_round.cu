// advance_round.cu: what a round leaves for the next: output tokens, start and root (rule 20).
//
// in   bonus, n_accepted int32 [batch]; accepted int32 [batch, horizon + 1]; tokens int32 [batch, budget + 1]
//      active  int32 [batch] or null          0: the request rests and keeps its state
// out  starts  int32 [batch]                  + n_accepted
//      roots   int32 [batch]                  = bonus
//      history int32 [batch, history_row] or null: tokens by position; the accepted nodes' and the bonus are added
//
// launch  grid (batch), block 32; a lane writes tokens t, t + 32, ...
// order   integers only
// bytes   8 * batch * (n_accepted + 4)
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(32)
    advance_round(int* starts, int* roots, const int* bonus, const int* n_accepted, const int* accepted, const int* tokens,
                  int* history, const int* active, int budget, int horizon, int history_row) {
  const int b = blockIdx.x, t = threadIdx.x;
  if (active && !active[b]) return;
  const int start = starts[b], count = n_accepted[b], room = min(count, history_row - 1 - start);
  __syncwarp();  // all lanes have read the start
  const int* way = accepted + b * (horizon + 1);
  if (history)
    for (int k = 1 + t; k <= room; k += 32)
      history[(i64)b * history_row + start + k] = k < count ? tokens[(i64)b * (budget + 1) + way[k]] : bonus[b];
  if (t == 0) {
    starts[b] = start + count;
    roots[b] = bonus[b];
  }
}

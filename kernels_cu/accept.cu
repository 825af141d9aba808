// accept.cu: the walk down a draft tree along the target's own choices (rule 20).
//
// in   tokens, parents int32 [batch, budget + 1]   node 0 is the root; a parent stands before its children
//      n_nodes   int32 [batch]                     nodes without the root
//      posterior int32 [batch, budget + 1]         the target's choice after each node
// out  accepted   int32 [batch, horizon + 1]       nodes on the way, the root first; past the end the last is repeated
//      n_accepted int32 [batch]                    >= 1: the root counts
//      bonus      int32 [batch]                    the choice after the last accepted node
//
// launch  grid (batch), block 128, shared 4 * (budget + 1) bytes
// work    every node asks whether it is what the target chose after its parent; the walk then follows those answers
// order   integers only; of two equal siblings, which no drafter makes, the first is taken
// bytes   12 * batch * (n_nodes + 1)
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
    accept(const int* tokens, const int* parents, const int* n_nodes, const int* posterior, int* accepted, int* n_accepted,
           int* bonus, int budget, int horizon) {
  extern __shared__ int next[];  // the confirmed child of each node
  const int b = blockIdx.x, t = threadIdx.x, n = min(budget, n_nodes[b]);
  const i64 row = (i64)b * (budget + 1);
  for (int i = t; i <= n; i += 128) next[i] = 0x7fffffff;
  __syncthreads();
  for (int i = 1 + t; i <= n; i += 128) {
    const int parent = parents[row + i];
    if (parent >= 0 && parent < i && tokens[row + i] == posterior[row + parent]) atomicMin(next + parent, i);
  }
  __syncthreads();
  if (t) return;
  int last = 0, count = 0;
  accepted[b * (horizon + 1)] = 0;
  for (int k = 1; k <= horizon; ++k) {
    if (next[last] <= n) {
      last = next[last];
      count = k;
    }
    accepted[b * (horizon + 1) + k] = last;
  }
  n_accepted[b] = count + 1;
  bonus[b] = posterior[row + last];
}

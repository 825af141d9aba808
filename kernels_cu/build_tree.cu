// build_tree.cu: the best-first draft tree of each request, and its rows for the verifier (rules 18 and 19).
//
// in   ids int32, logps float32 [batch, horizon, k]    marginals, best first
//      counts  int32 [batch, horizon] or null          candidates of a depth; null: k everywhere
//      starts, roots int32 [batch]; last_position      no node stands behind this position
// out  tokens, parents, depths int32, scores float64 [batch, nodes]   nodes = budget + 1; node 0 is the root: parent -1, depth 0
//      n_nodes int32 [batch]                           nodes without the root
//      positions, places, slots, tree_starts int32 [batch, nodes]     start + depth, start + node, request, start
//      paths   int32 [batch, nodes, horizon + 1]       places of the node's ancestors, root first, and its own; then its own
//      visible uint32 [batch, nodes, words]            the same as bits by node: words = ceil(nodes / 32)
//      bad     int32 [batch]                           set to 1, and the tree left empty, where a candidate's log-probability
//                                                      is NaN or infinite; never cleared here
//      rows past n_nodes: the root's token, parent -1, depth 0, score 0, alone in the path and in the bits
//
// launch  grid (batch), block 128, shared 44 * nodes bytes, and 8 * 34 * 65 for budgets to 64; budget <= 1024, horizon <= 32, k <= 65535
// work    warp 0 pops one node at a time. Budgets to 64: the frontier is a list in order of score, a candidate a lane. Above:
//         one candidate a node, its next child, in shared memory, and the lanes look through all of them for the largest.
//         All threads write the rows
// order   scores in float64: first node logp, sibling (score - logp) + next logp, first child score + logp; the largest is
//         popped, on a tie the smaller tuple of ranks, a prefix before its extension
// bytes   4 * batch * (2 * horizon * k + nodes * (horizon + 11 + words))
#include "small_tree.cuh"

#define MOST_DEPTHS 32

// Finds the candidate to pop, by a warp; false if there is none. The lane that looks after its slot gets the slot, the
// others -1. Slots 0..made are in use; slot s is lane s % 32's.
__device__ __forceinline__ bool find_best(const Tree& tree, int made, int& at) {
  const int lane = threadIdx.x;
  u64 best = 0;
  for (int s = lane; s <= made; s += 32) {
    const u64 key = tree.key[s];
    if (key > best || (key && key == best && tree.precedes(s, at))) {
      best = key;
      at = s;
    }
  }
  const u32 high = (u32)(best >> 32), top = __reduce_max_sync(FULL_WARP, high);
  if (!top) return false;  // the upper half of a finite score is never 0
  u32 who = __ballot_sync(FULL_WARP, high == top);
  if (who & (who - 1)) {  // rare: several upper halves are equal
    const u32 low = high == top ? (u32)best : 0, top_low = __reduce_max_sync(FULL_WARP, low);
    who = __ballot_sync(FULL_WARP, high == top && low == top_low);
    if (who & (who - 1)) {  // several scores are
      int front = who >> lane & 1 ? at : -1;
#pragma unroll
      for (int o = 16; o; o >>= 1) {
        const int other = __shfl_xor_sync(FULL_WARP, front, o);
        if (other >= 0 && other != front && (front < 0 || tree.precedes(other, front))) front = other;
      }
      who = 1u << front % 32;
      __syncwarp();  // all have compared before a slot changes
    }
  }
  if (!(who >> lane & 1)) at = -1;
  return true;
}

// Pops nodes until the budget is used or no candidate is left, by warp 0; returns how many.
__device__ __forceinline__ int grow(Tree tree, const Slot* first, const int* count, const float* logps, int depths, int k,
                                    int budget) {
  const float none = __int_as_float(0x7fc00000);
  int made = 0;
  if (!depths) return 0;
  if (threadIdx.x == 0) tree.put(0, first[0], (double)first[0].here);
  __syncwarp();
  for (int at = -1; made < budget && find_best(tree, made, at); ++made) {
    if (at >= 0) {
      const Slot s = tree.slot[at];
      const double w = tree.score[at];
      const int depth = s.depth_rank >> 16, rank = s.depth_rank & 0xffff, node = made + 1;
      // two ranks on: loaded now, waited for when all else is done
      const float after = rank + 2 < count[depth - 1] ? __ldg(logps + (depth - 1) * k + rank + 2) : none;
      tree.popped[node] = w;
      tree.node[node] = pack(at, s.depth_rank);
      tree.key[at] = tree.key[node] = 0;
      if (!is_nan(s.child)) tree.put(node, first[depth], w + (double)s.child);
      if (!is_nan(s.next)) tree.put(at, {s.next, after, s.child, s.depth_rank + 1}, (w - (double)s.here) + (double)s.next);
    }
    at = -1;
    __syncwarp();
  }
  return made;
}

extern "C" __global__ void __launch_bounds__(128)
    build_tree(const int* ids, const float* logps, const int* counts, const int* starts, const int* roots, int* tokens,
               int* parents, int* depths, double* scores, int* n_nodes, int* positions, int* places, int* slots, int* tree_starts,
               int* paths, u32* visible, int* bad, int horizon, int k, int budget, int last_position) {
  extern __shared__ float4 shared[];
  __shared__ Slot first[MOST_DEPTHS];  // the first child of a node, by its depth
  __shared__ int count[MOST_DEPTHS], made;
  const int b = blockIdx.x, t = threadIdx.x, nodes = budget + 1, start = starts[b], root = roots[b];
  Tree tree;
  tree.slot = (Slot*)shared;
  tree.score = (double*)(tree.slot + nodes);
  tree.key = (u64*)(tree.score + nodes);
  tree.popped = (double*)(tree.key + nodes);
  double* table = tree.popped + nodes;
  tree.node = (u32*)(table + (budget <= SMALL ? (MOST_DEPTHS + 2) * RANKS : 0));
  const i64 marginals = (i64)b * horizon, row0 = (i64)b * nodes;
  ids += marginals * k;
  logps += marginals * k;
  if (t < MOST_DEPTHS) count[t] = t >= horizon ? 0 : counts ? max(0, min(k, counts[marginals + t])) : k;
  __syncthreads();
  const int end = __ffs((int)__ballot_sync(FULL_WARP, count[t & 31] == 0));  // the first depth without candidates ends the horizon
  int deepest = min(end ? end - 1 : MOST_DEPTHS, max(0, last_position - start));
  bool broken = false;
  const bool small = budget <= SMALL;
  for (int d = t / 32; d < horizon; d += 4)
#pragma unroll 4
    for (int rank = t % 32; rank < count[d]; rank += 32) {
      const float logp = logps[d * k + rank];
      broken |= !is_finite(logp);
      if (small && d < deepest && rank < RANKS) table[d * RANKS + rank] = (double)logp;
    }
  if (small)
    for (int d = t / 32; d < deepest + 2; d += 4)
      for (int rank = (d < deepest ? count[d] : 0) + t % 32; rank < RANKS; rank += 32) table[d * RANKS + rank] = NONE;
  if (t < deepest) {
    const float none = __int_as_float(0x7fc00000), *p = logps + t * k;
    first[t] = {p[0], count[t] > 1 ? p[1] : none, t + 1 < deepest ? p[k] : none, (u32)(t + 1) << 16};
  }
  if (__syncthreads_or(broken)) {
    deepest = 0;
    if (t == 0) bad[b] = 1;
  }
  if (t < 32) {
    int n = small ? grow_small(tree, table, deepest, budget) : -1;
    if (n < 0) n = grow(tree, first, count, logps, deepest, k, budget);
    if (t == 0) made = n_nodes[b] = n;
  }
  __syncthreads();
  const int words = (nodes + 31) / 32;
  for (int i = t; i < nodes; i += 128) {
    const i64 row = row0 + i;
    const bool drawn = i > 0 && i <= made;
    const u32 who = drawn ? tree.node[i] : 0;
    const int depth = depth_of(who), rank = rank_at(who);
    tokens[row] = drawn ? ids[(depth - 1) * k + rank] : root;
    parents[row] = drawn ? parent_of(who) : -1;
    depths[row] = depth;
    scores[row] = drawn ? tree.popped[i] : 0.0;
    positions[row] = start + depth;
    places[row] = start + i;
    slots[row] = b;
    tree_starts[row] = start;
    int* path = paths + row * (horizon + 1);
    for (int d = horizon; d > depth; --d) path[d] = start + i;
    for (int d = depth, at = i; d >= 0; --d) {
      path[d] = start + at;
      if (d) at = parent_of(tree.node[at]);
    }
    // ancestors stand in descending order on the way up
    u32* bits = visible + row * words;
    for (int word = words - 1, at = i; word >= 0; --word) {
      u32 seen = 0;
      for (; at >= 32 * word; at = drawn && at ? parent_of(tree.node[at]) : -1) seen |= 1u << (at & 31);
      bits[word] = seen;
    }
  }
}

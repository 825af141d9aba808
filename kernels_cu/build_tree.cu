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
// launch  grid (batch), block 128, shared 40 * nodes bytes; budget <= 1024, horizon <= 32, k <= 65535
// work    warp 0 pops one node at a time. The frontier is one candidate a node, its next child: a slot holds its score, and
//         the lanes look through all slots for the largest; budgets below 96 keep the scores in registers. All threads
//         write the rows
// order   scores in float64: first node logp, sibling (score - logp) + next logp, first child score + logp; the largest is
//         popped, on a tie the smaller tuple of ranks, a prefix before its extension
// bytes   4 * batch * (2 * horizon * k + nodes * (horizon + 11 + words))
#include "common.cuh"

#define MOST_DEPTHS 32

// The next child of a node: its log-probability, that of the child after it and that of its own first child (NaN: there is
// none), its depth and rank.
struct alignas(16) Slot {
  float here, next, child;
  u32 depth_rank;  // depth << 16 | rank
};
struct Node {
  int parent;
  u32 depth_rank;
};

// An integer that grows with a score, -0 = +0; never 0.
__device__ __forceinline__ u64 score_key(double w) {
  const i64 bits = __double_as_longlong(w + 0.0);
  return bits < 0 ? (u64)~bits : (u64)bits | 1ull << 63;
}

struct Tree {
  Slot* slot;     // of each node
  double* score;  // of each node's slot
  u64* key;       // the score as an integer that grows with it, -0 = +0; 0: no candidate
  Node* node;

  __device__ __forceinline__ void put(int i, Slot s, double w) {
    slot[i] = s;
    score[i] = w;
    key[i] = score_key(w);
  }

  // Of the candidates in slots a and b: does a's tuple of ranks stand before b's?
  __device__ __forceinline__ bool precedes(int a, int b) const {
    u32 x = slot[a].depth_rank, y = slot[b].depth_rank;
    const int longer = (int)(x >> 16) - (int)(y >> 16);
    for (int i = 0; i < longer; ++i) up(a, x);
    for (int i = 0; i < -longer; ++i) up(b, y);
    while (a != b) {
      up(a, x);
      up(b, y);
    }
    return x == y ? longer < 0 : x < y;
  }
  // From a child, given by its parent and its depth and rank, to that parent.
  __device__ __forceinline__ void up(int& parent, u32& depth_rank) const {
    const Node n = node[parent];
    parent = n.parent;
    depth_rank = n.depth_rank;
  }
};

// For budgets below SMALL every lane keeps its keys in registers: slot s is entry s / 32 of lane s % 32. A node is a step
// that the next one waits for, so all lanes follow it alike: no branch that splits the warp, no global read.
// `table` [depths][RANKS] holds the log-probabilities, NaN behind the last: no rank that can be reached is larger.
#define SMALL 96
#define PER (SMALL / 32)
#define RANKS (SMALL + 2)

// The slot to pop out of 0..made where several keys share the upper half; the keys stand in shared memory.
__device__ __noinline__ int find_among_equals(Tree tree, int made) {
  int front = 0;
  for (int s = 1; s <= made; ++s)
    if (tree.key[s] > tree.key[front] || (tree.key[s] && tree.key[s] == tree.key[front] && tree.precedes(s, front))) front = s;
  return front;
}

__device__ __forceinline__ int grow_small(Tree tree, const Slot* first, const float* table, double* scores, int depths, int budget) {
  const int lane = threadIdx.x;
  if (!depths) return 0;
  if (lane == 0) tree.put(0, first[0], (double)first[0].here);
  u64 key[PER] = {lane ? 0 : score_key((double)first[0].here)};
  __syncwarp();
  int made = 0;
  for (; made < budget; ++made) {
    u64 best = key[0];
    int at = lane;
#pragma unroll
    for (int j = 1; j < PER; ++j) {
      at = key[j] > best ? lane + 32 * j : at;
      best = key[j] > best ? key[j] : best;
    }
    const u32 top = __reduce_max_sync(FULL_WARP, (u32)(best >> 32));
    if (!top) break;  // the upper half of a finite score is never 0
    int equal = 0;
#pragma unroll
    for (int j = 0; j < PER; ++j) equal += (u32)(key[j] >> 32) == top;
    const u32 several = __ballot_sync(FULL_WARP, equal > 1), lanes = __ballot_sync(FULL_WARP, equal > 0);
    at = __shfl_sync(FULL_WARP, at, __ffs((int)lanes) - 1);
    if (several | (lanes & (lanes - 1))) {  // rare
#pragma unroll
      for (int j = 0; j < PER; ++j)
        if (lane + 32 * j <= made) tree.key[lane + 32 * j] = key[j];
      __syncwarp();
      at = find_among_equals(tree, made);
      __syncwarp();
    }
    const Slot s = tree.slot[at];
    const double w = tree.score[at];
    const int depth = s.depth_rank >> 16, rank = s.depth_rank & 0xffff, node = made + 1;
    const Slot below = first[min(depth, depths - 1)];
    const float after = table[(depth - 1) * RANKS + min(rank + 2, RANKS - 1)];
    const double child = w + (double)s.child, sibling = (w - (double)s.here) + (double)s.next;
    const u64 child_key = is_nan(s.child) ? 0 : score_key(child), sibling_key = is_nan(s.next) ? 0 : score_key(sibling);
#pragma unroll
    for (int j = 0; j < PER; ++j) key[j] = lane + 32 * j == at ? sibling_key : lane + 32 * j == node ? child_key : key[j];
    __syncwarp();  // all have read the slot
    if (lane == 0) {
      tree.slot[at] = {s.next, after, s.child, s.depth_rank + 1};
      tree.score[at] = sibling;
      tree.slot[node] = below;
      tree.score[node] = child;
      tree.node[node] = {at, s.depth_rank};
      scores[node] = w;
    }
    __syncwarp();
  }
  return made;
}

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
__device__ __forceinline__ int grow(Tree tree, const Slot* first, const int* count, const float* logps, double* scores, int depths,
                                    int k, int budget) {
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
      tree.node[node] = {at, s.depth_rank};
      scores[node] = w;
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
  __shared__ float table[MOST_DEPTHS * RANKS];
  __shared__ int count[MOST_DEPTHS], made;
  const int b = blockIdx.x, t = threadIdx.x, nodes = budget + 1, start = starts[b];
  Tree tree;
  tree.slot = (Slot*)shared;
  tree.score = (double*)(tree.slot + nodes);
  tree.key = (u64*)(tree.score + nodes);
  tree.node = (Node*)(tree.key + nodes);
  const i64 marginals = (i64)b * horizon, row0 = (i64)b * nodes;
  ids += marginals * k;
  logps += marginals * k;
  if (t < MOST_DEPTHS) count[t] = t >= horizon ? 0 : counts ? max(0, min(k, counts[marginals + t])) : k;
  __syncthreads();
  if (budget < SMALL)
    for (int i = t; i < horizon * RANKS; i += 128) {
      const int d = i / RANKS, rank = i % RANKS;
      table[i] = rank < count[d] ? logps[d * k + rank] : __int_as_float(0x7fc00000);
    }
  bool broken = false;
  for (int i = t; i < horizon * k; i += 128) broken |= i % k < count[i / k] && !is_finite(logps[i]);
  const int end = __ffs((int)__ballot_sync(FULL_WARP, count[t & 31] == 0));  // the first depth without candidates ends the horizon
  int deepest = min(end ? end - 1 : MOST_DEPTHS, max(0, last_position - start));
  if (t < deepest) {
    const float none = __int_as_float(0x7fc00000), *p = logps + t * k;
    first[t] = {p[0], count[t] > 1 ? p[1] : none, t + 1 < deepest ? p[k] : none, (u32)(t + 1) << 16};
  }
  if (__syncthreads_or(broken)) {
    deepest = 0;
    if (t == 0) bad[b] = 1;
  }
  if (t < 32) {
    const int n = budget < SMALL ? grow_small(tree, first, table, scores + row0, deepest, budget)
                                 : grow(tree, first, count, logps, scores + row0, deepest, k, budget);
    if (t == 0) made = n_nodes[b] = n;
  }
  __syncthreads();
  const int words = (nodes + 31) / 32;
  for (int i = t; i < nodes; i += 128) {
    const i64 row = row0 + i;
    const bool drawn = i > 0 && i <= made;
    const int depth = drawn ? tree.node[i].depth_rank >> 16 : 0, rank = drawn ? tree.node[i].depth_rank & 0xffff : 0;
    tokens[row] = drawn ? ids[(depth - 1) * k + rank] : roots[b];
    parents[row] = drawn ? tree.node[i].parent : -1;
    depths[row] = depth;
    if (!drawn) scores[row] = 0.0;
    positions[row] = start + depth;
    places[row] = start + i;
    slots[row] = b;
    tree_starts[row] = start;
    int* path = paths + row * (horizon + 1);
    for (int d = horizon; d > depth; --d) path[d] = start + i;
    for (int d = depth, at = i; d >= 0; --d) {
      path[d] = start + at;
      if (d) at = tree.node[at].parent;
    }
    // ancestors stand in descending order on the way up
    u32* bits = visible + row * words;
    for (int word = words - 1, at = i; word >= 0; --word) {
      u32 seen = 0;
      for (; at >= 32 * word; at = drawn && at ? tree.node[at].parent : -1) seen |= 1u << (at & 31);
      bits[word] = seen;
    }
  }
}

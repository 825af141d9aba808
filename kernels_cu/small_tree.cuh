// small_tree.cuh: the growth of a draft tree of at most 64 nodes by one warp (build_tree.cu).
//
// For budgets up to SMALL the frontier is a list in order of score, one candidate a lane; lane 0's is popped. A pop is a
// chain of dependent instructions, and nothing else counts: no branch that splits the warp, no vote, no global read in it.
// Every lane sees by the scores of itself and its neighbours whether the two new candidates go before or behind it, and
// takes what belongs to it from itself, a neighbour or the new ones.
//
// A candidate that falls off the end has 32 before it, and no more than 32 pops are left: after p pops there are at most
// p + 1 candidates. So it is never popped, nor is one whose place in the list is wrong because that one was missing.
#pragma once
#include "tree.cuh"

#define SMALL 64
#define RANKS (SMALL + 1)
#define NONE __longlong_as_double((i64)0xfff0000000000000ull)  // -inf: no candidate

struct Candidate {
  double score;
  u32 who;
};
__device__ __forceinline__ Candidate select(bool condition, Candidate a, Candidate b) {
  const int high = condition ? __double2hiint(a.score) : __double2hiint(b.score);
  const int low = condition ? __double2loint(a.score) : __double2loint(b.score);
  return {__hiloint2double(high, low), condition ? a.who : b.who};
}
__device__ __forceinline__ Candidate shuffle(Candidate c, int lane) {
  return {__shfl_sync(FULL_WARP, c.score, lane), __shfl_sync(FULL_WARP, c.who, lane)};
}

// Of the lanes of `run`, whose scores are equal: the one whose candidate has the smallest tuple.
__device__ __noinline__ int front_of(Tree tree, u32 who, u32 run) {
  const int lane = threadIdx.x;
  int front = run >> lane & 1 ? lane : -1;
#pragma unroll 1
  for (int o = 16; o; o >>= 1) {
    const int other = __shfl_xor_sync(FULL_WARP, front, o);
    const u32 theirs = __shfl_xor_sync(FULL_WARP, who, o);
    if (other >= 0 && (front < 0 || tree.precedes(parent_of(theirs), depth_rank_of(theirs), parent_of(who), depth_rank_of(who)))) {
      front = other;
      who = theirs;
    }
  }
  return __shfl_sync(FULL_WARP, front, 0);
}

// `table` [depths + 2][RANKS] holds the log-probabilities as float64, NONE behind the last of a depth and of the depths.
// Returns the number of nodes, or -1 where a candidate fell off that has the last one's score: either could be the first.
__device__ __forceinline__ int grow_small(Tree tree, const double* table, int depths, int budget) {
  const int lane = threadIdx.x;
  Candidate mine = {lane || !depths ? NONE : table[0], 1u << 16};
  bool doubt = false;
  int made = 0;
  for (; made < budget; ++made) {
    Candidate head = shuffle(mine, 0);
    const u32 run = __ballot_sync(FULL_WARP, mine.score == head.score);
    if (head.score == NONE) break;
    if (run & (run - 1)) {
      __syncwarp();  // the nodes are written
      const int front = front_of(tree, mine.who, run);
      const Candidate swapped = shuffle(mine, front);
      mine = select(lane == front, head, mine);
      head = swapped;
    }
    const Candidate left = {__shfl_up_sync(FULL_WARP, mine.score, 1), __shfl_up_sync(FULL_WARP, mine.who, 1)};
    Candidate right = {__shfl_down_sync(FULL_WARP, mine.score, 1), __shfl_down_sync(FULL_WARP, mine.who, 1)};
    right = select(lane == 31, {NONE, 1u << 16}, right);
    const int depth = depth_of(head.who), node = made + 1;
    const double *own = table + (depth - 1) * RANKS + rank_at(head.who), *below = table + depth * RANKS;
    const Candidate child = {head.score + below[0], pack(node, (u32)(depth + 1) << 16)};
    const Candidate sibling = {(head.score - own[0]) + own[1], head.who + 1};
    if (lane == 0) {
      tree.popped[node] = head.score;
      tree.node[node] = head.who;
    }
    // of two equal ones the child is first: its tuple is (..., rank, 0), the sibling's (..., rank + 1)
    const bool child_first = child.score >= sibling.score;
    const Candidate first = select(child_first, child, sibling), second = select(child_first, sibling, child);
    // Does the list's candidate here, at the left, at the right stand before the first and the second new one? The popped
    // one does. (Two comparisons in place of one with the second would become one with a minimum, which rule 2 forbids.)
    const bool here_first = lane == 0 | mine.score > first.score;
    const bool here_second = lane == 0 | mine.score > second.score;
    const bool left_second = lane <= 1 | left.score > second.score;
    const bool right_first = right.score > first.score;
    const Candidate old = mine;
    mine = select(here_second & !here_first, mine, left);
    mine = select(left_second & !here_second, second, mine);
    mine = select(here_first, first, mine);
    mine = select(right_first, right, mine);
    const double fallen = here_second ? second.score : old.score;  // of lane 31
    doubt |= mine.score == fallen & fallen != NONE;
  }
  return __shfl_sync(FULL_WARP, (int)doubt, 31) ? -1 : made;
}

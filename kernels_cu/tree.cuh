// tree.cuh: nodes and candidates of a draft tree while it grows, and which of two candidates with equal scores is first.
#pragma once
#include "common.cuh"

// The next child of a node: its log-probability, that of the child after it and that of its own first child (NaN: there is
// none), its depth and rank.
struct alignas(16) Slot {
  float here, next, child;
  u32 depth_rank;  // depth << 16 | rank
};
// An integer that grows with a score, -0 = +0; never 0.
__device__ __forceinline__ u64 score_key(double w) {
  const i64 bits = __double_as_longlong(w + 0.0);
  return bits < 0 ? (u64)~bits : (u64)bits | 1ull << 63;
}

// A candidate or a node in one word: parent, depth and rank.
__device__ __forceinline__ u32 pack(int parent, u32 depth_rank) { return (u32)parent << 22 | depth_rank; }
__device__ __forceinline__ int parent_of(u32 who) { return who >> 22; }
__device__ __forceinline__ u32 depth_rank_of(u32 who) { return who & 0x3fffff; }
__device__ __forceinline__ int depth_of(u32 who) { return who >> 16 & 0x3f; }
__device__ __forceinline__ int rank_at(u32 who) { return who & 0xffff; }

struct Tree {
  Slot* slot;      // of each node
  double* score;   // of each node's slot
  u64* key;        // the score as an integer that grows with it, -0 = +0; 0: no candidate
  double* popped;  // of each node its own score
  u32* node;       // pack(parent, depth and rank)

  __device__ __forceinline__ void put(int i, Slot s, double w) {
    slot[i] = s;
    score[i] = w;
    key[i] = score_key(w);
  }

  // Of the candidates in slots a and b: does a's tuple of ranks stand before b's?
  __device__ __forceinline__ bool precedes(int a, int b) const {
    return precedes(a, slot[a].depth_rank, b, slot[b].depth_rank);
  }
  // The same of two candidates given by their parents a and b and their depths and ranks x and y.
  __device__ __forceinline__ bool precedes(int a, u32 x, int b, u32 y) const {
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
    const u32 who = node[parent];
    parent = parent_of(who);
    depth_rank = depth_rank_of(who);
  }
};

// attention.cuh: where a query's keys lie, and which heads share a block. Keys are taken by position, whatever cache row
// holds them (rule 11).
#pragma once
#include "common.cuh"

#define CHUNK 256   // positions of one chunk, counted from position 0 (rule 10)
#define SEGMENT 32  // positions whose scores one block computes; each leaves its maximum
#define HEADS 8     // heads that share one read of a key

__device__ __forceinline__ int chunk_count(int position) { return position / CHUNK + 1; }

// Number of positions of a chunk that a query at `position` sees: it sees 0..position.
__device__ __forceinline__ int chunk_keys(int position, int chunk) { return min(CHUNK, position + 1 - chunk * CHUNK); }

// The heads of a block, at most HEADS, all of one kv head: blocks of blockIdx.y run through the kv heads' groups.
struct HeadBlock {
  int first, count, kv;
};
__device__ __forceinline__ HeadBlock head_block(int heads, int kv_heads) {
  const int group = heads / kv_heads, blocks = (group + HEADS - 1) / HEADS;
  const int kv = blockIdx.y / blocks, h = blockIdx.y % blocks * HEADS;
  return {kv * group + h, min(HEADS, group - h), kv};
}

// The keys of a row: position i lies in cache row i, from tree_start on in row path[i - tree_start].
struct Keys {
  const float* base;
  i64 stride;
  const int* path;
  int tree_start;
  __device__ __forceinline__ const float* at(int i) const {
    return base + (i < tree_start ? i : path[i - tree_start]) * stride;
  }
};
__device__ __forceinline__ Keys row_keys(const float* cache, const int* slots, const int* tree_starts, const int* paths, int row,
                                         int kv, int capacity, int path_row, i64 key_row, i64 key_head) {
  return {cache + (i64)slots[row] * capacity * key_row + kv * key_head, key_row, paths + (i64)row * path_row,
          tree_starts ? tree_starts[row] : 0x7fffffff};
}

// attention.cuh: where a query's keys lie. Keys are taken by position, whatever cache row holds them (rule 11).
#pragma once
#include "common.cuh"

#define CHUNK 256   // positions of one chunk, counted from position 0 (rule 10)
#define SEGMENT 32  // positions whose scores one block computes; each leaves its maximum
#define HEADS 8     // heads that share one read of a key

__device__ __forceinline__ int chunk_count(int position) { return position / CHUNK + 1; }

// Number of positions of a chunk that a query at `position` sees: it sees 0..position.
__device__ __forceinline__ int chunk_keys(int position, int chunk) { return min(CHUNK, position + 1 - chunk * CHUNK); }

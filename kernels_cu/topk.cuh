// topk.cuh: what topk_parts and topk_final share: parts of a row of logits, and their keys.
#pragma once
#include "dot.cuh"

#define PART 8192
#define MOST 1024  // keys of a list in shared memory

// The value of a key; -0 has become +0.
__device__ __forceinline__ float key_value(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Room for `mine` more entries of each thread in a list of `taken`, by one atomic a warp; returns where the thread's begin.
__device__ __forceinline__ int reserve(int& taken, int mine) {
  const int lane = threadIdx.x & 31;
  int upto = mine;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const int below = __shfl_up_sync(FULL_WARP, upto, o);
    if (lane >= o) upto += below;
  }
  int base = 0;
  if (lane == 31) base = atomicAdd(&taken, upto);
  return __shfl_sync(FULL_WARP, base, 31) + upto - mine;
}

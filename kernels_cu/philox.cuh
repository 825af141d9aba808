// philox.cuh: the random words of rule 15, drawn by counter: nothing depends on a batch, a step count or a mode.
#pragma once
#include "common.cuh"

#define PURPOSE_SAMPLE 0u
#define PURPOSE_DRAFT 2u  // 1 is the host's: random prompts

struct Words {
  u32 x, y, z, w;
};

// The Philox-4x32 block at this counter and key, 10 rounds (Salmon et al., SC 2011).
__device__ __forceinline__ Words philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 h0 = __umulhi(c0, 0xD2511F53u), l0 = c0 * 0xD2511F53u, h1 = __umulhi(c2, 0xCD9E8D57u), l1 = c2 * 0xCD9E8D57u;
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// A word as a number strictly between 0 and 1.
__device__ __forceinline__ double uniform(u32 word) { return ((double)word + 0.5) * 2.3283064365386962890625e-10; }

// mla.cuh: what mla_decode.cu and mla_combine.cu agree on: the width, the ranges of positions and 2^x.
#pragma once
#include "mma.cuh"

#define LATENT 512

// Positions of a range for a row that sees this many.
__device__ __forceinline__ int range_size(int length) {
  return length <= 2048 ? 64 : length <= 16384 ? 128 : length <= 65536 ? 256 : 1024;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

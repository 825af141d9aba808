// Included by reduction.cu; a fault marked "at:" must be reported with this file's name.
#pragma once
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);  // at: in_header
  return v;
}

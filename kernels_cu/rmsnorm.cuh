// rmsnorm.cuh: the scale of one row by a block of 128 threads, shared by rmsnorm.cu and kv_append.cu (rule 8).
#pragma once
#include "dot.cuh"

// 1 / sqrt(sum128(x * x) / n + eps) of x [n]; every thread gets it. `part` is shared memory.
template <bool VEC> __device__ __forceinline__ float rms_scale(const float* x, int n, float eps, float (&part)[4]) {
  const int t = threadIdx.x, quads = (n + 3) / 4;
  float sum = 0.f;
  for (int first = 0; first < quads; first += BLOCK_QUADS) {
    const int end = min(quads, first + BLOCK_QUADS);
    float a[1] = {0.f};
#pragma unroll 4
    for (int q = first + t; q < end; q += 128) {
      const float4 v = load_quad<VEC>(x, q, n);
      a[0] = add_products(a[0], v, v);
    }
    fold32(a);
    if ((t & 31) == 0) part[t >> 5] = a[0];
    __syncthreads();
    sum = sum + ((part[0] + part[1]) + (part[2] + part[3]));
    __syncthreads();
  }
  return 1.0f / sqrtf(sum / (float)n + eps);
}

// y = (x * r) * weight for the n elements of a row.
template <bool VEC> __device__ __forceinline__ void norm_row(const float* x, const float* weight, float* y, int n, float eps, float (&part)[4]) {
  const float r = rms_scale<VEC>(x, n, eps, part);
  if (VEC) {
#pragma unroll 4
    for (int q = threadIdx.x; q < n / 4; q += 128) {
      const float4 v = load_quad<VEC>(x, q, n), w = load_quad<VEC>(weight, q, n);
      ((float4*)y)[q] = {(v.x * r) * w.x, (v.y * r) * w.y, (v.z * r) * w.z, (v.w * r) * w.w};
    }
  } else {
    for (int k = threadIdx.x; k < n; k += 128) y[k] = (x[k] * r) * weight[k];
  }
}

// The same choice for every row: all rows start on 16 bytes and hold whole quads.
__device__ __forceinline__ void norm_any(const float* x, const float* weight, float* y, int n, float eps, i64 strides, float (&part)[4]) {
  if (((n | strides) & 3) == 0 && (((u64)x | (u64)weight | (u64)y) & 15) == 0)
    norm_row<true>(x, weight, y, n, eps, part);
  else
    norm_row<false>(x, weight, y, n, eps, part);
}

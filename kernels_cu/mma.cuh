// mma.cuh: what the kernels of the tiers bf16 and int4 share: rounding, the matrix instruction, loads, dependent launch.
//
// These tiers round where exact does not and promise less: the same bits on one kind of device for any number of rows, any
// batch, AR or DDTree (docs/numerics.md). Sums run on matrix units, whose inner order is the device's own; which products an
// instruction gets is fixed, so one row uses the instruction that eight rows use. On the CPU device the instruction is one
// meeting of the warp's lanes (its sums in ascending k), good for correctness and for nothing else.
#pragma once
#include "weights.cuh"

// Round to the nearest bf16, ties to even; NaN stays NaN.
__device__ __forceinline__ bf16 round_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return {is_nan(x) ? (u16)(bits >> 16 | 0x40) : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

struct Words { u32 x, y, z, w; };  // eight bf16 of one row, in ascending k, two a word

// acc[0..3] += 16 outputs x 8 rows over a k of 16. Lane (g, t) = (lane / 4, lane % 4) holds outputs g (acc[0], acc[1]) and g + 8
// (acc[2], acc[3]) of rows 2 t and 2 t + 1; a0, a2 are words of output g, a1, a3 of output g + 8, b0, b1 of row g. Which k sit
// in which word does not matter as long as both sides agree.
#ifdef KDTR_CPU
struct Operands {
  float* acc;
  u32 a[4], b[2];
};
inline float mma_low(u32 v) { return __uint_as_float(v << 16); }
inline float mma_high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
inline void mma_lanes(Operands** lane) {
  for (int l = 0; l < 32; ++l)
    for (int c = 0; c < 4; ++c) {
      float sum = lane[l]->acc[c];
      for (int half = 0; half < 2; ++half)
        for (int t = 0; t < 4; ++t) {
          const u32 a = lane[(l & ~3) + t]->a[2 * half + (c >> 1)], b = lane[(2 * (l & 3) + (c & 1)) * 4 + t]->b[half];
          sum = sum + mma_low(a) * mma_low(b);
          sum = sum + mma_high(a) * mma_high(b);
        }
      lane[l]->acc[c] = sum;
    }
}
#define mma(acc, ...) mma_on(__LINE__, acc, __VA_ARGS__)
inline void mma_on(int line, float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  Operands mine = {acc, {a0, a1, a2, a3}, {b0, b1}};
  cc::collective(line, FULL_WARP, &mine, mma_lanes);
}
#else
__device__ __forceinline__ void mma(float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif

// 16 bytes, or zeros where `there` is false: a predicate and no branch, since a branch between loads and products kept the
// compiler from overlapping them (measured: 8 to 25 % of a one-row product). Weights are read once, so past the first-level
// cache; activations may have been written by the kernel before.
#ifdef KDTR_CPU
inline Words load_weights(const bf16* p, bool there) { return there ? *(const Words*)p : Words{0, 0, 0, 0}; }
inline Words load_activations(const bf16* p, bool there) { return there ? *(const Words*)p : Words{0, 0, 0, 0}; }
#else
#define LOAD_IF(name, instruction)                                                                                        \
  __device__ __forceinline__ Words name(const bf16* p, bool there) {                                                       \
    Words v;                                                                                                              \
    asm volatile(                                                                                                         \
        "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n" \
        " @p " instruction ".v4.u32 {%0, %1, %2, %3}, [%4];\n}"                                                           \
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)                                                                  \
        : "l"(p), "r"((u32)there));                                                                                       \
    return v;                                                                                                             \
  }
LOAD_IF(load_weights, "ld.global.nc.L1::no_allocate")
LOAD_IF(load_activations, "ld.global")
#endif

// Programmatic dependent launch (sm_90 up): the next kernel may start, and what the one before wrote may be read.
__device__ __forceinline__ void start_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The sum of v[0 .. N), N a power of two: neighbours, then pairs, then fours ...
template <int N> __device__ __forceinline__ float tree_sum(float (&v)[N]) {
#pragma unroll
  for (int step = 1; step < N; step *= 2)
#pragma unroll
    for (int i = 0; i < N; i += 2 * step) v[i] = v[i] + v[i + step];
  return v[0];
}

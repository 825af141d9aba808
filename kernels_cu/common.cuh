// common.cuh: what every exact kernel shares: types, the contract's fold, exp and log, and the order of choices.
//
// Tier `exact` (docs/numerics.md): float32 with every operation rounded by itself, so no fused multiply-add, no
// approximate intrinsic, no float atomic. The same file compiles for a GPU (NVRTC, no header needed) and for the CPU
// device (KDTR_CPU), where the warp fold is one collective instead of five shuffles: same tree, same bits.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define FULL_WARP 0xffffffffu
#define BLOCK_QUADS 2048  // quads of 4 elements: a longer sum is cut into blocks, added in ascending order (rule 3)

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ bool is_nan(float x) { return x != x; }
__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// Each of the N values of every lane becomes the sum over the warp's 32 lanes by the xor tree 16, 8, 4, 2, 1 (rule 3).
#ifdef KDTR_CPU
#define fold32(v) cc::fold32(__LINE__, v)
#else
template <int N> __device__ __forceinline__ void fold32(float (&v)[N]) {
#pragma unroll
  for (int o = 16; o; o >>= 1)
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = v[i] + __shfl_xor_sync(FULL_WARP, v[i], o);
}
#endif


// Maximum that keeps NaN (rule 2).
__device__ __forceinline__ float max_nan(float a, float b) { return is_nan(a) ? a : (is_nan(b) ? b : (a < b ? b : a)); }

// True if (value a, index i) stands before (b, j): NaN first, then the larger value, then the smaller index (rule 6).
__device__ __forceinline__ bool before(float a, int i, float b, int j) {
  if (is_nan(a) != is_nan(b)) return is_nan(a);
  if (is_nan(a) || a == b) return i < j;
  return a > b;
}

// e**x (rule 5): Cephes-style polynomial, arguments clamped to [-87, 88]; 2**n as two factors that can't overflow.
__device__ __forceinline__ float exact_exp(float x) {
  if (is_nan(x)) return x;
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float n = rintf(x * 1.44269504088896341f);
  float r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = ((p * r) * r + r) + 1.0f;
  const int e = (int)n, a = e >> 1;
  return (p * __int_as_float((a + 127) << 23)) * __int_as_float((e - a + 127) << 23);
}

__device__ __forceinline__ float exact_sigmoid(float x) { return 1.0f / (1.0f + exact_exp(-x)); }
__device__ __forceinline__ float exact_silu(float x) { return x * exact_sigmoid(x); }

// Natural logarithm in float64 by + - x / only (rule 5): x = 2**e * m, log m = 2 artanh((m - 1) / (m + 1)).
__device__ __forceinline__ double exact_log64(double x) {
  if (x != x || x < 0.0) return __longlong_as_double(0x7ff8000000000000ll);
  if (x == 0.0) return __longlong_as_double((i64)0xfff0000000000000ull);
  i64 bits = __double_as_longlong(x);
  if (bits == 0x7ff0000000000000ll) return x;
  int shift = 0;
  if (x < 2.2250738585072014e-308) {
    bits = __double_as_longlong(x * 18014398509481984.0);
    shift = 54;
  }
  int e = (int)(bits >> 52) - 1023 - shift;
  double m = __longlong_as_double((bits & 0x000fffffffffffffll) | 0x3ff0000000000000ll);
  if (m > 1.4142135623730951) {
    m = m * 0.5;
    e = e + 1;
  }
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double p = 2.0 / 23.0;
  p = p * z + 2.0 / 21.0;
  p = p * z + 2.0 / 19.0;
  p = p * z + 2.0 / 17.0;
  p = p * z + 2.0 / 15.0;
  p = p * z + 2.0 / 13.0;
  p = p * z + 2.0 / 11.0;
  p = p * z + 2.0 / 9.0;
  p = p * z + 2.0 / 7.0;
  p = p * z + 2.0 / 5.0;
  p = p * z + 2.0 / 3.0;
  const double n = (double)e;
  return n * 6.93147180369123816490e-01 + (2.0 * s + (s * (p * z) + n * 1.90821492927058770002e-10));
}

__device__ __forceinline__ float exact_log(float x) { return (float)exact_log64((double)x); }

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

// The warp fold of the contract (rule 3): the sum of a value over the 32 lanes by the xor tree 16, 8, 4, 2, 1.
//
//   fold32(v):        every lane gets all N sums
//   fold_scatter(v):  lane l gets the sums of values b * 32 + l * n / 32 in out[b], n = min(N, 32); N a power of two
//
// fold_scatter lets a lane keep half of its values at each step and hand the other half to its partner: N - 1 shuffles
// for 32 values instead of 5 N. Which lane of a pair adds makes no difference: a + b = b + a.
#ifdef KDTR_CPU
template <int N, int B> __device__ __forceinline__ void fold_scatter_on(int line, float (&v)[N], float (&out)[B]) {
  cc::fold32(line, v);
  const int lane = threadIdx.x & 31;
  for (int b = 0; b < B; ++b) out[b] = v[b * 32 + (N < 32 ? lane * N / 32 : lane)];
}
#define fold32(v) cc::fold32(__LINE__, v)
#define fold_scatter(v, out) fold_scatter_on(__LINE__, v, out)
#else
template <int N> __device__ __forceinline__ void fold32(float (&v)[N]) {
#pragma unroll
  for (int o = 16; o; o >>= 1)
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = v[i] + __shfl_xor_sync(FULL_WARP, v[i], o);
}
// One batch of up to 32 values: after step o a lane holds the values whose index bit is its own lane bit.
template <int N, int STEP> __device__ __forceinline__ float fold_batch(float (&v)[N]) {
  if constexpr (STEP == 0) {
    return v[0];
  } else {
    const bool high = threadIdx.x & STEP;
    float kept[N > 1 ? N / 2 : 1];
    if constexpr (N == 1) {
      kept[0] = v[0] + __shfl_xor_sync(FULL_WARP, v[0], STEP);
    } else {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const float give = high ? v[i] : v[i + N / 2];
        kept[i] = (high ? v[i + N / 2] : v[i]) + __shfl_xor_sync(FULL_WARP, give, STEP);
      }
    }
    return fold_batch<(N > 1 ? N / 2 : 1), STEP / 2>(kept);
  }
}
template <int N, int B> __device__ __forceinline__ void fold_scatter(float (&v)[N], float (&out)[B]) {
  constexpr int n = N < 32 ? N : 32;
  static_assert(B * n == N && (n & (n - 1)) == 0, "fold_scatter: N values, N a power of two");
#pragma unroll
  for (int b = 0; b < B; ++b) {
    float part[n];
#pragma unroll
    for (int i = 0; i < n; ++i) part[i] = v[b * 32 + i];
    out[b] = fold_batch<n, 16>(part);
  }
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

// An integer that grows with x in the contract's order: NaN above all, -0 = +0.
__device__ __forceinline__ u32 order_key(float x) {
  if (is_nan(x)) return 0xffffffffu;
  const u32 bits = __float_as_uint(x + 0.f);  // -0 becomes +0
  return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}

// The key of element i, different for each: larger first, then the smaller index.
__device__ __forceinline__ u64 unique_key(float x, int i) { return (u64)order_key(x) << 32 | (u32)~i; }

// How many of n keys stand before this one.
__device__ __forceinline__ int rank_of(const u64* keys, int n, u64 key) {
  int rank = 0;
#pragma unroll 8
  for (int j = 0; j < n; ++j) rank += keys[j] > key;
  return rank;
}

// e**x (rule 5): Cephes-style polynomial, arguments clamped to [-87, 88]; 2**n as two factors that can't overflow. No branch:
// several of them run side by side.
__device__ __forceinline__ float exact_exp(float x) {
  float y = is_nan(x) ? 0.0f : x;
  y = y < -87.0f ? -87.0f : y;
  y = y > 88.0f ? 88.0f : y;
  const float n = rintf(y * 1.44269504088896341f);
  float r = y - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = ((p * r) * r + r) + 1.0f;
  const int e = (int)n, a = e >> 1;
  p = (p * __int_as_float((a + 127) << 23)) * __int_as_float((e - a + 127) << 23);
  return is_nan(x) ? x : p;
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

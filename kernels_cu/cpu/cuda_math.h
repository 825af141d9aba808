// cuda_math.h: arithmetic, bit and memory intrinsics of CUDA that give the same bits on a CPU and a GPU, and the names
// that do not, deleted with a return type that says why. Every function here is one IEEE operation or integer work.
#pragma once
#include "fibres.h"

namespace cc {
inline namespace CC_RUNTIME {
struct banned_in_tier_exact {};       // numerics rule 1 and 2: fused, fast, approximate, or blind to NaN
struct float_atomics_are_refused {};  // the order of additions would depend on the scheduler
struct refused_on_every_device {};
template <class T> inline u64 fold_min(u64 a, u64 b) { return unpack64<T>(b) < unpack64<T>(a) ? b : a; }
template <class T> inline u64 fold_max(u64 a, u64 b) { return unpack64<T>(a) < unpack64<T>(b) ? b : a; }
template <class T> inline Fold min_fold(T) { return &fold_min<T>; }
template <class T> inline Fold max_fold(T) { return &fold_max<T>; }
template <class To, class From> inline To bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To r;
  __builtin_memcpy(&r, &v, sizeof r);
  return r;
}
template <class T, class F> inline T rmw(T* p, F f) {
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &old, f(old), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  return old;
}
// GPU conversions saturate, and take NaN to 0 from float to 32 bits, else to the top bit alone (PTX ISA, cvt). A C++
// cast out of range is undefined.
template <class I, class F> inline I saturate(F x, F low, F past) {
  constexpr I most = I(-1) < I(0) ? (I)(~0ull >> (65 - 8 * sizeof(I))) : (I)~I(0),
              least = I(-1) < I(0) ? (I)(-most - 1) : (I)0,
              of_nan = sizeof(F) == 4 && sizeof(I) == 4 ? (I)0 : (I)(1ull << (8 * sizeof(I) - 1));
  return x != x ? of_nan : x < low ? least : x >= past ? most : (I)x;
}
}  // inline namespace
}  // namespace cc

extern "C" {
int printf(const char*, ...);
void* memcpy(void*, const void*, size_t);
void* memset(void*, int, size_t);
}

// ---- IEEE arithmetic ------------------------------------------------------------------------------------------------
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline double sqrt(double x) { return __builtin_sqrt(x); }
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline float rintf(float x) { return __builtin_rintf(x); }
inline double rint(double x) { return __builtin_rint(x); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline double fabs(double x) { return __builtin_fabs(x); }
inline float fabs(float x) { return __builtin_fabsf(x); }
inline float floorf(float x) { return __builtin_floorf(x); }
inline double floor(double x) { return __builtin_floor(x); }
inline float ceilf(float x) { return __builtin_ceilf(x); }
inline double ceil(double x) { return __builtin_ceil(x); }
inline float truncf(float x) { return __builtin_truncf(x); }
inline double trunc(double x) { return __builtin_trunc(x); }
inline float copysignf(float x, float s) { return __builtin_copysignf(x, s); }
inline double copysign(double x, double s) { return __builtin_copysign(x, s); }
inline bool isnan(float x) { return x != x; }
inline bool isnan(double x) { return x != x; }
inline bool isinf(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
inline bool isinf(double x) { return __builtin_fabs(x) == __builtin_inf(); }
inline bool isfinite(float x) { return __builtin_fabsf(x) < __builtin_inff(); }
inline bool isfinite(double x) { return __builtin_fabs(x) < __builtin_inf(); }
inline bool signbit(float x) { return cc::bits<int>(x) < 0; }
inline bool signbit(double x) { return cc::bits<long long>(x) < 0; }
inline int abs(int x) { return x < 0 ? -x : x; }
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline long long llabs(long long x) { return x < 0 ? -x : x; }

// ---- conversions ----------------------------------------------------------------------------------------------------
inline int __float2int_rz(float x) { return cc::saturate<int>(x, -2147483648.0f, 2147483648.0f); }
inline int __float2int_rn(float x) { return __float2int_rz(__builtin_rintf(x)); }
inline unsigned __float2uint_rz(float x) { return cc::saturate<unsigned>(x, 0.0f, 4294967296.0f); }
inline unsigned __float2uint_rn(float x) { return __float2uint_rz(__builtin_rintf(x)); }
inline int __double2int_rz(double x) { return cc::saturate<int>(x, -2147483648.0, 2147483648.0); }
inline int __double2int_rn(double x) { return __double2int_rz(__builtin_rint(x)); }
inline long long __double2ll_rz(double x) {
  return cc::saturate<long long>(x, -9223372036854775808.0, 9223372036854775808.0);
}
inline long long __double2ll_rn(double x) { return __double2ll_rz(__builtin_rint(x)); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline float __ull2float_rn(unsigned long long x) { return (float)x; }
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline double __ll2double_rn(long long x) { return (double)x; }
inline double __ull2double_rn(unsigned long long x) { return (double)x; }
inline float __double2float_rn(double x) { return (float)x; }
inline int __float_as_int(float x) { return cc::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return cc::bits<unsigned>(x); }
inline float __int_as_float(int x) { return cc::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return cc::bits<float>(x); }
inline long long __double_as_longlong(double x) { return cc::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cc::bits<double>(x); }
inline int __double2hiint(double x) { return (int)(cc::bits<long long>(x) >> 32); }
inline int __double2loint(double x) { return (int)cc::bits<long long>(x); }
inline double __hiloint2double(int hi, int lo) {
  return cc::bits<double>((long long)((unsigned long long)(unsigned)hi << 32 | (unsigned)lo));
}

// ---- integers -------------------------------------------------------------------------------------------------------
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
  return r;
}
inline unsigned long long __brevll(unsigned long long x) {
  return (unsigned long long)__brev((unsigned)x) << 32 | __brev((unsigned)(x >> 32));
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) {
  return (unsigned)((((unsigned long long)hi << 32 | lo) << (s & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) {
  return (unsigned)(((unsigned long long)hi << 32 | lo) >> (s & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  unsigned long long all = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned pick = s >> (4 * i), byte = (unsigned)(all >> (8 * (pick & 7))) & 255;
    r |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
  }
  return r;
}
// the overloads of CUDA: mixed signs go to unsigned, other mixtures are ambiguous there as here
#define CC_MIN_MAX(A, B, R) \
  inline R min(A a, B b) { return (R)b < (R)a ? (R)b : (R)a; } \
  inline R max(A a, B b) { return (R)a < (R)b ? (R)b : (R)a; }
CC_MIN_MAX(int, int, int)
CC_MIN_MAX(unsigned, unsigned, unsigned)
CC_MIN_MAX(int, unsigned, unsigned)
CC_MIN_MAX(unsigned, int, unsigned)
CC_MIN_MAX(long, long, long)
CC_MIN_MAX(unsigned long, unsigned long, unsigned long)
CC_MIN_MAX(long, unsigned long, unsigned long)
CC_MIN_MAX(unsigned long, long, unsigned long)
CC_MIN_MAX(long long, long long, long long)
CC_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
CC_MIN_MAX(long long, unsigned long long, unsigned long long)
CC_MIN_MAX(unsigned long long, long long, unsigned long long)
#undef CC_MIN_MAX

// ---- memory ---------------------------------------------------------------------------------------------------------
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldca(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldcv(const T* p) { return *(const volatile T*)p; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }
template <class T> inline void __stcs(T* p, T v) { *p = v; }
template <class T> inline void __stwb(T* p, T v) { *p = v; }
template <class T> inline void __stwt(T* p, T v) { *p = v; }
#define CC_ATOMIC(name, T, expression) \
  inline T name(T* p, T v) { \
    return cc::rmw(p, [=](T old) -> T { return expression; }); \
  }
#define CC_ATOMIC3(name, expression) \
  CC_ATOMIC(name, int, expression) CC_ATOMIC(name, unsigned, expression) CC_ATOMIC(name, unsigned long long, expression)
CC_ATOMIC3(atomicAdd, old + v)
CC_ATOMIC3(atomicExch, ((void)old, v))
CC_ATOMIC3(atomicAnd, old & v)
CC_ATOMIC3(atomicOr, old | v)
CC_ATOMIC3(atomicXor, old ^ v)
CC_ATOMIC3(atomicMin, v < old ? v : old)
CC_ATOMIC3(atomicMax, old < v ? v : old)
CC_ATOMIC(atomicMin, long long, v < old ? v : old)
CC_ATOMIC(atomicMax, long long, old < v ? v : old)
CC_ATOMIC(atomicSub, int, old - v)
CC_ATOMIC(atomicSub, unsigned, old - v)
CC_ATOMIC(atomicInc, unsigned, old >= v ? 0u : old + 1)
CC_ATOMIC(atomicDec, unsigned, old == 0 || old > v ? v : old - 1)
#undef CC_ATOMIC3
#undef CC_ATOMIC
template <class T> inline T cc_compare_and_swap(T* p, T expected, T v) {
  __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
inline int atomicCAS(int* p, int expected, int v) { return cc_compare_and_swap(p, expected, v); }
inline unsigned atomicCAS(unsigned* p, unsigned expected, unsigned v) { return cc_compare_and_swap(p, expected, v); }
inline unsigned long long atomicCAS(unsigned long long* p, unsigned long long expected, unsigned long long v) {
  return cc_compare_and_swap(p, expected, v);
}
#define CC_NO_ATOMIC(name) \
  cc::float_atomics_are_refused name(float*, float) = delete; \
  cc::float_atomics_are_refused name(double*, double) = delete;
CC_NO_ATOMIC(atomicAdd)
CC_NO_ATOMIC(atomicExch)
CC_NO_ATOMIC(atomicMin)
CC_NO_ATOMIC(atomicMax)
#undef CC_NO_ATOMIC

// ---- refused --------------------------------------------------------------------------------------------------------
// What to write instead: exact_exp and exact_log of common.cuh, 1.0f / sqrtf(x) for rsqrtf, x < c ? c : x for fmaxf.
#define CC_BAN1(f) \
  cc::banned_in_tier_exact f(float) = delete; \
  cc::banned_in_tier_exact f(double) = delete;
#define CC_BAN2(f) \
  cc::banned_in_tier_exact f(float, float) = delete; \
  cc::banned_in_tier_exact f(double, double) = delete;
#define CC_BAN3(f) \
  cc::banned_in_tier_exact f(float, float, float) = delete; \
  cc::banned_in_tier_exact f(double, double, double) = delete;
// clang-format off
CC_BAN1(exp) CC_BAN1(exp2) CC_BAN1(exp10) CC_BAN1(expm1) CC_BAN1(log) CC_BAN1(log2) CC_BAN1(log10) CC_BAN1(log1p)
CC_BAN1(expf) CC_BAN1(exp2f) CC_BAN1(exp10f) CC_BAN1(expm1f) CC_BAN1(logf)
CC_BAN1(log2f) CC_BAN1(log10f) CC_BAN1(log1pf)
CC_BAN1(sin) CC_BAN1(cos) CC_BAN1(tan) CC_BAN1(tanh) CC_BAN1(erf) CC_BAN1(cbrt) CC_BAN1(rsqrt) CC_BAN1(__frsqrt_rn)
CC_BAN1(sinf) CC_BAN1(cosf) CC_BAN1(tanf) CC_BAN1(tanhf) CC_BAN1(erff) CC_BAN1(cbrtf) CC_BAN1(rcbrtf) CC_BAN1(rsqrtf)
CC_BAN1(__expf) CC_BAN1(__exp10f) CC_BAN1(__logf) CC_BAN1(__log2f) CC_BAN1(__log10f) CC_BAN1(__saturatef)
CC_BAN1(__sinf) CC_BAN1(__cosf) CC_BAN1(__tanf) CC_BAN1(__tanhf)
CC_BAN2(pow) CC_BAN2(powf) CC_BAN2(__powf) CC_BAN2(fdividef) CC_BAN2(__fdividef)
CC_BAN2(hypot) CC_BAN2(hypotf) CC_BAN2(fmod) CC_BAN2(fmodf)
CC_BAN2(fmin) CC_BAN2(fmax) CC_BAN2(fminf) CC_BAN2(fmaxf) CC_BAN2(min) CC_BAN2(max)
CC_BAN3(fma) CC_BAN3(fmaf) CC_BAN3(__fmaf_rn) CC_BAN3(__fma_rn)
// clang-format on
#undef CC_BAN1
#undef CC_BAN2
#undef CC_BAN3

// fibres.h: what a kernel compiled for the CPU and the runtime (runtime.cpp) know of each other.
//
// A block is a set of lanes on one OS thread. A lane is a fibre: it runs until it meets a barrier or a warp operation,
// and gives way only there. The kernel sees the public heads of its lane and its block through one thread-local pair of
// pointers; everything else (stacks, ready masks, the scheduler) belongs to runtime.cpp, so that a .cu file compiles
// against declarations alone and needs no standard header.
//
// Everything lives in an inline namespace named after the runtime's own digest (-DCC_RUNTIME=...): a kernel module can
// only ever be bound to the runtime it was compiled for, even when a process holds several.
#pragma once
#include "cuda_types.h"

#ifndef CC_RUNTIME
#define CC_RUNTIME unnamed
#endif
#define CC_EXPORT __attribute__((visibility("default")))
#define CC_HERE __FILE__, __LINE__

namespace cc {
inline namespace CC_RUNTIME {

using u32 = unsigned;
using u64 = unsigned long long;
constexpr unsigned MAX_THREADS = 1024;       // threads of a block
constexpr unsigned MAX_SHARED = 227 * 1024;  // bytes of dynamic shared memory: sm_90's limit, the largest we target
constexpr unsigned ALL_LANES = 0xffffffffu;

struct LaneHead {
  uint3 thread;
  unsigned index;  // the thread's number in its block
};
struct BlockHead {
  dim3 grid, dim;
  uint3 block;
  char* shared;       // dynamic shared memory
  unsigned votes[3];  // count, and, or of the last barrier
};
struct Tls {
  LaneHead* lane;
  BlockHead* block;
};
extern CC_EXPORT __thread Tls tls __attribute__((tls_model("initial-exec")));  // defined by the runtime's own library

enum Op : unsigned char { NONE, SHUFFLE, BALLOT, SYNCWARP, REDUCE, COLLECTIVE };
using Fold = u64 (*)(u64, u64);
CC_EXPORT void barrier(const char* file, int line, int vote);
CC_EXPORT u64 warp(Op op, const char* file, int line, unsigned mask, u64 value, int source, void* function);
[[noreturn]] CC_EXPORT void fail(const char* file, int line, const char* what);

// ---- warp operations ------------------------------------------------------------------------------------------------
template <class T> inline u64 pack(T v) {
  static_assert(!__is_class(T) && sizeof(T) <= 8, "a shuffle moves one number of at most 8 bytes");
  u64 r = 0;
  __builtin_memcpy(&r, &v, sizeof v);
  return r;
}
template <class T> inline T unpack64(u64 r) {
  T v;
  __builtin_memcpy(&v, &r, sizeof v);
  return v;
}
inline int lane_id() { return tls.lane->index & 31; }

template <class T> inline T shuffle_from(const char* file, int line, unsigned mask, T v, int source) {
  return unpack64<T>(warp(SHUFFLE, file, line, mask, pack(v), source, nullptr));
}
template <class T> inline T shuffle(const char* file, int line, unsigned mask, T v, int source, int width = 32) {
  return shuffle_from(file, line, mask, v, (lane_id() & ~(width - 1)) + (source & (width - 1)));
}
template <class T> inline T shuffle_xor(const char* file, int line, unsigned mask, T v, int bits, int width = 32) {
  int me = lane_id(), from = me ^ bits;
  return shuffle_from(file, line, mask, v, from >= (me & ~(width - 1)) + width ? me : from);
}
template <class T> inline T shuffle_down(const char* file, int line, unsigned mask, T v, unsigned by, int width = 32) {
  int me = lane_id(), from = me + (int)by;
  return shuffle_from(file, line, mask, v, from >= (me & ~(width - 1)) + width ? me : from);
}
template <class T> inline T shuffle_up(const char* file, int line, unsigned mask, T v, unsigned by, int width = 32) {
  int me = lane_id(), from = me - (int)by;
  return shuffle_from(file, line, mask, v, from < (me & ~(width - 1)) ? me : from);
}
inline unsigned ballot(const char* file, int line, unsigned mask, bool yes) {
  return (unsigned)warp(BALLOT, file, line, mask, yes, 0, nullptr);
}
inline void syncwarp(const char* file, int line, unsigned mask = ALL_LANES) {
  warp(SYNCWARP, file, line, mask, 0, 0, nullptr);
}
template <class T> inline T reduce(const char* file, int line, unsigned mask, T v, Fold fold) {
  static_assert(sizeof(T) == 4 && T(0.5) == T(0), "__reduce_*_sync takes int or unsigned");
  return unpack64<T>(warp(REDUCE, file, line, mask, pack(v), 0, (void*)fold));
}
inline unsigned count_votes(const char* file, int line, int vote, int which) {
  barrier(file, line, vote);
  return tls.block->votes[which];
}

// ---- collectives: one meeting of a warp's lanes instead of many -----------------------------------------------------
// Any warp-wide operation over each lane's own variable: once all lanes of the mask have come, f runs once and gets 32
// pointers (null outside the mask) to read and write. mma, ldmatrix, match and the folds below are made of it.
template <class S>
inline void collective(int line, unsigned mask, S* mine, void (*f)(S**), const char* file = __builtin_FILE()) {
  warp(COLLECTIVE, file, line, mask, (u64)mine, 0, (void*)f);
}

template <int N> inline void fold32_rows(float** lane) {
  float t[16][N];
  for (int i = 0; i < 16; ++i)
    for (int n = 0; n < N; ++n) t[i][n] = lane[i][n] + lane[i + 16][n];
#pragma GCC unroll 4
  for (int half = 8; half; half >>= 1)
    for (int i = 0; i < half; ++i)
      for (int n = 0; n < N; ++n) t[i][n] = t[i][n] + t[i + half][n];
  for (int i = 0; i < 32; ++i)
    for (int n = 0; n < N; ++n) lane[i][n] = t[0][n];
}
// The contract's warp fold (numerics rule 3): each of the N values of every lane becomes the sum of the 32 lanes'
// values by the xor tree 16, 8, 4, 2, 1. The same bits as five rounds of v += __shfl_xor_sync(~0u, v, o), because
// a + b == b + a: after the round of offset o lanes l and l ^ o hold the same value, so half need not be computed.
template <int N> inline void fold32(int line, float (&v)[N], const char* file = __builtin_FILE()) {
  warp(COLLECTIVE, file, line, ALL_LANES, (u64)&v[0], 0, (void*)&fold32_rows<N>);
}

// Reduces *mine over the 32 lanes by combine(into, from) in the tree 16, 8, 4, 2, 1 (lane l takes in lane l + o); every
// lane gets lane 0's result. For a total order (argmax with index) the same result as five rounds of xor shuffles.
template <class S, class F> struct Reduction {
  S* mine;
  F combine;
};
template <class S, class F> inline void reduce_lanes(Reduction<S, F>** lane) {
  S t[16];
  for (int i = 0; i < 16; ++i) {
    t[i] = *lane[i]->mine;
    lane[0]->combine(t[i], *lane[i + 16]->mine);
  }
  for (int half = 8; half; half >>= 1)
    for (int i = 0; i < half; ++i) lane[0]->combine(t[i], t[i + half]);
  for (int i = 0; i < 32; ++i) *lane[i]->mine = t[0];
}
template <class S, class F> inline void warp_reduce(int line, S* mine, F combine, const char* file = __builtin_FILE()) {
  Reduction<S, F> r{mine, combine};
  warp(COLLECTIVE, file, line, ALL_LANES, (u64)&r, 0, (void*)&reduce_lanes<S, F>);
}

struct Match {
  u64 value;
  unsigned same;
};
inline void match_lanes(Match** lane) {
  for (int i = 0; i < 32; ++i) {
    if (!lane[i]) continue;
    lane[i]->same = 0;
    for (int j = 0; j < 32; ++j)
      if (lane[j] && lane[j]->value == lane[i]->value) lane[i]->same |= 1u << j;
  }
}
template <class T> inline unsigned match_any(const char* file, int line, unsigned mask, T v) {
  Match m{pack(v), 0};
  collective(line, mask, &m, match_lanes, file);
  return m.same;
}

// ---- what a module tells the device about a kernel ------------------------------------------------------------------
struct Arg {
  char kind, to_kind;
  unsigned short size, to_align;
  unsigned to_size;
};  // kind: p pointer, f float, i int, u unsigned, b bool
template <class T> struct Kind {
  static constexpr char value = T(0.5) != T(0) ? 'f' : T(-1) < T(0) ? 'i' : 'u';
};
template <> struct Kind<bool> {
  static constexpr char value = 'b';
};
template <class T, bool Class = __is_class(T) || __is_union(T) || __is_enum(T)> struct To {
  static constexpr Arg arg{'p', 's', 8, alignof(T), sizeof(T)};
};
template <class T> struct To<T, false> {
  static constexpr Arg arg{'p', Kind<T>::value, 8, alignof(T), sizeof(T)};
};
template <> struct To<void, false> {
  static constexpr Arg arg{'p', 's', 8, 1, 1};
};
template <class T> struct Plain {
  using type = T;
};
template <class T> struct Plain<const T> {
  using type = T;
};
template <class T> struct Plain<volatile T> {
  using type = T;
};
template <class T> struct Plain<const volatile T> {
  using type = T;
};
template <class T> struct Signature {
  static_assert(!__is_class(T) && !__is_union(T) && sizeof(T) <= 8,
                "a kernel's arguments are pointers and plain numbers");
  static constexpr Arg arg{Kind<T>::value, 0, sizeof(T), 0, 0};
};
template <class T> struct Signature<T*> {
  static constexpr Arg arg = To<typename Plain<T>::type>::arg;
};
template <class... A> inline int signature(void (*)(A...), Arg* out) {
  const Arg all[] = {Signature<typename Plain<A>::type>::arg..., Arg{}};
  __builtin_memcpy(out, all, sizeof(Arg) * sizeof...(A));
  return sizeof...(A);
}
template <int... I> struct Indices {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> {
  using type = Indices<I...>;
};
template <class... A, int... I> inline void apply(void (*kernel)(A...), void** a, Indices<I...>) {
  kernel(*(typename Plain<A>::type*)a[I]...);
}
template <class... A> inline void call(void (*kernel)(A...), void** a) {
  apply(kernel, a, typename Count<sizeof...(A)>::type{});
}

}  // inline namespace
}  // namespace cc

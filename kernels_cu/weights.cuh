// weights.cuh: the forms in which a matrix W [n, k] lies in device memory, and how a row of it is read.
//
// A checkpoint's weights stay as they are stored. Reading one gives the float32 value that the NumPy model computes with
// (rule 7, kdtr_cli/model/quant.py): widened exactly, or value * scale, rounded once. What dot.cuh makes of it is the
// same for every form, so a form decides about bytes and time, never about the order of a sum.
//
//   form     a row                                       a quad of four weights    read as one where
//   float    k float32                                   16 bytes                  k is a multiple of 4
//   bf16     k words of 16 bits                          8 bytes                   k is a multiple of 4
//   f16      k words of 16 bits                          8 bytes                   k is a multiple of 4
//   Int4     8 nibbles an int32, q + 8, first lowest     2 bytes and a scale       k and group are, group a power of two,
//            one scale a row and group of inputs                                   and scales are bf16
//   Fp8      k bytes e4m3                                4 bytes and a scale       k and block_columns are, the latter a
//            one scale a block of rows and columns                                 power of two
//
// Elsewhere a quad is four guarded reads (weight_at). A row of Int4 begins on an int32, so on a quad, whatever k is; what
// the nibbles after its last weight hold does not matter.
//
// A warp reads 32 quads side by side: 512 bytes of float, 64 of Int4, in whole sectors of 32. The loop of dot.cuh keeps
// several such reads of several rows in flight. A lane that read 16 bytes of a packed row would hold quads of eight other
// lanes, for q + 1 belongs to the next lane and q + 128 to this one; giving them out takes at least a shuffle a quad, which
// is what the narrow read costs. By count it is the arithmetic that limits packed weights: at one row of x 20 operations a
// quad of Int4 and 28 of Fp8, for 2 and 4 bytes, against 8 of float for 16 (two reads a quad of a packed row beside them).
#pragma once
#include "common.cuh"

typedef unsigned short u16;
struct bf16 { u16 bits; };  // upper half of a float32
struct f16 { u16 bits; };   // IEEE half

__device__ __forceinline__ float widen(bf16 v) { return __uint_as_float((u32)v.bits << 16); }
// 1 + 5 + 10 bits at their places in a float32, whose exponent is 112 too small; the product is exact, subnormals too.
__device__ __forceinline__ float widen(f16 v) {
  return __int_as_float(((int)((u32)v.bits << 16) >> 3) & 0x8fffe000) * 5.192296858534828e33f;
}
// The same for e4m3 in the lowest byte, 1 + 4 + 3 bits: 2^120. 0x7f and 0xff, its NaNs, are refused by the host.
__device__ __forceinline__ float widen_e4m3(u32 v) {
  return __int_as_float(((int)(v << 24) >> 4) & 0x87f00000) * 1.329227995784916e36f;
}
// The nibble 0..15 at bits 4 I.. of v as -8..7: put into the fraction of a float32 whose unit in that place is 1.
template <int I> __device__ __forceinline__ float nibble(u32 v) {
  const u32 one = (150u - 4 * I) << 23;  // 2^(23 - 4 I)
  return __uint_as_float((v & (15u << 4 * I)) | one) - __uint_as_float(one | (8u << 4 * I));
}

// Weights are read once: past the first-level cache where the device can.
template <class T> __device__ __forceinline__ T stream(const T* p) {
#ifdef KDTR_CPU
  return *p;
#else
  return __ldcs(p);
#endif
}

// ---- rows: weight_at(row, k) is one weight, quad_of(row, q) weights 4 q to 4 q + 3 at once

__device__ __forceinline__ float weight_at(const float* row, int k) { return row[k]; }
__device__ __forceinline__ float4 quad_of(const float* row, int q) { return stream((const float4*)row + q); }

template <class T> __device__ __forceinline__ float4 quad_of_16_bits(const T* row, int q) {
  const uint2 v = stream((const uint2*)row + q);
  return {widen(T{(u16)v.x}), widen(T{(u16)(v.x >> 16)}), widen(T{(u16)v.y}), widen(T{(u16)(v.y >> 16)})};
}
__device__ __forceinline__ float weight_at(const bf16* row, int k) { return widen(row[k]); }
__device__ __forceinline__ float4 quad_of(const bf16* row, int q) { return quad_of_16_bits(row, q); }
__device__ __forceinline__ float weight_at(const f16* row, int k) { return widen(row[k]); }
__device__ __forceinline__ float4 quad_of(const f16* row, int q) { return quad_of_16_bits(row, q); }

struct Int4Row {
  const u16* w;
  const bf16* scale16;   // or null: then scale32
  const float* scale32;
  int group, shift;      // 2^shift quads a group
};
__device__ __forceinline__ float weight_at(const Int4Row& r, int k) {
  const int q = r.w[k >> 2] >> 4 * (k & 3) & 15, g = k / r.group;
  return (float)(q - 8) * (r.scale16 ? widen(r.scale16[g]) : r.scale32[g]);
}
__device__ __forceinline__ float4 quad_of(const Int4Row& r, int q) {
  const u32 v = stream(r.w + q);
  const float s = widen(r.scale16[q >> r.shift]);
  return {nibble<0>(v) * s, nibble<1>(v) * s, nibble<2>(v) * s, nibble<3>(v) * s};
}

struct Fp8Row {
  const u8* w;
  const float* scale;    // of this row's blocks
  int columns, shift;    // of a block; 2^shift quads
};
__device__ __forceinline__ float weight_at(const Fp8Row& r, int k) { return widen_e4m3(r.w[k]) * r.scale[k / r.columns]; }
__device__ __forceinline__ float4 quad_of(const Fp8Row& r, int q) {
  const u32 v = stream((const u32*)r.w + q);
  const float s = r.scale[q >> r.shift];
  return {widen_e4m3(v) * s, widen_e4m3(v >> 8) * s, widen_e4m3(v >> 16) * s, widen_e4m3(v >> 24) * s};
}

// Where a quad can't be read as one; +0 past the end adds nothing.
template <class T> __device__ __forceinline__ float4 guarded_quad(const T* row, int q, int k_size) {
  const int k = 4 * q;
  float4 v = {weight_at(row, k), 0.f, 0.f, 0.f};
  if (k + 1 < k_size) v.y = weight_at(row, k + 1);
  if (k + 2 < k_size) v.z = weight_at(row, k + 2);
  if (k + 3 < k_size) v.w = weight_at(row, k + 3);
  return v;
}
// Of packed rows one weight after the other: side by side their divisions would take the registers of the fast path (168
// against 128 in the int4 experts of four rows), for the compiler gives a kernel as many as its greediest branch wants.
template <class Row> __device__ __forceinline__ float4 guarded_quad(const Row& row, int q, int k_size) {
  float4 v = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int i = 0; i < min(4, k_size - 4 * q); ++i) {
    const float w = weight_at(row, 4 * q + i);
    v = {i == 0 ? w : v.x, i == 1 ? w : v.y, i == 2 ? w : v.z, i == 3 ? w : v.w};
  }
  return v;
}

// ---- matrices: row(i); matrix(e, n), the e-th of several of n rows one after the other; and by_quads, whether quads may
// be read as one, the same answer for the whole block

// log2 of the quads in `size` weights; negative where they are no power of two of whole quads.
__device__ __forceinline__ int quads_shift(int size) { return size & (size - 1) ? -1 : 29 - __clz(size); }
__device__ __forceinline__ int pieces(int size, int piece) { return (size - 1) / piece + 1; }

template <class T> struct Plain {
  const T* w;
  int k;
  __device__ __forceinline__ const T* row(int i) const { return w + (i64)i * k; }
  __device__ __forceinline__ Plain matrix(int e, int n) const { return {w + (i64)e * n * k, k}; }
  __device__ __forceinline__ bool by_quads() const { return (k & 3) == 0 && ((u64)w & (4 * sizeof(T) - 1)) == 0; }
};

struct Int4 {
  const u16* w;          // [n, 2 ceil(k / 8)]
  const bf16* scale16;   // [n, ceil(k / group)], or null: then
  const float* scale32;  // the same
  int k, group;
  __device__ __forceinline__ Int4 rows_from(i64 i) const {
    const i64 at = i * pieces(k, group);
    return {w + i * (2 * pieces(k, 8)), scale16 ? scale16 + at : scale16, scale16 ? scale32 : scale32 + at, k, group};
  }
  __device__ __forceinline__ Int4Row row(int i) const {
    const Int4 from = rows_from(i);
    return {from.w, from.scale16, from.scale32, group, quads_shift(group)};
  }
  __device__ __forceinline__ Int4 matrix(int e, int n) const { return rows_from((i64)e * n); }
  __device__ __forceinline__ bool by_quads() const { return scale16 && (k & 3) == 0 && quads_shift(group) >= 0; }
};

struct Fp8 {
  const u8* w;         // [n, k]
  const float* scale;  // [ceil(n / rows), ceil(k / columns)]
  int k, rows, columns;
  __device__ __forceinline__ Fp8Row row(int i) const {
    return {w + (i64)i * k, scale + (i64)(i / rows) * pieces(k, columns), columns, quads_shift(columns)};
  }
  __device__ __forceinline__ Fp8 matrix(int e, int n) const {
    return {w + (i64)e * n * k, scale + (i64)e * pieces(n, rows) * pieces(k, columns), k, rows, columns};
  }
  __device__ __forceinline__ bool by_quads() const {
    return (k & 3) == 0 && ((u64)w & 3) == 0 && quads_shift(columns) >= 0;
  }
};

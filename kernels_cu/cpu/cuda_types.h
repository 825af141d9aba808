// cuda_types.h: CUDA's vector types for the CPU, with CUDA's sizes and alignments. No NVIDIA header is needed.
#pragma once

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

// a2, a4: the alignment of the vector of two and of four. A vector of three is aligned as its element.
#define CC_VECTORS(T, name, a2, a4) \
  struct name##1 { T x; }; \
  struct alignas(a2) name##2 { T x, y; }; \
  struct name##3 { T x, y, z; }; \
  struct alignas(a4) name##4 { T x, y, z, w; }; \
  inline name##1 make_##name##1(T x) { return {x}; } \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CC_VECTORS(signed char, char, 2, 4)
CC_VECTORS(unsigned char, uchar, 2, 4)
CC_VECTORS(short, short, 4, 8)
CC_VECTORS(unsigned short, ushort, 4, 8)
CC_VECTORS(int, int, 8, 16)
CC_VECTORS(unsigned, uint, 8, 16)
CC_VECTORS(long, long, 16, 16)
CC_VECTORS(unsigned long, ulong, 16, 16)
CC_VECTORS(long long, longlong, 16, 16)
CC_VECTORS(unsigned long long, ulonglong, 16, 16)
CC_VECTORS(float, float, 8, 16)
CC_VECTORS(double, double, 16, 16)
#undef CC_VECTORS

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

// rope.cuh: one rotated pair (rule 9). Output is de-interleaved, as Hugging Face keeps it: pair i is (i, i + half).
#pragma once
#include "common.cuh"

// The pair (a, b) rotated by an angle given by its cosine and sine, written to y[i] and y[i + half].
__device__ __forceinline__ void put_rotated(float a, float b, float* y, int i, int half, float c, float s) {
  y[i] = a * c - b * s;
  y[i + half] = b * c + a * s;
}

// Pair i of x [2 half], rotated.
__device__ __forceinline__ void rotate_pair(const float* x, float* y, int i, int half, int interleaved, float c, float s) {
  const float a = interleaved ? x[2 * i] : x[i], b = interleaved ? x[2 * i + 1] : x[i + half];
  put_rotated(a, b, y, i, half, c, s);
}

// attention_combine.cu: adds the chunks of a head and divides by the softmax sum (rules 10 and 21).
//
// in   sums    float32 [rows, heads, chunks]; vectors float32 [rows, heads, chunks, n]   from attn_chunks
//      positions int32 [rows]
// out  o       float32 [rows, heads, n]
//
// launch  grid (ceil(n / 128), heads, rows), block 128; one element a thread
// order   chunks in ascending order from +0, then one division an element
// bytes   4 * rows * heads * (chunks * (n + 1) + n)
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(128)
    attn_combine(const float* sums, const float* vectors, const int* positions, float* o, int heads, int n, int chunks) {
  const int column = blockIdx.x * 128 + threadIdx.x;
  if (column >= n) return;
  const i64 head = (i64)blockIdx.z * heads + blockIdx.y;
  float sum = 0.f, v = 0.f;
  for (int c = 0; c < chunk_count(positions[blockIdx.z]); ++c) {
    sum = sum + sums[head * chunks + c];
    v = v + vectors[(head * chunks + c) * n + column];
  }
  o[head * n + column] = v / sum;
}

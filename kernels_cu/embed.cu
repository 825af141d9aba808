// embed.cu: x = table[ids], the rows of the embedding.
//
// in   ids   int32 [rows]            token ids, 0 <= id < vocab (checked by the host)
//      table float32 [vocab, n]
// out  x     float32 [rows, n]
//
// launch  grid (ceil(n / 128), rows), block 128; one element a thread
// order   none: a copy
// bytes   8 * rows * n
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128) embed(const int* ids, const float* table, float* x, int n) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i < n) x[(i64)blockIdx.y * n + i] = table[(i64)ids[blockIdx.y] * n + i];
}

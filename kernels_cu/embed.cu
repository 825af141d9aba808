// embed.cu: x = table[ids], the rows of the embedding.
//
// in   ids   int32 [rows]            token ids, 0 <= id < vocab (checked by the host)
//      table float32, bf16 or f16 [vocab, n]
// out  x     float32 [rows, n]
//
// launch  grid (ceil(n / 128), rows), block 128; one element a thread
// order   none: a copy, widened exactly
// bytes   (4 + b) * rows * n, b those of an element of the table
#include "weights.cuh"

#define EMBED(name, T)                                                                                       \
  extern "C" __global__ void __launch_bounds__(128) name(const int* ids, const T* table, float* x, int n) {  \
    const int i = blockIdx.x * 128 + threadIdx.x;                                                            \
    if (i < n) x[(i64)blockIdx.y * n + i] = weight_at(table + (i64)ids[blockIdx.y] * n, i);                  \
  }

EMBED(embed, float)
EMBED(embed_bf16, bf16)
EMBED(embed_f16, f16)

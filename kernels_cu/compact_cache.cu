// compact_cache.cu: moves the accepted rows of a round to its front, in all layers' caches at once (rule 20).
//
// in   starts     int32 [batch]              position of the root; request b is slot b
//      accepted   int32 [batch, horizon + 1] accepted nodes, strictly ascending, the first 0
//      n_accepted int32 [batch]
// out  cache      float32 [layers, sequences, capacity, width]: row start + k = row start + accepted[k], k < n_accepted
//
// launch  grid (ceil(layers * width / 128), batch), block 128
// work    a thread owns one column of one layer: nobody else reads or writes it, so no barrier is needed. It reads 16 rows
//         into registers before it writes them; accepted[k] >= k, so a later sixteen never reads what an earlier one wrote
// order   none: a copy; no rotation, for a node's position is start + its depth, and k is its depth
// bytes   8 * batch * layers * width * (n_accepted - 1)
#include "common.cuh"

#define BATCH_ROWS 16

extern "C" __global__ void __launch_bounds__(128)
    compact_cache(float* cache, const int* starts, const int* accepted, const int* n_accepted, int layers, int sequences,
                  int capacity, int width, int horizon) {
  const int i = blockIdx.x * 128 + threadIdx.x, b = blockIdx.y, count = n_accepted[b];
  if (i >= layers * width) return;
  float* rows = cache + (((i64)(i / width) * sequences + b) * capacity + starts[b]) * width + i % width;
  const int* from = accepted + b * (horizon + 1);
  for (int k = 1; k < count; k += BATCH_ROWS) {  // row 0 is the root: it stands where it belongs
    float v[BATCH_ROWS];
#pragma unroll
    for (int j = 0; j < BATCH_ROWS; ++j)
      if (k + j < count) v[j] = rows[(i64)from[k + j] * width];
#pragma unroll
    for (int j = 0; j < BATCH_ROWS; ++j)
      if (k + j < count) rows[(i64)(k + j) * width] = v[j];
  }
}

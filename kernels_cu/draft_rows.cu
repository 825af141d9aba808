// draft_rows.cu: the drafter's block of each request, the root and L masks behind it (rule 21).
//
// in   starts int32 [batch], roots int32 [batch]
// out  tokens    int32 [batch, block]     root, mask_id, mask_id, ...; block = L + 1
//      positions int32 [batch, block]     start .. start + L: the cache row too
//      slots     int32 [batch, block]     the request
//      last      int32 [batch, block]     start + L: every row of a block sees the whole block
//
// launch  grid (ceil(batch * block / 128)), block 128; one row a thread
// order   integers only
// bytes   16 * batch * block
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
    draft_rows(const int* starts, const int* roots, int* tokens, int* positions, int* slots, int* last, int batch, int block,
               int mask_id) {
  const int row = blockIdx.x * 128 + threadIdx.x;
  if (row >= batch * block) return;
  const int b = row / block, j = row % block, start = starts[b];
  tokens[row] = j ? mask_id : roots[b];
  positions[row] = start + j;
  slots[row] = b;
  last[row] = start + block - 1;
}

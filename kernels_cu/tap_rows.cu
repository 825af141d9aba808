// tap_rows.cu: copies a layer's output into its columns of the drafter's features (rule 21).
//
// in   hidden float32 [rows, n]
// out  taps   float32 [rows, taps_row]      columns column .. column + n - 1 are written, the rest kept
//
// launch  grid (ceil(n / 128), rows), block 128; one element a thread
// order   none: a copy
// bytes   8 * rows * n
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128) tap_rows(const float* hidden, float* taps, int n, i64 column, i64 taps_row) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i < n) taps[blockIdx.y * taps_row + column + i] = hidden[(i64)blockIdx.y * n + i];
}

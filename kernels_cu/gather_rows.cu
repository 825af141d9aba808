// gather_rows.cu: chosen rows of each request, such as the features of the accepted nodes (rule 21).
//
// in   src   float32 [batch, rows_in, n]
//      index int32 [batch, rows_out]         0 <= index < rows_in
// out  out   float32 [batch, rows_out, n]    out[b, j] = src[b, index[b, j]]
//
// launch  grid (ceil(n / 128), batch * rows_out), block 128; one element a thread
// order   none: a copy
// bytes   8 * batch * rows_out * n
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
    gather_rows(const float* src, const int* index, float* out, int rows_in, int rows_out, int n) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  const i64 row = blockIdx.y, from = row / rows_out * rows_in + index[row];
  if (i < n) out[row * n + i] = src[from * n + i];
}

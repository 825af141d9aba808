// swiglu.cu: h = SiLU(gate) * up, gate and up side by side in one row (rule 12).
//
// in   gate_up float32 [rows, 2 n]: gate in the first n columns, up in the last n
// out  h       float32 [rows, n]
//
// launch  grid (ceil(n / 128), rows), block 128; one element a thread
// order   none
// bytes   12 * rows * n
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128) swiglu(const float* gate_up, float* h, int n) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= n) return;
  const float* row = gate_up + (i64)blockIdx.y * 2 * n;
  h[(i64)blockIdx.y * n + i] = exact_silu(row[i]) * row[n + i];
}

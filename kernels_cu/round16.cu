// round16.cu: y = x in bf16, rounded (tier bf16): rows that a product is to read, made elsewhere in float32.
//
// in   x float32 [n]
// out  y bf16 [n]
//
// launch  grid (ceil(n / 128)), block 128; one element a thread
// order   none
// bytes   6 n
#include "mma.cuh"

extern "C" __global__ void __launch_bounds__(128) round16(const float* x, bf16* y, i64 n) {
  const i64 i = (i64)blockIdx.x * 128 + threadIdx.x;
  wait_for_inputs();
  start_dependents();
  if (i < n) y[i] = round_bf16(x[i]);
}

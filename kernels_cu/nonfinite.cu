// nonfinite.cu: where a tensor first stops being finite; used to name the tensor when a run has failed.
//
// in   x     float32 [n]
// out  first uint64 [1]      smallest index of a NaN or an infinity; unchanged if there is none
//
// launch  grid (min(ceil(n / 128), 1024)), block 128; strided
// order   atomicMin on integers: the same in any order
// bytes   4 * n
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128) nonfinite(const float* x, u64* first, i64 n) {
  for (i64 i = (i64)blockIdx.x * 128 + threadIdx.x; i < n; i += (i64)gridDim.x * 128)
    if (!is_finite(x[i])) atomicMin(first, (u64)i);
}

// rmsnorm.cu: y = (x * r) * weight with r = 1 / sqrt(mean(x * x) + eps), row by row (rule 8).
//
// in   x float32 [rows, n], row stride x_row; weight float32 [n]
// out  y float32 [rows, n], row stride y_row
//
// launch  grid (rows), block 128; lane t of 128 owns quads t, t + 128, ...
// order   sum128, then one division, one square root, one division
// bytes   4 * rows * 3 n (x twice, the second time from cache) + 4 n
#include "rmsnorm.cuh"

extern "C" __global__ void __launch_bounds__(128)
    rmsnorm(const float* x, const float* weight, float* y, int n, float eps, i64 x_row, i64 y_row) {
  __shared__ float part[4];
  x += (i64)blockIdx.x * x_row;
  y += (i64)blockIdx.x * y_row;
  norm_any(x, weight, y, n, eps, x_row | y_row, part);
}

// matmul_warp.cu: y = x W^T (+ bias) (+ residual), one warp for R outputs of M rows; matmul.cuh has the contract.
//
// launch  grid (ceil(n / (4 R)), ceil(rows / M), heads), block 128: four warps side by side
// order   sum128 by four accumulators a lane; bytes as in matmul.cuh
#include "matmul.cuh"

MATMUL(matmul_w1_m1_r4, float, 1, 1, one_warp<1, 4, VEC>)
MATMUL(matmul_w1_m4_r2, float, 1, 4, one_warp<4, 2, VEC>)
MATMUL(matmul_w1_m16_r1, float, 1, 16, one_warp<16, 1, VEC>)

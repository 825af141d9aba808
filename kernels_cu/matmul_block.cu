// matmul_block.cu: y = x W^T (+ bias) (+ residual), four warps for R outputs of M rows; matmul.cuh has the contract.
//
// launch  grid (ceil(n / R), ceil(rows / M), heads), block 128: warp g is group g of the sum
// order   sum128 by one accumulator a lane; bytes as in matmul.cuh
//
// On few outputs or a long k this fills the machine with fewer output rows than a warp each would.
#include "matmul.cuh"

MATMUL(matmul_w4_m1_r1, four_warps, 1, 1)
MATMUL(matmul_w4_m1_r2, four_warps, 1, 2)
MATMUL(matmul_w4_m1_r4, four_warps, 1, 4)
MATMUL(matmul_w4_m4_r4, four_warps, 4, 4)
MATMUL(matmul_w4_m8_r4, four_warps, 8, 4)
MATMUL(matmul_w4_m8_r8, four_warps, 8, 8)
MATMUL(matmul_w4_m16_r2, four_warps, 16, 2)
MATMUL(matmul_w4_m16_r4, four_warps, 16, 4)

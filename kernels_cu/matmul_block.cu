// matmul_block.cu: y = x W^T (+ bias) (+ residual), four warps for R outputs of M rows; matmul.cuh has the contract.
//
// launch  grid (ceil(n / (R G)), ceil(rows / M), heads), block (128, G): warp g of a team is group g of the sum
// order   sum128 by one accumulator a lane; bytes as in matmul.cuh
//
// On few outputs or a long k this fills the machine with fewer output rows than a warp each would. Sixteen rows of a long
// k no longer fit in the first-level cache: two teams walk them together (250 us against 298 for one team and 397 for
// four at n = 7168, k = 18432 on an H200).
#include "matmul.cuh"

MATMUL(matmul_w4_m1_r1, float, 1, 1, four_warps<1, 1, VEC, 1>)
MATMUL(matmul_w4_m1_r4, float, 1, 1, four_warps<1, 4, VEC, 1>)
MATMUL(matmul_w4_m4_r4, float, 1, 4, four_warps<4, 4, VEC, 1>)
MATMUL(matmul_w4_m8_r4, float, 1, 8, four_warps<8, 4, VEC, 1>)
MATMUL(matmul_w4_m16_r4_g2, float, 2, 16, four_warps<16, 4, VEC, 2>)

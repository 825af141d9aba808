// matmul_int4.cu: y = x W^T (+ bias) (+ residual) for weights in 4 bits, as compressed-tensors packs them; matmul.cuh has the contract.
//
// launch  one warp a dot (w1): grid (ceil(n / (4 R)), ceil(rows / M), 1), block 128; four (w4): grid (ceil(n / (R G)),
//         ceil(rows / M), 1), block (128, G)
// order   sum128 of x * (float(q) * scale), each product rounded; bytes as in matmul.cuh, 1/2 a weight and a scale a group
#include "matmul.cuh"

INT4_MATMUL(matmul_int4_w1_m1_r4, 1, 1, one_warp<1, 4, VEC>)
INT4_MATMUL(matmul_int4_w1_m4_r2, 1, 4, one_warp<4, 2, VEC>)
INT4_MATMUL(matmul_int4_w1_m16_r1, 1, 16, one_warp<16, 1, VEC>)
INT4_MATMUL(matmul_int4_w4_m1_r1, 1, 1, four_warps<1, 1, VEC, 1>)
INT4_MATMUL(matmul_int4_w4_m1_r4, 1, 1, four_warps<1, 4, VEC, 1>)
INT4_MATMUL(matmul_int4_w4_m4_r4, 1, 4, four_warps<4, 4, VEC, 1>)
INT4_MATMUL(matmul_int4_w4_m8_r4, 1, 8, four_warps<8, 4, VEC, 1>)
INT4_MATMUL(matmul_int4_w4_m16_r4_g2, 2, 16, four_warps<16, 4, VEC, 2>)

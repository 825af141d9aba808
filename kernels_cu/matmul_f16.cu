// matmul_f16.cu: y = x W^T (+ bias) (+ residual) for weights in fp16, widened in registers; matmul.cuh has the contract.
//
// launch  one warp a dot (w1): grid (ceil(n / (4 R)), ceil(rows / M), heads), block 128; four (w4): grid (ceil(n / (R G)),
//         ceil(rows / M), heads), block (128, G)
// order   sum128 of x * widen(w); bytes as in matmul.cuh, 2 a weight
#include "matmul.cuh"

MATMUL(matmul_f16_w1_m1_r4, f16, 1, 1, one_warp<1, 4, VEC>)
MATMUL(matmul_f16_w1_m4_r2, f16, 1, 4, one_warp<4, 2, VEC>)
MATMUL(matmul_f16_w1_m16_r1, f16, 1, 16, one_warp<16, 1, VEC>)
MATMUL(matmul_f16_w4_m1_r1, f16, 1, 1, four_warps<1, 1, VEC, 1>)
MATMUL(matmul_f16_w4_m1_r4, f16, 1, 1, four_warps<1, 4, VEC, 1>)
MATMUL(matmul_f16_w4_m4_r4, f16, 1, 4, four_warps<4, 4, VEC, 1>)
MATMUL(matmul_f16_w4_m8_r4, f16, 1, 8, four_warps<8, 4, VEC, 1>)
MATMUL(matmul_f16_w4_m16_r4_g2, f16, 2, 16, four_warps<16, 4, VEC, 2>)

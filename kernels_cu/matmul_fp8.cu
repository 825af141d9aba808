// matmul_fp8.cu: y = x W^T (+ bias) (+ residual) for weights in e4m3, scaled in blocks as DeepSeek-V3's; matmul.cuh has the contract.
//
// launch  one warp a dot (w1): grid (ceil(n / (4 R)), ceil(rows / M), 1), block 128; four (w4): grid (ceil(n / (R G)),
//         ceil(rows / M), 1), block (128, G)
// order   sum128 of x * (float(e4m3) * scale), each product rounded; bytes as in matmul.cuh, 1 a weight and a scale a block
#include "matmul.cuh"

FP8_MATMUL(matmul_fp8_w1_m1_r4, 1, 1, one_warp<1, 4, VEC>)
FP8_MATMUL(matmul_fp8_w1_m4_r2, 1, 4, one_warp<4, 2, VEC>)
FP8_MATMUL(matmul_fp8_w1_m16_r1, 1, 16, one_warp<16, 1, VEC>)
FP8_MATMUL(matmul_fp8_w4_m1_r1, 1, 1, four_warps<1, 1, VEC, 1>)
FP8_MATMUL(matmul_fp8_w4_m1_r4, 1, 1, four_warps<1, 4, VEC, 1>)
FP8_MATMUL(matmul_fp8_w4_m4_r4, 1, 4, four_warps<4, 4, VEC, 1>)
FP8_MATMUL(matmul_fp8_w4_m8_r4, 1, 8, four_warps<8, 4, VEC, 1>)
FP8_MATMUL(matmul_fp8_w4_m16_r4_g2, 2, 16, four_warps<16, 4, VEC, 2>)
